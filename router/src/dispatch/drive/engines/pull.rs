//! Two legs of which the second fetches from the first: the prompt on one engine, then the answer on another, within the lease of
//! the first one's blocks. With Baton's connector the second is sent as soon as there is a first block to fetch.

use std::time::Duration;

use baton_protocol::card::Split;
use baton_protocol::failure::HandoffFailure;
use baton_protocol::ids::OperationId;
use baton_protocol::lifecycle::State;
use baton_protocol::wire;
use baton_protocol::wire::worker_client::WorkerClient;
use serde_json::{Map, Value};
use tonic::transport::Channel;
use tracing::debug;

use super::super::{Drive, Ending};
use super::beside::Beside;
use super::prefill::Outcome;
use super::relay::first_event;
use super::{Call, OnEngines, Stop};
use crate::dispatch::fetched::Fetch;
use crate::dispatch::http::engine::Engine;
use crate::dispatch::http::lease::Lease;
use crate::dispatch::http::verdict::{Asked, handoff, of_call};
use crate::dispatch::progress::Party;
use crate::forward::Forward;
use crate::forward::legs::Leg as Body;

/// What says first how the KV is fetched.
enum First {
    /// The engine, once the prompt is computed.
    Answer(Outcome),
    /// The daemon beside it, while it is.
    Daemon(String),
}

impl Drive {
    pub(super) async fn pull(
        &mut self,
        forward: &Forward,
        attempt: &mut OnEngines,
        source: &Engine,
        (prefill, decode): (&Party, &Party),
        lease: Duration,
    ) -> Result<Ending, Stop> {
        // Only Baton's connector has blocks that can be fetched before the last one is computed.
        let daemon = attempt.daemon.take();
        let daemon = daemon.filter(|_| matches!(source.split, Split::Baton { .. }));
        let call = Call {
            engine: source,
            party: prefill,
            asked: Asked::Prefill,
            body: match daemon {
                Some(_) => Body::Announced,
                None => Body::Prefill,
            },
            // Its own.
            limit: None,
        };
        let mut computing = self.computing(forward, attempt, call)?;
        let asking = async {
            match daemon {
                Some(daemon) => told(daemon, &prefill.operation).await,
                None => None,
            }
        };
        let first = async {
            tokio::select! {
                // Looked at first, so sent first: what is asked for is then on its way.
                biased;
                outcome = computing.leg() => First::Answer(outcome),
                Some(parameters) = asking => First::Daemon(parameters),
            }
        };
        let first = self.within(None, first).await;
        match first.map_err(|stopped| self.stopped(stopped, call))? {
            First::Answer(outcome) => {
                let (parameters, answered) = self.computed(outcome, &computing)?;
                let lease = Lease::new(answered, lease);
                self.is_still_held(attempt, lease, (prefill, decode))?;
                self.fetching(forward, attempt, decode, &parameters).await
            }
            First::Daemon(parameters) => {
                // Its first block is computed, and the other engine is sent to fetch it now. The lease is kept until that one has
                // claimed it.
                self.infer(&[State::PrefillStarted], prefill);
                self.infer(&[State::KvTransferStarted], decode);
                attempt.beside = Some(Beside::Computing(Box::new(computing)));
                self.fetching(forward, attempt, decode, &parameters).await
            }
        }
    }

    /// Placement has asked this before the first leg; it took longer than estimated where the answer is another one now.
    fn is_still_held(
        &self,
        attempt: &OnEngines,
        lease: Lease,
        (prefill, decode): (&Party, &Party),
    ) -> Result<(), Stop> {
        let now = self.shared.clock.now();
        if lease.allows(now, attempt.called.room_at.since(now)) {
            return Ok(());
        }
        let worker = &prefill.worker;
        let message = format!(
            "worker {worker} keeps its blocks for {:.1} s more, and worker {} is not expected to fetch them by then",
            lease.left(now).as_secs_f64(),
            decode.worker
        );
        Err(Stop::Failed(handoff(
            worker,
            HandoffFailure::LeaseGone,
            &message,
        )))
    }

    /// The second leg.
    async fn fetching(
        &mut self,
        forward: &Forward,
        attempt: &mut OnEngines,
        decode: &Party,
        parameters: &str,
    ) -> Result<Ending, Stop> {
        let limit = first_event(Asked::Decode, &attempt.limits);
        let target = attempt.called.decode.clone();
        let call = Call {
            engine: &target,
            party: decode,
            asked: Asked::Decode,
            body: Body::Decode { parameters },
            limit: forward.stream.then_some(limit),
        };
        let link = attempt.link.as_ref().map(|(link, _)| link.clone());
        self.progress.actual.fetch = Fetch::begins(&self.shared.workers, &decode.worker, link);
        let calling = self.calling(forward, attempt, call)?;
        let answer = self
            .within_both(attempt, call, call.limit, calling)
            .await?
            .map_err(|error| Stop::Failed(of_call(&target.worker, call.asked, &error)))?;
        self.relay(answer, call, attempt).await
    }
}

/// How the KV of an operation is fetched, as the daemon beside the engine tells it once there is something to fetch. `None`: it does not;
/// the engine's answer will say why.
async fn told(mut daemon: WorkerClient<Channel>, operation: &OperationId) -> Option<String> {
    let request = wire::ParametersRequest {
        operation: operation.to_string(),
    };
    let told = match daemon.parameters(request).await {
        Ok(reply) => reply.into_inner().json,
        Err(status) => {
            debug!(%operation, code = %status.code(), "not told before the answer: {}", status.message());
            return None;
        }
    };
    // It becomes a part of another body.
    let object = serde_json::from_str::<Map<String, Value>>(&told);
    object
        .inspect_err(|error| debug!(%operation, %error, "what the daemon tells is no object"))
        .ok()?;
    Some(told)
}

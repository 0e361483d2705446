//! Two legs of which the second fetches from the first: the prompt on one engine, then the answer on another, within the lease of
//! the first one's blocks.

use std::time::Duration;

use baton_protocol::card::Split;
use baton_protocol::failure::{FailureClass, HandoffFailure, Refusal};
use baton_protocol::lifecycle::State;

use super::super::{Drive, Ending};
use super::relay::LONGEST_REFUSAL;
use super::{Call, OnEngines, Stop};
use crate::dispatch::failure::Failure;
use crate::dispatch::fetched::Fetch;
use crate::dispatch::http::answer::said;
use crate::dispatch::http::engine::{Engine, head};
use crate::dispatch::http::lease::Lease;
use crate::dispatch::http::verdict::{Asked, handoff};
use crate::dispatch::progress::{Party, StateDetail};
use crate::forward::Forward;
use crate::forward::legs::Leg as Body;

/// Bytes of a prefill worker's answer: one token, and the blocks of a prompt of a million.
const LONGEST_ANSWER: usize = 16 << 20;

impl Drive {
    pub(super) async fn pull(
        &mut self,
        forward: &Forward,
        attempt: &mut OnEngines,
        source: &Engine,
        (prefill, decode): (&Party, &Party),
        lease: Duration,
    ) -> Result<Ending, Stop> {
        let (parameters, lease) = self
            .compute_for_another(forward, attempt, source, prefill, lease)
            .await?;
        let now = self.shared.clock.now();
        // Placement has asked this before the first leg; it took longer than estimated where the answer is another one now.
        if !lease.allows(now, attempt.called.room_at.since(now)) {
            let worker = &prefill.worker;
            let message = format!(
                "worker {worker} keeps its blocks for {:.1} s more, and worker {} is not expected to fetch them by then",
                lease.left(now).as_secs_f64(),
                decode.worker
            );
            return Err(Stop::Failed(handoff(
                worker,
                HandoffFailure::LeaseGone,
                &message,
            )));
        }
        let limits = attempt.limits;
        let target = attempt.called.decode.clone();
        let call = Call {
            engine: &target,
            party: decode,
            asked: Asked::Decode,
            body: Body::Decode {
                parameters: &parameters,
            },
            limit: forward
                .stream
                .then_some(limits.reserve + limits.transfer + limits.decode_start),
        };
        let link = attempt.link.as_ref().map(|(link, _)| link.clone());
        self.progress.actual.fetch = Fetch::begins(&self.shared.workers, &decode.worker, link);
        let answer = self.call(forward, attempt, call).await?;
        self.relay(answer, call, attempt).await
    }

    /// The first leg: how the KV is fetched, and until when.
    async fn compute_for_another(
        &mut self,
        forward: &Forward,
        attempt: &mut OnEngines,
        engine: &Engine,
        party: &Party,
        lease: Duration,
    ) -> Result<(String, Lease), Stop> {
        let limits = attempt.limits;
        let call = Call {
            engine,
            party,
            asked: Asked::Prefill,
            body: Body::Prefill,
            limit: Some(limits.prefill_start + limits.prefill),
        };
        let began = self.shared.clock.now();
        self.trace.prefill_opened(began);
        let mut answer = self.call(forward, attempt, call).await?;
        let answered = self.shared.clock.now();
        let head = head(&answer.head);
        if !head.status.is_success() {
            return Err(self.refused(answer, head, call, limits.token).await);
        }
        let body = self
            .within(
                Some(limits.prefill),
                answer.whole(LONGEST_REFUSAL.max(LONGEST_ANSWER)),
            )
            .await
            .map_err(|stopped| self.stopped(stopped, call))?
            .map_err(|why| {
                Stop::Failed(Failure::lost(
                    &engine.worker,
                    &why,
                    FailureClass::PrefillLost,
                ))
            })?;
        let said = said(&body);
        let Some(parameters) = said.transfer else {
            return Err(Stop::Failed(kept_nothing(engine)));
        };
        self.infer(&[State::PrefillStarted], party);
        for state in [State::PrefillCompleted, State::KvPublished] {
            let detail = StateDetail::of(party);
            self.progress.observe(state, answered, detail);
        }
        let took = self.shared.clock.now().milliseconds_since(began);
        // Its wait in the engine's line included: engines do not tell them apart.
        self.progress.actual.prefill = Some(took);
        if let Some(cached) = said.counts.and_then(|counts| counts.cached) {
            self.progress.found_cached(cached);
        }
        Ok((parameters, Lease::new(answered, lease)))
    }
}

/// It has answered, and kept nothing for a reader: of this request, which says nothing of the way to others. Of Baton's connector the answer
/// does not say why.
fn kept_nothing(engine: &Engine) -> Failure {
    let worker = &engine.worker;
    let (cause, why) = match engine.split {
        // Its daemon registers no server that has not the connector.
        Split::Baton { .. } => (
            Refusal::PoolFull.word(),
            "its staging had no room (kvPool.blocks of its pool), its engine preempted the prompt or cleared its cache, its daemon was lost or did not answer within 0.5 s, or BatonConnector does not hand over a request like this",
        ),
        _ => (
            HandoffFailure::NoTransport.word(),
            "start its engine with the connector that its card names",
        ),
    };
    let message = format!(
        "the hand-off failed ({cause}): worker {worker} answered without kv_transfer_params: {why}"
    );
    Failure {
        cause,
        ..Failure::new(FailureClass::HandoffFailed, message)
    }
    .at(worker)
}

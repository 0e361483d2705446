//! The leg that computes a prompt for another engine, to its end: a future of its own, so that the other leg may go on beside it.

use baton_protocol::card::Split;
use baton_protocol::failure::{FailureClass, HandoffFailure, Refusal};
use baton_protocol::lifecycle::State;
use futures::future::BoxFuture;
use tokio::time::timeout;

use super::super::Drive;
use super::relay::LONGEST_REFUSAL;
use super::{Call, OnEngines, Stop, late};
use crate::clock::Moment;
use crate::dispatch::failure::Failure;
use crate::dispatch::http::answer::said;
use crate::dispatch::http::engine::{Engine, head};
use crate::dispatch::http::pool::CallError;
use crate::dispatch::http::verdict::{Asked, Verdict, of_call, of_refusal};
use crate::dispatch::progress::{Party, StateDetail};
use crate::forward::Forward;
use crate::run::EngineRefusal;

/// Bytes of a prefill worker's answer: one token, and the blocks of a prompt of a million.
const LONGEST_ANSWER: usize = 16 << 20;

/// The leg under way.
pub(super) struct Computing {
    engine: Engine,
    party: Party,
    began: Moment,
    leg: BoxFuture<'static, Outcome>,
}

pub(super) type Outcome = Result<Answered, Lost>;

/// What the engine has answered.
pub(super) struct Answered {
    /// `kv_transfer_params`, JSON as it was written.
    parameters: Option<String>,
    cached: Option<u32>,
    /// Its head was here.
    at: Moment,
    /// All of it was.
    ended: Moment,
}

/// Why it has answered nothing.
pub(super) enum Lost {
    Call(CallError),
    /// It took longer than the policy allows.
    Late,
    Refused(EngineRefusal),
    /// It refused, and in which words could not be read.
    Unread(String),
    Broken(String),
}

impl Computing {
    /// Ends once; cancel-safe until then.
    pub(super) fn leg(&mut self) -> &mut BoxFuture<'static, Outcome> {
        &mut self.leg
    }
}

impl Drive {
    /// A leg that is sent when it is first waited for, and keeps the policy's limits by itself. Dropping it ends it.
    pub(super) fn computing(
        &mut self,
        forward: &Forward,
        attempt: &OnEngines,
        call: Call<'_>,
    ) -> Result<Computing, Stop> {
        let began = self.shared.clock.now();
        self.trace.prefill_opened(began);
        let calling = self.calling(forward, attempt, call)?;
        let (limits, clock) = (attempt.limits, self.shared.clock);
        let leg = Box::pin(async move {
            let called = timeout(limits.prefill_start + limits.prefill, calling).await;
            let mut answer = called.map_err(|_| Lost::Late)?.map_err(Lost::Call)?;
            let at = clock.now();
            let head = head(&answer.head);
            if !head.status.is_success() {
                let body = timeout(limits.token, answer.whole(LONGEST_REFUSAL)).await;
                let body = body.map_err(|_| Lost::Late)?.map_err(Lost::Unread)?;
                return Err(Lost::Refused(EngineRefusal { head, body }));
            }
            let longest = LONGEST_REFUSAL.max(LONGEST_ANSWER);
            let body = timeout(limits.prefill, answer.whole(longest)).await;
            let body = body.map_err(|_| Lost::Late)?.map_err(Lost::Broken)?;
            let said = said(&body);
            Ok(Answered {
                parameters: said.transfer,
                cached: said.counts.and_then(|counts| counts.cached),
                at,
                ended: clock.now(),
            })
        });
        Ok(Computing {
            engine: call.engine.clone(),
            party: call.party.clone(),
            began,
            leg,
        })
    }

    /// Enters the end of the leg into what is known of the run. How the KV is fetched, and when the answer came.
    ///
    /// # Errors
    /// It has ended otherwise.
    pub(super) fn computed(
        &mut self,
        outcome: Outcome,
        computing: &Computing,
    ) -> Result<(String, Moment), Stop> {
        let Computing {
            engine,
            party,
            began,
            ..
        } = computing;
        let worker = &engine.worker;
        let answered = outcome.map_err(|lost| match lost {
            Lost::Call(error) => Stop::Failed(of_call(worker, Asked::Prefill, &error)),
            Lost::Late => Stop::Failed(late(worker, Asked::Prefill)),
            Lost::Refused(refusal) => match of_refusal(worker, Asked::Prefill, refusal) {
                Verdict::Failed(failure) => Stop::Failed(failure),
                Verdict::AskWhole(failure) => Stop::AskWhole(failure),
            },
            Lost::Unread(why) => {
                Stop::Failed(Failure::lost(worker, &why, FailureClass::DecodeLost))
            }
            Lost::Broken(why) => {
                Stop::Failed(Failure::lost(worker, &why, FailureClass::PrefillLost))
            }
        })?;
        let Some(parameters) = answered.parameters else {
            return Err(Stop::Failed(kept_nothing(engine)));
        };
        self.infer(&[State::PrefillStarted], party);
        for state in [State::PrefillCompleted, State::KvPublished] {
            // An answer that has begun before has proven them.
            if !self.progress.heard_of(state) {
                let detail = StateDetail::of(party);
                self.progress.observe(state, answered.at, detail);
            }
        }
        // Its wait in the engine's line included: engines do not tell them apart.
        self.progress.actual.prefill = Some(answered.ended.milliseconds_since(*began));
        if let Some(cached) = answered.cached {
            self.progress.prefill_found_cached(cached);
        }
        Ok((parameters, answered.at))
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

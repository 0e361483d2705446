//! Two legs under way at once: the answer is waited for, and the other leg is heard beside it.

use std::time::Duration;

use futures::future::BoxFuture;
use tokio::time::{Instant, timeout_at};
use tracing::{debug, info};

use super::super::Drive;
use super::prefill::{Computing, Outcome};
use super::{Call, OnEngines, Stop};
use crate::dispatch::failure::Failure;

/// How long a prompt is still computed for an answer that has begun without it: the first leg's answer may come a moment after its last
/// block. Longer, and it is computed for nobody: the engine that generates had it, or computes it itself.
const UNNEEDED: Duration = Duration::from_secs(1);

/// The leg that no client hears of.
pub(super) enum Beside {
    /// Of two that are tied: it ends, or says why it has failed.
    Tied(BoxFuture<'static, Result<(), Failure>>),
    /// It computes the prompt, whose blocks the other one reads as they come.
    Computing(Box<Computing>),
}

/// How it has ended.
enum Ended {
    Tied(Result<(), Failure>),
    Computing(Outcome),
    /// Nobody needs it any more.
    Unneeded,
}

impl Beside {
    /// Ends once; cancel-safe until then. `begun`: since when the client reads the answer.
    async fn ended(&mut self, begun: Option<Instant>) -> Ended {
        match (self, begun) {
            (Self::Tied(leg), _) => Ended::Tied(leg.await),
            (Self::Computing(computing), None) => Ended::Computing(computing.leg().await),
            (Self::Computing(computing), Some(begun)) => {
                let ended = timeout_at(begun + UNNEEDED, computing.leg()).await;
                ended.map_or(Ended::Unneeded, Ended::Computing)
            }
        }
    }
}

impl OnEngines {
    /// Nothing is to be expected of the leg that generates yet. What the client has begun to read stands on its own.
    pub(super) fn awaits_prompt(&self) -> bool {
        self.begun.is_none() && matches!(self.beside, Some(Beside::Computing(_)))
    }
}

impl Drive {
    /// As [`Self::within`], unless the other leg fails before. The limit begins when the prompt is computed, where that is under way.
    pub(super) async fn within_both<T>(
        &mut self,
        attempt: &mut OnEngines,
        call: Call<'_>,
        limit: Option<Duration>,
        wanted: impl Future<Output = T>,
    ) -> Result<T, Stop> {
        tokio::pin!(wanted);
        let mut until = limit.map(|limit| Instant::now() + limit);
        loop {
            let awaits_prompt = attempt.awaits_prompt();
            let left = until.filter(|_| !awaits_prompt);
            let left = left.map(|until| until.saturating_duration_since(Instant::now()));
            let begun = attempt.begun;
            let Some(beside) = &mut attempt.beside else {
                let got = self.within(left, wanted).await;
                return got.map_err(|stopped| self.stopped(stopped, call));
            };
            let ended = tokio::select! {
                biased;
                ended = beside.ended(begun) => ended,
                got = self.within(left, wanted.as_mut()) => {
                    return got.map_err(|stopped| self.stopped(stopped, call));
                }
            };
            match (ended, attempt.beside.take()) {
                (Ended::Computing(outcome), Some(Beside::Computing(computing))) => {
                    self.computed_beside(outcome, &computing, attempt)?;
                }
                (Ended::Tied(Err(failure)), _) => return Err(Stop::Failed(failure)),
                // Dropped with this, so that its engine is told.
                (Ended::Unneeded, Some(Beside::Computing(_))) => {
                    debug!("the answer has begun without the prompt's leg, which is dropped");
                }
                _ => {}
            }
            if awaits_prompt {
                let now = Instant::now();
                attempt.computed = Some(now);
                until = limit.map(|limit| now + limit);
            }
        }
    }

    /// The prompt that is read as it comes was computed, or is not any more.
    fn computed_beside(
        &mut self,
        outcome: Outcome,
        computing: &Computing,
        attempt: &OnEngines,
    ) -> Result<(), Stop> {
        let Err(stop) = self.computed(outcome, computing) else {
            return Ok(());
        };
        // What the engine that reads counts of it says nothing of the way between the two.
        self.excuse_link();
        if attempt.begun.is_some() {
            // It has the KV, or has computed the prompt itself: its answer is right either way.
            if let Stop::Failed(failure) | Stop::AskWhole(failure) = &stop {
                info!(
                    cause = failure.cause,
                    "{}; the answer goes on", failure.message
                );
            }
            return Ok(());
        }
        Err(stop)
    }
}

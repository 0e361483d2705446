//! A failure of an attempt: its class, the word that records and metrics show, and the sentence that people read.

use std::str::FromStr;
use std::time::Duration;

use baton_protocol::failure::{Action, FailureClass, HandoffFailure, Refusal};
use baton_protocol::ids::WorkerId;
use baton_protocol::wire;

use super::decide::RESUMES;
use crate::run::EngineRefusal;

/// Why an attempt ended without a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub class: FailureClass,
    /// One word of a bounded set: a refusal, a hand-off failure or a class.
    pub cause: &'static str,
    pub message: String,
    /// The worker that is at fault, if one is: the next plan avoids it.
    pub worker: Option<WorkerId>,
    /// How soon its worker expects to have room.
    pub retry_after: Option<Duration>,
    /// What an engine said to the client's request: its client gets it as it is, where the run ends by this.
    pub engine: Option<Box<EngineRefusal>>,
    /// The engine has said so in the stream that the client reads.
    pub told: bool,
}

impl Failure {
    pub fn new(class: FailureClass, message: impl Into<String>) -> Self {
        Self {
            class,
            cause: class.word(),
            message: message.into(),
            worker: None,
            retry_after: None,
            engine: None,
            told: false,
        }
    }

    #[must_use]
    pub fn at(mut self, worker: &WorkerId) -> Self {
        self.worker = Some(worker.clone());
        self
    }

    /// The run ends by it: says what bounds attempts, and what to do.
    #[must_use]
    pub fn last(mut self) -> Self {
        let bound = match self.class.action() {
            Action::Replan | Action::RecomputeLocally => {
                "the policy allows no further attempt (fallback.replans, fallback.localRecompute, timeouts.totalSeconds)".to_owned()
            }
            Action::Resume => format!(
                "a run goes on elsewhere at most {RESUMES} times, and within timeouts.totalSeconds"
            ),
            Action::BackOff => {
                "no worker took it within timeouts.reserveSeconds and timeouts.totalSeconds".to_owned()
            }
            Action::CancelEverywhere | Action::Refuse | Action::FailRun => return self,
        };
        self.message = format!("{}; {bound}: send the request again", self.message);
        self
    }

    /// A worker said no before it began.
    pub fn refused(worker: &WorkerId, refused: &wire::Refused) -> Self {
        // A word of a later version is taken for "not now": another worker may know better.
        let (class, cause) = Refusal::from_str(&refused.reason)
            .map_or((FailureClass::NoWorker, "refused"), |refusal| {
                (refusal.class(), refusal.word())
            });
        Self {
            class,
            cause,
            message: format!("worker {worker} refused: {}", refused.message),
            worker: Some(worker.clone()),
            retry_after: (refused.retry_after_milliseconds > 0)
                .then(|| Duration::from_millis(refused.retry_after_milliseconds)),
            engine: None,
            told: false,
        }
    }

    /// A worker began and gave up. `lost` is the class of losing it in this role.
    pub fn failed(worker: &WorkerId, failed: &wire::Failed, lost: FailureClass) -> Self {
        let class = match FailureClass::from_str(&failed.class) {
            // The worker's own mistake costs this attempt, not the run.
            Err(_) | Ok(FailureClass::Bug) => lost,
            Ok(class) => class,
        };
        Self::new(class, format!("worker {worker} failed: {}", failed.message)).at(worker)
    }

    /// A stream broke, or ended before its work did.
    pub fn lost(worker: &WorkerId, reason: &str, lost: FailureClass) -> Self {
        Self::new(lost, format!("worker {worker} was lost: {reason}")).at(worker)
    }

    /// The reader gave the hand-off up.
    pub fn handoff(source: &WorkerId, cause: HandoffFailure, message: &str) -> Self {
        Self {
            class: FailureClass::HandoffFailed,
            cause: cause.word(),
            message: format!("the hand-off from worker {source} failed ({cause}): {message}"),
            worker: Some(source.clone()),
            retry_after: None,
            engine: None,
            told: false,
        }
    }
}

/// Reads the cause of a failed transfer; a word of a later version is a protocol error.
pub fn handoff_cause(word: &str) -> HandoffFailure {
    word.parse().unwrap_or(HandoffFailure::ProtocolError)
}

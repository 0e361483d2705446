//! What it means that an engine gave no answer, by what was asked of it. Total over legs and statuses.

use std::time::Duration;

use baton_protocol::failure::{FailureClass, HandoffFailure};
use baton_protocol::ids::WorkerId;
use http::header::RETRY_AFTER;

use super::answer::said;
use super::pool::CallError;
use crate::dispatch::failure::Failure;
use crate::run::EngineRefusal;

/// What was asked of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The whole answer.
    Whole,
    /// A prompt, for another engine.
    Prefill,
    /// An answer from another engine's KV.
    Decode,
    /// The client's own request, by two engines at once: the one that computes.
    TiedPrefill,
    /// And the one that generates.
    TiedDecode,
}

impl Asked {
    /// The class of losing the engine.
    fn lost(self) -> FailureClass {
        match self {
            Self::Whole | Self::Decode | Self::TiedDecode => FailureClass::DecodeLost,
            Self::Prefill | Self::TiedPrefill => FailureClass::PrefillLost,
        }
    }
}

/// What is to be done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Failed(Failure),
    /// The engine found fault with a request that was changed to be split: what it says of the client's own decides.
    AskWhole(Failure),
}

/// No answer came.
pub fn of_call(worker: &WorkerId, asked: Asked, error: &CallError) -> Failure {
    match (asked, error) {
        // It may have fetched the KV already, and its source given the blocks to somebody else: never fetched twice.
        (Asked::Decode, CallError::Broken(_)) => handoff(
            worker,
            HandoffFailure::SourceLost,
            &format!("worker {worker} was lost: {error}"),
        ),
        _ => Failure::lost(worker, &error.to_string(), asked.lost()),
    }
}

/// The engine answered with something else than 2xx.
pub fn of_refusal(worker: &WorkerId, asked: Asked, refusal: EngineRefusal) -> Verdict {
    let status = refusal.head.status.as_u16();
    let words = said(&refusal.body).error.unwrap_or_default();
    let message = format!("worker {worker} answered {status}: {words}");
    let mut failure = match (asked, status) {
        // Its line is full, or it does not serve yet.
        (_, 408 | 429 | 503) => Failure::new(FailureClass::NoWorker, message),
        (Asked::Whole | Asked::TiedPrefill | Asked::TiedDecode, 400..=499) => {
            Failure::new(FailureClass::BadRequest, message)
        }
        (Asked::Prefill | Asked::Decode, 400..=499) => {
            return Verdict::AskWhole(Failure::new(FailureClass::BadRequest, message).at(worker));
        }
        (Asked::Decode | Asked::TiedDecode, _) => {
            handoff(worker, HandoffFailure::EngineFailed, &message)
        }
        (Asked::Whole | Asked::Prefill | Asked::TiedPrefill, _) => {
            Failure::new(asked.lost(), message)
        }
    };
    failure = failure.at(worker);
    failure.retry_after = retry_after(&refusal);
    // What is said of a leg that no client has asked for is nothing to a client.
    if asked != Asked::Prefill {
        failure.engine = Some(Box::new(refusal));
    }
    Verdict::Failed(failure)
}

/// The engine says in its stream, before anything of the answer, that it failed.
pub fn of_words(worker: &WorkerId, asked: Asked, words: &str) -> Failure {
    let message = format!("worker {worker} failed: {words}");
    match asked {
        Asked::Decode | Asked::TiedDecode => {
            handoff(worker, HandoffFailure::EngineFailed, &message)
        }
        Asked::Whole | Asked::Prefill | Asked::TiedPrefill => {
            Failure::new(asked.lost(), message).at(worker)
        }
    }
}

/// A hand-off that failed, as far as is known: engines do not say at which end.
pub fn handoff(worker: &WorkerId, cause: HandoffFailure, message: &str) -> Failure {
    Failure {
        cause: cause.word(),
        ..Failure::new(
            FailureClass::HandoffFailed,
            format!("the hand-off failed ({cause}): {message}"),
        )
    }
    .at(worker)
}

fn retry_after(refusal: &EngineRefusal) -> Option<Duration> {
    let value = refusal.head.headers.get(RETRY_AFTER)?.to_str().ok()?;
    value.parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{HeaderMap, StatusCode};

    use super::*;
    use crate::run::EngineHead;

    fn refusal(status: u16) -> EngineRefusal {
        EngineRefusal {
            head: EngineHead {
                status: StatusCode::from_u16(status).unwrap(),
                headers: HeaderMap::from_iter([(RETRY_AFTER, "2".parse().unwrap())]),
            },
            body: Bytes::from_static(b"{\"error\":{\"message\":\"why\"}}"),
        }
    }

    #[test]
    fn each_status_of_each_leg_has_its_meaning() {
        use FailureClass::{BadRequest, DecodeLost, HandoffFailed, NoWorker, PrefillLost};
        let table = [
            (Asked::Whole, 400, BadRequest),
            (Asked::Whole, 404, BadRequest),
            (Asked::Whole, 422, BadRequest),
            (Asked::Whole, 429, NoWorker),
            (Asked::Whole, 500, DecodeLost),
            (Asked::Whole, 503, NoWorker),
            (Asked::Prefill, 500, PrefillLost),
            (Asked::Prefill, 503, NoWorker),
            (Asked::Decode, 429, NoWorker),
            (Asked::Decode, 500, HandoffFailed),
            (Asked::Decode, 302, HandoffFailed),
            // Both have the client's own request, so what either says of it is said to the client.
            (Asked::TiedPrefill, 400, BadRequest),
            (Asked::TiedPrefill, 500, PrefillLost),
            (Asked::TiedDecode, 400, BadRequest),
            (Asked::TiedDecode, 500, HandoffFailed),
        ];
        for (asked, status, class) in table {
            let Verdict::Failed(failure) = of_refusal(&"w".into(), asked, refusal(status)) else {
                panic!("{asked:?} {status}");
            };
            assert_eq!(failure.class, class, "{asked:?} {status}");
            assert_eq!(failure.worker, Some("w".into()));
            assert_eq!(failure.engine.is_some(), asked != Asked::Prefill);
            assert!(failure.message.contains("why"), "{}", failure.message);
            assert_eq!(failure.retry_after, Some(Duration::from_secs(2)));
        }
        for asked in [Asked::Prefill, Asked::Decode] {
            let verdict = of_refusal(&"w".into(), asked, refusal(400));
            assert!(matches!(verdict, Verdict::AskWhole(_)), "{asked:?}");
        }
    }
}

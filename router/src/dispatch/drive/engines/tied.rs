//! Two legs that meet in a room of the first engine's bootstrap server: both get the request at once, and neither goes on without the
//! other.

use baton_protocol::failure::FailureClass;
use bytes::Bytes;
use http::StatusCode;

use super::super::{Drive, Ending};
use super::beside::Beside;
use super::relay::{COUNTED, LONGEST_REFUSAL, first_event};
use super::{Call, OnEngines, Stop};
use crate::dispatch::failure::Failure;
use crate::dispatch::http::answer::{Said, event, said};
use crate::dispatch::http::engine::{Engine, head};
use crate::dispatch::http::frames::Frames;
use crate::dispatch::http::pool::{Answer, CallError};
use crate::dispatch::http::verdict::{Asked, Verdict, of_call, of_refusal, of_words};
use crate::dispatch::progress::Party;
use crate::forward::Forward;
use crate::forward::legs::Leg as Body;
use crate::run::EngineRefusal;

impl Drive {
    pub(super) async fn tied(
        &mut self,
        forward: &Forward,
        attempt: &mut OnEngines,
        source: &Engine,
        (prefill, decode): (&Party, &Party),
        (host, port): (&str, u16),
    ) -> Result<Ending, Stop> {
        let room = self.room()?;
        let body = Body::Tied { host, port, room };
        let computing = Call {
            engine: source,
            party: prefill,
            asked: Asked::TiedPrefill,
            body,
            limit: None,
        };
        let target = attempt.called.decode.clone();
        let generating = Call {
            engine: &target,
            party: decode,
            asked: Asked::TiedDecode,
            body,
            limit: forward
                .stream
                .then(|| first_event(Asked::TiedDecode, &attempt.limits)),
        };
        self.trace.prefill_opened(self.shared.clock.now());
        let first = self.calling(forward, attempt, computing)?;
        let second = self.calling(forward, attempt, generating)?;
        let worker = source.worker.clone();
        attempt.beside = Some(Beside::Tied(Box::pin(async move {
            let ended = drained(first.await).await;
            ended.map_err(|why| why.of(&worker))
        })));
        let answer = self
            .within_both(attempt, generating, generating.limit, second)
            .await?
            .map_err(|error| Stop::Failed(of_call(&target.worker, Asked::TiedDecode, &error)))?;
        self.relay(answer, generating, attempt).await
    }

    /// A number that no other pair uses: 63 random bits.
    fn room(&self) -> Result<u64, Stop> {
        let mut bits = [0; 8];
        // A room that somebody else may have would mix two requests.
        self.shared.entropy.fill(&mut bits).map_err(|error| {
            let message = format!("no random bits for a room: {error}");
            Stop::Failed(Failure::new(FailureClass::Bug, message))
        })?;
        Ok(u64::from_le_bytes(bits) >> 1)
    }
}

/// Why the leg that computes has failed.
enum Lost {
    Call(CallError),
    Refused(EngineRefusal),
    /// It said so within its answer.
    GaveUp(String),
    Broken(String),
}

impl Lost {
    fn of(self, worker: &baton_protocol::ids::WorkerId) -> Failure {
        match self {
            Self::Call(error) => of_call(worker, Asked::TiedPrefill, &error),
            Self::GaveUp(words) => of_words(worker, Asked::TiedPrefill, &words),
            Self::Broken(why) => Failure::lost(worker, &why, FailureClass::PrefillLost),
            Self::Refused(refusal) => match of_refusal(worker, Asked::TiedPrefill, refusal) {
                Verdict::Failed(failure) | Verdict::AskWhole(failure) => failure,
            },
        }
    }
}

/// Reads an answer that nobody wants to its end: without the prompt that it stands for the other leg would wait in vain.
async fn drained(called: Result<Answer, CallError>) -> Result<(), Lost> {
    let mut answer = called.map_err(Lost::Call)?;
    let head = head(&answer.head);
    if head.status != StatusCode::OK {
        let body = answer.whole(LONGEST_REFUSAL).await.unwrap_or(Bytes::new());
        return Err(Lost::Refused(EngineRefusal { head, body }));
    }
    let mut reading = if head.streams() {
        Reading::Events(Frames::default())
    } else {
        Reading::Whole(Vec::new())
    };
    while let Some(bytes) = answer.next().await {
        let bytes =
            bytes.map_err(|error| Lost::Broken(format!("its answer broke off: {error}")))?;
        reading.take(&bytes).map_err(Lost::GaveUp)?;
    }
    reading.end().map_err(Lost::GaveUp)
}

/// What is looked for in an answer that nobody wants: the word that the prompt was given up.
enum Reading {
    Events(Frames),
    /// One piece, as far as it has come.
    Whole(Vec<u8>),
    /// What cannot be read says nothing; the leg that generates knows what became of it.
    Ignored,
}

impl Reading {
    fn take(&mut self, bytes: &[u8]) -> Result<(), String> {
        match self {
            Self::Events(frames) => match frames.push(bytes) {
                Ok((_, events)) => events.iter().try_for_each(|one| heeded(&event(one)))?,
                Err(_) => *self = Self::Ignored,
            },
            Self::Whole(whole) if whole.len() + bytes.len() <= COUNTED => {
                whole.extend_from_slice(bytes);
            }
            Self::Whole(_) => *self = Self::Ignored,
            Self::Ignored => {}
        }
        Ok(())
    }

    fn end(self) -> Result<(), String> {
        match self {
            Self::Whole(whole) => heeded(&said(&whole)),
            Self::Events(_) | Self::Ignored => Ok(()),
        }
    }
}

/// What an answer says against itself.
fn heeded(said: &Said) -> Result<(), String> {
    said.given_up()
        .map_or(Ok(()), |words| Err(words.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::http::frames::LONGEST;

    const ABORTED: &[u8] = br#"{"choices":[{"text":"","finish_reason":"abort"}]}"#;

    #[test]
    fn a_prompt_that_is_given_up_is_heard_of_in_an_event_and_in_a_whole_answer() {
        let event = [b"data: ", ABORTED, b"\n\n"].concat();
        let (one, two) = event.split_at(20);
        let mut events = Reading::Events(Frames::default());
        assert_eq!(events.take(one), Ok(()));
        assert!(events.take(two).is_err());
        let (one, two) = ABORTED.split_at(20);
        let mut whole = Reading::Whole(Vec::new());
        assert_eq!((whole.take(one), whole.take(two)), (Ok(()), Ok(())));
        assert!(whole.end().is_err());
    }

    #[test]
    fn what_comes_after_something_that_cannot_be_read_is_not_read_as_an_answer() {
        let streamed = (Reading::Events(Frames::default()), LONGEST + 1);
        let too_long = (Reading::Whole(Vec::new()), COUNTED + 1);
        for (mut reading, unreadable) in [streamed, too_long] {
            assert_eq!(reading.take(&vec![b' '; unreadable]), Ok(()));
            assert_eq!(reading.take(ABORTED), Ok(()));
            assert_eq!(reading.end(), Ok(()), "{unreadable}");
        }
    }
}

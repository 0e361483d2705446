//! Two legs that meet in a room of the first engine's bootstrap server: both get the request at once, and neither goes on without the
//! other.

use baton_protocol::failure::FailureClass;
use bytes::Bytes;
use http::StatusCode;

use super::super::{Drive, Ending};
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
        attempt.beside = Some(Box::pin(async move {
            let ended = drained(first.await).await;
            ended.map_err(|why| why.of(&worker))
        }));
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
    let mut frames = head.streams().then(Frames::default);
    let mut whole = Vec::new();
    while let Some(bytes) = answer.next().await {
        let bytes =
            bytes.map_err(|error| Lost::Broken(format!("its answer broke off: {error}")))?;
        match frames.as_mut().map(|frames| frames.push(&bytes)) {
            Some(Ok((_, events))) => {
                for one in &events {
                    heeded(&event(one)).map_err(Lost::GaveUp)?;
                }
            }
            // What cannot be read says nothing; the leg that generates knows what became of it.
            Some(Err(_)) => frames = None,
            None if whole.len() + bytes.len() <= COUNTED => whole.extend_from_slice(&bytes),
            None => {}
        }
    }
    heeded(&said(&whole)).map_err(Lost::GaveUp)
}

/// What an answer says against itself.
fn heeded(said: &Said) -> Result<(), String> {
    said.given_up()
        .map_or(Ok(()), |words| Err(words.to_owned()))
}

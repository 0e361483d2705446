//! Two legs that meet in a room of the first engine's bootstrap server: both get the request at once, and neither goes on without the
//! other.

use baton_protocol::failure::FailureClass;
use bytes::Bytes;
use http::StatusCode;

use super::super::{Drive, Ending};
use super::relay::{LONGEST_REFUSAL, first_event};
use super::{Call, OnEngines, Stop};
use crate::dispatch::failure::Failure;
use crate::dispatch::http::engine::{Engine, head};
use crate::dispatch::http::pool::{Answer, CallError};
use crate::dispatch::http::verdict::{Asked, Verdict, of_call, of_refusal};
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
    Broken(String),
}

impl Lost {
    fn of(self, worker: &baton_protocol::ids::WorkerId) -> Failure {
        match self {
            Self::Call(error) => of_call(worker, Asked::TiedPrefill, &error),
            Self::Broken(why) => Failure::lost(worker, &why, FailureClass::PrefillLost),
            Self::Refused(refusal) => match of_refusal(worker, Asked::TiedPrefill, refusal) {
                Verdict::Failed(failure) | Verdict::AskWhole(failure) => failure,
            },
        }
    }
}

/// Reads an answer that nobody wants to its end.
async fn drained(called: Result<Answer, CallError>) -> Result<(), Lost> {
    let mut answer = called.map_err(Lost::Call)?;
    let head = head(&answer.head);
    if head.status != StatusCode::OK {
        let body = answer.whole(LONGEST_REFUSAL).await.unwrap_or(Bytes::new());
        return Err(Lost::Refused(EngineRefusal { head, body }));
    }
    while let Some(bytes) = answer.next().await {
        bytes.map_err(|error| Lost::Broken(format!("its answer broke off: {error}")))?;
    }
    Ok(())
}

//! What the client of a run hears: events as they come, and its end, once.

use baton_protocol::wire;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::sleep_until;

use super::{Drive, Ending, overdue};
use crate::dispatch::decide::{code, retry_after_seconds};
use crate::dispatch::failure::Failure;
use crate::run::{RunEvent, RunFailure, Usage};

impl Drive {
    /// Hands an event to the client, or says why the run ends without that.
    pub(super) async fn deliver(&mut self, event: RunEvent) -> Result<(), Ending> {
        // Nearly always there is room, and nothing to watch for meanwhile.
        let event = match self.sink.events.try_send(event) {
            Ok(()) => return Ok(()),
            Err(TrySendError::Closed(_)) => return Err(self.gone()),
            Err(TrySendError::Full(event)) => event,
        };
        let deadline = self.instant(self.deadline);
        tokio::select! {
            biased;
            sent = self.sink.events.send(event) => sent.map_err(|_| self.gone()),
            () = self.sink.client_gone.cancelled() => Err(self.gone()),
            // It reads slower than the run may last.
            () = sleep_until(deadline) => Err(Ending::Failed(overdue())),
        }
    }

    /// Nobody reads any more: the client has left, or its front found a stop string in what it had, and has its answer.
    pub(super) fn gone(&mut self) -> Ending {
        self.stopped_by_front().unwrap_or(Ending::ClientGone)
    }

    /// The front has found a stop string.
    pub(super) fn stopped_by_front(&mut self) -> Option<Ending> {
        self.sink.stop.try_recv().ok().map(Ending::Stopped)
    }

    /// Tells the client the end, once.
    pub(super) fn tell(&mut self, ending: &Ending) {
        if std::mem::replace(&mut self.told, true) {
            return;
        }
        let finished = |drive: &Self, reason| RunEvent::Finished {
            reason,
            usage: Usage {
                prompt_tokens: drive.progress.prompt_tokens(),
                cached_tokens: drive.progress.cached_tokens(),
                output_tokens: drive.progress.sent_tokens(),
            },
        };
        let event = match ending {
            Ending::Finished(reason) => finished(self, *reason),
            Ending::Stopped(_) | Ending::Answered(_) => finished(self, wire::FinishReason::Stop),
            Ending::Failed(failure) => RunEvent::Failed(self.run_failure(failure)),
            Ending::ClientGone => return,
        };
        // There is always room for it: a client that has not read the rest yet hears the end after it.
        if let Some(last) = self.sink.last.take() {
            last.send(event);
        }
    }

    fn run_failure(&self, failure: &Failure) -> RunFailure {
        RunFailure {
            engine: failure.engine.clone(),
            told: failure.told,
            class: failure.class,
            status: failure.class.status(),
            message: failure.message.clone(),
            param: None,
            code: code(failure.class),
            retry_after_seconds: retry_after_seconds(failure, &self.request.policy.policy),
        }
    }
}

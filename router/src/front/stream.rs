//! An answer as server-sent events, straight from the run.

use std::convert::Infallible;

use axum::body::Body;
use axum::response::Response;
use baton_protocol::wire::FinishReason;
use bytes::Bytes;
use futures::FutureExt as _;
use futures::stream::unfold;

use super::generate::Begun;
use super::reply;
use crate::openai::answer::{error_event, finish_word};
use crate::openai::error::ApiError;
use crate::run::{RunEvent, Usage};
use crate::text::output::Piece;

/// Bytes of a typical event, to begin with.
const EVENT_BYTES: usize = 512;

/// A frame takes no more events from so many bytes on.
const FRAME_BYTES: usize = 4 << 10;

/// Waits for the first event, so that a run which fails before it has a token still gets its own status.
pub async fn answer(mut begun: Begun) -> Response {
    let first = match begun.next().await {
        Ok(Some(RunEvent::Failed(failure))) => return reply::error(&failure.into()),
        Ok(Some(event)) => event,
        Ok(None) => return reply::error(&ended_early()),
        Err(error) => return reply::error(&error),
    };
    let stream = Stream {
        begun,
        first: Some(first),
        opened: false,
        done: false,
    };
    // The run ends with the stream: hyper drops the body when the client is gone, and the handle with it.
    let frames = unfold(stream, |mut stream| async move {
        let frame = stream.next_frame().await?;
        Some((Ok::<_, Infallible>(frame), stream))
    });
    reply::events(Body::from_stream(frames))
}

pub(super) fn ended_early() -> ApiError {
    ApiError::internal("the run ended without a result")
}

pub(super) fn passed_on() -> ApiError {
    ApiError::internal("an engine's answer came to a request that was not passed on")
}

pub(super) fn cancelled() -> ApiError {
    ApiError::internal("the run was cancelled on its worker").with_code("cancelled")
}

struct Stream {
    begun: Begun,
    first: Option<RunEvent>,
    opened: bool,
    done: bool,
}

impl Stream {
    /// Bytes to send next; `None` after the last. Events that have come already go in one frame, which is one write: none waits for
    /// another.
    async fn next_frame(&mut self) -> Option<Bytes> {
        let mut out = Vec::with_capacity(EVENT_BYTES);
        while !self.done && out.len() < FRAME_BYTES {
            let event = match self.first.take() {
                Some(event) => Ok(Some(event)),
                None if out.is_empty() => self.begun.next().await,
                None => match self.begun.next().now_or_never() {
                    Some(event) => event,
                    None => break,
                },
            };
            if let Err(error) = self.write(event, &mut out) {
                // Strings and numbers always serialise; should they not, the stream ends without `[DONE]`.
                tracing::error!("an event cannot be written: {error}");
                self.done = true;
            }
        }
        (!out.is_empty()).then(|| Bytes::from(out))
    }

    fn write(
        &mut self,
        event: Result<Option<RunEvent>, ApiError>,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        if !self.opened {
            self.opened = true;
            self.begun.answer.open(out)?;
        }
        let event = match event {
            Ok(event) => event,
            Err(error) => return self.fail(&error, out),
        };
        match event {
            Some(RunEvent::Token { id, logprobs }) => {
                let piece = self
                    .begun
                    .output
                    .push(self.begun.model.vocabulary(), id, logprobs);
                if piece.stopped {
                    self.begun.handle.stop_matched();
                }
                self.more(&piece, out)
            }
            Some(RunEvent::Finished { reason, usage }) => self.finish(reason, usage, out),
            Some(RunEvent::Failed(failure)) => self.fail(&failure.into(), out),
            Some(RunEvent::Answer(_) | RunEvent::Bytes(_)) => self.fail(&passed_on(), out),
            None => self.fail(&ended_early(), out),
        }
    }

    fn more(&self, piece: &Piece, out: &mut Vec<u8>) -> serde_json::Result<()> {
        if piece.is_empty() {
            return Ok(());
        }
        self.begun.answer.more(
            out,
            &piece.text,
            self.begun.logprobs(&piece.tokens).as_ref(),
        )
    }

    fn finish(
        &mut self,
        reason: FinishReason,
        usage: Usage,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        self.done = true;
        let piece = self.begun.output.finish();
        self.more(&piece, out)?;
        // What was held back may itself complete a stop string.
        let reason = if piece.stopped {
            FinishReason::Stop
        } else {
            reason
        };
        match finish_word(reason) {
            Some(word) => self.begun.answer.close(out, word, usage),
            None => self.fail(&cancelled(), out),
        }
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) -> serde_json::Result<()> {
        self.done = true;
        error_event(out, error)
    }
}

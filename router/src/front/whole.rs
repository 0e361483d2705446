//! An answer in one body.

use axum::response::Response;
use baton_protocol::wire::FinishReason;
use http::StatusCode;

use super::generate::Begun;
use super::reply;
use super::stream::{cancelled, ended_early, passed_on};
use crate::openai::answer::{Kind, finish_word};
use crate::openai::error::ApiError;
use crate::openai::logprobs::{self, Logprobs};
use crate::run::RunEvent;
use crate::text::output::TokenEntry;

/// Waits for the whole run. The client may leave meanwhile: hyper then drops this future, and the run's handle with it.
pub async fn answer(begun: Begun) -> Response {
    match collect(begun).await {
        Ok(body) => reply::json_bytes(StatusCode::OK, body),
        Err(error) => reply::error(&error),
    }
}

async fn collect(mut begun: Begun) -> Result<Vec<u8>, ApiError> {
    let mut text = String::new();
    let mut entries = Vec::new();
    loop {
        let event = begun.next().await?;
        match event.ok_or_else(ended_early)? {
            RunEvent::Token { id, logprobs } => {
                begun.taken.holding.token()?;
                let piece = begun.output.push(begun.model.vocabulary(), id, logprobs);
                text.push_str(&piece.text);
                entries.extend(piece.tokens);
                if piece.stopped {
                    begun.handle.stop_matched();
                }
            }
            RunEvent::Finished { reason, usage } => {
                let piece = begun.output.finish();
                text.push_str(&piece.text);
                entries.extend(piece.tokens);
                let reason = if piece.stopped {
                    FinishReason::Stop
                } else {
                    reason
                };
                let word = finish_word(reason).ok_or_else(cancelled)?;
                return begun
                    .answer
                    .whole(&text, begun.logprobs(&entries).as_ref(), word, usage)
                    .map_err(|error| {
                        ApiError::internal(format!("the answer cannot be written: {error}"))
                    });
            }
            RunEvent::Failed(failure) => return Err(failure.into()),
            RunEvent::Answer(_) | RunEvent::Bytes(_) => return Err(passed_on()),
        }
    }
}

impl Begun {
    /// Log-probabilities of tokens in the form of the endpoint, where they were asked for.
    pub(super) fn logprobs(&self, entries: &[TokenEntry]) -> Option<Logprobs> {
        let bytes = |id| self.model.vocabulary().bytes(id);
        self.with_logprobs.then(|| match self.answer.kind() {
            Kind::Chat => Logprobs::Chat(logprobs::chat(entries, bytes)),
            Kind::Completion => Logprobs::Completion(logprobs::completion(entries, bytes)),
        })
    }
}

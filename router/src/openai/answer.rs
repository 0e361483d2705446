//! Answers of both endpoints, whole and as server-sent events.

use std::sync::OnceLock;

use baton_protocol::wire::FinishReason;
use serde::Serialize;

use super::error::ApiError;
use super::logprobs::Logprobs;
use crate::run::Usage;

/// Names the configuration that answered.
const FINGERPRINT: &str = concat!("baton-", env!("CARGO_PKG_VERSION"));

/// Which endpoint is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Chat,
    Completion,
}

/// What every body and chunk of one answer repeats, and how they are written.
#[derive(Clone, Debug)]
pub struct Answer {
    kind: Kind,
    id: String,
    /// Seconds since the epoch.
    created: u64,
    model: String,
    /// The client asked for a chunk with the usage at the end of its stream; the others then say `"usage": null`.
    include_usage: bool,
    /// What stands around the text of an event that has nothing else, made with the first of them.
    around: OnceLock<(Vec<u8>, Vec<u8>)>,
}

#[derive(Serialize)]
struct Body<'a, Choice> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
    choices: &'a [Choice],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
}

/// Tokens are counted as the model computed them: the end-of-sequence token and those of a stop string are generated tokens too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct UsageBody {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    pub total_tokens: u32,
    pub prompt_tokens_details: PromptTokensDetails,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// Prompt tokens whose KV was found in a cache.
    pub cached_tokens: u32,
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.output_tokens,
            total_tokens: usage.prompt_tokens.saturating_add(usage.output_tokens),
            prompt_tokens_details: PromptTokensDetails {
                cached_tokens: usage.cached_tokens,
            },
        }
    }
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: u32,
    message: ChatMessage<'a>,
    logprobs: Option<&'a Logprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
struct ChatMessage<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct ChatDelta<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<&'a Logprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
struct TextChoice<'a> {
    index: u32,
    text: &'a str,
    logprobs: Option<&'a Logprobs>,
    finish_reason: Option<&'static str>,
}

/// OpenAI's word. `None` for a run that was cancelled: it has no answer.
pub fn finish_word(reason: FinishReason) -> Option<&'static str> {
    match reason {
        FinishReason::Stop => Some("stop"),
        FinishReason::Length => Some("length"),
        FinishReason::Cancelled | FinishReason::Unspecified => None,
    }
}

impl Answer {
    /// `run` makes the id; `created` is in seconds since the epoch; `model` is the name that the client used.
    pub fn new(kind: Kind, run: &str, created: u64, model: String, include_usage: bool) -> Self {
        let prefix = match kind {
            Kind::Chat => "chatcmpl",
            Kind::Completion => "cmpl",
        };
        Self {
            kind,
            id: format!("{prefix}-{run}"),
            created,
            model,
            include_usage,
            around: OnceLock::new(),
        }
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The body of an answer that is not streamed.
    pub fn whole(
        &self,
        text: &str,
        logprobs: Option<&Logprobs>,
        finish_reason: &'static str,
        usage: Usage,
    ) -> serde_json::Result<Vec<u8>> {
        let usage = Some(Some(usage.into()));
        let finish_reason = Some(finish_reason);
        match self.kind {
            Kind::Chat => serde_json::to_vec(&self.body(
                "chat.completion",
                &[ChatChoice {
                    index: 0,
                    message: ChatMessage {
                        role: "assistant",
                        content: text,
                        refusal: None,
                    },
                    logprobs,
                    finish_reason,
                }],
                usage,
            )),
            Kind::Completion => serde_json::to_vec(&self.body(
                "text_completion",
                &[TextChoice {
                    index: 0,
                    text,
                    logprobs,
                    finish_reason,
                }],
                usage,
            )),
        }
    }

    /// The event that opens a stream: chat says who speaks.
    pub fn open(&self, out: &mut Vec<u8>) -> serde_json::Result<()> {
        match self.kind {
            Kind::Chat => self.chat_event(
                out,
                Delta {
                    role: Some("assistant"),
                    content: Some(""),
                },
                None,
                None,
            ),
            Kind::Completion => Ok(()),
        }
    }

    /// An event with more text.
    pub fn more(
        &self,
        out: &mut Vec<u8>,
        text: &str,
        logprobs: Option<&Logprobs>,
    ) -> serde_json::Result<()> {
        if logprobs.is_some() {
            return self.text(out, text, logprobs);
        }
        // A token a time, and all of it is the same but for the text.
        let (before, after) = match self.around.get() {
            Some(around) => around,
            None => {
                let around = self.around_text()?;
                self.around.get_or_init(|| around)
            }
        };
        out.extend_from_slice(before);
        serde_json::to_writer(&mut *out, text)?;
        out.extend_from_slice(after);
        Ok(())
    }

    fn text(
        &self,
        out: &mut Vec<u8>,
        text: &str,
        logprobs: Option<&Logprobs>,
    ) -> serde_json::Result<()> {
        match self.kind {
            Kind::Chat => self.chat_event(
                out,
                Delta {
                    role: None,
                    content: Some(text),
                },
                logprobs,
                None,
            ),
            Kind::Completion => self.text_event(out, text, logprobs, None),
        }
    }

    /// An event of no text, cut where the text is. No string of it can look like the place: its quotes would be escaped.
    fn around_text(&self) -> serde_json::Result<(Vec<u8>, Vec<u8>)> {
        let mut event = Vec::new();
        self.text(&mut event, "", None)?;
        let place: &[u8] = match self.kind {
            Kind::Chat => b"\"content\":\"\"",
            Kind::Completion => b"\"text\":\"\"",
        };
        let found = event.windows(place.len()).position(|part| part == place);
        // It is always there; were it not, the text would follow the event, and no test would pass.
        let end = found.map_or(event.len(), |start| start + place.len());
        let after = event.split_off(end);
        event.truncate(end.saturating_sub(2));
        Ok((event, after))
    }

    /// The events that end a stream: the reason, the usage if asked for, `[DONE]`.
    pub fn close(
        &self,
        out: &mut Vec<u8>,
        finish_reason: &'static str,
        usage: Usage,
    ) -> serde_json::Result<()> {
        match self.kind {
            Kind::Chat => self.chat_event(out, Delta::default(), None, Some(finish_reason))?,
            Kind::Completion => self.text_event(out, "", None, Some(finish_reason))?,
        }
        if self.include_usage {
            let usage = Some(Some(usage.into()));
            event(
                out,
                &self.body::<TextChoice<'_>>(self.chunk_object(), &[], usage),
            )?;
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        Ok(())
    }

    fn chat_event(
        &self,
        out: &mut Vec<u8>,
        delta: Delta<'_>,
        logprobs: Option<&Logprobs>,
        finish_reason: Option<&'static str>,
    ) -> serde_json::Result<()> {
        let choice = ChatDelta {
            index: 0,
            delta,
            logprobs,
            finish_reason,
        };
        event(
            out,
            &self.body(self.chunk_object(), &[choice], self.chunk_usage()),
        )
    }

    fn text_event(
        &self,
        out: &mut Vec<u8>,
        text: &str,
        logprobs: Option<&Logprobs>,
        finish_reason: Option<&'static str>,
    ) -> serde_json::Result<()> {
        let choice = TextChoice {
            index: 0,
            text,
            logprobs,
            finish_reason,
        };
        event(
            out,
            &self.body(self.chunk_object(), &[choice], self.chunk_usage()),
        )
    }

    fn body<'a, Choice>(
        &'a self,
        object: &'static str,
        choices: &'a [Choice],
        usage: Option<Option<UsageBody>>,
    ) -> Body<'a, Choice> {
        Body {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: FINGERPRINT,
            choices,
            usage,
        }
    }

    fn chunk_object(&self) -> &'static str {
        match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        }
    }

    fn chunk_usage(&self) -> Option<Option<UsageBody>> {
        self.include_usage.then_some(None)
    }
}

/// Ends a stream that failed: no `[DONE]` follows, so that a client cannot take what it has for the whole answer.
pub fn error_event(out: &mut Vec<u8>, error: &ApiError) -> serde_json::Result<()> {
    out.extend_from_slice(b"event: error\n");
    event(out, &error.body())
}

fn event(out: &mut Vec<u8>, value: &impl Serialize) -> serde_json::Result<()> {
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *out, value)?;
    out.extend_from_slice(b"\n\n");
    Ok(())
}

#[cfg(test)]
mod tests;

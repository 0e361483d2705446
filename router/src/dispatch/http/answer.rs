//! What an engine's answer says besides its text: whether it is one, how it ended, how many tokens it has.

use std::borrow::Cow;
use std::collections::HashMap;

use baton_protocol::sse::{Event, MESSAGE};
use serde::Deserialize;
use serde_json::value::RawValue;

/// The last event of a stream.
const DONE: &str = "[DONE]";
/// Events of other protocols that hold nothing of the answer yet.
const OPENING: [&str; 8] = [
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "message_start",
    "content_block_start",
    "ping",
];
/// Bytes of an engine's words that a message repeats.
const LONGEST_WORDS: usize = 300;

/// Tokens, as the engine counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub prompt: u32,
    pub output: u32,
    /// Of the prompt, found in a cache; `None` where it does not say.
    pub cached: Option<u32>,
}

/// What one event says, or a whole answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// It has text, a call of a tool, or anything else of the answer.
    pub content: bool,
    /// It is of an answer that the engine makes, be there something of it yet or not: a chat's role, which comes with the first token, or
    /// a token that a parser holds back.
    pub choice: bool,
    /// It is the last.
    pub done: bool,
    /// The engine has failed: its words.
    pub error: Option<String>,
    pub finish: Option<String>,
    pub counts: Option<Counts>,
    /// How another engine fetches the KV. JSON, as it is written.
    pub transfer: Option<String>,
}

impl Said {
    /// The answer has begun, has ended, or is none.
    pub fn says_something(&self) -> bool {
        self.content || self.done || self.error.is_some()
    }

    /// The engine gave the request up: its words, as far as it has any.
    pub fn given_up(&self) -> Option<&str> {
        let aborted = self.finish.as_deref() == Some("abort");
        self.error
            .as_deref()
            .or(aborted.then_some("it has aborted the request"))
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Body<'a> {
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow)]
    choices: Option<Vec<Choice<'a>>>,
    usage: Option<Usage>,
    #[serde(borrow)]
    kv_transfer_params: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Choice<'a> {
    #[serde(borrow)]
    finish_reason: Option<Cow<'a, str>>,
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    logprobs: Option<&'a RawValue>,
    #[serde(borrow)]
    token_ids: Option<&'a RawValue>,
}

/// The parts of a chat's answer.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Delta<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    reasoning: Option<&'a RawValue>,
    #[serde(borrow)]
    reasoning_content: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_calls: Option<&'a RawValue>,
    #[serde(borrow)]
    function_call: Option<&'a RawValue>,
    #[serde(borrow)]
    refusal: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Usage {
    #[serde(alias = "input_tokens")]
    prompt_tokens: Option<u32>,
    #[serde(alias = "output_tokens")]
    completion_tokens: Option<u32>,
    #[serde(alias = "input_tokens_details")]
    prompt_tokens_details: Option<Details>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Details {
    cached_tokens: Option<u32>,
}

impl Choice<'_> {
    fn has_content(&self) -> bool {
        let delta = self.delta.as_ref();
        let parts = delta.map(|delta| {
            [
                delta.content,
                delta.reasoning,
                delta.reasoning_content,
                delta.tool_calls,
                delta.function_call,
                delta.refusal,
            ]
        });
        let mut parts = parts
            .into_iter()
            .flatten()
            .chain([self.text, self.token_ids])
            .flatten();
        self.finish_reason.is_some() || parts.any(says) || self.logprobs.is_some_and(has_entries)
    }
}

fn says(part: &RawValue) -> bool {
    !["null", "\"\"", "[]", "{}"].contains(&part.get())
}

/// Log-probabilities of a token: engines send them also while a parser holds its text back.
fn has_entries(logprobs: &RawValue) -> bool {
    let parts = serde_json::from_str::<HashMap<String, &RawValue>>(logprobs.get());
    parts.is_ok_and(|parts| parts.into_values().any(says))
}

/// What an event of a stream says.
pub fn event(event: &Event) -> Said {
    if event.data == DONE {
        return Said {
            done: true,
            ..Said::default()
        };
    }
    let mut said = said(event.data.as_bytes());
    if event.name == "error" && said.error.is_none() {
        said.error = Some(shortened(&event.data));
    }
    // Other protocols name their events; which hold text is theirs to know, but for those that open an answer.
    let named = event.name != MESSAGE && !OPENING.contains(&event.name.as_str());
    said.content |= named && said.error.is_none();
    said
}

/// What a whole answer says. One that cannot be read says nothing.
pub fn said(json: &[u8]) -> Said {
    let Ok(body) = serde_json::from_slice::<Body<'_>>(json) else {
        return Said::default();
    };
    let choices = body.choices.unwrap_or_default();
    let finish = choices
        .iter()
        .find_map(|choice| choice.finish_reason.clone());
    Said {
        content: choices.iter().any(Choice::has_content),
        choice: !choices.is_empty(),
        done: false,
        error: body.error.map(words),
        finish: finish.map(Cow::into_owned),
        counts: body.usage.and_then(|usage| {
            Some(Counts {
                prompt: usage.prompt_tokens?,
                output: usage.completion_tokens.unwrap_or(0),
                cached: usage
                    .prompt_tokens_details
                    .and_then(|details| details.cached_tokens),
            })
        }),
        transfer: body
            .kv_transfer_params
            .filter(|parameters| parameters.get().starts_with('{'))
            .map(|parameters| parameters.get().to_owned()),
    }
}

/// The message of an error, or all of it.
fn words(error: &RawValue) -> String {
    #[derive(Deserialize)]
    struct Error {
        message: String,
    }
    let message = serde_json::from_str(error.get()).map(|error: Error| error.message);
    shortened(message.as_deref().unwrap_or(error.get()))
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(LONGEST_WORDS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(data: &str) -> Said {
        event(&Event {
            name: MESSAGE.to_owned(),
            data: data.to_owned(),
        })
    }

    #[test]
    fn an_event_that_only_opens_the_answer_is_no_content() {
        let opening = r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#;
        let opened = Said {
            choice: true,
            ..Said::default()
        };
        assert_eq!(data(opening), opened);
        for nothing in [
            r#"{"choices":[{"delta":{},"logprobs":{"content":[]},"token_ids":[]}]}"#,
            r#"{"choices":[{"text":"","logprobs":{"tokens":[],"top_logprobs":null},"token_ids":null}]}"#,
        ] {
            assert_eq!(data(nothing), opened, "{nothing}");
        }
        assert_eq!(data(r#"{"choices":[]}"#), Said::default());
        for content in [
            r#"{"choices":[{"delta":{"content":"["},"finish_reason":null}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#,
            r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#,
            r#"{"choices":[{"text":" a"}]}"#,
            r#"{"choices":[{"delta":{"content":"\ud83d"}}]}"#,
            // Tokens that a parser of tools or of reasoning holds back.
            r#"{"choices":[{"delta":{},"logprobs":{"content":[{"token":"a","logprob":-0.1}]}}]}"#,
            r#"{"choices":[{"text":"","logprobs":{"tokens":["a"],"top_logprobs":null}}]}"#,
            r#"{"choices":[{"delta":{},"logprobs":null,"token_ids":[151643]}]}"#,
        ] {
            assert!(data(content).content, "{content}");
        }
    }

    #[test]
    fn what_opens_an_answer_of_another_protocol_is_no_content() {
        let named = |name: &str| {
            event(&Event {
                name: name.to_owned(),
                data: "{}".to_owned(),
            })
        };
        for name in ["response.created", "message_start", "ping"] {
            assert!(!named(name).content, "{name}");
        }
        for name in ["response.output_text.delta", "content_block_delta"] {
            assert!(named(name).content, "{name}");
        }
    }

    #[test]
    fn the_end_counts_and_errors_are_read() {
        let last = data(r#"{"choices":[{"delta":{"content":"x"},"finish_reason":"tool_calls"}]}"#);
        assert_eq!(last.finish.as_deref(), Some("tool_calls"));
        let usage = data(
            r#"{"choices":[],"usage":{"prompt_tokens":171,"total_tokens":179,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":160}}}"#,
        );
        let counts = Counts {
            prompt: 171,
            output: 8,
            cached: Some(160),
        };
        assert_eq!((usage.counts, usage.content), (Some(counts), false));
        let unknown = data(
            r#"{"usage":{"prompt_tokens":1,"completion_tokens":1,"prompt_tokens_details":null}}"#,
        );
        assert_eq!(unknown.counts.unwrap().cached, None);
        assert!(data("[DONE]").done);
        let error = data(
            r#"{"error":{"message":"KV load failed","type":"InternalServerError","param":null,"code":500}}"#,
        );
        assert_eq!(error.error.as_deref(), Some("KV load failed"));
        assert_eq!(error.given_up(), Some("KV load failed"));
        assert!(error.says_something() && data("[DONE]").says_something());
        let aborted = data(r#"{"choices":[{"text":"","finish_reason":"abort"}]}"#);
        assert!(aborted.given_up().is_some() && last.given_up().is_none());
        assert_eq!(data(r#"{"error":null,"choices":[]}"#).error, None);
        assert_eq!(data("no json"), Said::default());
    }

    #[test]
    fn parameters_of_a_transfer_stay_as_they_are_written() {
        let body = br#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{ "remote_block_ids" : [[1]], "x": 1e0 }}"#;
        assert_eq!(
            said(body).transfer.as_deref(),
            Some(r#"{ "remote_block_ids" : [[1]], "x": 1e0 }"#)
        );
        assert_eq!(said(br#"{"kv_transfer_params":null}"#).transfer, None);
    }
}

//! Fields that would change the answer and that this version cannot honour: refused by name, never dropped.

use serde_json::Value;

use super::error::ApiError;
use super::field::{Object, mismatch};

/// A field that would change the answer and that this version cannot honour, unless it says what is done anyway.
#[derive(Debug)]
pub(super) struct Refused {
    name: &'static str,
    neutral: Neutral,
    instead: &'static str,
}

/// Values that ask for nothing. Absent and null always do.
#[derive(Clone, Copy, Debug)]
pub(super) enum Neutral {
    Zero,
    One,
    True,
    False,
    Empty,
    /// No value at all.
    Never,
}

impl Refused {
    pub(super) fn check(&self, body: &mut Object) -> Result<(), ApiError> {
        let Some(value) = body.take(self.name) else {
            return Ok(());
        };
        let path = body.path_of(self.name);
        let neutral = match (self.neutral, &value) {
            (Neutral::Zero, Value::Number(number)) => number.as_f64() == Some(0.0),
            (Neutral::One, Value::Number(number)) => number.as_f64() == Some(1.0),
            (Neutral::True, Value::Bool(flag)) => *flag,
            (Neutral::False, Value::Bool(flag)) => !flag,
            (Neutral::Empty, Value::Array(items)) => items.is_empty(),
            (Neutral::Empty, Value::Object(members)) => members.is_empty(),
            (Neutral::Empty, Value::String(text)) => text.is_empty(),
            (Neutral::Never, _) => false,
            (Neutral::Zero | Neutral::One, other) => {
                return Err(mismatch(path, "a number", other));
            }
            (Neutral::True | Neutral::False, other) => {
                return Err(mismatch(path, "true or false", other));
            }
            (Neutral::Empty, other) => {
                return Err(mismatch(path, "an array or an object", other));
            }
        };
        if neutral {
            return Ok(());
        }
        let message = format!("{path} is not supported by this version: {}", self.instead);
        Err(ApiError::unsupported(path, message))
    }
}

pub(super) const fn refused(
    name: &'static str,
    neutral: Neutral,
    instead: &'static str,
) -> Refused {
    Refused {
        name,
        neutral,
        instead,
    }
}

const FREE_TEXT: &str = "answers are free text";
const NO_CONTROL: &str = "control tokens are no part of the answer";
const UNPENALISED: &str = "tokens are sampled without penalties";

/// In requests of both kinds.
pub(super) const ALWAYS: &[Refused] = &[
    refused("n", Neutral::One, "send one request for each choice"),
    refused("best_of", Neutral::One, "send one request for each choice"),
    refused("use_beam_search", Neutral::False, "use sampling"),
    refused("echo", Neutral::False, "the answer holds only new text"),
    refused(
        "suffix",
        Neutral::Empty,
        "text is only continued at its end",
    ),
    refused("logit_bias", Neutral::Empty, "leave it out"),
    refused("presence_penalty", Neutral::Zero, UNPENALISED),
    refused("frequency_penalty", Neutral::Zero, UNPENALISED),
    refused("repetition_penalty", Neutral::One, UNPENALISED),
    refused(
        "prompt_logprobs",
        Neutral::Never,
        "log-probabilities are reported for generated tokens",
    ),
    refused("bad_words", Neutral::Empty, "leave it out"),
    refused("allowed_token_ids", Neutral::Never, "leave it out"),
    refused("logits_processors", Neutral::Empty, "leave it out"),
    refused("structured_outputs", Neutral::Never, FREE_TEXT),
    refused("guided_json", Neutral::Never, FREE_TEXT),
    refused("guided_regex", Neutral::Never, FREE_TEXT),
    refused("guided_choice", Neutral::Never, FREE_TEXT),
    refused("guided_grammar", Neutral::Never, FREE_TEXT),
    refused(
        "include_stop_str_in_output",
        Neutral::False,
        "the stop string is left out of the answer",
    ),
    refused(
        "truncate_prompt_tokens",
        Neutral::Never,
        "shorten the prompt yourself",
    ),
    refused("prompt_embeds", Neutral::Never, "send text or token ids"),
    refused("typical_p", Neutral::One, "use top_p, top_k or min_p"),
    refused("length_penalty", Neutral::One, UNPENALISED),
    refused("no_repeat_ngram_size", Neutral::Zero, UNPENALISED),
    refused("regex", Neutral::Never, FREE_TEXT),
    refused("json_schema", Neutral::Never, FREE_TEXT),
    refused("ebnf", Neutral::Never, FREE_TEXT),
    refused("structural_tag", Neutral::Never, FREE_TEXT),
    refused("skip_special_tokens", Neutral::True, NO_CONTROL),
    refused("spaces_between_special_tokens", Neutral::True, NO_CONTROL),
    refused("detokenize", Neutral::True, "the answer is text"),
    refused("return_token_ids", Neutral::False, "the answer is text"),
    refused(
        "return_tokens_as_token_ids",
        Neutral::False,
        "tokens are named by their text",
    ),
    refused(
        "logprob_token_ids",
        Neutral::Empty,
        "the likeliest are reported",
    ),
    refused(
        "web_search_options",
        Neutral::Never,
        "the model answers by itself",
    ),
];

/// In `stream_options`.
pub(super) const OF_STREAMS: &[Refused] = &[refused(
    "continuous_usage_stats",
    Neutral::False,
    "use include_usage: the usage comes at the end",
)];

//! `POST /v1/completions`: the request.

use serde_json::Value;

use super::error::ApiError;
use super::field::{Object, mismatch, parse_body, token_id};
use super::parameters::Parameters;

/// Alternatives beside each token. OpenAI allows 5, other servers more.
const MAX_LOGPROBS: i64 = 20;

/// A completion request, read and checked as far as it can be without the model.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    pub prompt: Prompt,
    pub parameters: Parameters,
    /// Let the tokenizer add its special tokens to a prompt that is text.
    pub add_special_tokens: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl CompletionRequest {
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut body = parse_body(body)?;
        let mut parameters = Parameters::read(&mut body)?;
        parameters.logprobs = body
            .integer("logprobs", 0..=MAX_LOGPROBS)?
            .and_then(|top| u32::try_from(top).ok());
        Ok(Self {
            prompt: read_prompt(&mut body)?,
            parameters,
            add_special_tokens: body.boolean("add_special_tokens", true)?,
        })
    }
}

fn read_prompt(body: &mut Object) -> Result<Prompt, ApiError> {
    match body.take("prompt") {
        None => Err(ApiError::field("prompt", "prompt is required")),
        Some(Value::String(text)) => Ok(Prompt::Text(text)),
        Some(Value::Array(items)) => read_items(items),
        Some(other) => Err(mismatch("prompt".into(), EXPECTED, &other)),
    }
}

const EXPECTED: &str = "a string, an array with one string, or an array of token ids";

/// An array is token ids, or prompts of which this version takes one.
fn read_items(mut items: Vec<Value>) -> Result<Prompt, ApiError> {
    match items.first() {
        None => Err(ApiError::field("prompt", "prompt must not be empty")),
        Some(Value::Number(_)) => Ok(Prompt::Tokens(read_ids("prompt", &items)?)),
        Some(Value::String(_) | Value::Array(_)) if items.len() > 1 => Err(ApiError::unsupported(
            "prompt",
            format!(
                "several prompts in one request are not supported by this version: send {} requests",
                items.len()
            ),
        )),
        Some(_) => match items.swap_remove(0) {
            Value::String(text) => Ok(Prompt::Text(text)),
            Value::Array(ids) if ids.is_empty() => {
                Err(ApiError::field("prompt[0]", "prompt[0] must not be empty"))
            }
            Value::Array(ids) => Ok(Prompt::Tokens(read_ids("prompt[0]", &ids)?)),
            other => Err(mismatch(
                "prompt[0]".into(),
                "a string or a token id",
                &other,
            )),
        },
    }
}

fn read_ids(path: &str, items: &[Value]) -> Result<Vec<u32>, ApiError> {
    items
        .iter()
        .enumerate()
        .map(|(index, item)| token_id(format!("{path}[{index}]"), item))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(prompt: &str, fields: &str) -> Result<CompletionRequest, ApiError> {
        CompletionRequest::parse(
            format!("{{\"model\": \"m\", \"prompt\": {prompt}{fields}}}").as_bytes(),
        )
    }

    #[test]
    fn a_prompt_comes_in_four_forms() {
        for (prompt, expected) in [
            (r#""hi""#, Prompt::Text("hi".into())),
            (r#"["hi"]"#, Prompt::Text("hi".into())),
            ("[1, 2]", Prompt::Tokens(vec![1, 2])),
            ("[[1, 2]]", Prompt::Tokens(vec![1, 2])),
        ] {
            assert_eq!(parse(prompt, "").unwrap().prompt, expected);
        }
        assert!(parse(r#""hi""#, "").unwrap().add_special_tokens);
    }

    #[test]
    fn what_is_wrong_with_a_prompt_is_named() {
        for (prompt, param) in [
            ("null", "prompt"),
            ("{}", "prompt"),
            ("[]", "prompt"),
            ("[[]]", "prompt[0]"),
            ("[1, -1]", "prompt[1]"),
            ("[1, \"a\"]", "prompt[1]"),
            ("[1, 4294967296]", "prompt[1]"),
            ("[[1, 1.5]]", "prompt[0][1]"),
            ("[true]", "prompt[0]"),
            (r#"["a", "b"]"#, "prompt"),
            ("[[1], [2]]", "prompt"),
        ] {
            let error = parse(prompt, "").unwrap_err();
            assert_eq!(
                (error.status, error.param.as_deref()),
                (400, Some(param)),
                "{prompt}: {error}"
            );
        }
    }

    #[test]
    fn log_probabilities_are_a_number_here() {
        assert_eq!(parse("\"x\"", "").unwrap().parameters.logprobs, None);
        assert_eq!(
            parse("\"x\"", ", \"logprobs\": 0")
                .unwrap()
                .parameters
                .logprobs,
            Some(0)
        );
        assert_eq!(
            parse("\"x\"", ", \"logprobs\": 5")
                .unwrap()
                .parameters
                .logprobs,
            Some(5)
        );
        for wrong in ["true", "21", "-1"] {
            let error = parse("\"x\"", &format!(", \"logprobs\": {wrong}")).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("logprobs"));
        }
    }
}

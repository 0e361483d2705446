//! What both kinds of request say about generating: sampling, stopping, streaming; and which fields are refused.

use baton_protocol::wire;
use serde_json::Value;

use super::error::{ApiError, echo};
use super::field::{Object, mismatch, token_id};
use super::refused;

/// More stop strings than OpenAI's four: other servers take them, and each costs one state per byte of output.
const MAX_STOP_STRINGS: usize = 16;

/// Bytes of one: each costs nine while the answer comes, and as many of the answer are held back.
const LONGEST_STOP_STRING: usize = 1024;

/// Each costs a comparison per token. Models have fewer ends.
const MAX_STOP_TOKENS: usize = 256;

/// Bytes of `cache_salt`: room for a name or a digest.
const LONGEST_SALT: usize = 256;

/// Alternatives beside each token, as OpenAI limits them for chat.
pub const MAX_TOP_LOGPROBS: i64 = 20;

/// How a request wants its tokens, but for the prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parameters {
    /// As the client called it.
    pub model: String,
    pub temperature: f64,
    pub top_p: f64,
    /// 0: all.
    pub top_k: u32,
    pub min_p: f64,
    pub seed: Option<u64>,
    pub max_tokens: Option<u32>,
    /// The name that `max_tokens` has in the request.
    pub max_tokens_field: &'static str,
    pub min_tokens: u32,
    pub ignore_eos: bool,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    /// Alternatives to report beside each token; `None`: no log-probabilities.
    pub logprobs: Option<u32>,
    pub stream: bool,
    pub include_usage: bool,
    pub cache_salt: String,
    /// Larger is more urgent. In requests, as with vLLM, smaller is.
    pub priority: i32,
}

impl Parameters {
    /// Takes the common fields out of a body. The kinds of request read their own before and after.
    pub fn read(body: &mut Object) -> Result<Self, ApiError> {
        let model = body
            .string("model")?
            .filter(|model| !model.is_empty())
            .ok_or_else(|| {
                ApiError::field(
                    "model",
                    "model is required: GET /v1/models lists what is served",
                )
            })?;
        for refused in refused::ALWAYS {
            refused.check(body)?;
        }
        check_response_format(body)?;

        let temperature = body.number("temperature", 0.0..=2.0)?.unwrap_or(1.0);
        let top_p = body.number("top_p", 0.0..=1.0)?.unwrap_or(1.0);
        if top_p == 0.0 {
            return Err(ApiError::field(
                "top_p",
                "top_p must be greater than 0: for greedy decoding set temperature to 0",
            ));
        }
        // -1 says "all" in other servers, 0 does here.
        let top_k = body
            .integer("top_k", -1..=i64::from(u32::MAX))?
            .unwrap_or(0);
        let min_p = body.number("min_p", 0.0..=1.0)?.unwrap_or(0.0);
        let seed = read_seed(body)?;

        let max_completion_tokens = body.count("max_completion_tokens", 1)?;
        let max_tokens = body.count("max_tokens", 1)?;
        let min_tokens = body.count("min_tokens", 0)?.unwrap_or(0);
        let stream = body.boolean("stream", false)?;
        Ok(Self {
            model,
            temperature,
            top_p,
            top_k: u32::try_from(top_k).unwrap_or(0),
            min_p,
            seed,
            // The newer name wins, as with OpenAI.
            max_tokens: max_completion_tokens.or(max_tokens),
            max_tokens_field: if max_completion_tokens.is_some() {
                "max_completion_tokens"
            } else {
                "max_tokens"
            },
            min_tokens,
            ignore_eos: body.boolean("ignore_eos", false)?,
            stop: read_stop(body)?,
            stop_token_ids: read_stop_token_ids(body)?,
            logprobs: None,
            stream,
            include_usage: read_include_usage(body, stream)?,
            cache_salt: read_salt(body)?,
            priority: body
                .integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?
                .and_then(|priority| i32::try_from(priority).ok())
                .map_or(0, i32::saturating_neg),
        })
    }

    /// `seed_if_absent` is drawn once per request, so that an attempt that continues a run draws the same tokens.
    pub fn sampling(&self, seed_if_absent: u64) -> wire::Sampling {
        wire::Sampling {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            seed: self.seed.unwrap_or(seed_if_absent),
            top_logprobs: self.logprobs,
            min_p: self.min_p,
        }
    }

    /// `max_tokens` as [`super::budget`] allows them.
    pub fn stopping(&self, max_tokens: u32) -> wire::Stopping {
        wire::Stopping {
            max_tokens,
            min_tokens: self.min_tokens,
            ignore_eos: self.ignore_eos,
            stop_token_ids: self.stop_token_ids.clone(),
        }
    }
}

/// A whole number from -2^63 to 2^64 - 1: its bits are the seed. Floats are taken too, which are whole from 2^53 on.
fn read_seed(body: &mut Object) -> Result<Option<u64>, ApiError> {
    let Some(value) = body.take("seed") else {
        return Ok(None);
    };
    let number = value
        .as_f64()
        .ok_or_else(|| mismatch("seed".into(), "a whole number", &value))?;
    if let Some(seed) = value
        .as_u64()
        .or_else(|| value.as_i64().map(i64::cast_unsigned))
    {
        return Ok(Some(seed));
    }
    if number.fract() != 0.0 {
        return Err(mismatch("seed".into(), "a whole number", &value));
    }
    // Both bounds are powers of two, and so are exact as floats.
    if (0.0..18_446_744_073_709_551_616.0).contains(&number) {
        Ok(Some(number as u64))
    } else if (-9_223_372_036_854_775_808.0..0.0).contains(&number) {
        Ok(Some((number as i64).cast_unsigned()))
    } else {
        Err(ApiError::field(
            "seed",
            "seed must be from -9223372036854775808 to 18446744073709551615",
        ))
    }
}

fn read_salt(body: &mut Object) -> Result<String, ApiError> {
    let salt = body.string("cache_salt")?.unwrap_or_default();
    if salt.len() > LONGEST_SALT {
        let message = format!("cache_salt must have at most {LONGEST_SALT} bytes");
        return Err(ApiError::field("cache_salt", message));
    }
    Ok(salt)
}

fn read_stop(body: &mut Object) -> Result<Vec<String>, ApiError> {
    let items = match body.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => vec![Value::String(text)],
        Some(Value::Array(items)) => items,
        Some(other) => {
            return Err(mismatch(
                "stop".into(),
                "a string or an array of strings",
                &other,
            ));
        }
    };
    if items.len() > MAX_STOP_STRINGS {
        return Err(ApiError::field(
            "stop",
            format!(
                "stop must hold at most {MAX_STOP_STRINGS} strings, found {}",
                items.len()
            ),
        ));
    }
    items
        .into_iter()
        .enumerate()
        .map(|(index, item)| match item {
            Value::String(text) if text.len() > LONGEST_STOP_STRING => Err(ApiError::field(
                format!("stop[{index}]"),
                format!("stop[{index}] must have at most {LONGEST_STOP_STRING} bytes"),
            )),
            Value::String(text) if !text.is_empty() => Ok(text),
            Value::String(_) => Err(ApiError::field(
                "stop",
                format!("stop[{index}] must not be empty"),
            )),
            other => Err(mismatch(format!("stop[{index}]"), "a string", &other)),
        })
        .collect()
}

fn read_stop_token_ids(body: &mut Object) -> Result<Vec<u32>, ApiError> {
    let ids = body.array("stop_token_ids")?.unwrap_or_default();
    if ids.len() > MAX_STOP_TOKENS {
        let message = format!(
            "stop_token_ids must hold at most {MAX_STOP_TOKENS} ids, found {}",
            ids.len()
        );
        return Err(ApiError::field("stop_token_ids", message));
    }
    ids.iter()
        .enumerate()
        .map(|(index, id)| token_id(format!("stop_token_ids[{index}]"), id))
        .collect()
}

fn read_include_usage(body: &mut Object, stream: bool) -> Result<bool, ApiError> {
    let Some(mut options) = body.object("stream_options")? else {
        return Ok(false);
    };
    if !stream {
        return Err(ApiError::field(
            "stream_options",
            "stream_options is only allowed when stream is true",
        ));
    }
    for refused in refused::OF_STREAMS {
        refused.check(&mut options)?;
    }
    options.boolean("include_usage", false)
}

fn check_response_format(body: &mut Object) -> Result<(), ApiError> {
    let Some(mut format) = body.object("response_format")? else {
        return Ok(());
    };
    match format.string("type")?.as_deref() {
        Some("text") => Ok(()),
        Some(other) => Err(ApiError::unsupported(
            "response_format.type",
            format!(
                "response_format.type {:?} is not supported by this version: answers are text",
                echo(other)
            ),
        )),
        None => Err(ApiError::field(
            "response_format.type",
            "response_format.type is required",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::super::field::parse_body;
    use super::*;

    fn read(fields: &str) -> Result<Parameters, ApiError> {
        Parameters::read(
            &mut parse_body(format!("{{\"model\": \"m\"{fields}}}").as_bytes()).unwrap(),
        )
    }

    #[test]
    fn a_bare_request_gets_openai_defaults() {
        let parameters = read("").unwrap();
        let sampling = parameters.sampling(99);
        assert_eq!(
            (
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
                sampling.seed
            ),
            (1.0, 1.0, 0, 99)
        );
        assert_eq!(sampling.top_logprobs, None);
        assert_eq!(parameters.max_tokens, None);
        assert!(!parameters.stream && parameters.stop.is_empty());
    }

    #[test]
    fn harmless_fields_are_ignored_whatever_they_hold() {
        let fields = r#", "user": 5, "metadata": {"a": "b"}, "store": true, "service_tier": "flex", "made_up": [[]],
            "parallel_tool_calls": true, "reasoning_effort": "low", "n": 1, "best_of": 1, "echo": false, "suffix": null,
            "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0,
            "skip_special_tokens": true, "spaces_between_special_tokens": true, "return_token_ids": false, "response_format": {"type": "text"}"#;
        assert_eq!(read(fields).unwrap(), read("").unwrap());
    }

    #[test]
    fn what_would_change_the_answer_and_cannot_be_honoured_is_refused_by_name() {
        for (field, value) in [
            ("n", "2"),
            ("best_of", "3"),
            ("echo", "true"),
            ("suffix", "\"x\""),
            ("logit_bias", "{\"5\": 1}"),
            ("presence_penalty", "0.5"),
            ("frequency_penalty", "-1"),
            ("repetition_penalty", "1.1"),
            ("use_beam_search", "true"),
            ("guided_json", "{}"),
            ("allowed_token_ids", "[1]"),
            ("skip_special_tokens", "false"),
            ("detokenize", "false"),
            ("return_token_ids", "true"),
            ("typical_p", "0.5"),
            ("prompt_embeds", "\"AAAA\""),
            ("web_search_options", "{}"),
        ] {
            let error = read(&format!(", \"{field}\": {value}")).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field), "{error}");
            assert_eq!(
                error.code.as_deref(),
                Some("unsupported_parameter"),
                "{error}"
            );
            assert!(
                error
                    .message
                    .starts_with(&format!("{field} is not supported")),
                "{error}"
            );
        }
        let error =
            read(r#", "response_format": {"type": "json_schema", "json_schema": {}}"#).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("response_format.type"));
        let fields = r#", "stream": true, "stream_options": {"continuous_usage_stats": true}"#;
        let error = read(fields).unwrap_err();
        assert_eq!(
            error.param.as_deref(),
            Some("stream_options.continuous_usage_stats")
        );
    }

    #[test]
    fn wrong_types_and_ranges_name_the_field() {
        for (fields, param) in [
            (r#", "temperature": "hot""#, "temperature"),
            (r#", "temperature": -0.1"#, "temperature"),
            (r#", "temperature": 2.1"#, "temperature"),
            (r#", "top_p": 0"#, "top_p"),
            (r#", "top_p": 1.01"#, "top_p"),
            (r#", "top_k": -2"#, "top_k"),
            (r#", "top_k": 1.5"#, "top_k"),
            (r#", "min_p": 2"#, "min_p"),
            (r#", "seed": "7""#, "seed"),
            (r#", "seed": 1.5"#, "seed"),
            (r#", "seed": 18446744073709551616"#, "seed"),
            (r#", "seed": -1e30"#, "seed"),
            (r#", "max_tokens": 0"#, "max_tokens"),
            (r#", "max_completion_tokens": -1"#, "max_completion_tokens"),
            (r#", "max_tokens": "many""#, "max_tokens"),
            (r#", "min_tokens": -1"#, "min_tokens"),
            (r#", "ignore_eos": 1"#, "ignore_eos"),
            (r#", "stop": 5"#, "stop"),
            (r#", "stop": ["a", 5]"#, "stop[1]"),
            (r#", "stop": ["a", ""]"#, "stop"),
            (r#", "stop_token_ids": [1, -1]"#, "stop_token_ids[1]"),
            (r#", "stream": "true""#, "stream"),
            (
                r#", "stream_options": {"include_usage": true}"#,
                "stream_options",
            ),
            (
                r#", "stream": true, "stream_options": {"include_usage": 1}"#,
                "stream_options.include_usage",
            ),
            (r#", "priority": 3000000000"#, "priority"),
            (r#", "cache_salt": 5"#, "cache_salt"),
            (r#", "n": "one""#, "n"),
            (r#", "echo": 1"#, "echo"),
        ] {
            let error = read(fields).unwrap_err();
            assert_eq!(error.status, 400);
            assert_eq!(error.param.as_deref(), Some(param), "{fields}: {error}");
        }
        let error = Parameters::read(&mut parse_body(b"{}").unwrap()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("model"));
    }

    #[test]
    fn stop_is_one_string_or_several_but_not_seventeen() {
        assert_eq!(read(r#", "stop": "END""#).unwrap().stop, ["END"]);
        assert_eq!(read(r#", "stop": ["a", "b"]"#).unwrap().stop, ["a", "b"]);
        assert!(read(r#", "stop": []"#).unwrap().stop.is_empty());
        let many = format!(", \"stop\": [{}]", vec!["\"x\""; 17].join(","));
        assert_eq!(
            read(&many).unwrap_err().message,
            "stop must hold at most 16 strings, found 17"
        );
    }

    #[test]
    fn what_stays_with_a_run_is_short() {
        let text = |length: usize| "x".repeat(length);
        for (fields, param) in [
            (
                format!(", \"stop\": [\"a\", \"{}\"]", text(LONGEST_STOP_STRING + 1)),
                "stop[1]",
            ),
            (
                format!(", \"stop_token_ids\": {:?}", vec![1; MAX_STOP_TOKENS + 1]),
                "stop_token_ids",
            ),
            (
                format!(", \"cache_salt\": \"{}\"", text(LONGEST_SALT + 1)),
                "cache_salt",
            ),
        ] {
            assert_eq!(read(&fields).unwrap_err().param.as_deref(), Some(param));
        }
        let longest = format!(
            ", \"stop\": \"{}\", \"stop_token_ids\": {:?}, \"cache_salt\": \"{}\"",
            text(LONGEST_STOP_STRING),
            vec![1; MAX_STOP_TOKENS],
            text(LONGEST_SALT)
        );
        assert_eq!(read(&longest).unwrap().cache_salt.len(), LONGEST_SALT);
    }

    #[test]
    fn seeds_of_any_integer_are_kept_apart() {
        let seed = |text: &str| read(&format!(", \"seed\": {text}")).unwrap().seed.unwrap();
        assert_eq!(seed("0"), 0);
        assert_eq!(seed("18446744073709551615"), u64::MAX);
        assert_eq!(seed("-1"), u64::MAX);
        assert_eq!(seed("-2"), u64::MAX - 1);
        assert_eq!(seed("-9223372036854775808"), 1 << 63);
        // As JavaScript writes what is larger than its exact integers.
        assert_eq!(seed("1e18"), 1_000_000_000_000_000_000);
        assert_eq!(seed("-1e18"), 1_000_000_000_000_000_000_u64.wrapping_neg());
    }

    #[test]
    fn the_newer_name_of_the_token_limit_wins() {
        assert_eq!(
            read(r#", "max_tokens": 5, "max_completion_tokens": 7"#)
                .unwrap()
                .max_tokens,
            Some(7)
        );
        assert_eq!(read(r#", "max_tokens": 5"#).unwrap().max_tokens, Some(5));
        assert_eq!(read(r#", "top_k": -1"#).unwrap().top_k, 0);
    }
}

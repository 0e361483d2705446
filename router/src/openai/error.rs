//! Errors as OpenAI's clients read them: `{"error":{"message","type","param","code"}}`.

use std::borrow::Cow;

use serde::Serialize;

use crate::run::RunFailure;

/// Seconds of `Retry-After` where nobody knows better.
pub const RETRY_AFTER_SECONDS: u64 = 1;

/// Bytes of a message. Templates and tokenizers speak in words of their own, which may hold all that the client sent.
const LONGEST_MESSAGE: usize = 1024;

/// Bytes of a client's text that a message repeats.
const LONGEST_ECHO: usize = 100;

/// What a client is told instead of an answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status, 400 to 599.
    pub status: u16,
    pub message: String,
    /// The field or header at fault, as a path: `messages[1].content`.
    pub param: Option<String>,
    /// A word for programs, such as `model_not_found`.
    pub code: Option<Cow<'static, str>>,
    /// Set on each 429 and 503.
    pub retry_after_seconds: Option<u64>,
}

impl ApiError {
    fn new(status: u16, message: String) -> Self {
        Self {
            status,
            message: shortened(message, LONGEST_MESSAGE),
            param: None,
            code: None,
            retry_after_seconds: matches!(status, 429 | 503).then_some(RETRY_AFTER_SECONDS),
        }
    }

    /// 400: the request is at fault.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, message.into())
    }

    /// 400 about one field.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = Self::bad_request(message);
        error.param = Some(param.into());
        error
    }

    /// 400 about a field that this version cannot honour and that would change the answer.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::field(param, message).with_code("unsupported_parameter")
    }

    /// 404: no such model; says which there are.
    pub fn model_not_found(model: &str, served: &[String]) -> Self {
        let served = if served.is_empty() {
            "no model is served yet".to_owned()
        } else {
            format!("served are: {}", served.join(", "))
        };
        let model = echo(model);
        let mut error = Self::new(404, format!("the model {model:?} does not exist; {served}"));
        error.param = Some("model".to_owned());
        error.with_code("model_not_found")
    }

    /// 503: its policy is refused. What is wrong with it is for those who may see the admin port.
    pub fn policy_refused(model: &str, policy: &str) -> Self {
        let model = echo(model);
        let message = format!(
            "the model {model:?} is not served: RoutePolicy {policy} is refused, and this router knows no earlier version of it; GET /v1/policies on the admin port says why"
        );
        Self::unavailable(message, "policy_refused")
    }

    /// 404: no such route.
    pub fn unknown_route(method: &str, path: &str) -> Self {
        let (method, path) = (echo(method), echo(path));
        Self::new(404, format!("unknown route {method} {path}: see /v1/models, /v1/chat/completions, /v1/completions"))
            .with_code("unknown_url")
    }

    /// 405: the route exists for other methods.
    pub fn method_not_allowed(method: &str, path: &str) -> Self {
        let (method, path) = (echo(method), echo(path));
        Self::new(
            405,
            format!("{path} does not take {method}: the allow header says what it takes"),
        )
        .with_code("method_not_allowed")
    }

    /// 408: the body did not come in time.
    pub fn body_timeout(seconds: u64) -> Self {
        Self::new(
            408,
            format!("the request body did not arrive within {seconds} s"),
        )
        .with_code("request_timeout")
    }

    /// 413: the body is larger than the router takes.
    pub fn body_too_large(limit: usize) -> Self {
        Self::new(
            413,
            format!("the request body is larger than {limit} bytes: shorten it, or start the router with a larger --max-body-bytes"),
        )
        .with_code("request_too_large")
    }

    /// 401: no key that this router knows. Never repeats what was sent.
    pub fn unauthorized(message: &'static str) -> Self {
        Self::new(401, message.to_owned()).with_code("invalid_api_key")
    }

    /// 429: the key has used up what it may use. `retry_after` is in whole seconds, at least 1.
    pub fn rate_limited(message: String, retry_after: u64) -> Self {
        let mut error = Self::new(429, message).with_code("rate_limit_exceeded");
        error.retry_after_seconds = Some(retry_after.max(RETRY_AFTER_SECONDS));
        error
    }

    /// 503: the router is at one of its limits, which the message names.
    pub fn overloaded(message: impl Into<String>) -> Self {
        Self::unavailable(message, "overloaded")
    }

    /// 503: the router ends. Another one, or its successor, takes the request.
    pub fn shutting_down() -> Self {
        Self::unavailable(
            "this router is shutting down: send the request again",
            "shutting_down",
        )
    }

    /// 500: a fault of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(500, message.into()).with_code("internal_error")
    }

    /// 503: what is needed is not there yet.
    pub fn unavailable(message: impl Into<String>, code: &'static str) -> Self {
        Self::new(503, message.into()).with_code(code)
    }

    pub fn with_code(mut self, code: impl Into<Cow<'static, str>>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// OpenAI's word for the class of error.
    pub fn kind(&self) -> &'static str {
        kind(self.status)
    }

    /// The body: always an object with all four members.
    pub fn body(&self) -> ErrorBody<'_> {
        ErrorBody {
            error: ErrorMembers {
                message: &self.message,
                kind: self.kind(),
                param: self.param.as_deref(),
                code: self.code.as_deref(),
            },
        }
    }
}

/// OpenAI's word for the class of error, by status.
pub fn kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        429 => "rate_limit_error",
        400..=499 => "invalid_request_error",
        _ => "server_error",
    }
}

/// A client's text as a message may repeat it.
pub fn echo(text: &str) -> Cow<'_, str> {
    if text.len() <= LONGEST_ECHO {
        return Cow::Borrowed(text);
    }
    Cow::Owned(shortened(text.to_owned(), LONGEST_ECHO))
}

/// At most `longest` bytes and a mark that something is missing.
fn shortened(mut text: String, longest: usize) -> String {
    if text.len() > longest {
        let mut end = longest;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}

impl From<RunFailure> for ApiError {
    fn from(failure: RunFailure) -> Self {
        let mut error = Self::new(failure.status, failure.message);
        error.param = failure.param;
        error.code = Some(failure.code.into());
        if error.retry_after_seconds.is_some() {
            error.retry_after_seconds = failure.retry_after_seconds.or(error.retry_after_seconds);
        }
        error
    }
}

#[derive(Debug, Serialize)]
pub struct ErrorBody<'a> {
    pub error: ErrorMembers<'a>,
}

#[derive(Debug, Serialize)]
pub struct ErrorMembers<'a> {
    pub message: &'a str,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub param: Option<&'a str>,
    pub code: Option<&'a str>,
}

#[cfg(test)]
mod tests {
    use baton_protocol::failure::FailureClass;

    use super::*;

    #[test]
    fn a_body_has_all_four_members_even_when_two_are_null() {
        let body = serde_json::to_value(ApiError::bad_request("no").body()).unwrap();
        assert_eq!(
            body,
            serde_json::json!({"error": {"message": "no", "type": "invalid_request_error", "param": null, "code": null}})
        );
    }

    #[test]
    fn an_unknown_model_is_told_what_is_served() {
        let error = ApiError::model_not_found("nope", &["a".into(), "b".into()]);
        assert_eq!(
            error.message,
            r#"the model "nope" does not exist; served are: a, b"#
        );
        assert_eq!(error.param.as_deref(), Some("model"));
        assert_eq!(error.code.as_deref(), Some("model_not_found"));
    }

    #[test]
    fn every_429_and_503_says_when_to_try_again_and_nothing_else_does() {
        let failure = |status, retry_after_seconds| {
            ApiError::from(RunFailure {
                engine: None,
                told: false,
                class: FailureClass::NoWorker,
                status,
                message: "m".into(),
                param: None,
                code: "c",
                retry_after_seconds,
            })
            .retry_after_seconds
        };
        assert_eq!(failure(503, None), Some(1));
        assert_eq!(failure(503, Some(7)), Some(7));
        assert_eq!(failure(429, Some(2)), Some(2));
        assert_eq!(failure(500, Some(2)), None);
        assert_eq!(ApiError::overloaded("full").retry_after_seconds, Some(1));
        assert_eq!(
            ApiError::rate_limited(String::new(), 0).retry_after_seconds,
            Some(1)
        );
    }

    #[test]
    fn no_message_repeats_more_than_a_little_of_what_a_client_sent() {
        let long = "é".repeat(1 << 20);
        for error in [
            ApiError::model_not_found(&long, &["m".into()]),
            ApiError::unknown_route(&long, &long),
            ApiError::method_not_allowed("GET", &long),
        ] {
            assert!(error.message.len() < 400, "{}", error.message.len());
            assert!(error.message.contains('…'));
        }
        let error = ApiError::model_not_found(&long, &["m".into()]);
        assert!(error.message.ends_with("served are: m"), "{error}");
        // Whoever made the message.
        let error = ApiError::bad_request(format!("the template says {long}"));
        assert!(error.message.len() <= LONGEST_MESSAGE + '…'.len_utf8());
        assert_eq!(echo("short"), "short");
    }
}

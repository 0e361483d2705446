//! Answers and errors as HTTP responses.

use axum::body::Body;
use axum::response::Response;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderName, HeaderValue, StatusCode};
use serde::Serialize;

use super::headers::RUN;
use crate::openai::error::ApiError;

/// Proxies that buffer answers would hold back tokens; this is how they are told not to.
const UNBUFFERED: (HeaderName, HeaderValue) = (
    HeaderName::from_static("x-accel-buffering"),
    HeaderValue::from_static("no"),
);

/// 200 with a JSON body.
pub fn json(value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => json_bytes(StatusCode::OK, body),
        Err(cause) => error(&ApiError::internal(format!(
            "the answer cannot be written: {cause}"
        ))),
    }
}

/// A response whose body is JSON already.
pub fn json_bytes(status: StatusCode, body: Vec<u8>) -> Response {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// An error in OpenAI's form.
pub fn error(error: &ApiError) -> Response {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    // Two levels of strings always serialise.
    let body = serde_json::to_vec(&error.body()).unwrap_or_default();
    let mut response = json_bytes(status, body);
    if let Some(seconds) = error.retry_after_seconds {
        response
            .headers_mut()
            .insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

/// A stream of server-sent events.
pub fn events(body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    let (name, value) = UNBUFFERED;
    headers.insert(name, value);
    response
}

/// Names the run, for `baton explain`.
pub fn with_run(mut response: Response, run: &str) -> Response {
    if let Ok(value) = HeaderValue::from_str(run) {
        response.headers_mut().insert(RUN, value);
    }
    response
}

//! Headers of a request: its id, `x-baton-mode`, trace context.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use baton_telemetry::context::TraceContext;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::Front;
use crate::openai::error::ApiError;
use crate::run::Mode;

pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
pub const RUN: HeaderName = HeaderName::from_static("x-baton-run");
const MODE: HeaderName = HeaderName::from_static("x-baton-mode");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

const LONGEST_REQUEST_ID: usize = 128;

/// The id of the request that is served, in its extensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestId(pub Arc<str>);

/// Gives each request its id and returns it, with errors too.
pub(super) async fn with_request_id(
    State(front): State<Arc<Front>>,
    mut request: Request,
    next: Next,
) -> Response {
    let id = sent_id(request.headers()).unwrap_or_else(|| front.draws.request_id());
    let value = HeaderValue::from_str(&id);
    request.extensions_mut().insert(RequestId(id.into()));
    let mut response = next.run(request).await;
    if let Ok(value) = value {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// The client's id, if it is one: up to 128 visible ASCII characters.
fn sent_id(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(&REQUEST_ID)?.as_bytes();
    let fits =
        (1..=LONGEST_REQUEST_ID).contains(&value.len()) && value.iter().all(u8::is_ascii_graphic);
    fits.then(|| String::from_utf8_lossy(value).into_owned())
}

/// The mode that a client asks for. Whether it counts is the policy's.
pub fn mode(headers: &HeaderMap) -> Result<Option<Mode>, ApiError> {
    let Some(value) = headers.get(&MODE) else {
        return Ok(None);
    };
    String::from_utf8_lossy(value.as_bytes())
        .parse()
        .map(Some)
        .map_err(|error: crate::run::UnknownMode| ApiError::field(MODE.as_str(), error.to_string()))
}

/// W3C trace context. What is none is dropped, as the standard says.
pub fn traceparent(headers: &HeaderMap) -> Option<TraceContext> {
    TraceContext::parse(headers.get(&TRACEPARENT)?.to_str().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(
            HeaderName::from_static(name),
            HeaderValue::from_bytes(value.as_bytes()).unwrap(),
        )])
    }

    #[test]
    fn an_id_of_visible_ascii_is_kept_and_others_are_not() {
        let longest = "x".repeat(128);
        for (value, kept) in [
            ("abc-1", true),
            (longest.as_str(), true),
            (&format!("{longest}x"), false),
            ("a b", false),
            ("é", false),
            ("", false),
        ] {
            assert_eq!(
                sent_id(&headers("x-request-id", value)).is_some(),
                kept,
                "{value:?}"
            );
        }
    }

    #[test]
    fn a_mode_is_one_of_three_words() {
        assert_eq!(mode(&HeaderMap::new()), Ok(None));
        assert_eq!(
            mode(&headers("x-baton-mode", "Conditional")),
            Ok(Some(Mode::Conditional))
        );
        let error = mode(&headers("x-baton-mode", "conditional")).unwrap_err();
        assert_eq!(
            (error.status, error.param.as_deref()),
            (400, Some("x-baton-mode"))
        );
    }

    #[test]
    fn trace_context_is_passed_on_only_if_it_is_one() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert_eq!(
            traceparent(&headers("traceparent", good)).map(|context| context.traceparent()),
            Some(good.to_owned())
        );
        let future = format!("01{}-more", &good[2..]);
        assert!(traceparent(&headers("traceparent", &future)).is_some());
        for bad in [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        ] {
            assert_eq!(traceparent(&headers("traceparent", bad)), None, "{bad}");
        }
    }
}

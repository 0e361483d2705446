//! An engine as an attempt calls it.

use baton_protocol::card::{Card, Dispatch, Split};
use baton_protocol::ids::WorkerId;
use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Uri};
use http_body_util::Full;

use crate::forward::ours::Kind;
use crate::run::EngineHead;

/// About one connection, or the router's own to say.
const NOT_PASSED_ON: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "transfer-encoding",
    "upgrade",
    "trailer",
    "date",
    "server",
    "x-request-id",
];

/// Where an engine is and what it is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    pub worker: WorkerId,
    /// `host:port`.
    pub address: String,
    pub kind: Kind,
    /// Its own name of the model.
    pub model: String,
    pub split: Split,
}

impl Engine {
    /// The engine of a worker; `None` for one that is called by Baton's own protocol.
    ///
    /// # Errors
    /// Its card gives no address that can be called, in words.
    pub fn of(card: &Card) -> Result<Option<Self>, String> {
        let Dispatch::OpenAiHttp { url, model, split } = &card.dispatch else {
            return Ok(None);
        };
        let wrong = |why: &str| {
            let worker = &card.worker;
            Err(format!(
                "worker {worker}: dispatch.url of its card is {url:?}, {why}: it must be http://HOST:PORT"
            ))
        };
        let Ok(uri) = url.parse::<Uri>() else {
            return wrong("which is no URL");
        };
        if uri.scheme_str() != Some("http") {
            return wrong("of another scheme");
        }
        let Some(authority) = uri.authority() else {
            return wrong("without a host");
        };
        let address = match authority.port_u16() {
            Some(_) => authority.as_str().to_owned(),
            None => format!("{authority}:80"),
        };
        Ok(Some(Self {
            worker: card.worker.clone(),
            address,
            kind: Kind::of(&card.engine.kind),
            model: if model.is_empty() {
                card.model.name.clone()
            } else {
                model.clone()
            },
            split: split.clone(),
        }))
    }

    /// A leg's request.
    pub fn request(
        &self,
        path: &'static str,
        operation: &str,
        traceparent: &str,
        body: Bytes,
    ) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = Uri::from_static(path);
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(ACCEPT, HeaderValue::from_static("*/*"));
        for (name, value) in [
            (HOST, self.address.as_str()),
            (HeaderName::from_static("x-request-id"), operation),
            (HeaderName::from_static("traceparent"), traceparent),
        ] {
            // An address, an id of ours, or nothing where nothing is traced.
            if let (false, Ok(value)) = (value.is_empty(), HeaderValue::from_str(value)) {
                headers.insert(name, value);
            }
        }
        request
    }
}

/// What of an answer's head is passed on.
pub fn head(parts: &http::response::Parts) -> EngineHead {
    let passed_on = |name: &HeaderName| !NOT_PASSED_ON.contains(&name.as_str());
    let headers: HeaderMap = parts
        .headers
        .iter()
        .filter(|(name, _)| passed_on(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    EngineHead {
        status: parts.status,
        headers,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::samples;

    fn engine(url: &str) -> Result<Option<Engine>, String> {
        let mut card = samples::card("d");
        card.dispatch = Dispatch::OpenAiHttp {
            url: url.to_owned(),
            model: String::new(),
            split: Split::None,
        };
        Engine::of(&card)
    }

    #[test]
    fn an_address_is_taken_from_the_card() {
        assert_eq!(Engine::of(&samples::card("d")), Ok(None));
        for (url, address) in [
            ("http://10.0.0.7:8000", "10.0.0.7:8000"),
            ("http://engine", "engine:80"),
            ("http://[::1]:8000/", "[::1]:8000"),
        ] {
            let engine = engine(url).unwrap().unwrap();
            assert_eq!(
                (engine.address.as_str(), engine.model.as_str()),
                (address, "m")
            );
        }
        for url in ["https://h:1", "h:1", "", "http://"] {
            let error = engine(url).unwrap_err();
            assert!(error.contains("worker d: dispatch.url"), "{error}");
        }
    }

    #[test]
    fn a_leg_says_who_asks_and_not_with_whose_key() {
        let engine = engine("http://h:1").unwrap().unwrap();
        let request = engine.request("/v1/completions", "r-1-01", "", Bytes::new());
        let names: Vec<&str> = request.headers().keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["content-type", "accept", "host", "x-request-id"]);
    }

    #[test]
    fn what_is_about_one_connection_stays_there() {
        let mut response = http::Response::new(());
        for (name, value) in [
            ("content-type", "application/json"),
            ("retry-after", "3"),
            ("x-request-id", "theirs"),
            ("server", "uvicorn"),
            ("transfer-encoding", "chunked"),
        ] {
            let value = HeaderValue::from_static(value);
            response
                .headers_mut()
                .insert(HeaderName::from_static(name), value);
        }
        let head = head(&response.into_parts().0);
        let names: Vec<&str> = head.headers.keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["content-type", "retry-after"]);
    }
}

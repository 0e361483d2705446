//! HTTP to a router: JSON in and out, and streams of server-sent events.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use http::uri::InvalidUri;
use http::{HeaderMap, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

use baton_protocol::sse::Decoder;

use crate::failure::wrong_input;

/// One router's address.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    pool: Pool<HttpConnector, Full<Bytes>>,
    base: String,
    token: Option<String>,
}

/// The token of a file, for a router whose admin port asks for one.
///
/// # Errors
/// The file cannot be read or is empty.
pub(crate) fn token(file: Option<&Path>) -> anyhow::Result<Option<String>> {
    let Some(file) = file else { return Ok(None) };
    let text = std::fs::read_to_string(file).map_err(|error| {
        wrong_input(format!(
            "cannot read the token of {}: {error}",
            file.display()
        ))
    })?;
    let token = text.trim();
    if token.is_empty() {
        return Err(wrong_input(format!("{} holds no token", file.display())));
    }
    if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(wrong_input(format!(
            "{} holds more than a token: write one line of visible ASCII characters",
            file.display()
        )));
    }
    Ok(Some(token.to_owned()))
}

/// An answer that was read whole.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
}

impl Answer {
    /// What the server says is wrong, in one line.
    pub(crate) fn complaint(&self) -> String {
        match self.body["error"]["message"]
            .as_str()
            .or(self.body.as_str())
        {
            Some(message) if !message.is_empty() => format!("{}: {message}", self.status.as_u16()),
            _ => self.status.to_string(),
        }
    }

    pub(crate) fn run(&self) -> Option<String> {
        run(&self.headers)
    }
}

/// The run id of a response.
pub(crate) fn run(headers: &HeaderMap) -> Option<String> {
    Some(headers.get("x-baton-run")?.to_str().ok()?.to_owned())
}

impl Client {
    /// `address` is `HOST:PORT` or `http://HOST:PORT`.
    ///
    /// # Errors
    /// It is neither.
    pub(crate) fn new(address: &str) -> anyhow::Result<Self> {
        let short = address.trim_end_matches('/');
        let base = if short.contains("://") {
            short.to_owned()
        } else {
            format!("http://{short}")
        };
        let wrong = |problem: &str| {
            wrong_input(format!(
                "{address:?} is no address of a router: {problem}; give HOST:PORT or http://HOST:PORT"
            ))
        };
        let uri: Uri = base
            .parse()
            .map_err(|error: InvalidUri| wrong(&error.to_string()))?;
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(wrong("it has no host"));
        };
        if scheme != "http" {
            return Err(wrong(&format!("this command does not speak {scheme}")));
        }
        if uri.path().len() > 1 || uri.query().is_some() {
            return Err(wrong("it goes on after the port"));
        }
        // What is beside the host is a port that is none, or a user's name.
        if authority.port_u16().is_none() && authority.as_str() != authority.host() {
            return Err(wrong("it is not a host and a port"));
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(Duration::from_secs(5)));
        Ok(Self {
            pool: Pool::builder(TokioExecutor::new()).build(connector),
            base,
            token: None,
        })
    }

    /// Sends this bearer token with each request.
    pub(crate) fn with_token(self, token: Option<String>) -> Self {
        Self { token, ..self }
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// # Errors
    /// Nobody answers; a status that is not 2xx is an answer.
    pub(crate) async fn get(&self, path: &str) -> anyhow::Result<Answer> {
        let response = self.send(Method::GET, path, &[], Bytes::new()).await?;
        self.whole(response).await
    }

    /// As [`Client::get`], and any status but success is an error.
    pub(crate) async fn get_good(&self, path: &str) -> anyhow::Result<Value> {
        let answer = self.get(path).await?;
        if !answer.status.is_success() {
            bail!("{}{path} answers {}", self.base, answer.complaint());
        }
        Ok(answer.body)
    }

    pub(crate) async fn post(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> anyhow::Result<Answer> {
        let response = self
            .send(Method::POST, path, headers, Bytes::from(body.to_string()))
            .await?;
        self.whole(response).await
    }

    /// Sends and returns as soon as the head of the answer is there.
    pub(crate) async fn stream(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> anyhow::Result<Result<Events, Answer>> {
        let response = self
            .send(Method::POST, path, headers, Bytes::from(body.to_string()))
            .await?;
        if response.status().is_success() {
            return Ok(Ok(Events::new(response)));
        }
        Ok(Err(self.whole(response).await?))
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<http::Response<Incoming>> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base));
        request = request.header("content-type", "application/json");
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        // The address was read when this was made, so what cannot be sent is in the path or a header.
        let request = request.body(Full::new(body)).map_err(|error| {
            let sent: Vec<&str> = headers.iter().map(|(name, _)| *name).collect();
            wrong_input(format!(
                "cannot ask for {path:?} with {}: {error}",
                if sent.is_empty() {
                    "no headers of its own".to_owned()
                } else {
                    sent.join(", ")
                }
            ))
        })?;
        self.pool.request(request).await.with_context(|| {
            format!(
                "no router answers at {}: is baton up running there?",
                self.base
            )
        })
    }

    async fn whole(&self, response: http::Response<Incoming>) -> anyhow::Result<Answer> {
        let (head, body) = response.into_parts();
        let bytes = body
            .collect()
            .await
            .with_context(|| format!("the answer of {} broke off", self.base))?
            .to_bytes();
        let body = serde_json::from_slice(&bytes)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).trim().to_owned()));
        Ok(Answer {
            status: head.status,
            headers: head.headers,
            body,
        })
    }
}

/// Server-sent events, one JSON value each.
#[derive(Debug)]
pub(crate) struct Events {
    pub(crate) headers: HeaderMap,
    body: Incoming,
    decoder: Decoder,
    ended: bool,
}

/// Bytes of one event: a token with twenty alternatives has a hundredth of it.
const LONGEST_EVENT: usize = 1 << 20;

impl Events {
    fn new(response: http::Response<Incoming>) -> Self {
        let (head, body) = response.into_parts();
        Self {
            headers: head.headers,
            body,
            decoder: Decoder::new(LONGEST_EVENT),
            ended: false,
        }
    }

    /// The next event; none after `[DONE]`.
    ///
    /// # Errors
    /// The stream breaks off, or ends with an error event.
    pub(crate) async fn next(&mut self) -> anyhow::Result<Option<Value>> {
        loop {
            if let Some(event) = self.decoder.next_event() {
                if event.data.trim() == "[DONE]" {
                    self.ended = true;
                    return Ok(None);
                }
                let value: Value =
                    serde_json::from_str(&event.data).context("an event is not JSON")?;
                if let Some(message) = value["error"]["message"].as_str() {
                    bail!("the router ended the stream: {message}");
                }
                return Ok(Some(value));
            }
            match self.body.frame().await {
                Some(frame) => {
                    if let Ok(data) = frame.context("the stream broke off")?.into_data() {
                        self.decoder
                            .push(&data)
                            .context("the stream cannot be read")?;
                    }
                }
                None if self.ended => return Ok(None),
                None => bail!("the stream ended before it was done"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_be_short() {
        for (address, base) in [
            ("127.0.0.1:8001", "http://127.0.0.1:8001"),
            ("http://h:1/", "http://h:1"),
            ("[::1]:1", "http://[::1]:1"),
        ] {
            assert_eq!(Client::new(address).unwrap().base(), base);
        }
    }

    #[test]
    fn what_is_no_address_is_said_before_anything_is_sent() {
        for (address, problem) in [
            ("", "is no address"),
            ("http:///", "is no address"),
            ("a b", "is no address"),
            ("https://h:1", "does not speak https"),
            ("http://h:1/v1", "goes on after the port"),
            ("h:99999999", "not a host and a port"),
            ("user@h", "not a host and a port"),
        ] {
            let error = Client::new(address).unwrap_err().to_string();
            assert!(error.contains("is no address of a router"), "{error}");
            assert!(error.contains(problem), "{error}");
        }
    }

    #[tokio::test]
    async fn a_header_that_cannot_be_sent_is_not_blamed_on_the_address() {
        let client = Client::new("127.0.0.1:1").unwrap();
        let error = client
            .post("/v1/x", &[("x-baton-mode", "a\nb")], &Value::Null)
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("cannot ask for \"/v1/x\" with x-baton-mode: "),
            "{error}"
        );
    }
}

//! An HTTP client of one connection per request, so that dropping an answer hangs up as a client that goes away does.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio_util::task::AbortOnDropHandle;

/// No single answer, and no wait for the next event of a stream, takes longer on a machine that works.
const PATIENCE: Duration = Duration::from_secs(180);

/// Speaks to one address.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    address: SocketAddr,
    /// What every path begins with.
    beneath: &'static str,
    patience: Duration,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub body: Bytes,
}

impl Answer {
    /// A header's value, or nothing.
    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// # Errors
    /// The body is not JSON.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.body)
            .with_context(|| format!("status {}, not JSON: {}", self.status, self.text()))
    }

    /// The answer, if its status says that all is well.
    ///
    /// # Errors
    /// Any other status.
    pub fn well(self) -> Result<Self> {
        ensure!(
            self.status == 200,
            "status {}: {}",
            self.status,
            self.text()
        );
        Ok(self)
    }
}

/// An answer whose body is still coming. Dropping it closes the connection.
#[derive(Debug)]
pub struct Open {
    pub status: u16,
    pub headers: http::HeaderMap,
    body: Incoming,
    patience: Duration,
    _connection: AbortOnDropHandle<()>,
}

impl Open {
    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }

    /// The next bytes of the body, or nothing at its end.
    ///
    /// # Errors
    /// The connection broke, or nothing came for too long.
    pub async fn more(&mut self) -> Result<Option<Bytes>> {
        loop {
            let patience = self.patience;
            let frame = tokio::time::timeout(patience, self.body.frame())
                .await
                .map_err(|_| anyhow!("nothing came for {patience:?}"))?;
            match frame {
                None => return Ok(None),
                Some(frame) => {
                    if let Ok(data) = frame?.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// All of the body.
    ///
    /// # Errors
    /// The connection broke, or nothing came for too long.
    pub async fn whole(mut self) -> Result<Answer> {
        let mut body = Vec::new();
        while let Some(data) = self.more().await? {
            body.extend_from_slice(&data);
        }
        Ok(Answer {
            status: self.status,
            headers: self.headers,
            body: body.into(),
        })
    }

    /// The body as server-sent events.
    pub fn events(self) -> Events {
        Events {
            open: self,
            pending: Vec::new(),
        }
    }
}

/// Server-sent events. Dropping them closes the connection.
#[derive(Debug)]
pub struct Events {
    pub open: Open,
    pending: Vec<u8>,
}

/// One server-sent event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `message` where none is given.
    pub name: String,
    pub data: String,
}

impl Events {
    /// The next event, or nothing at the end of the stream.
    ///
    /// # Errors
    /// The connection broke, or nothing came for too long.
    pub async fn next(&mut self) -> Result<Option<Event>> {
        loop {
            if let Some(end) = find(&self.pending, b"\n\n") {
                let block: Vec<u8> = self.pending.drain(..end + 2).collect();
                if let Some(event) = event(&String::from_utf8(block)?) {
                    return Ok(Some(event));
                }
                continue;
            }
            match self.open.more().await? {
                Some(data) => self.pending.extend_from_slice(&data),
                None => {
                    ensure!(
                        self.pending.is_empty(),
                        "the stream ends within an event: {:?}",
                        String::from_utf8_lossy(&self.pending)
                    );
                    return Ok(None);
                }
            }
        }
    }
}

fn event(block: &str) -> Option<Event> {
    let field = |name: &str| -> Vec<&str> {
        block
            .lines()
            .filter_map(|line| line.strip_prefix(name))
            .map(|value| value.strip_prefix(' ').unwrap_or(value))
            .collect()
    };
    let data = field("data:");
    // A comment, sent to keep the connection alive.
    if data.is_empty() {
        return None;
    }
    Some(Event {
        name: field("event:").first().unwrap_or(&"message").to_string(),
        data: data.join("\n"),
    })
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack
        .windows(needle.len())
        .position(|window| window == needle)
}

fn header<'a>(headers: &'a http::HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        Self {
            address,
            beneath: "",
            patience: PATIENCE,
        }
    }

    /// Waits for so long: what a test holds back takes longer than any answer should.
    #[must_use]
    pub fn patient(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// A server that is reached under a path of another, as through a proxy. The path is kept for as long as the process runs.
    pub fn beneath(address: SocketAddr, path: String) -> Self {
        let beneath = path.leak();
        Self {
            beneath,
            ..Self::new(address)
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// # Errors
    /// No connection, or no whole answer.
    pub async fn get(&self, path: &str) -> Result<Answer> {
        let request = http::Request::get(self.path(path)).body(Full::default())?;
        self.send(request).await?.whole().await
    }

    /// # Errors
    /// No connection, no whole answer, another status than 200, or no JSON.
    pub async fn get_json(&self, path: &str) -> Result<Value> {
        self.get(path)
            .await?
            .well()
            .with_context(|| format!("GET {path}"))?
            .json()
    }

    /// # Errors
    /// No connection, or no whole answer.
    pub async fn post(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Result<Answer> {
        self.open(path, headers, body).await?.whole().await
    }

    /// Sends a body and returns when the headers of the answer are there.
    ///
    /// # Errors
    /// No connection, or no headers.
    pub async fn open(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Result<Open> {
        self.open_bytes(path, headers, body.to_string().into())
            .await
    }

    /// The same with any bytes, JSON or not.
    ///
    /// # Errors
    /// No connection, or no headers.
    pub async fn open_bytes(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<Open> {
        let mut request =
            http::Request::post(self.path(path)).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.send(request.body(Full::new(body))?).await
    }

    fn path(&self, path: &str) -> String {
        format!("{}{path}", self.beneath)
    }

    async fn send(&self, mut request: http::Request<Full<Bytes>>) -> Result<Open> {
        let host = self.address.to_string();
        let stream = tokio::net::TcpStream::connect(self.address)
            .await
            .with_context(|| format!("connect {host}"))?;
        stream.set_nodelay(true)?;
        request.headers_mut().insert("host", host.parse()?);
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        // Owned by this call and then by the answer: whoever stops waiting hangs up.
        let connection = AbortOnDropHandle::new(tokio::spawn(async move {
            // An error of the connection shows as one of the body.
            let _ = connection.await;
        }));
        let patience = self.patience;
        let answer = tokio::time::timeout(patience, sender.send_request(request))
            .await
            .map_err(|_| anyhow!("no headers for {patience:?}"))?
            .context("no answer")?;
        let (parts, body) = answer.into_parts();
        Ok(Open {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body,
            patience,
            _connection: connection,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_with_name_and_without() {
        let plain = event("data: {\"a\":1}\n\n").unwrap();
        assert_eq!(
            (plain.name.as_str(), plain.data.as_str()),
            ("message", "{\"a\":1}")
        );
        let named = event("event: error\ndata: a\ndata: b\n\n").unwrap();
        assert_eq!(
            (named.name.as_str(), named.data.as_str()),
            ("error", "a\nb")
        );
        assert_eq!(event(": alive\n\n"), None);
    }
}

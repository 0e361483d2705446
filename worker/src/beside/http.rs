//! Asking the server over HTTP: one connection for each question, a deadline, and a bound on the answer.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use baton_system::network::Network;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::client::conn::http1;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;

/// For an answer that takes no computing. A server that tokenises a long prompt in its one thread keeps others waiting.
const PATIENCE: Duration = Duration::from_secs(5);
/// Of an answer: metrics of a server with many adapters, or the tokens of a long text.
const LARGEST: usize = 32 << 20;

/// A server and how it is reached.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    network: Arc<dyn Network>,
    /// `host:port`.
    authority: String,
}

/// What it answered.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unanswered {
    /// Nothing listens: the process is not there.
    #[error("nothing listens at {0}: {1}")]
    Absent(String, io::Error),
    #[error("{0} has not answered within {seconds} s", seconds = PATIENCE.as_secs())]
    Late(String),
    #[error("{0} has broken off: {1}")]
    Broken(String, String),
    #[error("{0} has answered with more than {mebibytes} MiB", mebibytes = LARGEST >> 20)]
    TooLong(String),
}

impl Server {
    /// `url` is `http://HOST:PORT`, as the configuration was checked to have it.
    pub(crate) fn new(network: Arc<dyn Network>, url: &str) -> Self {
        Self {
            network,
            authority: url.trim_start_matches("http://").to_owned(),
        }
    }

    /// Host that the server is reached by.
    pub(crate) fn host(&self) -> &str {
        self.authority
            .rsplit_once(':')
            .map_or(self.authority.as_str(), |(host, _)| host)
    }

    /// Port that the server listens on.
    pub(crate) fn port(&self) -> &str {
        self.authority
            .rsplit_once(':')
            .map_or("80", |(_, port)| port)
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Answer, Unanswered> {
        self.ask(Method::GET, path, None).await
    }

    /// Looks by the clock, and returns once it could not be connected to so many times in a row: its process is not there. Asks it
    /// nothing.
    pub(crate) async fn gone(&self, every: Duration, times: u32) {
        let mut absent = 0;
        while absent < times {
            tokio::time::sleep(every).await;
            let connecting = self.network.connect(&self.authority);
            absent = match tokio::time::timeout(PATIENCE, connecting).await {
                Ok(Err(_)) => absent + 1,
                // It is connected to, or does not come to it.
                Ok(Ok(_)) | Err(_) => 0,
            };
        }
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Answer, Unanswered> {
        self.ask(Method::POST, path, Some(body)).await
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Answer, Unanswered> {
        let what = || format!("http://{}{path}", self.authority);
        let broken = |error: &dyn fmt::Display| Unanswered::Broken(what(), error.to_string());
        let exchange = async {
            let stream = self
                .network
                .connect(&self.authority)
                .await
                .map_err(|error| Unanswered::Absent(what(), error))?;
            let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
                .await
                .map_err(|error| broken(&error))?;
            let mut request = Request::builder()
                .method(method)
                .uri(path)
                .header("host", &self.authority)
                .header("connection", "close");
            if body.is_some() {
                request = request.header("content-type", "application/json");
            }
            let bytes = body.map_or_else(Bytes::new, |body| Bytes::from(body.to_string()));
            let request = request
                .body(Full::new(bytes))
                .map_err(|error| broken(&error))?;
            let answer = async {
                let response = sender
                    .send_request(request)
                    .await
                    .map_err(|error| broken(&error))?;
                let status = response.status();
                let body = Limited::new(response.into_body(), LARGEST)
                    .collect()
                    .await
                    .map_err(|error| {
                        if error.downcast_ref::<LengthLimitError>().is_some() {
                            Unanswered::TooLong(what())
                        } else {
                            broken(&error)
                        }
                    })?
                    .to_bytes();
                Ok(Answer { status, body })
            };
            tokio::pin!(answer);
            tokio::select! {
                biased;
                answer = &mut answer => answer,
                // It may end with the answer's last bytes: those are there all the same.
                _ = connection => answer.await,
            }
        };
        tokio::time::timeout(PATIENCE, exchange)
            .await
            .unwrap_or_else(|_| Err(Unanswered::Late(what())))
    }
}

impl Answer {
    pub(crate) fn is_ok(&self) -> bool {
        self.status == StatusCode::OK
    }

    /// The body as JSON; null where it is none.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

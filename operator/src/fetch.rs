//! One bounded HTTP GET: of a worker's or a router's admin port.

use std::net::SocketAddr;
use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Empty, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use crate::cause;

/// Connection, answer and body together.
pub const WITHIN: Duration = Duration::from_secs(2);
/// A card is a few KiB; a router's list of policies grows by some hundred bytes a policy.
pub const LARGEST: usize = 1 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("http://{address}{path} gave no answer within {} s", WITHIN.as_secs())]
    Late { address: SocketAddr, path: String },
    #[error("http://{address}{path} cannot be read: {reason}")]
    Unreachable {
        address: SocketAddr,
        path: String,
        reason: String,
    },
    #[error("http://{address}{path} answers {status}")]
    Status {
        address: SocketAddr,
        path: String,
        status: StatusCode,
    },
    #[error("http://{address}{path} answers with more than {LARGEST} bytes")]
    TooLarge { address: SocketAddr, path: String },
}

/// Connections are not kept: pods come and go, and each is asked seldom.
#[derive(Clone, Debug)]
pub struct Fetch {
    client: Client<HttpConnector, Empty<Bytes>>,
}

impl Default for Fetch {
    fn default() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(WITHIN));
        Self {
            client: Client::builder(TokioExecutor::new())
                .pool_max_idle_per_host(0)
                .build(connector),
        }
    }
}

impl Fetch {
    /// The body of `path` at `address`.
    ///
    /// # Errors
    /// There is no answer in time, it is not 200, or it is too large.
    pub async fn get(&self, address: SocketAddr, path: &str) -> Result<Bytes, FetchError> {
        match tokio::time::timeout(WITHIN, self.ask(address, path)).await {
            Ok(answer) => answer,
            Err(_) => Err(FetchError::Late {
                address,
                path: path.to_owned(),
            }),
        }
    }

    async fn ask(&self, address: SocketAddr, path: &str) -> Result<Bytes, FetchError> {
        let unreachable = |reason: String| FetchError::Unreachable {
            address,
            path: path.to_owned(),
            reason,
        };
        let request = Request::get(format!("http://{address}{path}"))
            .body(Empty::new())
            .map_err(|error| unreachable(error.to_string()))?;
        let response = self
            .client
            .request(request)
            .await
            .map_err(|error| unreachable(cause::innermost(&error)))?;
        if response.status() != StatusCode::OK {
            return Err(FetchError::Status {
                address,
                path: path.to_owned(),
                status: response.status(),
            });
        }
        let body = Limited::new(response.into_body(), LARGEST).collect().await;
        match body {
            Ok(body) => Ok(body.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => Err(FetchError::TooLarge {
                address,
                path: path.to_owned(),
            }),
            Err(error) => Err(unreachable(error.to_string())),
        }
    }
}

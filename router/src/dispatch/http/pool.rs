//! Connections to engines: kept open between requests, and closed with the request that used them when it is given up, which is how
//! an engine is told to stop.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use baton_system::network::Network;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// An engine that takes no connection within this is taken for dead.
const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// Servers of engines close connections that were idle for 5 s (uvicorn's default). One that is taken well before is there.
const IDLE: Duration = Duration::from_secs(2);
/// Kept per engine. More are opened as needed, and closed after use.
const KEPT: usize = 64;
/// Bytes that a connection reads ahead, and the largest head.
const BUFFER: usize = 32 << 10;

/// A call that brought no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// Nothing was sent.
    #[error("it cannot be connected to: {0}")]
    Connect(io::Error),
    #[error("it took no connection within {} s", CONNECT_WITHIN.as_secs())]
    Slow,
    /// Something may have been sent.
    #[error("the connection broke: {0}")]
    Broken(hyper::Error),
}

/// Whether a request may be sent again on another connection when one that was idle turns out to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    /// The engine that had begun has stopped with its connection: the same operation is computed again.
    Allowed,
    /// The engine may have fetched KV already, and its source given it to somebody else.
    Never,
}

/// All connections.
pub struct Engines {
    network: Arc<dyn Network>,
    idle: Mutex<HashMap<String, Vec<Idle>>>,
}

impl fmt::Debug for Engines {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Engines").finish_non_exhaustive()
    }
}

struct Idle {
    connection: Connection,
    since: Instant,
}

struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    /// Moves its bytes. Closed when dropped.
    _driver: AbortOnDropHandle<()>,
}

/// An answer whose body is still to be read. Dropping it closes the connection.
pub struct Answer {
    pub head: http::response::Parts,
    body: Incoming,
    connection: Option<Connection>,
    address: String,
    engines: Arc<Engines>,
}

impl fmt::Debug for Answer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Answer")
            .field("head", &self.head)
            .finish_non_exhaustive()
    }
}

impl Engines {
    pub fn new(network: Arc<dyn Network>) -> Arc<Self> {
        Arc::new(Self {
            network,
            idle: Mutex::default(),
        })
    }

    /// Closes what is idle.
    pub fn close(&self) {
        self.idle.lock().clear();
    }

    /// Calls the engine at `address`, which is `host:port`. Has no bound but that of connecting: callers set one. Dropping it closes
    /// the connection.
    ///
    /// # Errors
    /// There is no answer.
    pub async fn call(
        self: &Arc<Self>,
        address: &str,
        again: Again,
        request: impl Fn() -> Request<Full<Bytes>>,
    ) -> Result<Answer, CallError> {
        if let Some(mut kept) = self.kept(address) {
            match kept.sender.send_request(request()).await {
                Ok(response) => return Ok(self.answer(address, kept, response)),
                // Not a byte of it was sent.
                Err(error) if error.is_canceled() => {}
                Err(error) if again == Again::Allowed => {
                    tracing::debug!(address, %error, "an idle connection was closed: the request is sent on another one");
                }
                Err(error) => return Err(CallError::Broken(error)),
            }
        }
        let mut fresh = self.connect(address).await?;
        let response = fresh.sender.send_request(request()).await;
        let response = response.map_err(CallError::Broken)?;
        Ok(self.answer(address, fresh, response))
    }

    fn answer(
        self: &Arc<Self>,
        address: &str,
        connection: Connection,
        response: Response<Incoming>,
    ) -> Answer {
        let (head, body) = response.into_parts();
        Answer {
            head,
            body,
            connection: Some(connection),
            address: address.to_owned(),
            engines: self.clone(),
        }
    }

    /// One that is idle and was used a moment ago. Those that are older are closed.
    fn kept(&self, address: &str) -> Option<Connection> {
        let now = Instant::now();
        let mut idle = self.idle.lock();
        let kept = idle.get_mut(address)?;
        kept.retain(|idle| {
            now.duration_since(idle.since) < IDLE && idle.connection.sender.is_ready()
        });
        kept.pop().map(|idle| idle.connection)
    }

    fn keep(&self, address: String, connection: Connection) {
        let since = Instant::now();
        let mut idle = self.idle.lock();
        let kept = idle.entry(address).or_default();
        if kept.len() < KEPT {
            kept.push(Idle { connection, since });
        }
        idle.retain(|_, kept| {
            kept.retain(|idle| since.duration_since(idle.since) < IDLE);
            !kept.is_empty()
        });
    }

    async fn connect(&self, address: &str) -> Result<Connection, CallError> {
        let connecting = async {
            let stream = self
                .network
                .connect(address)
                .await
                .map_err(CallError::Connect)?;
            let (sender, connection) = http1::Builder::new()
                .max_buf_size(BUFFER)
                .handshake(TokioIo::new(stream))
                .await
                .map_err(CallError::Broken)?;
            let driver = tokio::spawn(async move {
                // What went wrong is told to whoever reads the answer.
                let _ = connection.await;
            });
            Ok(Connection {
                sender,
                _driver: AbortOnDropHandle::new(driver),
            })
        };
        tokio::time::timeout(CONNECT_WITHIN, connecting)
            .await
            .unwrap_or(Err(CallError::Slow))
    }
}

impl Answer {
    /// The next bytes of the body; `None` after the last, and then the connection serves the next request. Cancel-safe.
    ///
    /// # Errors
    /// The body broke off.
    pub async fn next(&mut self) -> Option<Result<Bytes, hyper::Error>> {
        loop {
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    // Trailers say nothing that counts.
                    if let Ok(data) = frame.into_data()
                        && !data.is_empty()
                    {
                        return Some(Ok(data));
                    }
                }
                Some(Err(error)) => {
                    self.connection = None;
                    return Some(Err(error));
                }
                None => {
                    if let Some(connection) = self.connection.take()
                        && !connection.sender.is_closed()
                    {
                        let address = std::mem::take(&mut self.address);
                        self.engines.keep(address, connection);
                    }
                    return None;
                }
            }
        }
    }

    /// The whole body.
    ///
    /// # Errors
    /// It broke off, or is longer than `limit`: in words.
    pub async fn whole(&mut self, limit: usize) -> Result<Bytes, String> {
        let mut body = Vec::new();
        while let Some(bytes) = self.next().await {
            let bytes = bytes.map_err(|error| format!("its answer broke off: {error}"))?;
            if body.len() + bytes.len() > limit {
                return Err(format!("its answer is longer than {limit} bytes"));
            }
            body.extend_from_slice(&bytes);
        }
        Ok(body.into())
    }
}

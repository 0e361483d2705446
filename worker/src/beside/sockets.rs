//! The engine's ZeroMQ sockets: its published batches, its replays, and questions with one answer.

use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _, SubSocket, ZmqMessage};

use crate::config::EngineKind;

/// For a connection, and for each message of an answer: the engine answers between two steps.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a socket failed, in words.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct SocketFailed(String);

/// A message that was published: number and payload.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Published {
    pub(crate) sequence: u64,
    pub(crate) payload: Bytes,
}

/// Where the engine publishes, and which side listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// The engine listens.
    Connect(String),
    /// The engine connects to us; where the address is taken, it is the engine that has taken it.
    Bind(String),
}

impl Endpoint {
    /// As an engine of this kind names its own endpoint; where it listens on all its addresses, it is reached at `host`.
    ///
    /// # Errors
    /// It is not TCP.
    pub(crate) fn of_engine(
        kind: EngineKind,
        endpoint: &str,
        host: &str,
    ) -> Result<Self, SocketFailed> {
        let (bound, port) = tcp(endpoint)?;
        // Both listen where the endpoint has an asterisk or two colons, and connect to everything else: to 0.0.0.0 as well.
        let listens = bound.contains('*') || bound.contains("::");
        // SGLang may be told to listen on any address, and does not say whether it was. Beside it both are tried, elsewhere one.
        let elsewhere = kind == EngineKind::Sglang && bound == "0.0.0.0" && !is_here(host);
        Ok(if elsewhere || (listens && is_wildcard(bound)) {
            Self::Connect(format!("tcp://{host}:{port}"))
        } else if listens {
            Self::Connect(endpoint.to_owned())
        } else {
            Self::Bind(endpoint.to_owned())
        })
    }
}

/// Where the engine answers replays: it always listens there.
pub(crate) fn replay_address(endpoint: &str, host: &str) -> Result<String, SocketFailed> {
    let (bound, port) = tcp(endpoint)?;
    Ok(if is_wildcard(bound) {
        format!("tcp://{host}:{port}")
    } else {
        endpoint.to_owned()
    })
}

/// Host and port.
fn tcp(endpoint: &str) -> Result<(&str, &str), SocketFailed> {
    let address = endpoint.strip_prefix("tcp://");
    address
        .and_then(|address| address.rsplit_once(':'))
        .ok_or_else(|| {
            SocketFailed(format!(
                "the engine publishes its events at {endpoint}: give it a tcp:// endpoint"
            ))
        })
}

/// All addresses of whoever listens there.
fn is_wildcard(bound: &str) -> bool {
    matches!(bound, "*" | "[::]" | "::" | "0.0.0.0")
}

fn is_here(host: &str) -> bool {
    host == "localhost"
        || host
            .trim_matches(['[', ']'])
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// A subscription to everything that the engine publishes.
pub(crate) struct Subscription(SubSocket);

impl Subscription {
    pub(crate) async fn open(endpoint: &Endpoint) -> Result<Self, SocketFailed> {
        let failed = |error: zeromq::ZmqError| {
            SocketFailed(match endpoint {
                Endpoint::Connect(address) => format!("events at {address}: {error}"),
                Endpoint::Bind(address) => format!(
                    "events at {address}: it cannot be listened on and nothing listens there: {error}: choose a free port"
                ),
            })
        };
        let mut socket = SubSocket::new();
        let opened = async {
            socket.subscribe("").await?;
            match endpoint {
                Endpoint::Connect(address) => socket.connect(address).await,
                Endpoint::Bind(address) => match socket.bind(address).await {
                    Ok(_) => Ok(()),
                    Err(_) => socket.connect(address).await,
                },
            }
        };
        timely(opened, failed).await?;
        Ok(Self(socket))
    }

    /// The next batch. Safe to drop and call again.
    pub(crate) async fn next(&mut self) -> Result<Published, SocketFailed> {
        loop {
            let message = self
                .0
                .recv()
                .await
                .map_err(|error| SocketFailed(format!("events: {error}")))?;
            if let Some(published) = published(&message) {
                return Ok(published);
            }
            tracing::debug!(frames = message.len(), "a published message is no batch");
        }
    }
}

/// Topic, number, payload; in a replay an empty frame comes first, and older engines leave out the topic.
fn published(message: &ZmqMessage) -> Option<Published> {
    let last = message.len().checked_sub(1)?;
    let number = message.get(last.checked_sub(1)?)?;
    let sequence = u64::from_be_bytes(number.as_ref().try_into().ok()?);
    Some(Published {
        sequence,
        payload: message.get(last)?.clone(),
    })
}

/// The number that ends a replay.
const END: u64 = u64::MAX;

/// Asks for all batches from a number on, and hands each to `take`.
///
/// # Errors
/// The engine does not answer, or stops in the middle.
pub(crate) async fn replay(
    address: &str,
    from: u64,
    mut take: impl FnMut(Published),
) -> Result<(), SocketFailed> {
    let failed = |error: zeromq::ZmqError| SocketFailed(format!("replay at {address}: {error}"));
    let mut socket = DealerSocket::new();
    timely(socket.connect(address), failed).await?;
    let mut question = ZmqMessage::from(Bytes::new());
    question.push_back(Bytes::copy_from_slice(&from.to_be_bytes()));
    timely(socket.send(question), failed).await?;
    loop {
        let message = timely(socket.recv(), failed).await?;
        match published(&message) {
            Some(one) if one.sequence == END => return Ok(()),
            Some(one) => take(one),
            None => {
                let frames = message.len();
                return Err(SocketFailed(format!(
                    "replay at {address}: a message of {frames} frames is no batch"
                )));
            }
        }
    }
}

/// Asks once, as a REQ socket does; the frames of the answer.
pub(crate) async fn ask(address: &str, question: &[u8]) -> Result<Vec<Bytes>, SocketFailed> {
    let failed = |error: zeromq::ZmqError| SocketFailed(format!("{address}: {error}"));
    let mut socket = DealerSocket::new();
    timely(socket.connect(address), failed).await?;
    let mut message = ZmqMessage::from(Bytes::new());
    message.push_back(Bytes::copy_from_slice(question));
    timely(socket.send(message), failed).await?;
    let answer = timely(socket.recv(), failed).await?;
    let mut frames = answer.into_vec();
    if frames.first().is_some_and(Bytes::is_empty) {
        frames.remove(0);
    }
    Ok(frames)
}

async fn timely<T>(
    wait: impl Future<Output = Result<T, zeromq::ZmqError>>,
    failed: impl Fn(zeromq::ZmqError) -> SocketFailed,
) -> Result<T, SocketFailed> {
    match tokio::time::timeout(PATIENCE, wait).await {
        Ok(result) => result.map_err(failed),
        Err(_) => Err(failed(zeromq::ZmqError::Other("no answer within 5 s"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_side_that_the_engine_leaves_to_the_daemon_is_the_daemons() {
        use EngineKind::{Sglang, Vllm};
        let connect = |address: &str| Endpoint::Connect(address.to_owned());
        let bind = |address: &str| Endpoint::Bind(address.to_owned());
        for (kind, endpoint, host, expected) in [
            (
                Vllm,
                "tcp://*:5557",
                "10.0.0.7",
                connect("tcp://10.0.0.7:5557"),
            ),
            (
                Vllm,
                "tcp://[::]:5557",
                "127.0.0.1",
                connect("tcp://127.0.0.1:5557"),
            ),
            // It listens on that one, and is not asked for by another name.
            (
                Vllm,
                "tcp://[fd00::7]:5557",
                "127.0.0.1",
                connect("tcp://[fd00::7]:5557"),
            ),
            // No wildcard to vLLM: it connects to the machine that it runs on.
            (
                Vllm,
                "tcp://0.0.0.0:5557",
                "127.0.0.1",
                bind("tcp://0.0.0.0:5557"),
            ),
            (
                Vllm,
                "tcp://127.0.0.1:5557",
                "127.0.0.1",
                bind("tcp://127.0.0.1:5557"),
            ),
            (
                Sglang,
                "tcp://*:5557",
                "10.0.0.7",
                connect("tcp://10.0.0.7:5557"),
            ),
            (
                Sglang,
                "tcp://0.0.0.0:5557",
                "127.0.0.1",
                bind("tcp://0.0.0.0:5557"),
            ),
            (
                Sglang,
                "tcp://0.0.0.0:5557",
                "10.0.0.7",
                connect("tcp://10.0.0.7:5557"),
            ),
        ] {
            let found = Endpoint::of_engine(kind, endpoint, host).unwrap();
            assert_eq!(found, expected, "{kind:?} {endpoint} at {host}");
        }
        let error = Endpoint::of_engine(Vllm, "ipc:///run/kv", "127.0.0.1").unwrap_err();
        assert!(
            error
                .to_string()
                .contains("ipc:///run/kv: give it a tcp:// endpoint")
        );
    }

    #[test]
    fn replays_are_asked_for_where_the_engine_listens() {
        let address = |endpoint| replay_address(endpoint, "10.0.0.7").unwrap();
        assert_eq!(address("tcp://0.0.0.0:5558"), "tcp://10.0.0.7:5558");
        assert_eq!(address("tcp://*:5558"), "tcp://10.0.0.7:5558");
        assert_eq!(address("tcp://10.0.0.9:5558"), "tcp://10.0.0.9:5558");
    }
}

//! Sockets: listening and connecting, as an argument.
//!
//! - [`stream`]: one connection. The machine's own stays a plain socket, so that nothing is boxed or copied on its way.
//! - [`grpc`]: channels and servers over it.

pub mod grpc;
pub mod stream;

use std::fmt::Debug;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::net::{TcpListener, TcpStream};

pub use stream::{Duplex, Stream};

/// After an accept that failed (no file descriptors left, say): long enough not to spin, short beside any deadline.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Reads where a process is to listen, `ADDRESS:PORT`, from its command line or its environment. There a variable may be meant for a
/// program that asks this one: `BATON_ADMIN` of `make cluster-env` is a URL.
///
/// # Errors
/// What is wrong, for whoever has set it.
pub fn listening(text: &str) -> Result<SocketAddr, String> {
    if text.contains("://") {
        return Err(
            "a URL is where others call; to listen, give ADDRESS:PORT on the command line, or unset the variable that says this"
                .to_owned(),
        );
    }
    text.parse()
        .map_err(|error| format!("{error}: give ADDRESS:PORT, as 127.0.0.1:0"))
}

/// Makes sockets. Waits have no bound here: callers set one.
pub trait Network: Debug + Send + Sync {
    /// Listens on `host:port`; port 0 takes a free one.
    fn listen<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Listener>>;

    /// Connects to `host:port`.
    fn connect<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Stream>>;
}

/// The machine's own network.
#[derive(Clone, Copy, Debug)]
pub struct MachineNetwork;

impl Network for MachineNetwork {
    fn listen<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Listener>> {
        Box::pin(async move { TcpListener::bind(address).await.map(Listener::Machine) })
    }

    fn connect<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Stream>> {
        Box::pin(async move {
            let stream = TcpStream::connect(address).await?;
            undelayed(&stream);
            Ok(Stream::Machine(stream))
        })
    }
}

/// Each message of ours is small and waited for: with Nagle's algorithm it would wait for the peer's delayed acknowledgement,
/// 40 ms.
fn undelayed(stream: &TcpStream) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY cannot be set: small messages may wait 40 ms");
    }
}

/// Takes connections.
#[derive(Debug)]
pub enum Listener {
    Machine(TcpListener),
    Simulated(Box<dyn Accept>),
}

/// A simulation's listener.
pub trait Accept: Debug + Send + Sync {
    /// The next connection.
    fn accept(&self) -> BoxFuture<'_, io::Result<(Stream, SocketAddr)>>;

    fn local_address(&self) -> io::Result<SocketAddr>;
}

impl Listener {
    /// The next connection and whose it is. May be dropped and called again: none is lost.
    ///
    /// # Errors
    /// As of the machine; one that failed says nothing about the next.
    pub async fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        match self {
            Self::Machine(listener) => {
                let (stream, peer) = listener.accept().await?;
                undelayed(&stream);
                Ok((Stream::Machine(stream), peer))
            }
            Self::Simulated(listener) => listener.accept().await,
        }
    }

    /// Where it listens.
    ///
    /// # Errors
    /// As of the machine.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Machine(listener) => listener.local_addr(),
            Self::Simulated(listener) => listener.local_address(),
        }
    }

    /// The next connection; one that failed is logged and followed by a pause.
    pub async fn accept_next(&self) -> (Stream, SocketAddr) {
        loop {
            match self.accept().await {
                Ok(accepted) => return accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

impl axum::serve::Listener for Listener {
    type Io = Stream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        self.accept_next().await
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Self::local_addr(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_no_place_to_listen_and_whoever_gives_one_is_told_so() {
        let address = SocketAddr::from(([127, 0, 0, 1], 8001));
        assert_eq!(listening("127.0.0.1:8001"), Ok(address));
        for (text, says) in [
            ("http://127.0.0.1:8001", "unset the variable"),
            ("https://[::1]:8001/", "unset the variable"),
            ("127.0.0.1", "give ADDRESS:PORT"),
            ("", "give ADDRESS:PORT"),
        ] {
            let error = listening(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}

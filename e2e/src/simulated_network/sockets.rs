//! Sockets of the simulated network, in the form in which router and workers take them.
//!
//! Every write is hashed, with when, from where and to where, and with its bytes where nothing of the real world is among them:
//! two runs of a seed are the same when that hash is.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use baton_system::network::{Accept, Duplex, Listener, Network, Stream};
use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use turmoil::net::{TcpListener, TcpStream};

use super::ports;

/// Hash of all that was written so far. Shared by the hosts of one simulation.
#[derive(Clone, Debug, Default)]
pub struct Trace(Arc<Mutex<(u64, u64)>>);

impl Trace {
    fn write(&self, from: SocketAddr, to: SocketAddr, bytes: &[u8]) {
        let now = turmoil::sim_elapsed().map_or(0, |elapsed| elapsed.as_micros());
        let mut hasher = blake3::Hasher::new();
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        hasher.update(&state.0.to_le_bytes());
        hasher.update(&now.to_le_bytes());
        hasher.update(format!("{from} {to}").as_bytes());
        // HTTP answers, gRPC's too, carry the date of the real world, and metrics real durations.
        if from.port().min(to.port()) == ports::TRANSFER {
            hasher.update(bytes);
        }
        let mut first = [0; 8];
        first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        state.0 = u64::from_le_bytes(first);
        state.1 += 1;
    }

    /// Hash, and number of writes.
    pub fn digest(&self) -> (u64, u64) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The network as each host sees it. All of its calls must be made on a host.
#[derive(Clone, Debug, Default)]
pub struct SimulatedNetwork {
    pub trace: Trace,
}

impl SimulatedNetwork {
    /// Connects; also for clients that are no part of the product.
    ///
    /// # Errors
    /// Nobody listens there, or nothing gets there.
    pub async fn open(&self, address: &str) -> io::Result<Socket> {
        let stream = TcpStream::connect(address).await?;
        Ok(self.socket(stream))
    }

    fn socket(&self, stream: TcpStream) -> Socket {
        Socket {
            stream,
            trace: self.trace.clone(),
        }
    }
}

impl Network for SimulatedNetwork {
    fn listen<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Listener>> {
        Box::pin(async move {
            let listening = Listening {
                listener: TcpListener::bind(address).await?,
                network: self.clone(),
            };
            Ok(Listener::Simulated(Box::new(listening)))
        })
    }

    fn connect<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Stream>> {
        Box::pin(async move { Ok(Stream::simulated(Box::new(self.open(address).await?))) })
    }
}

struct Listening {
    listener: TcpListener,
    network: SimulatedNetwork,
}

impl fmt::Debug for Listening {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Listening({:?})", self.listener.local_addr())
    }
}

impl Accept for Listening {
    fn accept(&self) -> BoxFuture<'_, io::Result<(Stream, SocketAddr)>> {
        Box::pin(async move {
            let (stream, peer) = self.listener.accept().await?;
            let socket = self.network.socket(stream);
            Ok((Stream::simulated(Box::new(socket)), peer))
        })
    }

    fn local_address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// One connection.
#[derive(Debug)]
pub struct Socket {
    stream: TcpStream,
    trace: Trace,
}

impl Duplex for Socket {
    fn poll_writable(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        pin!(self.stream.writable()).poll(context)
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        if let (Ok(from), Ok(to)) = (self.stream.local_addr(), self.stream.peer_addr()) {
            self.trace.write(from, to, &bytes[..written]);
        }
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

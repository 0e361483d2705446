//! One connection: the machine's socket, or a simulation's stream with the same readiness calls.

use std::fmt::Debug;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Bytes that a simulated stream reads ahead to know that it is readable.
const AHEAD: usize = 4096;

/// A connection in both directions. One task uses it at a time.
#[derive(Debug)]
pub enum Stream {
    Machine(TcpStream),
    Simulated(Simulated),
}

/// A simulation's connection.
pub trait Duplex: AsyncRead + AsyncWrite + Debug + Send + Unpin {
    /// Ready when a write would take something or fail.
    fn poll_writable(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>>;
}

impl Stream {
    pub fn simulated(duplex: Box<dyn Duplex>) -> Self {
        Self::Simulated(Simulated(Mutex::new(Inner {
            duplex,
            ahead: Vec::new(),
            ended: false,
        })))
    }

    /// Resolves when [`Self::try_read`] would say something.
    ///
    /// # Errors
    /// As of the machine.
    pub async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Machine(stream) => stream.readable().await,
            Self::Simulated(stream) => poll_fn(|context| stream.0.lock().look(context)).await,
        }
    }

    /// Reads what is there; 0 at the end.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is there; as of the machine otherwise.
    pub fn try_read(&self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Machine(stream) => stream.try_read(into),
            Self::Simulated(stream) => {
                let mut context = Context::from_waker(Waker::noop());
                let mut into = ReadBuf::new(into);
                at_once(stream.0.lock().read(&mut context, &mut into))?;
                Ok(into.filled().len())
            }
        }
    }

    /// Resolves when [`Self::try_write`] would take something or fail.
    ///
    /// # Errors
    /// As of the machine.
    pub async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Machine(stream) => stream.writable().await,
            Self::Simulated(stream) => {
                poll_fn(|context| stream.0.lock().duplex.poll_writable(context)).await
            }
        }
    }

    /// Writes what finds room.
    ///
    /// # Errors
    /// `WouldBlock` when none is there; as of the machine otherwise.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Machine(stream) => stream.try_write(bytes),
            Self::Simulated(stream) => {
                let mut context = Context::from_waker(Waker::noop());
                let mut inner = stream.0.lock();
                at_once(Pin::new(&mut *inner.duplex).poll_write(&mut context, bytes))
            }
        }
    }

    /// Writes what finds room, of several pieces in order.
    ///
    /// # Errors
    /// As of [`Self::try_write`].
    pub fn try_write_vectored(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Machine(stream) => stream.try_write_vectored(pieces),
            Self::Simulated(_) => {
                let first = pieces.iter().find(|piece| !piece.is_empty());
                first.map_or(Ok(0), |piece| self.try_write(piece))
            }
        }
    }
}

fn at_once<T>(poll: Poll<io::Result<T>>) -> io::Result<T> {
    match poll {
        Poll::Ready(result) => result,
        Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
    }
}

/// A simulation's connection, and what was read ahead of it.
#[derive(Debug)]
pub struct Simulated(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    duplex: Box<dyn Duplex>,
    ahead: Vec<u8>,
    ended: bool,
}

impl Inner {
    /// Ready when something was read ahead, or the end is.
    fn look(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.ended || !self.ahead.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let mut piece = [0; AHEAD];
        let mut piece = ReadBuf::new(&mut piece);
        ready!(Pin::new(&mut *self.duplex).poll_read(context, &mut piece))?;
        self.ahead.extend_from_slice(piece.filled());
        self.ended = self.ahead.is_empty();
        Poll::Ready(Ok(()))
    }

    fn read(&mut self, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.ahead.is_empty() && !self.ended {
            return Pin::new(&mut *self.duplex).poll_read(context, into);
        }
        let taken = self.ahead.len().min(into.remaining());
        into.put_slice(&self.ahead[..taken]);
        self.ahead.drain(..taken);
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Machine(stream) => Pin::new(stream).poll_read(context, into),
            Self::Simulated(stream) => stream.0.get_mut().read(context, into),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Machine(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Simulated(stream) => {
                Pin::new(&mut *stream.0.get_mut().duplex).poll_write(context, bytes)
            }
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Machine(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
            Self::Simulated(stream) => {
                Pin::new(&mut *stream.0.get_mut().duplex).poll_write_vectored(context, pieces)
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Machine(stream) => stream.is_write_vectored(),
            Self::Simulated(_) => false,
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Machine(stream) => Pin::new(stream).poll_flush(context),
            Self::Simulated(stream) => {
                Pin::new(&mut *stream.0.get_mut().duplex).poll_flush(context)
            }
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Machine(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Simulated(stream) => {
                Pin::new(&mut *stream.0.get_mut().duplex).poll_shutdown(context)
            }
        }
    }
}

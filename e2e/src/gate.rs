//! Stands before one server's HTTP port and passes bytes on; what it is told to hold waits there until it is let through.
//!
//! What goes wrong between two legs of a request goes wrong within milliseconds. Where the second leg waits at a gate, the moment lasts as
//! long as a test needs it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use crate::wait;

/// What a test waits for at a gate comes within this: a leg of a request, on a machine that does other work too.
const CAUGHT: Duration = Duration::from_secs(120);
/// Of one read.
const PIECE: usize = 64 << 10;
/// The end of a head.
const HEAD_ENDS: &[u8] = b"\r\n\r\n";

/// What does not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    Nothing,
    /// Requests, whole.
    Requests,
    /// Answers, from their first byte on.
    Answers,
    /// The bodies of answers whose heads pass.
    Bodies,
}

/// One gate. It is there until it is dropped.
#[derive(Debug)]
pub struct Gate {
    /// Where it is reached.
    pub address: SocketAddr,
    held: watch::Sender<Held>,
    caught: Arc<AtomicU64>,
    _server: AbortOnDropHandle<()>,
}

impl Gate {
    /// Before the server at `upstream`. Holds nothing.
    ///
    /// # Errors
    /// No port is free.
    pub async fn before(upstream: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (held, sight) = watch::channel(Held::Nothing);
        let caught = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&caught);
        let server = tokio::spawn(async move {
            // Ended with the gate.
            let mut open = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let passing = Passing {
                    client,
                    server: None,
                    upstream,
                    held: sight.clone(),
                    caught: Arc::clone(&counted),
                    requests: Vec::new(),
                    answers: Vec::new(),
                    counted: false,
                    over: false,
                };
                // An end's failure shows to the other as its end.
                open.spawn(passing.pass());
                while open.try_join_next().is_some() {}
            }
        });
        Ok(Self {
            address,
            held,
            caught,
            _server: AbortOnDropHandle::new(server),
        })
    }

    /// Holds these from now on, and lets everything else through.
    pub fn hold(&self, held: Held) {
        self.caught.store(0, Ordering::SeqCst);
        self.held.send_replace(held);
    }

    /// Waits until so many are held.
    ///
    /// # Errors
    /// They do not come.
    pub async fn has_caught(&self, count: u64) -> Result<()> {
        wait::until("something waits at the gate", CAUGHT, async || {
            let caught = self.caught.load(Ordering::SeqCst);
            (caught >= count)
                .then_some(())
                .ok_or_else(|| format!("{caught} of {count}"))
        })
        .await
    }
}

/// One connection of a client's. What it sends goes to a connection to the server that is opened when it may: a server closes those on
/// which nothing comes for a few seconds.
struct Passing {
    client: TcpStream,
    server: Option<TcpStream>,
    upstream: SocketAddr,
    held: watch::Receiver<Held>,
    caught: Arc<AtomicU64>,
    requests: Vec<u8>,
    answers: Vec<u8>,
    /// What is held now was counted.
    counted: bool,
    /// The server has closed its connection.
    over: bool,
}

impl Passing {
    /// Until either end closes it.
    async fn pass(mut self) -> std::io::Result<()> {
        // Small writes are not delayed; where that cannot be had, they are.
        let _ = self.client.set_nodelay(true);
        let (mut asked, mut told) = (vec![0; PIECE], vec![0; PIECE]);
        loop {
            self.let_through().await?;
            if self.over && self.requests.is_empty() && self.answers.is_empty() {
                return Ok(());
            }
            tokio::select! {
                changed = self.held.changed() => changed.map_err(std::io::Error::other)?,
                read = self.client.read(&mut asked) => match read? {
                    0 => return Ok(()),
                    count => self.requests.extend_from_slice(&asked[..count]),
                },
                read = read(&mut self.server, &mut told) => match read? {
                    0 => (self.server, self.over) = (None, true),
                    count => self.answers.extend_from_slice(&told[..count]),
                },
            }
        }
    }

    /// Passes on what may be.
    async fn let_through(&mut self) -> std::io::Result<()> {
        let held = *self.held.borrow_and_update();
        if held == Held::Requests && !self.requests.is_empty() {
            (self.server, self.over) = (None, false);
        } else if !self.requests.is_empty() {
            if self.server.is_none() {
                let server = TcpStream::connect(self.upstream).await?;
                let _ = server.set_nodelay(true);
                (self.server, self.over) = (Some(server), false);
            }
            if let Some(server) = &mut self.server {
                server.write_all(&self.requests).await?;
            }
            self.requests.clear();
        }
        let passes = passing(held, &self.answers);
        self.client.write_all(&self.answers[..passes]).await?;
        self.answers.drain(..passes);
        let holds = !(self.requests.is_empty() && self.answers.is_empty());
        if holds && !self.counted {
            self.caught.fetch_add(1, Ordering::SeqCst);
        }
        self.counted = holds;
        Ok(())
    }
}

async fn read(server: &mut Option<TcpStream>, piece: &mut [u8]) -> std::io::Result<usize> {
    match server {
        Some(server) => server.read(piece).await,
        None => std::future::pending().await,
    }
}

/// How many bytes of an answer may go on.
fn passing(held: Held, answer: &[u8]) -> usize {
    match held {
        Held::Answers => 0,
        Held::Bodies if answer.starts_with(b"HTTP/1.1 ") => answer
            .windows(HEAD_ENDS.len())
            .position(|bytes| bytes == HEAD_ENDS)
            .map_or(0, |end| end + HEAD_ENDS.len()),
        Held::Bodies => 0,
        Held::Nothing | Held::Requests => answer.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi";

    /// A server that answers each request with the same words.
    async fn server() -> Result<(SocketAddr, AbortOnDropHandle<()>)> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut asked = [0; 4];
                while stream.read_exact(&mut asked).await.is_ok() {
                    if stream.write_all(ANSWER).await.is_err() {
                        break;
                    }
                }
            }
        });
        Ok((address, AbortOnDropHandle::new(task)))
    }

    async fn read(stream: &mut TcpStream, count: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        stream.read_exact(&mut bytes).await?;
        Ok(bytes)
    }

    async fn nothing_comes(stream: &mut TcpStream) -> bool {
        let soon = Duration::from_millis(50);
        tokio::time::timeout(soon, stream.read_u8()).await.is_err()
    }

    #[tokio::test]
    async fn what_is_held_passes_once_it_may() -> Result<()> {
        let (address, _server) = server().await?;
        let gate = Gate::before(address).await?;
        let mut stream = TcpStream::connect(gate.address).await?;
        stream.write_all(b"ask1").await?;
        assert_eq!(read(&mut stream, ANSWER.len()).await?, ANSWER);
        let head = ANSWER.len() - 2;
        for (held, passes) in [
            (Held::Requests, 0),
            (Held::Answers, 0),
            (Held::Bodies, head),
        ] {
            gate.hold(held);
            stream.write_all(b"ask2").await?;
            gate.has_caught(1).await?;
            assert_eq!(read(&mut stream, passes).await?, ANSWER[..passes]);
            assert!(nothing_comes(&mut stream).await, "{held:?}");
            gate.hold(Held::Nothing);
            let rest = read(&mut stream, ANSWER.len() - passes).await?;
            assert_eq!(rest, ANSWER[passes..]);
        }
        Ok(())
    }
}

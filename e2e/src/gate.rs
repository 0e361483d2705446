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
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
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
                open.spawn(pass(client, upstream, sight.clone(), Arc::clone(&counted)));
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

/// One connection: either end's end ends it, whatever it holds.
async fn pass(
    client: TcpStream,
    upstream: SocketAddr,
    held: watch::Receiver<Held>,
    caught: Arc<AtomicU64>,
) {
    let Ok(server) = TcpStream::connect(upstream).await else {
        return;
    };
    // Small writes are not delayed; where that cannot be had, they are.
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let way = |requests| Way {
        held: held.clone(),
        caught: Arc::clone(&caught),
        requests,
    };
    tokio::select! {
        () = way(true).carry(from_client, to_server) => {}
        () = way(false).carry(from_server, to_client) => {}
    }
}

/// One direction of a connection.
struct Way {
    held: watch::Receiver<Held>,
    caught: Arc<AtomicU64>,
    requests: bool,
}

impl Way {
    async fn carry(mut self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        let mut kept = Vec::new();
        let mut counted = false;
        let mut ended = false;
        loop {
            let passes = self.passes(&kept);
            if passes > 0 {
                let piece: Vec<u8> = kept.drain(..passes).collect();
                if to.write_all(&piece).await.is_err() {
                    return;
                }
                continue;
            }
            if kept.is_empty() {
                counted = false;
                if ended {
                    return;
                }
            } else if !std::mem::replace(&mut counted, true) {
                self.caught.fetch_add(1, Ordering::SeqCst);
            }
            let mut piece = vec![0; PIECE];
            tokio::select! {
                changed = self.held.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                read = from.read(&mut piece), if !ended => match read {
                    Ok(0) | Err(_) if self.requests => return,
                    Ok(0) | Err(_) => ended = true,
                    Ok(count) => kept.extend_from_slice(&piece[..count]),
                },
            }
        }
    }

    /// How many of the bytes that are here may go on.
    fn passes(&mut self, kept: &[u8]) -> usize {
        match (*self.held.borrow_and_update(), self.requests) {
            (Held::Requests, true) | (Held::Answers, false) => 0,
            (Held::Bodies, false) if kept.starts_with(b"HTTP/1.1 ") => kept
                .windows(HEAD_ENDS.len())
                .position(|bytes| bytes == HEAD_ENDS)
                .map_or(0, |end| end + HEAD_ENDS.len()),
            (Held::Bodies, false) => 0,
            _ => kept.len(),
        }
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

//! The reading side of `Shm`: connections and mappings that are kept a while, and the copy.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::header::BlockHeader;
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout};

use super::connection::Connection;
use super::{IDLE, ShmTransport};
use crate::transport::memory::Shape;
use crate::transport::memory::view::{View, identity};
use crate::transport::reading::{self, Order, Source};
use crate::transport::tcp::frame::{Frame, Why};
use crate::transport::{Arrival, BlockSink, End, FetchRequest, Obstacle, TransportError};

/// Bytes copied in one turn, some 100 microseconds; then others get theirs. A larger block is copied in one.
const TURN: usize = 1 << 20;

/// What is kept of a source between hand-offs.
#[derive(Debug)]
pub(super) struct Peer {
    view: Arc<View>,
    idle: Vec<Connection>,
    used: Instant,
}

impl Peer {
    /// False when nobody has used it for so long.
    pub(super) fn sweep(&mut self, idle: Duration) -> bool {
        self.idle.retain(Connection::is_quiet);
        self.used.elapsed() < idle || Arc::strong_count(&self.view) > 1
    }
}

/// A hand-off that is being read.
struct Reading<'a> {
    request: &'a FetchRequest,
    connection: Connection,
    view: Arc<View>,
    silence: Duration,
}

/// The answer to an open.
enum Opened {
    Accepted(Arc<View>),
    Refused(Why),
    /// Nothing at all: a kept connection whose source has gone.
    Closed,
}

impl ShmTransport {
    pub(super) async fn read(
        &self,
        request: &FetchRequest,
        sink: &mut dyn BlockSink,
    ) -> Result<End, TransportError> {
        let address = request.address.as_str();
        let mut reading = self.open(request).await?;
        let end = reading.blocks(sink).await?;
        // Its word that it reads no more; without it the source waits for the connection's end.
        reading.connection.write(&Frame::Done);
        let flushed = reading.connection.flush(self.options.stalled).await;
        if flushed.is_ok() {
            self.keep(address, reading.connection, &reading.view);
        }
        Ok(end)
    }

    /// A connection on which the source has accepted this request. Kept ones first.
    async fn open<'a>(&self, request: &'a FetchRequest) -> Result<Reading<'a>, TransportError> {
        let address = request.address.as_str();
        let open = Frame::Open(reading::open(request)?);
        let source = source_of(request);
        loop {
            let (mut connection, kept) = match self.kept(address) {
                Some((connection, view)) => (connection, Some(view)),
                None => (self.connect(address).await?, None),
            };
            let reused = kept.is_some();
            match self.ask(&mut connection, &open, request, kept).await {
                Ok(Opened::Accepted(view)) => {
                    return Ok(Reading {
                        request,
                        connection,
                        view,
                        silence: self.options.silence,
                    });
                }
                Ok(Opened::Refused(why)) => return Err(source.ended(why)),
                Ok(Opened::Closed) | Err(TransportError::Lost { .. }) if reused => {}
                Ok(Opened::Closed) => return Err(source.closed()),
                Err(error) => return Err(error),
            }
        }
    }

    fn kept(&self, address: &str) -> Option<(Connection, Arc<View>)> {
        let mut peers = self.peers.lock();
        let peer = peers.get_mut(address)?;
        peer.used = Instant::now();
        while let Some(connection) = peer.idle.pop() {
            if connection.is_quiet() {
                return Some((connection, Arc::clone(&peer.view)));
            }
        }
        None
    }

    fn keep(&self, address: &str, connection: Connection, view: &Arc<View>) {
        let mut peers = self.peers.lock();
        let peer = peers.entry(address.to_owned()).or_insert_with(|| Peer {
            view: Arc::clone(view),
            idle: Vec::new(),
            used: Instant::now(),
        });
        peer.used = Instant::now();
        if peer.view.identity() == view.identity() && peer.idle.len() < IDLE {
            peer.idle.push(connection);
        }
    }

    async fn connect(&self, address: &str) -> Result<Connection, TransportError> {
        let unusable = |obstacle, message: String| TransportError::Unusable {
            address: address.to_owned(),
            obstacle,
            message,
        };
        let Some(socket) = self.socket(address) else {
            return Err(unusable(
                Obstacle::Socket,
                "it is on another host".to_owned(),
            ));
        };
        let stream = timeout(self.options.handshake, UnixStream::connect(socket))
            .await
            .map_err(|_| unusable(Obstacle::Socket, "its socket does not answer".to_owned()))?
            .map_err(|error| unusable(Obstacle::Socket, error.to_string()))?;
        let connection = Connection::new(stream);
        let user = connection
            .user()
            .map_err(|cause| Source { address }.lost(cause))?;
        if user != self.options.user {
            return Err(unusable(
                Obstacle::Credentials,
                format!(
                    "its process is user {user}'s, this one is user {}'s",
                    self.options.user
                ),
            ));
        }
        Ok(connection)
    }

    /// Names the lease and waits for what the source says to it.
    async fn ask(
        &self,
        connection: &mut Connection,
        open: &Frame,
        request: &FetchRequest,
        kept: Option<Arc<View>>,
    ) -> Result<Opened, TransportError> {
        let source = source_of(request);
        let patience = self.options.handshake;
        connection.write(open);
        // A source that turns everybody away may have closed already: what it said is read below.
        let told = connection.flush(patience).await;
        if kept.is_some() {
            // No file comes any more, only words.
            connection.listen().await;
        }
        let answer = timeout(patience, connection.frame_and_file())
            .await
            .map_err(|_| source.silent(patience))?
            .map_err(broken(source))?;
        let Some((frame, file)) = answer else {
            return told
                .map_err(|cause| source.lost(cause))
                .map(|()| Opened::Closed);
        };
        let view = match (frame, file, kept) {
            (Frame::Ended(why), _, _) => return Ok(Opened::Refused(why)),
            (Frame::Accepted, _, Some(view)) => return Ok(Opened::Accepted(view)),
            (
                Frame::Arena {
                    blocks,
                    block_bytes,
                },
                Some(file),
                None,
            ) => self.view(request, &file, blocks, block_bytes)?,
            _ => {
                return Err(source.protocol("it answered an open with another frame"));
            }
        };
        match timeout(patience, connection.frame())
            .await
            .map_err(|_| source.silent(patience))?
            .map_err(broken(source))?
        {
            Some(Frame::Accepted) => Ok(Opened::Accepted(view)),
            Some(_) => Err(source.protocol("it did not accept after its arena")),
            None => Err(source.closed()),
        }
    }

    /// The mapping of the file: the one that is there, or a new one.
    fn view(
        &self,
        request: &FetchRequest,
        file: &OwnedFd,
        blocks: u32,
        block_bytes: u64,
    ) -> Result<Arc<View>, TransportError> {
        let address = request.address.as_str();
        let unusable = |message: String| TransportError::Unusable {
            address: address.to_owned(),
            obstacle: Obstacle::Memory,
            message,
        };
        if block_bytes != request.block_bytes as u64 {
            return Err(TransportError::Layout {
                address: address.to_owned(),
            });
        }
        let shape = Shape::new(blocks, request.block_bytes)
            .ok_or_else(|| source_of(request).protocol("its arena has a size that cannot be"))?;
        let identity = identity(file).map_err(|error| unusable(error.to_string()))?;
        let mut peers = self.peers.lock();
        if let Some(peer) = peers.get(address)
            && peer.view.identity() == identity
            && peer.view.shape() == shape
        {
            return Ok(Arc::clone(&peer.view));
        }
        let view = View::map(file, shape).map_err(|error| unusable(error.to_string()))?;
        let view = Arc::new(view);
        let peer = Peer {
            view: Arc::clone(&view),
            idle: Vec::new(),
            used: Instant::now(),
        };
        // A source that listens at the same address with other memory: what was kept of the former is of no use.
        peers.insert(address.to_owned(), peer);
        Ok(view)
    }
}

impl Reading<'_> {
    async fn blocks(&mut self, sink: &mut dyn BlockSink) -> Result<End, TransportError> {
        let source = source_of(self.request);
        let mut order = Order::new(self.request.first_block);
        let mut turn = 0;
        loop {
            let ready = self.connection.ready().map_err(broken(source))?;
            let frame = match ready {
                Some(frame) => Some(frame),
                None => timeout(self.silence, self.connection.frame())
                    .await
                    .map_err(|_| source.silent(self.silence))?
                    .map_err(broken(source))?,
            };
            match frame {
                Some(Frame::Alive) => {}
                Some(Frame::Located {
                    index,
                    sealed,
                    promised,
                    block,
                }) => {
                    order
                        .block(index, sealed, sink)
                        .map_err(|wrong| source.protocol(wrong))?;
                    let arrival = self.copy(index, promised, block, sink)?;
                    sink.arrived(&arrival).map_err(TransportError::Refused)?;
                    turn += self.request.block_bytes;
                    if turn >= TURN {
                        turn = 0;
                        tokio::task::yield_now().await;
                    }
                }
                Some(Frame::Sealed { end }) => {
                    return order
                        .sealed(end, sink)
                        .map_err(|wrong| source.protocol(wrong));
                }
                Some(Frame::Ended(why)) => return Err(source.ended(why)),
                Some(_) => return Err(source.protocol("a frame came that has no place here")),
                None => return Err(source.closed()),
            }
        }
    }

    /// Header, bytes, header. What does not fit together is shown to the sink as it was seen, for it to judge.
    fn copy(
        &self,
        index: u32,
        promised: BlockHeader,
        block: u32,
        sink: &mut dyn BlockSink,
    ) -> Result<Arrival, TransportError> {
        let source = source_of(self.request);
        let summed = sink.wants_checksum(index);
        let seen = self.view.header(block);
        let mut copied = None;
        let placed = sink
            .place(index, &mut |target| {
                copied = self.view.copy(block, target, summed);
                Ok(if copied.is_some() { target.len() } else { 0 })
            })
            .map_err(TransportError::Refused)?;
        placed.map_err(|cause| source.lost(cause))?;
        let Some(checksum) = copied else {
            return Err(source.protocol("it named a block that its arena does not have"));
        };
        let still = seen.filter(|seen| self.view.still(block, seen));
        Ok(Arrival {
            index,
            promised,
            before: seen.map(|seen| seen.header).unwrap_or_default(),
            after: still.map(|seen| seen.header).unwrap_or_default(),
            checksum,
        })
    }
}

fn source_of(request: &FetchRequest) -> Source<'_> {
    Source {
        address: &request.address,
    }
}

/// Words that make no sense are the peer's fault, everything else the connection's.
fn broken(source: Source<'_>) -> impl Fn(io::Error) -> TransportError + '_ {
    move |cause| match cause.kind() {
        io::ErrorKind::InvalidData => source.protocol(&cause.to_string()),
        _ => source.lost(cause),
    }
}

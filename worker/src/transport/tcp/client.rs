//! The reading side of the TCP transport.

use std::io;
use std::time::Duration;

use baton_system::network::{Network, Stream};
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;

use super::TcpOptions;
use super::frame::{Frame, PREAMBLE};
use super::kept::Kept;
use crate::transport::checksum::Growing;
use crate::transport::reading::{self, Order, Source};
use crate::transport::{Arrival, BlockSink, End, FetchRequest, TransportError};

/// Control bytes are read in pieces of this size. What is read beyond a `Block` frame is the start of its bytes and has to be
/// copied; this is small beside a block.
const READ: usize = 512;
/// Bytes of a block are read in pieces of this size: large beside the cost of a call, small beside a core's second cache.
const PIECE: usize = 128 << 10;

struct Connection<'a> {
    stream: Stream,
    source: Source<'a>,
    silence: Duration,
    buffer: Vec<u8>,
}

pub(super) async fn fetch(
    network: &dyn Network,
    kept: &Kept,
    options: TcpOptions,
    request: &FetchRequest,
    sink: &mut dyn BlockSink,
) -> Result<End, TransportError> {
    let address = request.address.as_str();
    let source = Source { address };
    let open = Frame::Open(reading::open(request)?);
    let connection = |stream, silence| Connection {
        stream,
        source,
        silence,
        buffer: Vec::with_capacity(READ),
    };
    let mut opened = None;
    if let Some(stream) = kept.take(address) {
        let mut connection = connection(stream, options.handshake / KEPT);
        match connection.open(&open, Greeting::Said).await {
            Ok(()) => opened = Some(connection),
            // It may have been closed, or its path lost, since it was last used: that says nothing of the source.
            Err(TransportError::Lost { .. } | TransportError::Silent { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    let mut connection = match opened {
        Some(connection) => connection,
        None => {
            let stream = timeout(options.connect, network.connect(address))
                .await
                .map_err(|_| source.lost(io::ErrorKind::TimedOut.into()))?
                .map_err(|cause| source.lost(cause))?;
            let mut connection = connection(stream, options.handshake);
            connection.open(&open, Greeting::Due).await?;
            connection
        }
    };
    connection.silence = options.silence;
    let end = connection.blocks(request, sink).await?;
    if connection.buffer.is_empty() {
        kept.put(address, connection.stream);
    }
    Ok(end)
}

/// A kept connection is given this part of the time for a new one's handshake: a source that does not answer on it is asked anew.
const KEPT: u32 = 4;

/// Whether the preambles have been exchanged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Greeting {
    Due,
    Said,
}

impl Connection<'_> {
    async fn open(&mut self, open: &Frame, greeting: Greeting) -> Result<(), TransportError> {
        let mut out = Vec::new();
        if greeting == Greeting::Due {
            out.extend_from_slice(&PREAMBLE);
        }
        open.encode(&mut out);
        timeout(self.silence, self.stream.write_all(&out))
            .await
            .map_err(|_| self.source.silent(self.silence))?
            .map_err(|cause| self.source.lost(cause))?;
        if greeting == Greeting::Due {
            while self.buffer.len() < PREAMBLE.len() {
                self.fill().await?;
            }
            if self.buffer[..PREAMBLE.len()] != PREAMBLE {
                return Err(self
                    .source
                    .protocol("it does not speak this version of the KV transport"));
            }
            self.buffer.drain(..PREAMBLE.len());
        }
        match self.frame().await? {
            Frame::Accepted => Ok(()),
            Frame::Ended(why) => Err(self.source.ended(why)),
            _ => Err(self
                .source
                .protocol("it answered an open with another frame")),
        }
    }

    async fn blocks(
        &mut self,
        request: &FetchRequest,
        sink: &mut dyn BlockSink,
    ) -> Result<End, TransportError> {
        let mut order = Order::new(request.first_block);
        loop {
            match self.frame().await? {
                Frame::Alive => {}
                Frame::Block {
                    index,
                    sealed,
                    promised,
                    before,
                } => {
                    order
                        .block(index, sealed, sink)
                        .map_err(|wrong| self.source.protocol(wrong))?;
                    let checksum = self.bytes(index, request.block_bytes, sink).await?;
                    let Frame::Tail { after } = self.frame().await? else {
                        return Err(self.source.protocol("a block came without its tail"));
                    };
                    sink.arrived(&Arrival {
                        index,
                        promised,
                        before,
                        after,
                        checksum,
                    })
                    .map_err(TransportError::Refused)?;
                }
                Frame::Sealed { end } => {
                    return order
                        .sealed(end, sink)
                        .map_err(|wrong| self.source.protocol(wrong));
                }
                Frame::Ended(why) => return Err(self.source.ended(why)),
                Frame::Open(_)
                | Frame::Accepted
                | Frame::Tail { .. }
                | Frame::Arena { .. }
                | Frame::Located { .. }
                | Frame::Done => {
                    return Err(self.source.protocol("a frame came that has no place here"));
                }
            }
        }
    }

    /// Moves the block's bytes into their place: what the buffer has of them, then straight from the socket. Returns their
    /// checksum, if the sink wants it.
    async fn bytes(
        &mut self,
        index: u32,
        length: usize,
        sink: &mut dyn BlockSink,
    ) -> Result<Option<u64>, TransportError> {
        let mut growing = sink.wants_checksum(index).then(|| Growing::new(length));
        let mut checksum = None;
        let mut sum = |filled: &[u8]| match &mut growing {
            Some(_) if filled.len() == length => {
                checksum = growing.take().map(|growing| growing.finish(filled));
            }
            Some(growing) => growing.advance(filled),
            None => {}
        };
        let buffered = self.buffer.len().min(length);
        let (buffer, stream) = (&self.buffer, &self.stream);
        self.place(sink, index, &mut |target| {
            check_length(target, length)?;
            target[..buffered].copy_from_slice(&buffer[..buffered]);
            sum(&target[..buffered]);
            Ok(buffered)
        })?;
        let mut filled = buffered;
        while filled < length {
            timeout(self.silence, stream.readable())
                .await
                .map_err(|_| self.source.silent(self.silence))?
                .map_err(|cause| self.source.lost(cause))?;
            // As much as is there, in pieces: each is summed before the next pushes it out of the cache.
            loop {
                let end = length.min(filled + PIECE);
                let read = self.place(sink, index, &mut |target| {
                    check_length(target, length)?;
                    match stream.try_read(&mut target[filled..end]) {
                        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
                        Ok(read) => {
                            sum(&target[..filled + read]);
                            Ok(read)
                        }
                        Err(error) => Err(error),
                    }
                })?;
                filled += read;
                if read == 0 || filled == length {
                    break;
                }
            }
        }
        self.buffer.drain(..buffered);
        Ok(checksum)
    }

    fn place(
        &self,
        sink: &mut dyn BlockSink,
        index: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<usize, TransportError> {
        sink.place(index, fill)
            .map_err(TransportError::Refused)?
            .map_err(|cause| self.source.lost(cause))
    }

    async fn frame(&mut self) -> Result<Frame, TransportError> {
        loop {
            match Frame::decode(&self.buffer) {
                Ok(Some((frame, used))) => {
                    self.buffer.drain(..used);
                    return Ok(frame);
                }
                Ok(None) => self.fill().await?,
                Err(error) => return Err(self.source.protocol(&error.to_string())),
            }
        }
    }

    /// Reads some control bytes.
    async fn fill(&mut self) -> Result<(), TransportError> {
        let mut piece = [0; READ];
        loop {
            timeout(self.silence, self.stream.readable())
                .await
                .map_err(|_| self.source.silent(self.silence))?
                .map_err(|cause| self.source.lost(cause))?;
            match self.stream.try_read(&mut piece) {
                Ok(0) => return Err(self.source.closed()),
                Ok(read) => {
                    self.buffer.extend_from_slice(&piece[..read]);
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(cause) => return Err(self.source.lost(cause)),
            }
        }
    }
}

fn check_length(target: &[u8], length: usize) -> io::Result<()> {
    if target.len() == length {
        Ok(())
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the place of a block has another size than the block",
        ))
    }
}

//! The serving side of the TCP transport: a reader's connection from its first frame to its last.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use baton_system::network::{Listener, Stream};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::TcpOptions;
use super::frame::{Frame, Open, PREAMBLE, Why};
use crate::kv::lease::{ManifestEntry, Next};
use crate::transport::{BlockSource, reception};

pub(super) async fn serve(
    listener: Listener,
    source: Arc<dyn BlockSource>,
    options: TcpOptions,
    stop: CancellationToken,
) {
    let serve = |stream| {
        let source = Arc::clone(&source);
        async move { connection(stream, &*source, options).await }
    };
    let refuse = |stream| refuse(stream, options);
    reception::serve(listener, options.readers, stop, serve, refuse).await;
}

/// Tells a reader that it is one too many, and waits until it has heard: closing on what it has sent would take the answer back.
async fn refuse(stream: Stream, options: TcpOptions) {
    let told = async {
        read_open(&stream, Greeting::Due).await?;
        let mut out = PREAMBLE.to_vec();
        Frame::Ended(Why::Busy).encode(&mut out);
        write(&stream, &out, options.stalled).await
    };
    if let Ok(Ok(())) = timeout(options.handshake, told).await {
        closed(&stream, options.handshake).await;
    }
}

/// Whether the preambles have been exchanged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Greeting {
    Due,
    Said,
}

async fn connection(
    stream: Stream,
    source: &dyn BlockSource,
    options: TcpOptions,
) -> io::Result<()> {
    let mut out = PREAMBLE.to_vec();
    let first = timeout(options.handshake, read_open(&stream, Greeting::Due))
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    let mut opened = Some(first);
    while let Some(open) = opened {
        let mut serving = Serving {
            stream: &stream,
            source,
            options,
            open,
            out: std::mem::take(&mut out),
        };
        let last = serving.run().await?;
        let again = matches!(last, Some(Frame::Sealed { .. }));
        if let Some(last) = last {
            last.encode(&mut serving.out);
        }
        serving.flush().await?;
        if !again {
            // Lets the reader close first, so that the last frame is not lost to a reset.
            closed(&stream, options.handshake).await;
            return Ok(());
        }
        // A reader closes what it does not use after half of this; longer waits only for one that is frozen or cut off.
        let patience = options.idle.saturating_mul(2);
        opened = match timeout(patience, read_open(&stream, Greeting::Said)).await {
            Ok(Ok(open)) => Some(open),
            Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => None,
            Ok(Err(error)) => return Err(error),
            Err(_) => None,
        };
    }
    Ok(())
}

/// Preamble, if it is due, and `Open`, and not a byte more: a reader has nothing else to say.
async fn read_open(stream: &Stream, greeting: Greeting) -> io::Result<Open> {
    let malformed = |message: String| io::Error::new(io::ErrorKind::InvalidData, message);
    let mut buffer = Vec::new();
    loop {
        let mut piece = [0; 512];
        stream.readable().await?;
        match stream.try_read(&mut piece) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => buffer.extend_from_slice(&piece[..read]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        }
        let preamble = match greeting {
            Greeting::Due => buffer.len().min(PREAMBLE.len()),
            Greeting::Said => 0,
        };
        if buffer[..preamble] != PREAMBLE[..preamble] {
            return Err(malformed("another protocol or version".to_owned()));
        }
        match Frame::decode(&buffer[preamble..]).map_err(|error| malformed(error.to_string()))? {
            Some((Frame::Open(open), used)) if preamble + used == buffer.len() => return Ok(open),
            Some(_) => {
                return Err(malformed(
                    "the first frame is no open, or not the only one".to_owned(),
                ));
            }
            None => {}
        }
    }
}

struct Serving<'a> {
    stream: &'a Stream,
    source: &'a dyn BlockSource,
    options: TcpOptions,
    open: Open,
    /// Control bytes not yet written; they go out together with the next block.
    out: Vec<u8>,
}

impl Serving<'_> {
    fn next(&self, index: u32) -> Next {
        let Open {
            lease,
            generation,
            transfer,
            ..
        } = &self.open;
        self.source.next(*lease, *generation, transfer, index)
    }

    /// Serves until there is a last frame to send; `None` when the reader has gone.
    async fn run(&mut self) -> io::Result<Option<Frame>> {
        let Open {
            lease,
            generation,
            transfer,
            ..
        } = &self.open;
        let mut changes = match self.source.watch(*lease, *generation, transfer) {
            Ok(changes) => changes,
            Err(gone) => return Ok(Some(Frame::Ended(Why::Gone(gone)))),
        };
        // Only a claimant learns what layout there is.
        if self.open.layout != self.source.layout()
            || self.open.block_bytes != self.source.block_bytes() as u64
        {
            return Ok(Some(Frame::Ended(Why::Layout)));
        }
        Frame::Accepted.encode(&mut self.out);
        let mut index = self.open.first_block;
        loop {
            // Seen before asking: a change in between is then not waited for.
            changes.mark_unchanged();
            match self.next(index) {
                Next::Block { entry, sealed } => {
                    self.block(index, entry, sealed).await?;
                    index += 1;
                }
                Next::Sealed { end } => return Ok(Some(Frame::Sealed { end })),
                Next::Gone(gone) => return Ok(Some(Frame::Ended(Why::Gone(gone)))),
                Next::Wait => {
                    self.flush().await?;
                    if !self.wait(&mut changes).await? {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Waits for a change of the lease, with a sign of life now and then. False when the reader has gone.
    async fn wait(&mut self, changes: &mut watch::Receiver<u64>) -> io::Result<bool> {
        loop {
            tokio::select! {
                // An error says that the lease has ended: the next question tells why.
                _ = changes.changed() => return Ok(true),
                readable = self.stream.readable() => {
                    readable?;
                    let mut byte = [0];
                    match self.stream.try_read(&mut byte) {
                        Ok(0) => return Ok(false),
                        Ok(_) => return Err(io::Error::new(io::ErrorKind::InvalidData, "a reader that talks")),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        Err(error) => return Err(error),
                    }
                }
                () = tokio::time::sleep(self.options.alive) => {
                    Frame::Alive.encode(&mut self.out);
                    self.flush().await?;
                    // The lease may have expired without anybody noticing yet.
                    return Ok(true);
                }
            }
        }
    }

    async fn block(
        &mut self,
        index: u32,
        entry: ManifestEntry,
        sealed: Option<u32>,
    ) -> io::Result<()> {
        Frame::Block {
            index,
            sealed,
            promised: entry.header,
            before: self.source.header_before(entry.block),
        }
        .encode(&mut self.out);
        let length = self.source.block_bytes();
        let (mut control, mut written) = (0, 0);
        while written < length {
            writable(self.stream, self.options.stalled).await?;
            let taken = self.source.bytes(entry.block, &mut |bytes| {
                // Asked while the bytes are locked: if the lease lives now, nobody can have reused the block, and none of another
                // request's bytes leave. A block cannot be broken off but by closing.
                if !matches!(self.next(index), Next::Block { entry: now, .. } if now == entry) {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
                let slices = [
                    io::IoSlice::new(&self.out[control..]),
                    io::IoSlice::new(&bytes[written..]),
                ];
                would_block(self.stream.try_write_vectored(&slices))
            })?;
            let of_control = taken.min(self.out.len() - control);
            control += of_control;
            written += taken - of_control;
        }
        self.out.clear();
        Frame::Tail {
            after: self.source.header_after(entry.block),
        }
        .encode(&mut self.out);
        Ok(())
    }

    async fn flush(&mut self) -> io::Result<()> {
        write(self.stream, &self.out, self.options.stalled).await?;
        self.out.clear();
        Ok(())
    }
}

async fn write(stream: &Stream, bytes: &[u8], patience: Duration) -> io::Result<()> {
    let mut written = 0;
    while written < bytes.len() {
        writable(stream, patience).await?;
        written += would_block(stream.try_write(&bytes[written..]))?;
    }
    Ok(())
}

async fn writable(stream: &Stream, patience: Duration) -> io::Result<()> {
    timeout(patience, stream.writable())
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Until the reader has closed, or said something more.
async fn closed(stream: &Stream, patience: Duration) {
    let _ = timeout(patience, async {
        loop {
            stream.readable().await?;
            let mut byte = [0];
            match stream.try_read(&mut byte) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                _ => return io::Result::Ok(()),
            }
        }
    })
    .await;
}

fn would_block(written: io::Result<usize>) -> io::Result<usize> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        Ok(0) => Err(io::ErrorKind::WriteZero.into()),
        other => other,
    }
}

//! The serving side of `Shm`: which block lies where, for readers that have claimed; never a byte of KV.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::ShmOptions;
use super::connection::{Connection, malformed};
use crate::kv::lease::one_sided::OneSidedRead;
use crate::kv::lease::{ManifestEntry, Next, Unpromised};
use crate::transport::tcp::frame::{Frame, Open, Why};
use crate::transport::{BlockSource, reception};

/// Blocks that are looked for and told of at once: as many frames as a reader reads at once, so that it begins with them while the
/// next ones are looked for.
const AT_ONCE: u32 = 64;

pub(super) async fn serve(
    listener: UnixListener,
    source: Arc<dyn BlockSource>,
    options: ShmOptions,
    stop: CancellationToken,
) {
    let serve = |stream| {
        let source = Arc::clone(&source);
        async move { connection(stream, &*source, options).await }
    };
    let refuse = |stream| async move {
        // A reader that has gone need not be told.
        let _ = turn_away(&mut Connection::new(stream), Why::Busy, options).await;
    };
    reception::serve(listener, options.readers, stop, serve, refuse).await;
}

/// Says why, and waits for the reader to close: what it has not read of a closed socket's words is lost when it has written.
async fn turn_away(connection: &mut Connection, why: Why, options: ShmOptions) -> io::Result<()> {
    connection.write(&Frame::Ended(why));
    connection.flush(options.stalled).await?;
    let closed = async {
        while connection.frame().await?.is_some() {}
        io::Result::Ok(())
    };
    timeout(options.handshake, closed)
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// One hand-off after another, until the reader closes.
async fn connection(
    stream: UnixStream,
    source: &dyn BlockSource,
    options: ShmOptions,
) -> io::Result<()> {
    let mut connection = Connection::new(stream);
    if connection.user()? != options.user {
        return turn_away(&mut connection, Why::Forbidden, options).await;
    }
    let mut file = source.arena().and_then(|arena| arena.file().ok());
    let mut patience = options.handshake;
    loop {
        let open = match timeout(patience, connection.frame()).await {
            Ok(Ok(Some(Frame::Open(open)))) => open,
            Ok(Ok(None)) | Err(_) => return Ok(()),
            Ok(Ok(Some(_))) => return Err(malformed("a hand-off begins with an open")),
            Ok(Err(error)) => return Err(error),
        };
        // A reader gives its connection up first; this is for one that is frozen.
        patience = options.idle.saturating_mul(2);
        let mut reading = Reading { source, read: None };
        let mut serving = Serving {
            connection: &mut connection,
            source,
            options,
            open,
        };
        match serving.hand_off(&mut reading, &mut file).await {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(error) => {
                // Not served any more, but perhaps in the middle of a copy: closing this end would not stop it.
                if reading.read.is_some() {
                    connection.until_closed().await;
                }
                return Err(error);
            }
        }
    }
}

/// A read that is under way; over when this is dropped, in whatever way.
struct Reading<'a> {
    source: &'a dyn BlockSource,
    read: Option<OneSidedRead>,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        if let Some(read) = self.read.take() {
            self.source.one_sided_end(read);
        }
    }
}

struct Serving<'a> {
    connection: &'a mut Connection,
    source: &'a dyn BlockSource,
    options: ShmOptions,
    open: Open,
}

impl Serving<'_> {
    /// What is there from `first` on.
    fn look(&self, first: u32, found: &mut Vec<ManifestEntry>) -> Result<Next, Unpromised> {
        let Open {
            lease,
            generation,
            transfer,
            ..
        } = &self.open;
        let wanted = first..first.saturating_add(AT_ONCE);
        self.source
            .next_blocks(*lease, *generation, transfer, wanted, found)
    }

    /// Serves one open until its reader is done. False when it has gone.
    async fn hand_off(
        &mut self,
        reading: &mut Reading<'_>,
        file: &mut Option<BorrowedFd<'_>>,
    ) -> io::Result<bool> {
        let last = self.run(reading, file).await?;
        self.connection.write(&last);
        self.connection.flush(self.options.stalled).await?;
        if reading.read.is_none() {
            return Ok(true);
        }
        // However long it takes: it may be in the middle of a copy, and nothing but its word or its end says when it is not.
        match self.connection.frame().await? {
            Some(Frame::Done) => Ok(true),
            None => Ok(false),
            Some(_) => Err(malformed(
                "a reader that is not done talks of something else",
            )),
        }
    }

    /// Serves one open until there is a last frame to send. `file` goes with the first that is accepted.
    async fn run(
        &mut self,
        reading: &mut Reading<'_>,
        file: &mut Option<BorrowedFd<'_>>,
    ) -> io::Result<Frame> {
        let Open {
            lease,
            generation,
            transfer,
            ..
        } = &self.open;
        let mut changes = match self.source.watch(*lease, *generation, transfer) {
            Ok(changes) => changes,
            Err(gone) => return Ok(Frame::Ended(Why::Gone(gone))),
        };
        // Only a claimant learns what layout there is, or sees the memory.
        if self.open.layout != self.source.layout()
            || self.open.block_bytes != self.source.block_bytes() as u64
        {
            return Ok(Frame::Ended(Why::Layout));
        }
        reading.read = match self.source.one_sided_begin(*lease, *generation, transfer) {
            Ok(read) => read,
            Err(gone) => return Ok(Frame::Ended(Why::Gone(gone))),
        };
        if let (Some(file), Some(arena)) = (file.take(), self.source.arena()) {
            self.connection.write(&Frame::Arena {
                blocks: arena.shape().pieces(),
                block_bytes: arena.shape().piece_bytes() as u64,
            });
            self.connection
                .flush_with(file, self.options.stalled)
                .await?;
        }
        self.connection.write(&Frame::Accepted);
        let mut next = self.open.first_block;
        let mut found = Vec::new();
        loop {
            // Seen before asking: a change in between is then not waited for.
            changes.mark_unchanged();
            found.clear();
            let then = self
                .look(next, &mut found)
                .map_err(|unpromised| malformed(&unpromised.to_string()))?;
            for entry in &found {
                self.connection.write(&Frame::Located {
                    index: next,
                    sealed: then.sealed(),
                    promised: entry.header,
                    block: entry.block.0,
                });
                next += 1;
            }
            match then {
                // The reader begins while the next ones are looked for.
                Next::Block { .. } => self.connection.flush(self.options.stalled).await?,
                Next::Sealed { end } => return Ok(Frame::Sealed { end }),
                Next::Gone(gone) => return Ok(Frame::Ended(Why::Gone(gone))),
                Next::Wait => {
                    self.connection.flush(self.options.stalled).await?;
                    self.wait(&mut changes).await?;
                }
            }
        }
    }

    /// Waits for a change of the lease, with a sign of life now and then.
    async fn wait(&mut self, changes: &mut watch::Receiver<u64>) -> io::Result<()> {
        tokio::select! {
            // An error says that the lease has ended: the next question tells why.
            _ = changes.changed() => {}
            said = self.connection.frame() => match said? {
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(_) => return Err(malformed("a reader that talks while it is served")),
            },
            () = tokio::time::sleep(self.options.alive) => {
                // The lease may have expired without anybody noticing yet: the next question tells.
                self.connection.write(&Frame::Alive);
            }
        }
        Ok(())
    }
}

//! Moving KV bytes between workers: one trait, three implementations, one conformance suite.
//!
//! The reader pulls. It names lease, generation and transfer; the source serves nothing without a claim by that transfer, and
//! each block as soon as it is published. What arrives is promised by the manifest, accompanied by the header that lay beside the
//! block before and after its bytes were read, and proven by the sink: a transport moves bytes and judges nothing.
//!
//! - [`local`], [`shm`], [`tcp`]: within the process, within the host, anywhere. [`choice`]: which of them a pair uses.
//! - `reception`: how a source takes connections. `reading`: what a reader believes. [`memory`]: arenas that other processes can map. [`checksum`]: at the speed of a copy. [`fault`]: wrong on purpose, for tests.

pub(crate) mod ancillary;
pub mod checksum;
pub mod choice;
pub mod fault;
pub mod local;
pub mod memory;
mod reading;
mod reception;
pub mod shm;
pub mod tcp;

#[cfg(test)]
mod conformance;

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use baton_protocol::failure::HandoffFailure;
use baton_protocol::header::BlockHeader;
use baton_protocol::ids::{Generation, LeaseId, TransferId};
use futures::future::BoxFuture;
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::memory::Arena;
use crate::kv::KvPool;
use crate::kv::lease::one_sided::OneSidedRead;
use crate::kv::lease::{Gone, ManifestEntry, Next, Unpromised};
use crate::kv::store::BlockId;

/// What a reader asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchRequest {
    /// Where the source listens, in the transport's own form.
    pub address: String,
    /// The capability.
    pub lease: LeaseId,
    /// Generation of the lease.
    pub generation: Generation,
    /// The transfer that has claimed it.
    pub transfer: TransferId,
    /// Index in the whole sequence of the first block wanted; not before the lease's skipped ones.
    pub first_block: u32,
    /// The reader's layout, first eight bytes of the digest: a source with another one refuses.
    pub layout: u64,
    /// Bytes of a block on the reader's side: a source with other blocks refuses.
    pub block_bytes: usize,
}

/// One block as it came. Whether it is what was asked for is for the sink to judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Index in the whole sequence.
    pub index: u32,
    /// What the lease's manifest promises.
    pub promised: BlockHeader,
    /// What lay beside the block before its bytes were read.
    pub before: BlockHeader,
    /// And after.
    pub after: BlockHeader,
    /// [`baton_protocol::checksum`] of the bytes in their place, where the transport summed them while it put them there.
    pub checksum: Option<u64>,
}

/// A legal end: every block of the manifest has been given to the sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Index in the whole sequence of the block after the last.
    pub end: u32,
}

/// What keeps a pair from using a transport that both have. Bounded: it is a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Obstacle {
    /// Nobody listens there any more, or the system lets nobody connect.
    Socket,
    /// The two processes are different users'.
    Credentials,
    /// The source's memory cannot be mapped.
    Memory,
}

impl Obstacle {
    /// As in logs and metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Socket => "socket",
            Self::Credentials => "credentials",
            Self::Memory => "memory",
        }
    }
}

/// Why a fetch ended without its end.
#[derive(Debug, Error)]
pub enum TransportError {
    /// The source says so.
    #[error("lease: the source serves it no longer ({0}): recompute")]
    Gone(Gone),
    /// The peer cannot be reached, or the connection broke. Worth another connection while the lease lives.
    #[error("source {address}: {cause}: connect again or recompute")]
    Lost {
        /// The peer.
        address: String,
        /// What the system says.
        cause: io::Error,
    },
    /// Nothing came for too long, not even a sign of life.
    #[error("source {address}: nothing came for {milliseconds} ms: recompute")]
    Silent {
        /// The peer.
        address: String,
        /// How long was waited.
        milliseconds: u64,
    },
    /// The peer's blocks or layout are others.
    #[error("source {address}: its blocks have another layout or size: the pair is incompatible")]
    Layout {
        /// The peer.
        address: String,
    },
    /// The peer speaks something else.
    #[error("source {address}: {message}: check the address and both versions")]
    Protocol {
        /// The peer.
        address: String,
        /// What was wrong.
        message: String,
    },
    /// The sink will not take what came.
    #[error("block refused by its reader: {0}")]
    Refused(HandoffFailure),
    /// This way is closed to this pair, and nothing has come over it. Another transport may do.
    #[error("source {address}: {message} ({}): use another transport", obstacle.word())]
    Unusable {
        /// The peer.
        address: String,
        /// What is in the way.
        obstacle: Obstacle,
        /// In words.
        message: String,
    },
    /// The source takes no more readers.
    #[error("source {address}: it serves as many readers as it can: try again")]
    Busy {
        /// The peer.
        address: String,
    },
}

impl TransportError {
    /// May another connection bring the rest?
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::Busy { .. })
    }

    /// The word for the run's record.
    pub fn failure(&self) -> HandoffFailure {
        match self {
            Self::Gone(_) => HandoffFailure::LeaseGone,
            Self::Lost { .. } | Self::Busy { .. } | Self::Unusable { .. } => {
                HandoffFailure::SourceLost
            }
            Self::Silent { .. } => HandoffFailure::Timeout,
            Self::Layout { .. } => HandoffFailure::LayoutMismatch,
            Self::Protocol { .. } => HandoffFailure::ProtocolError,
            Self::Refused(failure) => *failure,
        }
    }
}

/// Where blocks go on the reader's side.
pub trait BlockSink: Send {
    /// Runs `fill` on the bytes of the place for block `index`, all of them. May be called several times for a block, before
    /// [`Self::arrived`]. `fill` gets nothing and an error comes back when there is no such place.
    fn place(
        &mut self,
        index: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<io::Result<usize>, HandoffFailure>;

    /// Whether the checksum of this block's bytes will be asked for. A transport that has them at hand sums them then.
    fn wants_checksum(&self, index: u32) -> bool {
        let _ = index;
        true
    }

    /// All bytes of a block are in place. An error ends the fetch.
    fn arrived(&mut self, arrival: &Arrival) -> Result<(), HandoffFailure>;

    /// The source has sealed the manifest: `end` is the index of the block after the last. Comes once in a fetch, as soon as it is
    /// known, so perhaps with blocks still to come.
    fn sealed(&mut self, end: u32);
}

/// What a transport serves from. The pool is one; tests and fault injection wrap it.
pub trait BlockSource: Debug + Send + Sync {
    /// Bytes of one block.
    fn block_bytes(&self) -> usize;
    /// First eight bytes of the layout's digest.
    fn layout(&self) -> u64;
    /// Wakes at every change of the lease and closes at its end; refused for all but its claimant.
    fn watch(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
    ) -> Result<watch::Receiver<u64>, Gone>;
    /// What is at `index`. Checked anew each time: the answer may be `Gone` at any moment.
    fn next(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        index: u32,
    ) -> Next;
    /// As [`Self::next`] for the blocks of `wanted` that are there: in order into `found`, each with the header that is promised of
    /// it beside it at a moment when it was the lease's. The answer is what comes after them.
    ///
    /// # Errors
    /// [`Unpromised`]: there was another header, and the lease lives.
    fn next_blocks(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        wanted: Range<u32>,
        found: &mut Vec<ManifestEntry>,
    ) -> Result<Next, Unpromised> {
        let next = |index| self.next(lease, generation, transfer, index);
        for index in wanted.clone() {
            let entry = match next(index) {
                Next::Block { entry, .. } => entry,
                other => return Ok(other),
            };
            let header = self.header_before(entry.block);
            // Asked again: the block counts only if it was the lease's when its header was looked at.
            match next(index) {
                Next::Block { entry: now, .. } if now == entry && header == entry.header => {
                    found.push(entry);
                }
                Next::Gone(gone) => return Ok(Next::Gone(gone)),
                _ => return Err(Unpromised),
            }
        }
        Ok(next(wanted.end))
    }
    /// The header beside a block, before its bytes are read.
    fn header_before(&self, block: BlockId) -> BlockHeader;
    /// And after: if the block was reused meanwhile, this is another one.
    fn header_after(&self, block: BlockId) -> BlockHeader;
    /// Runs `read` on the bytes of a block.
    fn bytes(
        &self,
        block: BlockId,
        read: &mut dyn FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize>;
    /// Memory that a reader on this host may map. `None`: all bytes go through [`Self::bytes`].
    fn arena(&self) -> Option<&Arena> {
        None
    }
    /// From now on a reader may touch the lease's blocks without asking. What is returned is kept until it cannot any more, and given
    /// to [`Self::one_sided_end`].
    fn one_sided_begin(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
    ) -> Result<Option<OneSidedRead>, Gone> {
        let _ = (lease, generation, transfer);
        Ok(None)
    }
    /// The reader has said that it stopped, or it is gone.
    fn one_sided_end(&self, read: OneSidedRead) {
        drop(read);
    }
}

impl BlockSource for KvPool {
    fn block_bytes(&self) -> usize {
        self.store().block_bytes()
    }

    fn layout(&self) -> u64 {
        Self::layout(self)
    }

    fn watch(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
    ) -> Result<watch::Receiver<u64>, Gone> {
        self.watch_lease(lease, generation, transfer)
    }

    fn next(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        index: u32,
    ) -> Next {
        self.next_block(lease, generation, transfer, index)
    }

    fn next_blocks(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        wanted: Range<u32>,
        found: &mut Vec<ManifestEntry>,
    ) -> Result<Next, Unpromised> {
        Self::next_blocks(self, lease, generation, transfer, wanted, found)
    }

    fn header_before(&self, block: BlockId) -> BlockHeader {
        self.header(block)
    }

    fn header_after(&self, block: BlockId) -> BlockHeader {
        self.header(block)
    }

    fn bytes(
        &self,
        block: BlockId,
        read: &mut dyn FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        read(&self.store().read(block))
    }

    fn arena(&self) -> Option<&Arena> {
        Some(self.store().arena())
    }

    fn one_sided_begin(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
    ) -> Result<Option<OneSidedRead>, Gone> {
        Self::one_sided_begin(self, lease, generation, transfer).map(Some)
    }

    fn one_sided_end(&self, read: OneSidedRead) {
        Self::one_sided_end(self, read);
    }
}

/// A source that has its address and now serves.
pub struct Listening {
    /// For the card and for descriptors.
    pub address: String,
    /// Serves until the token is cancelled, then ends every connection. Its owner runs it and joins it.
    pub run: BoxFuture<'static, ()>,
}

impl Debug for Listening {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Listening")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// A way to move blocks.
///
/// Contract, checked for every implementation by the conformance suite:
/// - nothing is served without a claim by the transfer that asks, nor after the lease has ended;
/// - blocks come in order, each once in a fetch, from `first_block` to the last of the sealed manifest;
/// - a block that is not published yet is waited for; the wait ends with the lease, with the source, or with the token;
/// - `before` and `after` are read from the block around its bytes, so that reuse under the reader shows;
/// - dropping a fetch stops all writes into the sink at once; dropping a source ends its fetches with [`TransportError::Lost`].
pub trait Transport: Debug + Send + Sync {
    /// Word in cards and policies: `Local`, `Shm`, `Tcp`.
    fn kind(&self) -> &'static str;

    /// Whether an address of this kind can mean something here: `Local` reaches one process, `Shm` one host.
    fn reaches(&self, address: &str) -> bool {
        let _ = address;
        true
    }

    /// Takes an address to serve from. Nothing is served before the returned future runs.
    fn listen<'a>(
        &'a self,
        address: &'a str,
        source: Arc<dyn BlockSource>,
        stop: CancellationToken,
    ) -> BoxFuture<'a, io::Result<Listening>>;

    /// Reads a lease's blocks into the sink until the manifest is sealed and all of it has come.
    fn fetch<'a>(
        &'a self,
        request: &'a FetchRequest,
        sink: &'a mut dyn BlockSink,
    ) -> BoxFuture<'a, Result<End, TransportError>>;
}

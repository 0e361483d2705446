//! A lease: the right of one reader to read KV that another worker holds, for a while.
//!
//! The life of one lease is here, as a pure state machine: open (its manifest grows) → sealed, with at most one claim, until it
//! ends. `table` holds all leases of a worker and the tombstones of those that ended; `window` is the reader's side of time;
//! `one_sided` are reads that outlive their lease. Times are milliseconds of the owner's clock; on the wire there are only durations.

pub mod one_sided;
pub(crate) mod readers;
pub mod table;
pub mod window;

#[cfg(test)]
mod histories;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

use baton_protocol::header::BlockHeader;
use baton_protocol::ids::{Generation, Incarnation, LeaseId, RunId, TransferId, WorkerId};
use thiserror::Error;
use tokio::sync::watch;

use self::one_sided::Reads;
use super::store::BlockId;

/// Between two looks at leases of so many milliseconds, to extend or to reap them: a quarter of a lease, so that a look may come late by
/// half of one; a second where that is less, and 20 ms where it is more.
pub(crate) fn look_every(lease_milliseconds: u64) -> Duration {
    Duration::from_millis((lease_milliseconds / 4).clamp(20, 1000))
}

/// What opens a lease.
#[derive(Clone, Debug)]
pub struct LeaseOpen {
    /// 128 random bits, made by the caller.
    pub id: LeaseId,
    /// The run it is for; a cancelled run loses its leases.
    pub run: RunId,
    /// Milliseconds from each renewal to the end.
    pub duration: u64,
    /// Leading blocks that the reader has: they are held, not published.
    pub skip_blocks: u32,
}

/// A lease that was opened; goes into the descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseOpened {
    /// Of the lease: rises with every lease of this process.
    pub generation: Generation,
    /// Milliseconds until it ends unless it is claimed.
    pub expires_in: u64,
}

/// Who reads, or wants to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reader {
    /// Never reused.
    pub transfer: TransferId,
    /// The reading worker.
    pub worker: WorkerId,
    /// Start of its process.
    pub incarnation: Incarnation,
}

/// Why a lease (or a reading of it) is not there. The words are what goes over the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Error)]
pub enum Gone {
    /// Never heard of, or so long ago that its tombstone is gone.
    #[error("unknown")]
    Unknown,
    /// Not renewed in time.
    #[error("expired")]
    Expired,
    /// Its reader has finished.
    #[error("completed")]
    Completed,
    /// Released by the router.
    #[error("released")]
    Released,
    /// The run was cancelled or the prefill ended without sealing.
    #[error("cancelled")]
    Cancelled,
    /// The id is right, the generation is not.
    #[error("wrong-generation")]
    WrongGeneration,
    /// Another transfer has claimed it.
    #[error("claimed")]
    Claimed,
    /// Nobody has claimed it: reads are legal only after a claim.
    #[error("not-claimed")]
    NotClaimed,
    /// The block asked for lies before the first one published.
    #[error("out-of-range")]
    OutOfRange,
    /// The claim is a late message of a process that has been replaced.
    #[error("dead-reader")]
    DeadReader,
}

impl Gone {
    /// All reasons, in the order of their wire codes.
    pub const ALL: [Self; 10] = [
        Self::Unknown,
        Self::Expired,
        Self::Completed,
        Self::Released,
        Self::Cancelled,
        Self::WrongGeneration,
        Self::Claimed,
        Self::NotClaimed,
        Self::OutOfRange,
        Self::DeadReader,
    ];
}

/// Answer to a claim or a renewal: reading is allowed for this many milliseconds from when the owner answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Milliseconds. The reader counts from when it *asked*, and stops a guard band earlier.
    pub for_milliseconds: u64,
}

/// Answer to the report of a finished read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// The lease was alive until now.
    Accepted,
    /// It ended before the read did: what was read must be discarded.
    Stale,
}

/// One published block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManifestEntry {
    /// Where its bytes are.
    pub block: BlockId,
    /// What the reader will be promised.
    pub header: BlockHeader,
}

/// What a transport finds when it asks for the next block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It is there.
    Block {
        /// Where, and what is promised of it.
        entry: ManifestEntry,
        /// The end, as in [`Self::Sealed`], once it is known: the reader learns of the seal while blocks are still on their way.
        sealed: Option<u32>,
    },
    /// Not yet: wait for the lease to change.
    Wait,
    /// There is none after `end` (absolute index of the block after the last).
    Sealed {
        /// Skipped and published blocks together.
        end: u32,
    },
    /// The lease has ended, or this is not its reader.
    Gone(Gone),
}

impl Next {
    /// The end of the manifest, once it is known.
    pub fn sealed(&self) -> Option<u32> {
        match self {
            Self::Block { sealed, .. } => *sealed,
            Self::Sealed { end } => Some(*end),
            Self::Wait | Self::Gone(_) => None,
        }
    }
}

/// A block of a live lease has another header than its manifest promises. Nothing that keeps the rules makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a published block is not what its lease says")]
pub struct Unpromised;

/// A live lease.
pub(crate) struct Lease {
    pub(crate) id: LeaseId,
    pub(crate) run: RunId,
    pub(crate) generation: Generation,
    pub(crate) duration: u64,
    pub(crate) expires_at: u64,
    pub(crate) skip_blocks: u32,
    /// Every block of the chain from the first: skipped ones too, so that the cache never evicts a parent below a held child.
    pub(crate) held: Vec<BlockId>,
    pub(crate) manifest: Vec<ManifestEntry>,
    pub(crate) sealed: bool,
    pub(crate) claim: Option<Reader>,
    /// One-sided reads whose backend has not reported their end.
    pub(crate) reads: Reads,
    /// Counts changes; dropped with the lease, which wakes whoever waits.
    pub(crate) changed: watch::Sender<u64>,
}

impl fmt::Debug for Lease {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Lease")
            .field("id", &self.id)
            .field("run", &self.run)
            .field("generation", &self.generation)
            .field("expires_at", &self.expires_at)
            .field("published", &self.manifest.len())
            .field("sealed", &self.sealed)
            .field("claim", &self.claim)
            .finish_non_exhaustive()
    }
}

impl Lease {
    pub(crate) fn new(open: &LeaseOpen, generation: Generation, now: u64) -> Self {
        Self {
            id: open.id,
            run: open.run.clone(),
            generation,
            duration: open.duration,
            expires_at: now.saturating_add(open.duration),
            skip_blocks: open.skip_blocks,
            held: Vec::new(),
            manifest: Vec::new(),
            sealed: false,
            claim: None,
            reads: Reads::default(),
            changed: watch::Sender::new(0),
        }
    }

    pub(crate) fn expired(&self, now: u64) -> bool {
        now >= self.expires_at
    }

    /// Takes the next block of the chain; blocks after the skipped ones are published.
    pub(crate) fn publish(&mut self, block: BlockId, header: BlockHeader) {
        if self.held.len() >= self.skip_blocks as usize {
            self.manifest.push(ManifestEntry { block, header });
        }
        self.held.push(block);
        self.wake();
    }

    pub(crate) fn seal(&mut self) {
        self.sealed = true;
        self.wake();
    }

    pub(crate) fn wake(&self) {
        self.changed
            .send_modify(|changes| *changes = changes.wrapping_add(1));
    }

    fn renew(&mut self, now: u64) -> Granted {
        // Time between threads may be seen out of order by a millisecond: never shorten.
        self.expires_at = self.expires_at.max(now.saturating_add(self.duration));
        Granted {
            for_milliseconds: self.expires_at - now,
        }
    }

    /// Its owner still fills it: it runs its duration again, claimed or not. False once it is sealed, when nothing but its reader keeps
    /// it.
    pub(crate) fn extend(&mut self, now: u64) -> bool {
        if !self.sealed {
            self.renew(now);
        }
        !self.sealed
    }

    /// The one claimant. Asking again with the same transfer id is granted again.
    pub(crate) fn claim(
        &mut self,
        generation: Generation,
        reader: &Reader,
        now: u64,
    ) -> Result<Granted, Gone> {
        self.check_generation(generation)?;
        match &self.claim {
            Some(claim) if claim.transfer != reader.transfer => return Err(Gone::Claimed),
            _ => self.claim = Some(reader.clone()),
        }
        Ok(self.renew(now))
    }

    pub(crate) fn check_generation(&self, generation: Generation) -> Result<(), Gone> {
        if self.generation == generation {
            Ok(())
        } else {
            Err(Gone::WrongGeneration)
        }
    }

    pub(crate) fn check_reader(
        &self,
        generation: Generation,
        transfer: &TransferId,
    ) -> Result<(), Gone> {
        self.check_generation(generation)?;
        match &self.claim {
            None => Err(Gone::NotClaimed),
            Some(claim) if claim.transfer != *transfer => Err(Gone::Claimed),
            Some(_) => Ok(()),
        }
    }

    pub(crate) fn renew_by(
        &mut self,
        generation: Generation,
        transfer: &TransferId,
        now: u64,
    ) -> Result<Granted, Gone> {
        self.check_reader(generation, transfer)?;
        Ok(self.renew(now))
    }

    pub(crate) fn next(&self, index: u32) -> Next {
        let Some(position) = index.checked_sub(self.skip_blocks) else {
            return Next::Gone(Gone::OutOfRange);
        };
        let sealed = self
            .sealed
            .then(|| self.skip_blocks + self.manifest.len() as u32);
        if let Some(entry) = self.manifest.get(position as usize) {
            return Next::Block {
                entry: *entry,
                sealed,
            };
        }
        if let Some(end) = sealed {
            return Next::Sealed { end };
        }
        Next::Wait
    }
}

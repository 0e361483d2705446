//! The pure heart of the pool: blocks, reservations, leases, quarantine and cache events together, without locks or clock.
//!
//! Each operation lives in the file of its subject (`state/*.rs`); this one holds the parts and what they share.

mod completion;
mod counting;
mod leasing;
mod reserving;

#[cfg(test)]
mod histories;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use baton_protocol::hash::{BlockHash, BlockHasher, HashKey};
use baton_protocol::ids::{Generation, LeaseId, TransferId};

pub use self::completion::{CompleteError, Proof};
pub use self::counting::BlockCounts;
pub use self::leasing::Reaped;
pub use self::reserving::{PoolFull, Reserve};

use super::blocks::{Blocks, CacheScope, Holder};
use super::events::{CacheChange, EventLog};
use super::lease::Gone;
use super::lease::one_sided::{OneSidedRead, Reads};
use super::lease::table::{Ended, LeaseTable};
use super::store::{BlockId, Geometry};

/// What a pool must know to hash, label and size its blocks.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Size of a block.
    pub geometry: Geometry,
    /// Blocks in the pool.
    pub blocks: usize,
    /// KV identity of the worker: part of the root of every hash.
    pub kv_identity: String,
    /// First eight bytes of the layout's digest; stands in every header.
    pub layout: u64,
    /// Secret of the deployment.
    pub hash_key: HashKey,
    /// Hashes of cache events kept for watchers that resume.
    pub event_capacity: usize,
}

impl PoolConfig {
    /// Two snapshots of a 32 Ki-block pool: a watcher that is further behind does better with a snapshot.
    pub const EVENT_CAPACITY: usize = 65_536;
}

/// Number of a reservation in its pool; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ReservationId(pub(crate) u64);

/// What the pool remembers of a reservation.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) blocks: Vec<BlockId>,
    /// Leading blocks that are complete: hit or filled.
    pub(crate) completed: usize,
    /// Blocks from this one on were zeroed when they were taken: they may be handed over partly filled.
    pub(crate) clean_from: usize,
    /// The chain so far, so that the next block can be hashed.
    pub(crate) parent_hash: BlockHash,
    /// False from the first complete block on that the cache did not take: what follows it cannot be found either.
    pub(crate) findable: bool,
    pub(crate) scope: CacheScope,
    pub(crate) hasher: BlockHasher,
    pub(crate) lease: Option<LeaseId>,
    pub(crate) sealed: bool,
}

/// Blocks that a peer may still touch though their lease has ended.
#[derive(Debug)]
pub(crate) struct Quarantined {
    pub(crate) blocks: Vec<BlockId>,
    /// One-sided reads that are not over.
    pub(crate) reads: Reads,
}

/// The pool's state.
#[derive(Debug)]
pub(crate) struct PoolState {
    pub(crate) config: PoolConfig,
    pub(crate) blocks: Blocks,
    pub(crate) reservations: HashMap<ReservationId, Held>,
    pub(crate) leases: LeaseTable,
    pub(crate) quarantine: HashMap<LeaseId, Quarantined>,
    pub(crate) events: EventLog,
    next_reservation: u64,
}

impl PoolState {
    pub(crate) fn new(config: PoolConfig) -> Self {
        Self {
            blocks: Blocks::new(config.blocks),
            reservations: HashMap::new(),
            leases: LeaseTable::default(),
            quarantine: HashMap::new(),
            events: EventLog::new(config.event_capacity),
            next_reservation: 0,
            config,
        }
    }

    pub(crate) fn hasher(&self, scope: &CacheScope) -> BlockHasher {
        BlockHasher::new(&self.config.hash_key, &self.config.kv_identity, &scope.salt)
    }

    pub(crate) fn clear_cache(&mut self) {
        self.blocks.clear();
        for held in self.reservations.values_mut() {
            // Their parents can no longer be found, so what they fill next cannot either.
            held.findable = held.completed == 0;
        }
        self.events.push(CacheChange::Cleared);
    }

    /// Gives the blocks of an ended lease back, or puts them into quarantine while a peer may still read them. Returns how many
    /// references it dropped.
    pub(crate) fn settle(&mut self, mut ended: Ended) -> usize {
        ended.reads.forget_those_over();
        if !ended.reads.is_empty() {
            self.quarantine.insert(
                ended.lease,
                Quarantined {
                    blocks: ended.held,
                    reads: ended.reads,
                },
            );
            return 0;
        }
        self.drop_transfer(&ended.held)
    }

    pub(crate) fn drop_transfer(&mut self, blocks: &[BlockId]) -> usize {
        for block in blocks.iter().rev() {
            self.blocks.drop_reference(*block, Holder::Transfer);
        }
        blocks.len()
    }

    /// A one-sided read of a lease begins: until it is over the blocks are not reused, whatever the lease does.
    pub(crate) fn one_sided_begin(
        &mut self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        now: u64,
    ) -> Result<OneSidedRead, Gone> {
        let readable = self.leases.readable(lease, generation, transfer, now)?;
        Ok(readable.reads.begin(lease))
    }

    /// The backend reported a terminal state of a one-sided read, or its connection is torn down. Returns how many references
    /// that freed.
    pub(crate) fn one_sided_end(&mut self, read: OneSidedRead) -> usize {
        let lease = read.lease();
        drop(read);
        if let Some(live) = self.leases.live_mut(lease) {
            live.reads.forget_those_over();
            return 0;
        }
        self.leave_quarantine(lease)
    }

    /// Frees a quarantine if every read is over. Returns how many references it dropped.
    fn leave_quarantine(&mut self, lease: LeaseId) -> usize {
        let Some(quarantined) = self.quarantine.get_mut(&lease) else {
            return 0;
        };
        quarantined.reads.forget_those_over();
        if !quarantined.reads.is_empty() {
            return 0;
        }
        let released = self.quarantine.remove(&lease);
        released.map_or(0, |quarantined| self.drop_transfer(&quarantined.blocks))
    }

    /// Frees every quarantine whose reads are over though nobody said so. Looks at all of them. Returns how many references it
    /// dropped.
    pub(crate) fn reap_quarantine(&mut self) -> usize {
        let leases: Vec<_> = self.quarantine.keys().copied().collect();
        leases
            .into_iter()
            .map(|lease| self.leave_quarantine(lease))
            .sum()
    }
}

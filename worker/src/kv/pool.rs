//! The KV pool that compute thread, gRPC tasks and transports share: the pure state behind one lock, the arena beside it.
//!
//! The lock is held for bookkeeping only; bytes are checksummed before it is taken. Blocks of a reservation are written by its
//! holder without the lock: nobody else has them.

#[cfg(test)]
mod orders;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use baton_protocol::hash::BlockHash;
use baton_protocol::header::BlockHeader;
use baton_protocol::ids::{Generation, LeaseId, RunId, TransferId};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::blocks::CacheScope;
use super::clock::Clock;
use super::events::EventsSince;
use super::lease::one_sided::OneSidedRead;
use super::lease::table::{LeaseCounters, LeaseCounts, LeaseError};
use super::lease::{
    Completion, Gone, Granted, LeaseOpen, LeaseOpened, ManifestEntry, Next, Reader, Unpromised,
};
use super::reservation::Reservation;
use super::state::{
    BlockCounts, CompleteError, PoolConfig, PoolFull, PoolState, Proof, Reaped, ReservationId,
    Reserve,
};
use super::store::{BlockId, BlockStore, StoreError};
use super::sync::take;
use crate::transport::checksum::checksum;

struct Shared {
    store: Arc<BlockStore>,
    clock: Arc<dyn Clock>,
    state: Mutex<PoolState>,
    last_event: watch::Sender<u64>,
    layout: u64,
}

/// The pool. Cloning shares it.
#[derive(Clone)]
pub struct KvPool(Arc<Shared>);

impl fmt::Debug for KvPool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("KvPool")
            .field("store", &self.0.store)
            .finish_non_exhaustive()
    }
}

impl KvPool {
    /// Allocates the arena and an empty pool over it. `available_memory` in bytes, as for [`BlockStore::new`].
    pub fn new(
        config: PoolConfig,
        available_memory: u64,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StoreError> {
        let store = BlockStore::new(config.geometry, config.blocks, available_memory)?;
        Ok(Self(Arc::new(Shared {
            store: Arc::new(store),
            clock,
            layout: config.layout,
            state: Mutex::new(PoolState::new(config)),
            last_event: watch::Sender::new(0),
        })))
    }

    /// The arena.
    pub fn store(&self) -> &Arc<BlockStore> {
        &self.0.store
    }

    /// First eight bytes of the digest of this pool's layout.
    pub fn layout(&self) -> u64 {
        self.0.layout
    }

    /// Milliseconds of the pool's clock.
    pub fn now(&self) -> u64 {
        self.0.clock.now()
    }

    /// One operation under the lock; tells watchers when the cache changed.
    fn with<T>(&self, operation: impl FnOnce(&mut PoolState, u64) -> T) -> T {
        let now = self.now();
        let (result, last) = {
            let mut state = take(|| self.0.state.lock(), || self.0.state.try_lock());
            let result = operation(&mut state, now);
            (result, state.events.last())
        };
        self.0.last_event.send_if_modified(|seen| {
            let newer = last > *seen;
            *seen = last.max(*seen);
            newer
        });
        result
    }

    // ---- Requests ---------------------------------------------------------------------------------------------------

    /// Reserves blocks for all tokens and the room asked for, hitting the cache where it can. All or nothing.
    pub fn reserve(&self, reserve: &Reserve<'_>) -> Result<Reservation, PoolFull> {
        self.reserve_beside(reserve, 0)
    }

    /// As [`Self::reserve`], if `spare` blocks could still be had afterwards: judged and taken under one lock.
    pub fn reserve_beside(
        &self,
        reserve: &Reserve<'_>,
        spare: usize,
    ) -> Result<Reservation, PoolFull> {
        let reserved = self.with(|state, _| state.reserve(reserve, spare))?;
        // Those that tokens may leave partly filled. The others are written whole before anybody can read them.
        self.clear(reserved.blocks.get(reserved.clean_from..));
        Ok(Reservation {
            id: reserved.id,
            pool: self.clone(),
            blocks: reserved.blocks,
            cached_blocks: reserved.cached_blocks,
            completed: reserved.cached_blocks,
            lease: None,
        })
    }

    /// Makes the reservation hold at least `tokens` tokens in all. On [`PoolFull`] it is as before.
    pub fn grow(&self, reservation: &mut Reservation, tokens: usize) -> Result<(), PoolFull> {
        let new = self.with(|state, _| state.grow(reservation.id, tokens))?;
        self.clear(Some(&new));
        reservation.blocks.extend(new);
        Ok(())
    }

    /// Zeroes blocks that were just taken: what an earlier owner left behind the rows that will be filled must not be handed over
    /// with them. The whole block, since where a token's rows lie in it is the layout's affair.
    fn clear(&self, blocks: Option<&[BlockId]>) {
        for block in blocks.unwrap_or_default() {
            self.0.store.write(*block).fill(0);
        }
    }

    /// Block `index` is filled with the KV of `tokens`: checksums its bytes, writes its header, makes it findable, publishes it to
    /// the reservation's lease and to watchers. Blocks are completed in order. The reservation's block table may change: when the
    /// cache had this content already, the other block takes the place and this one is freed.
    pub fn complete_block(
        &self,
        reservation: &mut Reservation,
        index: usize,
        tokens: &[u32],
    ) -> Result<(), CompleteError> {
        let sum = match reservation.blocks.get(index) {
            Some(block) => checksum(&self.0.store.read(*block)),
            None => 0,
        };
        self.complete_received(reservation, index, tokens, Proof::Checked(sum))
    }

    /// As [`Self::complete_block`], with the checksum that came with the block: what was computed elsewhere keeps its proof. A
    /// block whose bytes were not compared with it stays with this reservation and is never offered to another request.
    pub fn complete_received(
        &self,
        reservation: &mut Reservation,
        index: usize,
        tokens: &[u32],
        proof: Proof,
    ) -> Result<(), CompleteError> {
        let kept = self.with(|state, _| {
            let kept = state.complete(reservation.id, index, tokens, proof)?;
            // Under the lock: a reader that hears of the block finds its header beside it.
            self.0.store.publish(kept, &state.blocks.header(kept));
            Ok::<_, CompleteError>(kept)
        })?;
        reservation.blocks[index] = kept;
        reservation.completed += 1;
        Ok(())
    }

    /// Gives the blocks back. Cached contents stay findable; a lease that is sealed keeps what it holds, one that is not is
    /// cancelled.
    pub fn release(&self, reservation: Reservation) {
        drop(reservation);
    }

    pub(super) fn release_by_id(&self, id: ReservationId) {
        self.with(|state, now| state.release(id, now));
    }

    /// Hashes that the next full blocks must have, from the first incomplete one on, when the reservation holds `tokens`.
    pub fn expected_hashes(&self, reservation: &Reservation, tokens: &[u32]) -> Vec<BlockHash> {
        self.with(|state, _| state.expected_hashes(reservation.id, tokens))
    }

    /// How many leading tokens of `tokens` are in the cache, without reserving them. A hint: it may change at once.
    pub fn cached_tokens(&self, tokens: &[u32], scope: &CacheScope) -> usize {
        self.with(|state, _| state.cached_tokens(tokens, scope))
    }

    /// Forgets all cached contents.
    pub fn clear_cache(&self) {
        self.with(|state, _| state.clear_cache());
    }

    // ---- Leases, source side ----------------------------------------------------------------------------------------

    /// Opens a lease that `reservation` fills: what is complete is published at once, the rest as it completes.
    pub fn open_lease(
        &self,
        reservation: &mut Reservation,
        open: &LeaseOpen,
    ) -> Result<LeaseOpened, LeaseError> {
        let opened = self.with(|state, now| state.open_lease(reservation.id, open, now))?;
        reservation.lease = Some(open.id);
        Ok(opened)
    }

    /// What fills the lease goes on, though nobody may read it yet: it runs its duration again. For owners whose readers come only after
    /// the seal. False where there is none, where it is sealed, and where it has ended.
    pub fn extend_lease(&self, reservation: &Reservation) -> bool {
        self.with(|state, now| state.extend_lease(reservation.id, now))
    }

    /// The KV of all `tokens` tokens is there: publishes the partly filled last block, if any, and ends the manifest. Returns
    /// the blocks in it. The reservation may be released afterwards. What lies behind the last token is zero, as long as nobody
    /// wrote there after the block was taken: engines in other processes give whole blocks.
    pub fn seal(&self, reservation: &Reservation, tokens: usize) -> Result<u32, LeaseError> {
        let partial = self.with(|state, _| state.partial_block(reservation.id, tokens));
        let sum = partial.map_or(0, |block| checksum(&self.0.store.read(block)));
        self.with(|state, now| {
            let blocks = state.seal(reservation.id, tokens, sum, now)?;
            if let Some(block) = partial {
                self.0.store.publish(block, &state.blocks.header(block));
            }
            Ok(blocks)
        })
    }

    /// Takes a lease for one reader.
    pub fn claim(
        &self,
        lease: LeaseId,
        generation: Generation,
        reader: &Reader,
    ) -> Result<Granted, Gone> {
        self.with(|state, now| state.leases.claim(lease, generation, reader, now))
    }

    /// Whether the lease lives and a reader has claimed it.
    pub fn is_claimed(&self, lease: LeaseId) -> bool {
        self.with(|state, now| state.leases.is_claimed(lease, now))
    }

    /// Extends a claimed lease by its duration.
    pub fn renew(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
    ) -> Result<Granted, Gone> {
        self.with(|state, now| state.leases.renew(lease, generation, transfer, now))
    }

    /// The reader is done. Ends the lease, verified or not.
    pub fn complete_read(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        verified: bool,
    ) -> Completion {
        self.with(|state, now| state.complete_read(lease, generation, transfer, verified, now))
    }

    /// Ends a lease of this run. False when there is none, or it is another run's.
    pub fn release_lease(&self, lease: LeaseId, run: &RunId) -> bool {
        self.with(|state, now| state.release_lease(lease, run, now))
    }

    /// Ends all leases of a run; returns how many.
    pub fn cancel_run(&self, run: &RunId) -> usize {
        self.with(|state, now| state.cancel_run(run, now))
    }

    /// Frees what expired leases hold, and what was quarantined for reads that are over. Call it several times per lease duration.
    pub fn reap(&self) -> Reaped {
        self.with(|state, now| state.reap(now))
    }

    /// What its reader finds at `index`.
    pub fn next_block(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        index: u32,
    ) -> Next {
        self.with(|state, now| state.leases.next(lease, generation, transfer, index, now))
    }

    /// As [`Self::next_block`] for the blocks of `wanted` that are there, under one lock: in order into `found`, each with its
    /// header beside it as promised. The answer is what comes after them.
    ///
    /// # Errors
    /// [`Unpromised`]: the pool contradicts itself.
    pub fn next_blocks(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        wanted: Range<u32>,
        found: &mut Vec<ManifestEntry>,
    ) -> Result<Next, Unpromised> {
        self.with(|state, now| state.next_blocks(lease, generation, transfer, wanted, found, now))
    }

    /// Wakes its reader at every change of the lease; closed when the lease ends.
    pub fn watch_lease(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
    ) -> Result<watch::Receiver<u64>, Gone> {
        self.with(|state, now| state.leases.subscribe(lease, generation, transfer, now))
    }

    /// A one-sided read begins: the blocks are not reused before its end is known, even when the lease ends. Hold what is
    /// returned until the backend reports a terminal state or the connection is torn down, never shorter.
    pub fn one_sided_begin(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
    ) -> Result<OneSidedRead, Gone> {
        self.with(|state, now| state.one_sided_begin(lease, generation, transfer, now))
    }

    /// The backend reported the end of a one-sided read, or its connection was torn down. Frees at once what waits for it; a read
    /// that is dropped without this is found by the reaper.
    pub fn one_sided_end(&self, read: OneSidedRead) {
        self.with(|state, _| state.one_sided_end(read));
    }

    /// What lies beside a block now.
    pub fn header(&self, block: BlockId) -> BlockHeader {
        self.with(|state, _| state.blocks.header(block))
    }

    // ---- Watching and counting --------------------------------------------------------------------------------------

    /// Cache events after `sequence`.
    pub fn events_since(&self, sequence: u64) -> EventsSince {
        self.with(|state, _| state.events.since(sequence))
    }

    /// Everything that can be hit, parents before children, and the sequence of the last event it contains.
    pub fn snapshot(&self) -> (u64, Vec<BlockHash>) {
        self.with(|state, _| (state.events.see(), state.blocks.hashes()))
    }

    /// Sequence of the newest cache event; changes when there is a newer one.
    pub fn watch_events(&self) -> watch::Receiver<u64> {
        self.0.last_event.subscribe()
    }

    /// Blocks by owner, by a full scan: for reports, not for each step.
    pub fn counts(&self) -> BlockCounts {
        self.with(|state, _| state.counts())
    }

    /// Blocks that a request could get now.
    pub fn available_blocks(&self) -> usize {
        self.with(|state, _| state.blocks.available())
    }

    /// Live leases by state.
    pub fn lease_counts(&self) -> LeaseCounts {
        self.with(|state, _| state.leases.counts())
    }

    /// What happened to leases since the process started.
    pub fn lease_counters(&self) -> LeaseCounters {
        self.with(|state, _| state.leases.counters)
    }
}

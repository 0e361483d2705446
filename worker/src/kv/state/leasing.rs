//! Leases over the pool's blocks: opening, publishing, sealing, ending, reaping.

use std::ops::Range;

use baton_protocol::hash::BlockHash;
use baton_protocol::header::BlockHeader;
use baton_protocol::ids::{Generation, LeaseId, RunId, TransferId};

use super::{PoolState, ReservationId};
use crate::kv::blocks::Holder;
use crate::kv::lease::table::LeaseError;
use crate::kv::lease::{Completion, Gone, LeaseOpen, LeaseOpened, ManifestEntry, Next, Unpromised};
use crate::kv::store::BlockId;

/// What the reaper found in one scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reaped {
    /// Leases that had expired.
    pub leases: usize,
    /// Blocks whose references it dropped.
    pub blocks: usize,
    /// Those of them that were quarantined for a read that is over.
    pub quarantined: usize,
}

impl PoolState {
    /// Opens a lease on what the reservation has and will have. Complete blocks are published at once.
    pub(crate) fn open_lease(
        &mut self,
        id: ReservationId,
        open: &LeaseOpen,
        now: u64,
    ) -> Result<LeaseOpened, LeaseError> {
        let Some(held) = self.reservations.get_mut(&id) else {
            return Err(LeaseError::NotSealable);
        };
        if held.lease.is_some() {
            return Err(LeaseError::AlreadyLeased);
        }
        let opened = self.leases.open(open, now)?;
        held.lease = Some(open.id);
        let complete = held.blocks[..held.completed].to_vec();
        for block in complete {
            self.publish(open.id, block);
        }
        Ok(opened)
    }

    /// The reservation's lease runs its duration again, as long as the reservation fills it. False where there is none that does.
    pub(crate) fn extend_lease(&mut self, id: ReservationId, now: u64) -> bool {
        let lease = self.reservations.get(&id).and_then(|held| held.lease);
        lease.is_some_and(|lease| self.leases.extend(lease, now))
    }

    /// Adds a complete block to a lease's manifest and holds it. A lease that has ended meanwhile is nobody's loss.
    pub(super) fn publish(&mut self, lease: LeaseId, block: BlockId) {
        let header = self.blocks.header(block);
        if let Some(lease) = self.leases.live_mut(lease) {
            self.blocks.hold(block, Holder::Transfer);
            lease.publish(block, header);
        }
    }

    /// What the reader of a lease finds from `wanted.start` on, up to the end of `wanted`, and what comes after that.
    pub(crate) fn next_blocks(
        &mut self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        wanted: Range<u32>,
        found: &mut Vec<ManifestEntry>,
        now: u64,
    ) -> Result<Next, Unpromised> {
        let lease = match self.leases.readable(lease, generation, transfer, now) {
            Ok(lease) => lease,
            Err(gone) => return Ok(Next::Gone(gone)),
        };
        for index in wanted.clone() {
            let Next::Block { entry, .. } = lease.next(index) else {
                return Ok(lease.next(index));
            };
            if self.blocks.header(entry.block) != entry.header {
                return Err(Unpromised);
            }
            found.push(entry);
        }
        Ok(lease.next(wanted.end))
    }

    /// Index and block of the partly filled last block, when `tokens` tokens leave one: its checksum is needed to seal.
    pub(crate) fn partial_block(&self, id: ReservationId, tokens: usize) -> Option<BlockId> {
        let block_size = self.config.geometry.block_size;
        let held = self.reservations.get(&id)?;
        (!tokens.is_multiple_of(block_size))
            .then(|| held.blocks.get(tokens / block_size).copied())
            .flatten()
    }

    /// The KV of `tokens` tokens is there: publishes the partly filled last block, if there is one, and ends the manifest.
    pub(crate) fn seal(
        &mut self,
        id: ReservationId,
        tokens: usize,
        partial_checksum: u64,
        now: u64,
    ) -> Result<u32, LeaseError> {
        let block_size = self.config.geometry.block_size;
        let partial = self.partial_block(id, tokens);
        let Some(held) = self.reservations.get_mut(&id) else {
            return Err(LeaseError::NotSealable);
        };
        let Some(lease) = held.lease else {
            return Err(LeaseError::NotSealable);
        };
        let complete = held.completed == tokens / block_size;
        // A block that was not zeroed when it was taken would carry what an earlier owner left behind its last token.
        let clean = tokens / block_size >= held.clean_from;
        let has_partial = tokens.is_multiple_of(block_size) || (partial.is_some() && clean);
        if held.sealed || !complete || !has_partial {
            return Err(LeaseError::NotSealable);
        }
        // Sealed even if the lease has ended: it must not be cancelled a second time at release.
        held.sealed = true;
        self.leases.alive(lease, now)?;
        if let Some(block) = partial {
            self.blocks.set_header(
                block,
                BlockHeader {
                    hash: BlockHash(0),
                    generation: self.blocks.generation(block),
                    layout: self.config.layout,
                    checksum: partial_checksum,
                    fill: (tokens % block_size) as u32,
                },
            );
            self.publish(lease, block);
        }
        let lease = self.leases.alive(lease, now)?;
        lease.seal();
        Ok(lease.manifest.len() as u32)
    }

    pub(crate) fn complete_read(
        &mut self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        verified: bool,
        now: u64,
    ) -> Completion {
        let (completion, ended) = self
            .leases
            .complete(lease, generation, transfer, verified, now);
        if let Some(ended) = ended {
            self.settle(ended);
        }
        completion
    }

    pub(crate) fn end_lease(&mut self, lease: LeaseId, reason: Gone, now: u64) -> bool {
        let ended = self.leases.end(lease, reason, None, now);
        ended.map(|ended| self.settle(ended)).is_some()
    }

    /// Ends one lease of a run. Another run's lease is left alone.
    pub(crate) fn release_lease(&mut self, lease: LeaseId, run: &RunId, now: u64) -> bool {
        self.leases.belongs(lease, run) && self.end_lease(lease, Gone::Released, now)
    }

    /// Ends all leases of a run. Returns how many there were.
    pub(crate) fn cancel_run(&mut self, run: &RunId, now: u64) -> usize {
        let leases = self.leases.of_run(run);
        leases
            .iter()
            .filter(|lease| self.end_lease(**lease, Gone::Cancelled, now))
            .count()
    }

    /// Frees what expired leases hold, and what was quarantined for reads that are over. Scans all of both.
    pub(crate) fn reap(&mut self, now: u64) -> Reaped {
        let expired = self.leases.expire(now);
        let quarantined = self.reap_quarantine();
        let mut reaped = Reaped {
            leases: expired.len(),
            blocks: quarantined,
            quarantined,
        };
        for ended in expired {
            reaped.blocks += self.settle(ended);
        }
        self.leases.counters.orphan_blocks_reaped += reaped.blocks as u64;
        self.leases.counters.quarantined_blocks_reaped += quarantined as u64;
        reaped
    }
}

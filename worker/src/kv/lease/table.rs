//! All leases of a worker and the tombstones of those that ended. Pure: the caller brings the time and drops the references.

use std::collections::HashMap;

use baton_protocol::ids::{Generation, LeaseId, RunId, TransferId};
use thiserror::Error;
use tokio::sync::watch;

use super::one_sided::Reads;
use super::readers::{Readers, Sighting};
use super::{Completion, Gone, Granted, Lease, LeaseOpen, LeaseOpened, Next, Reader};
use crate::kv::store::BlockId;

/// Why a lease was not opened or not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LeaseError {
    /// Ids are never used twice.
    #[error("lease: the id was used before: make a new random one")]
    Reused,
    /// A lease that ends at once.
    #[error("lease: duration is 0 milliseconds: ask for a positive one")]
    NoDuration,
    /// The reservation has a lease.
    #[error("lease: the reservation has a lease already: release it before opening another")]
    AlreadyLeased,
    /// Sealing before all full blocks are complete, or twice.
    #[error(
        "lease: sealed before its blocks were complete, or twice: complete every full block, then seal once"
    )]
    NotSealable,
    /// It ended meanwhile.
    #[error("lease: it has ended ({0}): nobody will read it")]
    Ended(#[from] Gone),
}

/// Counts of what happened to leases since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseCounters {
    /// Opened.
    pub opened: u64,
    /// Ended because nobody renewed.
    pub expired: u64,
    /// Ended by their reader.
    pub completed: u64,
    /// Ended by the router, or with their run.
    pub released: u64,
    /// Reports of a read that came after the end.
    pub stale: u64,
    /// Claims whose reader's process is gone.
    pub dead_claims: u64,
    /// Reads that their reader could not verify.
    pub unverified: u64,
    /// Blocks that nobody but the reaper would have freed.
    pub orphan_blocks_reaped: u64,
    /// Those of them that were quarantined for a read of which nobody reported the end.
    pub quarantined_blocks_reaped: u64,
}

/// How many leases are in which state now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseCounts {
    /// Being filled, unclaimed.
    pub open: u32,
    /// Complete, unclaimed.
    pub sealed: u32,
    /// Claimed by a reader.
    pub claimed: u32,
}

impl LeaseCounts {
    /// All live leases.
    pub fn total(self) -> u32 {
        self.open + self.sealed + self.claimed
    }
}

#[derive(Clone, Debug)]
struct Tombstone {
    reason: Gone,
    // Of the reader that completed it: its repeated report is answered as the first.
    transfer: Option<TransferId>,
    until: u64,
}

/// A lease that has just ended. Its holder must drop one transfer reference of each block, or quarantine them.
#[derive(Debug)]
#[must_use]
pub(crate) struct Ended {
    pub(crate) lease: LeaseId,
    pub(crate) held: Vec<BlockId>,
    /// One-sided reads may still touch the blocks: quarantine them.
    pub(crate) reads: Reads,
}

/// The table.
#[derive(Debug, Default)]
pub(crate) struct LeaseTable {
    live: HashMap<LeaseId, Lease>,
    tombstones: HashMap<LeaseId, Tombstone>,
    last_generation: u64,
    readers: Readers,
    pub(crate) counters: LeaseCounters,
}

impl LeaseTable {
    pub(crate) fn open(&mut self, open: &LeaseOpen, now: u64) -> Result<LeaseOpened, LeaseError> {
        if open.duration == 0 {
            return Err(LeaseError::NoDuration);
        }
        if self.live.contains_key(&open.id) || self.tombstones.contains_key(&open.id) {
            return Err(LeaseError::Reused);
        }
        self.last_generation += 1;
        let generation = Generation(self.last_generation);
        self.live.insert(open.id, Lease::new(open, generation, now));
        self.counters.opened += 1;
        Ok(LeaseOpened {
            generation,
            expires_in: open.duration,
        })
    }

    /// The lease, if it lives at `now`. An expired one that the reaper has not met yet is as gone as any.
    pub(crate) fn alive(&mut self, id: LeaseId, now: u64) -> Result<&mut Lease, Gone> {
        match self.live.get_mut(&id) {
            Some(lease) if lease.expired(now) => Err(Gone::Expired),
            Some(lease) => Ok(lease),
            None => Err(self
                .tombstones
                .get(&id)
                .map_or(Gone::Unknown, |tombstone| tombstone.reason)),
        }
    }

    /// As [`Self::alive`], for the reader that has claimed it.
    pub(crate) fn readable(
        &mut self,
        id: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        now: u64,
    ) -> Result<&mut Lease, Gone> {
        let lease = self.alive(id, now)?;
        lease.check_reader(generation, transfer)?;
        Ok(lease)
    }

    /// The lease, expired or not, until the reaper ends it.
    pub(crate) fn live_mut(&mut self, id: LeaseId) -> Option<&mut Lease> {
        self.live.get_mut(&id)
    }

    /// The first claim of a restarted reader proves its former process dead: that one's claims are dropped everywhere. Only a claim
    /// that names a living lease and its generation proves anything: whoever cannot name them says nothing of any process.
    pub(crate) fn claim(
        &mut self,
        id: LeaseId,
        generation: Generation,
        reader: &Reader,
        now: u64,
    ) -> Result<Granted, Gone> {
        let lease = self.alive(id, now)?;
        lease.check_generation(generation)?;
        let remembered = lease.duration.saturating_mul(2);
        match self
            .readers
            .sight(&reader.worker, reader.incarnation, now, remembered)
        {
            Sighting::Current => {}
            Sighting::Restarted => self.drop_dead_claims(reader),
            Sighting::Dead => return Err(Gone::DeadReader),
        }
        self.alive(id, now)?.claim(generation, reader, now)
    }

    /// Drops claims that other processes of the same worker made. Their leases live on until they expire.
    fn drop_dead_claims(&mut self, reader: &Reader) {
        for lease in self.live.values_mut() {
            let dead = lease.claim.as_ref().is_some_and(|claim| {
                claim.worker == reader.worker && claim.incarnation != reader.incarnation
            });
            if dead {
                lease.claim = None;
                lease.wake();
                self.counters.dead_claims += 1;
            }
        }
    }

    pub(crate) fn is_claimed(&mut self, id: LeaseId, now: u64) -> bool {
        self.alive(id, now).is_ok_and(|lease| lease.claim.is_some())
    }

    pub(crate) fn renew(
        &mut self,
        id: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        now: u64,
    ) -> Result<Granted, Gone> {
        self.alive(id, now)?.renew_by(generation, transfer, now)
    }

    /// The owner is still filling it. False where it is sealed or has ended: an end is never taken back.
    pub(crate) fn extend(&mut self, id: LeaseId, now: u64) -> bool {
        self.alive(id, now).is_ok_and(|lease| lease.extend(now))
    }

    /// The reader has finished, successfully or not: either way it will not read again.
    pub(crate) fn complete(
        &mut self,
        id: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        verified: bool,
        now: u64,
    ) -> (Completion, Option<Ended>) {
        if self.readable(id, generation, transfer, now).is_ok() {
            if !verified {
                self.counters.unverified += 1;
            }
            self.counters.completed += 1;
            let ended = self.end(id, Gone::Completed, Some(transfer.clone()), now);
            return (Completion::Accepted, ended);
        }
        let repeated = self.tombstones.get(&id).is_some_and(|tombstone| {
            tombstone.reason == Gone::Completed && tombstone.transfer.as_ref() == Some(transfer)
        });
        if repeated {
            return (Completion::Accepted, None);
        }
        self.counters.stale += 1;
        (Completion::Stale, None)
    }

    /// Ends a lease for a reason. A lease that is not there is no error.
    pub(crate) fn end(
        &mut self,
        id: LeaseId,
        reason: Gone,
        transfer: Option<TransferId>,
        now: u64,
    ) -> Option<Ended> {
        let lease = self.live.remove(&id)?;
        match reason {
            Gone::Expired => self.counters.expired += 1,
            Gone::Released | Gone::Cancelled => self.counters.released += 1,
            _ => {}
        }
        self.tombstones.insert(
            id,
            Tombstone {
                reason,
                transfer,
                until: now.saturating_add(lease.duration.saturating_mul(2)),
            },
        );
        Some(Ended {
            lease: id,
            held: lease.held,
            reads: lease.reads,
        })
    }

    /// Leases of a run.
    pub(crate) fn of_run(&self, run: &RunId) -> Vec<LeaseId> {
        self.live
            .values()
            .filter(|lease| lease.run == *run)
            .map(|lease| lease.id)
            .collect()
    }

    pub(crate) fn belongs(&self, id: LeaseId, run: &RunId) -> bool {
        self.live.get(&id).is_some_and(|lease| lease.run == *run)
    }

    /// Ends every expired lease and forgets old tombstones. Looks at all of them: renewals change the order, so a scan that
    /// stops at the first live one would miss some.
    pub(crate) fn expire(&mut self, now: u64) -> Vec<Ended> {
        let expired: Vec<_> = self
            .live
            .values()
            .filter(|lease| lease.expired(now))
            .map(|lease| lease.id)
            .collect();
        self.tombstones.retain(|_, tombstone| tombstone.until > now);
        expired
            .into_iter()
            .filter_map(|id| self.end(id, Gone::Expired, None, now))
            .collect()
    }

    pub(crate) fn next(
        &mut self,
        id: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        index: u32,
        now: u64,
    ) -> Next {
        match self.readable(id, generation, transfer, now) {
            Ok(lease) => lease.next(index),
            Err(gone) => Next::Gone(gone),
        }
    }

    /// Wakes when the lease changes; its channel closes when the lease ends.
    pub(crate) fn subscribe(
        &mut self,
        id: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        now: u64,
    ) -> Result<watch::Receiver<u64>, Gone> {
        let lease = self.readable(id, generation, transfer, now)?;
        Ok(lease.changed.subscribe())
    }

    pub(crate) fn counts(&self) -> LeaseCounts {
        let mut counts = LeaseCounts::default();
        for lease in self.live.values() {
            match (&lease.claim, lease.sealed) {
                (Some(_), _) => counts.claimed += 1,
                (None, true) => counts.sealed += 1,
                (None, false) => counts.open += 1,
            }
        }
        counts
    }

    /// Blocks held by leases, with repetitions.
    pub(crate) fn held(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.live
            .values()
            .flat_map(|lease| lease.held.iter().copied())
    }

    #[cfg(test)]
    pub(crate) fn live(&self) -> impl Iterator<Item = &Lease> + '_ {
        self.live.values()
    }

    #[cfg(test)]
    pub(crate) fn tombstones(&self) -> usize {
        self.tombstones.len()
    }
}

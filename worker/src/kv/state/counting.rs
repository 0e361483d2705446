//! Counting blocks by who owns them, by a full scan that trusts no counter.

use super::PoolState;
use crate::kv::store::BlockId;

/// Blocks by state. Each block is counted once, in the first of these that it is in: quarantined, active, leased, cached, free,
/// leaked; so the parts add up to the total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// All blocks.
    pub total: u32,
    /// Without contents and owner.
    pub free: u32,
    /// Kept for their contents, referenced by nobody, evictable.
    pub cached: u32,
    /// Referenced by a request.
    pub active: u32,
    /// Referenced by a lease and by no request.
    pub leased: u32,
    /// Their lease has ended but a one-sided read may still touch them.
    pub quarantined: u32,
    /// Owned by nobody and not free. Anything but zero is a bug.
    pub leaked: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Nobody,
    Free,
    Cached,
    Lease,
    Request,
    Quarantine,
}

impl PoolState {
    /// Walks every owner's own list and every block. Time grows with the pool: for load reports, not for each step.
    pub(crate) fn counts(&self) -> BlockCounts {
        let mut owners = vec![Owner::Nobody; self.blocks.total()];
        let mut own = |block: BlockId, owner: Owner| {
            let slot = &mut owners[block.index()];
            *slot = (*slot).max(owner);
        };
        for block in self.blocks.free() {
            own(block, Owner::Free);
        }
        for index in 0..self.blocks.total() {
            let block = BlockId(index as u32);
            if self.blocks.is_cached(block) {
                own(block, Owner::Cached);
            }
        }
        for block in self.leases.held() {
            own(block, Owner::Lease);
        }
        for held in self.reservations.values() {
            for block in &held.blocks {
                own(*block, Owner::Request);
            }
        }
        for quarantined in self.quarantine.values() {
            for block in &quarantined.blocks {
                own(*block, Owner::Quarantine);
            }
        }
        let count = |owner| owners.iter().filter(|found| **found == owner).count() as u32;
        BlockCounts {
            total: owners.len() as u32,
            free: count(Owner::Free),
            cached: count(Owner::Cached),
            active: count(Owner::Request),
            leased: count(Owner::Lease),
            quarantined: count(Owner::Quarantine),
            leaked: count(Owner::Nobody),
        }
    }
}

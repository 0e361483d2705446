//! Reserving blocks for a request: prefix hits first, then free blocks, then evictions; all or nothing.

use baton_protocol::hash::{BlockHash, BlockHasher};
use thiserror::Error;

use super::{Held, PoolState, ReservationId};
use crate::kv::blocks::{CacheScope, Holder};
use crate::kv::events::CacheChange;
use crate::kv::lease::Gone;
use crate::kv::store::BlockId;

/// What a request asks of the pool.
#[derive(Clone, Copy, Debug)]
pub struct Reserve<'a> {
    /// Prompt, and tokens generated before on another worker.
    pub tokens: &'a [u32],
    /// Whose cache may be hit.
    pub scope: &'a CacheScope,
    /// Tokens to come for which blocks are reserved as well.
    pub room: usize,
    /// Leave at least the last token to compute, for its logits. A reader that gets the first token by hand-off says false.
    pub leave_last: bool,
}

/// The blocks are not there. Nothing was taken or evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "kvPool: {needed} blocks are needed and {available} can be had: retry when requests have ended"
)]
pub struct PoolFull {
    /// New blocks needed.
    pub needed: usize,
    /// Free and evictable blocks.
    pub available: usize,
}

/// What was reserved.
#[derive(Debug)]
pub(crate) struct Reserved {
    pub(crate) id: ReservationId,
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) cached_blocks: usize,
    /// Blocks from this one on have to be zeroed.
    pub(crate) clean_from: usize,
}

impl PoolState {
    /// `spare` blocks must be left that others could get.
    pub(crate) fn reserve(
        &mut self,
        reserve: &Reserve<'_>,
        spare: usize,
    ) -> Result<Reserved, PoolFull> {
        let geometry = self.config.geometry;
        let hasher = self.hasher(reserve.scope);
        let total = geometry.blocks_for(reserve.tokens.len() + reserve.room);
        let usable = if reserve.leave_last {
            reserve.tokens.len().saturating_sub(1)
        } else {
            reserve.tokens.len()
        };

        let (mut blocks, parent_hash) =
            self.hits(&hasher, &reserve.tokens[..usable], reserve.scope);
        blocks.reserve_exact(total.saturating_sub(blocks.len()));
        let cached_blocks = blocks.len();
        // Held first, so that making room cannot evict what was just hit.
        for block in &blocks {
            self.blocks.hold(*block, Holder::Request);
        }
        let needed = total - cached_blocks;
        // What was hit is held by now, so it is no longer counted among what others could get.
        let taken = if needed + spare > self.blocks.available() {
            Err(PoolFull {
                needed: needed + spare,
                available: self.blocks.available(),
            })
        } else {
            self.take(needed, &mut blocks)
        };
        if let Err(full) = taken {
            self.drop_request(&blocks);
            return Err(full);
        }

        let clean_from = cached_blocks.max(reserve.tokens.len() / geometry.block_size);
        let id = ReservationId(self.next_reservation);
        self.next_reservation += 1;
        self.reservations.insert(
            id,
            Held {
                blocks: blocks.clone(),
                completed: cached_blocks,
                clean_from,
                parent_hash,
                findable: true,
                scope: reserve.scope.clone(),
                hasher,
                lease: None,
                sealed: false,
            },
        );
        Ok(Reserved {
            id,
            blocks,
            cached_blocks,
            clean_from,
        })
    }

    /// Leading blocks of `tokens` that the cache has, and the hash of the last.
    fn hits(
        &self,
        hasher: &BlockHasher,
        tokens: &[u32],
        scope: &CacheScope,
    ) -> (Vec<BlockId>, BlockHash) {
        let mut blocks = Vec::new();
        let mut parent_hash = hasher.root();
        for block in tokens.chunks_exact(self.config.geometry.block_size) {
            let hash = hasher.child(parent_hash, block, &scope.extra);
            let parent = blocks.last().copied();
            let Some(hit) = self.blocks.find(hash, parent, block, scope) else {
                break;
            };
            blocks.push(hit);
            parent_hash = hash;
        }
        (blocks, parent_hash)
    }

    pub(crate) fn cached_tokens(&self, tokens: &[u32], scope: &CacheScope) -> usize {
        let (blocks, _) = self.hits(&self.hasher(scope), tokens, scope);
        blocks.len() * self.config.geometry.block_size
    }

    /// Adds blocks until the reservation holds `tokens` tokens. Returns the new ones.
    pub(crate) fn grow(
        &mut self,
        id: ReservationId,
        tokens: usize,
    ) -> Result<Vec<BlockId>, PoolFull> {
        let has = self
            .reservations
            .get(&id)
            .map_or(0, |held| held.blocks.len());
        let needed = self.config.geometry.blocks_for(tokens).saturating_sub(has);
        let mut new = Vec::with_capacity(needed);
        self.take(needed, &mut new)?;
        if let Some(held) = self.reservations.get_mut(&id) {
            held.blocks.extend_from_slice(&new);
        }
        Ok(new)
    }

    fn take(&mut self, needed: usize, blocks: &mut Vec<BlockId>) -> Result<(), PoolFull> {
        let available = self.blocks.available();
        if needed > available {
            return Err(PoolFull { needed, available });
        }
        let mut removed = Vec::new();
        let taken = (0..needed).map_while(|_| self.blocks.take(&mut removed));
        blocks.extend(taken);
        if !removed.is_empty() {
            self.events.push(CacheChange::Removed(removed));
        }
        Ok(())
    }

    /// Ends a reservation. A lease that it was still filling can never be sealed: it is cancelled, so that its reader hears
    /// of it at once.
    pub(crate) fn release(&mut self, id: ReservationId, now: u64) {
        let Some(held) = self.reservations.remove(&id) else {
            return;
        };
        if let (Some(lease), false) = (held.lease, held.sealed) {
            self.end_lease(lease, Gone::Cancelled, now);
        }
        self.drop_request(&held.blocks);
    }

    fn drop_request(&mut self, blocks: &[BlockId]) {
        for block in blocks.iter().rev() {
            self.blocks.drop_reference(*block, Holder::Request);
        }
    }
}

//! A request's hold on blocks. It moves and is never copied, so it is released once: by `KvPool::release` or by being dropped.

use std::fmt;

use baton_protocol::ids::LeaseId;

use super::pool::KvPool;
use super::state::ReservationId;
use super::store::BlockId;

/// Blocks of one request, in the order of its tokens.
pub struct Reservation {
    pub(super) id: ReservationId,
    pub(super) pool: KvPool,
    pub(super) blocks: Vec<BlockId>,
    pub(super) cached_blocks: usize,
    pub(super) completed: usize,
    pub(super) lease: Option<LeaseId>,
}

impl Reservation {
    /// The block table. Read it anew for every step: completing a block may replace it by one with the same content.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Leading blocks whose KV was in the cache when this was reserved.
    pub fn cached_blocks(&self) -> usize {
        self.cached_blocks
    }

    /// Leading tokens whose KV was in the cache when this was reserved: computing starts here.
    pub fn cached_tokens(&self) -> usize {
        self.cached_blocks * self.pool.store().geometry().block_size
    }

    /// Leading blocks that are full and complete by now.
    pub fn completed_blocks(&self) -> usize {
        self.completed
    }

    /// Tokens that fit without growing.
    pub fn capacity_tokens(&self) -> usize {
        self.blocks.len() * self.pool.store().geometry().block_size
    }

    /// The lease that this reservation fills.
    pub fn lease(&self) -> Option<LeaseId> {
        self.lease
    }

    /// The pool it is of.
    pub fn pool(&self) -> &KvPool {
        &self.pool
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.pool.release_by_id(self.id);
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Reservation")
            .field("id", &self.id)
            .field("blocks", &self.blocks)
            .field("cached_blocks", &self.cached_blocks)
            .field("completed", &self.completed)
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}

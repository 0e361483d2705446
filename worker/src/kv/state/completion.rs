//! A block has been filled: header, prefix cache, lease, event; in this order and under one lock, so nobody sees half of it.

use baton_protocol::hash::BlockHash;
use baton_protocol::header::BlockHeader;
use thiserror::Error;

use super::{PoolState, ReservationId};
use crate::kv::blocks::{Entry, Holder, Registered};
use crate::kv::events::CacheChange;
use crate::kv::store::BlockId;

/// A completion that cannot be: a mistake of the caller. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CompleteError {
    /// Blocks are completed in order, each once.
    #[error(
        "kvPool: block {index} was completed, but the next one is {expected}: complete blocks in order, each once"
    )]
    OutOfOrder {
        /// The one named.
        index: usize,
        /// The one that is due.
        expected: usize,
    },
    /// Only full blocks are completed; the last one, partly filled, is sealed.
    #[error(
        "kvPool: a block of {found} tokens was completed, it must have {expected}: complete full blocks only"
    )]
    NotFull {
        /// Tokens given.
        found: usize,
        /// Tokens of a full block.
        expected: usize,
    },
    /// The reservation has no such block.
    #[error("kvPool: block {index} lies outside the reservation of {blocks} blocks: grow it first")]
    OutOfRange {
        /// The one named.
        index: usize,
        /// Blocks held.
        blocks: usize,
    },
}

/// What is known of a complete block's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// They have this checksum: the block may be offered to other requests.
    Checked(u64),
    /// They should have this checksum, and nobody compared: the block is its reservation's alone.
    Promised(u64),
}

impl PoolState {
    /// Block `index` of the reservation holds the KV of `tokens`. Returns the block that holds this content from now on: another
    /// one when the cache had it already, and then the given one is freed.
    pub(crate) fn complete(
        &mut self,
        id: ReservationId,
        index: usize,
        tokens: &[u32],
        proof: Proof,
    ) -> Result<BlockId, CompleteError> {
        let block_size = self.config.geometry.block_size;
        let Some(held) = self.reservations.get_mut(&id) else {
            return Err(CompleteError::OutOfRange { index, blocks: 0 });
        };
        let blocks = held.blocks.len();
        let Some(&block) = held.blocks.get(index) else {
            return Err(CompleteError::OutOfRange { index, blocks });
        };
        if index != held.completed {
            return Err(CompleteError::OutOfOrder {
                index,
                expected: held.completed,
            });
        }
        if tokens.len() != block_size {
            return Err(CompleteError::NotFull {
                found: tokens.len(),
                expected: block_size,
            });
        }

        let hash = held
            .hasher
            .child(held.parent_hash, tokens, &held.scope.extra);
        let (checksum, offered) = match proof {
            Proof::Checked(checksum) => (checksum, true),
            Proof::Promised(checksum) => (checksum, false),
        };
        self.blocks.set_header(
            block,
            BlockHeader {
                hash,
                generation: self.blocks.generation(block),
                layout: self.config.layout,
                checksum,
                fill: block_size as u32,
            },
        );
        let parent = index
            .checked_sub(1)
            .and_then(|before| held.blocks.get(before).copied());
        held.findable &= parent.is_none_or(|parent| self.blocks.is_registered(parent));
        let registered = if held.findable && !offered {
            // The cache may have it, proven: then that one is used instead.
            let found = self.blocks.find(hash, parent, tokens, &held.scope);
            found.map_or(Registered::Private, Registered::Duplicate)
        } else if held.findable {
            let entry = Entry {
                hash,
                parent,
                depth: index as u32,
                tokens: tokens.into(),
                scope: held.scope.clone(),
            };
            self.blocks.register(block, entry)
        } else {
            Registered::Private
        };
        let kept = match registered {
            Registered::New => {
                self.events.push(CacheChange::Stored(vec![hash]));
                block
            }
            Registered::Duplicate(existing) => {
                self.blocks.hold(existing, Holder::Request);
                self.blocks.drop_reference(block, Holder::Request);
                existing
            }
            Registered::Private => {
                held.findable = false;
                block
            }
        };
        held.blocks[index] = kept;
        held.completed += 1;
        held.parent_hash = hash;
        if let Some(lease) = held.lease {
            self.publish(lease, kept);
        }
        Ok(kept)
    }

    /// Hashes that the next full blocks of the reservation must have when they hold `tokens` (the whole sequence).
    pub(crate) fn expected_hashes(&self, id: ReservationId, tokens: &[u32]) -> Vec<BlockHash> {
        let Some(held) = self.reservations.get(&id) else {
            return Vec::new();
        };
        let mut parent = held.parent_hash;
        tokens
            .chunks_exact(self.config.geometry.block_size)
            .skip(held.completed)
            .map(|block| {
                parent = held.hasher.child(parent, block, &held.scope.extra);
                parent
            })
            .collect()
    }
}

//! The arena: the bytes of every KV block, each behind its own lock, with its header beside it.
//!
//! Nothing here knows who owns a block; `kv::pool` does. The locks only keep one read or write of bytes whole: the compute
//! thread writes the KV of a step while a transport task copies another block out. Other processes of this host may map the arena
//! and read without a lock; what they have instead is the header: it goes when somebody may write, and comes when the block is whole.

use std::fmt;

use baton_protocol::header::BlockHeader;
use parking_lot::{
    MappedRwLockReadGuard, MappedRwLockWriteGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use thiserror::Error;

use super::sync::take;
use crate::transport::memory::{Arena, Piece, Shape};

/// Index of a block in the arena of one worker. Means nothing outside that worker.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    /// Position in tables that have one entry per block.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)
    }
}

impl fmt::Debug for BlockId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "BlockId({})", self.0)
    }
}

/// Size of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Tokens in a block.
    pub block_size: usize,
    /// Bytes of keys and values of one token over all layers.
    pub bytes_per_token: usize,
}

impl Geometry {
    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.block_size.saturating_mul(self.bytes_per_token)
    }

    /// Blocks that hold `tokens` tokens, the last one perhaps partly filled.
    pub fn blocks_for(self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }
}

/// Why an arena was not made. Nothing has been allocated.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StoreError {
    /// The arena does not fit in the memory that is there.
    #[error(
        "kvPool: {blocks} blocks of {block_bytes} bytes need {needed} bytes, but {available} bytes of memory are available: \
         ask for a smaller pool or give the worker more memory"
    )]
    Memory {
        /// Blocks asked for.
        blocks: usize,
        /// Bytes of one block.
        block_bytes: usize,
        /// Bytes the arena needs.
        needed: u128,
        /// Bytes that the caller says are available.
        available: u64,
    },
    /// The system has no such range of addresses.
    #[error("kvPool: {bytes} bytes cannot be mapped: {cause}: ask for a smaller pool")]
    Mapping {
        /// Bytes of the arena.
        bytes: usize,
        /// What the system says.
        cause: String,
    },
    /// A size that no pool can have.
    #[error(
        "kvPool: {field} is {value}, it must be {allowed}: correct the pool's size or the model's shape"
    )]
    Shape {
        /// Which number is wrong.
        field: &'static str,
        /// What it was.
        value: usize,
        /// What it may be.
        allowed: &'static str,
    },
}

/// The arena. Shared by reference count between the compute thread and the transports.
pub struct BlockStore {
    geometry: Geometry,
    arena: Arena,
    blocks: Box<[RwLock<Piece>]>,
}

impl fmt::Debug for BlockStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("BlockStore")
            .field("geometry", &self.geometry)
            .field("blocks", &self.blocks.len())
            .finish()
    }
}

/// Shared access to the bytes of one block.
pub type BlockRead<'a> = MappedRwLockReadGuard<'a, [u8]>;
/// Exclusive access to the bytes of one block.
pub type BlockWrite<'a> = MappedRwLockWriteGuard<'a, [u8]>;

impl BlockStore {
    /// Allocates `blocks` zeroed blocks. `available` is the memory in bytes that may be used (`MemAvailable` of the
    /// machine or what is left of the container's limit); it is compared before anything is allocated.
    pub fn new(geometry: Geometry, blocks: usize, available: u64) -> Result<Self, StoreError> {
        let shape = |field, value, allowed| StoreError::Shape {
            field,
            value,
            allowed,
        };
        if geometry.block_size == 0 {
            return Err(shape("block_size", geometry.block_size, "at least 1 token"));
        }
        if geometry.bytes_per_token == 0 {
            return Err(shape(
                "bytes_per_token",
                geometry.bytes_per_token,
                "at least 1 byte",
            ));
        }
        if blocks == 0 || u32::try_from(blocks).is_err() {
            return Err(shape("blocks", blocks, "between 1 and 4294967295"));
        }
        let needed =
            blocks as u128 * geometry.block_size as u128 * geometry.bytes_per_token as u128;
        if needed > u128::from(available) {
            return Err(StoreError::Memory {
                blocks,
                block_bytes: geometry.block_bytes(),
                needed,
                available,
            });
        }
        if !geometry.block_bytes().is_multiple_of(size_of::<u32>()) {
            return Err(shape(
                "block bytes",
                geometry.block_bytes(),
                "a multiple of 4",
            ));
        }
        let shape = u32::try_from(blocks)
            .ok()
            .and_then(|blocks| Shape::new(blocks, geometry.block_bytes()))
            .ok_or(shape("blocks", blocks, "few enough to be addressed"))?;
        let (arena, pieces) = Arena::new(shape).map_err(|cause| StoreError::Mapping {
            bytes: shape.total(),
            cause: cause.to_string(),
        })?;
        Ok(Self {
            geometry,
            arena,
            blocks: pieces.into_iter().map(RwLock::new).collect(),
        })
    }

    /// Size of a block.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.geometry.block_bytes()
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Never true: an arena has at least one block.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// What other processes of this host may map.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The bytes of a block, 64-byte aligned. Waits while somebody writes it. Do not hold it across an await.
    ///
    /// # Panics
    /// When `id` is not of this arena: ids come from the pool that owns it.
    pub fn read(&self, id: BlockId) -> BlockRead<'_> {
        let block = &self.blocks[id.index()];
        RwLockReadGuard::map(take(|| block.read(), || block.try_read()), Piece::bytes)
    }

    /// The bytes of a block, to be changed. Waits for readers. Only the owner of the block's only reference may do this. The block
    /// has no header from now on.
    ///
    /// # Panics
    /// When `id` is not of this arena.
    pub fn write(&self, id: BlockId) -> BlockWrite<'_> {
        let block = &self.blocks[id.index()];
        let piece = take(|| block.write(), || block.try_write());
        if let Some(header) = self.arena.header(id.0) {
            header.retract();
        }
        RwLockWriteGuard::map(piece, Piece::bytes_mut)
    }

    /// The block is whole: whoever maps the arena may find this beside it until it is written again.
    pub fn publish(&self, id: BlockId, header: &BlockHeader) {
        if let Some(cell) = self.arena.header(id.0) {
            cell.publish(header);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry {
        block_size: 4,
        bytes_per_token: 8,
    };

    #[test]
    fn a_pool_larger_than_memory_is_refused_before_it_is_allocated() {
        let geometry = Geometry {
            block_size: 16,
            bytes_per_token: 1 << 20,
        };
        let error = BlockStore::new(geometry, 1 << 30, 8 << 30).expect_err("16 PiB do not fit");
        let message = error.to_string();
        assert!(message.starts_with("kvPool: "), "{message}");
        assert!(message.contains(&(1_u128 << 54).to_string()), "{message}");
        assert!(message.contains(&(8_u64 << 30).to_string()), "{message}");
    }

    #[test]
    fn the_last_byte_that_fits_is_given() {
        assert!(BlockStore::new(GEOMETRY, 2, 64).is_ok());
        assert!(BlockStore::new(GEOMETRY, 2, 63).is_err());
    }

    #[test]
    fn shapes_that_cannot_be_are_named() {
        for (geometry, blocks, word) in [
            (
                Geometry {
                    block_size: 0,
                    bytes_per_token: 8,
                },
                1,
                "block_size",
            ),
            (
                Geometry {
                    block_size: 4,
                    bytes_per_token: 0,
                },
                1,
                "bytes_per_token",
            ),
            (GEOMETRY, 0, "blocks"),
            (
                Geometry {
                    block_size: 3,
                    bytes_per_token: 2,
                },
                1,
                "block bytes",
            ),
        ] {
            let message = BlockStore::new(geometry, blocks, u64::MAX)
                .expect_err("no such pool")
                .to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn bytes_written_are_read_back_from_that_block_only() {
        let store = BlockStore::new(GEOMETRY, 2, 64).expect("fits");
        store.write(BlockId(1))[31] = 7;
        assert_eq!(store.read(BlockId(1))[31], 7);
        assert_eq!(store.read(BlockId(1)).len(), 32);
        assert!(store.read(BlockId(0)).iter().all(|byte| *byte == 0));
        assert_eq!(store.read(BlockId(0)).as_ptr() as usize % 64, 0);
    }

    #[test]
    fn a_block_has_its_header_until_it_is_written() {
        let store = BlockStore::new(GEOMETRY, 2, 64).expect("fits");
        let beside = |block: u32| store.arena().header(block).expect("there").read();
        store.publish(BlockId(1), &BlockHeader::default());
        assert!(beside(1).is_some());
        drop(store.write(BlockId(0)));
        assert!(beside(1).is_some());
        drop(store.write(BlockId(1)));
        assert_eq!(beside(1), None);
    }

    #[test]
    fn two_blocks_are_written_at_the_same_time() {
        let store = BlockStore::new(GEOMETRY, 2, 64).expect("fits");
        let mut first = store.write(BlockId(0));
        let mut second = store.write(BlockId(1));
        first[0] = 1;
        second[0] = 2;
        assert_eq!((first[0], second[0]), (1, 2));
    }
}

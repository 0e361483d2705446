//! Which worker holds which prefix: one interface, and a simple exact implementation.
//!
//! A hit is a hint: the worker compares the tokens themselves before it uses a block.

mod exact;

use baton_protocol::hash::BlockHash;

pub use exact::ExactIndex;

/// A change of one worker's cache.
#[derive(Clone, Copy, Debug)]
pub enum IndexEvent<'a> {
    Stored(&'a [BlockHash]),
    Removed(&'a [BlockHash]),
    Cleared,
    /// All that the worker holds, instead of what was known.
    Snapshot(&'a [BlockHash]),
}

/// How many leading blocks of one prompt each worker holds, by slot; slots beyond the end hold none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixHits {
    depths: Vec<u32>,
}

impl PrefixHits {
    /// Leading blocks held by the worker of this slot.
    pub fn depth(&self, slot: u32) -> u32 {
        self.depths.get(slot as usize).copied().unwrap_or(0)
    }

    /// Sets one worker's depth.
    pub fn set(&mut self, slot: u32, blocks: u32) {
        let position = slot as usize;
        if self.depths.len() <= position {
            self.depths.resize(position + 1, 0);
        }
        self.depths[position] = blocks;
    }

    /// Slots that hold something, with their depths.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.depths
            .iter()
            .enumerate()
            .filter(|&(_, &depth)| depth > 0)
            .map(|(slot, &depth)| (slot as u32, depth))
    }

    /// Takes over the depths of the slots that `other` has: for prompts that hash differently for different workers.
    pub fn merge(&mut self, other: &PrefixHits) {
        for (slot, depth) in other.iter() {
            self.set(slot, depth.max(self.depth(slot)));
        }
    }
}

/// Blocks by worker. Reads share `&self`; whoever owns the index orders the writes.
///
/// Contract: `matches` is exact with respect to the events applied. A depth ends at the first block that the worker lacks,
/// whatever it holds after it. Storing a block twice, or removing one that is not there, changes nothing.
pub trait PrefixIndex: Send + Sync {
    fn apply(&mut self, slot: u32, event: IndexEvent<'_>);

    /// Forgets a worker; its slot may then be given to another.
    fn remove_worker(&mut self, slot: u32);

    /// For a chain of block hashes, how many leading ones each worker holds.
    fn matches(&self, chain: &[BlockHash]) -> PrefixHits;

    /// Distinct blocks that some worker holds.
    fn blocks(&self) -> usize;
}

//! The simple exact index: a map from block to the set of workers that hold it, and from worker to its blocks.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use baton_protocol::hash::BlockHash;

use super::{IndexEvent, PrefixHits, PrefixIndex};

/// Block hashes are keyed and uniform already: their own bits serve as the map's hash.
#[derive(Default)]
struct OwnBits(u64);

impl Hasher for OwnBits {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0u8; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 = self.0.rotate_left(5) ^ u64::from_ne_bytes(word);
        }
    }

    fn write_u128(&mut self, value: u128) {
        self.0 = (value as u64) ^ ((value >> 64) as u64);
    }
}

type ByOwnBits = BuildHasherDefault<OwnBits>;

/// A set of slots: one bit each. The first 64, which is all that most fleets have, take no allocation: there is a set for every
/// block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Slots {
    first: u64,
    /// 64 each, from the 65th on.
    more: Vec<u64>,
}

impl Slots {
    fn insert(&mut self, slot: u32) {
        let bit = 1 << (slot % 64);
        let Some(word) = (slot as usize / 64).checked_sub(1) else {
            self.first |= bit;
            return;
        };
        if self.more.len() <= word {
            self.more.resize(word + 1, 0);
        }
        self.more[word] |= bit;
    }

    fn remove(&mut self, slot: u32) {
        let bit = 1 << (slot % 64);
        match (slot as usize / 64).checked_sub(1) {
            None => self.first &= !bit,
            Some(word) => {
                if let Some(word) = self.more.get_mut(word) {
                    *word &= !bit;
                }
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.first == 0 && self.more.iter().all(|&word| word == 0)
    }

    /// Drops the slots that `other` lacks, and tells each.
    fn keep(&mut self, other: &Self, mut dropped: impl FnMut(u32)) {
        each(self.first & !other.first, 0, &mut dropped);
        self.first &= other.first;
        for (index, word) in self.more.iter_mut().enumerate() {
            let kept = *word & other.more.get(index).copied().unwrap_or(0);
            each(*word & !kept, index + 1, &mut dropped);
            *word = kept;
        }
    }

    fn each(&self, mut tell: impl FnMut(u32)) {
        each(self.first, 0, &mut tell);
        for (index, &word) in self.more.iter().enumerate() {
            each(word, index + 1, &mut tell);
        }
    }
}

/// The slots of one word's bits.
fn each(mut bits: u64, word: usize, tell: &mut impl FnMut(u32)) {
    while bits != 0 {
        tell(word as u32 * 64 + bits.trailing_zeros());
        bits &= bits - 1;
    }
}

/// Exact and small; a million blocks take about 100 bytes each.
#[derive(Debug, Default)]
pub struct ExactIndex {
    holders: HashMap<BlockHash, Slots, ByOwnBits>,
    held: HashMap<u32, HashSet<BlockHash, ByOwnBits>>,
}

impl ExactIndex {
    pub fn new() -> Self {
        Self::default()
    }

    fn store(&mut self, slot: u32, hashes: &[BlockHash]) {
        let held = self.held.entry(slot).or_default();
        for &hash in hashes {
            if held.insert(hash) {
                self.holders.entry(hash).or_default().insert(slot);
            }
        }
    }

    fn release(&mut self, slot: u32, hash: BlockHash) {
        if let Some(slots) = self.holders.get_mut(&hash) {
            slots.remove(slot);
            if slots.is_empty() {
                self.holders.remove(&hash);
            }
        }
    }
}

impl PrefixIndex for ExactIndex {
    fn apply(&mut self, slot: u32, event: IndexEvent<'_>) {
        match event {
            IndexEvent::Stored(hashes) => self.store(slot, hashes),
            IndexEvent::Removed(hashes) => {
                for &hash in hashes {
                    let removed = self
                        .held
                        .get_mut(&slot)
                        .is_some_and(|held| held.remove(&hash));
                    if removed {
                        self.release(slot, hash);
                    }
                }
            }
            IndexEvent::Cleared => self.remove_worker(slot),
            IndexEvent::Snapshot(hashes) => {
                self.remove_worker(slot);
                self.store(slot, hashes);
            }
        }
    }

    fn remove_worker(&mut self, slot: u32) {
        for hash in self.held.remove(&slot).unwrap_or_default() {
            self.release(slot, hash);
        }
    }

    fn matches(&self, chain: &[BlockHash]) -> PrefixHits {
        let mut hits = PrefixHits::default();
        // Who holds every block so far; who drops out has its depth.
        let mut holding: Option<Slots> = None;
        let mut depth = 0;
        for hash in chain {
            let Some(holders) = self.holders.get(hash) else {
                break;
            };
            let holding = holding.get_or_insert_with(|| holders.clone());
            holding.keep(holders, |slot| hits.set(slot, depth));
            if holding.is_empty() {
                break;
            }
            depth += 1;
        }
        if let Some(holding) = holding {
            holding.each(|slot| hits.set(slot, depth));
        }
        hits
    }

    fn blocks(&self) -> usize {
        self.holders.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hash(value: u128) -> BlockHash {
        BlockHash(value.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c834))
    }

    #[test]
    fn a_hole_ends_the_prefix() {
        let chain: Vec<BlockHash> = (1..=4).map(hash).collect();
        let mut index = ExactIndex::new();
        index.apply(0, IndexEvent::Stored(&chain));
        index.apply(70, IndexEvent::Stored(&chain[..2]));
        assert_eq!(
            (
                index.matches(&chain).depth(0),
                index.matches(&chain).depth(70)
            ),
            (4, 2)
        );
        index.apply(0, IndexEvent::Removed(&chain[1..2]));
        assert_eq!(
            (
                index.matches(&chain).depth(0),
                index.matches(&chain).depth(70)
            ),
            (1, 2)
        );
        index.apply(70, IndexEvent::Cleared);
        assert_eq!(index.matches(&chain).iter().collect::<Vec<_>>(), [(0, 1)]);
        index.remove_worker(0);
        assert_eq!(index.blocks(), 0);
    }

    #[derive(Clone, Debug)]
    enum Change {
        Store(u32, Vec<u8>),
        Remove(u32, Vec<u8>),
        Clear(u32),
        Snapshot(u32, Vec<u8>),
    }

    fn changes() -> impl Strategy<Value = Vec<Change>> {
        let slot = prop_oneof![0u32..3, 62u32..67];
        let blocks = proptest::collection::vec(0u8..12, 0..8);
        let change = (0u8..8, slot, blocks).prop_map(|(kind, slot, blocks)| match kind {
            0 => Change::Clear(slot),
            1 => Change::Snapshot(slot, blocks),
            2 | 3 => Change::Remove(slot, blocks),
            _ => Change::Store(slot, blocks),
        });
        proptest::collection::vec(change, 0..40)
    }

    proptest! {
        #[test]
        fn equals_a_naive_model_over_random_histories(history in changes(), chain in proptest::collection::vec(0u8..12, 0..10)) {
            let mut index = ExactIndex::new();
            let mut model: HashMap<u32, HashSet<u8>> = HashMap::new();
            let hashes = |blocks: &[u8]| blocks.iter().map(|&block| hash(u128::from(block) + 1)).collect::<Vec<_>>();
            for change in history {
                match change {
                    Change::Store(slot, blocks) => {
                        index.apply(slot, IndexEvent::Stored(&hashes(&blocks)));
                        model.entry(slot).or_default().extend(blocks);
                    }
                    Change::Remove(slot, blocks) => {
                        index.apply(slot, IndexEvent::Removed(&hashes(&blocks)));
                        let held = model.entry(slot).or_default();
                        held.retain(|block| !blocks.contains(block));
                    }
                    Change::Clear(slot) => {
                        index.apply(slot, IndexEvent::Cleared);
                        model.remove(&slot);
                    }
                    Change::Snapshot(slot, blocks) => {
                        index.apply(slot, IndexEvent::Snapshot(&hashes(&blocks)));
                        model.insert(slot, blocks.into_iter().collect());
                    }
                }
            }
            let hits = index.matches(&hashes(&chain));
            for slot in 0..70 {
                let expected = model.get(&slot).map_or(0, |held| {
                    chain.iter().take_while(|block| held.contains(block)).count()
                });
                prop_assert_eq!(hits.depth(slot) as usize, expected);
            }
            let distinct: HashSet<u8> = model.values().flatten().copied().collect();
            prop_assert_eq!(index.blocks(), distinct.len());
        }
    }
}

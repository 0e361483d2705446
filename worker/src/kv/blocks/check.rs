//! The invariants of the block table, checked block by block against owners counted by somebody else. Tests only.

use std::collections::{BTreeSet, HashSet};

use super::Blocks;
use crate::kv::store::BlockId;

impl Blocks {
    /// `owners[i]` are the request and transfer references that block `i` must have.
    pub(crate) fn check(&self, owners: &[(u32, u32)]) {
        let free: HashSet<BlockId> = self.free.iter().copied().collect();
        assert_eq!(free.len(), self.free.len(), "a block is free twice");
        let mut children = vec![0; self.slots.len()];
        let mut evictable = BTreeSet::new();
        let mut cached = 0;
        for (index, slot) in self.slots.iter().enumerate() {
            let id = BlockId(index as u32);
            assert_eq!(
                (slot.request_refs, slot.transfer_refs),
                owners[index],
                "references of {id:?}"
            );
            assert_eq!(
                free.contains(&id),
                !slot.referenced() && slot.entry.is_none(),
                "{id:?} is free exactly when nobody refers to it and the cache does not keep it"
            );
            let Some(entry) = &slot.entry else {
                assert_eq!(slot.children, 0, "{id:?} has children but cannot be found");
                continue;
            };
            assert_eq!(self.by_hash.get(&entry.hash), Some(&id));
            assert!(
                slot.header.is_some(),
                "{id:?} can be found but is not complete"
            );
            if let Some(parent) = entry.parent {
                children[parent.index()] += 1;
                let above = &self.slots[parent.index()];
                assert!(above.entry.is_some(), "the chain has a hole above {id:?}");
                assert!(
                    above.referenced() || !slot.referenced(),
                    "{id:?} is held but not the block before it"
                );
            }
            if !slot.referenced() {
                cached += 1;
                if slot.children == 0 {
                    evictable.insert((slot.last_used, id));
                }
            }
        }
        for (slot, children) in self.slots.iter().zip(children) {
            assert_eq!(slot.children, children);
        }
        assert_eq!(self.evictable, evictable);
        assert_eq!(self.cached, cached);
        let registered = self.slots.iter().filter(|slot| slot.entry.is_some());
        assert_eq!(self.by_hash.len(), registered.count());
    }
}

//! Blocks by number: references, generations, the free list and the order of eviction. Pure bookkeeping, no bytes.
//!
//! A block is free only when its request references and its transfer references are both zero and the prefix cache does not
//! keep it. Cached blocks form trees (a block's parent is the block before it); only leaves are evicted, oldest first, so a
//! chain never gets a hole.

#[cfg(test)]
pub(crate) mod check;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use baton_protocol::hash::BlockHash;
use baton_protocol::header::BlockHeader;
use baton_protocol::ids::Generation;

use super::store::BlockId;

/// Whose cache a request may hit, and what shaped its KV besides tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheScope {
    /// Cache salt of the client; empty: none.
    pub salt: Arc<str>,
    /// Adapter revision, digests of images; empty: nothing.
    pub extra: Arc<[u8]>,
}

impl CacheScope {
    /// Scope of a client with this salt and without extras.
    pub fn salted(salt: &str) -> Self {
        Self {
            salt: Arc::from(salt),
            extra: Arc::from([]),
        }
    }
}

/// What the prefix cache knows of a block: enough to prove a hit, not only to find it.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) hash: BlockHash,
    pub(crate) parent: Option<BlockId>,
    /// Blocks before it.
    pub(crate) depth: u32,
    pub(crate) tokens: Box<[u32]>,
    pub(crate) scope: CacheScope,
}

impl Entry {
    fn proves(&self, parent: Option<BlockId>, tokens: &[u32], scope: &CacheScope) -> bool {
        self.parent == parent && *self.tokens == *tokens && self.scope == *scope
    }
}

#[derive(Debug, Default)]
struct Slot {
    generation: u64,
    request_refs: u32,
    transfer_refs: u32,
    header: Option<BlockHeader>,
    entry: Option<Entry>,
    children: u32,
    last_used: u64,
}

impl Slot {
    fn referenced(&self) -> bool {
        self.request_refs > 0 || self.transfer_refs > 0
    }
}

/// Who holds a block: a request's table or a transfer (lease, quarantine).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    Request,
    Transfer,
}

/// How the cache took a completed block.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Registered {
    /// It can be hit from now on.
    New,
    /// The same content is there already, in this block.
    Duplicate(BlockId),
    /// It stays its reservation's own: another content has that hash, its chain cannot be found, or its bytes were not checked.
    Private,
}

/// The table of blocks.
#[derive(Debug)]
pub(crate) struct Blocks {
    slots: Vec<Slot>,
    free: VecDeque<BlockId>,
    by_hash: HashMap<BlockHash, BlockId>,
    /// Unreferenced cached leaves, least recently used first.
    evictable: BTreeSet<(u64, BlockId)>,
    /// Unreferenced cached blocks, leaves or not.
    cached: usize,
    tick: u64,
}

impl Blocks {
    pub(crate) fn new(total: usize) -> Self {
        Self {
            slots: (0..total).map(|_| Slot::default()).collect(),
            free: (0..total).map(|index| BlockId(index as u32)).collect(),
            by_hash: HashMap::new(),
            evictable: BTreeSet::new(),
            cached: 0,
            tick: 0,
        }
    }

    pub(crate) fn total(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn free(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.free.iter().copied()
    }

    /// Blocks that a request could get now. Every unreferenced cached block counts: whoever references a block references all
    /// before it, so no referenced child can keep an unreferenced parent.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.cached
    }

    pub(crate) fn is_cached(&self, id: BlockId) -> bool {
        let slot = &self.slots[id.index()];
        slot.entry.is_some() && !slot.referenced()
    }

    pub(crate) fn generation(&self, id: BlockId) -> Generation {
        Generation(self.slots[id.index()].generation)
    }

    pub(crate) fn set_header(&mut self, id: BlockId, header: BlockHeader) {
        self.slots[id.index()].header = Some(header);
    }

    /// What lies beside the block now. A block that is being filled shows its generation and nothing else.
    pub(crate) fn header(&self, id: BlockId) -> BlockHeader {
        let slot = &self.slots[id.index()];
        slot.header.unwrap_or(BlockHeader {
            generation: Generation(slot.generation),
            ..BlockHeader::default()
        })
    }

    pub(crate) fn is_registered(&self, id: BlockId) -> bool {
        self.slots[id.index()].entry.is_some()
    }

    /// Hashes that can be hit, parents before children.
    pub(crate) fn hashes(&self) -> Vec<BlockHash> {
        let mut found: Vec<_> = self
            .by_hash
            .iter()
            .filter_map(|(hash, id)| {
                let entry = self.slots[id.index()].entry.as_ref()?;
                Some((entry.depth, *hash))
            })
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(_, hash)| hash).collect()
    }

    /// The cached block with this content after `parent`. Content is compared: a hash alone proves nothing.
    pub(crate) fn find(
        &self,
        hash: BlockHash,
        parent: Option<BlockId>,
        tokens: &[u32],
        scope: &CacheScope,
    ) -> Option<BlockId> {
        let id = *self.by_hash.get(&hash)?;
        let entry = self.slots[id.index()].entry.as_ref()?;
        entry.proves(parent, tokens, scope).then_some(id)
    }

    /// Takes an unreferenced block, evicting the oldest cached leaf when none is free. Its generation rises.
    pub(crate) fn take(&mut self, removed: &mut Vec<BlockHash>) -> Option<BlockId> {
        let id = match self.free.pop_front() {
            Some(id) => id,
            None => self.evict(removed)?,
        };
        let slot = &mut self.slots[id.index()];
        slot.generation += 1;
        slot.header = None;
        slot.request_refs = 1;
        Some(id)
    }

    fn evict(&mut self, removed: &mut Vec<BlockHash>) -> Option<BlockId> {
        let (_, id) = self.evictable.pop_first()?;
        self.cached -= 1;
        if let Some(entry) = self.slots[id.index()].entry.take() {
            self.by_hash.remove(&entry.hash);
            removed.push(entry.hash);
            if let Some(parent) = entry.parent {
                self.slots[parent.index()].children -= 1;
                self.offer(parent);
            }
        }
        Some(id)
    }

    /// Puts a block into the order of eviction when it may be evicted.
    fn offer(&mut self, id: BlockId) {
        let slot = &self.slots[id.index()];
        if slot.entry.is_some() && !slot.referenced() && slot.children == 0 {
            self.evictable.insert((slot.last_used, id));
        }
    }

    pub(crate) fn hold(&mut self, id: BlockId, holder: Holder) {
        let slot = &mut self.slots[id.index()];
        if slot.entry.is_some() && !slot.referenced() {
            self.cached -= 1;
            self.evictable.remove(&(slot.last_used, id));
        }
        match holder {
            Holder::Request => slot.request_refs += 1,
            Holder::Transfer => slot.transfer_refs += 1,
        }
    }

    /// Drops one reference. Of a chain, drop the last block first: equal age then evicts from the end.
    pub(crate) fn drop_reference(&mut self, id: BlockId, holder: Holder) {
        self.tick += 1;
        let slot = &mut self.slots[id.index()];
        match holder {
            Holder::Request => slot.request_refs -= 1,
            Holder::Transfer => slot.transfer_refs -= 1,
        }
        if slot.referenced() {
            return;
        }
        slot.last_used = self.tick;
        if slot.entry.is_some() {
            self.cached += 1;
            self.offer(id);
        } else {
            slot.header = None;
            self.free.push_back(id);
        }
    }

    /// Makes a referenced, complete block findable.
    pub(crate) fn register(&mut self, id: BlockId, entry: Entry) -> Registered {
        if let Some(existing) = self.by_hash.get(&entry.hash) {
            let same = self.slots[existing.index()]
                .entry
                .as_ref()
                .is_some_and(|found| found.proves(entry.parent, &entry.tokens, &entry.scope));
            return if same {
                Registered::Duplicate(*existing)
            } else {
                Registered::Private
            };
        }
        if let Some(parent) = entry.parent {
            self.slots[parent.index()].children += 1;
        }
        self.by_hash.insert(entry.hash, id);
        self.slots[id.index()].entry = Some(entry);
        Registered::New
    }

    /// Forgets all cached contents. Referenced blocks stay with their holders but can no longer be hit.
    pub(crate) fn clear(&mut self) {
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            slot.children = 0;
            if slot.entry.take().is_some() && !slot.referenced() {
                slot.header = None;
                self.free.push_back(BlockId(index as u32));
            }
        }
        self.by_hash.clear();
        self.evictable.clear();
        self.cached = 0;
    }
}

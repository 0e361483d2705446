//! What an engine's prefix cache holds, under Baton's block hashes. Pure.
//!
//! An engine's hash is opaque, so each is mapped to Baton's own, made of the tokens that its event tells. A block can be hit while a
//! copy of it is left anywhere: copies are counted per (engine hash, group, medium), since an engine that computed one prefix twice
//! at once removes it twice. Blocks whose parent was never told are orphans: they are kept, and join when the parent is told.
//!
//! What cannot be indexed is counted by [`Cause`], never dropped in silence.

mod orphans;

use std::collections::{HashMap, HashSet};

use baton_protocol::hash::{BlockHash, BlockHasher, HashKey};

use self::orphans::{Orphan, Orphans};
use super::events::{EngineHash, Event, GroupKind, Medium, Place, Removed, Stored};
use crate::kv::events::{CacheChange, EventLog, EventsSince};

/// Why something of an event is not in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Of a type that this build does not know, or unreadable.
    Unread,
    /// A group of layers that needs a window or a state, not the whole past.
    GroupKind,
    /// Another block size than the card's.
    BlockSize,
    /// Its tokens are not its blocks' tokens.
    Lengths,
    /// It speaks of a block that it does not describe, and nobody did.
    Placeholder,
    /// It is kept until its parent is told. Counted again as applied when that happens.
    Orphan,
    /// The same, but there is no room for more.
    OrphansFull,
    /// A copy outside of this engine's reach.
    Remote,
    /// A removal of what was not indexed.
    UnknownRemoval,
    /// More copies were told than the engine has memory for: some were told twice. All are counted once from then on.
    ToldTwice,
}

impl Cause {
    pub const ALL: [Self; 10] = [
        Self::Unread,
        Self::GroupKind,
        Self::BlockSize,
        Self::Lengths,
        Self::Placeholder,
        Self::Orphan,
        Self::OrphansFull,
        Self::Remote,
        Self::UnknownRemoval,
        Self::ToldTwice,
    ];

    /// As metrics and the card name it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Unread => "unread",
            Self::GroupKind => "group-kind",
            Self::BlockSize => "block-size",
            Self::Lengths => "lengths",
            Self::Placeholder => "placeholder",
            Self::Orphan => "orphan",
            Self::OrphansFull => "orphans-full",
            Self::Remote => "remote",
            Self::UnknownRemoval => "unknown-removal",
            Self::ToldTwice => "told-twice",
        }
    }

    /// Whether it hides a prefix that could have been credited.
    pub fn hides_prefixes(self) -> bool {
        !matches!(self, Self::UnknownRemoval | Self::ToldTwice)
    }
}

/// Blocks that were indexed, and those that were not, by cause. They only rise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub applied: u64,
    skipped: [u64; Cause::ALL.len()],
}

impl Counts {
    pub fn skipped(&self, cause: Cause) -> u64 {
        self.skipped[cause as usize]
    }

    /// Of the causes that hide prefixes.
    pub fn hidden(&self) -> u64 {
        let hiding = Cause::ALL.iter().filter(|cause| cause.hides_prefixes());
        hiding.map(|cause| self.skipped(*cause)).sum()
    }

    fn skip(&mut self, cause: Cause, blocks: usize) {
        // An event that says nothing is still one.
        self.skipped[cause as usize] += blocks.max(1) as u64;
    }
}

/// What an index is made for.
#[derive(Clone, Debug)]
pub struct Settings {
    pub key: HashKey,
    pub kv_identity: String,
    /// Tokens of a block.
    pub block_size: u32,
    /// Blocks of the engine's device memory.
    pub blocks: usize,
    /// Revisions of adapters by name: they are in the hashes of blocks that were made with them.
    pub adapters: HashMap<String, String>,
}

/// What a block follows.
enum Above {
    Known(BlockHash),
    /// Nobody told its tokens, or not those of all before it.
    Untold(EngineHash),
}

/// Copies of a block by where they are.
type Copies = Vec<(Place, u32)>;

#[derive(Debug)]
struct Held {
    hash: BlockHash,
    copies: Copies,
}

/// The index.
#[derive(Debug)]
pub struct Index {
    settings: Settings,
    hasher: BlockHasher,
    held: HashMap<EngineHash, Held>,
    /// How many of the engine's hashes stand for one of ours: two where an engine names one block in two ways.
    names: HashMap<BlockHash, u32>,
    orphans: Orphans,
    /// Groups that hold a window or a state.
    partial: HashSet<u32>,
    /// Copies in the engine's device memory.
    on_device: usize,
    /// With more of them than this, some were told twice.
    believable: usize,
    counts: Counts,
    log: EventLog,
}

/// An index holds at most so many blocks for each block of the engine's device memory: what host memory and disks hold comes on top
/// of it.
const LARGEST_SHARE: usize = 64;
/// And at least so many.
const SMALLEST_BOUND: usize = 1 << 16;

impl Index {
    /// `event_capacity` bounds what watchers can resume from, in hashes.
    pub fn new(settings: Settings, event_capacity: usize) -> Self {
        Self {
            hasher: BlockHasher::new(&settings.key, &settings.kv_identity, ""),
            orphans: Orphans::new(settings.blocks),
            believable: settings.blocks,
            settings,
            held: HashMap::new(),
            names: HashMap::new(),
            partial: HashSet::new(),
            on_device: 0,
            counts: Counts::default(),
            log: EventLog::new(event_capacity),
        }
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Blocks that can be hit.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Blocks that wait for their parent.
    pub fn waiting(&self) -> usize {
        self.orphans.len()
    }

    /// All that can be hit, and the number of the last change in it.
    pub fn snapshot(&mut self) -> (u64, Vec<BlockHash>) {
        (self.log.see(), self.names.keys().copied().collect())
    }

    pub fn since(&mut self, sequence: u64) -> EventsSince {
        self.log.since(sequence)
    }

    /// Number of the last change.
    pub fn last(&self) -> u64 {
        self.log.last()
    }

    /// Takes in one event. False: the index had to be given up, since it has grown beyond all memory the engine can have.
    pub fn apply(&mut self, event: &Event) -> bool {
        match event {
            Event::Stored(stored) => self.store(stored),
            Event::Removed(removed) => self.remove(removed),
            Event::Cleared => {
                self.counts.applied += 1;
                self.clear();
            }
            Event::Unread => self.counts.skip(Cause::Unread, 1),
        }
        let bound = SMALLEST_BOUND.max(self.settings.blocks.saturating_mul(LARGEST_SHARE));
        if self.held.len() <= bound {
            return true;
        }
        self.clear();
        false
    }

    /// Forgets all blocks: the engine dropped them, or nobody knows any more what it holds.
    pub fn clear(&mut self) {
        self.held.clear();
        self.names.clear();
        self.orphans.clear();
        self.on_device = 0;
        self.believable = self.settings.blocks;
        self.log.push(CacheChange::Cleared);
    }

    fn store(&mut self, stored: &Stored) {
        let blocks = stored.hashes.len();
        let size = self.settings.block_size as usize;
        if stored.kind == GroupKind::Partial {
            self.partial.insert(stored.place.group);
            return self.counts.skip(Cause::GroupKind, blocks);
        }
        if stored.place.remote {
            return self.counts.skip(Cause::Remote, blocks);
        }
        if stored.tokens.is_empty() && stored.block_size == 0 {
            return self.moved(stored);
        }
        if stored.block_size as usize != size {
            return self.counts.skip(Cause::BlockSize, blocks);
        }
        if stored.tokens.len() != blocks * size || blocks == 0 {
            return self.counts.skip(Cause::Lengths, blocks);
        }
        self.chain(stored);
        if self.on_device > self.believable {
            self.count_once();
        }
    }

    fn root(&self, salt: Option<&str>) -> BlockHash {
        match salt {
            None | Some("") => self.hasher.root(),
            Some(salt) => {
                BlockHasher::new(&self.settings.key, &self.settings.kv_identity, salt).root()
            }
        }
    }

    fn chain(&mut self, stored: &Stored) {
        let adapter = self.adapter(stored.adapter.as_deref());
        let size = self.settings.block_size as usize;
        let mut above = match stored.parent {
            None => Above::Known(self.root(stored.salt.as_deref())),
            Some(parent) => self
                .held
                .get(&parent)
                .map_or(Above::Untold(parent), |held| Above::Known(held.hash)),
        };
        let copies = [(stored.place, 1)];
        let blocks = stored.hashes.iter().zip(stored.tokens.chunks_exact(size));
        for (index, (name, tokens)) in blocks.enumerate() {
            let extra = shaped_by(&adapter, stored.extra.get(index));
            above = match above {
                Above::Known(parent) => {
                    let hash = self.hasher.child(parent, tokens, &extra);
                    Above::Known(self.hold(*name, hash, &copies))
                }
                Above::Untold(parent) => {
                    // Its parent may have gone since, and it has not.
                    if let Some(hash) = self.held.get(name).map(|held| held.hash) {
                        above = Above::Known(self.hold(*name, hash, &copies));
                        continue;
                    }
                    let orphan = Orphan {
                        parent,
                        tokens: tokens.into(),
                        extra,
                        copies: copies.to_vec(),
                    };
                    let kept = self.orphans.keep(*name, orphan);
                    let cause = if kept {
                        Cause::Orphan
                    } else {
                        Cause::OrphansFull
                    };
                    self.counts.skip(cause, 1);
                    Above::Untold(*name)
                }
            };
        }
    }

    /// A copy of known blocks was made elsewhere: the event does not say their tokens again.
    fn moved(&mut self, stored: &Stored) {
        for name in &stored.hashes {
            if let Some(held) = self.held.get_mut(name) {
                add(&mut held.copies, stored.place, 1);
                self.on_device += usize::from(stored.place.medium == Medium::Device);
                self.counts.applied += 1;
            } else if !self.orphans.copied(*name, stored.place) {
                self.counts.skip(Cause::Placeholder, 1);
            }
        }
    }

    /// Adds copies of a block, and of the orphans that waited for it. Gives the block's hash.
    fn hold(&mut self, name: EngineHash, hash: BlockHash, copies: &[(Place, u32)]) -> BlockHash {
        let (first, mut own) = (name, hash);
        let mut stored = Vec::new();
        let mut found = vec![(name, hash, copies.to_vec())];
        while let Some((name, hash, mut copies)) = found.pop() {
            self.counts.applied += 1;
            // It may have waited itself, under a parent that was never told.
            if let Some(orphan) = self.orphans.take(name) {
                copies.extend(orphan.copies);
            }
            let held = self.held.entry(name).or_insert_with(|| {
                let names = self.names.entry(hash).or_insert(0);
                *names += 1;
                if *names == 1 {
                    stored.push(hash);
                }
                Held {
                    hash,
                    copies: Vec::new(),
                }
            });
            for (place, count) in copies {
                add(&mut held.copies, place, count);
                if place.medium == Medium::Device {
                    self.on_device += count as usize;
                }
            }
            // What an engine calls by one name is one block, whatever a second event says of its tokens.
            let hash = held.hash;
            if name == first {
                own = hash;
            }
            for (child, orphan) in self.orphans.children(name) {
                let below = self.hasher.child(hash, &orphan.tokens, &orphan.extra);
                found.push((child, below, orphan.copies));
            }
        }
        if !stored.is_empty() {
            self.log.push(CacheChange::Stored(stored));
        }
        own
    }

    fn remove(&mut self, removed: &Removed) {
        let mut gone = Vec::new();
        for name in &removed.hashes {
            let Some(held) = self.held.get_mut(name) else {
                let known = self.orphans.removed(*name, removed.place);
                if !known && self.partial.contains(&removed.place.group) {
                    self.counts.skip(Cause::GroupKind, 1);
                } else if !known {
                    self.counts.skip(Cause::UnknownRemoval, 1);
                }
                continue;
            };
            if !subtract(&mut held.copies, removed.place) {
                self.counts.skip(Cause::UnknownRemoval, 1);
                continue;
            }
            self.on_device -= usize::from(removed.place.medium == Medium::Device);
            self.counts.applied += 1;
            if !held.copies.is_empty() {
                continue;
            }
            let hash = held.hash;
            self.held.remove(name);
            if let Some(names) = self.names.get_mut(&hash) {
                *names -= 1;
                if *names == 0 {
                    self.names.remove(&hash);
                    gone.push(hash);
                }
            }
        }
        if !gone.is_empty() {
            self.log.push(CacheChange::Removed(gone));
        }
    }

    /// More copies than the device has blocks: an engine that is asked to may tell again what it has long told. Which of them were
    /// real is not known, and a copy that never was would never be removed: from here on each block is there once. This looks at
    /// every block, so it is done again only once there are a tenth more.
    fn count_once(&mut self) {
        let mut copies = 0;
        for held in self.held.values_mut() {
            for (place, count) in &mut held.copies {
                if place.medium == Medium::Device {
                    *count = 1;
                    copies += 1;
                }
            }
        }
        if copies < self.on_device {
            self.counts.skip(Cause::ToldTwice, self.on_device - copies);
        }
        self.on_device = copies;
        self.believable = self.settings.blocks.max(copies + copies / 10);
    }

    /// What a block that an adapter shaped adds to its hash.
    fn adapter(&self, name: Option<&str>) -> Vec<u8> {
        let Some(name) = name else {
            return Vec::new();
        };
        let revision = self.settings.adapters.get(name);
        format!("adapter {name} {}", revision.map_or("", String::as_str)).into_bytes()
    }
}

fn shaped_by(adapter: &[u8], extra: Option<&Vec<u8>>) -> Vec<u8> {
    let extra = extra.map_or(&[][..], Vec::as_slice);
    [adapter, extra].concat()
}

fn add(copies: &mut Copies, place: Place, count: u32) {
    match copies.iter_mut().find(|(known, _)| *known == place) {
        Some((_, known)) => *known = known.saturating_add(count),
        None => copies.push((place, count)),
    }
}

/// False: there is no copy there.
fn subtract(copies: &mut Copies, place: Place) -> bool {
    let Some(index) = copies.iter().position(|(known, _)| *known == place) else {
        return false;
    };
    copies[index].1 -= 1;
    if copies[index].1 == 0 {
        copies.swap_remove(index);
    }
    true
}

#[cfg(test)]
mod tests;

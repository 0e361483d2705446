//! Blocks whose parent nobody told, until somebody does.
//!
//! Their hashes cannot be made: a hash names a block and all before it. Bounded: an engine has no more blocks than its memory, so
//! what is beyond that is of a history that was missed.

use std::collections::HashMap;

use super::{Copies, add, subtract};
use crate::beside::events::{EngineHash, Place};

#[derive(Debug)]
pub(super) struct Orphan {
    pub(super) parent: EngineHash,
    pub(super) tokens: Box<[u32]>,
    pub(super) extra: Vec<u8>,
    pub(super) copies: Copies,
}

#[derive(Debug)]
pub(super) struct Orphans {
    bound: usize,
    blocks: HashMap<EngineHash, Orphan>,
    below: HashMap<EngineHash, Vec<EngineHash>>,
}

impl Orphans {
    pub(super) fn new(bound: usize) -> Self {
        Self {
            bound,
            blocks: HashMap::new(),
            below: HashMap::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn clear(&mut self) {
        self.blocks.clear();
        self.below.clear();
    }

    /// False: there is no room.
    pub(super) fn keep(&mut self, name: EngineHash, orphan: Orphan) -> bool {
        if let Some(known) = self.blocks.get_mut(&name) {
            for (place, count) in orphan.copies {
                add(&mut known.copies, place, count);
            }
            return true;
        }
        if self.blocks.len() >= self.bound {
            return false;
        }
        self.below.entry(orphan.parent).or_default().push(name);
        self.blocks.insert(name, orphan);
        true
    }

    /// Another copy of one was made. False: it is none.
    pub(super) fn copied(&mut self, name: EngineHash, place: Place) -> bool {
        let known = self.blocks.get_mut(&name);
        known.is_some_and(|known| {
            add(&mut known.copies, place, 1);
            true
        })
    }

    /// A copy of one is gone. False: there was none.
    pub(super) fn removed(&mut self, name: EngineHash, place: Place) -> bool {
        let Some(known) = self.blocks.get_mut(&name) else {
            return false;
        };
        let was = subtract(&mut known.copies, place);
        if known.copies.is_empty() {
            self.take(name);
        }
        was
    }

    /// Takes one out. Those below it stay.
    pub(super) fn take(&mut self, name: EngineHash) -> Option<Orphan> {
        let orphan = self.blocks.remove(&name)?;
        if let Some(siblings) = self.below.get_mut(&orphan.parent) {
            siblings.retain(|sibling| *sibling != name);
            if siblings.is_empty() {
                self.below.remove(&orphan.parent);
            }
        }
        Some(orphan)
    }

    /// Takes out all whose parent this is.
    pub(super) fn children(&mut self, parent: EngineHash) -> Vec<(EngineHash, Orphan)> {
        let names = self.below.remove(&parent).unwrap_or_default();
        names
            .into_iter()
            .filter_map(|name| Some((name, self.blocks.remove(&name)?)))
            .collect()
    }
}

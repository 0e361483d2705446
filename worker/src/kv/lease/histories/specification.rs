//! What a lease is by the protocol: its phases, and what each message is answered in each.

use super::DURATION;
use crate::kv::lease::Gone;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Never opened, or its tombstone is gone.
    Unknown,
    Live,
    Ended(Gone),
}

/// What the specification knows of a lease id.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) phase: Phase,
    pub(super) generation: u64,
    pub(super) run: usize,
    pub(super) expires_at: u64,
    pub(super) skip: u32,
    pub(super) blocks: u32,
    pub(super) sealed: bool,
    /// Transfer, worker, incarnation.
    pub(super) claim: Option<(usize, usize, u64)>,
    /// Who completed it.
    pub(super) completed: Option<usize>,
    /// Of the tombstone.
    pub(super) until: u64,
}

impl Spec {
    pub(super) fn alive(&self, now: u64) -> Result<(), Gone> {
        match self.phase {
            Phase::Live if now >= self.expires_at => Err(Gone::Expired),
            Phase::Live => Ok(()),
            Phase::Ended(reason) => Err(reason),
            Phase::Unknown => Err(Gone::Unknown),
        }
    }

    pub(super) fn named(&self, generation: u64, now: u64) -> Result<(), Gone> {
        self.alive(now)?;
        if self.generation == generation {
            Ok(())
        } else {
            Err(Gone::WrongGeneration)
        }
    }

    pub(super) fn reads(&self, generation: u64, transfer: usize, now: u64) -> Result<(), Gone> {
        self.named(generation, now)?;
        match self.claim {
            None => Err(Gone::NotClaimed),
            Some((claimed, _, _)) if claimed != transfer => Err(Gone::Claimed),
            Some(_) => Ok(()),
        }
    }

    pub(super) fn end(&mut self, reason: Gone, now: u64) {
        self.phase = Phase::Ended(reason);
        self.until = now + 2 * DURATION;
    }
}

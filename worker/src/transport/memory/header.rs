//! The header beside a piece, as a sequence lock: whoever reads it sees all of one header or none.
//!
//! The writer is the arena's owner. Before it changes a piece it retracts the header; when the piece is whole it publishes one. A
//! reader looks before and after its copy: the same sequence number both times says that nobody changed the piece in between. The
//! order of stores and loads is that of H.-J. Boehm, "Can seqlocks get along with programming language memory models?", 2012;
//! `orders` checks that each of them is needed and that together they are enough.

use baton_protocol::header::BlockHeader;

use super::atomic::{AtomicU64, Ordering, fence};

/// Words of an encoded header.
const WORDS: usize = BlockHeader::WIRE_BYTES / 8;

/// A header in shared memory. Zero pages are cells without one.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Cell {
    /// Even and not zero: a header is published. Never the same twice.
    sequence: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// A published header with the number that it has as long as the piece is untouched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    sequence: u64,
    /// What it says.
    pub header: BlockHeader,
}

impl Cell {
    /// The piece will be changed: from now on it has no header.
    pub fn retract(&self) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        if sequence.is_multiple_of(2) {
            self.sequence.store(sequence + 1, Ordering::Relaxed);
        }
        // No write to the piece is seen before this.
        fence(Ordering::Release);
    }

    /// The piece is whole. Does nothing when it has this header already: readers may be on it.
    pub fn publish(&self, header: &BlockHeader) {
        if self.read().is_some_and(|seen| seen.header == *header) {
            return;
        }
        self.retract();
        let encoded = header.encode();
        for (cell, word) in self.words.iter().zip(encoded.as_chunks::<8>().0) {
            cell.store(u64::from_le_bytes(*word), Ordering::Relaxed);
        }
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence + 1, Ordering::Release);
    }

    /// The header, if one is published and not just being changed. What a reader does after this is not seen to happen before.
    pub fn read(&self) -> Option<Seen> {
        let sequence = self.sequence.load(Ordering::Acquire);
        if sequence == 0 || !sequence.is_multiple_of(2) {
            return None;
        }
        let mut encoded = [0; BlockHeader::WIRE_BYTES];
        for (word, bytes) in self.words.iter().zip(encoded.as_chunks_mut::<8>().0) {
            *bytes = word.load(Ordering::Relaxed).to_le_bytes();
        }
        let header = BlockHeader::decode(&encoded);
        let seen = Seen { sequence, header };
        self.still(&seen).then_some(seen)
    }

    /// Whether nothing has changed since `seen`. What a reader did before this is not seen to happen after.
    pub fn still(&self, seen: &Seen) -> bool {
        fence(Ordering::Acquire);
        self.sequence.load(Ordering::Relaxed) == seen.sequence
    }
}

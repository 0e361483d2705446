//! Received bytes go straight into the reserved blocks; each is verified when it is whole.

use std::io;
use std::sync::Arc;

use baton_protocol::failure::HandoffFailure;
use baton_protocol::hash::BlockHash;
use tokio::time::Instant;

use super::verify::{ChecksumMode, Expected, verify};
use crate::kv::store::{BlockId, BlockStore};
use crate::kv::{Proof, Reservation};
use crate::transport::{Arrival, BlockSink};

/// The reserved blocks as a transport sees them. Holds them by number: whoever owns it keeps the reservation meanwhile.
#[derive(Debug)]
pub(super) struct ReservedSink {
    store: Arc<BlockStore>,
    layout: u64,
    mode: ChecksumMode,
    /// Where the blocks from `first` to the last go.
    blocks: Vec<BlockId>,
    /// What each must be: one for each of `blocks`.
    expected: Vec<Expected>,
    first: u32,
    /// What is known of the verified ones, in order.
    verified: Vec<Proof>,
    pub(super) sealed: Option<(u32, Instant)>,
    /// Those of `verified` that had come before the seal was heard of. The prompt may have been computed by then, and its last blocks
    /// not published.
    pub(super) early: u32,
    pub(super) last_verified: Option<Instant>,
}

impl ReservedSink {
    /// A place for every block of `tokens` that the reservation does not have yet.
    pub(super) fn new(reservation: &Reservation, tokens: &[u32], mode: ChecksumMode) -> Self {
        let pool = reservation.pool();
        let geometry = pool.store().geometry();
        let first = reservation.completed_blocks();
        let end = geometry.blocks_for(tokens.len());
        let hashes = pool.expected_hashes(reservation, tokens);
        let expected = (first..end)
            .map(|index| {
                let rest = tokens.len() - index * geometry.block_size;
                Expected {
                    hash: hashes.get(index - first).copied().unwrap_or(BlockHash(0)),
                    fill: rest.min(geometry.block_size) as u32,
                    layout: pool.layout(),
                    last: index + 1 == end,
                }
            })
            .collect();
        Self {
            store: Arc::clone(pool.store()),
            layout: pool.layout(),
            mode,
            blocks: reservation
                .blocks()
                .get(first..end)
                .unwrap_or_default()
                .to_vec(),
            expected,
            first: first as u32,
            verified: Vec::new(),
            sealed: None,
            early: 0,
            last_verified: None,
        }
    }

    /// Has the reservation room for everything that is to come?
    pub(super) fn fits(&self) -> bool {
        self.blocks.len() == self.expected.len()
    }

    pub(super) fn layout(&self) -> u64 {
        self.layout
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.store.block_bytes()
    }

    /// Index in the whole sequence of the next block due.
    pub(super) fn due(&self) -> u32 {
        self.first + self.verified.len() as u32
    }

    /// Index of the block after the last one to come.
    pub(super) fn end(&self) -> u32 {
        self.first + self.expected.len() as u32
    }

    pub(super) fn verified(&self) -> &[Proof] {
        &self.verified
    }

    fn position(&self, index: u32) -> Result<usize, HandoffFailure> {
        let position = self.verified.len();
        if index != self.due() || position >= self.blocks.len() {
            return Err(HandoffFailure::ProtocolError);
        }
        Ok(position)
    }
}

impl BlockSink for ReservedSink {
    fn place(
        &mut self,
        index: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<io::Result<usize>, HandoffFailure> {
        let position = self.position(index)?;
        Ok(fill(&mut self.store.write(self.blocks[position])))
    }

    fn wants_checksum(&self, index: u32) -> bool {
        self.position(index).is_ok_and(|position| {
            let last = self.expected[position].last;
            self.mode.covers(index, last)
        })
    }

    fn arrived(&mut self, arrival: &Arrival) -> Result<(), HandoffFailure> {
        let position = self.position(arrival.index)?;
        let proof = verify(
            arrival,
            &self.expected[position],
            self.mode,
            &self.store.read(self.blocks[position]),
        )?;
        self.verified.push(proof);
        self.last_verified = Some(Instant::now());
        Ok(())
    }

    fn sealed(&mut self, end: u32) {
        if self.sealed.is_none() {
            self.sealed = Some((end, Instant::now()));
            self.early = self.verified.len() as u32;
        }
    }
}

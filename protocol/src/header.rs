//! What lies beside each block's data and is verified by whoever reads it.

use crate::hash::BlockHash;
use crate::ids::Generation;

/// Header of one block. A reader uses the data only when every field is what it was promised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockHeader {
    /// Zero for the partly filled last block: it has no hash and is never cached.
    pub hash: BlockHash,
    /// Rises at every reuse of the block. What was promised is in the lease's manifest.
    pub generation: Generation,
    /// First eight bytes of the layout's digest.
    pub layout: u64,
    /// [`crate::checksum::checksum`] over all bytes of the block: what lies behind
    /// the filled tokens is moved and checked with them, since a layout need not keep them apart.
    pub checksum: u64,
    /// Tokens in the block, 1 ..= block size.
    pub fill: u32,
}

impl BlockHeader {
    pub const WIRE_BYTES: usize = 48;

    pub fn encode(&self) -> [u8; Self::WIRE_BYTES] {
        let mut bytes = [0; Self::WIRE_BYTES];
        bytes[..16].copy_from_slice(&self.hash.to_wire());
        bytes[16..24].copy_from_slice(&self.generation.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.layout.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.checksum.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.fill.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; Self::WIRE_BYTES]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        Self {
            hash: BlockHash(u128::from(word(0)) | u128::from(word(8)) << 64),
            generation: Generation(word(16)),
            layout: word(24),
            checksum: word(32),
            fill: (word(40) & u64::from(u32::MAX)) as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_header_round_trips(hash: u128, generation: u64, layout: u64, checksum: u64, fill: u32) {
            let header = BlockHeader { hash: BlockHash(hash), generation: Generation(generation), layout, checksum, fill };
            prop_assert_eq!(BlockHeader::decode(&header.encode()), header);
        }
    }
}

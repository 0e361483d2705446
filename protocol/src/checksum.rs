//! Checksum of a block's bytes: a multilinear hash over 64-bit words, in two levels.
//!
//! `h(w) = (Σ key[i] · w[i] mod 2¹²⁸) div 2⁶⁴` with 128-bit keys gives 64 bits and two different inputs collide with probability 2⁻⁶⁴
//! over the keys (Lemire and Kaser, "Strongly universal string hashing is fast", 2014, section 2). It is taken over each chunk of
//! [`CHUNK_WORDS`] words, then over the chunks' hashes and the length. Terms of a sum may be added in any order, so a GPU kernel
//! with a block of threads per chunk and this loop give the same value; and the keys of a chunk stay in the nearest cache.
//!
//! The keys are fixed and public: this guards against corruption and confusion. The keyed block hash and the lease guard against
//! intent.

use std::sync::LazyLock;

/// Words of a chunk: its keys take 8 KiB.
pub const CHUNK_WORDS: usize = 512;
/// Bytes of a chunk.
pub const CHUNK_BYTES: usize = CHUNK_WORDS * 8;

/// Keys of the words of a chunk.
static WORD_KEYS: LazyLock<[u128; CHUNK_WORDS]> =
    LazyLock::new(|| std::array::from_fn(|index| key(index as u64)));

/// 128 bits from an index: two outputs of SplitMix64 (Steele, Lea and Flood, 2014).
fn key(index: u64) -> u128 {
    let half = |step: u64| {
        let mut mixed = step.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        u128::from(mixed ^ (mixed >> 31))
    };
    half(index.wrapping_mul(2).wrapping_add(1)) << 64 | half(index.wrapping_mul(2).wrapping_add(2))
}

/// Keys of chunk hashes, apart from those of words: the same function far away.
fn chunk_key(index: u64) -> u128 {
    key(index.wrapping_add(1 << 62))
}

/// Keys of the words of a chunk, for an implementation that multiplies in another way.
pub fn word_keys() -> &'static [u128; CHUNK_WORDS] {
    &WORD_KEYS
}

/// Hash of one chunk of at most [`CHUNK_BYTES`]. A last word that is not full is padded with zeros.
///
/// # Panics
/// When there are more bytes.
pub fn chunk_hash(chunk: &[u8]) -> u64 {
    assert!(chunk.len() <= CHUNK_BYTES, "a chunk is at most 4096 bytes");
    let keys = word_keys();
    let (words, rest) = chunk.as_chunks::<8>();
    let mut sum = 0u128;
    for (word, key) in words.iter().zip(keys) {
        sum = sum.wrapping_add(key.wrapping_mul(u128::from(u64::from_le_bytes(*word))));
    }
    if !rest.is_empty() {
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        // A chunk that ends in a partial word has fewer than `CHUNK_WORDS` whole ones.
        sum =
            sum.wrapping_add(keys[words.len()].wrapping_mul(u128::from(u64::from_le_bytes(last))));
    }
    (sum >> 64) as u64
}

/// The second level: chunk hashes, in order, to the checksum of all bytes.
#[derive(Clone, Copy, Debug)]
pub struct Total {
    sum: u128,
    next: u64,
}

impl Total {
    /// For `length` bytes in all.
    pub fn new(length: usize) -> Self {
        Self {
            sum: chunk_key(0).wrapping_mul(length as u128),
            next: 1,
        }
    }

    /// Adds the hash of the next chunk. All but the last are of [`CHUNK_BYTES`].
    pub fn add(&mut self, hash: u64) {
        self.sum = self
            .sum
            .wrapping_add(chunk_key(self.next).wrapping_mul(u128::from(hash)));
        self.next += 1;
    }

    /// The checksum.
    pub fn finish(self) -> u64 {
        (self.sum >> 64) as u64
    }
}

/// Checksum of `bytes`. The length is part of it.
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut total = Total::new(bytes.len());
    for chunk in bytes.chunks(CHUNK_BYTES) {
        total.add(chunk_hash(chunk));
    }
    total.finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_values_stay() {
        // Recorded from this function once: the format is shared with other processes and, later, with a GPU kernel.
        let long: Vec<u8> = (0..10_000u32).map(|byte| (byte % 251) as u8).collect();
        assert_eq!(checksum(b""), 0);
        assert_eq!(checksum(b"baton"), 8_938_786_374_282_190_779);
        assert_eq!(checksum(&long), 14_980_928_172_443_910_203);
    }

    #[test]
    fn zeros_of_another_length_are_another_block() {
        assert_ne!(checksum(b"\0"), checksum(b"\0\0"));
        assert_ne!(checksum(&[0; 8]), checksum(&[0; 16]));
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_seen(mut bytes in prop::collection::vec(any::<u8>(), 1..9000), at in any::<prop::sample::Index>(), bit in 0..8) {
            let before = checksum(&bytes);
            let at = at.index(bytes.len());
            bytes[at] ^= 1u8 << bit;
            prop_assert_ne!(before, checksum(&bytes));
        }

        #[test]
        fn swapped_words_are_seen(bytes in prop::collection::vec(any::<u8>(), 16..9000)) {
            let mut swapped = bytes.clone();
            let (first, second) = swapped[..16].split_at_mut(8);
            first.swap_with_slice(second);
            prop_assert_eq!(bytes[..8] == bytes[8..16], checksum(&bytes) == checksum(&swapped));
        }
    }
}

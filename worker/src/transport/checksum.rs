//! The checksum of a block as fast as memory is: the same value as [`baton_protocol::checksum`], computed while bytes are copied.
//!
//! Where the processor has 52-bit multiply-add on 512-bit vectors (IFMA: Intel from Ice Lake on, AMD from Zen 4 on), eight words are
//! taken at a time: key and word are cut into limbs of 52 bits, and the partial products of one weight are summed in one register.
//! `key·word mod 2¹²⁸` with key = k₀ + k₁2⁵² + k₂2¹⁰⁴ and word = w₀ + w₁2⁵² has the weights 2⁰ (k₀w₀), 2⁵² (k₁w₀ + k₀w₁) and 2¹⁰⁴
//! (k₂w₀ + k₁w₁); what lies above 2¹²⁸ is dropped. Elsewhere the portable loop of the protocol is used, one chunk at a time.
#![allow(unsafe_code)]

use baton_protocol::checksum::{CHUNK_BYTES, Total, chunk_hash};

/// Checksum of `bytes`.
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut total = Total::new(bytes.len());
    add(&mut total, bytes);
    total.finish()
}

/// Adds whole chunks, and what is left of the last.
fn add(total: &mut Total, bytes: &[u8]) {
    let chunks = bytes.chunks(CHUNK_BYTES);
    #[cfg(target_arch = "x86_64")]
    if ifma::usable() {
        for chunk in chunks {
            // SAFETY: `usable` has just said that the instructions are there.
            total.add(unsafe { ifma::hash(chunk) });
        }
        return;
    }
    for chunk in chunks {
        total.add(chunk_hash(chunk));
    }
}

/// The checksum of bytes that come piece by piece, each summed while it is still in the nearest cache.
#[derive(Debug)]
pub(super) struct Growing {
    total: Total,
    summed: usize,
}

impl Growing {
    /// Of `length` bytes in all.
    pub(super) fn new(length: usize) -> Self {
        Self {
            total: Total::new(length),
            summed: 0,
        }
    }

    /// `bytes` are all that have come, from the first on.
    pub(super) fn advance(&mut self, bytes: &[u8]) {
        let whole = bytes.len() / CHUNK_BYTES * CHUNK_BYTES;
        self.add(bytes.get(self.summed..whole).unwrap_or_default());
    }

    /// `bytes` are all of them.
    pub(super) fn finish(mut self, bytes: &[u8]) -> u64 {
        self.add(bytes.get(self.summed..).unwrap_or_default());
        self.total.finish()
    }

    fn add(&mut self, bytes: &[u8]) {
        add(&mut self.total, bytes);
        self.summed += bytes.len();
    }
}

/// Copies `target.len()` bytes from `source` and returns the checksum of what was written to `target`.
///
/// # Safety
/// `source` is valid for reads of `target.len()` bytes and does not overlap `target`. Another process may write to it meanwhile:
/// then the bytes and the checksum are of no use, and the caller must find that out by other means before it uses them.
pub(super) unsafe fn copy(source: *const u8, target: &mut [u8]) -> u64 {
    let mut total = Total::new(target.len());
    let mut at = 0;
    #[cfg(target_arch = "x86_64")]
    let ifma = ifma::usable();
    for chunk in target.chunks_mut(CHUNK_BYTES) {
        // SAFETY: `at + chunk.len()` is at most `target.len()`, for which the caller vouches.
        let from = unsafe { source.add(at) };
        at += chunk.len();
        #[cfg(target_arch = "x86_64")]
        if ifma {
            // SAFETY: the instructions are there; `from` is valid for `chunk.len()` bytes, as above.
            total.add(unsafe { ifma::copy(from, chunk) });
            continue;
        }
        // SAFETY: as above; the regions do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, chunk.as_mut_ptr(), chunk.len()) };
        // What was written is hashed, not what may lie at the source by now.
        total.add(chunk_hash(chunk));
    }
    total.finish()
}

#[cfg(target_arch = "x86_64")]
mod ifma {
    use std::arch::x86_64::{
        __m512i, _mm512_add_epi64, _mm512_loadu_si512, _mm512_madd52hi_epu64,
        _mm512_madd52lo_epu64, _mm512_reduce_add_epi64, _mm512_setzero_si512, _mm512_srli_epi64,
        _mm512_storeu_si512,
    };
    use std::sync::LazyLock;

    use baton_protocol::checksum::{CHUNK_BYTES, CHUNK_WORDS, chunk_hash, word_keys};

    /// Bytes and words of a vector.
    const VECTOR: usize = 64;
    const LANES: usize = VECTOR / 8;
    const LIMB: u32 = 52;

    /// Aligned as vectors are, so that none straddles two cache lines.
    #[repr(align(64))]
    struct Limbs([[u64; CHUNK_WORDS]; 3]);

    /// The keys in three limbs each.
    static LIMBS: LazyLock<Limbs> = LazyLock::new(|| {
        let keys = word_keys();
        let limb = |number: u32| {
            std::array::from_fn(|index| {
                ((keys[index] >> (number * LIMB)) & ((1 << LIMB) - 1)) as u64
            })
        };
        Limbs([limb(0), limb(1), limb(2)])
    });

    pub(super) fn usable() -> bool {
        // The standard library asks the processor once and remembers.
        is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512ifma")
    }

    /// Hash of a chunk.
    ///
    /// # Safety
    /// The processor has AVX-512F and IFMA.
    #[target_feature(enable = "avx512f,avx512ifma")]
    pub(super) unsafe fn hash(chunk: &[u8]) -> u64 {
        if chunk.is_empty() || !chunk.len().is_multiple_of(VECTOR) || chunk.len() > CHUNK_BYTES {
            return chunk_hash(chunk);
        }
        // SAFETY: every address is `VECTOR` bytes or more before the end of `chunk`.
        unsafe { vectors(chunk.len(), |at| load(chunk.as_ptr().add(at))) }
    }

    /// Copies a chunk and hashes what was copied.
    ///
    /// # Safety
    /// As for [`hash`]; `source` is valid for reads of `target.len()` bytes and does not overlap it.
    #[target_feature(enable = "avx512f,avx512ifma")]
    pub(super) unsafe fn copy(source: *const u8, target: &mut [u8]) -> u64 {
        let length = target.len();
        let whole = length != 0 && length.is_multiple_of(VECTOR) && length <= CHUNK_BYTES;
        if !whole || !source.addr().is_multiple_of(VECTOR) {
            // SAFETY: by this function's contract.
            unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), length) };
            return chunk_hash(target);
        }
        let into = target.as_mut_ptr();
        // SAFETY: every address is `VECTOR` bytes or more before the end of both regions, and those of the source are aligned.
        // Volatile: each word is loaded once, so that what is hashed is what is stored, whoever writes to the source meanwhile.
        unsafe {
            vectors(length, |at| {
                let words = source.add(at).cast::<__m512i>().read_volatile();
                _mm512_storeu_si512(into.add(at).cast(), words);
                words
            })
        }
    }

    /// # Safety
    /// AVX-512F is there; `at` is valid for reads of [`VECTOR`] bytes.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load(at: *const u8) -> __m512i {
        // SAFETY: by this function's contract.
        unsafe { _mm512_loadu_si512(at.cast()) }
    }

    /// Hash of `length` bytes, a multiple of [`VECTOR`] and at most [`CHUNK_BYTES`], which `words` gives by their offset.
    ///
    /// # Safety
    /// AVX-512F and IFMA are there; `words` may be called with every multiple of [`VECTOR`] below `length`.
    #[target_feature(enable = "avx512f,avx512ifma")]
    #[inline]
    unsafe fn vectors(length: usize, words: impl Fn(usize) -> __m512i) -> u64 {
        let Limbs(limbs) = &*LIMBS;
        let zero = _mm512_setzero_si512();
        // One register for each product, so that none waits for another: a sum has at most 64 summands of 52 bits.
        let mut low = zero;
        let mut middle = [zero; 3];
        let mut high = [zero; 4];
        let mut at = 0;
        while at < length {
            let word = words(at);
            // Multiplication takes the low 52 bits of each lane by itself.
            let upper = _mm512_srli_epi64::<LIMB>(word);
            let index = at / 8;
            debug_assert!(index + LANES <= CHUNK_WORDS);
            // SAFETY: `index + LANES` is at most `length / 8`, which is at most `CHUNK_WORDS`.
            let [k0, k1, k2] = unsafe {
                [
                    load(limbs[0].as_ptr().add(index).cast()),
                    load(limbs[1].as_ptr().add(index).cast()),
                    load(limbs[2].as_ptr().add(index).cast()),
                ]
            };
            low = _mm512_madd52lo_epu64(low, k0, word);
            middle[0] = _mm512_madd52hi_epu64(middle[0], k0, word);
            middle[1] = _mm512_madd52lo_epu64(middle[1], k1, word);
            middle[2] = _mm512_madd52lo_epu64(middle[2], k0, upper);
            high[0] = _mm512_madd52hi_epu64(high[0], k1, word);
            high[1] = _mm512_madd52hi_epu64(high[1], k0, upper);
            high[2] = _mm512_madd52lo_epu64(high[2], k2, word);
            high[3] = _mm512_madd52lo_epu64(high[3], k1, upper);
            at += VECTOR;
        }
        let middle = _mm512_add_epi64(_mm512_add_epi64(middle[0], middle[1]), middle[2]);
        let high = _mm512_add_epi64(
            _mm512_add_epi64(high[0], high[1]),
            _mm512_add_epi64(high[2], high[3]),
        );
        // Eight lanes of at most 2⁶⁰: no carry is lost.
        let sum = |lanes| u128::from(_mm512_reduce_add_epi64(lanes).cast_unsigned());
        let total = sum(low)
            .wrapping_add(sum(middle) << LIMB)
            .wrapping_add(sum(high) << (2 * LIMB));
        (total >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::transport::memory::{Arena, Shape};

    /// Copied from memory as readers map it: a block begins at a multiple of 64 bytes, and `offset` after it.
    fn copied(source: &[u8], offset: usize) -> (Vec<u8>, u64) {
        let shape = Shape::new(1, offset + source.len() + 1).expect("small");
        let (_arena, mut pieces) = Arena::new(shape).expect("memory");
        let bytes = &mut pieces[0].bytes_mut()[offset..offset + source.len()];
        bytes.copy_from_slice(source);
        let mut target = vec![0xa5; source.len()];
        // SAFETY: both have the same length, and are different allocations.
        let sum = unsafe { copy(bytes.as_ptr(), &mut target) };
        (target, sum)
    }

    #[test]
    fn all_ones_lose_no_carry() {
        for length in [0, 1, 63, 64, 4096, 4097, 8192, 23_040 * 16] {
            let bytes = vec![0xff; length];
            let expected = baton_protocol::checksum::checksum(&bytes);
            assert_eq!(checksum(&bytes), expected, "{length} bytes");
            assert_eq!(copied(&bytes, 0), (bytes, expected), "{length} bytes");
        }
    }

    #[test]
    fn pieces_sum_to_the_whole() {
        let bytes: Vec<u8> = (0..30_001_u32).map(|at| ((at * 7) >> 3) as u8).collect();
        for piece in [1, 100, 4096, 5000, 30_001] {
            let mut growing = Growing::new(bytes.len());
            for end in (0..bytes.len()).step_by(piece) {
                growing.advance(&bytes[..end]);
            }
            assert_eq!(
                growing.finish(&bytes),
                checksum(&bytes),
                "pieces of {piece}"
            );
        }
    }

    proptest! {
        #[test]
        fn it_is_the_checksum_of_the_protocol(
            seed in prop::collection::vec(any::<u8>(), 1..500),
            length in prop_oneof![0..300usize, 4000..9000usize, (0..300usize).prop_map(|vectors| vectors * 64)],
            offset in 0..64usize,
            aligned: bool,
        ) {
            let bytes: Vec<u8> = seed.iter().copied().cycle().zip(0u32..).map(|(byte, at)| byte ^ (at >> 3) as u8).take(offset + length).collect();
            let bytes = &bytes[offset..];
            let expected = baton_protocol::checksum::checksum(bytes);
            prop_assert_eq!(checksum(bytes), expected);
            let (target, sum) = copied(bytes, if aligned { 0 } else { offset });
            prop_assert_eq!(sum, expected);
            prop_assert_eq!(target.as_slice(), bytes);
        }
    }
}

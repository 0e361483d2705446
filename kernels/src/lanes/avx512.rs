//! AVX-512 with VNNI: sixteen lanes in one register, four products and their sum in one instruction.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use half::f16;

use super::Lanes;
use crate::LANES;
use crate::host::Task;

/// Proof that the processor has AVX-512 F, BW, DQ, VL and VNNI, and AVX2, FMA and F16C: only [`Self::detect`] makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }

    /// Runs a task compiled for these instructions.
    #[inline]
    pub(crate) fn run<T: Task>(self, task: T) -> T::Output {
        // SAFETY: `self` exists, so the processor has every feature that `enabled` is compiled for.
        unsafe { enabled(task, self) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn enabled<T: Task>(task: T, lanes: Avx512) -> T::Output {
    task.run(lanes)
}

/// Calls an intrinsic.
macro_rules! with {
    ($lanes:ident, $call:expr) => {{
        let _: Avx512 = $lanes;
        // SAFETY: the intrinsics of this file need features that `Avx512::detect` asks for, and there is an `Avx512`. Those that
        // take a pointer are given one from a reference to an array of exactly the bytes that they read or write, and ask for
        // no alignment.
        unsafe { $call }
    }};
}

impl Lanes for Avx512 {
    type Floats = __m512;
    type Weights = __m512i;
    type Quad = __m512i;
    type Dots = __m512i;

    const WIDE: bool = true;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        with!(self, _mm512_set1_ps(value))
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> __m512 {
        with!(self, _mm512_loadu_ps(values.as_ptr()))
    }

    #[inline(always)]
    fn widen(self, values: &[f16; LANES]) -> __m512 {
        with!(
            self,
            _mm512_cvtph_ps(_mm256_loadu_si256(values.as_ptr().cast()))
        )
    }

    #[inline(always)]
    fn array(self, values: __m512) -> [f32; LANES] {
        let mut array = [0.0; LANES];
        with!(self, _mm512_storeu_ps(array.as_mut_ptr(), values));
        array
    }

    #[inline(always)]
    fn add(self, left: __m512, right: __m512) -> __m512 {
        with!(self, _mm512_add_ps(left, right))
    }

    #[inline(always)]
    fn subtract(self, left: __m512, right: __m512) -> __m512 {
        with!(self, _mm512_sub_ps(left, right))
    }

    #[inline(always)]
    fn multiply(self, left: __m512, right: __m512) -> __m512 {
        with!(self, _mm512_mul_ps(left, right))
    }

    #[inline(always)]
    fn divide(self, left: __m512, right: __m512) -> __m512 {
        with!(self, _mm512_div_ps(left, right))
    }

    #[inline(always)]
    fn fused(self, left: __m512, right: __m512, sum: __m512) -> __m512 {
        with!(self, _mm512_fmadd_ps(left, right, sum))
    }

    #[inline(always)]
    fn highest(self, left: __m512, right: __m512) -> __m512 {
        with!(self, _mm512_max_ps(left, right))
    }

    #[inline(always)]
    fn lowest(self, left: __m512, right: __m512) -> __m512 {
        with!(self, _mm512_min_ps(left, right))
    }

    #[inline(always)]
    fn magnitude(self, values: __m512) -> __m512 {
        with!(self, _mm512_abs_ps(values))
    }

    #[inline(always)]
    fn zero_below(self, judged: __m512, bound: f32, values: __m512) -> __m512 {
        with!(self, {
            let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(judged, _mm512_set1_ps(bound));
            _mm512_mask_mov_ps(values, below, _mm512_setzero_ps())
        })
    }

    #[inline(always)]
    fn exponent(self, values: __m512) -> __m512 {
        with!(self, {
            let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(values));
            let one = _mm512_set1_epi32(1.0_f32.to_bits() as i32);
            _mm512_castsi512_ps(_mm512_add_epi32(shifted, one))
        })
    }

    #[inline(always)]
    fn bytes(self, values: __m512) -> [i8; LANES] {
        let mut bytes = [0; LANES];
        with!(self, {
            // Rounds as the processor is set to, which Rust leaves at its default: ties to even.
            let narrow = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(values));
            _mm_storeu_si128(bytes.as_mut_ptr().cast(), narrow);
        });
        bytes
    }

    #[inline(always)]
    fn transpose(self, rows: [__m512; LANES]) -> [__m512; LANES] {
        with!(self, {
            // Within each quarter of a register: pairs of rows, then fours of rows.
            let mut fours = rows;
            for four in 0..4 {
                // Not by a closure: it would be compiled without these instructions, and called.
                let (a, b) = (rows[4 * four], rows[4 * four + 1]);
                let (c, d) = (rows[4 * four + 2], rows[4 * four + 3]);
                let low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
                let low_next = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
                let high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
                let high_next = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
                fours[4 * four] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, low_next));
                fours[4 * four + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, low_next));
                fours[4 * four + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high, high_next));
                fours[4 * four + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high, high_next));
            }
            // Register 4f + j has in quarter q the rows 4f.. of column 4q + j: gather the quarters of each column.
            let mut columns = rows;
            for column in 0..4 {
                let (a, b) = (fours[column], fours[4 + column]);
                let (c, d) = (fours[8 + column], fours[12 + column]);
                let left = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                let left_next = _mm512_shuffle_f32x4::<0b10_00_10_00>(c, d);
                let right = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
                let right_next = _mm512_shuffle_f32x4::<0b11_01_11_01>(c, d);
                columns[column] = _mm512_shuffle_f32x4::<0b10_00_10_00>(left, left_next);
                columns[8 + column] = _mm512_shuffle_f32x4::<0b11_01_11_01>(left, left_next);
                columns[4 + column] = _mm512_shuffle_f32x4::<0b10_00_10_00>(right, right_next);
                columns[12 + column] = _mm512_shuffle_f32x4::<0b11_01_11_01>(right, right_next);
            }
            columns
        })
    }

    #[inline(always)]
    fn weights(self, quants: &[u8; 4 * LANES]) -> __m512i {
        with!(self, _mm512_loadu_si512(quants.as_ptr().cast()))
    }

    #[inline(always)]
    fn nibbles(self, quants: &[u8; 4 * LANES]) -> [__m512i; 2] {
        let both = self.weights(quants);
        with!(self, {
            let low = _mm512_set1_epi8(15);
            [
                _mm512_and_si512(both, low),
                _mm512_and_si512(_mm512_srli_epi16::<4>(both), low),
            ]
        })
    }

    #[inline(always)]
    fn quad(self, activations: i32) -> __m512i {
        with!(self, _mm512_set1_epi32(activations))
    }

    #[inline(always)]
    fn dots(self, start: i32) -> __m512i {
        with!(self, _mm512_set1_epi32(start))
    }

    #[inline(always)]
    fn accumulate(self, dots: __m512i, weights: __m512i, quad: __m512i) -> __m512i {
        with!(self, _mm512_dpbusd_epi32(dots, weights, quad))
    }

    #[inline(always)]
    fn floats(self, dots: __m512i) -> __m512 {
        with!(self, _mm512_cvtepi32_ps(dots))
    }
}

//! Portable: what the crate was compiled for (on x86-64 that is AVX2 and FMA), without unsafe code.

use half::f16;
use half::slice::HalfFloatSliceExt;
use wide::{f32x8, i8x16, i16x16, i32x8, u8x16};

use super::Lanes;
use crate::LANES;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Portable;

/// Lanes 0 to 7 and 8 to 15.
type Halves = [f32x8; 2];

#[inline(always)]
fn each(left: Halves, right: Halves, combine: impl Fn(f32x8, f32x8) -> f32x8) -> Halves {
    [combine(left[0], right[0]), combine(left[1], right[1])]
}

/// What turns a byte that is stored 128 above its value into that value.
const ABOVE: u8x16 = u8x16::new([0x80; 16]);

#[inline(always)]
fn integers(values: f32x8) -> i32x8 {
    bytemuck::cast(values)
}

impl Lanes for Portable {
    type Floats = Halves;
    /// Four rows a vector, widened to 16 bits, at their true value.
    type Weights = [i16x16; 4];
    type Quad = i16x16;
    /// Like the weights, two sums a row: of columns 0 and 1, of columns 2 and 3.
    type Dots = [i32x8; 4];

    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, value: f32) -> Halves {
        [f32x8::splat(value); 2]
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Halves {
        bytemuck::cast(*values)
    }

    #[inline(always)]
    fn widen(self, values: &[f16; LANES]) -> Halves {
        let mut wide = [0.0; LANES];
        values.convert_to_f32_slice(&mut wide);
        bytemuck::cast(wide)
    }

    #[inline(always)]
    fn array(self, values: Halves) -> [f32; LANES] {
        bytemuck::cast(values)
    }

    #[inline(always)]
    fn add(self, left: Halves, right: Halves) -> Halves {
        each(left, right, |left, right| left + right)
    }

    #[inline(always)]
    fn subtract(self, left: Halves, right: Halves) -> Halves {
        each(left, right, |left, right| left - right)
    }

    #[inline(always)]
    fn multiply(self, left: Halves, right: Halves) -> Halves {
        each(left, right, |left, right| left * right)
    }

    #[inline(always)]
    fn divide(self, left: Halves, right: Halves) -> Halves {
        each(left, right, |left, right| left / right)
    }

    #[inline(always)]
    fn fused(self, left: Halves, right: Halves, sum: Halves) -> Halves {
        [
            left[0].mul_add(right[0], sum[0]),
            left[1].mul_add(right[1], sum[1]),
        ]
    }

    #[inline(always)]
    fn highest(self, left: Halves, right: Halves) -> Halves {
        each(left, right, f32x8::fast_max)
    }

    #[inline(always)]
    fn lowest(self, left: Halves, right: Halves) -> Halves {
        each(left, right, f32x8::fast_min)
    }

    #[inline(always)]
    fn magnitude(self, values: Halves) -> Halves {
        values.map(f32x8::abs)
    }

    #[inline(always)]
    fn zero_below(self, judged: Halves, bound: f32, values: Halves) -> Halves {
        each(judged, values, |judged, values| {
            judged
                .simd_lt(f32x8::splat(bound))
                .select(f32x8::ZERO, values)
        })
    }

    #[inline(always)]
    fn exponent(self, values: Halves) -> Halves {
        values.map(|values| {
            let shifted: i32x8 = integers(values) << 23;
            bytemuck::cast(shifted + i32x8::splat(1.0_f32.to_bits() as i32))
        })
    }

    #[inline(always)]
    fn bytes(self, values: Halves) -> [i8; LANES] {
        let mut bytes = [0; LANES];
        for (bytes, values) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(values) {
            for (byte, value) in bytes.iter_mut().zip(values.fast_round_int().to_array()) {
                *byte = value as i8;
            }
        }
        bytes
    }

    #[inline(always)]
    fn transpose(self, rows: [Halves; LANES]) -> [Halves; LANES] {
        let mut columns = [self.splat(0.0); LANES];
        for side in 0..2 {
            for half in 0..2 {
                let mut square = [f32x8::ZERO; 8];
                for (row, square) in square.iter_mut().enumerate() {
                    *square = rows[8 * half + row][side];
                }
                for (column, values) in f32x8::transpose(square).into_iter().enumerate() {
                    columns[8 * side + column][half] = values;
                }
            }
        }
        columns
    }

    #[inline(always)]
    fn weights(self, quants: &[u8; 4 * LANES]) -> [i16x16; 4] {
        let mut weights = [i16x16::ZERO; 4];
        for (weights, quants) in weights.iter_mut().zip(quants.as_chunks::<16>().0) {
            *weights = i16x16::from_i8x16(bytemuck::cast(u8x16::new(*quants) ^ ABOVE));
        }
        weights
    }

    #[inline(always)]
    fn nibbles(self, quants: &[u8; 4 * LANES]) -> [[i16x16; 4]; 2] {
        let mut halves = [[i16x16::ZERO; 4]; 2];
        for (part, quants) in quants.as_chunks::<16>().0.iter().enumerate() {
            let both = i16x16::from(u8x16::new(*quants));
            halves[0][part] = both & i16x16::splat(15);
            halves[1][part] = both >> 4;
        }
        halves
    }

    #[inline(always)]
    fn quad(self, activations: i32) -> i16x16 {
        i16x16::from_i8x16(bytemuck::cast::<[i32; 4], i8x16>([activations; 4]))
    }

    #[inline(always)]
    fn dots(self, _start: i32) -> [i32x8; 4] {
        [i32x8::ZERO; 4]
    }

    #[inline(always)]
    fn accumulate(self, mut dots: [i32x8; 4], weights: [i16x16; 4], quad: i16x16) -> [i32x8; 4] {
        for (dots, weights) in dots.iter_mut().zip(weights) {
            *dots += weights.dot(quad);
        }
        dots
    }

    #[inline(always)]
    fn floats(self, dots: [i32x8; 4]) -> Halves {
        let pairs: [[i32; 2]; LANES] = bytemuck::cast(dots);
        let mut sums = [0; LANES];
        for (sum, [left, right]) in sums.iter_mut().zip(pairs) {
            *sum = left.wrapping_add(right);
        }
        let sums: [i32x8; 2] = bytemuck::cast(sums);
        sums.map(f32x8::from_i32x8)
    }
}

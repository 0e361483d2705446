//! Lanes: sixteen numbers computed side by side, by an instruction set.
//!
//! The operations are those whose result IEEE 754 or integer arithmetic prescribes to the bit, so implementations cannot differ
//! (of NaNs only that they stay NaN is promised). A value of an implementing type is the proof that the processor has the
//! instructions: it can be had from detection only.

use half::f16;

use crate::LANES;

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod portable;

/// What an instruction set does with sixteen lanes.
pub(crate) trait Lanes: Copy {
    /// Sixteen f32.
    type Floats: Copy;
    /// Four columns of sixteen weight rows.
    type Weights: Copy;
    /// Four activations, each from -127 to 127, for all lanes.
    type Quad: Copy;
    /// Sums of products of the two, exact as long as they fit 32 bits.
    type Dots: Copy;

    /// Whether 24 accumulators fit the registers.
    const WIDE: bool;

    fn splat(self, value: f32) -> Self::Floats;
    fn load(self, values: &[f32; LANES]) -> Self::Floats;
    fn widen(self, values: &[f16; LANES]) -> Self::Floats;
    fn array(self, values: Self::Floats) -> [f32; LANES];

    fn add(self, left: Self::Floats, right: Self::Floats) -> Self::Floats;
    fn subtract(self, left: Self::Floats, right: Self::Floats) -> Self::Floats;
    fn multiply(self, left: Self::Floats, right: Self::Floats) -> Self::Floats;
    fn divide(self, left: Self::Floats, right: Self::Floats) -> Self::Floats;
    /// `left · right + sum`, rounded once.
    fn fused(self, left: Self::Floats, right: Self::Floats, sum: Self::Floats) -> Self::Floats;
    fn highest(self, left: Self::Floats, right: Self::Floats) -> Self::Floats;
    fn lowest(self, left: Self::Floats, right: Self::Floats) -> Self::Floats;
    fn magnitude(self, values: Self::Floats) -> Self::Floats;
    /// `values`, and zero in the lanes where `judged` is below `bound`.
    fn zero_below(self, judged: Self::Floats, bound: f32, values: Self::Floats) -> Self::Floats;
    /// Shifts the bits of each lane left by 23 and adds those of 1.0: 2^n of a number whose lowest bits are n.
    fn exponent(self, values: Self::Floats) -> Self::Floats;
    /// Rounds to the nearest, ties to even; of numbers from -128 to 127.
    fn bytes(self, values: Self::Floats) -> [i8; LANES];
    /// Rows to columns.
    fn transpose(self, rows: [Self::Floats; LANES]) -> [Self::Floats; LANES];

    /// Weights stored 128 above their value; sums of products with them have to start at [`Self::dots`] of what that adds.
    fn weights(self, quants: &[u8; 4 * LANES]) -> Self::Weights;
    /// The low halves of the bytes, and the high ones, as they are.
    fn nibbles(self, quants: &[u8; 4 * LANES]) -> [Self::Weights; 2];
    fn quad(self, activations: i32) -> Self::Quad;
    /// `start` makes up for weights that are stored above their value, where the instruction set takes them so; else it is ignored.
    fn dots(self, start: i32) -> Self::Dots;
    fn accumulate(self, dots: Self::Dots, weights: Self::Weights, quad: Self::Quad) -> Self::Dots;
    fn floats(self, dots: Self::Dots) -> Self::Floats;

    #[inline(always)]
    fn sum(self, values: Self::Floats) -> f32 {
        fold(self.array(values), |left, right| left + right)
    }

    #[inline(always)]
    fn maximum(self, values: Self::Floats) -> f32 {
        fold(self.array(values), f32::max)
    }
}

/// Lane i with lane i + 8, then i + 4, i + 2, i + 1.
#[inline(always)]
fn fold(mut values: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            values[lane] = combine(values[lane], values[lane + width]);
        }
        width /= 2;
    }
    values[0]
}

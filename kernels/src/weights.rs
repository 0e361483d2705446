//! Tiles of weights: 32 columns of sixteen rows, laid out as the products read them.
//!
//! Row by row in a lane each, four columns (a *quad*) side by side in the lane. 8-bit weights are stored with 128 added, since
//! the instruction multiplies unsigned by signed; the sums start lower by 128 times the sum of the activations, which is exact.

use crate::LANES;
use crate::lanes::Lanes;

/// Columns that share a scale.
pub const BLOCK: usize = 32;
/// Quads of a block.
pub(crate) const QUADS: usize = BLOCK / 4;
/// What 8-bit weights are stored above their value.
pub(crate) const OFFSET: i32 = 128;

/// 8-bit weights: weight = scale × (stored − 128). `[quad][4 · row + column]`.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct ByteTile(pub(crate) [[u8; 4 * LANES]; QUADS]);

/// 4-bit weights: weight = scale × quant + minimum. Even quads are in the low halves of the bytes, odd ones in the high halves.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct NibbleTile(pub(crate) [[u8; 4 * LANES]; QUADS / 2]);

/// What the product needs of a tile.
pub(crate) trait Tile {
    /// Whether weights have minima; else they are stored above their value.
    const HAS_MINIMA: bool;

    /// Dot products with `ROWS` activation rows, `quads[quad][row]`.
    fn dots<L: Lanes, const ROWS: usize>(
        &self,
        lanes: L,
        quads: &[[i32; ROWS]; QUADS],
        starts: &[i32; ROWS],
    ) -> [L::Dots; ROWS];
}

#[inline(always)]
fn accumulate<L: Lanes, const ROWS: usize>(
    lanes: L,
    dots: &mut [L::Dots; ROWS],
    weights: L::Weights,
    quads: &[i32; ROWS],
) {
    for row in 0..ROWS {
        dots[row] = lanes.accumulate(dots[row], weights, lanes.quad(quads[row]));
    }
}

impl Tile for ByteTile {
    const HAS_MINIMA: bool = false;

    #[inline(always)]
    fn dots<L: Lanes, const ROWS: usize>(
        &self,
        lanes: L,
        quads: &[[i32; ROWS]; QUADS],
        starts: &[i32; ROWS],
    ) -> [L::Dots; ROWS] {
        let mut dots = [lanes.dots(0); ROWS];
        for row in 0..ROWS {
            dots[row] = lanes.dots(starts[row]);
        }
        for (quants, quads) in self.0.iter().zip(quads) {
            accumulate(lanes, &mut dots, lanes.weights(quants), quads);
        }
        dots
    }
}

impl Tile for NibbleTile {
    const HAS_MINIMA: bool = true;

    #[inline(always)]
    fn dots<L: Lanes, const ROWS: usize>(
        &self,
        lanes: L,
        quads: &[[i32; ROWS]; QUADS],
        _starts: &[i32; ROWS],
    ) -> [L::Dots; ROWS] {
        let mut dots = [lanes.dots(0); ROWS];
        for (quants, quads) in self.0.iter().zip(quads.as_chunks::<2>().0) {
            let [low, high] = lanes.nibbles(quants);
            accumulate(lanes, &mut dots, low, &quads[0]);
            accumulate(lanes, &mut dots, high, &quads[1]);
        }
        dots
    }
}

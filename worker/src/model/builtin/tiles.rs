//! Tiles: eight weight rows interleaved, and their dot products with a few activation rows at once.
//!
//! A tile holds 32 columns of eight rows. Its lanes are rows, so a lane's sum never meets another lane's: no horizontal
//! additions, and the result for (weight row, activation row) is the same however many activation rows are computed together.
//! Per tile: 16 multiply-adds of 16-bit pairs into 32-bit sums (exact), then one scaling into the f32 sum (block order).

use wide::{f32x8, i8x16, i16x16, i32x8, u8x16};

/// Columns that share a scale.
pub const BLOCK: usize = 32;
/// Rows in a tile.
pub const LANES: usize = 8;
const PAIRS: usize = BLOCK / 2;

/// Eight rows of 8-bit weights: weight = scale × quant. `quants[pair][2 · row + side]`.
#[derive(Clone, Debug)]
pub struct ByteTile {
    pub scales: [f32; LANES],
    pub quants: [[i8; 2 * LANES]; PAIRS],
}

/// Eight rows of 4-bit weights: weight = scale × quant + minimum. Even pairs lie in the low halves of the bytes.
#[derive(Clone, Debug)]
pub struct NibbleTile {
    pub scales: [f32; LANES],
    pub minima: [f32; LANES],
    pub quants: [[u8; 2 * LANES]; PAIRS / 2],
}

/// 32 quantised activations of one row.
#[derive(Clone, Debug, Default)]
pub struct ActivationBlock {
    pub scale: f32,
    /// Sum of the 32 values, for weights with minima.
    pub sum: f32,
    pub pairs: [[i16; 2]; PAIRS],
}

impl ActivationBlock {
    /// Quantises to ±127, rounding to nearest even.
    pub fn quantise(values: &[f32; BLOCK]) -> Self {
        let (chunks, _) = values.as_chunks::<8>();
        let mut highest = f32x8::ZERO;
        for chunk in chunks {
            highest = highest.max(f32x8::new(*chunk).abs());
        }
        let highest = highest.to_array().into_iter().fold(0.0, f32::max);
        if highest == 0.0 {
            return Self::default();
        }
        let mut block = Self {
            scale: highest / 127.0,
            ..Self::default()
        };
        let inverse = f32x8::splat(127.0 / highest);
        let mut total = i32x8::ZERO;
        let (pairs, _) = block.pairs.as_chunks_mut::<4>();
        for (chunk, pairs) in chunks.iter().zip(pairs) {
            let rounded = (f32x8::new(*chunk) * inverse).round_int();
            total += rounded;
            let lanes = rounded.to_array();
            for (pair, lanes) in pairs.iter_mut().zip(lanes.as_chunks::<2>().0) {
                *pair = [lanes[0] as i16, lanes[1] as i16];
            }
        }
        block.sum = block.scale * total.reduce_add() as f32;
        block
    }
}

/// What the product needs of a tile.
pub trait Tile {
    /// Whether [`Self::minima`] are not all zero.
    const HAS_MINIMA: bool;
    /// The weights widened to 16 bits, one vector for each pair of columns.
    fn pairs(&self) -> [i16x16; PAIRS];
    fn scales(&self) -> f32x8;
    fn minima(&self) -> f32x8;
}

impl Tile for ByteTile {
    const HAS_MINIMA: bool = false;

    #[inline(always)]
    fn pairs(&self) -> [i16x16; PAIRS] {
        self.quants
            .map(|quants| i16x16::from_i8x16(i8x16::new(quants)))
    }

    #[inline(always)]
    fn scales(&self) -> f32x8 {
        f32x8::new(self.scales)
    }

    #[inline(always)]
    fn minima(&self) -> f32x8 {
        f32x8::ZERO
    }
}

impl Tile for NibbleTile {
    const HAS_MINIMA: bool = true;

    #[inline(always)]
    fn pairs(&self) -> [i16x16; PAIRS] {
        std::array::from_fn(|pair| {
            let both = i16x16::from(u8x16::new(self.quants[pair / 2]));
            if pair % 2 == 0 {
                both & i16x16::splat(15)
            } else {
                both >> 4
            }
        })
    }

    #[inline(always)]
    fn scales(&self) -> f32x8 {
        f32x8::new(self.scales)
    }

    #[inline(always)]
    fn minima(&self) -> f32x8 {
        f32x8::new(self.minima)
    }
}

/// Dot products of eight weight rows with `ROWS` activation rows. All slices have one element for each block of columns.
#[inline(always)]
pub fn dot<const ROWS: usize, T: Tile>(
    tiles: &[T],
    activations: [&[ActivationBlock]; ROWS],
) -> [[f32; LANES]; ROWS] {
    let mut sums = [f32x8::ZERO; ROWS];
    let activations = activations.map(|row| &row[..tiles.len()]);
    for (index, tile) in tiles.iter().enumerate() {
        let weights = tile.pairs();
        let mut dots = [i32x8::ZERO; ROWS];
        for (pair, weights) in weights.into_iter().enumerate() {
            for row in 0..ROWS {
                let both: i32 = bytemuck::cast(activations[row][index].pairs[pair]);
                let spread: i16x16 = bytemuck::cast(i32x8::splat(both));
                dots[row] += weights.dot(spread);
            }
        }
        let scales = tile.scales();
        for row in 0..ROWS {
            let block = &activations[row][index];
            let scale = scales * f32x8::splat(block.scale);
            sums[row] = f32x8::from_i32x8(dots[row]).mul_add(scale, sums[row]);
            if T::HAS_MINIMA {
                sums[row] = tile.minima().mul_add(f32x8::splat(block.sum), sums[row]);
            }
        }
    }
    sums.map(|sum| sum.to_array())
}

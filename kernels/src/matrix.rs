//! Matrices: quantised weights made from what a file holds, and their products.
//!
//! 4-bit weights (Q4_0, Q4_1) stay as they are shipped: half the bytes that decode has to read. Everything else is kept in 8 bits.

use half::f16;

use crate::LANES;
use crate::activations::Activations;
use crate::host::Host;
use crate::product::Product;
use crate::weights::{BLOCK, ByteTile, NibbleTile, OFFSET, QUADS};

/// A weight matrix, `rows` outputs by `columns` inputs.
#[derive(Clone, Debug)]
pub struct Matrix {
    rows: usize,
    /// Blocks of [`BLOCK`] columns.
    blocks: usize,
    tiles: Tiles,
    scales: Vec<[f16; LANES]>,
    /// Empty for 8-bit weights.
    minima: Vec<[f16; LANES]>,
}

// Tile `group · blocks + block` holds rows `16 · group ..` and columns `32 · block ..`; rows past the end have scale zero.
#[derive(Clone, Debug)]
enum Tiles {
    Bytes(Vec<ByteTile>),
    Nibbles(Vec<NibbleTile>),
}

impl Matrix {
    /// From plain values, row after row. `columns` is a multiple of [`BLOCK`].
    pub fn from_f32(values: &[f32], columns: usize) -> Self {
        Self::bytes(values.len() / columns, columns, |row, block, quants| {
            let from = row * columns + block * BLOCK;
            quantise(&values[from..from + BLOCK], quants)
        })
    }

    /// From GGUF's Q8_0: blocks of an f16 scale and 32 signed bytes.
    pub fn from_q8_0(data: &[u8], columns: usize) -> Self {
        const BYTES: usize = 2 + BLOCK;
        let per_row = columns / BLOCK;
        let rows = data.len() / BYTES / per_row;
        Self::bytes(rows, columns, |row, block, quants| {
            let data = &data[(row * per_row + block) * BYTES..][..BYTES];
            for (quant, byte) in quants.iter_mut().zip(&data[2..]) {
                *quant = *byte as i8;
            }
            half(data, 0)
        })
    }

    /// From GGUF's Q4_0: an f16 scale and 16 bytes; a weight is scale × (quant − 8).
    pub fn from_q4_0(data: &[u8], columns: usize) -> Self {
        Self::nibbles(data, columns, 2 + BLOCK / 2, |data| {
            let scale = half(data, 0);
            // Exact: eight times is three more in the exponent.
            (scale, f16::from_f32(-8.0 * scale.to_f32()))
        })
    }

    /// From GGUF's Q4_1: an f16 scale, an f16 minimum and 16 bytes; a weight is scale × quant + minimum.
    pub fn from_q4_1(data: &[u8], columns: usize) -> Self {
        Self::nibbles(data, columns, 4 + BLOCK / 2, |data| {
            (half(data, 0), half(data, 2))
        })
    }

    fn bytes(
        rows: usize,
        columns: usize,
        mut fill: impl FnMut(usize, usize, &mut [i8; BLOCK]) -> f16,
    ) -> Self {
        let blocks = columns / BLOCK;
        let count = rows.div_ceil(LANES) * blocks;
        let mut tiles = vec![ByteTile([[0; 4 * LANES]; QUADS]); count];
        let mut scales = vec![[f16::ZERO; LANES]; count];
        for row in 0..rows {
            for block in 0..blocks {
                let mut quants = [0; BLOCK];
                let (tile, lane) = (row / LANES * blocks + block, row % LANES);
                scales[tile][lane] = fill(row, block, &mut quants);
                for (column, quant) in quants.into_iter().enumerate() {
                    tiles[tile].0[column / 4][lane * 4 + column % 4] =
                        (i32::from(quant) + OFFSET) as u8;
                }
            }
        }
        Self {
            rows,
            blocks,
            tiles: Tiles::Bytes(tiles),
            scales,
            minima: Vec::new(),
        }
    }

    // `data` has `bytes` for each block, the last 16 of them the quants: column c in the low half of byte c, c + 16 in its high half.
    fn nibbles(
        data: &[u8],
        columns: usize,
        bytes: usize,
        range: impl Fn(&[u8]) -> (f16, f16),
    ) -> Self {
        let blocks = columns / BLOCK;
        let rows = data.len() / bytes / blocks;
        let count = rows.div_ceil(LANES) * blocks;
        let mut tiles = vec![NibbleTile([[0; 4 * LANES]; QUADS / 2]); count];
        let mut scales = vec![[f16::ZERO; LANES]; count];
        let mut minima = vec![[f16::ZERO; LANES]; count];
        for (index, data) in data.chunks_exact(bytes).enumerate() {
            let (row, block) = (index / blocks, index % blocks);
            let (tile, lane) = (row / LANES * blocks + block, row % LANES);
            (scales[tile][lane], minima[tile][lane]) = range(data);
            for (column, byte) in data[bytes - BLOCK / 2..].iter().enumerate() {
                for (column, quant) in [(column, byte & 15), (column + BLOCK / 2, byte >> 4)] {
                    let quad = column / 4;
                    tiles[tile].0[quad / 2][lane * 4 + column % 4] |= quant << (quad % 2 * 4);
                }
            }
        }
        Self {
            rows,
            blocks,
            tiles: Tiles::Nibbles(tiles),
            scales,
            minima,
        }
    }

    /// Outputs of the matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes that a product reads.
    pub fn size(&self) -> usize {
        let tiles = match &self.tiles {
            Tiles::Bytes(tiles) => size_of_val(tiles.as_slice()),
            Tiles::Nibbles(tiles) => size_of_val(tiles.as_slice()),
        };
        tiles + size_of_val(self.scales.as_slice()) + size_of_val(self.minima.as_slice())
    }

    /// Writes one row's weights, in f32, to `out`.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        let first = row / LANES * self.blocks;
        let lane = row % LANES;
        for (block, out) in out.chunks_exact_mut(BLOCK).take(self.blocks).enumerate() {
            let tile = first + block;
            let scale = self.scales[tile][lane].to_f32();
            for (column, out) in out.iter_mut().enumerate() {
                let (quad, at) = (column / 4, lane * 4 + column % 4);
                *out = match &self.tiles {
                    Tiles::Bytes(tiles) => {
                        let quant = i32::from(tiles[tile].0[quad][at]) - OFFSET;
                        scale * quant as f32
                    }
                    Tiles::Nibbles(tiles) => {
                        let quant = tiles[tile].0[quad / 2][at] >> (quad % 2 * 4) & 15;
                        scale.mul_add(f32::from(quant), self.minima[tile][lane].to_f32())
                    }
                };
            }
        }
    }

    /// Writes the products with every row of activations to `out`, row after row.
    pub fn product(&self, host: Host, activations: &Activations, out: &mut [f32]) {
        match &self.tiles {
            Tiles::Bytes(tiles) => host.run(self.task(tiles, activations, out)),
            Tiles::Nibbles(tiles) => host.run(self.task(tiles, activations, out)),
        }
    }

    fn task<'a, T>(
        &'a self,
        tiles: &'a [T],
        activations: &'a Activations,
        out: &'a mut [f32],
    ) -> Product<'a, T> {
        Product {
            rows: self.rows,
            tiles,
            scales: &self.scales,
            minima: &self.minima,
            activations,
            out,
        }
    }
}

/// To ±127 by the scale that is stored.
fn quantise(values: &[f32], quants: &mut [i8; BLOCK]) -> f16 {
    let highest = values
        .iter()
        .fold(0.0_f32, |highest, value| highest.max(value.abs()));
    let scale = f16::from_f32(highest / 127.0);
    if scale == f16::ZERO {
        return scale;
    }
    for (quant, value) in quants.iter_mut().zip(values) {
        *quant = (value / scale.to_f32())
            .round_ties_even()
            .clamp(-127.0, 127.0) as i8;
    }
    scale
}

fn half(data: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([data[at], data[at + 1]])
}

#[cfg(test)]
mod tests;

//! Matrices: quantised weights made from what a file holds, and products with rows of quantised activations.
//!
//! 4-bit weights (Q4_0, Q4_1) stay as they are shipped: half the bytes that decode has to read. Everything else is kept in 8 bits.

use half::f16;

use super::tiles::{ActivationBlock, BLOCK, ByteTile, LANES, NibbleTile, Tile, dot};

/// A weight matrix, `rows` outputs by `columns` inputs.
#[derive(Clone, Debug)]
pub struct Matrix {
    rows: usize,
    /// Blocks of [`BLOCK`] columns.
    blocks: usize,
    tiles: Tiles,
}

// Tile `group · blocks + block` holds rows `8 · group ..` and columns `32 · block ..`; rows past the end are zero.
#[derive(Clone, Debug)]
enum Tiles {
    Bytes(Vec<ByteTile>),
    Nibbles(Vec<NibbleTile>),
}

/// Rows of activations, quantised each by itself.
#[derive(Clone, Debug, Default)]
pub struct Activations {
    rows: usize,
    blocks: Vec<ActivationBlock>,
}

impl Activations {
    /// Replaces what was there by `values`, rows of `columns` (a multiple of [`BLOCK`]) values.
    pub fn quantise(&mut self, values: &[f32], columns: usize) {
        self.rows = values.len() / columns;
        self.blocks.clear();
        let (blocks, _) = values.as_chunks::<BLOCK>();
        self.blocks
            .extend(blocks.iter().map(ActivationBlock::quantise));
    }
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
            scale(data, 0)
        })
    }

    /// From GGUF's Q4_0: an f16 scale and 16 bytes; a weight is scale × (quant − 8).
    pub fn from_q4_0(data: &[u8], columns: usize) -> Self {
        Self::nibbles(data, columns, 2 + BLOCK / 2, |data| {
            let scale = scale(data, 0);
            (scale, -8.0 * scale)
        })
    }

    /// From GGUF's Q4_1: an f16 scale, an f16 minimum and 16 bytes; a weight is scale × quant + minimum.
    pub fn from_q4_1(data: &[u8], columns: usize) -> Self {
        Self::nibbles(data, columns, 4 + BLOCK / 2, |data| {
            (scale(data, 0), scale(data, 2))
        })
    }

    fn bytes(
        rows: usize,
        columns: usize,
        mut fill: impl FnMut(usize, usize, &mut [i8; BLOCK]) -> f32,
    ) -> Self {
        let blocks = columns / BLOCK;
        let empty = ByteTile {
            scales: [0.0; LANES],
            quants: Default::default(),
        };
        let mut tiles = vec![empty; rows.div_ceil(LANES) * blocks];
        for row in 0..rows {
            for block in 0..blocks {
                let mut quants = [0; BLOCK];
                let tile = &mut tiles[row / LANES * blocks + block];
                tile.scales[row % LANES] = fill(row, block, &mut quants);
                for (column, quant) in quants.into_iter().enumerate() {
                    tile.quants[column / 2][row % LANES * 2 + column % 2] = quant;
                }
            }
        }
        Self {
            rows,
            blocks,
            tiles: Tiles::Bytes(tiles),
        }
    }

    // `data` has `bytes` for each block, the last 16 of them the quants: column c in the low half of byte c, c + 16 in its high half.
    fn nibbles(
        data: &[u8],
        columns: usize,
        bytes: usize,
        range: impl Fn(&[u8]) -> (f32, f32),
    ) -> Self {
        let blocks = columns / BLOCK;
        let rows = data.len() / bytes / blocks;
        let empty = NibbleTile {
            scales: [0.0; LANES],
            minima: [0.0; LANES],
            quants: Default::default(),
        };
        let mut tiles = vec![empty; rows.div_ceil(LANES) * blocks];
        for (index, data) in data.chunks_exact(bytes).enumerate() {
            let (row, block) = (index / blocks, index % blocks);
            let tile = &mut tiles[row / LANES * blocks + block];
            (tile.scales[row % LANES], tile.minima[row % LANES]) = range(data);
            for (column, byte) in data[bytes - BLOCK / 2..].iter().enumerate() {
                for (column, quant) in [(column, byte & 15), (column + BLOCK / 2, byte >> 4)] {
                    let pair = column / 2;
                    tile.quants[pair / 2][row % LANES * 2 + column % 2] |= quant << (pair % 2 * 4);
                }
            }
        }
        Self {
            rows,
            blocks,
            tiles: Tiles::Nibbles(tiles),
        }
    }

    /// Outputs of the matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Writes one row's weights, in f32, to `out`.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        let first = row / LANES * self.blocks;
        let lane = row % LANES;
        for (block, out) in out.chunks_exact_mut(BLOCK).take(self.blocks).enumerate() {
            for (column, out) in out.iter_mut().enumerate() {
                let (pair, at) = (column / 2, lane * 2 + column % 2);
                *out = match &self.tiles {
                    Tiles::Bytes(tiles) => {
                        let tile = &tiles[first + block];
                        tile.scales[lane] * f32::from(tile.quants[pair][at])
                    }
                    Tiles::Nibbles(tiles) => {
                        let tile = &tiles[first + block];
                        let quant = tile.quants[pair / 2][at] >> (pair % 2 * 4) & 15;
                        tile.scales[lane].mul_add(f32::from(quant), tile.minima[lane])
                    }
                };
            }
        }
    }

    /// Writes the products with every row of activations to `out`, row after row.
    pub fn product(&self, activations: &Activations, out: &mut [f32]) {
        match &self.tiles {
            Tiles::Bytes(tiles) => product(tiles, self, activations, out),
            Tiles::Nibbles(tiles) => product(tiles, self, activations, out),
        }
    }
}

fn product<T: Tile>(tiles: &[T], matrix: &Matrix, activations: &Activations, out: &mut [f32]) {
    for (group, tiles) in tiles.chunks_exact(matrix.blocks).enumerate() {
        let mut row = 0;
        // Six rows of sums and dots are what 16 vector registers hold.
        row = strip::<6, T>(tiles, matrix, activations, group, row, out);
        row = strip::<3, T>(tiles, matrix, activations, group, row, out);
        strip::<1, T>(tiles, matrix, activations, group, row, out);
    }
}

/// Computes as many whole strips of `ROWS` activation rows as are left from `row` on; returns the next row.
#[inline(always)]
fn strip<const ROWS: usize, T: Tile>(
    tiles: &[T],
    matrix: &Matrix,
    activations: &Activations,
    group: usize,
    mut row: usize,
    out: &mut [f32],
) -> usize {
    let first = group * LANES;
    let lanes = LANES.min(matrix.rows - first);
    while row + ROWS <= activations.rows {
        let sums = dot::<ROWS, T>(
            tiles,
            std::array::from_fn(|index| {
                &activations.blocks[(row + index) * matrix.blocks..][..matrix.blocks]
            }),
        );
        for (index, sums) in sums.iter().enumerate() {
            let at = (row + index) * matrix.rows + first;
            out[at..at + lanes].copy_from_slice(&sums[..lanes]);
        }
        row += ROWS;
    }
    row
}

fn quantise(values: &[f32], quants: &mut [i8; BLOCK]) -> f32 {
    let highest = values
        .iter()
        .fold(0.0_f32, |highest, value| highest.max(value.abs()));
    if highest == 0.0 {
        return 0.0;
    }
    for (quant, value) in quants.iter_mut().zip(values) {
        *quant = (value * (127.0 / highest)).round_ties_even() as i8;
    }
    highest / 127.0
}

fn scale(data: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([data[at], data[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests;

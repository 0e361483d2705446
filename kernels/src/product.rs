//! Products of a weight matrix with rows of activations.
//!
//! A lane is a weight row, and its sum never meets another lane's: no horizontal additions. Per block of 32 columns an exact integer dot
//! product, then one scaling into the f32 sum, in the order of the blocks.

use half::f16;

use crate::LANES;
use crate::activations::{Activations, Panel};
use crate::host::Task;
use crate::lanes::Lanes;
use crate::weights::{QUADS, Tile};

pub(crate) struct Product<'a, T> {
    /// Outputs of the matrix.
    pub(crate) rows: usize,
    /// Group after group of sixteen rows, as are scales and minima (empty where tiles have none).
    pub(crate) tiles: &'a [T],
    pub(crate) scales: &'a [[f16; LANES]],
    pub(crate) minima: &'a [[f16; LANES]],
    pub(crate) activations: &'a Activations,
    /// `[activation row][weight row]`.
    pub(crate) out: &'a mut [f32],
}

/// Sixteen weight rows: tiles, scales and minima block by block.
struct Group<'a, T> {
    tiles: &'a [T],
    scales: &'a [[f32; LANES]],
    minima: &'a [[f32; LANES]],
}

impl<T: Tile> Task for Product<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let blocks = self.activations.blocks;
        let mut scales = vec![[0.0; LANES]; blocks];
        let mut minima = vec![[0.0; LANES]; blocks];
        for (index, tiles) in self.tiles.chunks_exact(blocks).enumerate() {
            let narrow = &self.scales[index * blocks..];
            for (scales, narrow) in scales.iter_mut().zip(narrow) {
                *scales = lanes.array(lanes.widen(narrow));
            }
            if T::HAS_MINIMA {
                let narrow = &self.minima[index * blocks..];
                for (minima, narrow) in minima.iter_mut().zip(narrow) {
                    *minima = lanes.array(lanes.widen(narrow));
                }
            }
            let group = Group {
                tiles,
                scales: &scales,
                minima: &minima,
            };
            let first = index * LANES;
            let width = LANES.min(self.rows - first);
            for panel in &self.activations.panels {
                let out = &mut Out {
                    values: &mut self.out[panel.first * self.rows + first..],
                    stride: self.rows,
                    width,
                };
                // The sizes that `Activations` makes.
                match panel.size {
                    12 => strip::<L, T, 12>(lanes, &group, self.activations, *panel, out),
                    8 => strip::<L, T, 8>(lanes, &group, self.activations, *panel, out),
                    4 => strip::<L, T, 4>(lanes, &group, self.activations, *panel, out),
                    2 => strip::<L, T, 2>(lanes, &group, self.activations, *panel, out),
                    _ => strip::<L, T, 1>(lanes, &group, self.activations, *panel, out),
                }
            }
        }
    }
}

struct Out<'a> {
    values: &'a mut [f32],
    stride: usize,
    width: usize,
}

#[inline(always)]
fn strip<L: Lanes, T: Tile, const ROWS: usize>(
    lanes: L,
    group: &Group<'_, T>,
    activations: &Activations,
    panel: Panel,
    out: &mut Out<'_>,
) {
    let first = panel.first * activations.blocks;
    let quads = activations.quads[first * QUADS..].as_chunks::<ROWS>().0;
    let quads = quads.as_chunks::<QUADS>().0;
    let starts = activations.starts[first..].as_chunks::<ROWS>().0;
    let factors = activations.scales[first..].as_chunks::<ROWS>().0;
    let totals = activations.sums[first..].as_chunks::<ROWS>().0;

    let mut sums = [lanes.splat(0.0); ROWS];
    let weights = group.tiles.iter().zip(group.scales).zip(group.minima);
    let rows = quads.iter().zip(starts).zip(factors).zip(totals);
    for (((tile, scales), minima), (((quads, starts), factors), totals)) in weights.zip(rows) {
        let dots = tile.dots::<L, ROWS>(lanes, quads, starts);
        let scales = lanes.load(scales);
        for row in 0..ROWS {
            let scale = lanes.multiply(scales, lanes.splat(factors[row]));
            sums[row] = lanes.fused(lanes.floats(dots[row]), scale, sums[row]);
        }
        if T::HAS_MINIMA {
            let minima = lanes.load(minima);
            for row in 0..ROWS {
                sums[row] = lanes.fused(minima, lanes.splat(totals[row]), sums[row]);
            }
        }
    }
    let width = out.width;
    for (sums, out) in sums.into_iter().zip(out.values.chunks_mut(out.stride)) {
        let sums = lanes.array(sums);
        // A whole group is one store, not a copy whose length is found out.
        match out.first_chunk_mut::<LANES>() {
            Some(out) if width == LANES => *out = sums,
            _ => out[..width].copy_from_slice(&sums[..width]),
        }
    }
}

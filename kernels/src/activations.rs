//! Rows of activations, each quantised by itself to 8 bits in blocks of 32, laid out for the products.

use crate::LANES;
use crate::host::{Host, Task};
use crate::lanes::Lanes;
use crate::weights::{BLOCK, OFFSET, QUADS};

/// Rows that are multiplied together, by what an instruction set has registers for; the largest that fit are taken.
const WIDE: &[usize] = &[12, 8, 4, 2, 1];
const NARROW: &[usize] = &[2, 1];

/// Rows of quantised activations.
#[derive(Clone, Debug, Default)]
pub struct Activations {
    pub(crate) blocks: usize,
    pub(crate) panels: Vec<Panel>,
    /// Panel after panel, `[block][quad][row]`; a quad is four signed bytes.
    pub(crate) quads: Vec<i32>,
    /// Panel after panel, `[block][row]`, as are the next two.
    pub(crate) scales: Vec<f32>,
    /// Of the 32 values, for weights with minima.
    pub(crate) sums: Vec<f32>,
    /// Where sums over weights that are stored above their value start.
    pub(crate) starts: Vec<i32>,
}

/// Rows that are multiplied together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panel {
    pub(crate) first: usize,
    pub(crate) size: usize,
}

impl Activations {
    /// Replaces what was there by `values`, rows of `columns` (a multiple of [`BLOCK`]) values. A value is rounded to the nearest
    /// of 255 steps between plus and minus the largest of its block.
    pub fn quantise(&mut self, host: Host, values: &[f32], columns: usize) {
        self.blocks = columns / BLOCK;
        let rows = values.len() / columns;
        self.panels.clear();
        let mut first = 0;
        for size in if host.is_wide() { WIDE } else { NARROW } {
            while rows - first >= *size {
                self.panels.push(Panel { first, size: *size });
                first += size;
            }
        }
        self.quads.resize(rows * self.blocks * QUADS, 0);
        self.scales.resize(rows * self.blocks, 0.0);
        self.sums.resize(rows * self.blocks, 0.0);
        self.starts.resize(rows * self.blocks, 0);
        host.run(Quantise {
            activations: self,
            values,
            columns,
        });
    }
}

struct Quantise<'a> {
    activations: &'a mut Activations,
    values: &'a [f32],
    columns: usize,
}

impl Task for Quantise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let to = self.activations;
        for Panel { first, size } in to.panels.iter().copied() {
            let rows = self.values[first * self.columns..].chunks_exact(self.columns);
            for (row, values) in rows.take(size).enumerate() {
                for (block, values) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
                    let quantised = quantise(lanes, values);
                    let at = first * to.blocks + block * size + row;
                    to.scales[at] = quantised.scale;
                    to.sums[at] = quantised.scale * quantised.total as f32;
                    to.starts[at] = -OFFSET * quantised.total;
                    let at = (first * to.blocks + block * size) * QUADS + row;
                    let quads: [i32; QUADS] = bytemuck::cast(quantised.bytes);
                    for (place, quad) in to.quads[at..].iter_mut().step_by(size).zip(quads) {
                        *place = quad;
                    }
                }
            }
        }
    }
}

struct Quantised {
    scale: f32,
    bytes: [[i8; LANES]; 2],
    total: i32,
}

#[inline(always)]
fn quantise<L: Lanes>(lanes: L, values: &[f32; BLOCK]) -> Quantised {
    let halves = values.as_chunks::<LANES>().0;
    let left = lanes.load(&halves[0]);
    let right = lanes.load(&halves[1]);
    let highest = lanes.maximum(lanes.highest(lanes.magnitude(left), lanes.magnitude(right)));
    if highest == 0.0 {
        return Quantised {
            scale: 0.0,
            bytes: [[0; LANES]; 2],
            total: 0,
        };
    }
    let inverse = lanes.splat(127.0 / highest);
    let bytes = [
        lanes.bytes(lanes.multiply(left, inverse)),
        lanes.bytes(lanes.multiply(right, inverse)),
    ];
    let mut total = 0;
    for byte in bytes.as_flattened() {
        total += i32::from(*byte);
    }
    Quantised {
        scale: highest / 127.0,
        bytes,
        total,
    }
}

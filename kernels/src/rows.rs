//! What is done to rows of activations between two products: norms and the gate of the feed-forward part.

use crate::LANES;
use crate::exponential::exponential;
use crate::host::{Host, Task};
use crate::lanes::Lanes;

impl Host {
    /// Root-mean-square norm of every row, times the weights. A row is as long as the weights: a multiple of 16.
    pub fn normalise(self, out: &mut [f32], rows: &[f32], weights: &[f32], epsilon: f32) {
        self.run(Normalise {
            out,
            rows,
            weights,
            epsilon,
        });
    }

    /// SwiGLU, in place: x / (1 + e^−x) · up. Both as long as each other: a multiple of 16.
    pub fn gate(self, gate: &mut [f32], up: &[f32]) {
        self.run(Gate { gate, up });
    }
}

struct Normalise<'a> {
    out: &'a mut [f32],
    rows: &'a [f32],
    weights: &'a [f32],
    epsilon: f32,
}

impl Task for Normalise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let width = self.weights.len();
        let (weights, _) = self.weights.as_chunks::<LANES>();
        let rows = self.rows.chunks_exact(width);
        for (out, row) in self.out.chunks_exact_mut(width).zip(rows) {
            let (row, _) = row.as_chunks::<LANES>();
            let mut sum = lanes.splat(0.0);
            for values in row {
                let values = lanes.load(values);
                sum = lanes.fused(values, values, sum);
            }
            let scale = 1.0 / (lanes.sum(sum) / width as f32 + self.epsilon).sqrt();
            let scale = lanes.splat(scale);
            let (out, _) = out.as_chunks_mut::<LANES>();
            for ((out, values), weights) in out.iter_mut().zip(row).zip(weights) {
                let scaled = lanes.multiply(lanes.load(values), scale);
                *out = lanes.array(lanes.multiply(scaled, lanes.load(weights)));
            }
        }
    }
}

struct Gate<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Task for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (gate, _) = self.gate.as_chunks_mut::<LANES>();
        let (up, _) = self.up.as_chunks::<LANES>();
        let one = lanes.splat(1.0);
        for (gate, up) in gate.iter_mut().zip(up) {
            let value = lanes.load(gate);
            let opposite = lanes.subtract(lanes.splat(0.0), value);
            let divisor = lanes.add(one, exponential(lanes, opposite));
            let passed = lanes.divide(value, divisor);
            *gate = lanes.array(lanes.multiply(passed, lanes.load(up)));
        }
    }
}

#[cfg(test)]
mod tests;

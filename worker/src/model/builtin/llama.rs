//! The forward pass of the Llama architecture: RMSNorm, grouped-query attention with rotary positions, SwiGLU.

use wide::f32x8;

use super::super::{
    Batch, Model, ModelError, ModelFacts, Output, SequenceSlice, StepReport, check_batch,
};
use super::attention::{Attention, BlockLayout, Rows};
use super::matrix::{Activations, Matrix};
use super::rope::RopeTable;
use crate::kv::store::BlockStore;

/// Names the arithmetic of this file and of the modules it uses. To be changed with anything that changes a bit of the KV.
pub const NUMERICS: &str = "baton-llama-v1";

/// Rows that run through the layers together. A larger batch is cut: results do not depend on it, and the rows' activations
/// (128 rows × 1536 values × 4 bytes = 768 KiB for the embedded model) stay in the second-level cache while the weights pass by.
const PANEL: usize = 128;

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct Layer {
    pub attention_norm: Vec<f32>,
    pub query: Matrix,
    pub key: Matrix,
    pub value: Matrix,
    pub output: Matrix,
    pub feed_forward_norm: Vec<f32>,
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
}

/// Weights of a model. Every number of columns is a multiple of 32.
#[derive(Clone, Debug)]
pub struct Weights {
    pub embedding: Matrix,
    pub layers: Vec<Layer>,
    pub norm: Vec<f32>,
    /// `None`: the embedding is the output matrix too.
    pub head: Option<Matrix>,
    pub norm_epsilon: f32,
}

/// A model ready to compute.
#[derive(Debug)]
pub struct Llama {
    facts: ModelFacts,
    weights: Weights,
    rope: RopeTable,
    scratch: Scratch,
}

#[derive(Debug, Default)]
struct Scratch {
    hidden: Vec<f32>,
    normed: Vec<f32>,
    quantised: Activations,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    attended: Vec<f32>,
    projected: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    attention: Attention,
}

// Consecutive rows of a panel that are of one slice.
struct Run<'a> {
    slice: &'a SequenceSlice<'a>,
    /// Index of the slice in the batch.
    index: usize,
    /// First row in the panel.
    row: usize,
    /// Position of that row in the sequence.
    start: usize,
    count: usize,
}

impl Llama {
    pub fn new(facts: ModelFacts, weights: Weights, rope: RopeTable) -> Self {
        Self {
            facts,
            weights,
            rope,
            scratch: Scratch::default(),
        }
    }

    fn panel(&mut self, runs: &[Run<'_>], kv: &BlockStore, outputs: &mut [Output]) {
        let shape = self.facts.shape;
        let layout = BlockLayout::new(&shape, kv);
        let weights = &self.weights;
        let scratch = &mut self.scratch;
        let rows: usize = runs.iter().map(|run| run.count).sum();
        let kv_width = shape.kv_heads * shape.head_dim;
        let query_width = shape.heads * shape.head_dim;
        scratch.hidden.resize(rows * shape.hidden, 0.0);
        scratch.normed.resize(rows * shape.hidden, 0.0);
        scratch.query.resize(rows * query_width, 0.0);
        scratch.key.resize(rows * kv_width, 0.0);
        scratch.value.resize(rows * kv_width, 0.0);
        scratch.attended.resize(rows * query_width, 0.0);
        scratch.projected.resize(rows * shape.hidden, 0.0);
        scratch.gate.resize(rows * shape.feed_forward, 0.0);
        scratch.up.resize(rows * shape.feed_forward, 0.0);

        let tokens = runs
            .iter()
            .flat_map(|run| &run.slice.history[run.start..run.start + run.count]);
        for (token, row) in tokens.zip(scratch.hidden.chunks_exact_mut(shape.hidden)) {
            weights.embedding.row(*token as usize, row);
        }

        for (index, layer) in weights.layers.iter().enumerate() {
            normalise(
                &mut scratch.normed,
                &scratch.hidden,
                &layer.attention_norm,
                weights.norm_epsilon,
            );
            scratch.quantised.quantise(&scratch.normed, shape.hidden);
            layer.query.product(&scratch.quantised, &mut scratch.query);
            layer.key.product(&scratch.quantised, &mut scratch.key);
            layer.value.product(&scratch.quantised, &mut scratch.value);
            for run in runs {
                for row in 0..run.count {
                    let position = run.start + row;
                    let row = run.row + row;
                    let query = &mut scratch.query[row * query_width..][..query_width];
                    self.rope.rotate(query, shape.head_dim, position);
                    let key = &mut scratch.key[row * kv_width..][..kv_width];
                    self.rope.rotate(key, shape.head_dim, position);
                }
                let written = run.row * kv_width..(run.row + run.count) * kv_width;
                layout.write(
                    kv,
                    run.slice.blocks,
                    index,
                    run.start,
                    &scratch.key[written.clone()],
                    &scratch.value[written],
                );
                let attending = run.row * query_width..(run.row + run.count) * query_width;
                scratch.attention.attend(
                    kv,
                    layout,
                    &Rows {
                        blocks: run.slice.blocks,
                        layer: index,
                        start: run.start,
                        queries: &scratch.query[attending.clone()],
                    },
                    shape.heads,
                    &mut scratch.attended[attending],
                );
            }
            scratch.quantised.quantise(&scratch.attended, query_width);
            layer
                .output
                .product(&scratch.quantised, &mut scratch.projected);
            add(&mut scratch.hidden, &scratch.projected);

            normalise(
                &mut scratch.normed,
                &scratch.hidden,
                &layer.feed_forward_norm,
                weights.norm_epsilon,
            );
            scratch.quantised.quantise(&scratch.normed, shape.hidden);
            layer.gate.product(&scratch.quantised, &mut scratch.gate);
            layer.up.product(&scratch.quantised, &mut scratch.up);
            gated(&mut scratch.gate, &scratch.up);
            scratch
                .quantised
                .quantise(&scratch.gate, shape.feed_forward);
            layer
                .down
                .product(&scratch.quantised, &mut scratch.projected);
            add(&mut scratch.hidden, &scratch.projected);
        }

        let wanted: Vec<&Run<'_>> = runs
            .iter()
            .filter(|run| {
                run.slice.wants_output && run.start + run.count == run.slice.history.len()
            })
            .collect();
        if wanted.is_empty() {
            return;
        }
        scratch.normed.clear();
        for run in &wanted {
            let last = run.row + run.count - 1;
            scratch
                .normed
                .extend_from_slice(&scratch.hidden[last * shape.hidden..][..shape.hidden]);
        }
        scratch.projected.resize(scratch.normed.len(), 0.0);
        normalise(
            &mut scratch.projected,
            &scratch.normed,
            &weights.norm,
            weights.norm_epsilon,
        );
        scratch.quantised.quantise(&scratch.projected, shape.hidden);
        let head = weights.head.as_ref().unwrap_or(&weights.embedding);
        let mut logits = vec![0.0; wanted.len() * shape.vocabulary];
        head.product(&scratch.quantised, &mut logits);
        for (run, logits) in wanted.iter().zip(logits.chunks_exact(shape.vocabulary)) {
            outputs[run.index] = Output::Logits(logits.to_vec());
        }
    }
}

impl Model for Llama {
    fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    fn forward(&mut self, batch: &Batch<'_>, kv: &BlockStore) -> Result<StepReport, ModelError> {
        check_batch(batch, &self.facts.shape, kv)?;
        let farthest = batch.slices.iter().map(|slice| slice.history.len()).max();
        self.rope.reach(farthest.unwrap_or(0));
        let mut outputs = vec![Output::None; batch.slices.len()];
        let mut runs = Vec::new();
        let mut rows = 0;
        for (index, slice) in batch.slices.iter().enumerate() {
            let mut start = slice.start;
            while start < slice.history.len() {
                let count = (slice.history.len() - start).min(PANEL - rows);
                runs.push(Run {
                    slice,
                    index,
                    row: rows,
                    start,
                    count,
                });
                rows += count;
                start += count;
                if rows == PANEL {
                    self.panel(&runs, kv, &mut outputs);
                    runs.clear();
                    rows = 0;
                }
            }
        }
        if !runs.is_empty() {
            self.panel(&runs, kv, &mut outputs);
        }
        Ok(StepReport {
            outputs,
            duration_milliseconds: None,
        })
    }
}

/// Root-mean-square norm of every row, times the weights.
fn normalise(out: &mut [f32], rows: &[f32], weights: &[f32], epsilon: f32) {
    let width = weights.len();
    let (weights, _) = weights.as_chunks::<8>();
    for (out, row) in out.chunks_exact_mut(width).zip(rows.chunks_exact(width)) {
        let (row, _) = row.as_chunks::<8>();
        let mut sum = f32x8::ZERO;
        for values in row {
            let values = f32x8::new(*values);
            sum = values.mul_add(values, sum);
        }
        let scale = 1.0 / (sum.reduce_add() / width as f32 + epsilon).sqrt();
        let (out, _) = out.as_chunks_mut::<8>();
        for ((out, values), weights) in out.iter_mut().zip(row).zip(weights) {
            *out = (f32x8::new(*values) * scale * f32x8::new(*weights)).to_array();
        }
    }
}

fn add(left: &mut [f32], right: &[f32]) {
    for (left, right) in left.iter_mut().zip(right) {
        *left += right;
    }
}

/// SwiGLU: x / (1 + e^−x) · up.
fn gated(gate: &mut [f32], up: &[f32]) {
    let (gate, _) = gate.as_chunks_mut::<8>();
    let (up, _) = up.as_chunks::<8>();
    for (gate, up) in gate.iter_mut().zip(up) {
        let value = f32x8::new(*gate);
        let sigmoid = f32x8::ONE / (f32x8::ONE + (-value).exp());
        *gate = (value * sigmoid * f32x8::new(*up)).to_array();
    }
}

#[cfg(test)]
mod tests;

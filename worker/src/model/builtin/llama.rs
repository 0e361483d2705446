//! The forward pass of the Llama architecture: RMSNorm, grouped-query attention with rotary positions, SwiGLU.

use baton_kernels::{Activations, Host, Matrix};

use super::super::{
    Batch, Model, ModelError, ModelFacts, Output, SequenceSlice, StepReport, check_batch,
};
use super::attention::{Attention, BlockLayout, Rows};
use super::rope::RopeTable;
use crate::kv::store::BlockStore;

/// Names the arithmetic of this file, of the modules it uses and of `baton-kernels`. To be changed with anything that changes a bit of the KV.
pub const NUMERICS: &str = "baton-llama-v2";

/// Rows that run through the layers together. A larger batch is cut: results do not depend on it, and the rows' activations
/// (192 rows × 1536 values × 4 bytes = 1.2 MiB for the embedded model) stay in the second-level cache while the weights pass by. A
/// multiple of the 12 rows that a product takes at once.
const PANEL: usize = 192;

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

impl Weights {
    fn output(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}

/// A model ready to compute.
#[derive(Debug)]
pub struct Llama {
    host: Host,
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
            host: Host::best(),
            facts,
            weights,
            rope,
            scratch: Scratch::default(),
        }
    }

    /// Computes with an instruction set of the caller's choice: the same results, at another speed.
    #[must_use]
    pub fn on(mut self, host: Host) -> Self {
        self.host = host;
        self
    }

    /// Bytes of weights that a step reads, its rows of the embedding left out.
    pub fn weight_bytes(&self) -> usize {
        let layers = self.weights.layers.iter().map(|layer| {
            let matrices = [
                &layer.query,
                &layer.key,
                &layer.value,
                &layer.output,
                &layer.gate,
                &layer.up,
                &layer.down,
            ];
            matrices.map(Matrix::size).iter().sum::<usize>()
        });
        layers.sum::<usize>() + self.weights.output().size()
    }

    fn panel(&mut self, runs: &[Run<'_>], kv: &BlockStore, outputs: &mut [Output]) {
        let host = self.host;
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
            host.normalise(
                &mut scratch.normed,
                &scratch.hidden,
                &layer.attention_norm,
                weights.norm_epsilon,
            );
            scratch
                .quantised
                .quantise(host, &scratch.normed, shape.hidden);
            layer
                .query
                .product(host, &scratch.quantised, &mut scratch.query);
            layer
                .key
                .product(host, &scratch.quantised, &mut scratch.key);
            layer
                .value
                .product(host, &scratch.quantised, &mut scratch.value);
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
                    host,
                    kv,
                    layout,
                    &Rows {
                        blocks: run.slice.blocks,
                        layer: index,
                        start: run.start,
                        heads: shape.heads,
                        queries: &scratch.query[attending.clone()],
                    },
                    &mut scratch.attended[attending],
                );
            }
            scratch
                .quantised
                .quantise(host, &scratch.attended, query_width);
            layer
                .output
                .product(host, &scratch.quantised, &mut scratch.projected);
            add(&mut scratch.hidden, &scratch.projected);

            host.normalise(
                &mut scratch.normed,
                &scratch.hidden,
                &layer.feed_forward_norm,
                weights.norm_epsilon,
            );
            scratch
                .quantised
                .quantise(host, &scratch.normed, shape.hidden);
            layer
                .gate
                .product(host, &scratch.quantised, &mut scratch.gate);
            layer.up.product(host, &scratch.quantised, &mut scratch.up);
            host.gate(&mut scratch.gate, &scratch.up);
            scratch
                .quantised
                .quantise(host, &scratch.gate, shape.feed_forward);
            layer
                .down
                .product(host, &scratch.quantised, &mut scratch.projected);
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
        host.normalise(
            &mut scratch.projected,
            &scratch.normed,
            &weights.norm,
            weights.norm_epsilon,
        );
        scratch
            .quantised
            .quantise(host, &scratch.projected, shape.hidden);
        let mut logits = vec![0.0; wanted.len() * shape.vocabulary];
        weights
            .output()
            .product(host, &scratch.quantised, &mut logits);
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

fn add(left: &mut [f32], right: &[f32]) {
    for (left, right) in left.iter_mut().zip(right) {
        *left += right;
    }
}

#[cfg(test)]
mod tests;

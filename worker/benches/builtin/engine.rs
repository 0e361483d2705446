//! The Builtin engine's model, driven as a worker drives it.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use baton_kernels::Host;
use baton_worker::kv::store::{BlockId, BlockStore, Geometry};
use baton_worker::model::builtin::{self, Llama};
use baton_worker::model::{Batch, Model, SequenceKey, SequenceSlice, tiny};

use super::figures::Table;
use super::{Case, DECODE, DECODED, PREFILL};

const BLOCK_SIZE: usize = 16;
/// Of a batch.
const SEQUENCES: usize = 8;
/// Tokens that a sequence may have.
const LONGEST: usize = 2048 + 64;

pub(crate) struct Engine {
    model: Llama,
    load_seconds: f64,
    kv: BlockStore,
    tables: Vec<Vec<BlockId>>,
    tokens: Vec<u32>,
}

impl Engine {
    pub(crate) fn load(file: &Path, host: Host) -> Result<Self> {
        let start = Instant::now();
        let model = builtin::load(file)?.on(host);
        Self::new(model, start.elapsed().as_secs_f64())
    }

    pub(crate) fn tiny(host: Host) -> Result<Self> {
        Self::new(tiny::model(1).on(host), 0.0)
    }

    fn new(model: Llama, load_seconds: f64) -> Result<Self> {
        let shape = model.facts().shape;
        let geometry = Geometry {
            block_size: BLOCK_SIZE,
            bytes_per_token: shape.kv_bytes_per_token(),
        };
        let each = LONGEST.div_ceil(BLOCK_SIZE);
        let kv = BlockStore::new(geometry, SEQUENCES * each, u64::MAX)?;
        let tables = (0..SEQUENCES)
            .map(|sequence| {
                (sequence * each..(sequence + 1) * each)
                    .map(|block| BlockId(block as u32))
                    .collect()
            })
            .collect();
        let tokens = (0..LONGEST)
            .map(|index| (index * 7919 % (shape.vocabulary - 20)) as u32 + 17)
            .collect();
        let mut engine = Self {
            model,
            load_seconds,
            kv,
            tables,
            tokens,
        };
        // Touches weights and buffers once.
        engine.step(0..1, 0, 64)?;
        Ok(engine)
    }

    pub(crate) fn load_seconds(&self) -> f64 {
        self.load_seconds
    }

    pub(crate) fn weight_bytes(&self) -> usize {
        self.model.weight_bytes()
    }

    /// Computes tokens `start..end` of some sequences in one step; returns the seconds.
    fn step(&mut self, sequences: std::ops::Range<usize>, start: usize, end: usize) -> Result<f64> {
        let slices = sequences
            .map(|sequence| SequenceSlice {
                sequence: SequenceKey(sequence as u64),
                history: &self.tokens[..end],
                start,
                blocks: &self.tables[sequence],
                wants_output: true,
            })
            .collect();
        let start = Instant::now();
        self.model.forward(&Batch { slices }, &self.kv)?;
        Ok(start.elapsed().as_secs_f64())
    }

    pub(crate) fn measure(&mut self, subject: &str, table: &mut Table) -> Result<()> {
        for tokens in PREFILL {
            let seconds = self.step(0..1, 0, tokens)?;
            table.push(subject, Case::Prefill(tokens), tokens as f64 / seconds);
        }
        for context in DECODE {
            let mut seconds = 0.0;
            for token in context..context + DECODED {
                seconds += self.step(0..1, token, token + 1)?;
            }
            table.push(subject, Case::Decode(context), DECODED as f64 / seconds);
        }
        Ok(())
    }

    /// Prints what decode gives for several sequences in one step.
    pub(crate) fn batches(&mut self) -> Result<()> {
        for sequence in 1..SEQUENCES {
            self.step(sequence..sequence + 1, 0, 512 + 8)?;
        }
        for sequences in [1, 2, 4, SEQUENCES] {
            let mut least = f64::INFINITY;
            for token in 512..512 + 8 {
                least = least.min(self.step(0..sequences, token, token + 1)?);
            }
            println!(
                "  decode of {sequences} sequences after 512 tokens: {:.1} tokens/s ({:.2} ms a step, the least)",
                sequences as f64 / least,
                least * 1e3
            );
        }
        Ok(())
    }
}

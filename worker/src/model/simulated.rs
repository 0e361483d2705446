//! Simulated: no weights. The next token is a hash of the tokens before it, time comes from the cost formulas, KV is a pattern.
//!
//! The tokens are equal wherever they are computed, as for a real model, and depend on the KV that is read: a block that holds
//! another token's pattern changes what comes out, so a wrong hand-off shows.

use std::ops::Range;
use std::sync::Arc;

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use baton_placement::coefficients::WorkerCoefficients;
use baton_placement::cost;

use super::artifacts::{self, BYTE_LEVEL_TOKENS, END_OF_TEXT, MESSAGE_END};
use super::{
    Batch, Model, ModelError, ModelFacts, Output, Rope, SequenceSlice, Shape, StepReport,
    check_batch,
};
use crate::kv::store::{BlockId, BlockStore};
use crate::sampling::uniform;

/// What a simulated worker is like.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// How long steps really take. Routers are not told.
    pub coefficients: WorkerCoefficients,
    /// Standard deviation of the factor on each step's duration.
    pub noise: f64,
    /// Of the noise. Workers of one pool should differ.
    pub seed: u64,
    /// Bytes of KV per token; a multiple of 4.
    pub kv_bytes_per_token: usize,
    /// At least the 259 tokens of the byte-level vocabulary.
    pub vocabulary: usize,
    /// Instead of the byte-level vocabulary.
    pub text: Option<Text>,
    /// Tokens.
    pub max_context: usize,
}

/// The text of another model without its arithmetic: prompts have as many tokens as that model makes of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Text {
    vocabulary: usize,
    tokenizer: Arc<[u8]>,
    chat_template: Arc<[u8]>,
    eos_token_ids: Vec<u32>,
    bos_token_id: Option<u32>,
}

impl Text {
    pub fn of(facts: &ModelFacts) -> Self {
        Self {
            vocabulary: facts.shape.vocabulary,
            tokenizer: facts.tokenizer.clone(),
            chat_template: facts.chat_template.clone(),
            eos_token_ids: facts.eos_token_ids.clone(),
            bos_token_id: facts.bos_token_id,
        }
    }

    fn byte_level(vocabulary: usize) -> Self {
        Self {
            vocabulary,
            tokenizer: artifacts::tokenizer_json(&artifacts::byte_level(vocabulary)).into(),
            chat_template: artifacts::chat_template_json(
                artifacts::BYTE_LEVEL_TEMPLATE,
                Some("<|endoftext|>"),
                Some("<|im_end|>"),
                false,
            )
            .into(),
            eos_token_ids: vec![MESSAGE_END],
            bos_token_id: Some(END_OF_TEXT),
        }
    }
}

impl Settings {
    /// Noise of published step times (reference cost model, section 2).
    pub const NOISE: f64 = 0.03;

    pub fn new(coefficients: WorkerCoefficients, seed: u64) -> Self {
        Self {
            coefficients,
            noise: Self::NOISE,
            seed,
            kv_bytes_per_token: 1024,
            vocabulary: BYTE_LEVEL_TOKENS,
            text: None,
            max_context: 131_072,
        }
    }
}

/// The model.
#[derive(Debug)]
pub struct Simulated {
    facts: ModelFacts,
    settings: Settings,
    steps: u64,
}

impl Simulated {
    /// # Errors
    /// [`ModelError::Settings`] names the setting that no model can have.
    pub fn new(settings: Settings) -> Result<Self, ModelError> {
        let refuse = |field, problem: String| Err(ModelError::Settings { field, problem });
        if settings.kv_bytes_per_token == 0 || !settings.kv_bytes_per_token.is_multiple_of(4) {
            return refuse(
                "kvBytesPerToken",
                format!("{} is not a multiple of 4", settings.kv_bytes_per_token),
            );
        }
        if settings.vocabulary < BYTE_LEVEL_TOKENS {
            return refuse(
                "vocabulary",
                format!(
                    "{} is less than the {BYTE_LEVEL_TOKENS} tokens of the byte-level vocabulary",
                    settings.vocabulary
                ),
            );
        }
        if !(0.0..=0.5).contains(&settings.noise) {
            return refuse(
                "noise",
                format!("{} is not within 0 and 0.5", settings.noise),
            );
        }
        let text = settings.text.clone();
        let text = text.unwrap_or_else(|| Text::byte_level(settings.vocabulary));
        let shape = Shape {
            layers: 1,
            hidden: 0,
            feed_forward: 0,
            heads: 1,
            kv_heads: 1,
            head_dim: settings.kv_bytes_per_token / 4,
            vocabulary: text.vocabulary,
            max_context: settings.max_context,
        };
        let facts = ModelFacts {
            architecture: "simulated".to_owned(),
            weights_digest: *blake3::hash(b"baton simulated model v1").as_bytes(),
            numerics: "baton-simulated-v1".to_owned(),
            shape,
            rope: Rope {
                base: 0.0,
                dimensions: 0,
                interleaved: true,
                scaling: "None".to_owned(),
            },
            eos_token_ids: text.eos_token_ids,
            bos_token_id: text.bos_token_id,
            tokenizer: text.tokenizer,
            chat_template: text.chat_template,
        };
        Ok(Self {
            facts,
            settings,
            steps: 0,
        })
    }

    fn duration(&mut self, batch: &Batch<'_>) -> f64 {
        let exact = step_duration(&self.settings.coefficients, batch);
        self.steps += 1;
        exact * (1.0 + self.settings.noise * normal(self.settings.seed, self.steps)).max(0.1)
    }

    fn next_token(&self, slice: &SequenceSlice<'_>, kv: &BlockStore) -> u32 {
        let text: &[u8] = bytemuck::cast_slice(slice.history);
        let hash = xxh3_64_with_seed(text, self.misread(slice, kv));
        if self.settings.text.is_some() {
            return (hash % self.facts.shape.vocabulary as u64) as u32;
        }
        // Letters, space and the extra words: what a simulated worker says can be read.
        let extras = self.settings.vocabulary - BYTE_LEVEL_TOKENS;
        match (hash % (27 + extras as u64)) as u32 {
            26 => u32::from(b' '),
            letter @ 0..26 => u32::from(b'a') + letter,
            extra => BYTE_LEVEL_TOKENS as u32 + extra - 27,
        }
    }

    /// Zero if the last token of every block that was there before holds its pattern, from its first key to its last value; else a
    /// digest of what is there instead.
    fn misread(&self, slice: &SequenceSlice<'_>, kv: &BlockStore) -> u64 {
        let size = kv.geometry().block_size;
        let mut digest = 0;
        for (index, block) in slice.blocks.iter().enumerate() {
            if index * size >= slice.start {
                break;
            }
            let position = ((index + 1) * size).min(slice.start) - 1;
            let bytes = kv.read(*block);
            let first = pattern(slice.history[position], position);
            for (range, expected) in ends(kv, position % size, first) {
                let found = &bytes[range];
                if found != &expected.to_le_bytes()[..found.len()] {
                    digest = xxh3_64_with_seed(found, digest ^ 1);
                }
            }
        }
        digest
    }
}

/// Where the first word of the keys of a block's token lies and where the last of its values, with what stands there: the word after
/// which the pattern of the token begins is `first`.
fn ends(kv: &BlockStore, within: usize, first: u64) -> [(Range<usize>, u64); 2] {
    let geometry = kv.geometry();
    let half = geometry.bytes_per_token / 2;
    let keys = within * half;
    let values_end = (geometry.block_size + within + 1) * half;
    let words = 2 * half.div_ceil(8) as u64;
    // A side that is no multiple of a word ends with a part of one.
    let last = if half.is_multiple_of(8) { 8 } else { half % 8 };
    [
        (keys..keys + half.min(8), first),
        (values_end - last..values_end, first.wrapping_add(words - 1)),
    ]
}

impl Model for Simulated {
    fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    fn forward(&mut self, batch: &Batch<'_>, kv: &BlockStore) -> Result<StepReport, ModelError> {
        check_batch(batch, &self.facts.shape, kv)?;
        for slice in &batch.slices {
            for (offset, token) in slice.fresh().iter().enumerate() {
                write_token(kv, slice.blocks, *token, slice.start + offset);
            }
        }
        let outputs = batch
            .slices
            .iter()
            .map(|slice| {
                if slice.wants_output {
                    Output::Token(self.next_token(slice, kv))
                } else {
                    Output::None
                }
            })
            .collect();
        Ok(StepReport {
            outputs,
            duration_milliseconds: Some(self.duration(batch)),
        })
    }
}

/// Milliseconds of a step by the cost model. Prompts of one step share it: their tokens and their attention add up. A slice of one
/// token after others decodes.
pub(super) fn step_duration(worker: &WorkerCoefficients, batch: &Batch<'_>) -> f64 {
    let (mut tokens, mut attention) = (0.0, 0.0);
    let (mut sequences, mut context) = (0.0, 0.0);
    for slice in &batch.slices {
        let fresh = slice.fresh().len() as f64;
        let cached = slice.start as f64;
        if slice.start > 0 && slice.fresh().len() == 1 && slice.wants_output {
            sequences += 1.0;
            context += slice.history.len() as f64;
        } else {
            tokens += fresh;
            attention += fresh * cached + fresh * fresh / 2.0;
        }
    }
    if tokens > 0.0 {
        // As many cached tokens as make one prompt do the attention of all.
        let cached = (attention - tokens * tokens / 2.0) / tokens;
        cost::mixed_step(worker, tokens, cached, sequences, context)
    } else {
        cost::decode_step(worker, sequences, context)
    }
}

/// First word of the KV of a token: each following word is one more.
fn pattern(token: u32, position: usize) -> u64 {
    let mut key = [0; 12];
    key[..4].copy_from_slice(&token.to_le_bytes());
    key[4..].copy_from_slice(&(position as u64).to_le_bytes());
    xxh3_64(&key)
}

/// Writes the keys, then the values, of one token where a model of one layer and one head has them.
fn write_token(kv: &BlockStore, blocks: &[BlockId], token: u32, position: usize) {
    let geometry = kv.geometry();
    let half = geometry.bytes_per_token / 2;
    let within = position % geometry.block_size;
    let mut word = pattern(token, position);
    let mut block = kv.write(blocks[position / geometry.block_size]);
    let (keys, values) = block.split_at_mut(geometry.block_size * half);
    for side in [keys, values] {
        for chunk in side[within * half..(within + 1) * half].chunks_mut(8) {
            chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
            word = word.wrapping_add(1);
        }
    }
}

/// Standard normal number of (seed, step), by Box and Muller.
fn normal(seed: u64, step: u64) -> f64 {
    let radius = (-2.0 * (1.0 - uniform(seed, 2 * step)).ln()).sqrt();
    radius * (std::f64::consts::TAU * uniform(seed, 2 * step + 1)).cos()
}

#[cfg(test)]
mod tests;

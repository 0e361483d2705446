//! Models: the trait between an engine, which batches, and the arithmetic, which fills KV blocks and yields logits.
//!
//! A model keeps no sequence state. What it needs of a sequence is in the batch (its tokens, its block table) and in the KV
//! blocks, so a sequence can move between workers, be chunked, or reuse a prefix without the model taking part.
//!
//! Invariant of every implementation: what comes out for a sequence depends on its tokens alone. Not on what else is in the
//! batch, not on how the prompt is chunked, not on whether its earlier blocks were computed here, reused or transferred.
//!
//! - [`builtin`]: Llama-architecture GGUF on the CPU. [`tiny`]: the same arithmetic over random weights, for tests.
//! - [`simulated`]: no weights; a token is a hash of the tokens before it and time is modelled.
//! - [`modelled`]: real work in modelled time, for simulations.
//! - [`facts`]: what the card says of a model; [`artifacts`]: the tokenizer and the chat template that a model hands to routers.

use crate::kv::store::{BlockId, BlockStore};

pub mod artifacts;
pub mod builtin;
pub mod facts;
pub mod modelled;
pub mod simulated;
pub mod tiny;

pub use facts::{ModelFacts, Rope, Shape};

/// Computes KV and logits for batches of sequences.
pub trait Model: Send {
    /// What the card says of the model.
    fn facts(&self) -> &ModelFacts;

    /// Computes every slice of the batch: writes the KV of its fresh tokens into its blocks and, where wanted, returns the
    /// outcome of its last token. Outputs lie in the order of the batch's slices.
    ///
    /// The caller owns the blocks: those that hold `slice.start..slice.history.len()` are written by nobody else meanwhile,
    /// and those before hold the KV of `slice.history[..slice.start]`.
    ///
    /// # Errors
    /// [`ModelError::Batch`] names the slice that does not fit the model or the store; nothing of the batch counts then.
    fn forward(&mut self, batch: &Batch<'_>, kv: &BlockStore) -> Result<StepReport, ModelError>;
}

/// Names a sequence in errors and logs; the engine's own number for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceKey(pub u64);

/// What one call computes.
#[derive(Clone, Debug, Default)]
pub struct Batch<'a> {
    pub slices: Vec<SequenceSlice<'a>>,
}

/// The part of one sequence that is computed now.
#[derive(Clone, Debug)]
pub struct SequenceSlice<'a> {
    pub sequence: SequenceKey,
    /// All tokens of the sequence up to the last one computed now.
    pub history: &'a [u32],
    /// Tokens whose KV is already in the blocks; `history[start..]` is computed. At least one token must be left.
    pub start: usize,
    /// Blocks of the sequence from its first token on; long enough for `history.len()` tokens.
    pub blocks: &'a [BlockId],
    /// Whether the outcome of the last token is wanted: no for every chunk of a prompt but its last.
    pub wants_output: bool,
}

impl SequenceSlice<'_> {
    /// The tokens computed now.
    pub fn fresh(&self) -> &[u32] {
        self.history.get(self.start..).unwrap_or_default()
    }
}

/// What came of one call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// One for each slice, in order.
    pub outputs: Vec<Output>,
    /// Modelled duration of the step in milliseconds; `None` where the work was real and the caller measures.
    pub duration_milliseconds: Option<f64>,
}

/// What came of a slice's last token.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Nothing was asked for.
    None,
    /// Unnormalised log-probabilities, one for each id of the vocabulary.
    Logits(Vec<f32>),
    /// The next token itself, from a model that has no distribution.
    Token(u32),
}

/// Why a model could not be loaded, or a batch not computed.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("model file {file}: {problem}; give the path of a readable GGUF file")]
    Unreadable { file: String, problem: String },
    #[error("model file {file}: {field}: {problem}")]
    Malformed {
        file: String,
        field: String,
        problem: String,
    },
    #[error("model settings: {field}: {problem}")]
    Settings {
        field: &'static str,
        problem: String,
    },
    #[error("sequence {}: {problem}", sequence.0)]
    Batch {
        sequence: SequenceKey,
        problem: String,
    },
    #[error(
        "kv store does not fit the model: a block holds {found} bytes, {expected} are needed for {tokens} tokens"
    )]
    Geometry {
        expected: usize,
        found: usize,
        tokens: usize,
    },
}

/// Checks what every model requires of a batch, before anything is computed or written.
///
/// # Errors
/// [`ModelError::Geometry`] for a store of another size, [`ModelError::Batch`] for the first slice that is empty, too long, holds
/// an id beyond the vocabulary, has too few blocks or one that is not of this store.
pub fn check_batch(batch: &Batch<'_>, shape: &Shape, kv: &BlockStore) -> Result<(), ModelError> {
    let expected = kv.geometry().block_size * shape.kv_bytes_per_token();
    if kv.block_bytes() != expected {
        return Err(ModelError::Geometry {
            expected,
            found: kv.block_bytes(),
            tokens: kv.geometry().block_size,
        });
    }
    let block_tokens = kv.geometry().block_size;
    for slice in &batch.slices {
        let refuse = |problem: String| ModelError::Batch {
            sequence: slice.sequence,
            problem,
        };
        let length = slice.history.len();
        if slice.fresh().is_empty() {
            return Err(refuse(format!(
                "no token to compute: start {} of {length} tokens",
                slice.start
            )));
        }
        if length > shape.max_context {
            return Err(refuse(format!(
                "{length} tokens are more than the context of {}",
                shape.max_context
            )));
        }
        if slice.blocks.len() * block_tokens < length {
            return Err(refuse(format!(
                "{} blocks of {block_tokens} tokens do not hold {length} tokens",
                slice.blocks.len()
            )));
        }
        if let Some(block) = slice.blocks.iter().find(|block| block.index() >= kv.len()) {
            return Err(refuse(format!(
                "block {block} is not of this store of {} blocks",
                kv.len()
            )));
        }
        if let Some(token) = slice
            .fresh()
            .iter()
            .find(|token| **token as usize >= shape.vocabulary)
        {
            return Err(refuse(format!(
                "token id {token} is beyond the vocabulary of {}",
                shape.vocabulary
            )));
        }
    }
    Ok(())
}

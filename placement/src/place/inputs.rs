//! All that a cost is made of besides coefficients, request and policy. Recorded, so that replay needs nothing else.

use serde::{Deserialize, Serialize};

use crate::cost::ChunkRule;

/// Inputs of one candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Inputs {
    /// The worker that computes the prompt.
    pub compute: ComputeInputs,
    /// The worker that generates; for a local plan the same one.
    pub decode: DecodeInputs,
    /// Between them; none for a local plan.
    pub link: Option<LinkInputs>,
}

/// The worker that computes the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ComputeInputs {
    /// Position in the coefficient set.
    pub class: u32,
    pub chunks: ChunkRule,
    /// Recorded beside the inputs, as `cachedTokens`.
    #[serde(skip)]
    pub cached_tokens: u32,
    /// As reported.
    pub queued_tokens: u64,
    pub queued_sequences: u32,
    /// Sent there by this router and not reported yet.
    pub own_tokens: u64,
    pub own_sequences: u32,
    /// Decoding there, own dispatches included, and their context.
    pub running_sequences: u32,
    pub context_tokens: u64,
    /// Milliseconds left of its step when it reported, and since then.
    pub step_remaining: f64,
    pub report_age: f64,
    /// A worker of a prefill pool that would take a whole request.
    pub pooled: bool,
}

/// The worker that generates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DecodeInputs {
    pub class: u32,
    /// Recorded beside the inputs, as `cachedTokens`.
    #[serde(skip)]
    pub cached_tokens: u32,
    /// Decoding there, own dispatches included, and their context.
    pub running_sequences: u32,
    pub context_tokens: u64,
    /// Admitted, and not decoding yet, with the tokens they still compute.
    pub waiting_sequences: u32,
    pub waiting_tokens: u64,
    pub max_sequences: u32,
    /// Needed beyond what is cached there.
    pub needed_blocks: u32,
    pub free_blocks: u32,
    pub used_blocks: u32,
    pub report_age: f64,
}

/// The link from the one to the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkInputs {
    /// Nearest common level, by position.
    pub level: u32,
    /// Position in the coefficient set.
    pub link: u32,
    /// Position among the fleet's transports.
    pub transport: u32,
    pub missing_bytes: u64,
    pub missing_blocks: u32,
    pub promised_bytes: u64,
    pub block_size: u32,
    pub bytes_per_block: u64,
}

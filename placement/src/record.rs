//! The decision record, schema `baton.decision.v1`: one JSON object a line, a contract with whoever reads the files.
//!
//! A record holds every input of its decision. With the coefficient set (`coefficients/<digest>.json`) and the policy
//! (`policies/<digest>.json`) stored beside it, `replay` makes the same decision again. Prompts and tokens are never in it.
//! More than 64 candidates are cut to the best 32 *before* the choice is made, keeping every one that any rule would take; the
//! rest are counted in `filtered` (`ProvedWorse`, `NotRecorded`), and replay chooses among the same 32.

mod later;
mod life;
mod made;

use std::collections::BTreeMap;

use baton_protocol::ids::{RunId, WorkerId};
use serde::{Deserialize, Serialize};

pub use later::LaterDecision;
pub use life::{Actual, ActualTerms, Fallback, RunOutcome, RunStatus, StateEntry, TransportLeft};
pub use made::RecordHead;

use crate::place::{ComputeInputs, DecodeInputs, Filtered, Reason, Terms};
use crate::policy::Assurance;

/// What the `schema` field says.
pub const SCHEMA: &str = "baton.decision.v1";

/// One decision, and what became of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DecisionRecord {
    pub schema: String,
    pub run: RunId,
    pub request_id: String,
    /// RFC 3339 with microseconds.
    pub time: String,
    /// The router's clock, milliseconds, as `place` had it.
    pub now: f64,
    /// Below 2⁵³.
    pub random_seed: u64,
    /// Digest of the coefficient set.
    pub coefficients: String,
    pub policy: PolicyName,
    pub fleet_version: u64,
    pub index_age_milliseconds: f64,
    pub model: String,
    /// Of the worker that generates; empty where none was chosen.
    pub kv_identity: String,
    /// The mode in force, the request's own where the policy allows it.
    pub mode: String,
    /// What the request asked for, whether the policy allows it or not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode_asked: Option<String>,
    /// Names of the fleet's topology levels, nearest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub levels: Vec<String>,
    /// The pool of each worker that a candidate names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pools: BTreeMap<WorkerId, String>,
    pub input: RecordedInput,
    pub candidates: Vec<RecordedCandidate>,
    pub filtered: Filtered,
    /// Position in `candidates`.
    pub chosen: Option<usize>,
    pub runner_up: Option<usize>,
    pub reason: Reason,
    pub explanation: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow: Option<Shadow>,
    #[serde(default)]
    pub states: Vec<StateEntry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actual: Option<Actual>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assurance: Option<Assurance>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<RunOutcome>,
    /// Decisions of later attempts, oldest first; the fields above are the first one's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub later_decisions: Vec<LaterDecision>,
    /// Fields of a later release: kept when a record is read and written again.
    #[serde(flatten)]
    pub more: BTreeMap<String, serde_json::Value>,
}

/// The policy in force, by digest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyName {
    pub name: String,
    pub generation: u64,
    pub digest: String,
}

/// What of the request and of the fleet as a whole was read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecordedInput {
    pub tokens: u32,
    /// Hash of the first full block: requests with an equal one share a prefix. Keyed, so that it tells nothing of the text.
    pub prefix_fingerprint: String,
    pub max_output_tokens: u32,
    pub expected_output_tokens: f64,
    pub local_without_prefill: u32,
    pub waited_milliseconds: f64,
    pub local_workers: u32,
    pub prefill_pools: bool,
    #[serde(default)]
    pub whole: bool,
    /// Of the policy's workers, whatever their state, none could ever hold the prompt's KV.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub too_large: bool,
    /// Of a request that an engine tokenises itself: whether its prefix was credited. Absent where it was tokenised here for good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credit: Option<Credit>,
    /// The field of the request for which it stays on one worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsplittable: Option<String>,
}

/// Whether a prompt that an engine tokenises was looked up in prefix caches; where it was not, `tokens` is an estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Credit {
    /// It was tokenised as the engine does, and looked up.
    Tokens,
    /// No tokenizer of its model is known.
    NoTokenizer,
    /// The card says that the engine may make other tokens.
    TextUnverified,
    /// Images, sound and what else is no text.
    NotText,
    /// It has a form that is not read here: several prompts, a template of the client's own, another endpoint.
    Unread,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Local,
    Remote,
}

/// A plan with its inputs and what it was estimated to cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecordedCandidate {
    pub kind: Kind,
    /// None for a local plan: `decode` does it all.
    pub prefill: Option<WorkerId>,
    pub decode: WorkerId,
    pub cached_tokens: CachedTokens,
    pub inputs: RecordedInputs,
    /// Milliseconds, before weighting.
    pub terms: Terms,
    /// Estimated time to the first token, milliseconds.
    pub mean: f64,
    /// What 95 of 100 stay below.
    pub upper: f64,
    /// The weighted sum that was minimised (J).
    pub cost: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CachedTokens {
    /// On the worker that computes.
    pub prefill: u32,
    /// On the worker that generates.
    pub decode: u32,
}

/// All that `place` read about one plan. The flat fields are about the worker that computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecordedInputs {
    #[serde(flatten)]
    pub compute: ComputeInputs,
    /// The worker that generates.
    pub decode: DecodeInputs,
    /// Of KV to move; 0 for a local plan.
    pub missing_bytes: u64,
    pub missing_blocks: u32,
    /// Promised to the link before.
    pub promised_bytes: u64,
    /// Nearest common level; none for a local plan.
    pub level: Option<String>,
    /// Position in the coefficient set; none for a local plan.
    pub link: Option<u32>,
    pub transport: Option<String>,
    pub block_size: u32,
    pub bytes_per_block: u64,
}

/// What a second policy would have done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Shadow {
    pub policy: PolicyName,
    pub chosen: Option<usize>,
    pub reason: Reason,
}

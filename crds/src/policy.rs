//! `RoutePolicySpec`: joins pools to a model and says how to place its requests.
//!
//! What is left out stays `None` where the default is placement's own affair (weights, margins, budgets); where the
//! design names a default word, that word is the default here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// How requests for one model are placed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoutePolicySpec {
    /// As clients ask for it.
    pub model: String,
    /// Other names for the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// None: aggregated serving on the decode pools.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefill_pools: Vec<PoolReference>,
    pub decode_pools: Vec<PoolReference>,
    #[serde(default)]
    pub mode: Mode,
    /// Uncached prompt tokens from which on prefill is remote; with `mode: Threshold` only, and there required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threshold_tokens: Option<i64>,
    #[serde(default)]
    pub overrides: Overrides,
    #[serde(default)]
    pub objective: Objective,
    #[serde(default)]
    pub pooling: Pooling,
    #[serde(default)]
    pub cost: Cost,
    #[serde(default)]
    pub cache: Cache,
    #[serde(default)]
    pub topology: PolicyTopology,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_no_prefill: Option<OnNoPrefill>,
    #[serde(default)]
    pub fallback: Fallback,
    #[serde(default)]
    pub first_token: FirstToken,
    #[serde(default)]
    pub timeouts: Timeouts,
    #[serde(default)]
    pub admission: Admission,
    #[serde(default)]
    pub verify: Verify,
}

/// One pool by name, or all whose labels match. Exactly one of the two is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolReference {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<Selector>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Selector {
    /// All of them have to be on the pool.
    pub match_labels: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    #[default]
    Conditional,
    Aggregated,
    Disaggregated,
    Threshold,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Overrides {
    #[default]
    Ignored,
    Allowed,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Objective {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_milliseconds: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_milliseconds: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_to_end_milliseconds: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percentile: Option<i64>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pooling {
    #[default]
    Pooled,
    Strict,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Cost {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<Preset>,
    pub weights: Weights,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin_percent: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin_milliseconds: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_percent: Option<i64>,
    pub level_penalty_milliseconds: BTreeMap<String, i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preset {
    Balanced,
    Latency,
}

/// Percent over the preset's weights; a missing one is 100. The names are those of the cost formula.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Weights {
    /// A millisecond in the queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wq: Option<i64>,
    /// A millisecond of prefill, exposed transfer and what comes before the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wt: Option<i64>,
    /// A millisecond of machine time taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wm: Option<i64>,
    /// A millisecond that a resident stream waits because of this prefill.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lambda: Option<i64>,
    /// A millisecond of the request's own decode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wo: Option<i64>,
    /// A millisecond by which its decode slows the streams beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wd: Option<i64>,
    /// Missing an objective.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v: Option<i64>,
    /// How often the queue counts in the check of the objective for the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uq: Option<i64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Cache {
    pub source: CacheSource,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stale_after_milliseconds: Option<i64>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CacheSource {
    #[default]
    Events,
    None,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PolicyTopology {
    pub enforcement: Enforcement,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub farthest_level: Option<String>,
    pub breaker: Breaker,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Enforcement {
    Required,
    #[default]
    Preferred,
    Ignored,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Breaker {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failures: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_seconds: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open_seconds: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowdown_percent: Option<i64>,
}

/// What to do with a request that wants remote prefill when there is none to be had.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OnNoPrefill {
    pub action: NoPrefillAction,
    /// Budget of `Local`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_concurrent_per_worker: Option<i64>,
    /// Budget of `Queue`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_milliseconds: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NoPrefillAction {
    Local,
    Queue,
    Reject,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Fallback {
    pub local_recompute: LocalRecompute,
    /// Times that a failed remote path is planned anew. Default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replans: Option<i64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LocalRecompute {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_concurrent_per_worker: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_percent: Option<i64>,
}

/// Who samples the first token of a remote plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FirstToken {
    #[default]
    Prefill,
    Decode,
}

/// How long a run may stay in a state, in seconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Timeouts {
    /// From dispatch to the reservation on the decode worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserve_seconds: Option<i64>,
    /// From dispatch to the first prefill step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_start_seconds: Option<i64>,
    /// From the first prefill step to the seal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_seconds: Option<i64>,
    /// From the seal to the last verified block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer_seconds: Option<i64>,
    /// From the KV being there to the first decode step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_start_seconds: Option<i64>,
    /// Between two tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_seconds: Option<i64>,
    /// From acceptance to the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_seconds: Option<i64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Admission {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_queued_per_worker: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_seconds: Option<i64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Verify {
    pub require: Assurance,
    pub checksum: Checksum,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Assurance {
    Verified,
    #[default]
    EngineTrusted,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Checksum {
    #[default]
    Always,
    Sampled,
    Off,
}

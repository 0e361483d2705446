//! How to place: the policy types that the router reads, records by digest and replays with. Times in milliseconds.
//!
//! `policy::cost` has presets and weights, `policy::check` what is refused and why.

mod check;
mod cost;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use check::PolicyError;
pub use cost::{CostPolicy, Preset, WeightPercents, Weights};

use crate::digest;

/// One policy per served model. Everything but `name`, `model` and `decodePools` has a default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Policy {
    pub name: String,
    /// Of the object this came from; rises with each change.
    #[serde(default)]
    pub generation: u64,
    /// As clients ask for it.
    pub model: String,
    #[serde(default)]
    pub aliases: Vec<String>,
    /// None: every request runs whole on one worker.
    #[serde(default)]
    pub prefill_pools: Vec<String>,
    pub decode_pools: Vec<String>,
    #[serde(default)]
    pub mode: Mode,
    #[serde(default)]
    pub overrides: Overrides,
    #[serde(default)]
    pub objective: Objective,
    #[serde(default)]
    pub pooling: Pooling,
    #[serde(default)]
    pub cost: CostPolicy,
    #[serde(default)]
    pub topology: TopologyPolicy,
    #[serde(default)]
    pub on_no_prefill: OnNoPrefill,
    #[serde(default)]
    pub fallback: FallbackPolicy,
    #[serde(default)]
    pub first_token: FirstToken,
    #[serde(default)]
    pub timeouts: Timeouts,
    #[serde(default)]
    pub admission: AdmissionPolicy,
    #[serde(default)]
    pub verify: VerifyPolicy,
    #[serde(default)]
    pub cache: CachePolicy,
    /// Kinds of transport in order of preference; those not named come after, in the order in which the fleet has them.
    #[serde(default)]
    pub transports: Vec<String>,
}

impl Policy {
    /// A policy of defaults.
    pub fn new(name: &str, model: &str, prefill_pools: &[&str], decode_pools: &[&str]) -> Self {
        Self {
            name: name.to_owned(),
            generation: 1,
            model: model.to_owned(),
            aliases: Vec::new(),
            prefill_pools: prefill_pools.iter().map(|&pool| pool.to_owned()).collect(),
            decode_pools: decode_pools.iter().map(|&pool| pool.to_owned()).collect(),
            mode: Mode::default(),
            overrides: Overrides::default(),
            objective: Objective::default(),
            pooling: Pooling::default(),
            cost: CostPolicy::default(),
            topology: TopologyPolicy::default(),
            on_no_prefill: OnNoPrefill::default(),
            fallback: FallbackPolicy::default(),
            first_token: FirstToken::default(),
            timeouts: Timeouts::default(),
            admission: AdmissionPolicy::default(),
            verify: VerifyPolicy::default(),
            cache: CachePolicy::default(),
            transports: Vec::new(),
        }
    }

    /// The name of the file that holds this policy, without `.json`.
    pub fn digest(&self) -> String {
        digest::of_json(self)
    }
}

/// How local and remote are chosen. All but `Conditional` are baselines or fixed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Mode {
    /// By cost, for every request.
    #[default]
    Conditional,
    /// Never remote: the worker with the least queue and uncached prefill.
    Aggregated,
    /// Always remote: the cheapest pair.
    Disaggregated,
    /// Remote when at least so many tokens are not cached on the decode worker picked first (llm-d's rule).
    Threshold { tokens: u32 },
    /// Dynamo's `isl_bounding`: local when the uncached input is below `tokens` and below `ratio` of the whole.
    DynamoIslBounding {
        #[serde(default = "dynamo_tokens")]
        tokens: u32,
        #[serde(default = "dynamo_ratio")]
        ratio: f64,
    },
    /// Dynamo's `isl_or_load`: as before, or when the prefill worker of the cheapest pair has more than `busyTokens` queued.
    DynamoIslOrLoad {
        #[serde(default = "dynamo_tokens")]
        tokens: u32,
        #[serde(default = "dynamo_ratio")]
        ratio: f64,
        #[serde(default = "dynamo_busy", rename = "busyTokens")]
        busy_tokens: u64,
    },
}

fn dynamo_tokens() -> u32 {
    2048
}

fn dynamo_ratio() -> f64 {
    0.7
}

fn dynamo_busy() -> u64 {
    8192
}

impl Mode {
    /// One word, as records and headers have it.
    pub fn word(&self) -> &'static str {
        match self {
            Mode::Conditional => "Conditional",
            Mode::Aggregated => "Aggregated",
            Mode::Disaggregated => "Disaggregated",
            Mode::Threshold { .. } => "Threshold",
            Mode::DynamoIslBounding { .. } => "DynamoIslBounding",
            Mode::DynamoIslOrLoad { .. } => "DynamoIslOrLoad",
        }
    }

    /// The modes that a request may ask for with `x-baton-mode`.
    pub fn from_header(value: &str) -> Option<Self> {
        match value {
            "Conditional" => Some(Mode::Conditional),
            "Aggregated" => Some(Mode::Aggregated),
            "Disaggregated" => Some(Mode::Disaggregated),
            _ => None,
        }
    }
}

/// Whether a request's `x-baton-mode` header counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Overrides {
    #[default]
    Ignored,
    Allowed,
}

/// What clients were promised. Without any of it, placement minimises latency alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Objective {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_milliseconds: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot_milliseconds: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_to_end_milliseconds: Option<f64>,
    /// Of requests that shall meet it. For reports; placement treats every request alike.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percentile: Option<f64>,
}

impl Objective {
    pub fn is_empty(&self) -> bool {
        self.ttft_milliseconds.is_none()
            && self.tpot_milliseconds.is_none()
            && self.end_to_end_milliseconds.is_none()
    }
}

/// Which workers may take a whole request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pooling {
    /// Any whose engine can both prefill and decode.
    #[default]
    Pooled,
    /// Those of the decode pools.
    Strict,
}

/// How far apart prefill and decode may be, and when a link is not trusted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TopologyPolicy {
    #[serde(default)]
    pub enforcement: Enforcement,
    /// A level's name; pairs that share only a farther one are farther. None: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub farthest_level: Option<String>,
    #[serde(default)]
    pub breaker: BreakerPolicy,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Enforcement {
    /// Farther pairs are never used.
    Required,
    /// Farther pairs are used where there is no nearer one.
    #[default]
    Preferred,
    /// Neither limit nor penalties count.
    Ignored,
}

/// When a link is opened (taken out of use) and tried again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct BreakerPolicy {
    pub failures: u32,
    pub window_seconds: f64,
    pub open_seconds: f64,
    /// Actual over expected duration, in percent, at which a transfer counts as a failure.
    pub slowdown_percent: f64,
}

impl Default for BreakerPolicy {
    fn default() -> Self {
        Self {
            failures: 3,
            window_seconds: 30.0,
            open_seconds: 10.0,
            slowdown_percent: 300.0,
        }
    }
}

/// What happens when a remote plan cannot be had because there is no prefill worker for it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct OnNoPrefill {
    pub action: NoPrefillAction,
    /// For `Local`: runs at once on each decode worker; beyond it the request is rejected.
    pub max_concurrent_per_worker: u32,
    /// For `Queue`: how long a request may wait.
    pub queue_milliseconds: f64,
}

impl Default for OnNoPrefill {
    fn default() -> Self {
        Self {
            action: NoPrefillAction::Local,
            max_concurrent_per_worker: 16,
            queue_milliseconds: 5_000.0,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NoPrefillAction {
    #[default]
    Local,
    Queue,
    Reject,
}

/// What happens when a hand-off fails.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct FallbackPolicy {
    pub local_recompute: LocalRecompute,
    /// New plans after the first.
    pub replans: u32,
}

impl Default for FallbackPolicy {
    fn default() -> Self {
        Self {
            local_recompute: LocalRecompute::default(),
            replans: 1,
        }
    }
}

/// The budget of local recompute: both limits hold.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct LocalRecompute {
    pub max_concurrent_per_worker: u32,
    /// Of the runs of the last minute.
    pub max_percent: f64,
}

impl Default for LocalRecompute {
    fn default() -> Self {
        Self {
            max_concurrent_per_worker: 2,
            max_percent: 10.0,
        }
    }
}

/// Who samples the first token of a remote run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FirstToken {
    /// The prefill worker; it is streamed at once and the transfer hides behind it.
    #[default]
    Prefill,
    /// The decode worker, after the transfer.
    Decode,
}

/// The longest that a run may stay in a state, and in all.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Timeouts {
    /// From dispatch to the reservation on the decode worker.
    pub reserve_seconds: f64,
    /// From dispatch to the first prefill step.
    pub prefill_start_seconds: f64,
    /// From the first prefill step to the seal.
    pub prefill_seconds: f64,
    /// From the seal to the last verified block.
    pub transfer_seconds: f64,
    /// From the KV being there to the first decode step.
    pub decode_start_seconds: f64,
    /// Between two tokens.
    pub token_seconds: f64,
    /// From acceptance to the end.
    pub total_seconds: f64,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            reserve_seconds: 30.0,
            prefill_start_seconds: 60.0,
            prefill_seconds: 120.0,
            transfer_seconds: 30.0,
            decode_start_seconds: 30.0,
            token_seconds: 60.0,
            total_seconds: 600.0,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AdmissionPolicy {
    /// Requests that wait for prefill on one worker; a worker with as many is not a candidate.
    pub max_queued_per_worker: u32,
    /// What a 429 or 503 says in `Retry-After`.
    pub retry_after_seconds: u32,
}

impl Default for AdmissionPolicy {
    fn default() -> Self {
        Self {
            max_queued_per_worker: 64,
            retry_after_seconds: 1,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct VerifyPolicy {
    pub require: Assurance,
    pub checksum: Checksum,
}

/// Who vouches for moved KV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Assurance {
    /// Baton checked every block.
    Verified,
    /// An engine's own connector moved it.
    #[default]
    EngineTrusted,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Checksum {
    #[default]
    Always,
    Sampled,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CachePolicy {
    pub source: CacheSource,
    /// A worker whose index is older has no hits.
    pub stale_after_milliseconds: f64,
}

impl Default for CachePolicy {
    fn default() -> Self {
        Self {
            source: CacheSource::Events,
            stale_after_milliseconds: 10_000.0,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CacheSource {
    /// What workers report.
    #[default]
    Events,
    /// What the router remembers. Not built yet.
    Approximate,
    /// No hits.
    None,
}

/// Penalties by level name, in milliseconds.
pub type LevelPenalties = BTreeMap<String, f64>;

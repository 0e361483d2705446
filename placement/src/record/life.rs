//! What became of a run: its states, what it really cost, how it ended. Filled by the router after the decision.

use baton_protocol::ids::{Generation, Incarnation, OperationId, WorkerId};
use serde::{Deserialize, Serialize};

/// One state that was entered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StateEntry {
    /// As `baton_protocol::lifecycle` names it.
    pub state: String,
    /// RFC 3339 with microseconds.
    pub at: String,
    pub attempt: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<OperationId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<WorkerId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<Incarnation>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<Generation>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Not reported by the engine, but it must have been.
    #[serde(default)]
    pub inferred: bool,
}

/// What the chosen plan really cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Actual {
    pub terms: ActualTerms,
    /// From the first dispatch to the first token: what the chosen candidate's `mean` estimates. `outcome.ttftMilliseconds` begins
    /// with the request's arrival, and has its upload, the line and the search in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_token_milliseconds: Option<f64>,
    /// KV moved.
    pub bytes: u64,
    pub transport: Option<String>,
    /// The transport that the plan was estimated with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned_transport: Option<String>,
    /// Transports that turned out to be closed to the pair, in the order in which they were left.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transports_left: Vec<TransportLeft>,
    pub retries: u32,
    /// Of a hand-off that engines make by themselves: transfers that the engine which generated counts as given up, as failed or as ended by
    /// their owner, between the second leg and its second report after the answer has begun. None: no such hand-off, no such report, or some
    /// were given up while others were under way to the same engine, or other routers send it requests, so that nobody knows of which request
    /// they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_transfers: Option<u64>,
}

/// A transport that was left for the next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TransportLeft {
    pub from: String,
    pub to: String,
    /// One word: what was in the way, as the reader says it.
    pub cause: String,
}

/// Milliseconds; null where nothing could be observed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ActualTerms {
    pub queue: Option<f64>,
    pub prefill: Option<f64>,
    pub transfer: Option<f64>,
    pub synchronization: Option<f64>,
    pub admission: Option<f64>,
}

/// A remote plan that was given up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fallback {
    /// A `baton_protocol::failure` word.
    pub cause: String,
    /// RFC 3339 with microseconds.
    pub at: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunStatus {
    Completed,
    Failed,
    Cancelled,
    /// Never dispatched.
    Rejected,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunOutcome {
    pub status: RunStatus,
    pub ttft_milliseconds: Option<f64>,
    pub tpot_milliseconds: Option<f64>,
    pub input_tokens: u32,
    pub cached_tokens: u32,
    pub output_tokens: u32,
    pub finish_reason: Option<String>,
}

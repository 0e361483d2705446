//! What a cluster says about a pool and about a policy: their `status`.
//!
//! Nothing here is a live figure: a status changes when the state of a rollout or of a worker does, so that an idle cluster writes
//! nothing.

use serde::{Deserialize, Serialize};

/// Longest text of a condition's message, in characters.
pub const LONGEST_MESSAGE: usize = 1024;
/// Revisions, and domains, that the status of a pool has room for: an API server refuses a status with more, whole.
pub const MOST_REVISIONS: usize = 64;
pub const MOST_DOMAINS: usize = 256;
/// Longest path of a domain, and longest digest of a KV identity, in characters.
pub const LONGEST_PATH: usize = 512;
pub const LONGEST_IDENTITY: usize = 128;
/// Pairs, and routers, that the status of a policy has room for.
pub const MOST_PAIRS: usize = 256;
pub const MOST_ROUTERS: usize = 64;

/// `status` of both pool kinds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolStatus {
    /// Of the spec that the rest is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Pods that are there, without those that drain: what `/scale` counts.
    pub replicas: i32,
    /// Of these: ready.
    pub ready_replicas: i32,
    /// Of these: ready and serving.
    pub available_replicas: i32,
    /// Of these: of the current revision.
    pub updated_replicas: i32,
    /// Pods that finish what they run and go then.
    pub draining_replicas: i32,
    /// `READY/WANTED`, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<String>,
    /// Of the pods that `replicas` counts, in the form of a query: what `/scale` hands to autoscalers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// The current one first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub revisions: Vec<RevisionStatus>,
    /// Where the ready pods are, sorted by path; of a farther level where the nearest has more than [`MOST_DOMAINS`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub domains: Vec<DomainStatus>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// The pods of one revision.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RevisionStatus {
    pub hash: String,
    /// Digest, as the cards of the revision's workers name it; absent until one was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_identity: Option<String>,
    pub ready: i32,
    pub draining: i32,
}

/// The ready pods of one transfer domain.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DomainStatus {
    /// Domains from the farthest level to the nearest, joined by `/`.
    pub path: String,
    pub ready: i32,
}

/// `status` of a `RoutePolicy`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RoutePolicyStatus {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The newest generation that was accepted: what routers serve by while a later one is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_good_generation: Option<i64>,
    /// Every prefill revision with every decode revision.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pairs: Vec<PairStatus>,
    /// Sorted by pod.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub routers: Vec<RouterStatus>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// Whether KV of one prefill revision can be handed to one decode revision.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PairStatus {
    pub prefill_pool: String,
    pub prefill_revision: String,
    pub decode_pool: String,
    pub decode_revision: String,
    pub compatible: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub differences: Vec<Difference>,
}

/// A field in which the two sides of a pair differ.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Difference {
    pub field: String,
    pub prefill: String,
    pub decode: String,
}

/// What a router has in force of a policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RouterStatus {
    pub pod: String,
    /// Absent: the router has none of this policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
    /// Why the router does not take the newest one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// As Kubernetes' `metav1.Condition`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    #[serde(rename = "type")]
    pub condition_type: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// RFC 3339, whole seconds; the time at which `status` last became another.
    pub last_transition_time: String,
    /// One CamelCase word.
    pub reason: String,
    #[serde(default)]
    pub message: String,
}

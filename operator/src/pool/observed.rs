//! What the planner of a pool is told.

use std::collections::{BTreeMap, BTreeSet};

use baton_crds::status::PoolStatus;
use baton_crds::{PoolRole, PoolSpec};
use baton_protocol::card::Card;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

/// Everything that a plan depends on, but for random numbers.
#[derive(Debug, Clone)]
pub struct Observed {
    pub pool: PoolObject,
    /// Rules that the spec breaks, one sentence each: an object may be older than a rule. Not empty: no pod is changed.
    pub refusals: Vec<String>,
    /// All pods of the namespace that carry the pool's label, those of others too, with own writes laid over
    /// ([`super::Pending::overlay`]).
    pub pods: Vec<Pod>,
    /// Name → labels of all nodes that the cache knows.
    pub nodes: BTreeMap<String, BTreeMap<String, String>>,
    /// Pod name → what its worker said when it was last asked. A pod that was never asked is absent.
    pub workers: BTreeMap<String, WorkerReport>,
    pub policies: PolicyFacts,
    /// The one that is named as the pool's would be (`POOL-KIND`), whoever it belongs to.
    pub disruption_budget: Option<PodDisruptionBudget>,
    /// Why the last pod that was to be created was refused; none after one was created, or none was to be.
    pub creation_error: Option<CreationError>,
    pub settings: Settings,
    pub now: Timestamp,
}

/// What the API server answered to the creation of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreationError {
    /// Of HTTP, where it has answered.
    pub code: Option<u16>,
    /// In its own words.
    pub message: String,
}

/// A `PrefillPool` or a `DecodePool`.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolObject {
    pub role: PoolRole,
    pub name: String,
    pub namespace: String,
    pub uid: String,
    pub generation: i64,
    pub labels: BTreeMap<String, String>,
    /// It has a deletion timestamp: only the garbage collector acts on its pods from then on.
    pub deleting: bool,
    pub spec: PoolSpec,
    pub status: Option<PoolStatus>,
}

/// What one worker said. A card outlives its reading: it is that of the last answer, as long as the pod's container is the one that
/// gave it.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerReport {
    /// Or why it could not be read, in words that name the address and the next step.
    pub card: Result<Box<Card>, String>,
    pub load: Result<WorkerLoad, String>,
}

/// Of `GET /v1/load`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkerLoad {
    pub running_sequences: u64,
    pub queued_sequences: u64,
    pub leases_open: u64,
    /// The worker takes nothing new.
    pub draining: bool,
    /// Nor does it while vLLM's plug-in, by which its server hands over, is not there.
    pub lacks_plug_in: bool,
    /// Blocks of its prefix cache: how warm it is.
    pub cached_blocks: u64,
}

/// What the RoutePolicies that name the pool mean for it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PolicyFacts {
    /// Names of the policies, sorted.
    pub named_by: Vec<String>,
    /// The tightest of theirs.
    pub tpot_objective_milliseconds: Option<i64>,
    /// Levels of topology that they name.
    pub levels: BTreeSet<String>,
    /// None where no policy pairs the pool with another.
    pub compatible: Option<Compatibility>,
}

/// Whether the pool's declaration lets it be paired with the pools that its policies pair it with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compatibility {
    pub holds: bool,
    /// With whom it can be paired, or which fields differ, with both values.
    pub message: String,
}

/// The operator's own configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Image of workers whose pool names none.
    pub worker_image: Option<String>,
    /// Nearest first.
    pub levels: Vec<Level>,
}

/// A level of topology.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Level {
    pub name: String,
    /// The label of nodes that says in which domain of the level they are.
    pub node_label: String,
}

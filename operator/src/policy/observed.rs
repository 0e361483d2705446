//! What the planner of a policy is told.

use std::collections::BTreeMap;

use baton_crds::status::{PoolStatus, RoutePolicyStatus};
use baton_crds::{PoolRole, PoolSpec, RoutePolicySpec};
use baton_protocol::card::Card;
use jiff::Timestamp;

/// Everything that a plan depends on.
#[derive(Clone, Debug)]
pub struct Observed {
    pub policy: PolicyObject,
    /// Rules that the spec breaks, one sentence each: an object may be older than a rule.
    pub refusals: Vec<String>,
    /// All pools of the namespace that can be read, those that are being deleted left out.
    pub pools: Vec<PoolView>,
    /// The other policies of the namespace, those that are being deleted left out.
    pub others: Vec<Other>,
    /// A card of each revision of which a worker was asked.
    pub cards: Cards,
    /// Routers of the namespace.
    pub routers: Vec<Router>,
    pub now: Timestamp,
}

/// Role, pool, revision → card of one of its workers.
pub type Cards = BTreeMap<(PoolRole, String, String), Box<Card>>;

/// A `RoutePolicy`.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyObject {
    pub name: String,
    pub namespace: String,
    pub uid: String,
    pub generation: i64,
    pub created: Option<Timestamp>,
    pub deleting: bool,
    pub spec: RoutePolicySpec,
    pub status: Option<RoutePolicyStatus>,
}

/// What of a pool matters to a policy.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolView {
    pub role: PoolRole,
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub spec: PoolSpec,
    /// As the pool's own planner wrote it.
    pub status: PoolStatus,
}

impl PoolView {
    /// `PrefillPool NAME` or `DecodePool NAME`.
    #[must_use]
    pub fn title(&self) -> String {
        format!("{} {}", self.role.kind(), self.name)
    }
}

/// Another policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Other {
    pub name: String,
    pub created: Option<Timestamp>,
    /// Its model and aliases.
    pub models: Vec<String>,
}

/// A router's pod and what it serves by, or why it cannot be asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Router {
    pub pod: String,
    pub answer: Result<Vec<InForce>, String>,
}

/// What a router has of one policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InForce {
    pub name: String,
    /// None: nothing of it is in force.
    pub generation: Option<i64>,
    /// Why a later one is not.
    pub refused: Option<String>,
}

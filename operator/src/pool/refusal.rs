//! Why a pool's pods cannot be made: what its author, or whoever runs the operator, has to change.

use super::observed::Observed;

/// A spec that no pod follows from. Nothing is changed while it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// One CamelCase word.
    pub(crate) reason: &'static str,
    /// Names the field and the next step.
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
        }
    }
}

/// Longest name of a pool: `POOL-REVISION-RANDOM` has to fit a host name of 63 characters, with room for a suffix of others.
const LONGEST_NAME: usize = 40;

/// What can be said before a pod is rendered.
pub(crate) fn before_rendering(observed: &Observed) -> Result<(), Refusal> {
    let pool = &observed.pool;
    if !observed.refusals.is_empty() {
        return Err(Refusal::new("InvalidSpec", observed.refusals.join("; ")));
    }
    if pool.name.len() > LONGEST_NAME {
        let message = format!(
            "metadata.name has {} characters, must have at most {LONGEST_NAME}: pods are named after the pool; make one of a shorter name",
            pool.name.len()
        );
        return Err(Refusal::new("InvalidSpec", message));
    }
    let nodes = pool.spec.parallelism.nodes_per_replica;
    if nodes > 1 {
        let message = format!(
            "spec.parallelism.nodesPerReplica is {nodes}: replicas of several pods are not built yet, use 1"
        );
        return Err(Refusal::new("MultiNodeReplicasUnsupported", message));
    }
    Ok(())
}

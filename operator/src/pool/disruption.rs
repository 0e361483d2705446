//! The PodDisruptionBudget of a pool: what evictions have to leave.

use baton_crds::labels;
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::action::Action;
use super::member::role;
use super::observed::{Observed, PoolObject};
use super::render::{owner, selector};

/// Pools of the two kinds may share a name; their budgets do not.
#[must_use]
pub fn name(pool: &PoolObject) -> String {
    format!("{}-{}", pool.name, role(pool.role))
}

/// What is to be done about the budget, if anything, and the name of one that belongs to somebody else.
pub(crate) fn plan(observed: &Observed) -> (Option<Action>, Option<String>) {
    let wanted = observed.pool.spec.disruption.min_available;
    let found = observed.disruption_budget.as_ref();
    let foreign = found.filter(|found| !is_own(found, &observed.pool));
    if foreign.is_some() {
        let stands_in_the_way = wanted.map(|_| name(&observed.pool));
        return (None, stands_in_the_way);
    }
    let action = match (wanted, found) {
        (Some(least), found) => {
            let budget = budget(observed, least);
            let stands = found.is_some_and(|found| found.spec == budget.spec);
            (!stands).then(|| Action::ApplyDisruptionBudget(Box::new(budget)))
        }
        (None, Some(found)) => delete(found),
        (None, None) => None,
    };
    (action, None)
}

fn is_own(budget: &PodDisruptionBudget, pool: &PoolObject) -> bool {
    let owners = budget.metadata.owner_references.as_deref();
    let mut owners = owners.unwrap_or_default().iter();
    owners.any(|owner| owner.controller == Some(true) && owner.uid == pool.uid)
}

fn delete(found: &PodDisruptionBudget) -> Option<Action> {
    if found.metadata.deletion_timestamp.is_some() {
        return None;
    }
    Some(Action::DeleteDisruptionBudget {
        name: found.metadata.name.clone()?,
        uid: found.metadata.uid.clone()?,
    })
}

fn budget(observed: &Observed, least: i32) -> PodDisruptionBudget {
    let pool = &observed.pool;
    let mut labels = selector(&pool.name, pool.role);
    labels.insert(
        labels::APP_MANAGED_BY.to_owned(),
        labels::OPERATOR_APP.to_owned(),
    );
    PodDisruptionBudget {
        metadata: ObjectMeta {
            name: Some(name(pool)),
            namespace: Some(pool.namespace.clone()),
            labels: Some(labels),
            owner_references: Some(vec![owner(observed)]),
            ..ObjectMeta::default()
        },
        spec: Some(PodDisruptionBudgetSpec {
            min_available: Some(IntOrString::Int(least)),
            // A pod that drains is not ready and so does not count. It must not be left out by its label: the cluster's controller looks at a
            // budget when a pod that it selects changes, and would not hear that one has just ceased to be among them.
            selector: Some(LabelSelector {
                match_labels: Some(selector(&pool.name, pool.role)),
                match_expressions: None,
            }),
            // A pod that is not ready serves nobody, and must not keep a node from being emptied.
            unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
            max_unavailable: None,
        }),
        status: None,
    }
}

//! Where a pool's pods may stand: `topology.spread` and `topology.requireSame`.

use baton_crds::labels;
use k8s_openapi::api::core::v1::{Affinity, PodAffinityTerm, TopologySpreadConstraint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::{parsed, selector};
use crate::pool::observed::Observed;
use crate::pool::refusal::Refusal;

/// Even over the domains of each level, within a revision: pods that are about to go should not decide where the next ones stand. A
/// wish and no condition, since accelerators are scarce: a pod in the wrong rack serves, one that waits for the right rack does not.
pub(super) fn spread(
    observed: &Observed,
) -> Result<Option<Vec<TopologySpreadConstraint>>, Refusal> {
    let levels = &observed.pool.spec.topology.spread;
    let constraints: Result<Vec<_>, Refusal> = levels
        .iter()
        .enumerate()
        .map(|(index, level)| {
            Ok(TopologySpreadConstraint {
                max_skew: 1,
                topology_key: node_label(observed, &format!("spread[{index}]"), level)?,
                when_unsatisfiable: "ScheduleAnyway".to_owned(),
                label_selector: Some(own_pods(observed)),
                match_label_keys: Some(vec![labels::REVISION.to_owned()]),
                ..TopologySpreadConstraint::default()
            })
        })
        .collect();
    Ok(Some(constraints?).filter(|constraints| !constraints.is_empty()))
}

/// The author's affinity, and for each level of `requireSame`: only where the pool's other pods are. Kubernetes lets the first of a
/// group stand anywhere.
pub(super) fn affinity(observed: &Observed) -> Result<Option<Affinity>, Refusal> {
    let spec = &observed.pool.spec;
    let mut affinity: Option<Affinity> = match &spec.template.affinity {
        Some(value) => Some(parsed("affinity", value)?),
        None => None,
    };
    for (index, level) in spec.topology.require_same.iter().enumerate() {
        let term = PodAffinityTerm {
            topology_key: node_label(observed, &format!("requireSame[{index}]"), level)?,
            label_selector: Some(own_pods(observed)),
            ..PodAffinityTerm::default()
        };
        affinity
            .get_or_insert_default()
            .pod_affinity
            .get_or_insert_default()
            .required_during_scheduling_ignored_during_execution
            .get_or_insert_default()
            .push(term);
    }
    Ok(affinity)
}

fn own_pods(observed: &Observed) -> LabelSelector {
    LabelSelector {
        match_labels: Some(selector(&observed.pool.name, observed.pool.role)),
        match_expressions: None,
    }
}

fn node_label(observed: &Observed, field: &str, level: &str) -> Result<String, Refusal> {
    let levels = &observed.settings.levels;
    let found = levels.iter().find(|known| known.name == level);
    found.map(|level| level.node_label.clone()).ok_or_else(|| {
        let known: Vec<&str> = levels.iter().map(|level| level.name.as_str()).collect();
        let message = format!(
            "spec.topology.{field} is {level}, must be a level of the operator's --topology-levels: {}",
            known.join(", ")
        );
        Refusal::new("UnknownTopologyLevel", message)
    })
}

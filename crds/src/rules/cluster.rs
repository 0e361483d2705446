//! What of a pool only a cluster honours: environment, spread, rollout, template.

use crate::labels;
use crate::pool::{EnvironmentVariable, PoolSpec};

/// Names of variables, and of volumes, that the operator gives to what it adds itself.
const OWN_VARIABLES: &str = "BATON_";
const OWN_VOLUMES: &str = "baton-";

/// Labels that the operator sets on every pod, beside those of [`labels::PREFIX`].
const OWN_LABELS: [&str; 6] = [
    labels::APP_NAME,
    labels::APP_INSTANCE,
    labels::APP_COMPONENT,
    labels::APP_PART_OF,
    labels::APP_MANAGED_BY,
    labels::LLM_D_ROLE,
];

const VARIABLE_SOURCES: [&str; 4] = [
    "configMapKeyRef",
    "secretKeyRef",
    "fieldRef",
    "resourceFieldRef",
];
const VOLUME_KINDS: [&str; 7] = [
    "configMap",
    "secret",
    "emptyDir",
    "persistentVolumeClaim",
    "hostPath",
    "csi",
    "image",
];

/// Paths and messages.
pub(super) fn pool(spec: &PoolSpec) -> Vec<(String, String)> {
    let mut problems = Vec::new();
    let mut wrong = |path: &str, message: String| problems.push((path.to_owned(), message));
    for (index, variable) in spec.engine.env.iter().enumerate() {
        for (member, message) in environment(variable) {
            wrong(&format!("spec.engine.env[{index}]{member}"), message);
        }
    }
    let topology = &spec.topology;
    for level in topology
        .spread
        .iter()
        .filter(|level| topology.require_same.contains(level))
    {
        wrong(
            "spec.topology",
            format!(
                "{level} must not be both in spread and in requireSame: all pods in one domain are not spread over several"
            ),
        );
    }
    if spec.rollout.max_surge == 0 && spec.rollout.max_unavailable == 0 {
        wrong(
            "spec.rollout",
            "maxSurge and maxUnavailable must not both be 0: no pod could ever be replaced"
                .to_owned(),
        );
    }
    let metadata = &spec.template.metadata;
    for name in metadata.labels.keys() {
        if name.starts_with(labels::PREFIX) || OWN_LABELS.contains(&name.as_str()) {
            let path = format!("spec.template.metadata.labels.{name}");
            wrong(&path, "must not be given: Baton sets this label".to_owned());
        }
    }
    for name in metadata.annotations.keys() {
        if name.starts_with(labels::PREFIX) {
            let path = format!("spec.template.metadata.annotations.{name}");
            wrong(
                &path,
                format!(
                    "must not be given: annotations of {} are Baton's own",
                    labels::PREFIX
                ),
            );
        }
    }
    for (index, volume) in spec.template.volumes.iter().enumerate() {
        let path = format!("spec.template.volumes[{index}]");
        let name = volume["name"].as_str().unwrap_or_default();
        if name.starts_with(OWN_VOLUMES) {
            wrong(
                &format!("{path}.name"),
                format!("must not begin with {OWN_VOLUMES}: these volumes are Baton's own"),
            );
        }
        if let Some(message) = exactly_one(volume, &VOLUME_KINDS) {
            wrong(&path, message);
        }
    }
    problems
}

fn environment(variable: &EnvironmentVariable) -> Vec<(&'static str, String)> {
    let mut problems = Vec::new();
    if variable.name.starts_with(OWN_VARIABLES) {
        problems.push((
            ".name",
            format!("must not begin with {OWN_VARIABLES}: these variables are Baton's own"),
        ));
    }
    if let Some(source) = &variable.value_from {
        if variable.value.is_some() {
            problems.push(("", "value and valueFrom must not both be given".to_owned()));
        }
        if let Some(message) = exactly_one(source, &VARIABLE_SOURCES) {
            problems.push((".valueFrom", message));
        }
    }
    problems
}

fn exactly_one(object: &serde_json::Value, members: &[&str]) -> Option<String> {
    let given = members
        .iter()
        .filter(|member| object.get(member).is_some())
        .count();
    (given != 1).then(|| format!("must be exactly one of {}", members.join(", ")))
}

//! Which pods are workers and how they are reached, and how many routers share them. Pure.

use std::sync::Arc;

use baton_crds::labels;
use k8s_openapi::api::core::v1::Pod;

use crate::fleet::discovery::{Domain, Listed};

/// Where a worker's gRPC service listens.
const CONTROL_PORT: u16 = 7000;

/// The workers among these pods, by name. `levels`: names of the levels of topology, nearest first.
pub fn workers(pods: &[Arc<Pod>], levels: &[String]) -> Vec<Listed> {
    let mut workers: Vec<Listed> = pods.iter().filter_map(|pod| worker(pod, levels)).collect();
    workers.sort_by(|a, b| a.name.cmp(&b.name));
    workers
}

/// A pod counts once its card was read and found to be what its pool declares. From then on it stays a worker until it is gone,
/// so that runs under way on a pod that is drained or deleted go on; only nothing new is placed on that.
fn worker(pod: &Pod, levels: &[String]) -> Option<Listed> {
    let name = pod.metadata.name.as_deref()?;
    let address = pod.status.as_ref()?.pod_ip.as_deref()?;
    let leaving = is_leaving(pod);
    let counts = condition(pod, labels::REGISTERED) == Some(true) || leaving;
    if address.is_empty() || has_ended(pod) || !counts {
        return None;
    }
    let host = if address.contains(':') {
        format!("[{address}]")
    } else {
        address.to_owned()
    };
    Some(Listed {
        name: name.into(),
        control: format!("{host}:{CONTROL_PORT}"),
        domains: domains(pod, levels),
        leaving,
    })
}

/// How many routers there are: those that take requests, and this one.
pub fn routers(pods: &[Arc<Pod>]) -> u32 {
    let serving = |pod: &&Arc<Pod>| {
        condition(pod, "Ready") == Some(true) && pod.metadata.deletion_timestamp.is_none()
    };
    let count = pods.iter().filter(serving).count();
    u32::try_from(count).unwrap_or(u32::MAX).max(1)
}

fn has_ended(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

fn is_leaving(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some() || label(pod, labels::DRAINING) == Some("true")
}

fn condition(pod: &Pod, wanted: &str) -> Option<bool> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let found = conditions
        .iter()
        .find(|condition| condition.type_ == wanted)?;
    Some(found.status == "True")
}

fn label<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    pod.metadata.labels.as_ref()?.get(name).map(String::as_str)
}

/// The pod's domain at each level, as the operator has copied it from its node. Levels that this router was not told the order of
/// come last.
fn domains(pod: &Pod, levels: &[String]) -> Vec<Domain> {
    let labelled = pod.metadata.labels.iter().flatten();
    let others = labelled
        .filter_map(|(name, _)| labels::level(name))
        .filter(|level| !levels.iter().any(|known| known == level));
    levels
        .iter()
        .map(String::as_str)
        .chain(others)
        .map(|level| {
            let domain = label(pod, &labels::domain(level));
            let known = domain.filter(|domain| *domain != labels::UNKNOWN_DOMAIN);
            (level.to_owned(), known.map(str::to_owned))
        })
        .collect()
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A worker's pod as it serves.
    pub(in crate::cluster) fn pod(name: &str) -> Value {
        json!({
            "metadata": {"name": name, "labels": {
                "serving.baton.dev/pool": "decode",
                "serving.baton.dev/domain-host": "node-a",
                "serving.baton.dev/domain-zone": "unknown",
            }},
            "status": {
                "phase": "Running", "podIP": "10.0.0.7",
                "conditions": [
                    {"type": "Ready", "status": "True"},
                    {"type": "serving.baton.dev/registered", "status": "True"},
                ],
            },
        })
    }

    fn read(pods: &[Value]) -> Vec<Arc<Pod>> {
        pods.iter()
            .map(|pod| Arc::new(serde_json::from_value(pod.clone()).unwrap()))
            .collect()
    }

    fn levels() -> Vec<String> {
        ["host", "rack", "zone"].map(str::to_owned).to_vec()
    }

    fn one(pod: &Value) -> Option<Listed> {
        workers(&read(std::slice::from_ref(pod)), &levels()).pop()
    }

    fn changed(pointer: &str, value: Value) -> Value {
        let mut pod = pod("d-1");
        let (parent, last) = pointer.rsplit_once('/').unwrap();
        pod.pointer_mut(parent).unwrap()[last.replace("~1", "/")] = value;
        pod
    }

    #[test]
    fn a_registered_pod_is_a_worker_at_its_address_and_its_place() {
        let worker = one(&pod("d-1")).unwrap();
        assert_eq!(worker.name.to_string(), "d-1");
        assert_eq!(worker.control, "10.0.0.7:7000");
        assert!(!worker.leaving);
        let known =
            |level: &str, domain: Option<&str>| (level.to_owned(), domain.map(str::to_owned));
        assert_eq!(
            worker.domains,
            [
                known("host", Some("node-a")),
                known("rack", None),
                known("zone", None)
            ]
        );
        let other = changed(
            "/metadata/labels/serving.baton.dev~1domain-aisle",
            json!("7"),
        );
        assert_eq!(one(&other).unwrap().domains[3], known("aisle", Some("7")));
        let six = changed("/status/podIP", json!("fd00::7"));
        assert_eq!(one(&six).unwrap().control, "[fd00::7]:7000");
    }

    #[test]
    fn a_pod_that_is_not_registered_has_no_address_or_has_ended_is_none() {
        for (pointer, value) in [
            ("/status/podIP", Value::Null),
            ("/status/podIP", json!("")),
            ("/status/phase", json!("Failed")),
            ("/status/phase", json!("Succeeded")),
            ("/status/conditions", Value::Null),
            (
                "/status/conditions",
                json!([{"type": "Ready", "status": "True"}]),
            ),
            (
                "/status/conditions",
                json!([{"type": "serving.baton.dev/registered", "status": "False"}]),
            ),
        ] {
            assert_eq!(
                one(&changed(pointer, value.clone())),
                None,
                "{pointer} {value}"
            );
        }
    }

    #[test]
    fn a_pod_that_is_drained_or_deleted_stays_until_it_is_gone_and_gets_nothing_new() {
        let deleted = json!("2026-11-30T00:00:00Z");
        for (pointer, value) in [
            (
                "/metadata/labels/serving.baton.dev~1draining",
                json!("true"),
            ),
            ("/metadata/deletionTimestamp", deleted),
        ] {
            let mut pod = changed(pointer, value);
            assert!(one(&pod).unwrap().leaving, "{pointer}");
            // The operator takes the gate back while it drains.
            pod["status"]["conditions"][1]["status"] = json!("False");
            assert!(one(&pod).unwrap().leaving, "{pointer}");
            pod["status"]["phase"] = json!("Failed");
            assert_eq!(one(&pod), None);
        }
    }

    #[test]
    fn routers_that_take_requests_are_counted_and_there_is_always_this_one() {
        let router = |ready: &str| {
            json!({"metadata": {"name": ready},
                "status": {"conditions": [{"type": "Ready", "status": ready}]}})
        };
        let mut ending = router("True");
        ending["metadata"]["deletionTimestamp"] = json!("2026-11-30T00:00:00Z");
        assert_eq!(routers(&[]), 1);
        assert_eq!(routers(&read(&[router("False")])), 1);
        let all = [router("True"), router("True"), router("False"), ending];
        assert_eq!(routers(&read(&all)), 2);
    }
}

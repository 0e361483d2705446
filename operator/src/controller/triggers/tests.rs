//! Whom a change concerns: objects in, keys out.

use kube::runtime::watcher::Event;
use serde_json::{Value, json};

use super::*;
use crate::controller::caches::Fillers;

fn setting() -> (Triggers, Fillers) {
    let (caches, fillers) = Caches::new();
    let triggers = Triggers {
        caches,
        pools: Arc::new(Work::new("pool")),
        policies: Arc::new(Work::new("routepolicy")),
    };
    (triggers, fillers)
}

fn pool(namespace: &str, name: &str, generation: i64, status: &Value) -> Guarded<Pool> {
    serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": namespace, "uid": name, "generation": generation},
        "spec": {"model": {"name": "m"}, "engine": {"type": "Simulated"}},
        "status": status,
    }))
    .unwrap()
}

fn policy(namespace: &str, generation: i64) -> Guarded<RoutePolicy> {
    serde_json::from_value(json!({
        "metadata": {"name": "r", "namespace": namespace, "uid": "r", "generation": generation},
        "spec": {"model": "m", "decodePools": [{"name": "d"}]},
    }))
    .unwrap()
}

fn pod(labels: &Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "w", "namespace": "one", "uid": "w", "labels": labels},
        "spec": {"nodeName": "node", "containers": []},
    }))
    .unwrap()
}

fn node(version: &str, labels: &Value) -> PartialObjectMeta<Node> {
    serde_json::from_value(
        json!({"metadata": {"name": "node", "uid": "n", "resourceVersion": version, "labels": labels}}),
    )
    .unwrap()
}

/// A change from `before` to `now`.
fn change<'a, K>(before: Option<K>, now: &'a K) -> Change<'a, K> {
    Change::One {
        before: before.map(Arc::new),
        now: Some(now),
        object: now,
    }
}

fn touched(triggers: &Triggers) -> Vec<String> {
    let pools = triggers.pools.take_all();
    let policies = triggers.policies.take_all();
    let pools = pools.iter().map(ToString::to_string);
    pools
        .chain(policies.iter().map(ToString::to_string))
        .collect()
}

fn fill(fillers: &mut Fillers) {
    for namespace in ["one", "two"] {
        for name in ["d", "e"] {
            let pool = pool(namespace, name, 1, &json!({}));
            fillers.decode.apply_watcher_event(&Event::Apply(pool));
        }
        fillers
            .policies
            .apply_watcher_event(&Event::Apply(policy(namespace, 1)));
    }
}

#[test]
fn a_pod_is_of_the_pool_that_its_labels_name_and_of_both_where_it_says_no_role() {
    let (triggers, _fillers) = setting();
    let decode = pod(&json!({names::POOL: "d", names::ROLE: "decode"}));
    triggers.worker(&change(None, &decode));
    assert_eq!(touched(&triggers), ["DecodePool one/d"]);
    let nameless = pod(&json!({names::POOL: "d"}));
    triggers.worker(&change(Some(nameless.clone()), &nameless));
    assert_eq!(
        touched(&triggers),
        ["PrefillPool one/d", "DecodePool one/d"]
    );
    // Relabelled: it matters to the one that lost it, and to the one that has it now.
    let other = pod(&json!({names::POOL: "e", names::ROLE: "decode"}));
    triggers.worker(&change(Some(decode), &other));
    assert_eq!(touched(&triggers), ["DecodePool one/d", "DecodePool one/e"]);
}

#[test]
fn the_echo_of_a_pools_status_does_not_make_it_look_again() {
    let (triggers, mut fillers) = setting();
    fill(&mut fillers);
    let before = pool("one", "d", 1, &json!({}));
    let now = pool("one", "d", 1, &json!({"replicas": 1}));
    triggers.pool(PoolRole::Decode, &change(Some(before), &now));
    assert_eq!(touched(&triggers), ["RoutePolicy one/r"]);
    let changed = pool("one", "d", 2, &json!({"replicas": 1}));
    triggers.pool(PoolRole::Decode, &change(Some(now), &changed));
    assert_eq!(
        touched(&triggers),
        ["DecodePool one/d", "DecodePool one/e", "RoutePolicy one/r"],
        "what it declares matters to those beside it, and not in another namespace"
    );
}

#[test]
fn a_pool_that_is_gone_is_looked_at_once_more() {
    let (triggers, _fillers) = setting();
    let gone = pool("one", "d", 1, &json!({}));
    let change = Change::One {
        before: Some(Arc::new(gone.clone())),
        now: None,
        object: &gone,
    };
    triggers.pool(PoolRole::Decode, &change);
    assert_eq!(touched(&triggers), ["DecodePool one/d"]);
}

#[test]
fn a_policy_that_changes_concerns_the_pools_of_its_namespace_and_its_status_nobody() {
    let (triggers, mut fillers) = setting();
    fill(&mut fillers);
    let (before, now) = (policy("one", 1), policy("one", 2));
    triggers.policy(&change(Some(before), &now));
    assert_eq!(
        touched(&triggers),
        ["DecodePool one/d", "DecodePool one/e", "RoutePolicy one/r"]
    );
    triggers.policy(&change(Some(now.clone()), &now));
    assert!(touched(&triggers).is_empty());
}

#[test]
fn of_a_node_only_its_labels_and_its_being_there_count() {
    let (triggers, mut fillers) = setting();
    let worker = pod(&json!({names::POOL: "d", names::ROLE: "decode"}));
    fillers.workers.apply_watcher_event(&Event::Apply(worker));
    let beat = node("2", &json!({"rack": "a"}));
    triggers.node(&change(Some(node("1", &json!({"rack": "a"}))), &beat));
    assert!(
        touched(&triggers).is_empty(),
        "it reports every few minutes"
    );
    let moved = node("3", &json!({"rack": "b"}));
    triggers.node(&change(Some(beat), &moved));
    assert_eq!(touched(&triggers), ["DecodePool one/d"]);
    let gone = Change::One {
        before: Some(Arc::new(moved.clone())),
        now: None,
        object: &moved,
    };
    triggers.node(&gone);
    assert_eq!(touched(&triggers), ["DecodePool one/d"]);
}

#[test]
fn after_a_list_everything_is_looked_at() {
    let (triggers, mut fillers) = setting();
    fill(&mut fillers);
    triggers.router(&Change::All);
    assert_eq!(touched(&triggers).len(), 6);
}

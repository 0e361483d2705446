//! The readiness gate, and what is stamped onto a pod.

use std::collections::BTreeMap;

use baton_crds::labels;
use baton_protocol::card::{Card, Role};
use baton_protocol::identity::Fact;
use k8s_openapi::api::core::v1::PodCondition;
use serde_json::{Value, json};

use super::scene::{Scene, lay_over, pod, ready};
use crate::pool::{Action, Plan};

fn gate(plan: &Plan) -> Option<PodCondition> {
    plan.actions.iter().find_map(|action| match action {
        Action::SetCondition { condition, .. } if condition.type_ == labels::REGISTERED => {
            Some(condition.clone())
        }
        _ => None,
    })
}

fn stamps(plan: &Plan) -> BTreeMap<String, Option<String>> {
    let mut all = BTreeMap::new();
    for action in &plan.actions {
        if let Action::StampPod {
            labels,
            annotations,
            ..
        } = action
        {
            all.extend(labels.clone());
            all.extend(annotations.clone());
        }
    }
    all
}

fn starting() -> Scene {
    Scene::new(&json!({"replicas": 1, "model": {"revision": "r1"}})).with([pod("a").running()])
}

/// A pool of servers with a daemon beside each, which sees what they are.
fn beside(change: &Value) -> Scene {
    let mut spec = json!({
        "replicas": 1,
        "model": {"revision": "r1", "source": {"uri": null, "persistentVolumeClaim": "models/tiny"}},
        "engine": {"type": "VLLM", "image": "vllm:1"},
    });
    lay_over(&mut spec, change);
    let mut scene = Scene::new(&spec);
    scene.observed.settings.worker_image = Some("worker:1".to_owned());
    scene.with([pod("a").running()])
}

fn served() -> Scene {
    beside(&json!({
        "engine": {"dtype": "BF16", "maxModelLength": 8192}, "parallelism": {"pipeline": 2},
    }))
}

fn with_card(mut scene: Scene, change: impl FnOnce(&mut Card)) -> Scene {
    let report = scene.observed.workers.get_mut("a").unwrap();
    change(report.card.as_mut().unwrap());
    scene
}

#[test]
fn a_card_that_says_what_was_declared_opens_the_gate() {
    let plan = starting().plan();
    let gate = gate(&plan).unwrap();
    assert_eq!(gate.status, "True");
    assert_eq!(gate.reason.as_deref(), Some("CardRead"));
}

#[test]
fn a_pod_whose_worker_was_not_asked_yet_is_left_alone() {
    let scene = Scene::new(&json!({"replicas": 1})).with([pod("a")]);
    assert_eq!(gate(&scene.plan()), None);
}

#[test]
fn each_contradiction_keeps_the_gate_closed_and_is_named_with_both_values() {
    type Change = fn(&mut Card);
    type Start = fn() -> Scene;
    let builtin: [(&str, Change); 9] = [
        ("worker is \"b\" on the card, declared is \"a\"", |card| {
            card.worker = "b".into();
        }),
        (
            "pool is \"other\" on the card, declared is \"chat\"",
            |card| card.pool = "other".into(),
        ),
        (
            "poolRole is \"Prefill\" on the card, declared is \"Decode\"",
            |card| {
                card.pool_role = Role::Prefill;
            },
        ),
        ("revision is \"local\" on the card", |card| {
            card.revision = "local".into();
        }),
        (
            "model.name is \"m\" on the card, declared is \"tiny\"",
            |card| card.model.name = "m".into(),
        ),
        (
            "model.revision is \"r2\" on the card, declared is \"r1\"",
            |card| {
                card.model.revision = "r2".into();
            },
        ),
        (
            "engine.type is \"VLLM\" on the card, declared is \"Builtin\"",
            |card| {
                card.engine.kind = "VLLM".into();
            },
        ),
        (
            "engine.connector is \"Nixl\" on the card, declared is \"Baton\"",
            |card| {
                card.engine.connector = "Nixl".into();
            },
        ),
        (
            "engine.blockSize is \"32\" on the card, declared is \"16\"",
            |card| {
                card.capacity.block_size = 32;
            },
        ),
    ];
    let server: [(&str, Change); 5] = [
        (
            "engine.maxModelLength is \"4096\" on the card, declared is \"8192\"",
            |card| card.capacity.max_context = 4096,
        ),
        (
            "parallelism.tensor is \"2\" on the card, declared is \"1\"",
            |card| card.layout.tensor = Fact::observed(2),
        ),
        (
            "parallelism.pipeline is \"1\" on the card, declared is \"2\"",
            |card| card.layout.pipeline = Fact::observed(1),
        ),
        (
            "engine.dtype is \"F16\" on the card, declared is \"BF16\"",
            |card| card.identity.kv_dtype = Fact::observed("F16".into()),
        ),
        (
            "engine.connector is \"None\" on the card, declared is \"Nixl\"",
            |card| card.engine.connector = "None".into(),
        ),
    ];
    let of = |start: Start| move |(said, change): (&'static str, Change)| (start, said, change);
    let cases = builtin.into_iter().map(of(starting));
    for (start, said, change) in cases.chain(server.into_iter().map(of(served))) {
        let plan = with_card(start(), change).plan();
        let gate = gate(&plan).unwrap();
        assert_eq!(
            (gate.status.as_str(), gate.reason.as_deref()),
            ("False", Some("CardMismatch"))
        );
        let message = gate.message.unwrap();
        assert!(message.contains(said), "{message} should say {said}");
        assert_eq!(message.matches("on the card").count(), 1, "{message}");
        assert!(
            !stamps(&plan).contains_key(labels::KV_IDENTITY),
            "no identity of a wrong card"
        );
    }
}

#[test]
fn what_is_declared_of_a_server_is_held_only_against_what_was_seen_of_it() {
    type Change = fn(&mut Card);
    let cases: [(&str, Value, Change); 5] = [
        ("all as declared", json!({}), |_| ()),
        (
            "the daemon has seen no sizes: what it says is the declaration",
            json!({}),
            |card| {
                card.layout.tensor = Fact::declared(2);
                card.layout.pipeline = Fact::unknown();
                card.identity.kv_dtype = Fact::declared("F16".into());
            },
        ),
        (
            "weights that bring scales along narrow a cache of type Auto",
            json!({}),
            |card| card.identity.kv_dtype = Fact::observed("F8E4M3".into()),
        ),
        (
            "the cache has a type of its own",
            json!({"engine": {"kvCacheDtype": "F16"}}),
            |card| card.identity.kv_dtype = Fact::observed("F16".into()),
        ),
        (
            "the scales of KV are not the scheme of the weights",
            json!({"engine": {"quantization": "Awq"}}),
            |card| card.identity.quantization = Fact::observed("None".into()),
        ),
    ];
    for (why, spec, change) in cases {
        let mut declared = json!({"engine": {"dtype": "BF16"}, "parallelism": {"pipeline": 2}});
        lay_over(&mut declared, &spec);
        let plan = with_card(beside(&declared), change).plan();
        let gate = gate(&plan).unwrap();
        assert_eq!(gate.status, "True", "{why}: {:?}", gate.message);
    }
}

#[test]
fn a_worker_of_batons_own_may_shorten_what_it_takes_to_what_it_holds() {
    let declared = json!({"replicas": 1, "engine": {"maxModelLength": 8192}});
    let scene = Scene::new(&declared).with([pod("a").running()]);
    let shorter = with_card(scene, |card| card.capacity.max_context = 4096);
    assert_eq!(gate(&shorter.plan()).unwrap().status, "True");
}

#[test]
fn a_declared_type_of_the_cache_is_held_against_the_card() {
    let change = json!({"replicas": 1, "engine": {"kvCacheDtype": "F16"}});
    let scene = || Scene::new(&change).with([pod("a").running()]);
    assert_eq!(gate(&scene().plan()).unwrap().status, "True");
    let other = with_card(scene(), |card| {
        card.identity.kv_dtype = Fact::observed("f32".into());
    });
    let message = gate(&other.plan()).unwrap().message.unwrap();
    assert!(
        message.contains("engine.kvCacheDtype is \"f32\""),
        "{message}"
    );
}

#[test]
fn a_pod_of_an_old_revision_is_right_by_the_spec_of_its_time() {
    // The spec says 32 by now; the pod was made for 16, and its worker says so.
    let mut scene = Scene::new(&json!({"replicas": 1}));
    scene.add(ready("a"));
    scene.observed.pool.spec.engine.block_size = 32;
    assert_eq!(gate(&scene.plan()), None, "it stays open");
}

#[test]
fn a_worker_that_cannot_be_asked_does_not_register_and_one_that_has_stays() {
    let scene = Scene::new(&json!({"replicas": 1})).with([pod("a").running().unreachable()]);
    let gate_of_new = gate(&scene.plan()).unwrap();
    assert_eq!(gate_of_new.status, "False");
    assert_eq!(gate_of_new.reason.as_deref(), Some("CardUnavailable"));
    assert!(gate_of_new.message.unwrap().contains("10.0.0.1:7002"));

    let scene = Scene::new(&json!({"replicas": 1})).with([ready("a").unreachable()]);
    assert_eq!(
        gate(&scene.plan()),
        None,
        "an operator that is cut off takes nobody away"
    );
}

#[test]
fn a_registered_worker_whose_new_process_says_something_else_is_closed_again() {
    let scene = Scene::new(&json!({"replicas": 1})).with([ready("a")]);
    let scene = with_card(scene, |card| card.capacity.block_size = 32);
    assert_eq!(gate(&scene.plan()).unwrap().status, "False");
}

#[test]
fn a_condition_keeps_its_time_while_only_its_words_change() {
    let mut scene = Scene::new(&json!({"replicas": 1})).with([pod("a").running().unreachable()]);
    let first = gate(&scene.plan()).unwrap();
    let status = scene.pod("a").status.as_mut().unwrap();
    status.conditions.as_mut().unwrap().push(first.clone());
    scene.observed.now += jiff::SignedDuration::from_secs(60);
    assert_eq!(gate(&scene.plan()), None, "it is said already");

    let report = scene.observed.workers.get_mut("a").unwrap();
    report.card = Err("another reason".to_owned());
    let second = gate(&scene.plan()).unwrap();
    assert_eq!(second.message.as_deref(), Some("another reason"));
    assert_eq!(second.last_transition_time, first.last_transition_time);
}

#[test]
fn a_pod_gets_its_nodes_domains_and_its_workers_identity() {
    let scene = starting();
    let report = &scene.observed.workers["a"];
    let identity = report.card.as_ref().unwrap().kv_identity.clone();
    let stamps = stamps(&scene.plan());
    let stamped = |name: &str| stamps[name].as_deref().unwrap();
    assert_eq!(stamped("serving.baton.dev/domain-host"), "n1");
    assert_eq!(stamped("serving.baton.dev/domain-rack"), "r1");
    assert_eq!(stamped("serving.baton.dev/kv-identity"), &identity[..32]);
    assert_eq!(stamped("serving.baton.dev/kv-identity-digest"), identity);
    assert!(
        !stamps.contains_key(labels::DRAINING),
        "it has no such label to take away"
    );
}

#[test]
fn labels_are_there_before_the_gate_opens() {
    let plan = starting().plan();
    let is_stamp = |action: &Action| matches!(action, Action::StampPod { .. });
    let is_gate = |action: &Action| matches!(action, Action::SetCondition { .. });
    let stamp = plan.actions.iter().position(is_stamp).unwrap();
    assert!(stamp < plan.actions.iter().position(is_gate).unwrap());
}

#[test]
fn a_node_without_a_level_is_of_an_unknown_domain_and_the_status_says_so_where_it_matters() {
    let mut scene = Scene::new(&json!({"replicas": 1})).with([ready("a").node("n2")]);
    let stamps = stamps(&scene.plan());
    assert_eq!(
        stamps["serving.baton.dev/domain-rack"].as_deref(),
        Some("unknown")
    );
    let labels = scene.pod("a").metadata.labels.as_mut().unwrap();
    labels.insert("serving.baton.dev/domain-rack".into(), "unknown".into());
    let told = |scene: &Scene| {
        let ready = scene.plan().status.conditions[0].clone();
        assert_eq!(
            (ready.condition_type.as_str(), ready.status.as_str()),
            ("Ready", "True")
        );
        ready.message.contains("level rack is named") && ready.message.contains("node of pod a")
    };
    assert!(!told(&scene), "nobody asks for racks");
    scene.observed.policies.levels = ["rack".to_owned()].into();
    assert!(told(&scene));
    scene.observed.policies.levels = ["host".to_owned()].into();
    assert!(!told(&scene), "the host is known");
    let spread = json!({"replicas": 1, "topology": {"spread": ["rack"]}});
    let mut scene = Scene::new(&spread).with([ready("a").node("n2")]);
    let labels = scene.pod("a").metadata.labels.as_mut().unwrap();
    labels.insert("serving.baton.dev/domain-rack".into(), "unknown".into());
    assert!(told(&scene));
}

#[test]
fn a_pod_that_is_stamped_is_not_stamped_again() {
    let mut scene = Scene::new(&json!({"replicas": 1})).with([ready("a")]);
    for (name, value) in stamps(&scene.plan()) {
        let metadata = &mut scene.pod("a").metadata;
        let map = if name == labels::KV_IDENTITY_DIGEST {
            metadata.annotations.as_mut()
        } else {
            metadata.labels.as_mut()
        };
        map.unwrap().insert(name, value.unwrap());
    }
    assert_eq!(scene.plan().actions, []);
}

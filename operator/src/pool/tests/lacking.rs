//! What a worker lacks that registers and serves all the same.

use baton_crds::PoolRole;
use baton_crds::labels;
use baton_crds::status::Condition;
use baton_protocol::card::TextCheck;
use k8s_openapi::api::core::v1::PodCondition;
use serde_json::json;

use super::scene::{Scene, pod, ready};
use crate::pool::{Action, WorkerLoad};

const WHY: &str = "sample text 2: at place 5 the model's files give token 3, the server token 5 (9 and 8 tokens in all)";

/// A pool of vLLM servers with Baton's connector, with as many ready pods.
fn servers(role: PoolRole, names: &[&str]) -> Scene {
    let mut scene = Scene::new(&json!({
        "replicas": names.len(),
        "model": {"source": {"uri": null, "persistentVolumeClaim": "models/tiny"}},
        "engine": {"type": "VLLM", "image": "vllm:1", "connector": "Baton"},
    }));
    scene.observed.pool.role = role;
    scene.observed.settings.worker_image = Some("worker:1".to_owned());
    scene.with(names.iter().map(|name| ready(name)))
}

fn says(scene: &mut Scene, pod: &str, text: TextCheck) {
    let report = scene.observed.workers.get_mut(pod).unwrap();
    report.card.as_mut().unwrap().text = text;
}

fn unverified() -> TextCheck {
    TextCheck::Unverified {
        reason: WHY.to_owned(),
    }
}

/// The gates that a plan writes, which are on their pods then.
fn settle(scene: &mut Scene) -> Vec<(String, PodCondition)> {
    let mut gates = Vec::new();
    for action in scene.plan().actions {
        let Action::SetCondition { pod, condition, .. } = action else {
            continue;
        };
        assert_eq!(condition.type_, labels::REGISTERED, "nobody drains");
        let status = scene.pod(&pod).status.as_mut().unwrap();
        let conditions = status.conditions.as_mut().unwrap();
        conditions.retain(|known| known.type_ != condition.type_);
        conditions.push(condition.clone());
        gates.push((pod, condition));
    }
    gates
}

fn find(scene: &Scene, name: &str) -> Condition {
    let mut conditions = scene.plan().status.conditions.into_iter();
    conditions
        .find(|condition| condition.condition_type == name)
        .unwrap()
}

fn verified(scene: &Scene) -> [String; 3] {
    let condition = find(scene, "TokenizerVerified");
    [condition.status, condition.reason, condition.message]
}

#[test]
fn a_tokenizer_that_is_not_trusted_keeps_no_worker_from_serving_and_the_status_says_why() {
    let mut scene = servers(PoolRole::Decode, &["a", "b", "c"]);
    assert_eq!(settle(&mut scene), []);
    assert_eq!(verified(&scene)[..2], ["True", "TokensMatch"]);

    says(&mut scene, "b", unverified());
    says(&mut scene, "c", unverified());
    let gates = settle(&mut scene);
    let pods: Vec<&str> = gates.iter().map(|(pod, _)| pod.as_str()).collect();
    assert_eq!(pods, ["b", "c"]);
    for (_, gate) in &gates {
        assert_eq!(gate.status, "True", "routers place on it");
        assert_eq!(gate.reason.as_deref(), Some("TokenizerUnverified"));
        assert_eq!(gate.message.as_deref(), Some(WHY));
    }
    let said = format!("no prefix is credited to pod b (and 1 pod alike): {WHY}");
    let wanted = ["False".to_owned(), "TokenizerUnverified".to_owned(), said];
    assert_eq!(verified(&scene), wanted);
    assert_eq!(find(&scene, "Ready").status, "True");
    assert_eq!(find(&scene, "Stalled").status, "False");
    assert_eq!(settle(&mut scene), [], "it is said once");

    // An operator that has just started, and reaches nobody, knows it from the pods.
    let told = std::mem::take(&mut scene.observed.workers);
    assert_eq!(verified(&scene), wanted);
    scene.observed.workers = told;

    for pod in ["b", "c"] {
        says(&mut scene, pod, TextCheck::Verified);
    }
    assert_eq!(settle(&mut scene).len(), 2);
    assert_eq!(verified(&scene)[..2], ["True", "TokensMatch"]);
}

#[test]
fn nothing_is_said_of_tokenizers_before_a_worker_has_registered() {
    let scene = Scene::new(&json!({"replicas": 1})).with([pod("a")]);
    assert_eq!(verified(&scene)[..2], ["Unknown", "NoneRegistered"]);
    let mut leaving = Scene::new(&json!({"replicas": 1}));
    leaving.add(ready("a").running_sequences(1).draining(3));
    assert_eq!(verified(&leaving)[0], "Unknown", "one that leaves is none");
}

#[test]
fn the_words_of_a_server_are_one_short_line_of_a_condition() {
    let mut scene = servers(PoolRole::Decode, &["a"]);
    let reason = format!("status 500:\n {}", "x".repeat(2_000));
    says(&mut scene, "a", TextCheck::Unverified { reason });
    let (_, gate) = settle(&mut scene).remove(0);
    let message = gate.message.unwrap();
    assert!(message.starts_with("status 500: x"), "{message}");
    assert_eq!(message.len(), 300);
    crate::bounds::fits("DecodePool", &scene.plan().status);
}

#[test]
fn a_prefill_server_without_its_plug_in_is_named_and_told_from_one_that_drains() {
    let said = |scene: &Scene| {
        let condition = find(scene, "Ready");
        assert_eq!(condition.status, "True");
        let (_, remark) = condition.message.split_once("; no prompt is sent to ")?;
        Some(remark.to_owned())
    };
    let takes_none = |scene: &mut Scene, pod: &str, lacks_plug_in: bool| {
        let report = scene.observed.workers.get_mut(pod).unwrap();
        report.load = Ok(WorkerLoad {
            draining: true,
            lacks_plug_in,
            ..WorkerLoad::default()
        });
    };
    let mut scene = servers(PoolRole::Prefill, &["a", "b", "c"]);
    assert_eq!(said(&scene), None);
    takes_none(&mut scene, "a", false);
    assert_eq!(said(&scene), None, "somebody told it to drain");
    takes_none(&mut scene, "c", true);
    takes_none(&mut scene, "b", true);
    let remark = said(&scene).unwrap();
    assert!(remark.starts_with("pod b (and 1 pod alike): "), "{remark}");
    assert!(remark.ends_with("containers engine and worker"), "{remark}");
    assert_eq!(settle(&mut scene), [], "it stays registered");

    // One that is to go drains, and is to be waited for as any other.
    let mut leaving = servers(PoolRole::Prefill, &["a"]);
    leaving.add(ready("b").running_sequences(1).draining(3));
    assert_eq!(said(&leaving), None);
}

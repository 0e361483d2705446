//! What the pool's author is told.

use baton_crds::status::Condition;
use k8s_openapi::api::core::v1::PodCondition;
use serde_json::json;

use super::scene::{Build, Scene, pod, ready};
use crate::pool::{Compatibility, CreationError, NoteKind, Plan, Regarding};

fn scene(replicas: i32, builds: impl IntoIterator<Item = Build>) -> Scene {
    Scene::new(&json!({"replicas": replicas})).with(builds)
}

fn find(plan: &Plan, name: &str) -> Condition {
    let mut conditions = plan.status.conditions.iter();
    conditions
        .find(|condition| condition.condition_type == name)
        .unwrap()
        .clone()
}

/// `True`, `False` or `Unknown` of the conditions that tools read, and the reason of Ready.
fn verdict(plan: &Plan) -> [String; 4] {
    let status = |name: &str| find(plan, name).status;
    [
        status("Ready"),
        status("Reconciling"),
        status("Stalled"),
        find(plan, "Ready").reason,
    ]
}

/// What Ready says about a pod that is in the way of the pool's only replica.
fn told(build: Build) -> (String, String) {
    let plan = scene(1, [build]).plan();
    let stalled = find(&plan, "Stalled").status;
    (stalled, find(&plan, "Ready").message)
}

#[test]
fn every_condition_is_there_from_the_first_time_on_and_carries_the_generation() {
    let plan = scene(2, []).plan();
    let names: Vec<&str> = plan
        .status
        .conditions
        .iter()
        .map(|c| c.condition_type.as_str())
        .collect();
    let wanted = [
        "Ready",
        "Reconciling",
        "Stalled",
        "Available",
        "Progressing",
        "Compatible",
        "TokenizerVerified",
    ];
    assert_eq!(names, wanted);
    assert!(
        plan.status
            .conditions
            .iter()
            .all(|c| c.observed_generation == Some(3))
    );
    assert_eq!(plan.status.observed_generation, Some(3));
    assert_eq!(verdict(&plan), ["False", "True", "False", "ScalingUp"]);
    assert_eq!(
        find(&plan, "Ready").last_transition_time,
        "2026-11-30T12:00:00Z"
    );
}

#[test]
fn counts_are_of_pods_that_serve_and_draining_ones_apart() {
    let plan = scene(
        3,
        [
            ready("a"),
            ready("b").old(),
            pod("c"),
            ready("d").old().running_sequences(1).draining(3),
            ready("e").deleted(),
            pod("f").age(5).phase("Failed"),
        ],
    )
    .plan();
    let status = &plan.status;
    assert_eq!(status.replicas, 3);
    assert_eq!((status.ready_replicas, status.available_replicas), (2, 2));
    assert_eq!((status.updated_replicas, status.draining_replicas), (2, 1));
    assert_eq!(status.ready.as_deref(), Some("2/3"));
    assert_eq!(
        status.selector.as_deref(),
        Some(
            "serving.baton.dev/pool=chat,serving.baton.dev/role=decode,!serving.baton.dev/draining"
        )
    );
    let revisions: Vec<(&str, i32, i32)> = status
        .revisions
        .iter()
        .map(|revision| (revision.hash.as_str(), revision.ready, revision.draining))
        .collect();
    assert_eq!(revisions[0].1, 1, "the current one first");
    assert_eq!(revisions[1..], [("old", 1, 1)]);
}

#[test]
fn a_pool_as_declared_is_ready_and_nothing_else() {
    let plan = scene(2, [ready("a"), ready("b")]).plan();
    assert_eq!(verdict(&plan), ["True", "False", "False", "RolledOut"]);
    assert_eq!(find(&plan, "Available").status, "True");
    assert_eq!(find(&plan, "Progressing").status, "False");
}

#[test]
fn a_pod_that_only_drains_leaves_the_pool_ready() {
    let leaving = ready("b").running_sequences(1).draining(3);
    let plan = scene(1, [ready("a"), leaving]).plan();
    assert_eq!(verdict(&plan), ["True", "True", "False", "RolledOut"]);
    assert_eq!(find(&plan, "Reconciling").reason, "Draining");
}

#[test]
fn a_rollout_is_not_ready_until_its_last_old_pod_has_left() {
    let plan = scene(2, [ready("a"), ready("b").old()]).plan();
    assert_eq!(verdict(&plan), ["False", "True", "False", "RollingOut"]);
    assert_eq!(
        find(&plan, "Available").status,
        "True",
        "it serves meanwhile"
    );
}

#[test]
fn a_paused_rollout_says_so() {
    let mut scene = scene(1, [ready("a").old()]);
    scene.observed.pool.spec.rollout.paused = true;
    let plan = scene.plan();
    assert_eq!(verdict(&plan), ["False", "False", "False", "Paused"]);
    assert_eq!(find(&plan, "Progressing").reason, "Paused");
}

#[test]
fn a_pool_of_no_replicas_is_ready_and_not_available() {
    let plan = scene(0, []).plan();
    assert_eq!(verdict(&plan), ["True", "False", "False", "ScaledToZero"]);
    assert_eq!(find(&plan, "Available").status, "False");
}

#[test]
fn a_pool_with_fewer_replicas_than_may_be_missed_is_not_available() {
    let available = |builds: Vec<Build>| find(&scene(3, builds).plan(), "Available").status;
    assert_eq!(available(vec![ready("a"), ready("b"), pod("c")]), "True");
    assert_eq!(available(vec![ready("a"), pod("b"), pod("c")]), "False");
    let one = find(&scene(1, [pod("a")]).plan(), "Available").status;
    assert_eq!(one, "False", "none at all is never enough");
}

#[test]
fn a_pod_that_cannot_be_scheduled_is_named_with_the_schedulers_words() {
    let mut scene = scene(1, [pod("a")]);
    scene.pod("a").status.as_mut().unwrap().conditions = Some(vec![PodCondition {
        type_: "PodScheduled".to_owned(),
        status: "False".to_owned(),
        reason: Some("Unschedulable".to_owned()),
        message: Some("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.".to_owned()),
        ..PodCondition::default()
    }]);
    let plan = scene.plan();
    assert_eq!(
        verdict(&plan),
        ["False", "True", "False", "Unschedulable"],
        "nodes may come"
    );
    assert_eq!(
        find(&plan, "Ready").message,
        "0 of 1 replicas are ready: pod a cannot be scheduled: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu"
    );
    let waits = find(&plan, "Reconciling");
    assert_eq!(
        waits.reason, "Unschedulable",
        "what is waited for is said where one looks for it"
    );
    assert!(waits.message.contains("pod a cannot be scheduled"));
}

#[test]
fn an_image_that_cannot_be_pulled_is_named_alike_however_the_kubelet_says_it() {
    let why = "failed to pull and unpack image: not found";
    let said = "0 of 1 replicas are ready: pod a image worker:1 cannot be pulled: check its name in spec.engine.image, and that nodes may pull it: failed to pull and unpack image: not found";
    let first = told(pod("a").waiting("ErrImagePull", why));
    let then = told(pod("a").waiting(
        "ImagePullBackOff",
        &format!("Back-off pulling image \"worker:1\": ErrImagePull: {why}"),
    ));
    assert_eq!(first, ("True".to_owned(), said.to_owned()));
    assert_eq!(then, first);
}

#[test]
fn a_worker_that_keeps_ending_is_named_with_its_last_words_in_each_of_its_states() {
    let words = "starting\nError: model /m.gguf: no such file\n";
    let said = "0 of 1 replicas are ready: pod a its worker keeps ending: exit status 1: Error: model /m.gguf: no such file";
    let waits = pod("a")
        .ended(4, 1, words)
        .waiting("CrashLoopBackOff", "back-off 40s");
    let runs = Build::age(pod("a").ended(5, 1, words), 20).running();
    assert_eq!(told(waits), ("True".to_owned(), said.to_owned()));
    assert_eq!(
        told(runs),
        ("True".to_owned(), said.to_owned()),
        "it was started once more"
    );

    let (stalled, message) = told(pod("a").ended(1, 1, words).waiting("CrashLoopBackOff", ""));
    assert_eq!(stalled, "False", "once is no loop");
    assert!(
        message.contains("its worker ended: exit status 1"),
        "{message}"
    );
}

#[test]
fn a_card_that_contradicts_its_pool_is_named_in_the_status() {
    let mut scene = scene(1, [pod("a").running()]);
    let said = "the worker's card contradicts its pool: engine.blockSize is \"32\" on the card, declared is \"16\"";
    let conditions = scene
        .pod("a")
        .status
        .as_mut()
        .unwrap()
        .conditions
        .as_mut()
        .unwrap();
    conditions.push(PodCondition {
        type_: "serving.baton.dev/registered".to_owned(),
        status: "False".to_owned(),
        reason: Some("CardMismatch".to_owned()),
        message: Some(said.to_owned()),
        ..PodCondition::default()
    });
    let plan = scene.plan();
    assert_eq!(verdict(&plan), ["False", "False", "True", "CardMismatch"]);
    assert!(find(&plan, "Ready").message.contains(said));
    let warned = plan.notes.iter().any(|note| {
        note.kind == NoteKind::Warning
            && note.reason == "Stalled"
            && note.regarding == Regarding::Pool
    });
    assert!(warned, "{:?}", plan.notes);
}

#[test]
fn pods_in_the_same_trouble_are_counted_and_one_is_named() {
    let stuck = |name: &str| pod(name).waiting("ErrImagePull", "not found");
    let plan = scene(3, [stuck("b"), stuck("a"), stuck("c")]).plan();
    let message = find(&plan, "Ready").message;
    assert!(message.contains("pod a image"), "{message}");
    assert!(message.ends_with("(and 2 pods alike)"), "{message}");
}

#[test]
fn a_pod_that_needs_its_time_is_no_trouble_until_it_took_too_long() {
    let young = scene(1, [pod("a").age(60).waiting("ContainerCreating", "")]).plan();
    assert_eq!(find(&young, "Ready").reason, "AwaitingPods");
    let (stalled, message) = told(pod("a").age(200).waiting("ContainerCreating", ""));
    assert_eq!(stalled, "False");
    assert!(message.contains("kubectl describe pod a"), "{message}");
}

fn refused(code: Option<u16>, message: &str) -> Option<CreationError> {
    let message = message.to_owned();
    Some(CreationError { code, message })
}

#[test]
fn a_refusal_stalls_the_pool_and_a_server_out_of_order_does_not() {
    let with = |code: u16, words: &str| {
        let mut scene = scene(1, []);
        scene.observed.creation_error = refused(Some(code), words);
        let plan = scene.plan();
        let told = find(&plan, "Ready").message;
        assert!(told.contains(words), "{told}");
        verdict(&plan)
    };
    let quota = "pods \"x\" is forbidden: exceeded quota: gpus, requested: 1, limited: 0";
    let rule = "admission webhook \"gatekeeper\" denied the request: no team label";
    for words in [quota, rule] {
        assert_eq!(
            with(403, words),
            ["False", "False", "True", "PodsForbidden"]
        );
    }
    let limit = "Pod \"x\" is invalid: spec.containers[0].resources.requests: must be less than or equal to cpu limit";
    for code in [400, 422] {
        assert_eq!(with(code, limit), ["False", "False", "True", "PodsInvalid"]);
    }
    let server =
        "the server is currently unable to handle the request: a quota is being calculated";
    assert_eq!(with(500, server), ["False", "True", "False", "ScalingUp"]);
}

/// The author did what the message asked for.
#[test]
fn a_refusal_is_over_once_no_more_pods_are_wanted() {
    let mut scene = scene(4, [ready("a"), ready("b"), ready("c")]);
    scene.observed.creation_error = refused(Some(403), "exceeded quota: gpus");
    assert_eq!(find(&scene.plan(), "Stalled").status, "True");
    scene.observed.pool.spec.replicas = 3;
    assert_eq!(
        verdict(&scene.plan()),
        ["True", "False", "False", "RolledOut"]
    );
}

#[test]
fn a_foreign_pod_is_named_once_and_keeps_nobody_from_being_ready() {
    let mut scene = scene(1, [ready("a"), ready("foreign")]);
    scene.pod("foreign").metadata.owner_references = None;
    let plan = scene.plan();
    assert_eq!(verdict(&plan), ["True", "False", "False", "RolledOut"]);
    assert!(
        find(&plan, "Ready")
            .message
            .contains("pod foreign carries this pool's labels")
    );
    let told = |plan: &Plan| plan.notes.iter().any(|note| note.reason == "NotAdopted");
    assert!(told(&plan));
    scene.observed.pool.status = Some(plan.status);
    assert!(!told(&scene.plan()));
}

#[test]
fn two_kv_identities_under_one_revision_are_said() {
    let mut scene = scene(2, [ready("a"), ready("b")]);
    for (name, identity) in [("a", "1"), ("b", "2")] {
        let annotations = scene.pod(name).metadata.annotations.as_mut().unwrap();
        annotations.insert(
            "serving.baton.dev/kv-identity-digest".into(),
            identity.repeat(64),
        );
    }
    let plan = scene.plan();
    let message = find(&plan, "Ready").message;
    assert!(message.contains("2 different KV identities"), "{message}");
    assert_eq!(
        plan.status.revisions[0].kv_identity.as_deref(),
        Some("1".repeat(64).as_str())
    );
}

#[test]
fn domains_of_ready_pods_are_paths_from_the_farthest_level() {
    let mut scene = scene(2, [ready("a"), ready("b")]);
    for (name, host) in [("a", "n1"), ("b", "n2")] {
        let labels = scene.pod(name).metadata.labels.as_mut().unwrap();
        labels.insert("serving.baton.dev/domain-host".into(), host.into());
        labels.insert("serving.baton.dev/domain-rack".into(), "r1".into());
    }
    let domains = scene.plan().status.domains;
    let domains: Vec<(&str, i32)> = domains.iter().map(|d| (d.path.as_str(), d.ready)).collect();
    assert_eq!(domains, [("r1/n1", 1), ("r1/n2", 1)]);
}

#[test]
fn compatibility_is_what_the_policies_say_and_unknown_without_any() {
    let mut scene = scene(1, [ready("a")]);
    assert_eq!(find(&scene.plan(), "Compatible").status, "Unknown");
    scene.observed.policies.compatible = Some(Compatibility {
        holds: false,
        message: "engine.blockSize: prefill has 16, decode has 32".to_owned(),
    });
    let condition = find(&scene.plan(), "Compatible");
    assert_eq!(
        (condition.status.as_str(), condition.reason.as_str()),
        ("False", "FieldsDiffer")
    );
    assert!(condition.message.contains("blockSize"));
}

#[test]
fn a_time_changes_with_the_status_and_with_nothing_else() {
    let mut scene = scene(2, [ready("a"), pod("b")]);
    let first = scene.plan().status;
    scene.observed.pool.status = Some(first.clone());
    scene.observed.now += jiff::SignedDuration::from_secs(100);
    assert_eq!(scene.plan().status, first, "nothing happened");

    scene.observed.pods.pop();
    scene.add(ready("c"));
    let then = scene.plan();
    assert_eq!(
        find(&then, "Ready").last_transition_time,
        "2026-11-30T12:01:40Z"
    );
    assert_eq!(
        find(&then, "Stalled").last_transition_time,
        "2026-11-30T12:00:00Z"
    );
    let told: Vec<&str> = then.notes.iter().map(|note| note.reason).collect();
    assert_eq!(told, ["Ready"]);
}

#[test]
fn a_long_message_is_cut() {
    let mut scene = scene(1, []);
    scene.observed.refusals = vec!["é".repeat(3000)];
    let message = find(&scene.plan(), "Stalled").message;
    assert_eq!(message.chars().count(), 1024);
}

/// An API server refuses a status with more than its schema has room for, whole.
#[test]
fn a_status_fits_its_schema_however_many_hosts_and_revisions_there_are() {
    let mut many = scene(300, (0..300).map(|index| ready(&format!("w{index}"))));
    for (index, pod) in many.observed.pods.iter_mut().enumerate() {
        let labels = pod.metadata.labels.as_mut().unwrap();
        labels.insert("serving.baton.dev/domain-host".into(), format!("n{index}"));
        labels.insert(
            "serving.baton.dev/domain-rack".into(),
            format!("r{}", index % 7),
        );
        if index > 200 {
            labels.insert("serving.baton.dev/revision".into(), format!("old{index}"));
        }
        let annotations = pod.metadata.annotations.as_mut().unwrap();
        annotations.insert(
            "serving.baton.dev/kv-identity-digest".into(),
            "é".repeat(4000),
        );
    }
    many.observed.refusals = vec!["é".repeat(3000)];
    let status = many.plan().status;
    crate::bounds::fits("DecodePool", &status);
    let domains: Vec<(&str, i32)> = status
        .domains
        .iter()
        .map(|domain| (domain.path.as_str(), domain.ready))
        .collect();
    assert_eq!(domains[0], ("r0", 43), "by rack: the hosts are too many");
    assert_eq!(domains.iter().map(|(_, ready)| ready).sum::<i32>(), 300);
}

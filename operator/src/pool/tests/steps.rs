//! Who is created, drained, taken back and deleted.

use jiff::SignedDuration;
use serde_json::json;

use super::scene::{Build, Scene, moves, pod, ready};
use crate::pool::{Action, Regarding};

fn scene(change: &serde_json::Value, builds: impl IntoIterator<Item = Build>) -> Scene {
    Scene::new(change).with(builds)
}

#[test]
fn missing_replicas_are_created_under_names_never_used() {
    let scene = scene(&json!({"replicas": 3}), [ready("a")]);
    let plan = scene.plan();
    assert_eq!(moves(&plan), ["create", "create"]);
    let names: Vec<String> = plan
        .actions
        .iter()
        .filter_map(|action| match action {
            Action::CreatePod(pod) => pod.metadata.name.clone(),
            _ => None,
        })
        .collect();
    let start = format!("chat-{}-", scene.revision());
    assert!(
        names
            .iter()
            .all(|name| name.starts_with(&start) && name.len() == start.len() + 5)
    );
    assert_ne!(names[0], names[1]);
}

#[test]
fn a_name_that_is_taken_is_drawn_again() {
    let mut scene = Scene::new(&json!({"replicas": 2}));
    let name = |plan: &crate::pool::Plan| match &plan.actions[0] {
        Action::CreatePod(pod) => pod.metadata.name.clone().unwrap(),
        other => panic!("{other:?}"),
    };
    let first = name(&scene.plan());
    scene.add(ready(&first).deleted());
    assert_ne!(
        name(&scene.plan()),
        first,
        "its pod may linger on a dead node"
    );
}

#[test]
fn a_pool_as_declared_is_left_alone() {
    let scene = scene(&json!({}), [ready("a"), ready("b").running_sequences(3)]);
    assert_eq!(scene.moves(), [""; 0]);
}

#[test]
fn who_is_not_ready_goes_first_then_the_coldest_then_the_youngest() {
    let all = [
        ready("warm").cached(9).age(10),
        ready("cold-old").age(500),
        ready("cold-young").age(100),
        pod("starting"),
    ];
    let drained = |replicas: i32| scene(&json!({"replicas": replicas}), all.clone()).moves();
    assert_eq!(
        drained(3),
        ["delete starting"],
        "it holds nothing, so nothing is waited for"
    );
    assert_eq!(drained(2), ["delete starting", "drain cold-young"]);
    assert_eq!(
        drained(1),
        ["delete starting", "drain cold-old", "drain cold-young"]
    );
    assert_eq!(
        drained(0),
        [
            "delete starting",
            "drain cold-old",
            "drain cold-young",
            "drain warm"
        ]
    );
}

#[test]
fn a_drain_is_marked_labelled_and_asked_for_and_only_then_deleted() {
    let start = scene(&json!({"replicas": 0}), [ready("a").running_sequences(1)]);
    let plan = start.plan();
    let kinds: Vec<&str> = plan
        .actions
        .iter()
        .map(|action| match action {
            Action::SetCondition { .. } => "condition",
            Action::StampPod { .. } => "stamp",
            Action::Drain { undo: false, .. } => "ask",
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(kinds, ["condition", "stamp", "ask"]);

    let going = |build: Build| scene(&json!({"replicas": 0}), [build]).moves();
    assert_eq!(going(ready("a").running_sequences(1).draining(5)), [""; 0]);
    assert_eq!(
        going(ready("a").leases(1).draining(5)),
        [""; 0],
        "its KV is still to be read"
    );
    assert_eq!(going(ready("a").draining(5)), ["delete a"]);
}

#[test]
fn a_worker_that_has_not_heard_of_its_drain_is_not_called_drained() {
    let mut scene = scene(&json!({"replicas": 0}), [ready("a").draining(5)]);
    let report = scene.observed.workers.get_mut("a").unwrap();
    report.load.as_mut().unwrap().draining = false;
    let plan = scene.plan();
    assert_eq!(
        moves(&plan),
        [""; 0],
        "it would take a run between the look and the end"
    );
    let asked = plan
        .actions
        .iter()
        .any(|action| matches!(action, Action::Drain { pod, undo: false, .. } if pod == "a"));
    assert!(asked, "it is told again: {:?}", plan.actions);
}

#[test]
fn a_drain_without_end_is_ended_by_its_timeout_and_said() {
    let at = |seconds: i64| {
        let change = json!({"replicas": 0, "rollout": {"drainTimeoutSeconds": 60}});
        scene(&change, [ready("a").running_sequences(2).draining(seconds)])
    };
    assert_eq!(at(59).moves(), [""; 0]);
    let plan = at(60).plan();
    assert!(
        matches!(&plan.actions[0], Action::DeletePod { grace: Some(30), uid, .. } if uid == "uid-a"),
        "preStop must not wait as long once more: {:?}",
        plan.actions
    );
    let note = &plan.notes[0];
    assert_eq!(note.reason, "DrainTimedOut");
    assert!(note.message.contains("2 running"), "{}", note.message);
    assert_eq!(
        note.regarding,
        Regarding::Pod {
            name: "a".into(),
            uid: "uid-a".into()
        }
    );
}

#[test]
fn a_worker_that_does_not_answer_drains_no_longer_than_the_timeout() {
    let at = |seconds: i64| {
        let change = json!({"replicas": 0, "rollout": {"drainTimeoutSeconds": 60}});
        scene(&change, [ready("a").draining(seconds).unreachable()]).moves()
    };
    assert_eq!(at(59), [""; 0]);
    assert_eq!(at(61), ["delete a"]);
}

#[test]
fn a_drain_that_is_wanted_back_is_taken_back_warmest_first_before_any_creation() {
    let scene = scene(
        &json!({"replicas": 3}),
        [
            ready("a"),
            ready("cold").running_sequences(1).draining(5),
            ready("warm").cached(7).running_sequences(1).draining(5),
            ready("warmest").cached(9).draining(5),
        ],
    );
    let plan = scene.plan();
    assert_eq!(moves(&plan), ["undrain warm", "undrain warmest"]);
    let told = |name: &str| {
        plan.actions
            .iter()
            .any(|action| matches!(action, Action::Drain { pod, undo: true, .. } if pod == name))
    };
    assert!(told("warm") && told("warmest") && !told("cold"));
}

#[test]
fn a_worker_that_drains_because_its_pod_ends_is_not_called_back() {
    let mut scene = scene(&json!({}), [ready("a"), ready("b")]);
    let report = scene.observed.workers.get_mut("a").unwrap();
    report.load.as_mut().unwrap().draining = true;
    let undone = |scene: &Scene| {
        let plan = scene.plan();
        plan.actions
            .iter()
            .any(|action| matches!(action, Action::Drain { .. }))
    };
    assert!(
        !undone(&scene),
        "no mark of ours is on it: preStop drains it"
    );
}

#[test]
fn a_rollout_without_surge_takes_one_away_before_it_makes_one() {
    let change = json!({"replicas": 3});
    let step = |builds: Vec<Build>| scene(&change, builds).moves();
    let old = |name: &str| ready(name).old().running_sequences(1);
    assert_eq!(
        step(vec![old("a").age(9), old("b"), old("c")]),
        ["drain a"],
        "one may be missing"
    );
    assert_eq!(
        step(vec![old("a"), old("b"), old("c").draining(1)]),
        [""; 0]
    );
    assert_eq!(
        step(vec![old("a"), old("b"), ready("c").old().draining(1)]),
        ["delete c"],
        "room is made when it is seen to be gone"
    );
    assert_eq!(
        step(vec![old("a"), old("b"), old("c").deleted()]),
        ["create"]
    );
    assert_eq!(
        step(vec![old("a"), old("b"), pod("n")]),
        [""; 0],
        "the new one is awaited"
    );
    assert_eq!(
        step(vec![old("a"), old("b").age(9), ready("n")]),
        ["drain b"]
    );
    assert_eq!(step(vec![ready("m"), ready("n"), ready("o")]), [""; 0]);
}

#[test]
fn a_rollout_with_surge_makes_one_before_it_takes_one_away() {
    let change = json!({"replicas": 2, "rollout": {"maxSurge": 1, "maxUnavailable": 0}});
    let step = |builds: Vec<Build>| scene(&change, builds).moves();
    let old = |name: &str| ready(name).old().age(if name == "b" { 9 } else { 90 });
    assert_eq!(step(vec![old("a"), old("b")]), ["create"]);
    assert_eq!(step(vec![old("a"), old("b"), pod("n")]), [""; 0]);
    assert_eq!(step(vec![old("a"), old("b"), ready("n")]), ["drain b"]);
    assert_eq!(
        step(vec![
            old("a"),
            old("b").running_sequences(1).draining(3),
            ready("n")
        ]),
        [""; 0],
        "who drains still has its devices"
    );
}

#[test]
fn surge_and_unavailable_of_zero_are_taken_as_one_unavailable() {
    let change = json!({"replicas": 1, "rollout": {"maxSurge": 0, "maxUnavailable": 0}});
    assert_eq!(scene(&change, [ready("a").old()]).moves(), ["drain a"]);
}

#[test]
fn a_rollout_waits_while_too_few_are_ready() {
    let builds = [
        ready("a").old(),
        ready("b").old(),
        ready("c").old().unready(),
    ];
    assert_eq!(
        scene(&json!({"replicas": 3}), builds).moves(),
        ["drain c"],
        "the one that is not ready anyhow may go, and no other with it"
    );
    let builds = [ready("a").old(), ready("b").old().unready(), pod("n")];
    assert_eq!(scene(&json!({"replicas": 3}), builds).moves(), [""; 0]);
}

#[test]
fn an_old_revision_that_never_came_up_is_gone_at_once() {
    let broken = |name: &str| {
        let ended = pod(name).ended(7, 1, "no such file").old();
        ended.waiting("CrashLoopBackOff", "back-off 5m")
    };
    let builds = [broken("a"), broken("b"), broken("c")];
    assert_eq!(
        scene(&json!({"replicas": 3}), builds).moves(),
        ["delete a", "delete b", "delete c"]
    );
}

#[test]
fn a_whole_revision_that_is_unready_for_a_moment_is_not_thrown_away() {
    let builds = ["a", "b", "c", "d"].map(|name| ready(name).old().unready());
    let plan = scene(&json!({"replicas": 4}), builds).plan();
    assert_eq!(
        moves(&plan).len(),
        1,
        "one may be missing: {:?}",
        moves(&plan)
    );
}

#[test]
fn a_new_revision_that_never_comes_up_takes_no_more_than_one_replica_away() {
    let stuck = pod("n")
        .ended(7, 1, "no such file")
        .waiting("CrashLoopBackOff", "back-off 5m");
    let builds = [ready("a").old(), ready("b").old(), stuck];
    assert_eq!(scene(&json!({"replicas": 3}), builds).moves(), [""; 0]);
}

#[test]
fn of_a_stuck_rollout_in_a_pool_that_shrinks_what_is_too_much_and_broken_goes() {
    let stuck = |name: &str| pod(name).waiting("ImagePullBackOff", "no such image");
    let builds = [ready("a").old(), stuck("n1"), stuck("n2")];
    let moves = |replicas: i32| scene(&json!({"replicas": replicas}), builds.clone()).moves();
    assert_eq!(moves(3), [""; 0]);
    let gone = moves(2);
    assert_eq!(gone.len(), 1, "{gone:?}");
    assert!(gone[0].starts_with("delete n"), "{gone:?}");
}

#[test]
fn a_pool_can_grow_while_it_rolls() {
    let builds = [
        ready("a").old(),
        ready("b").old().running_sequences(1).draining(9),
    ];
    assert_eq!(
        scene(&json!({"replicas": 4}), builds).moves(),
        ["create", "create"],
        "two are there and four may be"
    );
}

#[test]
fn a_paused_rollout_replaces_what_is_lost_and_nothing_else() {
    let change = json!({"replicas": 3, "rollout": {"paused": true}});
    let builds = [ready("a").old(), ready("b").old()];
    assert_eq!(scene(&change, builds).moves(), ["create"]);
    let draining = ready("c").old().running_sequences(1).draining(4);
    let builds = [ready("a").old(), ready("b").old(), draining];
    assert_eq!(
        scene(&change, builds).moves(),
        ["undrain c"],
        "paused while it drained"
    );
}

#[test]
fn a_spec_that_goes_back_takes_its_own_pods_back() {
    let back = ready("b").running_sequences(1).draining(4);
    let builds = [ready("a"), back, ready("x").old()];
    assert_eq!(
        scene(&json!({"replicas": 3}), builds).moves(),
        ["undrain b"]
    );
}

#[test]
fn evicted_pods_and_pods_that_end_are_replaced_once() {
    let builds = [ready("a"), ready("gone").deleted()];
    assert_eq!(scene(&json!({}), builds).moves(), ["create"]);
    let builds = [ready("a"), ready("gone").deleted(), pod("n")];
    assert_eq!(scene(&json!({}), builds).moves(), [""; 0]);
    let builds = [ready("a"), ready("evicted").age(60).phase("Failed")];
    assert_eq!(
        scene(&json!({}), builds).moves(),
        ["create"],
        "it is kept to be looked at"
    );
}

#[test]
fn pods_that_a_node_refuses_are_not_made_again_without_a_pause() {
    let failed = |name: &str, age: i64| pod(name).age(age).node("n1").phase("Failed");
    let step = |ages: &[i64]| {
        let builds = ages.iter().map(|age| failed(&format!("f{age}"), *age));
        scene(&json!({"replicas": 1}), builds)
    };
    assert_eq!(
        step(&[1]).moves(),
        ["create"],
        "the first is replaced at once"
    );
    assert_eq!(step(&[4, 1]).moves(), [""; 0], "the second has its pause");
    let wait = step(&[4, 1]).plan().look_again.unwrap();
    assert_eq!(wait.as_secs(), 9, "ten seconds after the last failure");
    assert_eq!(step(&[15, 11]).moves(), ["create"]);
    assert_eq!(
        step(&[60, 30, 15]).moves(),
        [""; 0],
        "twenty seconds after the third"
    );
}

#[test]
fn records_of_ended_pods_are_few_and_not_kept_for_long() {
    let failed = |index: i64| pod(&format!("f{index}")).age(700 - index).phase("Failed");
    let builds = (0..3).map(failed).chain([ready("a"), ready("b")]);
    let mut moves = scene(&json!({}), builds).moves();
    assert_eq!(
        moves,
        ["delete f0", "delete f1", "delete f2"],
        "older than ten minutes"
    );
    let failed = |index: i64| pod(&format!("f{index}")).age(100 - index).phase("Failed");
    let builds = (0..7).map(failed).chain([ready("a"), ready("b")]);
    moves = scene(&json!({}), builds).moves();
    assert_eq!(moves, ["delete f0", "delete f1"], "five are kept");
}

#[test]
fn a_pod_of_a_node_that_is_gone_is_replaced_and_deleted_by_force() {
    let scene = scene(&json!({}), [ready("a"), ready("lost").node("gone")]);
    let plan = scene.plan();
    assert_eq!(moves(&plan), ["create", "delete lost"]);
    let forced = plan.actions.iter().any(
        |action| matches!(action, Action::DeletePod { pod, grace: Some(0), .. } if pod == "lost"),
    );
    assert!(forced, "no kubelet is there to confirm the end");
}

#[test]
fn a_node_that_the_cache_does_not_know_yet_is_not_a_lost_one() {
    let scene = scene(&json!({}), [ready("a"), ready("b").age(30).node("new")]);
    assert_eq!(scene.moves(), [""; 0]);
}

#[test]
fn a_cache_without_any_node_loses_no_pod() {
    let mut scene = scene(&json!({}), [ready("a"), ready("b").node("n2")]);
    scene.observed.nodes.clear();
    assert_eq!(scene.moves(), [""; 0]);
}

#[test]
fn pods_of_others_are_neither_counted_nor_touched() {
    let mut scene = scene(
        &json!({"replicas": 1}),
        [ready("a"), ready("foreign").old()],
    );
    let foreign = scene.pod("foreign");
    foreign.metadata.owner_references.as_mut().unwrap()[0].uid = "another".into();
    let plan = scene.plan();
    let touched = plan.actions.iter().any(|action| {
        matches!(action,
            Action::StampPod { pod, .. } | Action::SetCondition { pod, .. }
            | Action::Drain { pod, .. } | Action::DeletePod { pod, .. } if pod == "foreign")
    });
    assert!(!touched, "{:?}", plan.actions);
    assert_eq!(plan.status.replicas, 1);
}

#[test]
fn a_pool_that_is_deleted_is_left_to_the_garbage_collector() {
    let mut scene = scene(&json!({"replicas": 3}), [ready("a")]);
    scene.observed.pool.deleting = true;
    let plan = scene.plan();
    assert!(plan.actions.is_empty() && plan.notes.is_empty());
}

#[test]
fn a_drains_time_is_looked_at_soon_and_a_pool_at_rest_is_not() {
    let resting = scene(&json!({"replicas": 1}), [ready("a")]);
    assert_eq!(resting.plan().look_again, None);
    let look = |build: Build| scene(&json!({"replicas": 1}), [build]).plan().look_again;
    assert_eq!(
        look(pod("a")).unwrap().as_secs(),
        30,
        "a trouble may come of it"
    );
    assert_eq!(
        look(pod("a").running().unreachable()).unwrap().as_secs(),
        2,
        "it may answer"
    );
    let draining = [ready("a"), ready("b").running_sequences(1).draining(5)];
    let mut draining = scene(&json!({"replicas": 1}), draining);
    assert_eq!(draining.plan().look_again.unwrap().as_secs(), 2);
    draining.observed.now += SignedDuration::from_secs(294);
    assert_eq!(
        draining.plan().look_again.unwrap().as_secs(),
        1,
        "its time ends before"
    );
}

//! Drains that nobody here ordered.

use k8s_openapi::api::core::v1::PodCondition;
use serde_json::json;

use super::scene::{Scene, ready};
use crate::pool::Action;

#[test]
fn a_replica_that_drains_for_longer_than_a_pod_may_take_to_end_is_taken_back() {
    let after = |seconds: i64| {
        let builds = [ready("a").unready().age(seconds), ready("b")];
        let mut scene = Scene::new(&json!({})).with(builds);
        let report = scene.observed.workers.get_mut("a").unwrap();
        report.load.as_mut().unwrap().draining = true;
        scene
    };
    let taken_back = |scene: &Scene| {
        let plan = scene.plan();
        plan.actions
            .iter()
            .any(|action| matches!(action, Action::Drain { pod, undo: true, .. } if pod == "a"))
    };
    // The drain may take 300 s, the end of the pod 30 s more.
    assert!(!taken_back(&after(325)), "a preStop may wait for it");
    assert!(taken_back(&after(335)), "nobody's, and it serves nobody");

    let mut evicted = after(335);
    let conditions = &mut evicted.pod("a").status.as_mut().unwrap().conditions;
    conditions.as_mut().unwrap().push(PodCondition {
        type_: "DisruptionTarget".to_owned(),
        status: "True".to_owned(),
        ..PodCondition::default()
    });
    assert!(!taken_back(&evicted), "its node ends it");
    let message = after(200).plan().status.conditions[0].message.clone();
    assert!(message.contains("was told to drain"), "{message}");
}

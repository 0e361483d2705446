//! The pool's PodDisruptionBudget.

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use serde_json::json;

use super::scene::{Scene, ready};
use crate::pool::Action;

fn applied(scene: &Scene) -> Option<PodDisruptionBudget> {
    scene
        .plan()
        .actions
        .into_iter()
        .find_map(|action| match action {
            Action::ApplyDisruptionBudget(budget) => Some(*budget),
            _ => None,
        })
}

#[test]
fn a_budget_selects_every_pod_of_the_pool_so_that_each_change_of_one_is_noticed() {
    let scene = Scene::new(&json!({"disruption": {"minAvailable": 1}}));
    let budget = serde_json::to_value(applied(&scene).unwrap()).unwrap();
    assert_eq!(budget["metadata"]["name"], "chat-decode");
    assert_eq!(
        budget["spec"],
        json!({
            "minAvailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {
                    "serving.baton.dev/pool": "chat", "serving.baton.dev/role": "decode",
                },
            },
        })
    );
}

#[test]
fn a_budget_is_written_when_it_differs_and_deleted_when_it_is_not_wanted() {
    let mut scene = Scene::new(&json!({"disruption": {"minAvailable": 1}}));
    let mut budget = applied(&scene).unwrap();
    budget.metadata.uid = Some("budget-uid".to_owned());
    scene.observed.disruption_budget = Some(budget);
    assert_eq!(applied(&scene), None, "it is there");

    scene.observed.pool.spec.disruption.min_available = Some(2);
    assert!(applied(&scene).is_some());

    scene.observed.pool.spec.disruption.min_available = None;
    let deleted = scene.plan().actions.into_iter().any(|action| {
        matches!(action, Action::DeleteDisruptionBudget { name, uid }
            if name == "chat-decode" && uid == "budget-uid")
    });
    assert!(deleted);
}

#[test]
fn a_budget_of_somebody_else_is_left_alone_and_named() {
    let mut scene =
        Scene::new(&json!({"replicas": 1, "disruption": {"minAvailable": 1}})).with([ready("a")]);
    let mut budget = applied(&scene).unwrap();
    budget.metadata.owner_references = None;
    scene.observed.disruption_budget = Some(budget);
    let plan = scene.plan();
    assert_eq!(applied(&scene), None);
    let stalled = plan
        .status
        .conditions
        .iter()
        .find(|c| c.condition_type == "Stalled")
        .unwrap();
    assert_eq!(
        (stalled.status.as_str(), stalled.reason.as_str()),
        ("True", "NameTaken")
    );
    assert!(
        stalled.message.contains("chat-decode"),
        "{}",
        stalled.message
    );

    scene.observed.pool.spec.disruption.min_available = None;
    let deletes = scene.plan().actions.into_iter();
    assert_eq!(
        deletes.collect::<Vec<_>>().len(),
        1,
        "the pod's stamp, and no deletion"
    );
}

//! The planner of policies: objects in, status out.

use std::collections::BTreeMap;

use baton_crds::status::{PairStatus, PoolStatus, RevisionStatus};
use baton_crds::{PoolRole, PoolSpec, RoutePolicySpec};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::*;

mod declared;
mod routers;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + second).unwrap()
}

fn pool_spec(change: impl FnOnce(&mut Value)) -> PoolSpec {
    let mut spec = json!({
        "model": {"name": "m", "source": {"uri": "builtin://tiny"}},
        "engine": {"type": "Builtin"},
    });
    change(&mut spec);
    serde_json::from_value(spec).unwrap()
}

fn pool(role: PoolRole, name: &str, change: impl FnOnce(&mut Value)) -> PoolView {
    PoolView {
        role,
        name: name.into(),
        labels: BTreeMap::from([("tier".into(), name.into())]),
        spec: pool_spec(change),
        status: PoolStatus::default(),
    }
}

/// With one ready worker of a revision and KV identity.
fn ready(mut pool: PoolView, revision: &str, identity: &str) -> PoolView {
    pool.status.available_replicas = 1;
    pool.status.revisions.push(RevisionStatus {
        hash: revision.into(),
        kv_identity: Some(identity.into()),
        ready: 1,
        draining: 0,
    });
    pool
}

fn policy(change: impl FnOnce(&mut Value)) -> PolicyObject {
    let mut spec = json!({
        "model": "m", "prefillPools": [{"name": "p"}], "decodePools": [{"name": "d"}],
    });
    change(&mut spec);
    PolicyObject {
        name: "route".into(),
        namespace: "n".into(),
        uid: "u".into(),
        generation: 4,
        created: Some(at(0)),
        deleting: false,
        spec: serde_json::from_value(spec).unwrap(),
        status: None,
    }
}

fn router(pod: &str, generation: Option<i64>, refused: Option<&str>) -> Router {
    Router {
        pod: pod.into(),
        answer: Ok(vec![InForce {
            name: "route".into(),
            generation,
            refused: refused.map(str::to_owned),
        }]),
    }
}

/// Everything as it should be.
fn good() -> Observed {
    Observed {
        policy: policy(|_| ()),
        refusals: Vec::new(),
        pools: vec![
            ready(pool(PoolRole::Prefill, "p", |_| ()), "r1", "k"),
            ready(pool(PoolRole::Decode, "d", |_| ()), "r2", "k"),
        ],
        others: Vec::new(),
        cards: BTreeMap::new(),
        routers: vec![router("router-0", Some(4), None)],
        now: at(100),
    }
}

fn of<'a>(plan: &'a Plan, name: &str) -> (&'a str, &'a str, &'a str) {
    let condition = plan
        .status
        .conditions
        .iter()
        .find(|condition| condition.condition_type == name)
        .unwrap_or_else(|| panic!("no condition {name}"));
    assert_eq!(condition.observed_generation, Some(4));
    (&condition.status, &condition.reason, &condition.message)
}

fn word<'a>(plan: &'a Plan, name: &str) -> (&'a str, &'a str) {
    let (status, reason, _) = of(plan, name);
    (status, reason)
}

#[test]
fn a_policy_that_is_served_says_so_and_is_at_rest_then() {
    let mut observed = good();
    let first = plan(&observed);
    assert_eq!(word(&first, "Ready"), ("True", "Serving"));
    assert_eq!(word(&first, "Accepted"), ("True", "Valid"));
    assert_eq!(word(&first, "Compatible"), ("True", "IdentitiesMatch"));
    assert_eq!(word(&first, "Disaggregating"), ("True", "Paired"));
    assert_eq!(word(&first, "Reconciling"), ("False", "AsDeclared"));
    assert_eq!(word(&first, "Stalled"), ("False", "Healthy"));
    assert_eq!(first.status.observed_generation, Some(4));
    assert_eq!(first.status.last_good_generation, Some(4));
    let pair = PairStatus {
        prefill_pool: "p".into(),
        prefill_revision: "r1".into(),
        decode_pool: "d".into(),
        decode_revision: "r2".into(),
        compatible: true,
        differences: Vec::new(),
    };
    assert_eq!(first.status.pairs, [pair]);

    observed.policy.status = Some(first.status.clone());
    observed.now = at(500);
    let second = plan(&observed);
    assert_eq!(
        second.status, first.status,
        "an hour later it says the same"
    );
    assert_eq!(second.notes, []);
}

#[test]
fn declarations_that_agree_are_not_compatible_before_workers_say_so() {
    let mut observed = good();
    for pool in &mut observed.pools {
        pool.status = PoolStatus::default();
    }
    let plan = plan(&observed);
    assert_eq!(word(&plan, "Compatible"), ("Unknown", "DeclarationsAgree"));
    assert_eq!(word(&plan, "Disaggregating"), ("False", "NoPrefillReady"));
    assert_eq!(word(&plan, "Ready"), ("False", "NoDecodeReady"));
    assert_eq!(word(&plan, "Reconciling"), ("True", "NoDecodeReady"));
    assert_eq!(word(&plan, "Stalled").0, "False");
    assert_eq!(plan.status.pairs, []);
}

#[test]
fn workers_of_different_identities_are_no_pair_and_requests_are_still_served() {
    let mut observed = good();
    observed.pools[0].status.revisions[0].kv_identity = Some("other".into());
    let plan = plan(&observed);
    let (status, reason, message) = of(&plan, "Compatible");
    assert_eq!((status, reason), ("False", "IdentitiesDiffer"));
    assert!(
        message.contains("kvIdentity is other for prefill and k for decode"),
        "{message}"
    );
    assert_eq!(word(&plan, "Disaggregating"), ("False", "Incompatible"));
    assert_eq!(word(&plan, "Ready"), ("True", "Serving"));
    assert!(!plan.status.pairs[0].compatible);
    assert_eq!(plan.status.pairs[0].differences[0].field, "kvIdentity");
}

#[test]
fn during_a_rollout_the_pair_that_still_matches_counts() {
    let mut observed = good();
    // The decode pool is already on its way to a model with another identity.
    observed.pools[1].status.revisions.insert(
        0,
        RevisionStatus {
            hash: "r3".into(),
            kv_identity: Some("new".into()),
            ready: 1,
            draining: 0,
        },
    );
    let both = plan(&observed);
    assert_eq!(word(&both, "Compatible").0, "True");
    assert_eq!(word(&both, "Disaggregating").0, "True");
    let compatible: Vec<(&str, bool)> = both
        .status
        .pairs
        .iter()
        .map(|pair| (pair.decode_revision.as_str(), pair.compatible))
        .collect();
    assert_eq!(compatible, [("r3", false), ("r2", true)]);
    // The last old decode worker is gone from service.
    observed.pools[1].status.revisions[1].ready = 0;
    assert_eq!(
        word(&plan(&observed), "Disaggregating"),
        ("False", "Incompatible")
    );
}

#[test]
fn a_policy_that_wants_no_remote_prefill_says_that_it_has_none() {
    let mut observed = good();
    observed.policy = policy(|spec| spec["mode"] = json!("Aggregated"));
    assert_eq!(
        word(&plan(&observed), "Disaggregating"),
        ("False", "ModeAggregated")
    );
    observed.policy = policy(|spec| spec["prefillPools"] = json!([]));
    let none = plan(&observed);
    assert_eq!(word(&none, "Disaggregating"), ("False", "NoPrefillPool"));
    assert_eq!(word(&none, "Compatible"), ("Unknown", "NothingToPair"));
    assert_eq!(word(&none, "Ready"), ("True", "Serving"));
}

#[test]
fn remote_prefill_that_is_missing_is_said_with_its_reason_and_stops_only_a_fixed_policy() {
    let mut observed = good();
    observed.pools[0].status.available_replicas = 0;
    observed.pools[0].status.revisions[0].ready = 0;
    let conditional = plan(&observed);
    assert_eq!(
        word(&conditional, "Disaggregating"),
        ("False", "NoPrefillReady")
    );
    assert_eq!(word(&conditional, "Ready"), ("True", "Serving"));
    assert_eq!(
        conditional.notes,
        [],
        "workers that are not ready yet are no news"
    );
    observed.policy.status = Some(plan(&good()).status);
    let reasons: Vec<&str> = plan(&observed)
        .notes
        .iter()
        .map(|note| note.reason)
        .collect();
    assert_eq!(reasons, ["NotDisaggregating"], "they were, and are not");
    observed.policy = policy(|spec| spec["mode"] = json!("Disaggregated"));
    assert_eq!(word(&plan(&observed), "Ready"), ("False", "NoPrefillReady"));
}

#[test]
fn the_older_policy_keeps_a_model_and_the_younger_says_who_has_it() {
    let mut observed = good();
    let other = |created, name: &str| Other {
        name: name.into(),
        created: Some(at(created)),
        models: vec!["x".into(), "m".into()],
    };
    observed.others = vec![other(1, "younger"), other(0, "same-age-later-name")];
    assert_eq!(word(&plan(&observed), "Accepted").0, "True");
    observed.others.push(other(-1, "older"));
    let plan = plan(&observed);
    let (status, reason, message) = of(&plan, "Accepted");
    assert_eq!((status, reason), ("False", "ModelTaken"));
    assert!(
        message.contains("model m is served by RoutePolicy older"),
        "{message}"
    );
    assert_eq!(word(&plan, "Stalled"), ("True", "ModelTaken"));
    assert_eq!(plan.status.last_good_generation, None);
}

#[test]
fn a_pool_that_is_missing_is_awaited_and_one_of_another_model_is_not() {
    let mut observed = good();
    observed.pools.remove(1);
    observed
        .pools
        .push(ready(pool(PoolRole::Prefill, "d", |_| ()), "r", "k"));
    let missing = plan(&observed);
    let (status, reason, message) = of(&missing, "Accepted");
    assert_eq!((status, reason), ("False", "PoolMissing"));
    assert!(
        message.contains(
            "spec.decodePools[0]: there is no DecodePool d in namespace n (PrefillPool d is there)"
        ),
        "{message}"
    );
    assert_eq!(word(&missing, "Reconciling"), ("True", "PoolMissing"));
    assert_eq!(word(&missing, "Stalled").0, "False");

    let mut observed = good();
    observed.policy = policy(|spec| {
        spec["decodePools"] = json!([{"selector": {"matchLabels": {"tier": "d"}}}]);
        spec["model"] = json!("big");
    });
    let other = plan(&observed);
    let (_, reason, message) = of(&other, "Accepted");
    assert_eq!(reason, "ModelMismatch");
    assert!(
        message.contains("serves model m, this policy serves big"),
        "{message}"
    );
    assert_eq!(word(&other, "Stalled").0, "True");
}

#[test]
fn a_policy_is_ready_when_every_router_serves_by_its_generation() {
    let mut observed = good();
    observed.routers.push(router("router-1", Some(3), None));
    let behind = plan(&observed);
    let (status, reason, message) = of(&behind, "Ready");
    assert_eq!((status, reason), ("False", "RoutersBehind"));
    assert!(
        message.contains("router router-1 does not serve by generation 4"),
        "{message}"
    );
    assert_eq!(word(&behind, "Reconciling").0, "True");
    assert_eq!(behind.status.routers.len(), 2);

    observed.routers[1] = router("router-1", Some(3), Some("weights.wq: too large"));
    let refused = plan(&observed);
    assert_eq!(word(&refused, "Stalled"), ("True", "RouterRefuses"));
    assert_eq!(refused.status.routers[1].generation, Some(3));
    assert_eq!(
        refused.status.routers[1].refused.as_deref(),
        Some("weights.wq: too large")
    );

    observed.routers.clear();
    assert_eq!(word(&plan(&observed), "Ready"), ("False", "NoRouter"));
}

#[test]
fn a_router_that_cannot_be_asked_keeps_what_it_said_and_a_new_one_is_behind() {
    let mut observed = good();
    observed.policy.status = Some(plan(&observed).status);
    observed.routers[0].answer = Err("no answer within 2 s".into());
    assert_eq!(word(&plan(&observed), "Ready"), ("True", "Serving"));
    observed.routers.push(Router {
        pod: "router-1".into(),
        answer: Err("no answer within 2 s".into()),
    });
    let plan = plan(&observed);
    let (status, _, message) = of(&plan, "Ready");
    assert_eq!(status, "False");
    assert!(
        message.contains("router-1") && message.contains("no answer within 2 s"),
        "{message}"
    );
}

#[test]
fn what_a_rule_forbids_leaves_the_last_good_generation() {
    let mut observed = good();
    observed.policy.generation = 3;
    let mut status = plan(&observed).status;
    assert_eq!(status.last_good_generation, Some(3));
    observed.policy.generation = 4;
    observed.policy.status = Some(std::mem::take(&mut status));
    observed.refusals = vec!["RoutePolicy route: spec.mode: must be one of …".into()];
    let refused = plan(&observed);
    assert_eq!(word(&refused, "Accepted"), ("False", "InvalidSpec"));
    assert_eq!(word(&refused, "Stalled").0, "True");
    assert_eq!(refused.status.last_good_generation, Some(3));
    assert_eq!(refused.status.observed_generation, Some(4));
}

#[test]
fn a_policy_that_is_being_deleted_is_left_alone() {
    let mut observed = good();
    observed.policy.deleting = true;
    assert_eq!(plan(&observed).status, Default::default());
}

#[test]
fn a_pool_learns_who_names_it_the_tightest_objective_and_its_partners() {
    let spec = |change: fn(&mut Value)| policy(change).spec;
    let one = spec(|spec| spec["objective"] = json!({"tpotMilliseconds": 50}));
    let two = spec(|spec| {
        spec["objective"] = json!({"tpotMilliseconds": 20});
        spec["topology"] = json!({"farthestLevel": "zone"});
        spec["cost"] = json!({"levelPenaltyMilliseconds": {"rack": 3}});
    });
    let other = spec(|spec| {
        spec["topology"] = json!({"farthestLevel": "host"});
        spec["prefillPools"] = json!([{"name": "elsewhere"}]);
        spec["decodePools"] = json!([{"selector": {"matchLabels": {"tier": "x"}}}]);
    });
    let policies: Vec<(String, &RoutePolicySpec)> = vec![
        ("two".into(), &two),
        ("one".into(), &one),
        ("other".into(), &other),
    ];
    let pools = vec![
        pool(PoolRole::Prefill, "p", |_| ()),
        pool(PoolRole::Decode, "d", |spec| {
            spec["engine"]["blockSize"] = json!(8);
        }),
        pool(PoolRole::Decode, "p", |_| ()),
    ];
    let facts = facts::of(&pools[0], &policies, &pools);
    assert_eq!(facts.named_by, ["one", "two"]);
    assert_eq!(facts.tpot_objective_milliseconds, Some(20));
    assert_eq!(facts.levels, ["rack".to_owned(), "zone".to_owned()].into());
    let compatible = facts.compatible.unwrap();
    assert!(!compatible.holds);
    assert_eq!(
        compatible.message,
        "not with DecodePool d: spec.engine.blockSize is 16 for prefill and 8 for decode"
    );
    let alone = facts::of(&pools[2], &policies, &pools);
    assert_eq!(
        alone,
        Default::default(),
        "a decode pool of a prefill pool's name is another pool"
    );
}

//! Random histories: authors change the spec, pods fail, nodes lose power, the cache lags, writes are refused, or made and never
//! answered, the operator is killed between two of them. What must never happen is asserted while plans are carried out ([`cluster`]):
//!
//! - no replica that serves is taken away when that leaves fewer than `replicas - maxUnavailable`;
//! - no pod is created beyond `replicas + maxSurge`, and none under a name that is taken;
//! - no pod is deleted twice;
//! - no pod is deleted while its worker has work, unless its drain has timed out or its node is gone.
//!
//! And at the end of each history the pool is left alone: it must come to what was declared, or as near as a revision that never comes
//! up lets it, with no more than `replicas + maxSurge` pods, and then rest.

mod cluster;

use proptest::prelude::*;
use serde_json::json;

use self::cluster::{BROKEN_IMAGE, Cluster, Fates};

#[derive(Debug, Clone)]
enum Event {
    Reconcile(Fates),
    See(Option<usize>),
    Kubelet(Option<usize>),
    Place(usize),
    FinishWork(Option<usize>),
    Pass(i64),
    Replicas(i32),
    Image(u8),
    Paused(bool),
    Bounds { surge: i32, unavailable: i32 },
    Flap(usize),
    Fail(usize),
    Evict(usize),
    Reach(usize, bool),
    Power(usize, bool),
    RemoveNode(usize),
    Restart,
}

fn event() -> impl Strategy<Value = Event> {
    let index = 0..12_usize;
    let some = proptest::option::weighted(0.5, 0..12_usize);
    let rarely = proptest::option::weighted(0.15, 0..8_usize);
    prop_oneof![
        12 => (rarely.clone(), rarely.clone(), rarely).prop_map(|(fails, unanswered, killed_after)| {
            Event::Reconcile(Fates { fails, unanswered, killed_after })
        }),
        8 => some.clone().prop_map(Event::See),
        10 => some.clone().prop_map(Event::Kubelet),
        4 => index.clone().prop_map(Event::Place),
        3 => some.prop_map(Event::FinishWork),
        3 => (1..90_i64).prop_map(Event::Pass),
        3 => (0..6_i32).prop_map(Event::Replicas),
        2 => (0..4_u8).prop_map(Event::Image),
        1 => any::<bool>().prop_map(Event::Paused),
        1 => (0..3_i32, 0..3_i32).prop_map(|(surge, unavailable)| Event::Bounds { surge, unavailable }),
        1 => index.clone().prop_map(Event::Flap),
        1 => index.clone().prop_map(Event::Fail),
        1 => index.clone().prop_map(Event::Evict),
        1 => (index.clone(), any::<bool>()).prop_map(|(index, on)| Event::Reach(index, on)),
        1 => (index.clone(), any::<bool>()).prop_map(|(index, on)| Event::Power(index, on)),
        1 => index.prop_map(Event::RemoveNode),
        1 => Just(Event::Restart),
    ]
}

fn happen(cluster: &mut Cluster, event: &Event) {
    match *event {
        Event::Reconcile(fates) => {
            cluster.reconcile(fates);
        }
        Event::See(index) => cluster.see(index),
        Event::Kubelet(Some(index)) => cluster.kubelet_of(index),
        Event::Kubelet(None) => cluster.kubelets(),
        Event::Place(index) => cluster.place(index),
        Event::FinishWork(index) => cluster.finish_work(index),
        Event::Pass(seconds) => cluster.pass(seconds),
        Event::Replicas(replicas) => cluster.set("/replicas", replicas.into()),
        Event::Image(0) => cluster.set("/engine/image", BROKEN_IMAGE.into()),
        Event::Image(number) => cluster.set("/engine/image", format!("worker:{number}").into()),
        Event::Paused(paused) => cluster.set("/rollout/paused", paused.into()),
        Event::Bounds { surge, unavailable } => {
            cluster.set("/rollout/maxSurge", surge.into());
            cluster.set("/rollout/maxUnavailable", unavailable.into());
        }
        Event::Flap(index) => cluster.flap(index),
        Event::Fail(index) => cluster.fail(index),
        Event::Evict(index) => cluster.evict(index),
        Event::Reach(index, on) => cluster.reach(index, on),
        Event::Power(index, on) => cluster.power(index, on),
        Event::RemoveNode(index) => cluster.remove_node(index),
        Event::Restart => cluster.restart(),
    }
}

/// Nobody changes anything any more, and what is under way goes on until nothing is.
fn left_alone(cluster: &mut Cluster) -> Result<(), TestCaseError> {
    const ROUNDS: usize = 200;
    /// Rounds in which nothing was done, with minutes between them: what waits for its time has had it.
    const QUIET: usize = 6;
    cluster.power(0, true);
    cluster.pass(300);
    cluster.evict_from_dark_nodes();
    cluster.all_reachable();
    let mut quiet = 0;
    for _ in 0..ROUNDS {
        let before = cluster.base.pool.status.clone();
        cluster.see(None);
        let plan = cluster.reconcile(Fates::default());
        cluster.kubelets();
        cluster.finish_work(None);
        let is_quiet = plan.actions.is_empty() && Some(plan.status) == before;
        quiet = if is_quiet { quiet + 1 } else { 0 };
        if quiet == QUIET {
            cluster.see(None);
            return Ok(());
        }
        cluster.pass(if is_quiet { 170 } else { 10 });
    }
    Err(TestCaseError::fail("it does not come to rest"))
}

fn rests(cluster: &mut Cluster) -> Result<(), TestCaseError> {
    let before = cluster.base.pool.status.clone();
    let created = cluster.created;
    let plan = cluster.reconcile(Fates::default());
    prop_assert_eq!(&plan.actions, &Vec::new(), "a pool at rest is left alone");
    prop_assert_eq!(&plan.notes, &Vec::new());
    prop_assert_eq!(
        Some(&plan.status),
        before.as_ref(),
        "and its status is not written"
    );
    prop_assert_eq!(cluster.created, created);
    Ok(())
}

fn as_declared(cluster: &Cluster) -> Result<(), TestCaseError> {
    let spec = &cluster.base.pool.spec;
    let wanted = usize::try_from(spec.replicas).unwrap();
    let (serving, ready) = cluster.serving();
    let is_broken = spec.engine.image.as_deref() == Some(BROKEN_IMAGE);
    let surge = usize::try_from(spec.rollout.max_surge).unwrap();
    prop_assert!(cluster.live() <= wanted + surge, "pods hold devices");
    if is_broken && !spec.rollout.paused {
        // It waits for its new pods beside the old ones that have to stay.
        prop_assert!(serving >= wanted);
    } else {
        prop_assert_eq!(serving, wanted, "pods that serve");
    }
    if !is_broken && !spec.rollout.paused {
        prop_assert_eq!(ready, wanted, "ready pods of the declared image");
        prop_assert_eq!(cluster.live(), wanted, "and no other");
    }
    prop_assert_eq!(cluster.disagreeing(), Vec::<String>::new());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_history_breaks_a_bound_and_each_comes_to_rest_as_declared(
        replicas in 0..5_i32,
        events in proptest::collection::vec(event(), 1..120),
    ) {
        let mut cluster = Cluster::new(replicas);
        for event in &events {
            happen(&mut cluster, event);
        }
        left_alone(&mut cluster)?;
        as_declared(&cluster)?;
        rests(&mut cluster)?;
    }

    #[test]
    fn a_spec_that_changes_in_a_stuck_rollout_ends_within_its_bounds(
        replicas in 1..6_i32,
        bounds in (0..3_i32, 0..4_i32),
        later in (0..5_i32, 0..2_i32, 0..3_i32),
        failing in proptest::collection::vec(0..12_usize, 0..4),
    ) {
        let mut cluster = Cluster::new(replicas);
        let rounds = |cluster: &mut Cluster, count: u32| for _ in 0..count {
            cluster.see(None);
            cluster.reconcile(Fates::default());
            cluster.kubelets();
            cluster.pass(5);
        };
        happen(&mut cluster, &Event::Bounds { surge: bounds.0, unavailable: bounds.1 });
        rounds(&mut cluster, 8);
        happen(&mut cluster, &Event::Image(0));
        rounds(&mut cluster, 8);
        for index in failing {
            cluster.fail(index);
            rounds(&mut cluster, 4);
        }
        happen(&mut cluster, &Event::Replicas(later.0));
        happen(&mut cluster, &Event::Bounds { surge: later.1, unavailable: later.2 });
        left_alone(&mut cluster)?;
        as_declared(&cluster)?;
        rests(&mut cluster)?;
    }

    #[test]
    fn a_rollout_under_load_ends_and_keeps_its_bounds(
        replicas in 1..5_i32,
        surge in 0..2_i32,
        unavailable in 0..3_i32,
        order in proptest::collection::vec((0..12_usize, 0..3_u8), 20..80),
    ) {
        let mut cluster = Cluster::new(replicas);
        cluster.set("/rollout", json!({
            "maxSurge": surge, "maxUnavailable": unavailable, "drainTimeoutSeconds": 60,
        }));
        for _ in 0..8 {
            cluster.see(None);
            cluster.reconcile(Fates::default());
            cluster.kubelets();
        }
        cluster.set("/engine/image", "worker:2".into());
        for (index, what) in order {
            match what {
                0 => cluster.place(index),
                1 => cluster.finish_work(Some(index)),
                _ => cluster.pass(1),
            }
            cluster.see(Some(index));
            cluster.reconcile(Fates::default());
            cluster.kubelet_of(index);
        }
        left_alone(&mut cluster)?;
        as_declared(&cluster)?;
        rests(&mut cluster)?;
    }
}

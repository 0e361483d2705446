//! What each mode does, what happens when somebody is missing, and what several routers do.

use baton_placement::fleet::{BreakerState, Fleet, FleetBuilder, WorkerEntry, WorkerState};
use baton_placement::place::{Decision, Filter, Outcome, Plan, Reason, Request, place};
use baton_placement::policy::{
    Enforcement, FirstToken, Mode, NoPrefillAction, Overrides, Policy, Pooling,
};
use baton_placement::rng::Rng;
use baton_protocol::card::Role;

use crate::fleets::{cpu_set, entry, levels, simple};

fn request(tokens: u32) -> Request {
    Request {
        tokens,
        max_output_tokens: 64,
        expected_output_tokens: 64.0,
        ..Request::default()
    }
}

fn policy(mode: Mode) -> Policy {
    let mut policy = Policy::new("chat", "m", &["prefill"], &["decode"]);
    policy.pooling = Pooling::Strict;
    policy.mode = mode;
    policy
}

fn trio() -> Vec<WorkerEntry> {
    vec![
        entry("p0", "prefill", 0),
        entry("d0", "decode", 1),
        entry("d1", "decode", 2),
    ]
}

fn busy(mut worker: WorkerEntry, sequences: u32) -> WorkerEntry {
    worker.load.running_sequences = sequences;
    worker.load.context_tokens = 300 * u64::from(sequences);
    worker
}

fn decide(fleet: &Fleet, request: &Request, policy: &Policy) -> Decision {
    place(fleet, request, policy, 0.0, &mut Rng::new(1))
}

#[test]
fn aggregated_takes_the_least_queue_and_never_a_pair() {
    let mut workers = trio();
    workers[1].load.queued_tokens = 500;
    workers[1].load.queued_sequences = 1;
    let decision = decide(&simple(workers), &request(600), &policy(Mode::Aggregated));
    assert_eq!(decision.reason, Reason::ModeAggregated);
    assert_eq!(decision.outcome, Outcome::Run(Plan::Local { worker: 2 }));
}

#[test]
fn disaggregated_always_takes_a_pair() {
    let decision = decide(&simple(trio()), &request(20), &policy(Mode::Disaggregated));
    assert_eq!(decision.reason, Reason::ModeDisaggregated);
    assert!(decision.chosen().unwrap().plan.is_remote());
}

#[test]
fn the_threshold_counts_tokens_that_are_not_cached_on_the_decode_worker() {
    let rule = policy(Mode::Threshold { tokens: 512 });
    let fleet = simple(trio());
    assert_eq!(
        decide(&fleet, &request(511), &rule).reason,
        Reason::ThresholdBelow
    );
    assert_eq!(
        decide(&fleet, &request(512), &rule).reason,
        Reason::ThresholdAbove
    );
    let mut cached = request(600);
    cached.hits.set(2, 20);
    let decision = decide(&fleet, &cached, &rule);
    assert_eq!(decision.reason, Reason::ThresholdBelow);
    assert_eq!(decision.outcome, Outcome::Run(Plan::Local { worker: 2 }));
    assert!(
        decision.explanation.contains("280 of 600"),
        "{}",
        decision.explanation
    );
}

#[test]
fn dynamo_bypasses_prefill_only_for_short_and_mostly_cached_prompts() {
    let rule = policy(Mode::DynamoIslBounding {
        tokens: 2048,
        ratio: 0.7,
    });
    let fleet = simple(trio());
    assert_eq!(
        decide(&fleet, &request(600), &rule).reason,
        Reason::DynamoRemote
    );
    let mut cached = request(600);
    cached.hits.set(1, 20);
    cached.hits.set(2, 20);
    assert_eq!(decide(&fleet, &cached, &rule).reason, Reason::DynamoBypass);
    let mut workers = trio();
    workers[0].load.queued_tokens = 9_000;
    workers[0].load.queued_sequences = 3;
    let or_load = policy(Mode::DynamoIslOrLoad {
        tokens: 2048,
        ratio: 0.7,
        busy_tokens: 8192,
    });
    assert_eq!(
        decide(&simple(workers), &request(600), &or_load).reason,
        Reason::DynamoBusy
    );
}

#[test]
fn the_header_counts_only_where_the_policy_allows_it() {
    let fleet = simple(trio());
    let mut asked = request(20);
    asked.mode = Mode::from_header("Disaggregated");
    let mut rule = policy(Mode::Aggregated);
    assert_eq!(decide(&fleet, &asked, &rule).reason, Reason::ModeAggregated);
    rule.overrides = Overrides::Allowed;
    let decision = decide(&fleet, &asked, &rule);
    assert_eq!(
        (decision.reason, decision.mode),
        (Reason::ModeDisaggregated, Mode::Disaggregated)
    );
}

#[test]
fn one_token_moves_nothing_even_when_remote_is_fixed() {
    let mut one = request(600);
    one.max_output_tokens = 1;
    let decision = decide(&simple(trio()), &one, &policy(Mode::Disaggregated));
    assert_eq!(decision.reason, Reason::OneToken);
    assert!(!decision.chosen().unwrap().plan.is_remote());
}

#[test]
fn a_request_that_has_to_stay_whole_does_so_in_every_mode() {
    for mode in [Mode::Disaggregated, Mode::Conditional, Mode::Aggregated] {
        let mut one = request(600);
        one.whole = true;
        let decision = decide(&simple(trio()), &one, &policy(mode));
        assert_eq!(decision.reason, Reason::NotDisaggregatable, "{mode:?}");
        assert!(!decision.chosen().unwrap().plan.is_remote());
    }
}

#[test]
fn pooled_lets_a_prefill_worker_take_a_whole_request_and_strict_does_not() {
    let workers = vec![entry("p0", "prefill", 0), busy(entry("d0", "decode", 1), 4)];
    let fleet = simple(workers);
    let mut rule = policy(Mode::Conditional);
    rule.pooling = Pooling::Pooled;
    let decision = decide(&fleet, &request(600), &rule);
    assert_eq!(
        decision.outcome,
        Outcome::Run(Plan::Local { worker: 0 }),
        "{}",
        decision.explanation
    );
    rule.pooling = Pooling::Strict;
    let strict = decide(&fleet, &request(600), &rule);
    assert!(
        strict
            .candidates
            .iter()
            .all(|one| one.plan != Plan::Local { worker: 0 })
    );
}

#[test]
fn without_prefill_workers_the_policy_says_what_happens_and_the_record_says_why() {
    let mut workers = trio();
    workers[0].state = WorkerState::Draining;
    let fleet = simple(workers);
    let mut rule = policy(Mode::Disaggregated);

    let local = decide(&fleet, &request(600), &rule);
    assert_eq!(local.reason, Reason::NoPrefillWorker);
    assert!(matches!(local.outcome, Outcome::Run(Plan::Local { .. })));
    assert_eq!(local.filtered[&Filter::Draining], 1);
    assert!(
        local.explanation.contains("Draining 1"),
        "{}",
        local.explanation
    );

    rule.on_no_prefill.max_concurrent_per_worker = 3;
    let mut many = request(600);
    many.local_without_prefill = 6;
    let over = decide(&fleet, &many, &rule);
    assert_eq!(
        (over.reason, over.outcome),
        (
            Reason::NoPrefillBudget,
            Outcome::Reject {
                retry_after_seconds: 1
            }
        )
    );

    rule.on_no_prefill.action = NoPrefillAction::Queue;
    let waits = decide(&fleet, &request(600), &rule);
    assert!(matches!(waits.outcome, Outcome::Wait { milliseconds } if milliseconds == 5_000.0));
    let mut waited = request(600);
    waited.waited_milliseconds = 5_000.0;
    assert!(matches!(
        decide(&fleet, &waited, &rule).outcome,
        Outcome::Reject { .. }
    ));

    rule.on_no_prefill.action = NoPrefillAction::Reject;
    assert!(matches!(
        decide(&fleet, &request(600), &rule).outcome,
        Outcome::Reject { .. }
    ));
}

#[test]
fn nobody_left_is_refused_with_the_reason() {
    let none = decide(&simple(vec![]), &request(600), &policy(Mode::Conditional));
    assert_eq!((none.reason, none.chosen), (Reason::NoEligibleWorker, None));
    assert!(
        none.explanation.contains("none is registered"),
        "{}",
        none.explanation
    );

    let mut workers = trio();
    for worker in &mut workers {
        worker.load.queued_sequences = 64;
    }
    let full = decide(&simple(workers), &request(600), &policy(Mode::Conditional));
    assert_eq!(full.reason, Reason::QueueFull);
    assert!(
        full.explanation.contains("64 requests waiting"),
        "{}",
        full.explanation
    );

    let large = decide(
        &simple(trio()),
        &request(40_000),
        &policy(Mode::Conditional),
    );
    assert_eq!(large.reason, Reason::KvCapacity);
    assert!(
        large.explanation.contains("40000 prompt"),
        "{}",
        large.explanation
    );
}

#[test]
fn a_full_decode_worker_is_waited_for_only_if_others_are_worse() {
    let mut workers = trio();
    workers[1] = busy(workers[1].clone(), 2);
    workers[1].load.free_blocks = 2;
    let decision = decide(&simple(workers), &request(600), &policy(Mode::Conditional));
    assert_eq!(decision.chosen().unwrap().plan.decode(), 2);
    let waiting = decision
        .candidates
        .iter()
        .find(|one| one.plan == Plan::Local { worker: 1 })
        .unwrap();
    assert!(waiting.terms.admission > 100.0, "{waiting:?}");
}

/// Two racks: p0 and d0 in the first, p1 in the second.
fn racks(breaker: BreakerState) -> Fleet {
    let set = cpu_set();
    let digest = set.digest();
    let place_in = |mut worker: WorkerEntry, host: &str, rack: &str| {
        worker.domain = vec![Some(host.into()), Some(rack.into())];
        worker
    };
    let p0 = place_in(entry("p0", "prefill", 0), "h0", "r0");
    let p1 = place_in(entry("p1", "prefill", 1), "h9", "r1");
    let d0 = busy(place_in(entry("d0", "decode", 2), "h1", "r0"), 3);
    let mut builder = FleetBuilder::new(1, &levels(), set.into(), &digest);
    builder
        .compatible("one", "one")
        .breaker(&p0.domain, &d0.domain, "tcp", breaker);
    for level in 0..=2 {
        builder.level_link(level, "tcp", 0);
    }
    builder.worker(p0).worker(p1).worker(d0);
    builder.build().unwrap()
}

#[test]
fn farther_pairs_are_refused_or_second_choice_or_equal() {
    let mut rule = policy(Mode::Disaggregated);
    rule.topology.farthest_level = Some("rack".into());
    for (enforcement, shut, expected) in [
        (Enforcement::Required, false, Some(0)),
        (Enforcement::Required, true, None),
        (Enforcement::Preferred, false, Some(0)),
        (Enforcement::Preferred, true, Some(1)),
        (Enforcement::Ignored, true, Some(1)),
    ] {
        rule.topology.enforcement = enforcement;
        let fleet = racks(if shut {
            BreakerState::Open
        } else {
            BreakerState::Closed
        });
        let decision = decide(&fleet, &request(600), &rule);
        let prefill = match decision.chosen().unwrap().plan {
            Plan::Remote { prefill, .. } => Some(prefill),
            Plan::Local { .. } => None,
        };
        assert_eq!(prefill, expected, "{enforcement:?} {shut}");
        if shut {
            assert_eq!(decision.filtered[&Filter::BreakerOpen], 1);
        }
    }
    assert!(
        decide(&racks(BreakerState::HalfOpen), &request(600), &rule)
            .chosen()
            .unwrap()
            .plan
            .is_remote()
    );
    assert_eq!(
        racks(BreakerState::Closed).level_name(racks(BreakerState::Closed).level(0, 2)),
        "rack"
    );
}

#[test]
fn a_limit_that_nobody_knows_does_not_lift_itself() {
    let mut rule = policy(Mode::Disaggregated);
    rule.topology.farthest_level = Some("rakc".into());
    rule.topology.enforcement = Enforcement::Required;
    let decision = decide(&racks(BreakerState::Closed), &request(600), &rule);
    assert_eq!(decision.reason, Reason::NoPrefillWorker);
    assert_eq!(decision.filtered[&Filter::TooFar], 2);
}

#[test]
fn a_penalty_moves_the_choice_to_the_nearer_pair() {
    let mut rule = policy(Mode::Disaggregated);
    let fleet = racks(BreakerState::Closed);
    rule.cost
        .level_penalty_milliseconds
        .insert("rack".into(), 500.0);
    let decision = decide(&fleet, &request(600), &rule);
    assert_eq!(
        decision.chosen().unwrap().plan,
        Plan::Remote {
            prefill: 1,
            decode: 2
        }
    );
    rule.cost
        .level_penalty_milliseconds
        .insert("beyond".into(), 900.0);
    let decision = decide(&fleet, &request(600), &rule);
    assert_eq!(
        decision.chosen().unwrap().plan,
        Plan::Remote {
            prefill: 0,
            decode: 2
        }
    );
    assert_eq!(decision.chosen().unwrap().terms.penalty, 500.0);
}

#[test]
fn a_prefix_hit_draws_the_request_and_an_old_index_does_not() {
    let mut workers = trio();
    let mut hit = request(600);
    hit.hits.set(2, 30);
    let decision = decide(&simple(workers.clone()), &hit, &policy(Mode::Conditional));
    let chosen = decision.chosen().unwrap();
    assert_eq!(
        (chosen.plan.decode(), chosen.inputs.compute.cached_tokens),
        (2, 480)
    );
    workers[2].indexed_at = -60_000.0;
    let decision = decide(&simple(workers), &hit, &policy(Mode::Conditional));
    assert_eq!(decision.chosen().unwrap().plan.decode(), 1);
    assert_eq!(decision.index_age, 60_000.0);
}

#[test]
fn the_first_token_does_not_wait_for_the_transfer_when_prefill_samples_it() {
    let fleet = simple(trio());
    let mut rule = policy(Mode::Disaggregated);
    let early = decide(&fleet, &request(600), &rule);
    rule.first_token = FirstToken::Decode;
    let late = decide(&fleet, &request(600), &rule);
    let (early, late) = (early.chosen().unwrap(), late.chosen().unwrap());
    let moved = early.terms.transfer + early.terms.synchronization + early.terms.first_step;
    assert!(moved > 10.0);
    assert!((late.mean - early.mean - moved).abs() < 1e-9);
    assert_eq!(early.terms.transfer, late.terms.transfer);
}

#[test]
fn own_dispatches_count_before_any_report_does() {
    let mut workers = trio();
    workers[1].own.queued_tokens = 600;
    workers[1].own.queued_sequences = 1;
    workers[1].own.sequences = 1;
    let decision = decide(&simple(workers), &request(600), &policy(Mode::Conditional));
    assert_eq!(decision.chosen().unwrap().plan, Plan::Local { worker: 2 });
}

#[test]
fn many_routers_spread_over_the_pool_and_still_see_the_longest_prefix() {
    let workers: Vec<WorkerEntry> = (0..20)
        .map(|index| entry(&format!("d{index}"), "decode", index))
        .collect();
    let crowd = crate::fleets::build(
        &cpu_set(),
        &workers,
        &[("one".into(), "one".into())],
        &[(0, "tcp", 0)],
        &[],
        &[],
        4,
    );
    let rule = Policy::new("chat", "m", &[], &["decode"]);
    let mut rng = Rng::new(5);
    let mut used = std::collections::BTreeSet::new();
    for _ in 0..200 {
        let decision = place(&crowd, &request(600), &rule, 0.0, &mut rng);
        assert_eq!(decision.candidates.len(), 3);
        assert_eq!(decision.filtered[&Filter::NotSampled], 17);
        used.insert(decision.chosen().unwrap().plan.decode());
        let mut hit = request(600);
        hit.hits.set(13, 30);
        let decision = place(&crowd, &hit, &rule, 0.0, &mut rng);
        assert_eq!(decision.chosen().unwrap().plan.decode(), 13);
    }
    assert!(used.len() > 15, "{used:?}");
}

#[test]
fn temperature_shares_among_equals_and_leaves_the_worse_alone() {
    let mut workers: Vec<WorkerEntry> = (0..4)
        .map(|index| entry(&format!("d{index}"), "decode", index))
        .collect();
    workers.push(entry("p0", "prefill", 9));
    workers[3] = busy(workers[3].clone(), 20);
    let fleet = simple(workers);
    let mut rule = policy(Mode::Conditional);
    rule.cost.temperature_percent = 2.0;
    let mut rng = Rng::new(3);
    let mut counts = [0u32; 5];
    for _ in 0..600 {
        let decision = place(&fleet, &request(600), &rule, 0.0, &mut rng);
        assert_eq!(decision.reason, Reason::SharedByChance);
        counts[decision.chosen().unwrap().plan.decode()] += 1;
    }
    assert!(counts[..3].iter().all(|&count| count > 140), "{counts:?}");
    assert!(counts[3] < 10, "{counts:?}");
}

#[test]
fn a_prefill_pool_and_a_decode_pool_of_one_name_are_two_pools() {
    let of = |id, role, slot| WorkerEntry {
        pool_role: Some(role),
        ..entry(id, "chat", slot)
    };
    let fleet = simple(vec![of("p0", Role::Prefill, 0), of("d0", Role::Decode, 1)]);
    // The other one of that name may serve another model.
    let only_decode = Policy::new("chat", "m", &[], &["chat"]);
    let decision = decide(&fleet, &request(600), &only_decode);
    assert_eq!(decision.outcome, Outcome::Run(Plan::Local { worker: 1 }));
    assert_eq!(decision.candidates.len(), 1);
    let mut both = Policy::new("chat", "m", &["chat"], &["chat"]);
    both.mode = Mode::Disaggregated;
    let decision = decide(&fleet, &request(600), &both);
    let (prefill, decode) = (0, 1);
    assert_eq!(
        decision.outcome,
        Outcome::Run(Plan::Remote { prefill, decode })
    );
    both.pooling = Pooling::Strict;
    both.mode = Mode::Aggregated;
    let decision = decide(&fleet, &request(600), &both);
    assert_eq!(decision.outcome, Outcome::Run(Plan::Local { worker: 1 }));
}

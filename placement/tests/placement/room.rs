//! Room for a request: what is refused for good, what for now, what is waited for, and who answers one token.

use baton_placement::fleet::{WorkerEntry, WorkerState};
use baton_placement::place::{Decision, Filter, Outcome, Plan, Reason, Request, place};
use baton_placement::policy::{Mode, Policy, Pooling};
use baton_placement::rng::Rng;

use crate::fleets::{entry, simple};

fn request(tokens: u32) -> Request {
    Request {
        tokens,
        max_output_tokens: 64,
        expected_output_tokens: 64.0,
        ..Request::default()
    }
}

fn policy() -> Policy {
    let mut policy = Policy::new("chat", "m", &["prefill"], &["decode"]);
    policy.pooling = Pooling::Strict;
    policy
}

/// Workers that do one half only, as servers of SGLang that hand KV over.
fn halves() -> Vec<WorkerEntry> {
    let prefill = |id, slot| WorkerEntry {
        can_decode: false,
        ..entry(id, "prefill", slot)
    };
    let decode = WorkerEntry {
        can_prefill: false,
        ..entry("d0", "decode", 2)
    };
    vec![prefill("p0", 0), prefill("p1", 1), decode]
}

fn decide(workers: &[WorkerEntry], request: &Request) -> Decision {
    decide_by(workers, request, &policy())
}

fn decide_by(workers: &[WorkerEntry], request: &Request, policy: &Policy) -> Decision {
    place(
        &simple(workers.to_vec()),
        request,
        policy,
        0.0,
        &mut Rng::new(1),
    )
}

#[test]
fn full_now_is_not_too_large_for_ever() {
    let mut workers = halves();
    for worker in &mut workers[..2] {
        worker.load.free_blocks = 10;
    }
    let full = decide(&workers, &request(600));
    assert_eq!(full.reason, Reason::KvFull, "{}", full.explanation);
    assert_eq!(full.filtered[&Filter::KvFull], 2);
    workers[1].load.free_blocks = 1_000;
    assert_eq!(decide(&workers, &request(600)).reason, Reason::OnlyRemote);
    let large = decide(&workers, &request(40_000));
    assert_eq!(large.reason, Reason::KvCapacity);
    assert_eq!(large.filtered[&Filter::KvCapacity], 3);
}

#[test]
fn a_request_that_a_worker_could_hold_that_is_away_is_not_refused_for_good() {
    let large = WorkerEntry {
        total_blocks: 4_000,
        ..entry("d0", "decode", 0)
    };
    let small = entry("d1", "decode", 1);
    for (state, excluded) in [
        (WorkerState::Lost, false),
        (WorkerState::Draining, false),
        (WorkerState::Ready, true),
    ] {
        let mut large = large.clone();
        large.state = state;
        let mut asked = request(40_000);
        asked.exclude = excluded.then(|| large.id.clone()).into_iter().collect();
        let decision = decide(&[large, small.clone()], &asked);
        assert_eq!(decision.reason, Reason::NoEligibleWorker, "{state:?}");
    }
    // A worker that is gone and could not hold it either changes nothing.
    let lost = WorkerEntry {
        state: WorkerState::Lost,
        ..entry("d0", "decode", 0)
    };
    let decision = decide(&[lost, small], &request(40_000));
    assert_eq!(decision.reason, Reason::KvCapacity);
}

#[test]
fn a_maximum_beyond_all_kv_is_no_reason_to_refuse_or_to_wait() {
    let workers = vec![WorkerEntry {
        load: baton_placement::fleet::ReportedLoad {
            running_sequences: 4,
            context_tokens: 8_000,
            free_blocks: 400,
            ..Default::default()
        },
        ..entry("d0", "decode", 0)
    }];
    let mut chat = request(600);
    chat.max_output_tokens = 130_000;
    let decision = decide(&workers, &chat);
    let chosen = decision.chosen().expect("the engine ends it where it must");
    assert_eq!(chosen.terms.admission, 0.0, "64 tokens are expected");
    // 600 + 64 tokens in blocks of 16.
    assert_eq!(chosen.inputs.decode.needed_blocks, 42);
}

#[test]
fn one_token_goes_to_a_pair_where_nobody_does_both_halves() {
    let mut one = request(600);
    one.max_output_tokens = 1;
    let decision = decide(&halves(), &one);
    assert_eq!(decision.reason, Reason::OnlyRemote);
    let remote = Plan::Remote {
        prefill: 0,
        decode: 2,
    };
    assert_eq!(decision.outcome, Outcome::Run(remote));
    let whole = vec![entry("p0", "prefill", 0), entry("d0", "decode", 1)];
    assert_eq!(decide(&whole, &one).reason, Reason::OneToken);
}

#[test]
fn kv_that_would_be_fetched_after_its_lease_is_not_computed_for_another() {
    let mut disaggregated = policy();
    disaggregated.mode = Mode::Disaggregated;
    let mut workers = vec![
        entry("p0", "prefill", 0),
        entry("d0", "decode", 1),
        entry("d1", "decode", 2),
    ];
    workers[0].lease = Some(5_000.0);
    let busy = &mut workers[1];
    busy.load.running_sequences = 2;
    busy.load.context_tokens = 2_000;
    busy.max_sequences = 2;
    let mut long = request(600);
    long.max_output_tokens = 1_000;
    long.expected_output_tokens = 1_000.0;
    // d0 is expected to have a place after half of a run of 1000 tokens at 30 ms.
    let decision = decide_by(&workers, &long, &disaggregated);
    assert_eq!(decision.filtered.get(&Filter::LeaseTooShort), Some(&1));
    assert_eq!(decision.chosen().unwrap().plan.decode(), 2);
    // A lease that its reader renews is asked nothing of.
    workers[0].lease = None;
    let decision = decide_by(&workers, &long, &disaggregated);
    assert_eq!(decision.filtered.get(&Filter::LeaseTooShort), None);
    // With a place soon enough the pair is there again.
    workers[0].lease = Some(60_000.0);
    let decision = decide_by(&workers, &long, &disaggregated);
    assert_eq!(decision.filtered.get(&Filter::LeaseTooShort), None);
}

#[test]
fn numbers_that_no_worker_has_do_not_end_the_router() {
    let mut workers = halves();
    for worker in &mut workers {
        worker.bytes_per_token = u64::MAX;
        worker.load.queued_sequences = u32::MAX - 1;
        worker.own.queued_sequences = 7;
        worker.load.running_sequences = u32::MAX;
        worker.own.sequences = 7;
        worker.load.context_tokens = u64::MAX;
        worker.own.context_tokens = 7;
    }
    assert_eq!(decide(&workers, &request(600)).reason, Reason::QueueFull);
    for worker in &mut workers {
        worker.load.queued_sequences = 0;
        worker.own.queued_sequences = 0;
    }
    assert_eq!(decide(&workers, &request(600)).reason, Reason::OnlyRemote);
}

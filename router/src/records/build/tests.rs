//! Records of decisions made on a fleet of cards, read back and replayed.

use std::sync::Arc;
use std::time::Duration;

use baton_placement::coefficients::CoefficientSet;
use baton_placement::estimate::Path;
use baton_placement::index::PrefixHits;
use baton_placement::place::{Outcome, Request, place};
use baton_placement::policy::Mode;
use baton_placement::record::{PolicyName, RunStatus};
use baton_placement::replay::{differences, replay};
use baton_placement::rng::Rng;
use baton_protocol::card::{Card, Role, TopologyDomain};
use baton_protocol::ids::Incarnation;
use baton_protocol::lifecycle::{Plan, State};
use baton_protocol::wire;

use super::*;
use crate::dispatch::progress::{Party, StateDetail};
use crate::fleet::pairs::compatibility_key;
use crate::fleet::samples;
use crate::fleet::snapshot::{self, Learnt};
use crate::fleet::state::Tracked;
use crate::learning::Learning;

const NOW: Moment = Moment(1_764_438_300_000_000);

fn on_host(mut card: Card, host: &str) -> Card {
    card.topology = vec![TopologyDomain {
        level: "host".into(),
        domain: host.into(),
    }];
    card
}

fn fleet() -> Fleet {
    let cards = [
        on_host(samples::prefill_card("p0"), "h1"),
        on_host(samples::prefill_card("p1"), "h2"),
        on_host(samples::card("d0"), "h1"),
        on_host(samples::card("d1"), "h2"),
    ];
    let mut tracked: Vec<Tracked> = Vec::new();
    for (slot, card) in (0..).zip(&cards) {
        let mut worker = Tracked::new(card.worker.clone(), slot);
        worker.connected(NOW);
        worker.class = compatibility_key(card);
        worker.card = Some(Arc::new(card.clone()));
        worker.listed(Vec::new(), false);
        worker.load = Some(wire::Load {
            running_sequences: if card.pool_role == Role::Decode { 3 } else { 0 },
            context_tokens: 300,
            ..wire::Load::default()
        });
        worker.load_at = NOW;
        worker.indexed_at = NOW;
        tracked.push(worker);
    }
    snapshot::tests::fleet(&tracked, &Learnt::default(), &[], &[])
}

/// What a run leaves behind that was placed twice.
pub(crate) fn material(mode: Mode, tokens: u32) -> Material {
    let policy = Policy {
        mode,
        ..Policy::new("chat", "m", &["p"], &["d"])
    };
    let fleet = Arc::new(fleet());
    let mut hits = PrefixHits::default();
    hits.set(2, 4);
    let request = Request {
        tokens,
        max_output_tokens: 32,
        expected_output_tokens: 20.5,
        hits,
        ..Request::default()
    };
    let mut rng = Rng::new(7);
    let now = NOW.milliseconds() + 0.25;
    let decision = place(&fleet, &request, &policy, now, &mut rng);
    assert!(matches!(decision.outcome, Outcome::Run(_)), "{decision:?}");
    // The worker that decoded is lost after three tokens.
    let again = Request {
        tokens: tokens + 3,
        max_output_tokens: 29,
        exclude: vec!["d0".into()],
        ..request
    };
    let later = place(&fleet, &again, &policy, now + 40.0, &mut rng);
    let mut progress = Progress::new(tokens, NOW);
    let party = Party {
        worker: "d0".into(),
        incarnation: Incarnation(1),
        domain: "h1".into(),
        operation: "r0-1/1/decode".into(),
    };
    // It waited for its body and in the line.
    let dispatched = NOW.plus(Duration::from_secs(20));
    progress.begin(Plan::Local, dispatched, StateDetail::of(&party));
    progress.observe(State::PrefillStarted, NOW, StateDetail::of(&party));
    progress.observe(State::PrefillCompleted, NOW, StateDetail::of(&party));
    let token = wire::Token {
        id: 4_242_424,
        position: tokens,
        logprobs: None,
        finish: None,
    };
    let first = dispatched.plus(Duration::from_millis(5));
    progress.take_token(&token, &party, first).unwrap();
    progress.observe(State::Completed, NOW, StateDetail::of(&party));
    let outcome = RunOutcome {
        status: RunStatus::Completed,
        ttft_milliseconds: progress.ttft_milliseconds(),
        tpot_milliseconds: None,
        input_tokens: tokens,
        cached_tokens: 0,
        output_tokens: 1,
        finish_reason: Some("length".into()),
    };
    Material {
        head: RecordHead {
            credit: None,
            unsplittable: None,
            run: "r0-1".into(),
            request_id: "q".into(),
            time: NOW.rfc3339(),
            policy: PolicyName {
                name: policy.name.clone(),
                generation: policy.generation,
                digest: policy.digest(),
            },
            model: "m".into(),
            prefix_fingerprint: "ab".into(),
        },
        decision,
        fleet: fleet.clone(),
        later: vec![LaterMaterial {
            attempt: 2,
            decision: later,
            fleet,
        }],
        policy: Arc::new(policy),
        progress,
        outcome,
    }
}

fn made(mode: Mode, tokens: u32) -> (DecisionRecord, Arc<CoefficientSet>, Arc<Policy>) {
    let material = material(mode, tokens);
    let (set, policy) = (material.fleet.coefficients.clone(), material.policy.clone());
    (record(material), set, policy)
}

#[test]
fn a_record_that_was_written_and_read_replays_bit_for_bit() {
    for mode in [Mode::Conditional, Mode::Aggregated, Mode::Disaggregated] {
        for tokens in [3, 90, 700] {
            let (record, coefficients, policy) = made(mode, tokens);
            let line = serde_json::to_string(&record).unwrap();
            let read: DecisionRecord = serde_json::from_str(&line).unwrap();
            let set = serde_json::to_string(coefficients.as_ref()).unwrap();
            let set: CoefficientSet = serde_json::from_str(&set).unwrap();
            let again = replay(&read, &set, &policy).unwrap();
            assert_eq!(differences(&read, &again), [], "{mode:?} {tokens}");
            let later: Vec<DecisionRecord> = read.later_records().collect();
            assert_eq!(later.len(), 1);
            assert_eq!(later[0].input.tokens, tokens + 3);
            let again = replay(&later[0], &set, &policy).unwrap();
            assert_eq!(differences(&later[0], &again), [], "{mode:?} {tokens}");
            // They are told apart: the other one's decision is not taken for this one's.
            assert_ne!(differences(&read, &again), [], "{mode:?} {tokens}");
        }
    }
}

#[test]
fn estimates_are_compared_with_what_came_after_the_dispatch() {
    let (record, ..) = made(Mode::Aggregated, 90);
    let outcome = record.outcome.as_ref().unwrap();
    assert_eq!(outcome.ttft_milliseconds, Some(20_005.0));
    let actual = record.actual.as_ref().unwrap();
    assert_eq!(actual.first_token_milliseconds, Some(5.0));
    let learning = Learning::default();
    let errors = learning.record(&record);
    let of_first = errors.iter().find(|error| error.term == "timeToFirstToken");
    let expected = 5.0 / record.chosen().unwrap().mean;
    assert_eq!(of_first.unwrap().ratio, expected);
    // It was within its bound, however long the client took to send its body.
    assert_eq!(learning.coverage(Path::Local), Some(1.0));
}

#[test]
fn a_record_says_what_happened_and_holds_no_token() {
    let (record, ..) = made(Mode::Aggregated, 90);
    let states: Vec<&str> = record
        .states
        .iter()
        .map(|entry| entry.state.as_str())
        .collect();
    assert_eq!(
        states,
        [
            "accepted",
            "route_selected",
            "prefill_started",
            "prefill_completed",
            "streaming",
            "completed"
        ]
    );
    assert_eq!(record.states[0].at, "2025-11-29T17:45:00.000000Z");
    assert_eq!(record.states[1].at, "2025-11-29T17:45:20.000000Z");
    assert_eq!(record.actual.as_ref().unwrap().retries, 0);
    let line = serde_json::to_string(&record).unwrap();
    assert!(!line.contains("4242424"), "{line}");
}

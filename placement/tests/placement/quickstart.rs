//! The three decisions that the quickstart shows, on the constants of a small model on two cores.

use baton_placement::fleet::{Fleet, WorkerEntry};
use baton_placement::place::{Decision, Reason, Request, place};
use baton_placement::policy::{Policy, Pooling};
use baton_placement::rng::Rng;

use crate::fleets::{entry, simple};

fn policy() -> Policy {
    let mut policy = Policy::new(
        "quickstart",
        "smollm2-135m-instruct",
        &["prefill"],
        &["decode"],
    );
    policy.pooling = Pooling::Strict;
    policy.objective.ttft_milliseconds = Some(2_000.0);
    policy.objective.tpot_milliseconds = Some(150.0);
    policy
}

fn fleet(running: [u32; 2]) -> Fleet {
    let decode = |index: usize| {
        let mut worker: WorkerEntry = entry(&format!("decode-{index}"), "decode", index as u32 + 1);
        worker.load.running_sequences = running[index];
        worker.load.context_tokens = 300 * u64::from(running[index]);
        worker
    };
    simple(vec![entry("prefill-0", "prefill", 0), decode(0), decode(1)])
}

fn decide(tokens: u32, running: [u32; 2]) -> (Decision, String) {
    decide_for(tokens, running, 64)
}

fn decide_for(tokens: u32, running: [u32; 2], output: u32) -> (Decision, String) {
    let request = Request {
        tokens,
        max_output_tokens: output,
        expected_output_tokens: f64::from(output),
        ..Request::default()
    };
    let fleet = fleet(running);
    let decision = place(&fleet, &request, &policy(), 0.0, &mut Rng::new(1));
    let chosen = decision.chosen().unwrap().plan.decode();
    let name = fleet.workers.id[chosen].to_string();
    (decision, name)
}

#[test]
fn a_short_prompt_on_idle_workers_stays_local() {
    let (decision, _) = decide(20, [0, 0]);
    assert!(!decision.chosen().unwrap().plan.is_remote());
    assert_eq!(decision.reason, Reason::LocalCheaper);
}

#[test]
fn a_long_prompt_on_idle_workers_stays_local() {
    let (decision, _) = decide(600, [0, 0]);
    assert!(!decision.chosen().unwrap().plan.is_remote());
    assert_eq!(decision.reason, Reason::LocalCheaper);
}

#[test]
fn a_long_prompt_goes_remote_when_every_decode_worker_generates() {
    for output in [16, 64, 256] {
        let (decision, _) = decide_for(600, [1, 1], output);
        assert!(
            decision.chosen().unwrap().plan.is_remote(),
            "{output}: {}",
            decision.explanation
        );
        assert_eq!(decision.reason, Reason::RemoteCheaper);
        assert!(
            decision.explanation.contains("interference"),
            "{}",
            decision.explanation
        );
    }
}

#[test]
fn a_long_prompt_stays_local_while_one_decode_worker_is_idle() {
    let (decision, name) = decide(600, [1, 0]);
    assert!(
        !decision.chosen().unwrap().plan.is_remote(),
        "{}",
        decision.explanation
    );
    assert_eq!(name, "decode-1");
}

#[test]
fn a_short_prompt_stays_local_even_when_all_generate() {
    let (decision, _) = decide(20, [1, 1]);
    assert!(
        !decision.chosen().unwrap().plan.is_remote(),
        "{}",
        decision.explanation
    );
}

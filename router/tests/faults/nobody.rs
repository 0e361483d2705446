//! Nobody is left who could take a run: at its start, after a refusal of everybody, after its worker was lost with tokens sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use baton_placement::policy::{NoPrefillAction, Policy};
use baton_placement::record::RunStatus;
use baton_protocol::lifecycle::State;
use baton_protocol::wire::{self, decode_event::Event, prefill_event, watch_event};
use baton_router::openai::error::ApiError;
use baton_router::run::{Mode, RunEvent, RunHandle};
use tokio::time::{Instant, sleep, timeout};

use crate::double::{ARTIFACT, Calls, Double, OpenDecode, Seen};
use crate::obedient::token;
use crate::router::{PROMPT, Router, SOON, outcome, until};
use crate::steady::steady;
use crate::{begin, policy, samples, with_incarnation};

/// What a client is told that may come again.
fn told(last: RunEvent, code: &str) -> String {
    let RunEvent::Failed(failure) = last else {
        panic!("nobody is there: {last:?}");
    };
    assert!(failure.retry_after_seconds.is_some());
    let error = ApiError::from(failure);
    assert_eq!((error.status, error.code.as_deref()), (503, Some(code)));
    assert!(error.retry_after_seconds.is_some());
    let next_step = ": send the request again";
    assert!(error.message.ends_with(next_step), "{}", error.message);
    error.message
}

async fn decoding(names: &[&str]) -> Vec<Double> {
    let mut workers = Vec::new();
    for (incarnation, name) in (1..).zip(names) {
        let card = with_incarnation(samples::card(name), incarnation);
        workers.push(Double::start(card, ARTIFACT).await);
    }
    workers
}

async fn serving(policy: &Policy, workers: &[Double]) -> Router {
    let router = Router::start(policy, &workers.iter().collect::<Vec<_>>());
    router.ready(workers.len()).await;
    router
}

/// As soon as nobody can be placed on.
async fn none_ready(router: &Router) {
    until("nobody is ready", || router.dispatcher.workers_ready() == 0).await;
}

async fn refuse(call: &OpenDecode, reason: &str, milliseconds: u64) {
    let refused = wire::Refused {
        reason: reason.to_owned(),
        message: "not now".to_owned(),
        retry_after_milliseconds: milliseconds,
    };
    call.answers.send(Event::Refused(refused)).await;
}

/// From now on whoever is asked refuses, and has room after so long: the first that is asked after the first time, all from the last
/// one on after that. Counts how often.
fn all_refuse<const TIMES: usize>(mut calls: Calls, milliseconds: [u64; TIMES]) -> Arc<AtomicU32> {
    let asked = Arc::new(AtomicU32::new(0));
    let counted = asked.clone();
    tokio::spawn(async move {
        while let Some(call) = calls.decodes.recv().await {
            let before = counted.fetch_add(1, Ordering::Relaxed) as usize;
            let room_in = milliseconds[before.min(TIMES - 1)];
            refuse(&call, "pool-full", room_in).await;
        }
    });
    asked
}

/// Whoever is asked next.
async fn next_call(calls: &mut Calls) -> OpenDecode {
    let call = timeout(SOON, calls.decodes.recv()).await;
    call.expect("somebody is asked").unwrap()
}

/// A run that has its first token from the worker that is asked first.
async fn begun(router: &Router, calls: &mut Calls) -> (RunHandle, OpenDecode) {
    let mut run = router.start_run(Mode::Aggregated, 6);
    let mut call = next_call(calls).await;
    begin(&mut call.requests, &call.answers).await;
    call.answers.send(Event::Token(token(PROMPT))).await;
    let first = token(PROMPT).id;
    let read = run.next().await;
    assert!(matches!(read, Some(RunEvent::Token { id, .. }) if id == first));
    (run, call)
}

#[tokio::test]
async fn a_run_that_nobody_can_take_at_its_start_is_told_why() {
    let mut policy = policy();
    policy.timeouts.reserve_seconds = 0.5;
    for why in ["has registered", "all 2 workers", "Draining 2"] {
        let workers = decoding(&["d1", "d2"]).await;
        let router = if why == "has registered" {
            Router::start(&policy, &[])
        } else {
            serving(&policy, &workers).await
        };
        for worker in &workers {
            match why {
                "all 2 workers" => worker.vanish(),
                "Draining 2" => {
                    let load = wire::Load {
                        load_sequence: 2,
                        draining: true,
                        ..wire::Load::default()
                    };
                    worker.tell(0, watch_event::Event::Load(load));
                }
                _ => {}
            }
        }
        none_ready(&router).await;
        let began = Instant::now();
        let handle = router.start_run(Mode::Disaggregated, 6);
        let run = handle.run.to_string();
        let (tokens, last) = outcome(handle).await;
        assert!(tokens.is_empty());
        let message = told(last, "no_worker");
        assert!(message.contains(why), "{message}");
        let waited = began.elapsed();
        assert!(waited > Duration::from_millis(200), "{why}: {waited:?}");
        let record = router.record(&run).await;
        assert_eq!(record.outcome.unwrap().status, RunStatus::Rejected);
        let last = record.states.last().unwrap();
        assert_eq!((last.state.as_str(), last.attempt), ("failed", 0), "{why}");
        router.holds_nothing().await;
    }
}

#[tokio::test]
async fn workers_that_all_refuse_are_asked_again_and_again_until_the_deadline() {
    let mut policy = policy();
    // They are asked after some 1.6 seconds, and would be again after 2.6 at the soonest: no wait is shorter than it is to be.
    policy.timeouts.total_seconds = 2.5;
    for mode in [Mode::Aggregated, Mode::Disaggregated] {
        // So long the last answers have until the deadline.
        steady(Duration::from_millis(900), async || {
            let mut workers = decoding(&["d"]).await;
            let card = with_incarnation(samples::prefill_card("p"), 2);
            workers.push(Double::start(card, ARTIFACT).await);
            let router = serving(&policy, &workers).await;
            let asked = all_refuse(Double::direct_all(&workers), [0]);
            let began = Instant::now();
            let handle = router.start_run(mode, 6);
            let run = handle.run.to_string();
            let (tokens, last) = outcome(handle).await;
            assert!(tokens.is_empty());
            told(last, "no_worker");
            let waited = began.elapsed();
            assert!(waited > Duration::from_secs(1), "{mode}: {waited:?}");
            let asked = asked.load(Ordering::Relaxed);
            assert!(asked > 8, "{mode}: asked {asked} times");
            let record = router.record(&run).await;
            assert_eq!(record.outcome.unwrap().status, RunStatus::Failed);
            assert_eq!(record.states.last().unwrap().attempt, asked, "{mode}");
            router.holds_nothing().await;
        })
        .await;
    }
}

#[tokio::test]
async fn a_client_whom_all_refuse_is_told_when_the_first_of_them_has_room() {
    let mut policy = policy();
    // Shorter than the wait before they are asked again, and longer than they take to refuse.
    policy.timeouts.reserve_seconds = 0.9;
    steady(Duration::from_millis(900), async || {
        let workers = decoding(&["d1", "d2", "d3"]).await;
        let router = serving(&policy, &workers).await;
        let asked = all_refuse(Double::direct_all(&workers), [3_000, 9_000, 7_000]);
        let (tokens, last) = outcome(router.start_run(Mode::Aggregated, 6)).await;
        assert!(tokens.is_empty());
        let RunEvent::Failed(failure) = &last else {
            panic!("nobody takes it: {last:?}");
        };
        assert_eq!(failure.retry_after_seconds, Some(3));
        told(last, "no_worker");
        assert_eq!(asked.load(Ordering::Relaxed), 3, "each once");
        router.holds_nothing().await;
    })
    .await;
}

#[tokio::test]
async fn a_client_that_is_refused_for_good_after_a_worker_has_refused_is_told_when_that_has_room() {
    let mut policy = policy();
    policy.timeouts.reserve_seconds = 0.9;
    policy.on_no_prefill.action = NoPrefillAction::Reject;
    // Its worker has so long to reserve.
    steady(Duration::from_millis(900), async || {
        let d = Double::start(samples::card("d"), ARTIFACT).await;
        let card = with_incarnation(samples::prefill_card("p"), 2);
        let p = Double::start(card, ARTIFACT).await;
        let router = Router::start(&policy, &[&d, &p]);
        router.ready(2).await;
        p.prefill(vec![prefill_event::Event::Refused(wire::Refused {
            reason: "pool-full".to_owned(),
            message: "not now".to_owned(),
            retry_after_milliseconds: 4_000,
        })]);
        d.decode(async |_requests, answers| {
            let reserved = Event::Reserved(wire::Admission::default());
            answers.send(reserved).await;
            answers.closed().await;
        });
        let (tokens, last) = outcome(router.start_run(Mode::Disaggregated, 6)).await;
        assert!(tokens.is_empty());
        let RunEvent::Failed(failure) = last else {
            panic!("there is no other prefill worker: {last:?}");
        };
        assert_eq!((failure.status, failure.code), (503, "no_worker"));
        assert_eq!(failure.retry_after_seconds, Some(4));
        router.holds_nothing().await;
    })
    .await;
}

#[tokio::test]
async fn a_run_that_nobody_is_left_to_go_on_with_keeps_what_it_has_sent() {
    let mut policy = policy();
    policy.timeouts.reserve_seconds = 0.5;
    // Its worker has so long to reserve.
    steady(Duration::from_millis(500), async || {
        let workers = decoding(&["d"]).await;
        let router = serving(&policy, &workers).await;
        let (run, call) = begun(&router, &mut Double::direct_all(&workers)).await;
        workers[0].vanish();
        none_ready(&router).await;
        call.answers.fail().await;
        let id = run.run.to_string();
        let (more, last) = outcome(run).await;
        assert!(more.is_empty(), "{more:?}");
        let message = told(last, "no_worker");
        assert!(message.contains("gone"), "{message}");
        let record = router.record(&id).await;
        let outcome = record.outcome.unwrap();
        assert_eq!(
            (outcome.status, outcome.output_tokens),
            (RunStatus::Failed, 1)
        );
        assert_eq!(record.states.last().unwrap().attempt, 1);
        router.holds_nothing().await;
    })
    .await;
}

/// Its worker was lost after the token that completes the answer, and nobody is needed any more.
#[tokio::test]
async fn a_stop_string_that_is_found_while_a_run_waits_for_a_worker_ends_it_well() {
    let mut policy = policy();
    policy.timeouts.reserve_seconds = 10.0;
    let workers = decoding(&["d"]).await;
    let router = serving(&policy, &workers).await;
    let (mut run, call) = begun(&router, &mut Double::direct_all(&workers)).await;
    workers[0].vanish();
    none_ready(&router).await;
    call.answers.fail().await;
    // The attempt is over: the run waits, five seconds at most.
    call.answers.closed().await;
    run.stop_matched();
    let id = run.run.to_string();
    let (more, last) = outcome(run).await;
    assert!(more.is_empty(), "{more:?}");
    let RunEvent::Finished { reason, usage } = last else {
        panic!("the client has the whole answer: {last:?}");
    };
    assert_eq!((reason, usage.output_tokens), (wire::FinishReason::Stop, 1));
    let record = router.record(&id).await;
    let outcome = record.outcome.unwrap();
    assert_eq!(
        (outcome.status, outcome.output_tokens),
        (RunStatus::Completed, 1)
    );
    router.holds_nothing().await;
}

#[tokio::test]
async fn a_run_goes_on_with_its_worker_when_that_is_back_in_time() {
    let workers = decoding(&["d"]).await;
    let router = serving(&policy(), &workers).await;
    let (run, call) = begun(&router, &mut Double::direct_all(&workers)).await;
    workers[0].vanish();
    none_ready(&router).await;
    call.answers.fail().await;
    let id = run.run.to_string();
    workers[0].obey();
    workers[0].come_back();
    let (more, last) = outcome(run).await;
    assert!(matches!(last, RunEvent::Finished { .. }), "{last:?}");
    let rest: Vec<u32> = (PROMPT + 1..PROMPT + 6).map(|at| token(at).id).collect();
    assert_eq!(more, rest, "the first one is not sent again");
    let record = router.record(&id).await;
    assert_eq!(record.states.last().unwrap().attempt, 2);
    router.holds_nothing().await;
}

/// Less than the second after which its run would ask again.
const AT_ONCE: Duration = Duration::from_millis(600);

#[tokio::test]
async fn a_client_that_leaves_between_two_attempts_is_not_waited_out() {
    steady(AT_ONCE, async || {
        let mut workers = decoding(&["d1", "d2"]).await;
        let mut calls = Double::direct_all(&workers);
        let router = serving(&policy(), &workers).await;
        let (run, call) = begun(&router, &mut calls).await;
        // The other one has room in a minute: of that a run waits a second before it asks again.
        let asked = all_refuse(calls, [60_000]);
        call.answers.fail().await;
        let id = run.run.to_string();
        let over = Seen::CancelOperation(format!("{id}/2/decode"));
        workers[1].until(|seen| *seen == over).await;
        sleep(Duration::from_millis(100)).await;
        let left = Instant::now();
        drop(run);
        router.entered(State::Cancelled, 1).await;
        let waited = left.elapsed();
        assert!(waited < AT_ONCE, "{waited:?} after its client");
        let record = router.record(&id).await;
        let outcome = record.outcome.unwrap();
        assert_eq!(
            (outcome.status, outcome.output_tokens),
            (RunStatus::Cancelled, 1)
        );
        router.holds_nothing().await;
        let attempts = record.states.last().unwrap().attempt;
        assert_eq!((asked.load(Ordering::Relaxed), attempts), (1, 2));
    })
    .await;
}

#[tokio::test]
async fn a_search_that_ends_at_a_worker_that_has_changed_says_so() {
    let mut policy = policy();
    policy.timeouts.reserve_seconds = 3.0;
    // So long the search has left after its first wait: the third is asked before its end.
    steady(Duration::from_millis(1_400), async || {
        let workers = decoding(&["d1", "d2", "d3"]).await;
        let router = serving(&policy, &workers).await;
        let mut calls = Double::direct_all(&workers);
        let run = router.start_run(Mode::Aggregated, 6);
        // Each answers in time, and all of them together take longer than a search may.
        for (reason, after) in [
            ("pool-full", 0),
            ("pool-full", 1_600),
            ("identity-mismatch", 1_600),
        ] {
            let call = next_call(&mut calls).await;
            sleep(Duration::from_millis(after)).await;
            refuse(&call, reason, 0).await;
            call.answers.closed().await;
        }
        let (_, last) = outcome(run).await;
        let message = told(last, "incompatible_workers");
        assert!(message.contains("worker d3 refused"), "{message}");
        until("its card is read again", || workers[2].watched() == 2).await;
        router.holds_nothing().await;
    })
    .await;
}

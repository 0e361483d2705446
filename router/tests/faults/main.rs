//! Faults that real workers cannot be made to show: each is played by a scripted worker over real gRPC.

// Whatever fails here fails the test, and helpers are part of it.
#![allow(clippy::unwrap_used)]

mod budgets;
mod changed;
mod double;
mod held_up;
mod last_token;
mod listing;
mod nobody;
mod obedient;
mod restart;
mod router;
mod steady;
mod table;
mod transport;

use std::time::Duration;

use baton_placement::fleet::WorkerState;
use baton_placement::policy::{Overrides, Policy};
use baton_protocol::card::Card;
use baton_protocol::failure::FailureClass;
use baton_protocol::samples;
use baton_protocol::wire::{
    self, decode_event::Event, decode_request::Message, prefill_event, watch_event,
};
use baton_router::run::{Dispatch, Mode, RunEvent};
use tonic::Streaming;

use double::{ARTIFACT, Answers, Double, OpenParameters, Seen};
use obedient::compute;
use router::{PROMPT, Router, outcome, until};
use steady::steady;

fn policy() -> Policy {
    Policy {
        overrides: Overrides::Allowed,
        ..Policy::new("chat", "m", &["p"], &["d"])
    }
}

fn with_incarnation(mut card: Card, incarnation: u64) -> Card {
    card.incarnation = baton_protocol::ids::Incarnation(incarnation);
    card
}

fn token(id: u32, position: u32) -> wire::Token {
    wire::Token {
        id,
        position,
        logprobs: None,
        finish: None,
    }
}

fn finished() -> Event {
    Event::Finished(wire::Finished {
        reason: wire::FinishReason::Length.into(),
        ..wire::Finished::default()
    })
}

async fn start(requests: &mut Streaming<wire::DecodeRequest>) -> wire::DecodeStart {
    match requests.message().await.unwrap().unwrap().message {
        Some(Message::Start(start)) => start,
        other => panic!("start comes first, not {other:?}"),
    }
}

/// Reserves and computes: tokens may follow.
async fn begin(requests: &mut Streaming<wire::DecodeRequest>, answers: &Answers) {
    start(requests).await;
    let reserved = Event::Reserved(wire::Admission::default());
    answers.send(reserved).await;
    compute(answers).await;
}

/// Reserves, computes and sends these tokens, then ends.
fn answer(double: &Double, tokens: Vec<wire::Token>) {
    double.decode(async move |mut requests, answers| {
        begin(&mut requests, &answers).await;
        for token in tokens {
            answers.send(Event::Token(token)).await;
        }
        answers.send(finished()).await;
    });
}

#[tokio::test]
async fn a_token_that_comes_twice_is_sent_once_and_ends_the_run() {
    let d = Double::start(samples::card("d"), ARTIFACT).await;
    let router = Router::start(&policy(), &[&d]);
    router.ready(1).await;
    answer(&d, vec![token(7, PROMPT), token(7, PROMPT)]);
    let (tokens, last) = outcome(router.start_run(Mode::Aggregated, 4)).await;
    assert_eq!(tokens, [7]);
    let RunEvent::Failed(failure) = last else {
        panic!("it cannot end well: {last:?}");
    };
    assert_eq!((failure.class, failure.status), (FailureClass::Bug, 500));
    assert!(
        router
            .metrics
            .text()
            .unwrap()
            .contains("baton_illegal_events_total 1")
    );
}

#[tokio::test]
async fn kv_that_fails_its_check_is_recomputed_in_place_and_no_token_is_repeated() {
    let mut p = Double::start(samples::prefill_card("p"), ARTIFACT).await;
    let d = Double::start(samples::card("d"), ARTIFACT).await;
    let router = Router::start(&policy(), &[&p, &d]);
    router.ready(2).await;
    p.prefill(vec![
        prefill_event::Event::Lease(wire::LeaseOpened {
            descriptor: Some(wire::Descriptor::default()),
            admission: Some(wire::Admission::default()),
        }),
        prefill_event::Event::Started(wire::Started::default()),
        prefill_event::Event::FirstToken(token(7, PROMPT)),
        prefill_event::Event::Sealed(wire::Sealed::default()),
    ]);
    d.decode(async |mut requests, answers| {
        assert!(start(&mut requests).await.handoff);
        let admission = wire::Admission {
            cached_tokens: 16,
            ..wire::Admission::default()
        };
        answers.send(Event::Reserved(admission)).await;
        let mut heard = Vec::new();
        while let Ok(Some(request)) = requests.message().await {
            match request.message.unwrap() {
                Message::Descriptor(_) => heard.push("descriptor"),
                Message::FirstToken(first) => {
                    assert_eq!(first.id, 7);
                    heard.push("first token");
                    let failed = wire::TransferFailed {
                        cause: "checksum-mismatch".to_owned(),
                        ..wire::TransferFailed::default()
                    };
                    answers.send(Event::TransferFailed(failed)).await;
                }
                Message::Recompute(_) => break,
                Message::Start(_) => panic!("one start a stream"),
            }
        }
        assert_eq!(heard, ["descriptor", "first token"]);
        compute(&answers).await;
        answers.send(Event::Token(token(8, PROMPT + 1))).await;
        answers.send(finished()).await;
    });
    let handle = router.start_run(Mode::Disaggregated, 2);
    let run = handle.run.to_string();
    let (tokens, last) = outcome(handle).await;
    assert_eq!(tokens, [7, 8]);
    assert!(matches!(last, RunEvent::Finished { .. }), "{last:?}");
    let Seen::Prefill(request) = p.until(|seen| matches!(seen, Seen::Prefill(_))).await else {
        unreachable!();
    };
    assert_eq!(request.skip_blocks, 1, "what the reader has is not moved");
    assert!(request.sample_first);
    let cancelled = p
        .until(|seen| matches!(seen, Seen::CancelOperation(_)))
        .await;
    assert_eq!(
        cancelled,
        Seen::CancelOperation(format!("{run}/1/prefill")),
        "the run goes on elsewhere: only what is over is cancelled"
    );
    let record = router.record(&run).await;
    assert_eq!(record.fallback.unwrap().cause, "checksum-mismatch");
    assert_eq!(record.states.last().unwrap().attempt, 2);
    let line = "baton_fallbacks_total{cause=\"checksum-mismatch\"} 1";
    assert!(router.metrics.text().unwrap().contains(line));
}

#[tokio::test]
async fn without_budget_a_failed_hand_off_is_planned_anew_and_then_refused() {
    let p = Double::start(samples::prefill_card("p"), ARTIFACT).await;
    let d = Double::start(samples::card("d"), ARTIFACT).await;
    let mut policy = policy();
    policy.fallback.local_recompute.max_concurrent_per_worker = 0;
    policy.fallback.replans = 0;
    let router = Router::start(&policy, &[&p, &d]);
    router.ready(2).await;
    p.prefill(vec![prefill_event::Event::Lease(wire::LeaseOpened {
        descriptor: Some(wire::Descriptor::default()),
        admission: None,
    })]);
    d.decode(async |mut requests, answers| {
        start(&mut requests).await;
        answers
            .send(Event::Reserved(wire::Admission::default()))
            .await;
        let failed = wire::TransferFailed {
            cause: "lease-gone".to_owned(),
            ..wire::TransferFailed::default()
        };
        answers.send(Event::TransferFailed(failed)).await;
        answers.closed().await;
    });
    let (tokens, last) = outcome(router.start_run(Mode::Disaggregated, 2)).await;
    assert!(tokens.is_empty());
    let RunEvent::Failed(failure) = last else {
        panic!("nobody may compute it: {last:?}");
    };
    assert_eq!(failure.status, 503);
    assert!(failure.retry_after_seconds.is_some());
}

#[tokio::test]
async fn a_worker_that_says_nothing_is_given_up_and_another_one_answers() {
    let mut policy = policy();
    policy.timeouts.reserve_seconds = 2.0;
    // The other one has as long.
    steady(Duration::from_secs(2), async || {
        let first = Double::start(samples::card("d0"), ARTIFACT).await;
        let second = Double::start(with_incarnation(samples::card("d1"), 2), ARTIFACT).await;
        let router = Router::start(&policy, &[&first, &second]);
        router.ready(2).await;
        // Equal workers: the first of the list is taken.
        first.decode(async |_requests, answers| answers.closed().await);
        answer(&second, vec![token(5, PROMPT)]);
        let handle = router.start_run(Mode::Aggregated, 1);
        let run = handle.run.to_string();
        let (tokens, _) = outcome(handle).await;
        assert_eq!(tokens, [5]);
        let record = router.record(&run).await;
        assert_eq!(record.actual.unwrap().retries, 1);
    })
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_is_cancelled_at_its_worker() {
    let mut d = Double::start(samples::card("d"), ARTIFACT).await;
    let router = Router::start(&policy(), &[&d]);
    router.ready(1).await;
    d.decode(async |mut requests, answers| {
        begin(&mut requests, &answers).await;
        answers.send(Event::Token(token(1, PROMPT))).await;
        answers.closed().await;
    });
    let mut handle = router.start_run(Mode::Aggregated, 9);
    let run = handle.run.to_string();
    assert!(matches!(
        handle.next().await,
        Some(RunEvent::Token { id: 1, .. })
    ));
    drop(handle);
    let cancelled = d.until(|seen| matches!(seen, Seen::Cancel(_))).await;
    assert_eq!(cancelled, Seen::Cancel(run.clone()));
    let record = router.record(&run).await;
    assert_eq!(record.states.last().unwrap().state, "cancelled");
}

#[tokio::test]
async fn a_hole_in_the_cache_events_is_counted_and_the_next_stream_starts_anew() {
    let mut d = Double::start(samples::card("d"), ARTIFACT).await;
    let router = Router::start(&policy(), &[&d]);
    router.ready(1).await;
    assert_eq!(
        d.until(|seen| matches!(seen, Seen::Watch(_))).await,
        Seen::Watch(None)
    );
    d.tell(1, watch_event::Event::Cleared(wire::CacheCleared {}));
    d.tell(3, watch_event::Event::Cleared(wire::CacheCleared {}));
    let again = d.until(|seen| matches!(seen, Seen::Watch(_))).await;
    assert_eq!(again, Seen::Watch(None), "not resumed");
    assert!(
        router
            .metrics
            .text()
            .unwrap()
            .contains("baton_index_gaps_total 1")
    );
    router.ready(1).await;
}

#[tokio::test]
async fn an_artifact_that_is_not_what_its_digest_says_is_never_used_and_its_worker_stays() {
    let mut d = Double::start(samples::card("d"), b"altered").await;
    let router = Router::start(&policy(), &[&d]);
    // It is asked for again, but the stream that brought the card stays open.
    let mut watches = 0;
    let mut fetches = 0;
    while fetches < 2 {
        match d.until(|_| true).await {
            Seen::Watch(_) => watches += 1,
            Seen::Artifact => fetches += 1,
            other => panic!("nobody has asked for anything: {other:?}"),
        }
    }
    assert_eq!(watches, 1);
    until("the tokenizer is what is missing", || {
        let missing = router.dispatcher.ready().unwrap_err();
        missing.contains("tokenizer")
    })
    .await;
    until("the fleet says why", || {
        let listed = baton_router::fleet::listing::workers(&router.workers);
        let notices = listed[0].notices.join(" ");
        notices.contains("it is not used") && listed[0].state == WorkerState::Ready
    })
    .await;
}

#[tokio::test]
async fn a_worker_whose_tokenizer_cannot_be_had_does_not_keep_the_others_from_serving() {
    let broken = Double::registered(samples::card("d0"), b"[]", b"altered").await;
    let also =
        Double::registered(with_incarnation(samples::card("d1"), 2), b"[]", b"altered").await;
    let good = Double::start(with_incarnation(samples::card("d2"), 3), ARTIFACT).await;
    let router = Router::start(&policy(), &[&broken, &also, &good]);
    // Most workers promise the text that nobody can serve.
    router.ready(3).await;
    answer(&good, vec![token(5, PROMPT)]);
    let (tokens, _) = outcome(router.start_run(Mode::Aggregated, 1)).await;
    assert_eq!(tokens, [5]);
}

#[tokio::test]
async fn tokens_never_go_to_a_worker_for_which_they_mean_another_text() {
    let other = Double::registered(samples::card("d0"), b"[]", b"[]").await;
    let second = Double::start(with_incarnation(samples::card("d1"), 2), ARTIFACT).await;
    let third = Double::start(with_incarnation(samples::card("d2"), 3), ARTIFACT).await;
    let router = Router::start(&policy(), &[&other, &second, &third]);
    router.ready(3).await;
    answer(&second, vec![token(5, PROMPT)]);
    let handle = router.start_run(Mode::Aggregated, 1);
    let run = handle.run.to_string();
    let (tokens, _) = outcome(handle).await;
    assert_eq!(tokens, [5]);
    let record = router.record(&run).await;
    let decodes: Vec<&str> = record
        .candidates
        .iter()
        .map(|candidate| candidate.decode.as_str())
        .collect();
    assert_eq!(decodes, ["d1", "d2"]);
}

/// Its stream says it, and whoever asks would wait for a prompt that no engine over HTTP has been sent.
#[tokio::test]
async fn a_worker_of_batons_own_engine_is_not_asked_how_a_prompt_is_read() {
    let p = Double::start(samples::prefill_card("p"), ARTIFACT).await;
    let d = Double::start(samples::card("d"), ARTIFACT).await;
    let mut asked = p.is_asked();
    let router = Router::start(&policy(), &[&p, &d]);
    router.ready(2).await;
    p.obey();
    d.obey();
    let (_, last) = outcome(router.start_run(Mode::Disaggregated, 2)).await;
    assert!(matches!(last, RunEvent::Finished { .. }), "{last:?}");
    if let Ok(OpenParameters { operation, told }) = asked.try_recv() {
        drop(told);
        panic!("asked for {operation}");
    }
}

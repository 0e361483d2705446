//! A token that ends the run: nobody goes on from it, whatever becomes of the workers. A stop string that is found in the text. And a
//! client that reads more slowly than its run may last.

use std::time::Duration;

use baton_placement::record::RunStatus;
use baton_protocol::failure::FailureClass;
use baton_protocol::samples;
use baton_protocol::wire::{self, decode_event::Event, decode_request::Message, prefill_event};
use baton_router::run::{Mode, RunEvent};

use crate::double::{ARTIFACT, Double};
use crate::router::{PROMPT, Router, outcome};
use crate::steady::steady;
use crate::{answer, begin, policy, start, token, with_incarnation};

/// The model's end.
fn end(id: u32, position: u32) -> wire::Token {
    wire::Token {
        finish: Some(wire::FinishReason::Stop.into()),
        ..token(id, position)
    }
}

fn assert_stopped(last: &RunEvent) {
    let RunEvent::Finished { reason, usage } = last else {
        panic!("the client has the whole answer: {last:?}");
    };
    assert_eq!(*reason, wire::FinishReason::Stop);
    assert_eq!(usage.output_tokens, 1);
}

#[tokio::test]
async fn nobody_goes_on_where_a_worker_is_lost_after_the_end() {
    let first = Double::start(samples::card("d0"), ARTIFACT).await;
    let second = Double::start(with_incarnation(samples::card("d1"), 2), ARTIFACT).await;
    let router = Router::start(&policy(), &[&first, &second]);
    router.ready(2).await;
    // Equal workers: the first of the list is taken.
    first.decode(async |mut requests, answers| {
        begin(&mut requests, &answers).await;
        answers.send(Event::Token(end(7, PROMPT))).await;
    });
    answer(&second, vec![token(8, PROMPT + 1)]);
    let handle = router.start_run(Mode::Aggregated, 4);
    let run = handle.run.to_string();
    let (tokens, last) = outcome(handle).await;
    assert_eq!(tokens, [7]);
    assert_stopped(&last);
    let record = router.record(&run).await;
    assert_eq!(record.states.last().unwrap().attempt, 1);
    router.holds_nothing().await;
}

#[tokio::test]
async fn nobody_goes_on_where_a_hand_off_is_lost_after_the_end() {
    let p = Double::start(samples::prefill_card("p"), ARTIFACT).await;
    let d = Double::start(samples::card("d"), ARTIFACT).await;
    let router = Router::start(&policy(), &[&p, &d]);
    router.ready(2).await;
    p.prefill(vec![
        prefill_event::Event::Lease(wire::LeaseOpened {
            descriptor: Some(wire::Descriptor::default()),
            admission: Some(wire::Admission::default()),
        }),
        prefill_event::Event::Started(wire::Started::default()),
        prefill_event::Event::FirstToken(end(7, PROMPT)),
        prefill_event::Event::Sealed(wire::Sealed::default()),
    ]);
    d.decode(async |mut requests, answers| {
        start(&mut requests).await;
        answers
            .send(Event::Reserved(wire::Admission::default()))
            .await;
        // Killed while it fetches the KV of a prompt whose answer is complete.
        while let Ok(Some(request)) = requests.message().await {
            if let Some(Message::FirstToken(first)) = request.message {
                assert_eq!(first.finish(), wire::FinishReason::Stop);
                return;
            }
        }
        panic!("the first token never came");
    });
    let (tokens, last) = outcome(router.start_run(Mode::Disaggregated, 4)).await;
    assert_eq!(tokens, [7]);
    assert_stopped(&last);
    router.holds_nothing().await;
}

#[tokio::test]
async fn a_stop_string_that_was_found_counts_though_its_client_leaves_at_once() {
    let d = Double::start(samples::card("d"), ARTIFACT).await;
    let router = Router::start(&policy(), &[&d]);
    router.ready(1).await;
    d.decode(async |mut requests, answers| {
        begin(&mut requests, &answers).await;
        answers.send(Event::Token(token(7, PROMPT))).await;
        answers.closed().await;
    });
    let mut handle = router.start_run(Mode::Aggregated, 4);
    let run = handle.run.to_string();
    let read = handle.next().await;
    assert!(
        matches!(read, Some(RunEvent::Token { id: 7, .. })),
        "{read:?}"
    );
    handle.stop_matched();
    drop(handle);
    let outcome = router.record(&run).await.outcome.unwrap();
    assert_eq!(
        (outcome.status, outcome.output_tokens),
        (RunStatus::Completed, 1)
    );
    router.holds_nothing().await;
}

/// Tokens: more than may wait for a client.
const MANY: u32 = 1_000;

fn generates_more_than_may_wait(d: &Double) {
    d.decode(async |mut requests, answers| {
        begin(&mut requests, &answers).await;
        for place in 0..MANY {
            answers.send(Event::Token(token(9, PROMPT + place))).await;
        }
        answers.closed().await;
    });
}

/// Its front reads what has come, finds the stop string in it and leaves, while the run waits for room to hand on what comes after that.
#[tokio::test]
async fn a_stop_string_counts_though_more_waits_to_be_read_when_its_client_leaves() {
    let d = Double::start(samples::card("d"), ARTIFACT).await;
    let router = Router::start(&policy(), &[&d]);
    router.ready(1).await;
    generates_more_than_may_wait(&d);
    let mut handle = router.start_run(Mode::Aggregated, MANY + 1);
    let run = handle.run.to_string();
    let read = handle.next().await;
    assert!(matches!(read, Some(RunEvent::Token { .. })), "{read:?}");
    // For the events to fill their channel; a shorter time would only make this the case before.
    tokio::time::sleep(Duration::from_millis(300)).await;
    handle.stop_matched();
    drop(handle);
    let outcome = router.record(&run).await.outcome.unwrap();
    assert_eq!(
        (outcome.status, outcome.output_tokens),
        (RunStatus::Completed, 1)
    );
    router.holds_nothing().await;
}

#[tokio::test]
async fn a_client_too_slow_for_the_deadline_hears_that_it_has_passed() {
    let total = Duration::from_secs(1);
    let mut policy = policy();
    policy.timeouts.total_seconds = total.as_secs_f64();
    // Until then more has been generated than may wait.
    steady(total, async || {
        let d = Double::start(samples::card("d"), ARTIFACT).await;
        let router = Router::start(&policy, &[&d]);
        router.ready(1).await;
        generates_more_than_may_wait(&d);
        let handle = router.start_run(Mode::Aggregated, MANY + 1);
        let run = handle.run.to_string();
        let record = router.record(&run).await;
        assert_eq!(record.states.last().unwrap().state, "failed");
        let (read, last) = outcome(handle).await;
        assert!(!read.is_empty() && read.len() < MANY as usize);
        let RunEvent::Failed(failure) = last else {
            panic!("the deadline has passed: {last:?}");
        };
        assert_eq!(
            (failure.class, failure.status),
            (FailureClass::DeadlineExceeded, 504)
        );
        router.holds_nothing().await;
    })
    .await;
}

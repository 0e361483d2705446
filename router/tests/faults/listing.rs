//! A worker whose listing changes: what runs on it goes on, and nothing new comes while it is on its way out.

use baton_placement::fleet::WorkerState;
use baton_protocol::wire::{self, decode_event::Event};
use baton_router::fleet::listing::{self, ListedWorker};
use baton_router::run::{Mode, RunEvent};

use crate::double::{ARTIFACT, Double, Seen};
use crate::obedient::compute;
use crate::router::{PROMPT, Router, outcome, until};
use crate::{finished, policy, samples, start, token};

fn listed(router: &Router) -> ListedWorker {
    listing::workers(&router.workers).remove(0)
}

#[tokio::test]
async fn a_worker_on_its_way_out_keeps_its_runs_and_its_stream_and_gets_nothing_new() {
    let mut d = Double::start(samples::card("d"), ARTIFACT).await;
    let router = Router::start(&policy(), &[&d]);
    router.ready(1).await;
    let (go_on, mut told) = tokio::sync::mpsc::channel::<()>(1);
    d.decode(async move |mut requests, answers| {
        start(&mut requests).await;
        answers
            .send(Event::Reserved(wire::Admission::default()))
            .await;
        compute(&answers).await;
        answers.send(Event::Token(token(1, PROMPT))).await;
        told.recv().await;
        answers.send(Event::Token(token(2, PROMPT + 1))).await;
        answers.send(finished()).await;
    });
    let mut running = router.start_run(Mode::Aggregated, 9);
    assert!(matches!(
        running.next().await,
        Some(RunEvent::Token { id: 1, .. })
    ));

    router.lists.send_modify(|list| list[0].leaving = true);
    until("the worker is on its way out", || {
        listed(&router).state == WorkerState::Draining
    })
    .await;
    assert_eq!(router.dispatcher.workers_ready(), 0);
    go_on.send(()).await.unwrap();
    let (tokens, end) = outcome(running).await;
    assert_eq!(tokens, [2]);
    assert!(matches!(end, RunEvent::Finished { .. }), "{end:?}");

    router.lists.send_modify(|list| {
        list[0].leaving = false;
        list[0].domains = vec![("host".to_owned(), Some("node-7".to_owned()))];
    });
    router.ready(1).await;
    assert_eq!(listed(&router).domains["host"], "node-7");
    // Another run makes itself heard; the stream of before is the one that is still followed.
    let (begun, mut has_begun) = tokio::sync::mpsc::channel::<()>(1);
    d.decode(async move |mut requests, answers| {
        start(&mut requests).await;
        begun.send(()).await.unwrap();
        answers.closed().await;
    });
    let given_up = router.start_run(Mode::Aggregated, 9);
    has_begun.recv().await.unwrap();
    drop(given_up);
    let mut watches = 0;
    loop {
        match d.until(|_| true).await {
            Seen::Watch(_) => watches += 1,
            Seen::Cancel(_) => break,
            _ => {}
        }
    }
    assert_eq!(watches, 1);
}

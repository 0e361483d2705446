//! What a router leaves behind that has died, or that was late: its streams are gone, and nobody cancels anything any more.

use std::sync::Arc;

use baton_protocol::wire::{self, decode_event};
use baton_worker::kv::clock::ManualClock;

use crate::harness::{Run, With, Worker, config, next_prefill, simulated, worker, worker_with};

/// A prefill that is over, its lease out.
async fn sealed(worker: &Worker, run: &Run) {
    let mut events = worker.prefill(run.prefill(worker)).await;
    while next_prefill(&mut events).await.is_some() {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dead_router_owned_ends_by_itself() {
    let clock = Arc::new(ManualClock::default());
    let with = With {
        clock: Some(clock.clone()),
        ..With::default()
    };
    let (prefill, decode) = tokio::join!(worker_with(config("p"), with), worker(simulated("d")));
    let run = Run::new("r", 60, 3000);
    let mut stream = decode.decode(run.decode(&decode, false)).await;
    stream
        .until(|event| matches!(event, decode_event::Event::Token(_)).then_some(()))
        .await;
    sealed(&prefill, &run).await;
    let leased = prefill.running.pool().counts().leased;
    assert!(leased > 0);
    // A second prefill, whose caller dies before it is over.
    let other = Run::new("s", 60, 6);
    drop(prefill.prefill(other.prefill(&prefill)).await);
    drop(stream);
    // What was generated for nobody stops at once; what may still be read stays, but not for ever.
    decode.settled().await;
    assert_eq!(prefill.running.pool().counts().leased.min(leased), leased);
    // The router that comes after it has other ids: it takes nothing over, and the same prompt is served.
    let again = run.named("r-of-another-router");
    let answer = Run {
        stopping: wire::Stopping {
            max_tokens: 4,
            ..again.stopping.clone()
        },
        ..again
    };
    assert_eq!(decode.generate(&answer).await.len(), 4);
    crate::harness::until("both leases end by time", || {
        clock.advance(30_000);
        let counts = prefill.running.pool().counts();
        counts.leased == 0 && counts.active == 0
    })
    .await;
    prefill.settled().await;
    prefill.end().await;
    decode.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_cancellation_of_one_operation_hits_no_other_of_its_run() {
    let worker = worker(simulated("w")).await;
    let run = Run::new("r", 60, 3000);
    sealed(&worker, &run).await;
    let mut later = run.decode(&worker, false);
    if let Some(operation) = &mut later.operation {
        operation.attempt = 2;
        operation.id = "r/2/decode".to_owned();
    }
    let mut stream = worker.decode(later).await;
    stream
        .until(|event| matches!(event, decode_event::Event::Token(_)).then_some(()))
        .await;
    assert!(worker.running.pool().counts().leased > 0);
    // The prefill has ended: its lease is what is left of it.
    assert_eq!(worker.cancel_operation("r", "r/1/prefill").await, 0);
    assert_eq!(worker.running.pool().counts().leased, 0);
    // One that this worker has never seen.
    assert_eq!(worker.cancel_operation("r", "r/1/decode").await, 0);
    stream
        .until(|event| matches!(event, decode_event::Event::Token(_)).then_some(()))
        .await;
    assert_eq!(worker.cancel_operation("r", "r/2/decode").await, 1);
    worker.settled().await;
    worker.end().await;
}

//! What a router leaves behind that has died, or that was late: its streams are gone, and nobody cancels anything any more.

use std::sync::Arc;

use baton_protocol::wire::{self, claim_reply, decode_event, prefill_event};
use baton_worker::config::WorkerConfig;
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

/// A prefill that takes `seconds` in steps of 0.16 s.
fn slow(name: &str, prompt: usize, seconds: usize) -> WorkerConfig {
    let mut config = simulated(name);
    let per_token = seconds * 1_000_000_000 / prompt;
    config.engine = serde_json::from_value(serde_json::json!({
        "type": "Simulated", "maxSequences": 8, "maxBatchedTokens": prompt * 16 / (seconds * 100),
        "simulated": {"prefillFloorMicroseconds": 0, "prefillPerTokenNanoseconds": per_token, "jitterPercent": 0},
    }))
    .unwrap();
    config
}

/// The last event of a prefill that another call has begun; asked for when it must have ended.
async fn end_of(worker: &Worker, run: &Run) -> Option<prefill_event::Event> {
    let mut events = worker.prefill(run.prefill(worker)).await;
    let mut last = None;
    while let Some(event) = next_prefill(&mut events).await {
        last = Some(event);
    }
    last
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_whose_router_died_is_computed_on_only_for_whoever_has_claimed_it() {
    // Time of leases stands still: nothing ends by it.
    let with = || With {
        clock: Some(Arc::new(ManualClock::default())),
        ..With::default()
    };
    let (unclaimed, claimed) = tokio::join!(
        worker_with(slow("u", 3000, 60), with()),
        worker_with(slow("c", 3000, 6), with())
    );
    let run = Run::new("r", 3000, 6);
    let begun = async |worker: &Worker| {
        let mut events = worker.prefill(run.prefill(worker)).await;
        let Some(prefill_event::Event::Lease(lease)) = next_prefill(&mut events).await else {
            panic!("the lease comes first");
        };
        (events, lease.descriptor.unwrap())
    };
    let (deserted, _) = begun(&unclaimed).await;
    let (read, descriptor) = begun(&claimed).await;
    let claim = wire::ClaimRequest {
        lease: descriptor.lease,
        generation: descriptor.generation,
        transfer: "t".to_owned(),
        reader: "d".to_owned(),
        reader_incarnation: 1,
        traceparent: String::new(),
    };
    let reply = claimed.client.clone().claim(claim).await.unwrap();
    let outcome = reply.into_inner().outcome;
    assert!(matches!(outcome, Some(claim_reply::Outcome::Granted(_))));
    drop((deserted, read));

    // It ends long before it would have been computed, and leaves nothing.
    unclaimed.settled().await;
    let last = end_of(&unclaimed, &run).await;
    assert!(
        matches!(&last, Some(prefill_event::Event::Failed(failed)) if failed.class == "client-gone"),
        "{last:?}"
    );
    // The other one is there whole for its reader.
    crate::harness::until("it is sealed", || {
        let counts = claimed.running.pool().counts();
        counts.active == 0 && counts.leased > 0
    })
    .await;
    let last = end_of(&claimed, &run).await;
    assert!(
        matches!(last, Some(prefill_event::Event::Sealed(_))),
        "{last:?}"
    );
    claimed.cancel("r").await;
    unclaimed.end().await;
    claimed.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_whose_call_is_repeated_in_time_goes_on() {
    let worker = worker(slow("w", 1600, 4)).await;
    let run = Run::new("r", 1600, 6);
    drop(worker.prefill(run.prefill(&worker)).await);
    let last = end_of(&worker, &run).await;
    assert!(
        matches!(last, Some(prefill_event::Event::Sealed(_))),
        "{last:?}"
    );
    worker.cancel("r").await;
    worker.end().await;
}

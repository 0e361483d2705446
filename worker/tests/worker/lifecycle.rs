//! Cancelling, draining, repeating: what ends an operation, and what is left of it (nothing).

use baton_protocol::wire::watch_event::Event;
use baton_protocol::wire::{self, decode_event, decode_request, prefill_event};

use crate::harness::{PATIENCE, Run, Worker, config, next_prefill, simulated, until, worker};
use crate::process::get;

/// A run that would go on for minutes.
fn endless(name: &str) -> Run {
    Run::new(name, 600, 3000)
}

async fn phase(
    worker: &Worker,
    run: &Run,
    reached: fn(&decode_event::Event) -> bool,
) -> crate::harness::Decode {
    let mut stream = worker.decode(run.decode(worker, false)).await;
    stream.until(|event| reached(event).then_some(())).await;
    stream
}

/// Waits until the worker tells its routers that it drains.
async fn drains(worker: &Worker) {
    let mut client = worker.client.clone();
    let request = wire::WatchRequest::default();
    let mut events = client.watch(request).await.unwrap().into_inner();
    let told = async {
        while let Some(event) = events.message().await.unwrap() {
            if let Some(Event::Draining(wire::Draining { draining: true })) = event.event {
                return;
            }
        }
        panic!("the stream has ended");
    };
    tokio::time::timeout(PATIENCE, told).await.unwrap();
}

async fn undo(worker: &Worker) {
    let request = wire::DrainRequest { undo: true };
    worker.client.clone().drain(request).await.unwrap();
}

async fn ends_cancelled(mut stream: crate::harness::Decode) {
    let reason = stream
        .until(|event| match event {
            decode_event::Event::Finished(finished) => Some(finished.reason()),
            decode_event::Event::Failed(failed) => panic!("{failed:?}"),
            _ => None,
        })
        .await;
    assert_eq!(reason, wire::FinishReason::Cancelled);
    assert!(stream.maybe().await.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_is_cancelled_in_every_phase_and_leaves_nothing() {
    let worker = worker(simulated("w")).await;
    let reached: [fn(&decode_event::Event) -> bool; 3] = [
        |event| matches!(event, decode_event::Event::Reserved(_)),
        |event| matches!(event, decode_event::Event::PrefillStarted(_)),
        |event| matches!(event, decode_event::Event::DecodeStarted(_)),
    ];
    for (number, reached) in reached.into_iter().enumerate() {
        let run = endless(&format!("r{number}"));
        let stream = phase(&worker, &run, reached).await;
        assert_eq!(worker.cancel(&run.name).await, 1);
        // The call returns when nothing is left.
        assert_eq!(worker.running.pool().counts().active, 0);
        ends_cancelled(stream).await;
        assert_eq!(worker.cancel(&run.name).await, 0);
    }
    // Waiting for a hand-off that never comes.
    let run = endless("held");
    let mut stream = worker.decode(run.decode(&worker, true)).await;
    stream.next().await;
    // 600 tokens and one block's worth to come.
    assert_eq!(worker.running.pool().counts().active, 39);
    assert_eq!(worker.cancel("held").await, 1);
    ends_cancelled(stream).await;
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelling_during_a_transfer_frees_both_sides() {
    let (prefill, decode) = tokio::join!(worker(simulated("p")), worker(simulated("d")));
    // Three seconds of prefill: it is under way until it is cancelled.
    let run = Run::new("r", 3000, 600);
    let mut stream = decode.decode(run.decode(&decode, true)).await;
    let mut source = prefill.prefill(run.prefill(&prefill)).await;
    let descriptor = loop {
        if let Some(prefill_event::Event::Lease(lease)) = next_prefill(&mut source).await {
            break lease.descriptor.unwrap();
        }
    };
    stream
        .send(decode_request::Message::Descriptor(descriptor))
        .await;
    stream
        .until(|event| matches!(event, decode_event::Event::TransferStarted(_)).then_some(()))
        .await;
    assert_eq!(decode.cancel("r").await, 1);
    assert_eq!(prefill.cancel("r").await, 1);
    for worker in [&prefill, &decode] {
        let counts = worker.running.pool().counts();
        assert_eq!((counts.active, counts.leased), (0, 0));
    }
    ends_cancelled(stream).await;
    prefill.end().await;
    decode.end().await;
}

/// Routers wait two seconds, and a step of a large model may take longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_that_ends_after_its_canceller_has_left_keeps_nothing() {
    let mut slow = simulated("p");
    let timing = slow.engine.simulated.as_mut().unwrap();
    timing.prefill_per_token_nanoseconds = Some(40_000_000);
    let worker = worker(slow).await;
    // One step of 2.4 s: it is sealed as it ends, before the engine looks at what it was told meanwhile.
    let mut events = worker.prefill(Run::new("r", 60, 10).prefill(&worker)).await;
    while !matches!(
        next_prefill(&mut events).await,
        Some(prefill_event::Event::Started(_))
    ) {}
    let cancelling = worker.cancel_operation("r", "r/1/prefill");
    let _ = tokio::time::timeout(std::time::Duration::from_secs(1), cancelling).await;
    worker.settled().await;
    let counters = worker.running.pool().lease_counters();
    assert_eq!(counters.expired, 0, "given back, not left to expire");
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_leaves_cancels_its_decode() {
    let worker = worker(simulated("w")).await;
    let reached: [fn(&decode_event::Event) -> bool; 2] = [
        |event| matches!(event, decode_event::Event::PrefillStarted(_)),
        |event| matches!(event, decode_event::Event::Token(_)),
    ];
    for (number, reached) in reached.into_iter().enumerate() {
        drop(phase(&worker, &endless(&format!("r{number}")), reached).await);
        worker.settled().await;
    }
    // One that only closes its half of a hand-off it has not described cannot go on either.
    let run = endless("half");
    let mut stream = worker.decode(run.decode(&worker, true)).await;
    stream.next().await;
    let (to, _) = tokio::sync::mpsc::channel(1);
    drop(std::mem::replace(&mut stream.to, to));
    let failed = stream
        .until(|event| match event {
            decode_event::Event::Failed(failed) => Some(failed.clone()),
            _ => None,
        })
        .await;
    assert_eq!(failed.class, "client-gone");
    assert!(
        failed.message.contains("request half"),
        "{}",
        failed.message
    );
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_prefill_gets_the_first_ones_result_and_computes_nothing() {
    let worker = worker(config("w")).await;
    let run = Run::new("r", 100, 10);
    let collect = |mut events: tonic::Streaming<wire::PrefillEvent>| async move {
        let mut all = Vec::new();
        while let Some(event) = next_prefill(&mut events).await {
            all.push(event);
        }
        all
    };
    let (first, second) = tokio::join!(
        async { collect(worker.prefill(run.prefill(&worker)).await).await },
        async { collect(worker.prefill(run.prefill(&worker)).await).await },
    );
    assert_eq!(first, second);
    assert!(matches!(
        first.last(),
        Some(prefill_event::Event::Sealed(_))
    ));
    assert_eq!(
        collect(worker.prefill(run.prefill(&worker)).await).await,
        first
    );
    // One lease, of seven blocks.
    assert_eq!(worker.running.pool().lease_counts().total(), 1);
    assert_eq!(worker.running.pool().lease_counters().opened, 1);
    // Released by the router of that run, and by no other.
    let Some(prefill_event::Event::Lease(lease)) = first.first().cloned() else {
        panic!("the lease comes first");
    };
    let lease = lease.descriptor.unwrap().lease;
    for (name, left) in [("another", 1), ("r", 0)] {
        let request = wire::ReleaseRequest {
            lease: lease.clone(),
            run: name.to_owned(),
        };
        worker.client.clone().release(request).await.unwrap();
        assert_eq!(worker.running.pool().lease_counts().total(), left);
    }
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_refuses_what_is_new_lets_run_what_runs_and_can_be_undone() {
    let worker = worker(simulated("w")).await;
    let running = phase(&worker, &endless("running"), |event| {
        matches!(event, decode_event::Event::Token(_))
    })
    .await;
    let drain = |undo| {
        let mut client = worker.client.clone();
        async move {
            client
                .drain(wire::DrainRequest { undo })
                .await
                .unwrap()
                .into_inner()
        }
    };
    assert_eq!(drain(false).await.operations, 1);
    let refused = |name: &'static str| {
        let worker = &worker;
        async move {
            let run = Run::new(name, 10, 2);
            let mut stream = worker.decode(run.decode(worker, false)).await;
            match stream.next().await {
                decode_event::Event::Refused(refused) => Some(refused.reason),
                _ => None,
            }
        }
    };
    assert_eq!(refused("new").await.as_deref(), Some("draining"));
    let mut running = running;
    running
        .until(|event| matches!(event, decode_event::Event::Token(_)).then_some(()))
        .await;
    drain(true).await;
    assert_eq!(refused("newer").await, None);
    drop(running);
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_over_http_says_what_is_left_and_ends_when_nothing_is_or_when_it_is_undone() {
    let worker = worker(simulated("w")).await;
    let admin = worker.running.admin_address().to_string();
    let ask = |path: &'static str| {
        let admin = admin.clone();
        tokio::task::spawn_blocking(move || get(&admin, path))
    };
    let running = phase(&worker, &endless("running"), |event| {
        matches!(event, decode_event::Event::Token(_))
    })
    .await;
    let answer = ask("/drain").await.unwrap();
    let report = r#"{"drained":false,"operations":1,"leasesOpen":0,"draining":true}"#;
    assert!(answer.ends_with(report), "{answer}");
    assert!(ask("/readyz").await.unwrap().starts_with("HTTP/1.1 503"));

    undo(&worker).await;
    assert!(ask("/readyz").await.unwrap().starts_with("HTTP/1.1 200"));
    let waiting = ask("/drain?waitSeconds=3600");
    drains(&worker).await;
    undo(&worker).await;
    let answer = waiting.await.unwrap();
    let report = r#"{"drained":false,"operations":1,"leasesOpen":0,"draining":false}"#;
    assert!(answer.ends_with(report), "{answer}");
    assert!(ask("/readyz").await.unwrap().starts_with("HTTP/1.1 200"));

    let waiting = ask("/drain?waitSeconds=3600");
    drop(running);
    let answer = waiting.await.unwrap();
    assert!(
        answer.contains(r#""drained":true,"operations":0"#),
        "{answer}"
    );
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_stops_keeps_nobody_waiting_for_its_drain() {
    let worker = worker(simulated("w")).await;
    let admin = worker.running.admin_address().to_string();
    let running = phase(&worker, &endless("running"), |event| {
        matches!(event, decode_event::Event::Token(_))
    })
    .await;
    let waiting = tokio::task::spawn_blocking(move || get(&admin, "/drain?waitSeconds=3600"));
    drains(&worker).await;
    drop(running);
    worker.running.stop().await;
    let answer = waiting.await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_waits_for_operations_and_leases() {
    let worker = worker(config("w")).await;
    let run = Run::new("r", 40, 10);
    let mut source = worker.prefill(run.prefill(&worker)).await;
    while next_prefill(&mut source).await.is_some() {}
    let drained = {
        let draining = worker.running.drain();
        tokio::pin!(draining);
        tokio::select! {
            _ = &mut draining => panic!("a lease is open"),
            () = until("refuses", || worker.running.pool().lease_counts().total() == 1) => {}
        }
        worker.cancel("r").await;
        draining.await
    };
    assert!(drained);
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_does_not_read_is_cut_off_and_nobody_waits_for_it() {
    let mut large = config("w");
    large.kv_pool.blocks = Some(520);
    let worker = worker(large).await;
    // Two kilobytes for each token: far more than connection, task and engine together hold for a reader.
    let mut endless = Run::new("stalled", 16, 8_000);
    endless.sampling.top_logprobs = Some(200);
    let mut stalled = worker.decode(endless.decode(&worker, false)).await;
    let other = Run::new("other", 40, 50);
    assert_eq!(worker.generate(&other).await.len(), 50);
    worker.settled().await;
    let mut tokens = 0;
    let failed = loop {
        match stalled.next().await {
            decode_event::Event::Token(_) => tokens += 1,
            decode_event::Event::Failed(failed) => break failed,
            decode_event::Event::Finished(_) => panic!("all {tokens} tokens fit"),
            _ => {}
        }
    };
    assert!(failed.message.contains("not read"), "{}", failed.message);
    assert!(tokens < 8_000);
    worker.end().await;
}

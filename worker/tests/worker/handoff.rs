//! Hand-offs between two workers: the same tokens as on one, whatever goes wrong on the way.

use std::sync::Arc;

use baton_protocol::wire::{self, decode_event, decode_request, prefill_event};
use baton_worker::kv::clock::ManualClock;
use baton_worker::transport::fault::Fault;

use crate::harness::{
    Run, With, Worker, config, next_prefill, remote, remote_with, simulated, worker, worker_with,
};

async fn pair() -> (Worker, Worker) {
    tokio::join!(worker(config("p")), worker(config("d")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn remote_runs_say_what_local_ones_say() {
    let (prefill, decode) = pair().await;
    let reference = worker(config("reference")).await;
    for (name, prompt) in [("short", 5), ("full", 64), ("partial", 131), ("long", 700)] {
        for run in [
            Run::new(name, prompt, 12),
            Run::new(&format!("{name}-seeded"), prompt, 12).seeded(9),
        ] {
            let expected = reference.generate(&run).await;
            let came = remote(&prefill, &decode, &run).await;
            assert_eq!(came.tokens, expected, "{}", run.name);
            let moved = came.transferred.expect("it was transferred");
            assert_eq!(moved.blocks as usize, prompt.div_ceil(16));
            assert_eq!(moved.transport, "Tcp");
            assert_eq!(
                came.decode_events,
                [
                    "transfer_started",
                    "transfer_completed",
                    "decode_started",
                    "finished"
                ]
            );
            let prefill_events: Vec<_> = came
                .prefill_events
                .iter()
                .filter(|kind| **kind != "published")
                .copied()
                .collect();
            assert_eq!(
                prefill_events,
                ["lease", "started", "first_token", "sealed"]
            );
        }
    }
    for worker in [prefill, decode, reference] {
        worker.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_listen_everywhere_hand_over_at_the_addresses_that_they_advertise() {
    let at = |name, advertise| {
        let with = With {
            advertise: Some(advertise),
            ..With::default()
        };
        worker_with(config(name), with)
    };
    let (prefill, decode) = tokio::join!(at("p", "127.0.0.2"), at("d", "127.0.0.3"));
    let run = Run::new("r", 100, 6);
    let (descriptor, _) = sealed(&prefill, &run).await;
    let addresses = descriptor
        .transports
        .iter()
        .map(|transport| &transport.address);
    for address in addresses.chain([&descriptor.control_address]) {
        assert!(address.starts_with("127.0.0.2:"), "{address}");
    }
    prefill.cancel("r").await;
    let came = remote(&prefill, &decode, &run.named("again")).await;
    assert_eq!(came.transferred.unwrap().blocks, 7);
    for worker in [prefill, decode] {
        worker.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_reader_has_is_not_moved_again() {
    let (prefill, decode) = pair().await;
    let run = Run::new("r", 100, 6);
    let first = remote(&prefill, &decode, &run).await;
    assert_eq!(first.transferred.unwrap().blocks, 7);
    let again = remote(&prefill, &decode, &run.named("again")).await;
    assert_eq!(again.tokens, first.tokens);
    // The partly filled last block is never cached.
    assert_eq!(again.transferred.unwrap().blocks, 1);
    // All of it there: the last block is moved all the same, so that a recompute would not write into one that others read.
    let whole = Run {
        tokens: run.tokens[..96].to_vec(),
        ..run.named("whole")
    };
    let all_cached = remote(&prefill, &decode, &whole).await;
    assert_eq!(all_cached.transferred.unwrap().blocks, 1);
    assert_eq!(
        all_cached.tokens,
        prefill.generate(&whole.named("local")).await
    );
    prefill.end().await;
    decode.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_reader_may_sample_the_first_token_itself() {
    let (prefill, decode) = pair().await;
    for prompt in [2, 16, 17, 33, 90] {
        let run = Run::new(&format!("r{prompt}"), prompt, 8).seeded(3);
        let came = remote_with(&prefill, &decode, &run, false).await;
        assert_eq!(
            came.tokens,
            prefill
                .generate(&run.named(&format!("local{prompt}")))
                .await
        );
        assert!(came.transferred.is_some());
    }
    prefill.end().await;
    decode.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_token_is_answered_by_a_pair_and_moves_nothing() {
    let (prefill, decode) = pair().await;
    let run = Run::new("r", 40, 1);
    let expected = prefill.generate(&run.named("local")).await;
    let mut stream = decode.decode(run.decode(&decode, true)).await;
    assert!(matches!(
        stream.next().await,
        decode_event::Event::Reserved(_)
    ));
    let mut events = prefill.prefill(run.prefill(&prefill)).await;
    let mut first = None;
    while let Some(event) = next_prefill(&mut events).await {
        match event {
            prefill_event::Event::Lease(opened) => assert!(opened.descriptor.is_none()),
            prefill_event::Event::FirstToken(token) => {
                assert_eq!([token.id], *expected);
                first = Some(token);
            }
            _ => {}
        }
    }
    let first = decode_request::Message::FirstToken(first.expect("it was sampled"));
    stream.send(first).await;
    let finished = stream.next().await;
    let decode_event::Event::Finished(finished) = finished else {
        panic!("nothing else is left to do: {finished:?}");
    };
    assert_eq!(finished.reason(), wire::FinishReason::Length);
    drop(stream);
    for worker in [prefill, decode] {
        worker.end().await;
    }
}

async fn recomputed(fault: Fault, cause: &str) {
    let faulty = With {
        fault: Some(fault),
        ..With::default()
    };
    let (prefill, decode) = tokio::join!(worker_with(config("p"), faulty), worker(config("d")));
    let run = Run::new("r", 150, 10).seeded(4);
    let came = remote(&prefill, &decode, &run).await;
    let failed = came.failed.expect("the fault is seen");
    assert_eq!(failed.cause, cause, "{}", failed.message);
    assert!(came.transferred.is_none());
    // The source's own memory is right.
    assert_eq!(came.tokens, prefill.generate(&run.named("local")).await);
    // And so is what the reader computed: nothing of the transfer stayed in its cache.
    assert_eq!(came.tokens, decode.generate(&run.named("again")).await);
    assert_eq!(
        came.decode_events,
        [
            "transfer_started",
            "transfer_failed",
            "prefill_started",
            "prefill_completed",
            "decode_started",
            "finished"
        ]
    );
    prefill.end().await;
    decode.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_byte_is_recomputed() {
    recomputed(Fault::FlipByte(4), "checksum-mismatch").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_reused_under_the_reader_is_recomputed() {
    recomputed(Fault::Reuse(2), "generation-mismatch").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kv_of_another_identity_or_layout_is_never_read() {
    for (change, cause) in [
        ("identity.kvDtype=F32", "identity-mismatch"),
        ("identity.rope=500000", "identity-mismatch"),
        ("layout.order=token,layer", "layout-mismatch"),
    ] {
        let other = With {
            card_change: Some(change),
            ..With::default()
        };
        let (prefill, decode) = tokio::join!(worker_with(config("p"), other), worker(config("d")));
        let run = Run::new("r", 50, 6);
        let came = remote(&prefill, &decode, &run).await;
        assert_eq!(came.failed.unwrap().cause, cause);
        assert_eq!(came.tokens, decode.generate(&run.named("local")).await);
        // Nobody read it, so the run's lease is still there until the run is cancelled.
        assert_eq!(prefill.running.pool().lease_counts().total(), 1);
        prefill.cancel("r").await;
        prefill.end().await;
        decode.end().await;
    }
}

/// A lease opened and sealed at `prefill`, as its descriptor, and the first token.
async fn sealed(prefill: &Worker, run: &Run) -> (wire::Descriptor, wire::Token) {
    let mut source = prefill.prefill(run.prefill(prefill)).await;
    let (mut descriptor, mut first) = (None, None);
    while let Some(event) = next_prefill(&mut source).await {
        match event {
            prefill_event::Event::Lease(lease) => descriptor = lease.descriptor,
            prefill_event::Event::FirstToken(token) => first = Some(token),
            _ => {}
        }
    }
    (descriptor.unwrap(), first.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_lease_is_gone_and_its_blocks_are_free() {
    let clock = Arc::new(ManualClock::default());
    let old = With {
        clock: Some(clock.clone()),
        ..With::default()
    };
    let (prefill, decode) = tokio::join!(worker_with(config("p"), old), worker(config("d")));
    let run = Run::new("r", 60, 6);
    let mut stream = decode.decode(run.decode(&decode, true)).await;
    let (descriptor, first) = sealed(&prefill, &run).await;
    assert_eq!(prefill.running.pool().counts().leased, 4);
    clock.advance(30_000);
    stream
        .send(decode_request::Message::Descriptor(descriptor))
        .await;
    let cause = stream
        .until(|event| match event {
            decode_event::Event::TransferFailed(failed) => Some(failed.cause.clone()),
            _ => None,
        })
        .await;
    assert_eq!(cause, "lease-gone");
    let mut tokens = vec![first.id];
    stream
        .send(decode_request::Message::FirstToken(first))
        .await;
    stream
        .send(decode_request::Message::Recompute(
            wire::RecomputeLocally::default(),
        ))
        .await;
    while let Some(event) = stream.maybe().await {
        if let decode_event::Event::Token(token) = event {
            tokens.push(token.id);
        }
    }
    assert_eq!(tokens, decode.generate(&run.named("local")).await);
    prefill.settled().await;
    assert_eq!(prefill.running.pool().lease_counters().expired, 1);
    prefill.end().await;
    decode.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_gives_up_during_the_transfer_gets_the_tokens_all_the_same() {
    let (prefill, decode) = tokio::join!(worker(simulated("p")), worker(simulated("d")));
    let run = Run::new("r", 400, 6);
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
    // 400 ms of prefill are still to come: the reader waits for blocks.
    stream
        .send(decode_request::Message::Recompute(
            wire::RecomputeLocally::default(),
        ))
        .await;
    let mut tokens = Vec::new();
    while let Some(event) = stream.maybe().await {
        if let decode_event::Event::Token(token) = event {
            tokens.push(token.id);
        }
    }
    assert_eq!(tokens, decode.generate(&run.named("local")).await);
    prefill.cancel("r").await;
    prefill.end().await;
    decode.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_dies_is_noticed() {
    let (prefill, decode) = tokio::join!(worker(simulated("p")), worker(simulated("d")));
    let run = Run::new("r", 2000, 6);
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
    prefill.running.stop().await;
    let cause = stream
        .until(|event| match event {
            decode_event::Event::TransferFailed(failed) => Some(failed.cause.clone()),
            _ => None,
        })
        .await;
    assert!(
        ["source-lost", "lease-gone"].contains(&cause.as_str()),
        "{cause}"
    );
    drop(stream);
    decode.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_first_token_is_refused_and_leaves_nothing() {
    let decode = worker(config("d")).await;
    let run = Run::new("r", 40, 6);
    let mut stream = decode.decode(run.decode(&decode, true)).await;
    let reserved = stream.next().await;
    assert!(matches!(reserved, decode_event::Event::Reserved(_)));
    for id in [3, 4] {
        let token = wire::Token {
            id,
            position: 40,
            logprobs: None,
            finish: None,
        };
        stream
            .send(decode_request::Message::FirstToken(token))
            .await;
    }
    let failed = stream
        .until(|event| match event {
            decode_event::Event::Failed(failed) => Some(failed.message.clone()),
            _ => None,
        })
        .await;
    assert!(failed.contains("second first token"), "{failed}");
    drop(stream);
    decode.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_and_a_decode_of_one_operation_id_are_both_cancelled_with_their_run() {
    let both = worker(simulated("b")).await;
    let run = Run::new("r", 2000, 4);
    let mut start = run.decode(&both, true);
    start.operation = Some(run.operation(&both, "same"));
    let mut request = run.prefill(&both);
    request.operation = Some(run.operation(&both, "same"));
    let mut stream = both.decode(start).await;
    stream.next().await;
    let mut source = both.prefill(request).await;
    next_prefill(&mut source).await;
    assert_eq!(both.cancel("r").await, 2);
    drop((stream, source));
    both.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abort_after_the_seal_frees_the_lease_and_breaks_nothing() {
    let prefill = worker(config("p")).await;
    let run = Run::new("r", 100, 6);
    let mut source = prefill.prefill(run.prefill(&prefill)).await;
    let mut descriptor = None;
    while let Some(event) = next_prefill(&mut source).await {
        if let prefill_event::Event::Lease(lease) = event {
            descriptor = lease.descriptor;
        }
    }
    let descriptor = descriptor.unwrap();
    let pool = prefill.running.pool();
    assert_eq!(pool.lease_counts().sealed, 1);
    // The reader was refused, or its client left: nobody will come for it.
    assert_eq!(prefill.cancel("r").await, 0, "the operation has ended");
    assert_eq!(pool.lease_counts().total(), 0);
    assert_eq!(pool.lease_counters().expired, 0, "without waiting");
    assert_eq!(prefill.cancel("r").await, 0);
    let claim = wire::ClaimRequest {
        lease: descriptor.lease.clone(),
        generation: descriptor.generation,
        transfer: "t".to_owned(),
        reader: "d".to_owned(),
        reader_incarnation: 1,
        ..wire::ClaimRequest::default()
    };
    let answer = prefill.client.clone().claim(claim).await.unwrap();
    let outcome = answer.into_inner().outcome;
    let Some(wire::claim_reply::Outcome::Gone(gone)) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(gone.reason, "cancelled");
    assert_eq!(prefill.generate(&run.named("next")).await.len(), 6);
    prefill.end().await;
}

//! Whole requests on one worker.

use baton_protocol::wire::decode_event::Event;

use crate::harness::{Run, config, worker};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_at_a_time_say_what_each_says_alone() {
    let worker = worker(config("w")).await;
    let runs: Vec<Run> = (0..8)
        .map(|number| {
            let run = Run::new(&format!("prompt-{number}"), 10 + 23 * number, 24);
            if number % 2 == 0 {
                run
            } else {
                run.seeded(number as u64)
            }
        })
        .collect();
    let mut alone = Vec::new();
    for run in &runs {
        alone.push(worker.generate(run).await);
    }
    let again: Vec<Run> = runs
        .iter()
        .map(|run| run.named(&format!("{}-together", run.name)))
        .collect();
    let together = futures::future::join_all(again.iter().map(|run| worker.generate(run))).await;
    assert_eq!(together, alone);
    assert!(alone.iter().all(|tokens| tokens.len() == 24));
    worker.end().await;
}

#[tokio::test]
async fn a_local_run_tells_its_phases_in_order_and_a_repeated_prompt_hits_the_cache() {
    let worker = worker(config("w")).await;
    let run = Run::new("first", 70, 3);
    let cached = |run: Run| {
        let worker = &worker;
        async move {
            let mut stream = worker.decode(run.decode(worker, false)).await;
            let mut kinds = Vec::new();
            let mut cached = 0;
            while let Some(event) = stream.maybe().await {
                kinds.push(match event {
                    Event::Reserved(_) => "reserved",
                    Event::PrefillStarted(_) => "prefill_started",
                    Event::PrefillCompleted(done) => {
                        cached = done.cached_tokens;
                        "prefill_completed"
                    }
                    Event::DecodeStarted(_) => "decode_started",
                    Event::Token(_) => "token",
                    Event::Finished(_) => "finished",
                    other => panic!("{other:?}"),
                });
            }
            assert_eq!(
                kinds,
                [
                    "reserved",
                    "prefill_started",
                    "prefill_completed",
                    "token",
                    "decode_started",
                    "token",
                    "token",
                    "finished"
                ]
            );
            cached
        }
    };
    assert_eq!(cached(run.clone()).await, 0);
    assert_eq!(cached(run.named("second")).await, 64);
    // Another tenant finds nothing.
    let mut salted = run.named("third").decode(&worker, false);
    salted.operation.as_mut().unwrap().cache_salt = "tenant".to_owned();
    let mut stream = worker.decode(salted).await;
    let done = stream
        .until(|event| match event {
            Event::PrefillCompleted(done) => Some(done.cached_tokens),
            _ => None,
        })
        .await;
    assert_eq!(done, 0);
    drop(stream);
    worker.end().await;
}

#[tokio::test]
async fn what_cannot_be_begun_is_refused_by_its_reason() {
    let worker = worker(config("w")).await;
    let run = Run::new("r", 20, 4);
    let reason = |start| {
        let worker = &worker;
        async move {
            match worker.decode(start).await.next().await {
                Event::Refused(refused) => refused.reason,
                other => panic!("{other:?}"),
            }
        }
    };
    let mut other_identity = run.decode(&worker, false);
    other_identity.operation.as_mut().unwrap().kv_identity = "another".to_owned();
    assert_eq!(reason(other_identity).await, "identity-mismatch");
    let mut long = run.decode(&worker, false);
    long.tokens = vec![1; 5000];
    assert_eq!(reason(long).await, "too-long");
    let mut empty = run.decode(&worker, false);
    empty.tokens.clear();
    assert_eq!(reason(empty).await, "invalid-request");
    // Refused, so the same id may try again; ended, so it may not.
    worker.generate(&run).await;
    assert_eq!(reason(run.decode(&worker, false)).await, "operation-ended");
    worker.end().await;
}

#[tokio::test]
async fn an_attempt_that_continues_a_run_goes_on_with_the_next_token() {
    let worker = worker(config("w")).await;
    for run in [
        Run::new("greedy", 33, 20),
        Run::new("seeded", 33, 20).seeded(5),
    ] {
        let whole = worker.generate(&run).await;
        let mut rest = run.named(&format!("{}-rest", run.name));
        rest.tokens.extend(&whole[..7]);
        let mut start = rest.decode(&worker, false);
        start.generated = 7;
        let mut stream = worker.decode(start).await;
        let mut tokens = Vec::new();
        while let Some(event) = stream.maybe().await {
            if let Event::Token(token) = event {
                tokens.push(token.id);
            }
        }
        assert_eq!(tokens, &whole[7..]);
    }
    worker.end().await;
}

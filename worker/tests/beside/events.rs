//! Cache events: followed, replayed, given up where they are lost, begun anew with the server's process.

use crate::double::{BLOCK, Engine, Publishes, free_port, removed, stored};
use crate::watcher::{Router, config, daemon, get};

fn prompt(first: u32, blocks: u32) -> Vec<u32> {
    (0..blocks * BLOCK).map(|at| first + at).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_server_publishes_is_credited_before_and_after_the_router_came() {
    let mut engine = Engine::start(0, Publishes::Listening).await;
    let (one, two) = (prompt(10, 3), prompt(500, 2));
    // Before the daemon was there.
    engine.publish(vec![stored(&[1, 2, 3], None, &one)]);
    let daemon = daemon(config(engine.port, None)).await;
    let mut router = Router::watch(&daemon).await;
    router
        .until("the replay", |router| router.credit(&one) == 3)
        .await;
    engine.publish(vec![stored(&[4, 5], None, &two)]);
    router
        .until("a prompt", |router| router.credit(&two) == 2)
        .await;
    engine.publish(vec![removed(3)]);
    router
        .until("an eviction", |router| router.credit(&one) == 2)
        .await;
    assert_eq!(router.load.events_skipped, 0);
    assert_eq!(Router::watch(&daemon).await.blocks, router.blocks);
    daemon.stop().await;
    engine.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_connects_is_heard_too() {
    // To vLLM the second is no wildcard.
    for address in ["127.0.0.1", "0.0.0.0"] {
        let port = free_port().await;
        let mut engine = Engine::start(0, Publishes::To(address, port)).await;
        let daemon = daemon(config(engine.port, None)).await;
        let mut router = Router::watch(&daemon).await;
        let tokens = prompt(10, 3);
        engine.publish(vec![stored(&[1, 2, 3], None, &tokens)]);
        router
            .until("a prompt", |router| router.credit(&tokens) == 3)
            .await;
        daemon.stop().await;
        engine.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_batches_are_replayed_and_those_lost_for_good_empty_the_index() {
    let mut engine = Engine::start(0, Publishes::Listening).await;
    let daemon = daemon(config(engine.port, None)).await;
    let mut router = Router::watch(&daemon).await;
    let (one, two, three) = (prompt(10, 2), prompt(100, 2), prompt(200, 2));
    engine.publish(vec![stored(&[1, 2], None, &one)]);
    router
        .until("a prompt", |router| router.credit(&one) == 2)
        .await;

    engine.lose(vec![stored(&[3, 4], None, &two)]);
    engine.publish(vec![stored(&[5, 6], None, &three)]);
    let all = |router: &Router| [&one, &two, &three].map(|tokens| router.credit(tokens)) == [2; 3];
    router.until("the replay", all).await;
    assert_eq!(router.load.event_gaps, 0);

    engine.lose(vec![removed(1)]);
    engine.forget();
    let four = prompt(300, 1);
    engine.publish(vec![stored(&[7], None, &four)]);
    router
        .until("what came after the hole", |router| {
            router.credit(&four) == 1
        })
        .await;
    assert_eq!(router.blocks.len(), 1, "all before it is forgotten");
    router
        .until("the report", |router| router.load.event_gaps == 1)
        .await;
    let (_, metrics) = get(&daemon, "/metrics").await;
    assert!(
        metrics.contains("baton_engine_event_gaps_total{pool=\"decode\"} 1"),
        "{metrics}"
    );
    daemon.stop().await;
    engine.end().await;
}

/// A batch of which nobody hears, and no other after it: it is found by looking.
#[tokio::test(flavor = "multi_thread")]
async fn silence_hides_nothing_for_long() {
    let mut engine = Engine::start(0, Publishes::Listening).await;
    let daemon = daemon(config(engine.port, None)).await;
    let mut router = Router::watch(&daemon).await;
    let tokens = prompt(10, 2);
    engine.lose(vec![stored(&[1, 2], None, &tokens)]);
    router
        .until("the look", |router| router.credit(&tokens) == 2)
        .await;
    daemon.stop().await;
    engine.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_of_the_server_is_another_incarnation_with_an_empty_cache() {
    let mut engine = Engine::start(0, Publishes::Listening).await;
    let port = engine.port;
    let daemon = daemon(config(port, None)).await;
    let mut router = Router::watch(&daemon).await;
    let tokens = prompt(10, 2);
    engine.publish(vec![stored(&[1, 2], None, &tokens)]);
    router
        .until("a prompt", |router| router.credit(&tokens) == 2)
        .await;

    engine.end().await;
    router.ended().await;
    let (status, why) = get(&daemon, "/readyz").await;
    assert_eq!(status, 503);
    assert!(why.contains("nothing listens at"), "{why}");
    let engine = Engine::start(port, Publishes::Listening).await;
    let again = Router::watch(&daemon).await;
    assert_ne!(again.incarnation, router.incarnation);
    assert_eq!(again.credit(&tokens), 0);
    assert_eq!(get(&daemon, "/readyz").await.0, 200);

    // One that was so quick that nobody saw it away.
    engine.set(|says| says.process_start += 1.0);
    let mut again = again;
    again.ended().await;
    assert_ne!(Router::watch(&daemon).await.incarnation, again.incarnation);
    daemon.stop().await;
    engine.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_indexed_is_counted_in_load_and_metrics() {
    let mut engine = Engine::start(0, Publishes::Listening).await;
    let daemon = daemon(config(engine.port, None)).await;
    let mut router = Router::watch(&daemon).await;
    // Of another block size, and with a parent that nobody told.
    engine.publish(vec![
        stored(&[1], None, &prompt(10, 2)),
        stored(&[2, 3], Some(99), &prompt(50, 2)),
    ]);
    router
        .until("the report", |router| router.load.events_skipped == 3)
        .await;
    let (_, metrics) = get(&daemon, "/metrics").await;
    for line in [
        "baton_engine_events_skipped_total{pool=\"decode\",cause=\"lengths\"} 1",
        "baton_engine_events_skipped_total{pool=\"decode\",cause=\"orphan\"} 2",
        "baton_engine_orphan_blocks{pool=\"decode\"} 2",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    daemon.stop().await;
    engine.end().await;
}

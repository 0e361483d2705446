//! A router that asks for a prompt before the engine answers, and a reader that reads while it is computed.

use super::super::Untold;
use super::super::taking::COMING;
use super::*;

/// Of each pool.
const BLOCKS: u32 = 16;

type Asked = tokio::task::JoinHandle<Result<String, Untold>>;

/// Asks for an operation that nobody has heard of yet.
async fn asks(daemon: &Daemon, operation: &str) -> Asked {
    let before = daemon.operations.kept();
    let (operations, operation) = (daemon.operations.clone(), operation.to_owned());
    let asked = tokio::spawn(async move { operations.parameters(&operation).await });
    until("it waits", || daemon.operations.kept() > before).await;
    asked
}

fn open_as(engine: &mut Engine, operation: &str, request: &str, count: u32) -> Value {
    engine.scheduler.say(&json!({"type": "open", "request": request, "tokens": tokens(count), "salt": "", "operation": operation}));
    engine.scheduler.hear()
}

/// Whether a block lies in the reader's memory, proven or not.
fn arrived(reader: &Engine, index: u32) -> bool {
    let mut found = vec![0; BLOCK_BYTES];
    (0..BLOCKS).any(|piece| {
        let copied = reader.arena.copy(piece, &mut found, false);
        copied.is_some() && found == content(index)
    })
}

async fn told(asked: Asked) -> Result<String, Untold> {
    let told = tokio::time::timeout(PATIENCE, asked).await;
    told.expect("whoever asks is told").expect("no panic")
}

async fn why(asked: Asked) -> String {
    told(asked)
        .await
        .expect_err("it is not handed over")
        .to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_read_while_it_is_computed() {
    let source = daemon(None, None).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    let asked = asks(&source, "o-01").await;
    let opened = open_as(&mut prefill, "o-01", "r", 10);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!asked.is_finished(), "its turn has not come");
    prefill.publish("r", 0);
    let parameters: Value = serde_json::from_str(&told(asked).await.expect("told")).expect("JSON");
    let expected = json!({"do_remote_prefill": true, "do_remote_decode": false, "baton": opened["descriptor"]});
    assert_eq!(parameters, expected, "as the engine's answer has it");

    decode.scheduler.say(&json!({"type": "take", "request": "r", "tokens": tokens(10), "salt": "", "descriptor": parameters["baton"]}));
    decode
        .worker
        .say(&json!({"type": "collect", "request": "r"}));
    until("the first block has come", || arrived(&decode, 0)).await;
    prefill.publish("r", 1);
    prefill.publish("r", 2);
    prefill.worker.say(&json!({"type": "seal", "request": "r"}));
    let loaded = decode.worker.hear();
    assert_eq!(loaded["type"], "loaded", "{loaded}");
    let received = target.told.taken.lock()[0];
    assert!(received.early_blocks >= 1, "{received:?}");
    until("nothing is left to hold", || {
        source.pool.counts().leased == 0
    })
    .await;
    assert_eq!(source.operations.kept(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_of_one_block_and_one_that_is_there_already_are_told_of_with_their_seal() {
    let source = daemon(None, None).await;
    let mut prefill = engine(&source, "p").await;
    for (operation, tokens) in [("first", 8), ("again", 8), ("short", 3)] {
        let asked = asks(&source, operation).await;
        let opened = open_as(&mut prefill, operation, operation, tokens);
        let first = opened["firstBlock"].as_u64().expect("a number") as u32;
        if operation != "short" {
            assert_eq!(first, if operation == "again" { 2 } else { 0 }, "{opened}");
        }
        for index in first..tokens.div_ceil(BLOCK_SIZE as u32) {
            prefill.publish(operation, index);
        }
        prefill
            .worker
            .say(&json!({"type": "seal", "request": operation}));
        told(asked).await.expect("told");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_asks_hears_at_once_that_a_prompt_is_not_handed_over() {
    let source = daemon(None, None).await;
    let mut prefill = engine(&source, "p").await;
    let asked = asks(&source, "refused").await;
    let refused = open_as(
        &mut prefill,
        "refused",
        "refused",
        16 * BLOCK_SIZE as u32 + 1,
    );
    assert_eq!(refused["type"], "refused", "{refused}");
    assert!(why(asked).await.contains("17 blocks"));

    let asked = asks(&source, "cancelled").await;
    open_as(&mut prefill, "cancelled", "cancelled", 10);
    prefill
        .scheduler
        .say(&json!({"type": "cancel", "request": "cancelled"}));
    assert!(why(asked).await.contains("given the prompt up"));

    let asked = asks(&source, "disordered").await;
    open_as(&mut prefill, "disordered", "disordered", 10);
    prefill.publish("disordered", 1);
    assert!(why(asked).await.contains("0 was due"));

    let asked = asks(&source, "reset").await;
    open_as(&mut prefill, "reset", "reset", 10);
    prefill.scheduler.say(&json!({"type": "reset"}));
    assert_eq!(why(asked).await, "the engine has cleared its cache");

    let (opened, on_its_way) = (
        asks(&source, "opened").await,
        asks(&source, "on its way").await,
    );
    open_as(&mut prefill, "opened", "opened", 10);
    drop(prefill);
    for asked in [opened, on_its_way] {
        assert_eq!(why(asked).await, "the engine is gone");
    }
    assert_eq!(source.operations.kept(), 0);
}

/// The prompt that is computed goes on, and whoever asks for it is told of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_is_opened_twice_is_told_of_all_the_same() {
    let source = daemon(None, None).await;
    let mut prefill = engine(&source, "p").await;
    let asked = asks(&source, "o-01").await;
    let opened = open_as(&mut prefill, "o-01", "r", 10);
    assert_eq!(opened["type"], "opened", "{opened}");
    let again = open_as(&mut prefill, "o-01", "r", 10);
    assert_eq!(again["type"], "refused", "{again}");
    prefill.publish("r", 0);
    let parameters: Value = serde_json::from_str(&told(asked).await.expect("told")).expect("JSON");
    assert_eq!(parameters["baton"], opened["descriptor"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_stops_leaves_nobody_waiting() {
    let source = daemon(None, None).await;
    let asked = asks(&source, "o-01").await;
    source.stop.cancel();
    assert!(why(asked).await.contains("stops"));
}

/// What is begun and then given up: the engine that waits for it computes the prompt itself, and need not wait for any limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_waits_for_more_is_freed_as_soon_as_no_more_will_come() {
    let source = daemon(None, None).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut decode = engine(&target, "d").await;
    let mut prefill = engine(&source, "p").await;
    for end in ["cancel", "reset", "gone"] {
        let opened = open_as(&mut prefill, end, end, 10);
        // The first block of the one that was cancelled is found again.
        prefill.publish(end, opened["firstBlock"].as_u64().expect("a number") as u32);
        decode.scheduler.say(&json!({"type": "take", "request": end, "tokens": tokens(10), "salt": "", "descriptor": opened["descriptor"]}));
        decode
            .worker
            .say(&json!({"type": "collect", "request": end}));
        until("it reads", || source.pool.lease_counts().claimed == 1).await;
        match end {
            "cancel" => prefill
                .scheduler
                .say(&json!({"type": "cancel", "request": end})),
            "reset" => prefill.scheduler.say(&json!({"type": "reset"})),
            _ => prefill
                .worker
                .0
                .shutdown(std::net::Shutdown::Both)
                .expect("open"),
        }
        let began = std::time::Instant::now();
        let failed = decode.worker.hear();
        assert_eq!(
            (&failed["type"], &failed["request"]),
            (&json!("failed"), &json!(end))
        );
        assert!(
            began.elapsed() < Duration::from_secs(5),
            "{end}: {:?}",
            began.elapsed()
        );
        until("its blocks are free", || target.pool.counts().active == 0).await;
        // Which says nothing of the way between the two.
        let causes = std::mem::take(&mut *target.told.failed.lock());
        assert_eq!(causes, [HandoffFailure::LeaseGone], "{end}");
    }
}

/// A plug-in gives up what no word comes of.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_engine_hears_that_what_it_waits_for_is_still_on_its_way() {
    let source = daemon(None, None).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    let descriptor = open_as(&mut prefill, "o", "r", 10)["descriptor"].clone();
    decode.scheduler.say(&json!({"type": "take", "request": "r", "tokens": tokens(10), "salt": "", "descriptor": descriptor}));
    decode
        .worker
        .say(&json!({"type": "collect", "request": "r"}));
    assert!(COMING < PATIENCE);
    let coming = decode.worker.hear_anything();
    assert_eq!(coming, json!({"type": "coming", "requests": ["r"]}));
    for index in 0..3 {
        prefill.publish("r", index);
    }
    prefill.worker.say(&json!({"type": "seal", "request": "r"}));
    let loaded = decode.worker.hear();
    assert_eq!(loaded["type"], "loaded", "{loaded}");
}

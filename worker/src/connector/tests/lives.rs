//! How long what is held for a hand-off is held: by whom it is kept, and what gives it back at once.

use std::net::Shutdown;

use super::*;
use crate::kv::clock::ManualClock;
use crate::kv::{CacheScope, Reserve};

/// Leases under way are extended each second: some of them, on a machine that is busy with others too.
const EXTENDED: Duration = Duration::from_secs(4);

async fn leases_end(source: &Daemon) {
    until("its owner hears of it before the lease expires", || {
        source.pool.lease_counts().total() == 0
    })
    .await;
}

/// Asks for it, and does not wait for the answer.
fn ask_for(decode: &mut Engine, request: &str, count: u32, descriptor: &Value) {
    decode.scheduler.say(&json!({"type": "take", "request": request, "tokens": tokens(count), "salt": "", "descriptor": descriptor}));
    decode
        .worker
        .say(&json!({"type": "collect", "request": request}));
}

/// A daemon whose pool's clock stands until it is set.
async fn by_hand() -> (Daemon, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::default());
    let source = daemon_by(Arc::clone(&clock) as Arc<dyn Clock>, None, None).await;
    (source, clock)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_waits_and_is_computed_for_longer_than_its_lease_is_handed_over() {
    let (source, clock) = by_hand().await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    let opened = prefill.open("r", &tokens(10));
    for index in 0..3 {
        clock.advance(LEASE - 1000);
        tokio::time::sleep(EXTENDED).await;
        assert_eq!(source.pool.reap().leases, 0, "before block {index}");
        prefill.publish("r", index);
    }
    prefill.worker.say(&json!({"type": "seal", "request": "r"}));
    let loaded = decode.take("r", 10, &opened["descriptor"]);
    assert_eq!(loaded["type"], "loaded", "{loaded}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_of_which_no_more_blocks_come_is_given_up() {
    let (source, clock) = by_hand().await;
    let mut prefill = engine(&source, "p").await;
    prefill.open("r", &tokens(10));
    prefill.publish("r", 0);
    clock.advance(LEASE - 1000);
    tokio::time::sleep(EXTENDED).await;
    assert_eq!(source.pool.lease_counts().open, 1, "its copies are slow");
    // Extended a second ago: nothing but the silence ends it.
    clock.advance(1001);
    leases_end(&source).await;
    until("nothing is held for it", || {
        source.pool.counts().active == 0
    })
    .await;
    // What comes all the same is nobody's.
    prefill.publish("r", 1);
    assert_eq!(prefill.open("next", &tokens(10))["type"], "opened");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn from_its_seal_a_lease_runs_its_whole_duration_and_no_longer() {
    let (source, clock) = by_hand().await;
    let mut prefill = engine(&source, "p").await;
    prefill.open("r", &tokens(4));
    prefill.publish("r", 0);
    clock.advance(LEASE - 1000);
    prefill.worker.say(&json!({"type": "seal", "request": "r"}));
    until("it is sealed", || source.pool.lease_counts().sealed == 1).await;
    clock.advance(LEASE - 1);
    assert_eq!(source.pool.reap().leases, 0);
    tokio::time::sleep(EXTENDED).await;
    clock.advance(1);
    assert_eq!(source.pool.reap().leases, 1, "only its reader keeps it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reading_that_is_cancelled_gives_its_lease_back() {
    let source = daemon(None, None).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    let opened = prefill.open("r", &tokens(10));
    decode.scheduler.say(&json!({"type": "take", "request": "r", "tokens": tokens(10), "salt": "", "descriptor": opened["descriptor"]}));
    until("it is read", || target.pool.counts().active == 3).await;
    decode
        .scheduler
        .say(&json!({"type": "cancel", "request": "r"}));
    leases_end(&source).await;
    until("its blocks are free", || target.pool.counts().free == 16).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_goes_gives_the_leases_that_it_reads_back() {
    let source = daemon(None, None).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    let opened = prefill.open("r", &tokens(10));
    ask_for(&mut decode, "r", 10, &opened["descriptor"]);
    until("it is read", || target.pool.counts().active == 3).await;
    drop(decode);
    leases_end(&source).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_stops_gives_the_leases_that_it_reads_back() {
    let source = daemon(None, None).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    let opened = prefill.open("r", &tokens(10));
    ask_for(&mut decode, "r", 10, &opened["descriptor"]);
    until("it is read", || target.pool.counts().active == 3).await;
    target.stop.cancel();
    leases_end(&source).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_off_that_there_is_no_room_for_gives_its_lease_back() {
    let source = daemon(None, None).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    let reserve = Reserve {
        tokens: &tokens(14 * BLOCK_SIZE as u32),
        scope: &CacheScope::salted("other"),
        room: 0,
        leave_last: false,
    };
    let held = target.pool.reserve(&reserve).expect("room");
    let descriptor = prefill.hand_over("r", 10);
    let failed = decode.take("r", 10, &descriptor);
    assert!(
        failed["why"].as_str().expect("words").contains("3 blocks"),
        "{failed}"
    );
    leases_end(&source).await;
    target.pool.release(held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_does_not_read_what_it_waits_for_is_not_served_any_longer() {
    let target = daemon(None, None).await;
    let mut decode = engine(&target, "d").await;
    until("both halves are served", || *target.told.joined.lock() == 1).await;
    decode.worker.0.shutdown(Shutdown::Read).expect("open");
    let mut asked = 0;
    // Each is answered after seconds, when nobody has said what it is: not as it is asked.
    let gone = async {
        while *target.told.gone.lock() == 0 {
            asked += 1;
            decode
                .worker
                .say(&json!({"type": "collect", "request": format!("nobody's {asked}")}));
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone)
        .await
        .expect("it is given up");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_is_handed_over_twice_is_refused_in_words_of_its_own() {
    let source = daemon(None, None).await;
    let mut prefill = engine(&source, "p").await;
    assert_eq!(prefill.open("r", &tokens(10))["type"], "opened");
    let again = prefill.open("r", &tokens(10));
    assert_eq!(again["type"], "refused", "{again}");
    let why = again["why"].as_str().expect("words");
    assert!(why.contains("handed over already"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cleared_cache_takes_what_was_handed_over_with_it() {
    let source = daemon(None, None).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    let sealed = prefill.hand_over("sealed", 10);
    until("it is sealed", || source.pool.lease_counts().sealed == 1).await;
    assert_eq!(prefill.open("begun", &tokens(12))["firstBlock"], 2);
    prefill.scheduler.say(&json!({"type": "reset"}));
    until("nothing is left", || source.pool.counts().free == 16).await;
    // What was on its way meanwhile is nobody's.
    prefill.publish("begun", 2);
    prefill
        .worker
        .say(&json!({"type": "seal", "request": "begun"}));
    let failed = decode.take("late", 10, &sealed);
    let why = failed["why"].as_str().expect("words");
    assert!(why.contains("lease-gone"), "{why}");
    let descriptor = prefill.hand_over("next", 10);
    assert_eq!(decode.take("next", 10, &descriptor)["type"], "loaded");
    assert_eq!(
        *source.told.gone.lock(),
        0,
        "the engine is served all along"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cleared_cache_takes_what_was_taken_with_it_but_for_what_is_being_copied() {
    let source = daemon(None, None).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    let descriptor = prefill.hand_over("told", 10);
    assert_eq!(decode.take("told", 10, &descriptor)["type"], "loaded");
    // Two blocks more than the one before, which is found.
    let opened = prefill.open("read", &tokens(18));
    ask_for(&mut decode, "read", 18, &opened["descriptor"]);
    until("it is read", || target.pool.counts().active == 6).await;
    decode.scheduler.say(&json!({"type": "reset"}));
    let failed = decode.worker.hear();
    assert_eq!(failed["request"], "read", "{failed}");
    let why = failed["why"].as_str().expect("words");
    assert!(why.contains("cleared its cache"), "{why}");
    leases_end(&source).await;
    until("its blocks are free", || target.pool.counts().free == 13).await;
    assert_eq!(target.pool.counts().active, 3, "they are being copied");
    decode
        .worker
        .say(&json!({"type": "copied", "request": "told"}));
    until("nothing is found any more", || {
        target.pool.counts().free == 16
    })
    .await;
}

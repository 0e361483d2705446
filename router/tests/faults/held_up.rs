//! What is played again, and what is not.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use futures::FutureExt;

use crate::steady::steady;

/// How long each play holds its thread up.
const HELD_UP: Duration = Duration::from_millis(20);

/// Plays what fails so often: how often it was played, and whether it passed in the end.
async fn plays(shortest: Duration, failures: u32) -> (u32, bool) {
    let plays = AtomicU32::new(0);
    let played = steady(shortest, async || {
        thread::sleep(HELD_UP);
        let before = plays.fetch_add(1, Ordering::Relaxed);
        assert!(before >= failures, "it fails {failures} times");
    });
    let passed = AssertUnwindSafe(played).catch_unwind().await.is_ok();
    (plays.into_inner(), passed)
}

#[tokio::test]
async fn only_what_fails_while_it_is_held_up_is_played_again_and_not_for_ever() {
    let (strict, lax) = (2 * HELD_UP, Duration::from_secs(86_400));
    for (shortest, failures, expected) in [
        (strict, 0, (1, true)),
        (strict, 2, (3, true)),
        (strict, 9, (5, false)),
        (lax, 0, (1, true)),
        (lax, 1, (1, false)),
    ] {
        let found = plays(shortest, failures).await;
        assert_eq!(found, expected, "{failures} failures under {shortest:?}");
    }
}

//! Plays that have limits in real time, on a machine that may hold a thread up for seconds: what then is late says nothing of the router.

use std::panic::{AssertUnwindSafe, resume_unwind};
use std::thread;
use std::time::Duration;

use futures::FutureExt;
use tokio::time::{Instant, sleep};

/// Whoever is held up in each of so many plays hears that it fails.
const PLAYS: u32 = 5;
/// How often a play's thread is looked for.
const TICK: Duration = Duration::from_millis(20);

/// Plays it. If it fails, and its thread was held up meanwhile for more than a quarter of `shortest`, the shortest limit that it has to
/// keep, it is played again. A failure without that is the test's.
pub(crate) async fn steady(shortest: Duration, play: impl AsyncFn()) {
    for number in 1..=PLAYS {
        let (ended, held_up) = watched(Box::pin(play())).await;
        let Err(why) = ended else {
            return;
        };
        if held_up <= shortest / 4 || number == PLAYS {
            resume_unwind(why);
        }
        again(number, held_up);
    }
}

/// How a play has ended, and the longest that nobody looked at the clock.
async fn watched(play: impl Future<Output = ()>) -> (thread::Result<()>, Duration) {
    let play = AssertUnwindSafe(play).catch_unwind();
    tokio::pin!(play);
    let mut longest = Duration::ZERO;
    let mut looked = Instant::now();
    loop {
        let ended = tokio::select! {
            ended = &mut play => Some(ended),
            () = sleep(TICK) => None,
        };
        longest = longest.max(looked.elapsed());
        looked = Instant::now();
        if let Some(ended) = ended {
            return (ended, longest);
        }
    }
}

#[allow(
    clippy::print_stderr,
    reason = "a test that passes at its second play says so"
)]
fn again(number: u32, held_up: Duration) {
    eprintln!("play {number} was held up for {held_up:?}: it is played again");
}

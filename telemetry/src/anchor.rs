//! Wall time for spans: read once, then advanced by the monotonic clock, so that times never go back.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// Between two looks at one clock: what lies within it is the other's error, and that is what spans of two processes are apart.
const CLOSE: Duration = Duration::from_micros(100);
/// A thread is rarely held up so often. What came closest is taken then.
const LOOKS: usize = 20;

/// Where a process's time is anchored.
#[derive(Clone, Copy, Debug)]
pub struct Anchor {
    /// Microseconds since the Unix epoch.
    wall: u64,
    instant: Instant,
}

impl Anchor {
    /// Anchors now.
    pub fn start() -> Self {
        let (mut anchor, mut apart) = Self::look();
        for _ in 1..LOOKS {
            if apart <= CLOSE {
                break;
            }
            let next = Self::look();
            if next.1 < apart {
                (anchor, apart) = next;
            }
        }
        anchor
    }

    /// Both clocks once, and what the thread took in between.
    fn look() -> (Self, Duration) {
        let instant = Instant::now();
        let since_epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let wall = u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX);
        (Self { wall, instant }, instant.elapsed())
    }

    /// Microseconds since the Unix epoch.
    pub fn now(&self) -> u64 {
        let elapsed = u64::try_from(self.instant.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.wall.saturating_add(elapsed)
    }
}

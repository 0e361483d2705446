//! Wall time for spans: read once, then advanced by the monotonic clock, so that times never go back.

use std::time::{SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

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
        let since_epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            wall: u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX),
            instant: Instant::now(),
        }
    }

    /// Microseconds since the Unix epoch.
    pub fn now(&self) -> u64 {
        let elapsed = u64::try_from(self.instant.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.wall.saturating_add(elapsed)
    }
}

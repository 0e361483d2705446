//! Time of one process in milliseconds, as an argument: real, or moved by hand in tests and simulation.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::time::Instant;

/// A clock that never goes back. Its zero means nothing; never compare clocks of two processes.
pub trait Clock: Debug + Send + Sync {
    /// Milliseconds since the clock's own zero.
    fn now(&self) -> u64;
}

/// The machine's monotonic clock, or that of a paused runtime; zero is when it was made.
#[derive(Debug)]
pub struct MonotonicClock(Instant);

impl MonotonicClock {
    /// Starts at zero.
    pub fn start() -> Self {
        Self(Instant::now())
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// Stands still until it is moved.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// Moves on by `milliseconds`.
    pub fn advance(&self, milliseconds: u64) {
        self.0.fetch_add(milliseconds, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

//! The claim of this process to lead, as those who write ask for it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// Nobody leads yet.
const NEVER: u64 = 0;

/// Whether this process leads, and until when. A process that slept over its lease sees at its next look that it is over.
#[derive(Debug)]
pub struct Claim {
    start: Instant,
    /// Milliseconds after `start`.
    until: AtomicU64,
    leading: watch::Sender<bool>,
}

impl Default for Claim {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            until: AtomicU64::new(NEVER),
            leading: watch::Sender::new(false),
        }
    }
}

impl Claim {
    /// The clock that the election runs by.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// The claim holds until `until` of [`Claim::now`].
    pub(crate) fn extend(&self, until: Duration) {
        let until = u64::try_from(until.as_millis()).unwrap_or(u64::MAX);
        self.until.store(until, Ordering::Release);
        self.leading.send_if_modified(|leading| {
            let first = !*leading;
            *leading = true;
            first
        });
    }

    pub(crate) fn end(&self) {
        self.until.store(NEVER, Ordering::Release);
        self.leading.send_replace(false);
    }

    /// May this process write now?
    #[must_use]
    pub fn holds(&self) -> bool {
        let now = u64::try_from(self.now().as_millis()).unwrap_or(u64::MAX);
        now < self.until.load(Ordering::Acquire)
    }

    /// Returns when this process leads for the first time.
    pub async fn begun(&self) {
        // The sender lives in `self`.
        let _ = self.leading.subscribe().wait_for(|leading| *leading).await;
    }
}

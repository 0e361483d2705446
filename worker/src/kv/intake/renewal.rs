//! Keeping a claimed lease alive while its blocks are read, on the reader's own timer.

use std::time::Duration;

use baton_protocol::failure::HandoffFailure;
use baton_protocol::ids::{Generation, LeaseId, TransferId};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::client::LeaseClient;
use super::{Doubt, RETRY_PAUSE};
use crate::kv::lease::Granted;
use crate::kv::lease::window::ReadWindow;

/// A granted claim. Its times count from when it was made.
pub(super) struct Renewal<'a> {
    lease: LeaseId,
    generation: Generation,
    transfer: &'a TransferId,
    zero: Instant,
    window: Mutex<ReadWindow>,
}

impl<'a> Renewal<'a> {
    pub(super) fn new(
        lease: LeaseId,
        generation: Generation,
        transfer: &'a TransferId,
        asked: Instant,
        granted: Granted,
    ) -> Self {
        Self {
            lease,
            generation,
            transfer,
            zero: asked,
            window: Mutex::new(ReadWindow::new(0, granted.for_milliseconds)),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.zero.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Is reading legal now?
    pub(super) fn may_read(&self) -> bool {
        self.window.lock().is_open(self.now())
    }

    /// Renews for as long as it is polled; ends only when reading is no longer legal.
    pub(super) async fn keep(&self, client: &dyn LeaseClient) -> Doubt {
        let mut due = self.window.lock().renew_at();
        loop {
            let until = self.window.lock().reads_until();
            tokio::time::sleep_until(self.zero + Duration::from_millis(due.min(until))).await;
            if !self.may_read() {
                return Doubt::new(
                    HandoffFailure::LeaseGone,
                    "the lease could not be renewed in time",
                );
            }
            let asked_at = self.now();
            let answer = tokio::select! {
                answer = client.renew(self.lease, self.generation, self.transfer) => answer,
                () = tokio::time::sleep_until(self.zero + Duration::from_millis(until)) => continue,
            };
            match answer {
                Ok(Ok(granted)) => {
                    let window = ReadWindow::new(asked_at, granted.for_milliseconds);
                    *self.window.lock() = window;
                    due = window.renew_at();
                }
                Ok(Err(gone)) => {
                    return Doubt::new(
                        HandoffFailure::LeaseGone,
                        format!("the owner refused to renew: {gone}"),
                    );
                }
                // The owner did not answer; the next question comes before the window closes.
                Err(_) => due = self.now() + RETRY_PAUSE.as_millis() as u64,
            }
        }
    }
}

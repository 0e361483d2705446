//! How long to wait before a child that ended is started again.

use std::time::Duration;

/// First wait.
const FIRST: Duration = Duration::from_millis(500);
/// Longest wait.
const LONGEST: Duration = Duration::from_secs(30);
/// A child that ran this long was well: the next wait is the first one again.
const WELL_AFTER: Duration = Duration::from_secs(60);

/// Doubles from half a second to half a minute.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// The wait after a child that ran for `ran`.
    pub(crate) fn after(&mut self, ran: Duration) -> Duration {
        if ran >= WELL_AFTER {
            self.failures = 0;
        }
        let wait = FIRST
            .saturating_mul(1 << self.failures.min(16))
            .min(LONGEST);
        self.failures += 1;
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest_and_start_anew_after_a_good_run() {
        let mut backoff = Backoff::default();
        let short = Duration::from_secs(1);
        let waits: Vec<u128> = (0..8).map(|_| backoff.after(short).as_millis()).collect();
        assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        assert_eq!(backoff.after(Duration::from_secs(61)).as_millis(), 500);
        assert_eq!(backoff.after(short).as_millis(), 1000);
    }
}

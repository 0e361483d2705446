//! How long an engine keeps the blocks of a prompt for another one.

use std::time::Duration;

use baton_placement::lease;

use crate::clock::Moment;

/// The blocks that a prefill worker has answered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    until: Moment,
    guard: Duration,
}

impl Lease {
    /// `answered`: when the first byte of the answer was here. The engine counts from the end of its prefill, which is a moment
    /// before; the guard ([`lease::GUARD`]) holds that moment too.
    pub fn new(answered: Moment, length: Duration) -> Self {
        Self {
            until: answered.plus(length),
            guard: length / lease::GUARD,
        }
    }

    /// Whether a decode leg that is sent now finds the blocks, when its worker is expected to look at it after `wait`.
    pub fn allows(&self, now: Moment, wait: Duration) -> bool {
        now.plus(wait).plus(self.guard) < self.until
    }

    /// What is left of it at most.
    pub fn left(&self, now: Moment) -> Duration {
        self.until.since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_fetched_in_the_last_part_of_a_lease() {
        let second = |seconds: u64| Moment(1_000_000 * (100 + seconds));
        let lease = Lease::new(second(0), Duration::from_secs(30));
        let none = Duration::ZERO;
        assert!(lease.allows(second(0), none) && lease.allows(second(24), none));
        assert!(!lease.allows(second(25), none) && !lease.allows(second(99), none));
        // A worker with a line of 20 s before it.
        assert!(lease.allows(second(4), Duration::from_secs(20)));
        assert!(!lease.allows(second(5), Duration::from_secs(20)));
        assert_eq!(lease.left(second(31)), none);
        assert!(!Lease::new(second(0), none).allows(second(0), none));
    }
}

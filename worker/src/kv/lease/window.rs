//! The reader's side of a lease's time: until when it may read, and when it must renew.

/// A grant, counted on the reader's own clock from the moment it *asked*: the owner's count began later, so it ends later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadWindow {
    asked_at: u64,
    granted_for: u64,
}

impl ReadWindow {
    /// `asked_at` and all later times are milliseconds of the reader's monotonic clock.
    pub fn new(asked_at: u64, granted_for: u64) -> Self {
        Self {
            asked_at,
            granted_for,
        }
    }

    /// Milliseconds by which the reader stops before the owner: an eighth of the grant, at least 20 ms, at most all of it. Covers
    /// clocks that run at different speed and a read that is on the wire at the end.
    pub fn guard(self) -> u64 {
        (self.granted_for / 8).max(20).min(self.granted_for)
    }

    /// Reading is legal before this time.
    pub fn reads_until(self) -> u64 {
        self.asked_at
            .saturating_add(self.granted_for - self.guard())
    }

    /// Renew at this time: a third of the grant leaves two more tries before the guard band.
    pub fn renew_at(self) -> u64 {
        self.asked_at.saturating_add(self.granted_for / 3)
    }

    /// May a read begin or go on?
    pub fn is_open(self, now: u64) -> bool {
        now < self.reads_until()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_reader_stops_before_the_owner_ends(asked in 0..1_u64 << 40, delay in 0..10_000_u64, granted in 0..1_u64 << 32) {
            let window = ReadWindow::new(asked, granted);
            // The owner answered `delay` after the question was asked: its own end is at least this.
            let owner_ends = asked + delay + granted;
            prop_assert!(window.reads_until() <= owner_ends - window.guard());
            prop_assert!(window.reads_until() < owner_ends || granted == 0);
            prop_assert!(window.renew_at() <= window.reads_until() || granted < 60);
            prop_assert!(!window.is_open(window.reads_until()));
        }

        /// `speed`: milliseconds that the reader's clock counts in 1000 of the owner's.
        #[test]
        fn a_clock_slow_by_a_tenth_or_fast_at_will_does_not_outlive_the_owner(
            delay in 0..10_000_u64, granted in 200..1_u64 << 32, speed in 900..4000_u64,
        ) {
            let window = ReadWindow::new(0, granted);
            // On the owner's clock, from the question on, and rounded up.
            let reader_stops = (window.reads_until() * 1000).div_ceil(speed);
            let owner_ends = delay + granted;
            prop_assert!(reader_stops <= owner_ends, "{reader_stops} > {owner_ends}");
        }
    }
}

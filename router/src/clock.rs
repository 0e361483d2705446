//! One clock for the whole process: wall time at its start, advanced by the monotonic clock (of a paused runtime: its own), so
//! that times never go back.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// A point in time, in microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub u64);

impl Moment {
    pub fn plus(self, duration: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)),
        )
    }

    /// Zero when `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }

    /// Milliseconds since `earlier`; zero when that is later.
    pub fn milliseconds_since(self, earlier: Self) -> f64 {
        self.0.saturating_sub(earlier.0) as f64 / 1_000.0
    }

    /// Milliseconds since the Unix epoch.
    pub fn milliseconds(self) -> f64 {
        self.0 as f64 / 1_000.0
    }

    /// Whole seconds since the Unix epoch.
    pub fn seconds(self) -> u64 {
        self.0 / 1_000_000
    }

    /// For calendars; the epoch for a time beyond them.
    pub fn timestamp(self) -> jiff::Timestamp {
        let micros = i64::try_from(self.0).unwrap_or(i64::MAX);
        jiff::Timestamp::from_microsecond(micros).unwrap_or_default()
    }

    /// RFC 3339 with microseconds, in UTC.
    pub fn rfc3339(self) -> String {
        format!("{:.6}", self.timestamp())
    }
}

/// Where the process's time is anchored.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    wall: Moment,
    instant: Instant,
}

impl Clock {
    /// Anchors now. Later steps of the wall clock do not show.
    pub fn start() -> Self {
        let since_epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self::anchored(Moment::default().plus(since_epoch))
    }

    /// It is `wall` now.
    pub fn anchored(wall: Moment) -> Self {
        Self {
            wall,
            instant: Instant::now(),
        }
    }

    pub fn now(&self) -> Moment {
        self.at(Instant::now())
    }

    pub fn at(&self, instant: Instant) -> Moment {
        self.wall
            .plus(instant.saturating_duration_since(self.instant))
    }

    /// For timers.
    pub fn instant(&self, moment: Moment) -> Instant {
        self.instant + moment.since(self.wall)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_with_microseconds() {
        assert_eq!(
            Moment(1_764_438_300_000_042).rfc3339(),
            "2025-11-29T17:45:00.000042Z"
        );
        assert_eq!(Moment(1_764_438_300_000_000).rfc3339().len(), 27);
    }

    #[test]
    fn a_moment_becomes_the_instant_that_it_came_from() {
        let clock = Clock::start();
        let instant = Instant::now() + Duration::from_millis(1_500);
        let back = clock.instant(clock.at(instant));
        assert!(instant.saturating_duration_since(back) < Duration::from_micros(2));
    }
}

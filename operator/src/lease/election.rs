//! The rules of the election: given what the `Lease` says and for how long it has said so, acquire, renew or wait.

use std::time::Duration;

/// How long things take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// For so long a record must not change before another candidate takes over.
    pub lease: Duration,
    /// The holder renews this often.
    pub renew: Duration,
    /// The holder that could not renew for so long stops. The difference to `lease` covers clocks of different pace and a
    /// write that is under way.
    pub give_up: Duration,
    /// Between two looks of a candidate that waits, and two tries of a holder whose renewal failed.
    pub retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(30),
            renew: Duration::from_secs(10),
            give_up: Duration::from_secs(20),
            retry: Duration::from_secs(2),
        }
    }
}

/// What a `Lease` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Empty after a release.
    pub holder: String,
    /// As its holder wrote it; a candidate waits for so long.
    pub lease: Duration,
    /// Holder's wall clock in microseconds. Compared for being the same, never with a clock.
    pub renewed: i64,
    pub acquired: i64,
    pub transitions: i32,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Write this candidate into the record, unless it changes meanwhile.
    Acquire,
    /// Write a new time of renewal.
    Renew,
    /// Somebody else holds it.
    Wait,
}

/// `unchanged`: for how long, by this candidate's clock, the record has been seen to say just this; a record seen for the
/// first time has been so for no time at all.
#[must_use]
pub fn evaluate(record: Option<&Record>, identity: &str, unchanged: Duration) -> Decision {
    match record {
        None => Decision::Acquire,
        Some(record) if record.holder == identity => Decision::Renew,
        Some(record) if record.holder.is_empty() => Decision::Acquire,
        Some(record) if unchanged > record.lease => Decision::Acquire,
        Some(_) => Decision::Wait,
    }
}

/// One candidate: what it has seen and whether it leads. Times are those of its own monotonic clock.
#[derive(Clone, Debug)]
pub struct Election {
    identity: String,
    timing: Timing,
    /// The record as last read, and when it was first read like that.
    seen: Option<(Record, Duration)>,
    held_until: Option<Duration>,
}

impl Election {
    /// `identity` names one start of a process: no two candidates may share it, not even one after the other.
    #[must_use]
    pub fn new(identity: String, timing: Timing) -> Self {
        Self {
            identity,
            timing,
            seen: None,
            held_until: None,
        }
    }

    #[must_use]
    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// What follows from the record that has just been read; the read was begun at `asked`.
    pub fn read(&mut self, record: Option<&Record>, asked: Duration, now: Duration) -> Decision {
        let since = match (&self.seen, record) {
            (Some((seen, since)), Some(record)) if seen == record => *since,
            // It may have changed at any moment up to now: the wait begins now.
            _ => now,
        };
        self.seen = record.map(|record| (record.clone(), since));
        // It was like that when the read was begun, whatever has happened since.
        evaluate(record, &self.identity, asked.saturating_sub(since))
    }

    /// The record to write for `decision`; `wall`: the wall clock in microseconds.
    #[must_use]
    pub fn record(&self, decision: Decision, wall: i64) -> Record {
        let before = self
            .seen
            .as_ref()
            .map(|(record, _)| record.clone())
            .unwrap_or_default();
        let renewal = decision == Decision::Renew;
        Record {
            holder: self.identity.clone(),
            lease: self.timing.lease,
            renewed: wall,
            acquired: if renewal { before.acquired } else { wall },
            transitions: before.transitions.saturating_add(i32::from(!renewal)),
        }
    }

    /// The record that others may take at once.
    #[must_use]
    pub fn released(&self, wall: i64) -> Record {
        Record {
            holder: String::new(),
            renewed: wall,
            ..self.record(Decision::Renew, wall)
        }
    }

    /// A write of this candidate's record succeeded. It counts from when it was sent: others may have seen it right then.
    pub fn written(&mut self, record: Record, sent: Duration) {
        self.held_until = Some(sent + self.timing.give_up);
        self.seen = Some((record, sent));
    }

    /// Until when this candidate leads, if it does.
    #[must_use]
    pub fn held_until(&self) -> Option<Duration> {
        self.held_until
    }

    #[must_use]
    pub fn holds(&self, now: Duration) -> bool {
        self.held_until.is_some_and(|until| now < until)
    }

    /// It led and does not any more. A renewal that succeeds late undoes this: it is refused if anybody has written in between.
    #[must_use]
    pub fn lost(&self, now: Duration) -> bool {
        self.held_until.is_some_and(|until| now >= until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(holder: &str, renewed: i64) -> Record {
        Record {
            holder: holder.into(),
            lease: Duration::from_secs(30),
            renewed,
            acquired: 1,
            transitions: 3,
        }
    }

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_record_is_taken_when_free_released_or_unchanged_for_longer_than_its_lease() {
        assert_eq!(evaluate(None, "a", at(0)), Decision::Acquire);
        assert_eq!(
            evaluate(Some(&record("", 1)), "a", at(0)),
            Decision::Acquire
        );
        let other = record("b", 1);
        assert_eq!(evaluate(Some(&other), "a", at(30)), Decision::Wait);
        assert_eq!(evaluate(Some(&other), "a", at(31)), Decision::Acquire);
        assert_eq!(evaluate(Some(&other), "b", at(999)), Decision::Renew);
    }

    #[test]
    fn a_renewal_that_is_seen_begins_the_wait_anew_whatever_time_it_names() {
        let mut a = Election::new("a".into(), Timing::default());
        // The other's clock is in the year 1970, or far ahead: neither makes its lease expired.
        assert_eq!(a.read(Some(&record("b", 0)), at(0), at(0)), Decision::Wait);
        assert_eq!(
            a.read(Some(&record("b", i64::MAX)), at(29), at(29)),
            Decision::Wait
        );
        assert_eq!(
            a.read(Some(&record("b", i64::MAX)), at(59), at(59)),
            Decision::Wait
        );
        assert_eq!(
            a.read(Some(&record("b", i64::MAX)), at(60), at(60)),
            Decision::Acquire
        );
    }

    #[test]
    fn leading_ends_before_the_lease_does_counted_from_when_the_write_was_sent() {
        let mut a = Election::new("a".into(), Timing::default());
        assert_eq!(a.read(None, at(4), at(5)), Decision::Acquire);
        let written = a.record(Decision::Acquire, 7);
        assert_eq!((written.transitions, written.acquired), (1, 7));
        a.written(written, at(5));
        assert!(a.holds(at(24)) && !a.lost(at(24)));
        assert!(!a.holds(at(25)) && a.lost(at(25)));
        assert_eq!(a.record(Decision::Renew, 9).transitions, 1);
        assert_eq!(a.record(Decision::Renew, 9).acquired, 7);
        assert_eq!(a.released(9).holder, "");
    }
}

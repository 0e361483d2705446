//! What the prefix cache gained and lost, as a numbered log that a watcher can resume from.

use std::collections::VecDeque;

use baton_protocol::hash::BlockHash;

/// One change of the prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheChange {
    /// These blocks can be hit from now on; parents come before children.
    Stored(Vec<BlockHash>),
    /// These blocks can no longer be hit.
    Removed(Vec<BlockHash>),
    /// Nothing can be hit any more.
    Cleared,
}

/// A change and its place in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheEvent {
    /// Dense: the event before has one less. The first event of a process is 1.
    pub sequence: u64,
    /// What changed.
    pub change: CacheChange,
}

/// Answer to "what happened after sequence n?".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventsSince {
    /// All of it, in order; empty when nothing happened.
    Events(Vec<CacheEvent>),
    /// The log no longer (or not yet) knows that place: take a snapshot.
    TooOld,
}

/// Hashes of one event at most: 64 KiB on the wire.
const LARGEST: usize = 4096;
/// And a share of the log, so that the newest event never drives out all others.
const SHARE: usize = 16;

/// The log. Keeps the newest events up to a bound on the hashes in them.
///
/// What happens between two looks of watchers is one event where it is of one kind: a prompt of a hundred blocks is one message to
/// each router, not a hundred. An event that somebody has seen never changes.
#[derive(Debug)]
pub(crate) struct EventLog {
    last: u64,
    /// The newest event that somebody has seen.
    seen: u64,
    ring: VecDeque<CacheEvent>,
    weight: usize,
    capacity: usize,
}

impl EventLog {
    /// `capacity` bounds the sum of hashes kept (an event without hashes counts as one).
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            last: 0,
            seen: 0,
            ring: VecDeque::new(),
            weight: 0,
            capacity,
        }
    }

    /// Sequence of the newest event; 0 before the first. It may still grow.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// The same for somebody who takes what it contains for known: it grows no more.
    pub(crate) fn see(&mut self) -> u64 {
        self.seen = self.last;
        self.last
    }

    pub(crate) fn push(&mut self, change: CacheChange) {
        let Some(change) = self.grow(change) else {
            return;
        };
        self.last += 1;
        self.weight += weight(&change);
        self.ring.push_back(CacheEvent {
            sequence: self.last,
            change,
        });
        while self.weight > self.capacity {
            let Some(oldest) = self.ring.pop_front() else {
                break;
            };
            self.weight -= weight(&oldest.change);
        }
    }

    /// Adds a change to the newest event, if that is of its kind, small, and seen by nobody; gives it back otherwise.
    fn grow(&mut self, change: CacheChange) -> Option<CacheChange> {
        let newest = self.ring.back_mut();
        let newest = newest.filter(|newest| newest.sequence > self.seen);
        let newest = newest.map(|newest| &mut newest.change);
        let ((Some(CacheChange::Stored(hashes)), CacheChange::Stored(more))
        | (Some(CacheChange::Removed(hashes)), CacheChange::Removed(more))) = (newest, &change)
        else {
            return Some(change);
        };
        if hashes.len() + more.len() > LARGEST.min(self.capacity / SHARE) {
            return Some(change);
        }
        // An event without hashes counts as one.
        self.weight += (hashes.len() + more.len()).max(1) - hashes.len().max(1);
        hashes.extend_from_slice(more);
        None
    }

    pub(crate) fn since(&mut self, sequence: u64) -> EventsSince {
        self.see();
        let first_kept = self
            .ring
            .front()
            .map_or(self.last + 1, |event| event.sequence);
        if sequence > self.last || sequence + 1 < first_kept {
            return EventsSince::TooOld;
        }
        let skip = (sequence + 1 - first_kept) as usize;
        EventsSince::Events(self.ring.iter().skip(skip).cloned().collect())
    }
}

fn weight(change: &CacheChange) -> usize {
    match change {
        CacheChange::Stored(hashes) | CacheChange::Removed(hashes) => hashes.len().max(1),
        CacheChange::Cleared => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(hash: u128) -> CacheChange {
        CacheChange::Stored(vec![BlockHash(hash)])
    }

    #[test]
    fn a_watcher_resumes_where_it_was() {
        let mut log = EventLog::new(100);
        assert_eq!(log.since(0), EventsSince::Events(vec![]));
        for hash in 1..=3 {
            log.push(stored(hash));
            log.see();
        }
        let EventsSince::Events(events) = log.since(1) else {
            panic!("the log has them all");
        };
        let sequences: Vec<_> = events.iter().map(|event| event.sequence).collect();
        assert_eq!(sequences, [2, 3]);
        assert_eq!(log.since(3), EventsSince::Events(vec![]));
    }

    #[test]
    fn changes_of_one_kind_are_one_event_until_somebody_looks() {
        let mut log = EventLog::new(100 * SHARE);
        let removed = |hash| CacheChange::Removed(vec![BlockHash(hash)]);
        for hash in 1..=3 {
            log.push(stored(hash));
        }
        assert_eq!(log.last(), 1);
        log.push(removed(1));
        log.push(removed(2));
        log.push(stored(4));
        let events = |log: &mut EventLog, sequence| match log.since(sequence) {
            EventsSince::Events(events) => events,
            EventsSince::TooOld => panic!("the log has them all"),
        };
        let all = events(&mut log, 0);
        let sizes: Vec<_> = all.iter().map(|event| weight(&event.change)).collect();
        assert_eq!(sizes, [3, 2, 1]);
        // The last of them has been seen.
        log.push(stored(5));
        assert_eq!(events(&mut log, 0)[..3], all);
        assert_eq!(events(&mut log, 3).len(), 1);
        // A snapshot is a look too.
        log.push(stored(6));
        assert_eq!(log.see(), 5);
        log.push(stored(7));
        assert_eq!((log.last(), log.weight), (6, 9));
    }

    #[test]
    fn an_event_is_bounded_and_counts_as_it_grows() {
        let mut log = EventLog::new(10 * SHARE);
        for hash in 0..25 {
            log.push(stored(hash));
        }
        assert_eq!((log.last(), log.weight), (3, 25));
        for hash in 25..1_000 {
            log.push(stored(hash));
        }
        let kept: usize = log.ring.iter().map(|event| weight(&event.change)).sum();
        assert_eq!(kept, log.weight);
        assert!(kept <= 10 * SHARE && kept > 8 * SHARE, "{kept}");
        assert_eq!(log.since(0), EventsSince::TooOld);
    }

    #[test]
    fn what_the_ring_dropped_is_too_old_and_never_a_silent_hole() {
        let mut log = EventLog::new(2);
        for hash in 1..=5 {
            log.push(stored(hash));
        }
        assert_eq!(log.since(2), EventsSince::TooOld);
        assert!(matches!(log.since(3), EventsSince::Events(events) if events.len() == 2));
    }

    #[test]
    fn a_sequence_of_the_future_is_of_another_process() {
        let mut log = EventLog::new(2);
        log.push(CacheChange::Cleared);
        assert_eq!(log.since(2), EventsSince::TooOld);
    }

    #[test]
    fn one_event_larger_than_the_ring_is_not_kept() {
        let mut log = EventLog::new(2);
        log.push(CacheChange::Removed(vec![BlockHash(1); 3]));
        assert_eq!(log.since(0), EventsSince::TooOld);
        assert_eq!(log.since(1), EventsSince::Events(vec![]));
    }
}

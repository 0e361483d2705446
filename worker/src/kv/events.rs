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

/// The log. Keeps the newest events up to a bound on the hashes in them.
#[derive(Debug)]
pub(crate) struct EventLog {
    last: u64,
    ring: VecDeque<CacheEvent>,
    weight: usize,
    capacity: usize,
}

impl EventLog {
    /// `capacity` bounds the sum of hashes kept (an event without hashes counts as one).
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            last: 0,
            ring: VecDeque::new(),
            weight: 0,
            capacity,
        }
    }

    /// Sequence of the newest event; 0 before the first.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    pub(crate) fn push(&mut self, change: CacheChange) {
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

    pub(crate) fn since(&self, sequence: u64) -> EventsSince {
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
        }
        let EventsSince::Events(events) = log.since(1) else {
            panic!("the log has them all");
        };
        let sequences: Vec<_> = events.iter().map(|event| event.sequence).collect();
        assert_eq!(sequences, [2, 3]);
        assert_eq!(log.since(3), EventsSince::Events(vec![]));
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

//! Which process of each reading worker is the living one. Incarnations are random, so their order is the order of first sight.

use std::collections::{HashMap, VecDeque};

use baton_protocol::ids::{Incarnation, WorkerId};

// Former processes remembered for each worker: a message older than eight restarts does not arrive.
const FORMER: usize = 8;
// Workers remembered; a fleet's pods change names over months. The one seen longest ago is forgotten first.
const WORKERS: usize = 4096;

#[derive(Debug)]
struct Processes {
    current: Incarnation,
    former: VecDeque<Incarnation>,
    seen: u64,
}

/// What a message from a reader says about its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sighting {
    /// The process that is known, or the first one.
    Current,
    /// A new one: the former is dead.
    Restarted,
    /// A late message of a process that is dead.
    Dead,
}

/// Incarnations by worker.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    workers: HashMap<WorkerId, Processes>,
    tick: u64,
}

impl Readers {
    pub(crate) fn sight(&mut self, worker: &WorkerId, incarnation: Incarnation) -> Sighting {
        self.tick += 1;
        if let Some(processes) = self.workers.get_mut(worker) {
            processes.seen = self.tick;
            if processes.current == incarnation {
                return Sighting::Current;
            }
            if processes.former.contains(&incarnation) {
                return Sighting::Dead;
            }
            processes.former.push_front(processes.current);
            processes.former.truncate(FORMER);
            processes.current = incarnation;
            return Sighting::Restarted;
        }
        if self.workers.len() >= WORKERS {
            let oldest = self
                .workers
                .iter()
                .min_by_key(|(_, processes)| processes.seen)
                .map(|(worker, _)| worker.clone());
            if let Some(oldest) = oldest {
                self.workers.remove(&oldest);
            }
        }
        self.workers.insert(
            worker.clone(),
            Processes {
                current: incarnation,
                former: VecDeque::new(),
                seen: self.tick,
            },
        );
        Sighting::Current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_message_of_a_dead_process_does_not_kill_the_living_one() {
        let mut readers = Readers::default();
        let worker = WorkerId::from("d0");
        assert_eq!(readers.sight(&worker, Incarnation(5)), Sighting::Current);
        assert_eq!(readers.sight(&worker, Incarnation(2)), Sighting::Restarted);
        assert_eq!(readers.sight(&worker, Incarnation(5)), Sighting::Dead);
        assert_eq!(readers.sight(&worker, Incarnation(2)), Sighting::Current);
    }

    #[test]
    fn memory_is_bounded() {
        let mut readers = Readers::default();
        for number in 0..WORKERS + 10 {
            readers.sight(&WorkerId(format!("d{number}")), Incarnation(1));
        }
        for number in 0..20 {
            readers.sight(&WorkerId::from("d"), Incarnation(number));
        }
        assert_eq!(readers.workers.len(), WORKERS);
        assert!(readers.workers[&WorkerId::from("d")].former.len() <= FORMER);
    }
}

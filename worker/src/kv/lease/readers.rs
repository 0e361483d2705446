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
    /// The latest first, each with the time until which it is held dead.
    former: VecDeque<(Incarnation, u64)>,
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
    /// Takes note of a process at `now`. One that it replaces is held dead for `remembered` milliseconds: as long as a late message
    /// may be on its way. Not for ever, for the first sight of two processes may be in the wrong order, and then the living one is
    /// refused until that time is over.
    pub(crate) fn sight(
        &mut self,
        worker: &WorkerId,
        incarnation: Incarnation,
        now: u64,
        remembered: u64,
    ) -> Sighting {
        self.tick += 1;
        if let Some(processes) = self.workers.get_mut(worker) {
            processes.seen = self.tick;
            if processes.current == incarnation {
                return Sighting::Current;
            }
            processes.former.retain(|(_, until)| *until > now);
            if processes
                .former
                .iter()
                .any(|(dead, _)| *dead == incarnation)
            {
                return Sighting::Dead;
            }
            let until = now.saturating_add(remembered);
            processes.former.push_front((processes.current, until));
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

    fn sight(readers: &mut Readers, incarnation: u64, now: u64) -> Sighting {
        readers.sight(&WorkerId::from("d0"), Incarnation(incarnation), now, 200)
    }

    #[test]
    fn a_late_message_of_a_dead_process_does_not_kill_the_living_one() {
        let mut readers = Readers::default();
        assert_eq!(sight(&mut readers, 5, 0), Sighting::Current);
        assert_eq!(sight(&mut readers, 2, 10), Sighting::Restarted);
        assert_eq!(sight(&mut readers, 5, 209), Sighting::Dead);
        assert_eq!(sight(&mut readers, 2, 209), Sighting::Current);
    }

    #[test]
    fn processes_seen_in_the_wrong_order_shut_nobody_out_for_ever() {
        let mut readers = Readers::default();
        assert_eq!(sight(&mut readers, 2, 0), Sighting::Current);
        // The former process, never seen before, is heard late and taken for a restart.
        assert_eq!(sight(&mut readers, 1, 10), Sighting::Restarted);
        assert_eq!(sight(&mut readers, 2, 20), Sighting::Dead);
        assert_eq!(sight(&mut readers, 2, 210), Sighting::Restarted);
        assert_eq!(sight(&mut readers, 2, 211), Sighting::Current);
    }

    #[test]
    fn memory_is_bounded() {
        let mut readers = Readers::default();
        for number in 0..WORKERS + 10 {
            readers.sight(&WorkerId(format!("d{number}")), Incarnation(1), 0, 200);
        }
        for number in 0..20 {
            readers.sight(&WorkerId::from("d"), Incarnation(number), 0, 200);
        }
        assert_eq!(readers.workers.len(), WORKERS);
        assert!(readers.workers[&WorkerId::from("d")].former.len() <= FORMER);
    }
}

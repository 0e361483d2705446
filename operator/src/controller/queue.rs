//! Which objects are to be looked at, and when: each at most once at a time, none forgotten.
//!
//! Pure: points in time come in as arguments. An object that is touched while it is being looked at is looked at once more; of several
//! reasons to look the earliest counts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// First pause after a failure.
const FIRST: Duration = Duration::from_secs(1);
/// Longest pause after failures.
const LONGEST: Duration = Duration::from_secs(300);
/// Pause after a failure for an object that was touched while it was looked at: its author may have mended it, and own writes touch it
/// as well.
const TOUCHED: Duration = Duration::from_secs(5);
/// By how much a pause is spread, so that what failed together is not tried together.
const SPREAD: f64 = 0.2;

/// Objects and when they are due. `K` is one object.
#[derive(Debug)]
pub struct Queue<K> {
    due: BTreeMap<K, Duration>,
    running: BTreeSet<K>,
    failures: BTreeMap<K, u32>,
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Self {
            due: BTreeMap::new(),
            running: BTreeSet::new(),
            failures: BTreeMap::new(),
        }
    }
}

/// How a look has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Look again after so long, if nothing happens before.
    Done(Duration),
    /// Somebody wrote in between: try at once, which is no failure.
    Again(Duration),
    /// Try again, each time later.
    Failed,
    /// The object is gone: nothing of it is kept.
    Gone,
}

impl<K: Ord + Clone> Queue<K> {
    /// The object has to be looked at, at `at` at the latest.
    pub fn add(&mut self, key: K, at: Duration) {
        self.due
            .entry(key)
            .and_modify(|due| *due = (*due).min(at))
            .or_insert(at);
    }

    /// The object that has been due for longest, if one is; it runs from then on.
    pub fn take(&mut self, now: Duration) -> Option<K> {
        let key = self
            .waiting()
            .filter(|(_, at)| **at <= now)
            .min_by_key(|(_, at)| **at)
            .map(|(key, _)| key.clone())?;
        self.due.remove(&key);
        self.running.insert(key.clone());
        Some(key)
    }

    /// When the next object is due that does not run.
    #[must_use]
    pub fn next_due(&self) -> Option<Duration> {
        self.waiting().map(|(_, at)| *at).min()
    }

    fn waiting(&self) -> impl Iterator<Item = (&K, &Duration)> {
        self.due
            .iter()
            .filter(|(key, _)| !self.running.contains(*key))
    }

    /// The object does not run any more. `random`: from 0 to 1.
    pub fn done(&mut self, key: &K, outcome: Outcome, now: Duration, random: f64) {
        self.running.remove(key);
        let again = match outcome {
            Outcome::Done(after) => {
                self.failures.remove(key);
                now + after
            }
            Outcome::Again(after) => now + after,
            Outcome::Failed => {
                let failures = self.failures.entry(key.clone()).or_default();
                *failures = failures.saturating_add(1);
                let pause = pause(*failures, random);
                let touched = self.due.remove(key).is_some();
                now + if touched { pause.min(TOUCHED) } else { pause }
            }
            Outcome::Gone => {
                self.failures.remove(key);
                return;
            }
        };
        self.add(key.clone(), again);
    }

    /// Objects that are due now and wait for their turn.
    #[must_use]
    pub fn depth(&self, now: Duration) -> usize {
        self.waiting().filter(|(_, at)| **at <= now).count()
    }
}

/// 1 s·2ⁿ⁻¹ after the n-th failure, at most 5 min, spread by a fifth in both directions.
#[must_use]
pub fn pause(failures: u32, random: f64) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    let pause = (FIRST * 2_u32.saturating_pow(doublings)).min(LONGEST);
    pause.mul_f64(1.0 - SPREAD + 2.0 * SPREAD * random.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn an_object_runs_once_at_a_time_and_once_more_when_touched_meanwhile() {
        let mut queue = Queue::default();
        queue.add("a", s(0));
        queue.add("a", s(0));
        assert_eq!(queue.take(s(0)), Some("a"));
        assert_eq!(queue.take(s(9)), None, "it was there twice, and is one");
        queue.add("a", s(1));
        assert_eq!(queue.take(s(9)), None, "it runs");
        assert_eq!(queue.next_due(), None, "it is not waited for while it runs");
        queue.done(&"a", Outcome::Done(s(600)), s(9), 0.5);
        assert_eq!(queue.take(s(9)), Some("a"), "it was touched meanwhile");
        queue.done(&"a", Outcome::Done(s(600)), s(9), 0.5);
        assert_eq!(queue.take(s(608)), None);
        assert_eq!(queue.take(s(609)), Some("a"));
        queue.done(&"a", Outcome::Gone, s(609), 0.5);
        assert_eq!(queue.next_due(), None);
    }

    #[test]
    fn failures_double_the_pause_and_a_success_forgets_them() {
        let mut queue = Queue::default();
        queue.add("a", s(0));
        let mut now = s(0);
        let mut pauses = Vec::new();
        for _ in 0..11 {
            queue.take(now).unwrap();
            queue.done(&"a", Outcome::Failed, now, 0.5);
            let due = queue.next_due().unwrap();
            pauses.push((due - now).as_secs());
            now = due;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        queue.take(now).unwrap();
        queue.done(&"a", Outcome::Done(s(0)), now, 0.5);
        queue.take(now).unwrap();
        queue.done(&"a", Outcome::Failed, now, 0.5);
        assert_eq!(queue.next_due().unwrap() - now, s(1));
        // A conflict is no failure, and forgets none.
        now += s(1);
        queue.take(now).unwrap();
        queue.done(&"a", Outcome::Again(s(1)), now, 0.5);
        now += s(1);
        queue.take(now).unwrap();
        queue.done(&"a", Outcome::Failed, now, 0.5);
        assert_eq!(queue.next_due().unwrap() - now, s(2));
    }

    #[test]
    fn a_touch_after_a_failure_is_earlier_than_its_pause() {
        let mut queue = Queue::default();
        queue.add("a", s(0));
        queue.take(s(0)).unwrap();
        queue.done(&"a", Outcome::Failed, s(0), 1.0);
        // Its author has mended it: there is no reason to wait.
        queue.add("a", s(0));
        assert_eq!(queue.take(s(0)), Some("a"));
        for _ in 0..20 {
            queue.done(&"a", Outcome::Failed, s(0), 0.5);
            queue.add("a", s(0));
            queue.take(s(0)).unwrap();
        }
        // Touched while it failed: neither at once, which may be the echo of its own write, nor minutes later.
        queue.add("a", s(0));
        queue.done(&"a", Outcome::Failed, s(0), 0.5);
        assert_eq!(queue.next_due(), Some(TOUCHED));
    }

    proptest! {
        #[test]
        fn a_pause_is_within_a_fifth_of_its_power_and_never_over_six_minutes(failures in 1u32..100, random in 0.0f64..=1.0) {
            let exact = 2f64.powi(i32::try_from(failures).unwrap() - 1).min(300.0);
            let pause = pause(failures, random).as_secs_f64();
            prop_assert!((0.8 * exact - 1e-6..=1.2 * exact + 1e-6).contains(&pause), "{pause} for {exact}");
        }

        #[test]
        fn what_was_added_is_taken_in_the_end_and_never_twice_at_once(
            history in proptest::collection::vec((0u8..4, 0u8..4, 0u64..5), 1..200)
        ) {
            let mut queue = Queue::default();
            let mut running = BTreeSet::new();
            let mut owed = BTreeSet::new();
            let mut now = s(0);
            for (what, key, after) in history {
                match what {
                    0 => { queue.add(key, now + s(after)); owed.insert(key); }
                    1 => if let Some(key) = queue.take(now) {
                        prop_assert!(running.insert(key), "{key} runs twice");
                        owed.remove(&key);
                    },
                    2 => if running.remove(&key) { queue.done(&key, Outcome::Done(s(600)), now, 0.0); },
                    _ => now += s(after),
                }
            }
            for key in running { queue.done(&key, Outcome::Gone, now, 0.0); }
            now += s(5);
            while let Some(key) = queue.take(now) {
                owed.remove(&key);
                queue.done(&key, Outcome::Gone, now, 0.0);
            }
            prop_assert!(owed.is_empty(), "never looked at: {owed:?}");
        }
    }
}

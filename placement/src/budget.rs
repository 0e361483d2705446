//! The budget of local recompute after failed hand-offs: so many at once per worker, and a share of all runs.
//!
//! Pure: time is an argument, in milliseconds. Fallback is never free for everyone at once: when every hand-off fails, decode
//! workers must not all turn into prefill workers.

use std::collections::HashMap;

use baton_protocol::ids::WorkerId;

use crate::policy::LocalRecompute;

/// A recompute is always allowed while fewer than this were seen lately: a share of nothing is nothing.
const BURST: f64 = 4.0;
/// Tokens that may be saved up: the share of a minute's runs, but no more than this.
const MOST_SAVED: f64 = 64.0;
/// Runs are forgotten with this time constant, so that a quiet night does not save up for a bad morning.
const MEMORY_MILLISECONDS: f64 = 60_000.0;

/// Why a recompute was not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BudgetRefusal {
    #[error(
        "the decode worker recomputes {0} runs already (fallback.localRecompute.maxConcurrentPerWorker)"
    )]
    Concurrent(u32),
    #[error("too many of the last runs were recomputed (fallback.localRecompute.maxPercent)")]
    Share,
}

/// One per policy.
#[derive(Clone, Debug)]
pub struct FallbackBudget {
    policy: LocalRecompute,
    running: HashMap<WorkerId, u32>,
    /// Token bucket: each run puts in `maxPercent` of a token, each recompute takes one.
    tokens: f64,
    refreshed: f64,
}

impl FallbackBudget {
    pub fn new(policy: LocalRecompute, now: f64) -> Self {
        Self {
            policy,
            running: HashMap::new(),
            tokens: BURST,
            refreshed: now,
        }
    }

    pub fn set_policy(&mut self, policy: LocalRecompute) {
        self.policy = policy;
    }

    /// Takes in one run, whatever became of it.
    pub fn run(&mut self, now: f64) {
        self.refresh(now);
        self.tokens = (self.tokens + self.policy.max_percent / 100.0).min(MOST_SAVED);
    }

    /// Asks for one recompute; what is granted is given back with [`Self::end`].
    pub fn begin(&mut self, worker: &WorkerId, now: f64) -> Result<(), BudgetRefusal> {
        self.refresh(now);
        let running = self.running.get(worker).copied().unwrap_or(0);
        if running >= self.policy.max_concurrent_per_worker {
            return Err(BudgetRefusal::Concurrent(running));
        }
        // At 100 percent the share limits nothing, whatever the order of runs and recomputes.
        if self.policy.max_percent < 100.0 {
            if self.tokens < 1.0 || self.policy.max_percent <= 0.0 {
                return Err(BudgetRefusal::Share);
            }
            self.tokens -= 1.0;
        }
        *self.running.entry(worker.clone()).or_default() += 1;
        Ok(())
    }

    /// Recomputes under way on all workers.
    pub fn running(&self) -> u32 {
        self.running.values().sum()
    }

    /// A granted recompute has ended, well or not.
    pub fn end(&mut self, worker: &WorkerId) {
        if let Some(running) = self.running.get_mut(worker) {
            *running = running.saturating_sub(1);
            if *running == 0 {
                self.running.remove(worker);
            }
        }
    }

    /// A granted recompute was never begun: its worker refused it. It costs nothing.
    pub fn refund(&mut self, worker: &WorkerId) {
        self.end(worker);
        if self.policy.max_percent < 100.0 {
            self.tokens = (self.tokens + 1.0).min(MOST_SAVED);
        }
    }

    /// What was saved above the burst fades; what was spent below it comes back.
    fn refresh(&mut self, now: f64) {
        let passed = (now - self.refreshed).max(0.0);
        self.refreshed = self.refreshed.max(now);
        self.tokens = BURST + (self.tokens - BURST) * (-passed / MEMORY_MILLISECONDS).exp();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(max_concurrent_per_worker: u32, max_percent: f64) -> LocalRecompute {
        LocalRecompute {
            max_concurrent_per_worker,
            max_percent,
        }
    }

    #[test]
    fn no_worker_recomputes_more_than_its_share_at_once() {
        let mut budget = FallbackBudget::new(policy(2, 100.0), 0.0);
        let (first, second) = (WorkerId::from("d0"), WorkerId::from("d1"));
        assert!(budget.begin(&first, 0.0).is_ok());
        assert!(budget.begin(&first, 0.0).is_ok());
        assert_eq!(budget.begin(&first, 0.0), Err(BudgetRefusal::Concurrent(2)));
        assert!(budget.begin(&second, 0.0).is_ok());
        budget.end(&first);
        assert!(budget.begin(&first, 0.0).is_ok());
    }

    #[test]
    fn when_every_hand_off_fails_only_the_share_is_recomputed() {
        let mut budget = FallbackBudget::new(policy(1_000, 10.0), 0.0);
        let worker = WorkerId::from("d0");
        let granted = (0..1_000)
            .filter(|&run| {
                let now = f64::from(run);
                budget.run(now);
                budget.begin(&worker, now).is_ok()
            })
            .count();
        assert!((90..=115).contains(&granted), "{granted}");
    }

    #[test]
    fn what_was_granted_and_not_begun_is_granted_again() {
        let mut budget = FallbackBudget::new(policy(1, 10.0), 0.0);
        let worker = WorkerId::from("d0");
        for _ in 0..100 {
            assert_eq!(budget.begin(&worker, 0.0), Ok(()));
            budget.refund(&worker);
        }
        assert_eq!(budget.begin(&worker, 0.0), Ok(()));
        assert_eq!(
            budget.begin(&worker, 0.0),
            Err(BudgetRefusal::Concurrent(1))
        );
    }

    #[test]
    fn a_quiet_time_gives_back_the_burst_and_no_more() {
        let mut budget = FallbackBudget::new(policy(1_000, 10.0), 0.0);
        let worker = WorkerId::from("d0");
        while budget.begin(&worker, 0.0).is_ok() {}
        let later = 3_600_000.0;
        let granted = (0..100)
            .filter(|_| budget.begin(&worker, later).is_ok())
            .count();
        assert!((3..=4).contains(&granted), "{granted}");
        let mut none = FallbackBudget::new(policy(1_000, 0.0), 0.0);
        assert_eq!(none.begin(&worker, 0.0), Err(BudgetRefusal::Share));
    }
}

//! A link's breaker: closed until it fails or slows down too often, then open, then tried with one run at a time.
//!
//! Pure: time is an argument, in milliseconds.

use std::collections::VecDeque;

use crate::fleet::BreakerState;
use crate::policy::BreakerPolicy;

/// Open times double with each probe that fails, up to this factor.
const LONGEST_BACK_OFF: f64 = 32.0;

/// What one transfer over the link came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TransferResult {
    /// Whole, in so many milliseconds where so many were expected. Slow enough, it counts as a failure: that is how a silent
    /// fallback to a slower transport shows.
    Done {
        actual: f64,
        expected: f64,
    },
    Failed,
}

/// One per (source domain, target domain, transport).
#[derive(Clone, Debug, PartialEq)]
pub struct Breaker {
    policy: BreakerPolicy,
    /// Times of failures within the window; never longer than the policy's count.
    failures: VecDeque<f64>,
    opened: Option<Opened>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Opened {
    /// When a probe may be made.
    until: f64,
    back_off: f64,
    /// When the probe under way began.
    probe: Option<f64>,
}

impl Breaker {
    pub fn new(policy: BreakerPolicy) -> Self {
        Self {
            policy,
            failures: VecDeque::new(),
            opened: None,
        }
    }

    /// Takes the limits of a changed policy, keeping what was seen.
    pub fn set_policy(&mut self, policy: BreakerPolicy) {
        self.policy = policy;
    }

    /// As a snapshot shows it: `HalfOpen` only while a probe may be begun.
    pub fn state(&self, now: f64) -> BreakerState {
        match self.opened {
            None => BreakerState::Closed,
            Some(opened) if now >= opened.until && !self.probing(&opened, now) => {
                BreakerState::HalfOpen
            }
            Some(_) => BreakerState::Open,
        }
    }

    /// A probe that nobody ended counts as lost after one open time: a crashed run must not keep a link shut for ever.
    fn probing(&self, opened: &Opened, now: f64) -> bool {
        opened
            .probe
            .is_some_and(|began| now < began + self.policy.open_seconds * 1_000.0)
    }

    /// Call before a run uses the link: true if it may. In the half-open state the first caller gets the probe.
    pub fn try_use(&mut self, now: f64) -> bool {
        match self.state(now) {
            BreakerState::Closed => true,
            BreakerState::Open => false,
            BreakerState::HalfOpen => {
                if let Some(opened) = &mut self.opened {
                    opened.probe = Some(now);
                }
                true
            }
        }
    }

    /// Takes in a transfer, or a probe of the node daemon.
    pub fn observe(&mut self, result: TransferResult, now: f64) {
        if self.counts_as_failure(result) {
            self.fail(now);
        } else {
            self.succeed();
        }
    }

    fn counts_as_failure(&self, result: TransferResult) -> bool {
        match result {
            TransferResult::Failed => true,
            TransferResult::Done { actual, expected } => {
                actual > expected * self.policy.slowdown_percent / 100.0
            }
        }
    }

    fn succeed(&mut self) {
        // Runs that began before it opened may still end well; only the probe closes it.
        if self.opened.is_some_and(|opened| opened.probe.is_some()) {
            self.opened = None;
            self.failures.clear();
        }
    }

    fn fail(&mut self, now: f64) {
        let open = self.policy.open_seconds * 1_000.0;
        match &mut self.opened {
            Some(opened) if opened.probe.is_some() => {
                opened.back_off = (opened.back_off * 2.0).min(LONGEST_BACK_OFF);
                opened.until = now + open * opened.back_off;
                opened.probe = None;
            }
            // Runs that began before it opened say nothing new.
            Some(_) => {}
            None => {
                let window = self.policy.window_seconds * 1_000.0;
                self.failures.push_back(now);
                while self.failures.front().is_some_and(|&at| at < now - window) {
                    self.failures.pop_front();
                }
                if self.failures.len() >= self.policy.failures as usize {
                    self.failures.clear();
                    self.opened = Some(Opened {
                        until: now + open,
                        back_off: 1.0,
                        probe: None,
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn policy() -> BreakerPolicy {
        BreakerPolicy {
            failures: 3,
            window_seconds: 30.0,
            open_seconds: 10.0,
            slowdown_percent: 300.0,
        }
    }

    fn opened() -> Breaker {
        let mut breaker = Breaker::new(policy());
        for at in [0.0, 1.0, 2.0] {
            breaker.observe(TransferResult::Failed, at);
        }
        breaker
    }

    #[test]
    fn three_failures_within_the_window_open_it() {
        assert_eq!(opened().state(3.0), BreakerState::Open);
        let mut spread = Breaker::new(policy());
        for at in [0.0, 20_000.0, 40_000.0, 60_000.0] {
            spread.observe(TransferResult::Failed, at);
            assert_eq!(spread.state(at), BreakerState::Closed);
        }
    }

    #[test]
    fn a_slow_transfer_counts_as_a_failure() {
        let mut breaker = Breaker::new(policy());
        let slow = TransferResult::Done {
            actual: 31.0,
            expected: 10.0,
        };
        let fine = TransferResult::Done {
            actual: 29.0,
            expected: 10.0,
        };
        for _ in 0..5 {
            breaker.observe(fine, 0.0);
        }
        assert_eq!(breaker.state(0.0), BreakerState::Closed);
        for _ in 0..3 {
            breaker.observe(slow, 1.0);
        }
        assert_eq!(breaker.state(1.0), BreakerState::Open);
    }

    #[test]
    fn one_probe_at_a_time_and_back_off_doubles() {
        let mut breaker = opened();
        assert!(!breaker.try_use(9_000.0));
        assert_eq!(breaker.state(10_002.0), BreakerState::HalfOpen);
        assert!(breaker.try_use(10_002.0));
        assert!(
            !breaker.try_use(10_003.0),
            "a second run has to wait for the probe"
        );
        breaker.observe(TransferResult::Failed, 10_100.0);
        assert_eq!(breaker.state(30_000.0), BreakerState::Open);
        assert!(breaker.try_use(30_101.0));
        let fine = TransferResult::Done {
            actual: 10.0,
            expected: 10.0,
        };
        breaker.observe(fine, 30_200.0);
        assert_eq!(breaker.state(30_200.0), BreakerState::Closed);
    }

    #[test]
    fn a_probe_that_is_never_ended_does_not_shut_the_link_for_ever() {
        let mut breaker = opened();
        assert!(breaker.try_use(10_002.0));
        assert!(!breaker.try_use(20_001.0));
        assert!(breaker.try_use(20_002.0));
    }

    proptest! {
        #[test]
        fn some_probe_is_always_allowed_in_the_end(events in proptest::collection::vec((0u8..3, 0f64..5_000.0), 0..80)) {
            let mut breaker = Breaker::new(policy());
            let mut now = 0.0;
            for (kind, wait) in events {
                now += wait;
                match kind {
                    0 => breaker.observe(TransferResult::Failed, now),
                    1 => breaker.observe(TransferResult::Done { actual: 1.0, expected: 1.0 }, now),
                    _ => { breaker.try_use(now); }
                }
                prop_assert!(breaker.failures.len() <= 3);
            }
            prop_assert!(breaker.try_use(now + 10_000.0 * LONGEST_BACK_OFF + 1.0));
        }
    }
}

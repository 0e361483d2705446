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

/// Leave to use a link: given by [`Breaker::try_use`], and either told with what came of it or given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Any run's: the link is closed.
    Free,
    /// The one run's that tries an open link. Its result, and no other, closes the link or opens it again.
    Probe(u64),
}

/// One per (source domain, target domain, transport).
#[derive(Clone, Debug, PartialEq)]
pub struct Breaker {
    policy: BreakerPolicy,
    /// Times of failures within the window; never longer than the policy's count.
    failures: VecDeque<f64>,
    opened: Option<Opened>,
    /// Probes begun so far: each has its own number, so that a late result is not taken for a later probe's.
    probes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Opened {
    /// When a probe may be made.
    until: f64,
    back_off: f64,
    /// The probe under way.
    probe: Option<Probe>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Probe {
    number: u64,
    began: f64,
}

impl Opened {
    fn is_probed_by(&self, pass: Pass) -> bool {
        self.probe
            .is_some_and(|probe| pass == Pass::Probe(probe.number))
    }
}

impl Breaker {
    pub fn new(policy: BreakerPolicy) -> Self {
        Self {
            policy,
            failures: VecDeque::new(),
            opened: None,
            probes: 0,
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
            .is_some_and(|probe| now < probe.began + self.policy.open_seconds * 1_000.0)
    }

    /// Call before a run uses the link: none if it may not. In the half-open state the first caller gets the probe.
    pub fn try_use(&mut self, now: f64) -> Option<Pass> {
        match self.state(now) {
            BreakerState::Closed => Some(Pass::Free),
            BreakerState::Open => None,
            BreakerState::HalfOpen => {
                self.probes += 1;
                let number = self.probes;
                if let Some(opened) = &mut self.opened {
                    opened.probe = Some(Probe { number, began: now });
                }
                Some(Pass::Probe(number))
            }
        }
    }

    /// The run came to its end without a word on the link: another one may try it.
    pub fn give_back(&mut self, pass: Pass) {
        if let Some(opened) = &mut self.opened
            && opened.is_probed_by(pass)
        {
            opened.probe = None;
        }
    }

    /// Takes in a transfer, or a probe of the node daemon.
    pub fn observe(&mut self, result: TransferResult, pass: Pass, now: f64) {
        if self.counts_as_failure(result) {
            self.fail(pass, now);
        } else {
            self.succeed(pass);
        }
    }

    /// The link has done harm: it is shut at once, whatever else was seen of it. Said again while it is shut, it stays so for longer.
    pub fn distrust(&mut self, now: f64) {
        let open = self.policy.open_seconds * 1_000.0;
        let back_off = self
            .opened
            .map_or(1.0, |opened| (opened.back_off * 2.0).min(LONGEST_BACK_OFF));
        self.failures.clear();
        self.opened = Some(Opened {
            until: now + open * back_off,
            back_off,
            probe: None,
        });
    }

    fn counts_as_failure(&self, result: TransferResult) -> bool {
        match result {
            TransferResult::Failed => true,
            TransferResult::Done { actual, expected } => {
                actual > expected * self.policy.slowdown_percent / 100.0
            }
        }
    }

    fn succeed(&mut self, pass: Pass) {
        // Runs that began before it opened may still end well; only the probe closes it.
        if self.opened.is_some_and(|opened| opened.is_probed_by(pass)) {
            self.opened = None;
            self.failures.clear();
        }
    }

    fn fail(&mut self, pass: Pass, now: f64) {
        let open = self.policy.open_seconds * 1_000.0;
        match &mut self.opened {
            Some(opened) if opened.is_probed_by(pass) => {
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

    #[test]
    fn harm_shuts_it_at_once_and_a_probe_opens_it_again() {
        let mut breaker = Breaker::new(policy());
        breaker.distrust(0.0);
        assert_eq!(breaker.try_use(0.0), None);
        breaker.distrust(1_000.0);
        assert_eq!(breaker.state(20_999.0), BreakerState::Open, "for longer");
        let probe = breaker.try_use(21_000.0).unwrap();
        let done = TransferResult::Done {
            actual: 0.0,
            expected: 0.0,
        };
        breaker.observe(done, probe, 21_001.0);
        assert_eq!(breaker.state(21_001.0), BreakerState::Closed);
    }

    fn opened() -> Breaker {
        let mut breaker = Breaker::new(policy());
        for at in [0.0, 1.0, 2.0] {
            breaker.observe(TransferResult::Failed, Pass::Free, at);
        }
        breaker
    }

    #[test]
    fn three_failures_within_the_window_open_it() {
        assert_eq!(opened().state(3.0), BreakerState::Open);
        let mut spread = Breaker::new(policy());
        for at in [0.0, 20_000.0, 40_000.0, 60_000.0] {
            spread.observe(TransferResult::Failed, Pass::Free, at);
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
            breaker.observe(fine, Pass::Free, 0.0);
        }
        assert_eq!(breaker.state(0.0), BreakerState::Closed);
        for _ in 0..3 {
            breaker.observe(slow, Pass::Free, 1.0);
        }
        assert_eq!(breaker.state(1.0), BreakerState::Open);
    }

    fn fine() -> TransferResult {
        TransferResult::Done {
            actual: 10.0,
            expected: 10.0,
        }
    }

    #[test]
    fn one_probe_at_a_time_and_back_off_doubles() {
        let mut breaker = opened();
        assert_eq!(breaker.try_use(9_000.0), None);
        assert_eq!(breaker.state(10_002.0), BreakerState::HalfOpen);
        let first = breaker.try_use(10_002.0).unwrap();
        assert_eq!(
            breaker.try_use(10_003.0),
            None,
            "a second run has to wait for the probe"
        );
        breaker.observe(TransferResult::Failed, first, 10_100.0);
        assert_eq!(breaker.state(30_000.0), BreakerState::Open);
        let second = breaker.try_use(30_101.0).unwrap();
        breaker.observe(fine(), second, 30_200.0);
        assert_eq!(breaker.state(30_200.0), BreakerState::Closed);
    }

    #[test]
    fn only_the_probes_own_result_closes_a_link_or_opens_it_again() {
        let mut breaker = opened();
        let probe = breaker.try_use(10_002.0).unwrap();
        // Runs that began before it opened end while the probe is under way.
        breaker.observe(fine(), Pass::Free, 10_003.0);
        assert_eq!(breaker.state(10_003.0), BreakerState::Open);
        breaker.observe(TransferResult::Failed, Pass::Free, 10_004.0);
        assert_eq!(breaker.state(10_004.0), BreakerState::Open);
        // A probe that was given up for lost says nothing about the one after it.
        let next = breaker.try_use(20_002.0).unwrap();
        assert_ne!(probe, next);
        breaker.observe(fine(), probe, 20_003.0);
        assert_eq!(breaker.state(20_003.0), BreakerState::Open);
        breaker.observe(fine(), next, 20_004.0);
        assert_eq!(breaker.state(20_004.0), BreakerState::Closed);
    }

    #[test]
    fn a_probe_that_is_given_back_can_be_made_by_the_next_run_at_once() {
        let mut breaker = opened();
        let probe = breaker.try_use(10_002.0).unwrap();
        breaker.give_back(Pass::Free);
        assert_eq!(breaker.state(10_003.0), BreakerState::Open);
        breaker.give_back(probe);
        assert_eq!(breaker.state(10_003.0), BreakerState::HalfOpen);
        assert!(breaker.try_use(10_003.0).is_some());
    }

    #[test]
    fn a_probe_that_is_never_ended_does_not_shut_the_link_for_ever() {
        let mut breaker = opened();
        assert!(breaker.try_use(10_002.0).is_some());
        assert_eq!(breaker.try_use(20_001.0), None);
        assert!(breaker.try_use(20_002.0).is_some());
    }

    proptest! {
        #[test]
        fn some_probe_is_always_allowed_in_the_end(events in proptest::collection::vec((0u8..4, 0f64..5_000.0), 0..80)) {
            let mut breaker = Breaker::new(policy());
            let mut now = 0.0;
            let mut pass = Pass::Free;
            for (kind, wait) in events {
                now += wait;
                match kind {
                    0 => breaker.observe(TransferResult::Failed, pass, now),
                    1 => breaker.observe(TransferResult::Done { actual: 1.0, expected: 1.0 }, pass, now),
                    2 => breaker.give_back(pass),
                    _ => pass = breaker.try_use(now).unwrap_or(pass),
                }
                prop_assert!(breaker.failures.len() <= 3);
            }
            prop_assert!(breaker.try_use(now + 10_000.0 * LONGEST_BACK_OFF + 1.0).is_some());
        }
    }
}

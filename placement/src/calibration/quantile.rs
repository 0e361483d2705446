//! The ratio actual / predicted that 95 of 100 stay below, over the last samples.
//!
//! The order statistic ⌈0.95·(n + 1)⌉ of the last n ratios: a new sample of the same kind lies below it in at least 95 % of the
//! cases, whatever the distribution (split conformal prediction), and a change has passed through after one window.

use std::collections::VecDeque;

/// Samples remembered. At 64 the bound is the third largest: one wild sample does not set it.
const WINDOW: usize = 64;
/// Fewer say nothing about one in twenty.
const FEWEST: usize = 20;
const COVERAGE: f64 = 0.95;

/// One per path, phase and load bucket.
#[derive(Clone, Debug, Default)]
pub struct RatioQuantile {
    recent: VecDeque<f64>,
}

impl RatioQuantile {
    pub fn observe(&mut self, ratio: f64) {
        if !(ratio.is_finite() && ratio > 0.0) {
            return;
        }
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(ratio);
    }

    /// The factor; none before twenty samples.
    pub fn upper(&self) -> Option<f64> {
        self.quantile(COVERAGE)
    }

    /// The median ratio; none before twenty samples.
    pub fn median(&self) -> Option<f64> {
        self.quantile(0.5)
    }

    fn quantile(&self, share: f64) -> Option<f64> {
        if self.recent.len() < FEWEST {
            return None;
        }
        let mut sorted: Vec<f64> = self.recent.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let rank = (share * (sorted.len() + 1) as f64).ceil() as usize;
        Some(sorted[rank.clamp(1, sorted.len()) - 1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn covers_ninety_five_of_a_hundred_and_follows_a_change() {
        let mut rng = Rng::new(11);
        let mut quantile = RatioQuantile::default();
        let mut covered = 0;
        let rounds = 4_000;
        for round in 0..rounds + 64 {
            // The noise doubles half-way.
            let width = if round < rounds / 2 { 0.1 } else { 0.2 };
            let ratio = 1.0 + width * (rng.unit() + rng.unit() - 1.0);
            if round >= 64 && quantile.upper().is_some_and(|upper| ratio <= upper) {
                covered += 1;
            }
            quantile.observe(ratio);
        }
        let share = f64::from(covered) / f64::from(rounds);
        assert!((0.93..0.97).contains(&share), "{share}");
        assert!((quantile.median().unwrap() - 1.0).abs() < 0.05);
    }

    #[test]
    fn says_nothing_before_it_can() {
        let mut quantile = RatioQuantile::default();
        for _ in 0..19 {
            quantile.observe(1.0);
        }
        quantile.observe(f64::NAN);
        assert_eq!(quantile.upper(), None);
        quantile.observe(1.0);
        assert_eq!(quantile.upper(), Some(1.0));
    }
}

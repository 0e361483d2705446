//! Fitting a link's transfers on [1, bytes, descriptors].

use super::fit::Fit;
use super::quantile::RatioQuantile;
use crate::coefficients::LinkCoefficients;
use crate::cost;

/// Transfers before their ratios count.
const SETTLING: u64 = 20;
/// What is usual for a new link may rise from the prior's time by this factor a transfer, and no faster. One that is many times slower from
/// its first transfer on, as after a silent fallback to another transport, fails some of them before that is usual.
const RISE: f64 = 1.5;
/// Of the running mean of the lease protocol's round trips.
const SYNCHRONIZATION_STEP: f64 = 0.1;

/// One per (source domain, target domain, transport).
#[derive(Clone, Debug)]
pub struct LinkCalibrator {
    fit: Fit,
    ratios: RatioQuantile,
    synchronization: f64,
    prior: LinkCoefficients,
}

impl LinkCalibrator {
    pub fn new(prior: LinkCoefficients) -> Self {
        Self {
            fit: Fit::new(
                [prior.alpha, prior.per_byte, prior.per_descriptor],
                [1.0, 1e7, 64.0],
                [1.0, 1e5, 1.0],
            ),
            ratios: RatioQuantile::default(),
            synchronization: prior.synchronization,
            prior,
        }
    }

    /// Takes in a transfer that nothing held up: milliseconds of moving alone, without waiting for blocks to be computed.
    pub fn observe(&mut self, bytes: u64, descriptors: u32, milliseconds: f64) {
        let features = [1.0, bytes as f64, f64::from(descriptors)];
        let predicted = self.fit.predict(features);
        if predicted > 0.0 && self.fit.samples() >= SETTLING {
            self.ratios.observe(milliseconds / predicted);
        }
        let bucket = bytes.max(1).ilog2();
        self.fit.observe(bucket, features, milliseconds);
    }

    /// Takes in the round trips of one lease, milliseconds.
    pub fn observe_synchronization(&mut self, milliseconds: f64) {
        if milliseconds.is_finite() && milliseconds >= 0.0 {
            // Bounded like any outlier, so that one stall does not close a link for long.
            let bounded = milliseconds.min(4.0 * self.synchronization + 1.0);
            self.synchronization += SYNCHRONIZATION_STEP * (bounded - self.synchronization);
        }
    }

    /// How long such a transfer usually takes, milliseconds: what a breaker compares with.
    pub fn usual(&self, bytes: u64, descriptors: u32) -> f64 {
        let (bytes, descriptors) = (bytes as f64, f64::from(descriptors));
        let prior = cost::transfer(&self.prior, bytes, descriptors);
        let most = prior * RISE.powf(self.fit.samples() as f64);
        self.fit.predict([1.0, bytes, descriptors]).min(most)
    }

    pub fn coefficients(&self) -> LinkCoefficients {
        let [alpha, per_byte, per_descriptor] = self.fit.theta();
        LinkCoefficients {
            alpha,
            per_byte,
            per_descriptor,
            synchronization: self.synchronization,
            upper: self.ratios.upper().unwrap_or(self.prior.upper),
            samples: self.fit.samples(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibration::link_prior;
    use crate::rng::Rng;

    #[test]
    fn learns_a_link_three_times_slower_than_the_prior() {
        let mut rng = Rng::new(5);
        let mut link = LinkCalibrator::new(link_prior("tcp"));
        let truth = |bytes: f64, blocks: f64| 3.0 + 3e-6 * bytes + 0.02 * blocks;
        for _ in 0..60 {
            let blocks = 1 + rng.below(60) as u32;
            let bytes = u64::from(blocks) * 368_640;
            let noise = 1.0 + 0.08 * (rng.unit() - 0.5);
            link.observe(
                bytes,
                blocks,
                truth(bytes as f64, f64::from(blocks)) * noise,
            );
            link.observe_synchronization(4.0);
        }
        for blocks in [1u32, 5, 20, 60] {
            let bytes = u64::from(blocks) * 368_640;
            let ratio = link.usual(bytes, blocks) / truth(bytes as f64, f64::from(blocks));
            assert!((ratio - 1.0).abs() < 0.08, "{blocks}: {ratio}");
        }
        let coefficients = link.coefficients();
        assert!((coefficients.synchronization - 4.0).abs() < 0.1);
        assert!(
            (1.0..1.1).contains(&coefficients.upper),
            "{}",
            coefficients.upper
        );
    }

    #[test]
    fn what_is_slow_from_the_first_transfer_on_becomes_usual_and_not_at_once() {
        let prior = link_prior("tcp");
        let mut link = LinkCalibrator::new(prior);
        let before = link.usual(1 << 30, 1);
        let truth = 20.0 * before;
        let mut seen = Vec::new();
        for _ in 0..12 {
            seen.push(link.usual(1 << 30, 1) / before);
            link.observe(1 << 30, 1, truth);
        }
        assert!(seen[3] < 4.0, "{seen:?}");
        assert!(seen[11] > 15.0, "{seen:?}");
    }
}

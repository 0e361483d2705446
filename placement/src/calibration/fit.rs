//! Least squares over three features, with forgetting per bucket, the pull of outliers bounded and coefficients never negative.
//!
//! Recursive least squares in information form: the sums Σ w·x·xᵀ and Σ w·x·y are updated per sample and solved, 3 × 3. They are
//! kept per bucket of the range. Samples of the same bucket replace each other; those of other buckets make it fade too, but only
//! down to the weight of a few samples: a day of short prompts does not unlearn long ones, and a worker that has become slower
//! is not held back by what it once was. A prior enters as a weak quadratic term that is never forgotten, so what the samples do not determine stays where it
//! was. Residuals are relative: a step twice as long may be off by twice as much.

#![allow(
    clippy::needless_range_loop,
    reason = "three by three, in the index notation of the formulas"
)]

use std::collections::BTreeMap;

/// Samples of one bucket count with this factor per newer sample of the same bucket: about the last 33 matter.
const FORGETTING: f64 = 0.97;
/// Samples of other buckets fade it by this factor each, until it weighs no more than [`KEPT`] samples.
const FADING: f64 = 0.995;
const KEPT: f64 = 4.0;
/// Relative noise of a step that the weight of the prior assumes.
const NOISE: f64 = 0.05;
/// A prior may be off by this factor of itself.
const PRIOR_SPREAD: f64 = 2.0;
/// And by this share of what is predicted where it shows: a coefficient whose prior is zero can rise.
const PRIOR_SHARE: f64 = 0.5;
/// Of the running spread of relative residuals.
const SPREAD_STEP: f64 = 0.1;
/// A sample farther off than this many spreads, and than the share below, pulls no harder than one there (Huber, 1964).
const OUTLIER_SPREADS: f64 = 3.0;
const OUTLIER_SHARE: f64 = 0.3;
/// The first sample of all is pulled in where it is farther off the prior than by this factor: nothing stands against it yet, and a link
/// or a worker that is thought to be that slow is used no more and does not show that it is not.
const WILD: f64 = 8.0;
/// Below this determinant of the normalised matrix the system says nothing certain, and the old coefficients stay.
const ILL_CONDITIONED: f64 = 1e-13;

type Vector = [f64; 3];
type Matrix = [[f64; 3]; 3];

#[derive(Clone, Debug, Default)]
struct Sums {
    matrix: Matrix,
    vector: Vector,
    /// In samples.
    weight: f64,
}

impl Sums {
    fn scale(&mut self, by: f64) {
        for row in &mut self.matrix {
            for value in row {
                *value *= by;
            }
        }
        for value in &mut self.vector {
            *value *= by;
        }
        self.weight *= by;
    }
}

/// One fitted line over three features.
#[derive(Clone, Debug)]
pub(super) struct Fit {
    /// Typical sizes of the features: the system is solved in units of them.
    scale: Vector,
    prior: Sums,
    buckets: BTreeMap<u32, Sums>,
    /// In units of the features themselves.
    theta: Vector,
    spread: f64,
    samples: u64,
}

impl Fit {
    /// `scale` are typical feature values, none of them 0.
    /// `small` are the features of a small sample, where the first coefficient shows most: it may be off by a share of such a
    /// sample only. Held against a typical one, it would take up most of what a few long samples surprise with, and every short
    /// prediction would be wrong by it.
    pub(super) fn new(prior: Vector, scale: Vector, small: Vector) -> Self {
        let typical = product(&prior, &scale);
        let share = [product(&prior, &small), typical, typical].map(|sample| PRIOR_SHARE * sample);
        let mut sums = Sums::default();
        for i in 0..3 {
            let scaled = prior[i] * scale[i];
            // In relative residuals a coefficient of value v at a point weighs v / what is predicted there.
            let deviation = (PRIOR_SPREAD * scaled + share[i]).max(f64::MIN_POSITIVE);
            let precision = (NOISE / deviation).powi(2);
            sums.matrix[i][i] = precision;
            sums.vector[i] = precision * scaled;
        }
        Self {
            scale,
            prior: sums,
            buckets: BTreeMap::new(),
            theta: prior,
            spread: 1.0,
            samples: 0,
        }
    }

    pub(super) fn theta(&self) -> Vector {
        self.theta
    }

    pub(super) fn samples(&self) -> u64 {
        self.samples
    }

    pub(super) fn predict(&self, features: Vector) -> f64 {
        product(&self.theta, &features)
    }

    /// Takes in one sample of this bucket. What is not a positive number is ignored.
    pub(super) fn observe(&mut self, bucket: u32, features: Vector, value: f64) {
        if !(value.is_finite() && value > 0.0 && features.iter().all(|one| one.is_finite())) {
            return;
        }
        let predicted = self.predict(features);
        let value = if self.samples == 0 && predicted > 0.0 {
            value.clamp(predicted / WILD, predicted * WILD)
        } else {
            value
        };
        // Between predicted and actual, so that neither a wrong prior nor noise alone sets the weight.
        let mut weight = 1.0 / (value * if predicted > 0.0 { predicted } else { value });
        if predicted > 0.0 {
            let ratio = value / predicted;
            let limit = (OUTLIER_SPREADS * self.spread).max(OUTLIER_SHARE);
            let bounded = ratio.clamp(1.0 / (1.0 + limit), 1.0 + limit);
            self.spread += SPREAD_STEP * ((bounded - 1.0).abs() - self.spread);
            if bounded != ratio {
                // It pulls no harder than a sample at the bound would, and towards where it is: were the bound itself kept,
                // a fit that two first samples led astray would take the truth for outliers and hold on to its own error.
                weight *= (bounded - 1.0) / bounded * ratio / (ratio - 1.0);
                // Nor does a prediction that is far too low give it a weight that no right one would ever have again.
                weight = weight.min(1.0 / value.max(predicted).powi(2));
            }
        }
        for (&other, sums) in &mut self.buckets {
            if other != bucket && sums.weight > KEPT {
                sums.scale(FADING);
            }
        }
        let sums = self.buckets.entry(bucket).or_default();
        sums.scale(FORGETTING);
        sums.weight += 1.0;
        for i in 0..3 {
            let left = features[i] / self.scale[i];
            for j in 0..3 {
                sums.matrix[i][j] += weight * left * features[j] / self.scale[j];
            }
            sums.vector[i] += weight * left * value;
        }
        self.samples += 1;
        self.solve();
    }

    fn solve(&mut self) {
        let mut total = self.prior.clone();
        for sums in self.buckets.values() {
            for i in 0..3 {
                for j in 0..3 {
                    total.matrix[i][j] += sums.matrix[i][j];
                }
                total.vector[i] += sums.vector[i];
            }
        }
        if let Some(scaled) = least_squares(&total.matrix, &total.vector) {
            for i in 0..3 {
                self.theta[i] = scaled[i] / self.scale[i];
            }
        }
    }
}

fn product(left: &Vector, right: &Vector) -> f64 {
    (0..3).map(|i| left[i] * right[i]).sum()
}

/// The non-negative minimum of ½·uᵀMu − vᵀu: three unknowns have eight sets that may be zero, and the best feasible one is it.
fn least_squares(matrix: &Matrix, vector: &Vector) -> Option<Vector> {
    let mut normalised = *matrix;
    for i in 0..3 {
        for j in 0..3 {
            normalised[i][j] /= (matrix[i][i] * matrix[j][j]).sqrt();
        }
    }
    let determined = determinant(&normalised);
    if determined.is_nan() || determined <= ILL_CONDITIONED {
        return None;
    }
    let mut best: Option<(f64, Vector)> = None;
    for free in 0u8..8 {
        let mut reduced = *matrix;
        let mut right = *vector;
        for i in 0..3 {
            if free & (1 << i) == 0 {
                for j in 0..3 {
                    reduced[i][j] = 0.0;
                    reduced[j][i] = 0.0;
                }
                reduced[i][i] = 1.0;
                right[i] = 0.0;
            }
        }
        let Some(solution) = cramer(&reduced, &right) else {
            continue;
        };
        if solution
            .iter()
            .any(|&value| !value.is_finite() || value < 0.0)
        {
            continue;
        }
        let mut objective = 0.0;
        for i in 0..3 {
            objective -= vector[i] * solution[i];
            for j in 0..3 {
                objective += 0.5 * solution[i] * matrix[i][j] * solution[j];
            }
        }
        if best.is_none_or(|(least, _)| objective < least) {
            best = Some((objective, solution));
        }
    }
    best.map(|(_, solution)| solution)
}

fn determinant(m: &Matrix) -> f64 {
    m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1])
        - m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0])
        + m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0])
}

fn cramer(matrix: &Matrix, right: &Vector) -> Option<Vector> {
    // Rows and columns brought to a unit diagonal first: the sums span many powers of ten.
    let mut by = [0.0; 3];
    for i in 0..3 {
        by[i] = matrix[i][i].sqrt();
        if by[i].is_nan() || by[i] <= 0.0 {
            return None;
        }
    }
    let mut unit = *matrix;
    let mut target = *right;
    for i in 0..3 {
        for j in 0..3 {
            unit[i][j] /= by[i] * by[j];
        }
        target[i] /= by[i];
    }
    let whole = determinant(&unit);
    if whole.is_nan() || whole.abs() <= ILL_CONDITIONED {
        return None;
    }
    let mut solution = [0.0; 3];
    for (column, value) in solution.iter_mut().enumerate() {
        let mut replaced = unit;
        for row in 0..3 {
            replaced[row][column] = target[row];
        }
        *value = determinant(&replaced) / whole / by[column];
    }
    Some(solution)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_samples_give_exact_coefficients() {
        let truth = [5.0, 0.02, 8e-7];
        let mut fit = Fit::new([10.0, 0.01, 2e-6], [1.0, 1e3, 1e6], [1.0, 32.0, 512.0]);
        for round in 0..40 {
            let n = 64.0 * f64::from(1 + round % 20);
            let features = [1.0, n, n * n / 2.0 + n * f64::from(round % 3) * 500.0];
            let value = (0..3).map(|i| truth[i] * features[i]).sum();
            fit.observe(round as u32 % 5, features, value);
        }
        for i in 0..3 {
            assert!(
                (fit.theta()[i] / truth[i] - 1.0).abs() < 0.02,
                "{:?}",
                fit.theta()
            );
        }
    }

    #[test]
    fn what_samples_do_not_tell_apart_stays_as_the_prior_had_it() {
        // Bytes and descriptors rise together: only their sum is determined.
        let mut fit = Fit::new([1.0, 2e-6, 0.02], [1.0, 1e6, 10.0], [1.0, 1e5, 1.0]);
        for round in 1..60 {
            let blocks = f64::from(round % 12 + 1);
            fit.observe(
                0,
                [1.0, blocks * 1e5, blocks],
                1.0 + blocks * 0.1 + blocks * 0.01,
            );
        }
        let [alpha, per_byte, per_block] = fit.theta();
        assert!((alpha - 1.0).abs() < 0.2, "{:?}", fit.theta());
        assert!(
            (per_byte * 1e5 + per_block - 0.11).abs() < 0.011,
            "{:?}",
            fit.theta()
        );
        assert!(per_byte > 0.0 && per_block >= 0.0);
    }

    #[test]
    fn coefficients_are_never_negative() {
        let mut fit = Fit::new([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]);
        for round in 1..50 {
            let x = f64::from(round % 7 + 1);
            // Falls with x: the best line has a negative slope.
            fit.observe(0, [1.0, x, x * x], 10.0 / x);
        }
        assert!(
            fit.theta().iter().all(|&value| value >= 0.0),
            "{:?}",
            fit.theta()
        );
    }

    #[test]
    fn one_wild_sample_moves_little() {
        let mut fit = Fit::new([1.0, 1.0, 0.0], [1.0, 10.0, 100.0], [1.0, 1.0, 1.0]);
        for round in 1..40 {
            let x = f64::from(round % 9 + 1);
            fit.observe(0, [1.0, x, 0.0], 2.0 + 3.0 * x);
        }
        let before = fit.predict([1.0, 5.0, 0.0]);
        fit.observe(0, [1.0, 5.0, 0.0], 17_000.0);
        let after = fit.predict([1.0, 5.0, 0.0]);
        assert!((after / before - 1.0).abs() < 0.1, "{before} {after}");
        fit.observe(0, [1.0, 5.0, 0.0], f64::NAN);
        assert_eq!(after, fit.predict([1.0, 5.0, 0.0]));
    }

    #[test]
    fn one_wild_sample_at_first_does_not_end_it() {
        let prior = [1.0, 1.0, 0.0];
        let mut fit = Fit::new(prior, [1.0, 10.0, 100.0], [1.0, 1.0, 1.0]);
        fit.observe(0, [1.0, 5.0, 0.0], 17_000.0);
        let thought = fit.predict([1.0, 5.0, 0.0]);
        assert!(thought <= 6.0 * WILD, "{thought}");
        for round in 1..12 {
            let x = f64::from(round % 9 + 1);
            fit.observe(0, [1.0, x, 0.0], 2.0 + 3.0 * x);
        }
        let after = fit.predict([1.0, 5.0, 0.0]);
        assert!((after / 17.0 - 1.0).abs() < 0.3, "{after}");
    }
}

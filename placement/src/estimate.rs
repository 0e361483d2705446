//! How good the estimates are: error and coverage per path, and how long outputs are per model and route.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::calibration::RatioQuantile;
use crate::coefficients::{LOAD_BUCKETS, PathFactors, load_bucket};
use crate::record::{DecisionRecord, Kind};

/// The two ways of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Path {
    Local,
    Remote,
}

impl From<Kind> for Path {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Local => Path::Local,
            Kind::Remote => Path::Remote,
        }
    }
}

impl Path {
    /// As metric labels have it.
    pub fn word(self) -> &'static str {
        match self {
            Path::Local => "local",
            Path::Remote => "remote",
        }
    }
}

/// actual / estimated, for `baton_estimate_error_ratio{path,term}`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ErrorRatio {
    pub path: Path,
    pub term: &'static str,
    pub ratio: f64,
}

/// Estimates below this say nothing by their ratio: a term of a microsecond may be off by any factor.
const SMALLEST_MILLISECONDS: f64 = 1.0;
/// Of the exponential mean of coverage: about the last 200 runs.
const COVERAGE_STEP: f64 = 1.0 / 200.0;

#[derive(Clone, Debug, Default)]
struct PathState {
    quantiles: [RatioQuantile; LOAD_BUCKETS],
    seen: u64,
    covered: f64,
}

/// Follows estimated against actual times to the first token. One per model; not shared between threads by itself.
#[derive(Clone, Debug, Default)]
pub struct EstimateTracker {
    local: PathState,
    remote: PathState,
}

impl EstimateTracker {
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in one run: the estimate and its upper bound, sequences that decoded on the computing worker, and what it was.
    pub fn observe(&mut self, path: Path, running: u32, mean: f64, upper: f64, actual: f64) {
        if !(mean > 0.0 && upper.is_finite() && actual.is_finite()) {
            return;
        }
        let state = self.state_mut(path);
        let covered = if actual <= upper { 1.0 } else { 0.0 };
        state.seen += 1;
        let step = (1.0 / state.seen as f64).max(COVERAGE_STEP);
        state.covered += step * (covered - state.covered);
        state.quantiles[load_bucket(running)].observe(actual / mean);
    }

    /// Takes in a finished record. Gives the error of every term that was observed and estimated at a millisecond or more.
    pub fn observe_record(&mut self, record: &DecisionRecord) -> Vec<ErrorRatio> {
        let (Some(chosen), Some(actual)) = (record.chosen(), record.actual.as_ref()) else {
            return Vec::new();
        };
        // A run that was planned anew no longer says anything about its first plan.
        if record.fallback.is_some() || actual.retries > 0 {
            return Vec::new();
        }
        let path = Path::from(chosen.kind);
        let first_token = actual.first_token_milliseconds;
        if let Some(first_token) = first_token {
            self.observe(
                path,
                chosen.inputs.compute.running_sequences,
                chosen.mean,
                chosen.upper,
                first_token,
            );
        }
        let terms = &chosen.terms;
        let pairs = [
            ("queue", terms.queue, actual.terms.queue),
            ("prefill", terms.prefill, actual.terms.prefill),
            ("transfer", terms.transfer, actual.terms.transfer),
            (
                "synchronization",
                terms.synchronization,
                actual.terms.synchronization,
            ),
            ("admission", terms.admission, actual.terms.admission),
            ("timeToFirstToken", chosen.mean, first_token),
        ];
        pairs
            .into_iter()
            .filter(|&(_, estimated, _)| estimated >= SMALLEST_MILLISECONDS)
            .filter_map(|(term, estimated, actual)| {
                actual.map(|actual| ErrorRatio {
                    path,
                    term,
                    ratio: actual / estimated,
                })
            })
            .collect()
    }

    /// The share of recent runs within their upper bound, for `baton_estimate_coverage_ratio{path}`; none before the first.
    pub fn coverage(&self, path: Path) -> Option<f64> {
        let state = self.state(path);
        (state.seen > 0).then_some(state.covered)
    }

    /// Upper factors to place with, for the coefficient set.
    pub fn factors(&self) -> PathFactors {
        let factors = |state: &PathState| {
            let mut factors = [None; LOAD_BUCKETS];
            for (factor, quantile) in factors.iter_mut().zip(&state.quantiles) {
                *factor = quantile.upper();
            }
            factors
        };
        PathFactors {
            local: factors(&self.local),
            remote: factors(&self.remote),
        }
    }

    fn state(&self, path: Path) -> &PathState {
        match path {
            Path::Local => &self.local,
            Path::Remote => &self.remote,
        }
    }

    fn state_mut(&mut self, path: Path) -> &mut PathState {
        match path {
            Path::Local => &mut self.local,
            Path::Remote => &mut self.remote,
        }
    }
}

/// Before anything was seen: about the mean output of published conversation traces.
const FIRST_GUESS_TOKENS: f64 = 256.0;
/// Of the running mean: about the last 100 runs.
const OUTPUT_STEP: f64 = 1.0 / 100.0;
/// Routes beyond this share one mean, so that clients cannot fill the memory with names.
const MOST_ROUTES: usize = 1024;

/// Running mean of the output length per (model, route).
#[derive(Clone, Debug, Default)]
pub struct OutputLengths {
    means: HashMap<(String, String), (u64, f64)>,
}

impl OutputLengths {
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in a run that ended by itself or at its limit.
    pub fn observe(&mut self, model: &str, route: &str, output_tokens: u32) {
        let mut key = (model.to_owned(), route.to_owned());
        if !self.means.contains_key(&key) && self.means.len() >= MOST_ROUTES {
            key = (String::new(), String::new());
        }
        let (seen, mean) = self.means.entry(key).or_insert((0, FIRST_GUESS_TOKENS));
        *seen += 1;
        // The first runs replace the guess; later ones move the mean.
        let step = (1.0 / *seen as f64).max(OUTPUT_STEP);
        *mean += step * (f64::from(output_tokens) - *mean);
    }

    /// E[osl], not yet bounded by the request's maximum.
    pub fn expected(&self, model: &str, route: &str) -> f64 {
        self.means
            .get(&(model.to_owned(), route.to_owned()))
            .or_else(|| self.means.get(&(String::new(), String::new())))
            .map_or(FIRST_GUESS_TOKENS, |&(_, mean)| mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn coverage_and_factors_follow_what_happens() {
        let mut tracker = EstimateTracker::new();
        assert_eq!(tracker.coverage(Path::Local), None);
        assert_eq!(tracker.factors(), PathFactors::default());
        let mut rng = Rng::new(3);
        for _ in 0..300 {
            let factor = tracker.factors().local[0].unwrap_or(1.25);
            let actual = 100.0 * (1.0 + 0.2 * (rng.unit() - 0.5));
            tracker.observe(Path::Local, 0, 100.0, 100.0 * factor, actual);
        }
        let coverage = tracker.coverage(Path::Local).unwrap();
        assert!((0.90..=0.99).contains(&coverage), "{coverage}");
        let factor = tracker.factors().local[0].unwrap();
        assert!((1.07..1.101).contains(&factor), "{factor}");
        assert_eq!(tracker.coverage(Path::Remote), None);
    }

    #[test]
    fn output_lengths_are_learnt_per_route() {
        let mut lengths = OutputLengths::new();
        assert_eq!(lengths.expected("m", "chat"), 256.0);
        for _ in 0..50 {
            lengths.observe("m", "chat", 40);
            lengths.observe("m", "completions", 400);
        }
        assert!((lengths.expected("m", "chat") - 40.0).abs() < 1.0);
        assert!((lengths.expected("m", "completions") - 400.0).abs() < 1.0);
        for route in 0..2_000 {
            lengths.observe("m", &format!("{route}"), 7);
        }
        assert!(lengths.means.len() <= MOST_ROUTES + 1);
    }
}

//! The constants of the cost model: of a class of workers, of a link, and the set of them that a decision used.

use serde::{Deserialize, Serialize};

use crate::digest;

/// Load buckets of a residual quantile: no decode beside, then up to 4, up to 16, and more sequences.
pub const LOAD_BUCKETS: usize = 4;

/// The bucket for `sequences` that decode.
pub fn load_bucket(sequences: u32) -> usize {
    match sequences {
        0 => 0,
        1..=4 => 1,
        5..=16 => 2,
        _ => 3,
    }
}

/// How long the steps of one class of workers take, in milliseconds. Never negative.
///
/// `prefill(n, c) = max(floor, a + b·n + k·(n·c + n²/2))` and `decode_step(B, S) = d0 + d1·B + d2·S` for n tokens to
/// compute after c cached ones, B sequences and S tokens of context in all.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WorkerCoefficients {
    /// ms per prefill step.
    pub a: f64,
    /// ms per token.
    pub b: f64,
    /// ms per token of attention: each new token over each one before it.
    pub k: f64,
    /// ms; no prefill step is shorter.
    pub floor: f64,
    /// ms per decode step.
    pub d0: f64,
    /// ms per sequence in the step.
    pub d1: f64,
    /// ms per token of context in the step.
    pub d2: f64,
    /// Actual / predicted that 95 of 100 steps stay below, by phase and load.
    #[serde(default)]
    pub upper: PhaseFactors,
    /// Steps that these constants were fitted from; none is a prior.
    #[serde(default)]
    pub samples: PhaseSamples,
}

/// Steps seen, by what they computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PhaseSamples {
    /// Of `a`, `b`, `k` and `floor`.
    pub prefill: u64,
    /// Of `d0`, `d1` and `d2`.
    pub decode: u64,
}

impl PhaseSamples {
    pub fn total(&self) -> u64 {
        self.prefill + self.decode
    }
}

impl WorkerCoefficients {
    /// Not negative, not absurdly large, and no step takes no time. What a peer published is checked with this before it is used.
    pub fn is_sound(&self) -> bool {
        let values = [
            self.a, self.b, self.k, self.floor, self.d0, self.d1, self.d2,
        ];
        sound(&values)
            && sound(&self.upper.prefill)
            && sound(&self.upper.decode)
            && self.a.max(self.floor) + self.b + self.k > 0.0
            && self.d0 + self.d1 + self.d2 > 0.0
    }
}

/// No constant of any machine comes near: thirty years a token. Below it no cost overflows, and a record holds numbers only.
const LARGEST: f64 = 1e12;

fn sound(values: &[f64]) -> bool {
    values.iter().all(|value| (0.0..=LARGEST).contains(value))
}

/// Upper factors per phase and load bucket.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PhaseFactors {
    pub prefill: [f64; LOAD_BUCKETS],
    pub decode: [f64; LOAD_BUCKETS],
}

/// Before anything was measured: priors are off by up to this in the published comparisons (reference cost model, 2d).
pub const UNMEASURED_UPPER: f64 = 1.25;

impl Default for PhaseFactors {
    fn default() -> Self {
        Self {
            prefill: [UNMEASURED_UPPER; LOAD_BUCKETS],
            decode: [UNMEASURED_UPPER; LOAD_BUCKETS],
        }
    }
}

/// How long moving KV takes over one link, in milliseconds: `alpha + perByte·bytes + perDescriptor·descriptors`, and
/// `synchronization` for the round trips of the lease protocol, which nothing hides.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LinkCoefficients {
    /// ms per transfer.
    pub alpha: f64,
    /// ms per byte; 1e-6 is one gigabyte a second.
    pub per_byte: f64,
    /// ms per block moved.
    pub per_descriptor: f64,
    /// ms for claim and completion.
    pub synchronization: f64,
    /// Actual / predicted that 95 of 100 transfers stay below.
    pub upper: f64,
    #[serde(default)]
    pub samples: u64,
}

impl LinkCoefficients {
    /// Not negative and not absurdly large.
    pub fn is_sound(&self) -> bool {
        sound(&[
            self.alpha,
            self.per_byte,
            self.per_descriptor,
            self.synchronization,
            self.upper,
        ])
    }
}

/// Where between two domains, and how, KV moves.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LinkName {
    pub source: String,
    pub target: String,
    pub transport: String,
}

/// The coefficients of one class of workers, by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WorkerClass {
    pub name: String,
    pub coefficients: WorkerCoefficients,
}

/// The coefficients of one link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LinkClass {
    pub name: LinkName,
    pub coefficients: LinkCoefficients,
}

/// Actual / predicted time to first token that 95 of 100 runs stay below, as the router saw it per path and load bucket
/// of the worker that computes. `None` until enough runs were seen; then the workers' and the link's own factors serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PathFactors {
    pub local: [Option<f64>; LOAD_BUCKETS],
    pub remote: [Option<f64>; LOAD_BUCKETS],
}

/// Every learnt constant that decisions of one stretch of time read: stored once as `coefficients/<digest>.json`.
///
/// Records name classes and links by their position here. Make a new set at most about once a second: each is a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CoefficientSet {
    pub workers: Vec<WorkerClass>,
    pub links: Vec<LinkClass>,
    #[serde(default)]
    pub paths: PathFactors,
}

impl CoefficientSet {
    /// The name of the file that holds this set, without `.json`.
    pub fn digest(&self) -> String {
        digest::of_json(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_make_costs_overflow_is_not_sound() {
        let link = |per_byte| LinkCoefficients {
            alpha: 1.0,
            per_byte,
            per_descriptor: 0.0,
            synchronization: 0.0,
            upper: 1.0,
            samples: 0,
        };
        for per_byte in [0.0, 1e-6, 1e9] {
            assert!(link(per_byte).is_sound(), "{per_byte}");
        }
        for per_byte in [-1.0, 1e300, f64::MAX, f64::INFINITY, f64::NAN] {
            assert!(!link(per_byte).is_sound(), "{per_byte}");
        }
    }

    #[test]
    fn a_set_survives_json_and_its_digest_follows_its_content() {
        let mut set = CoefficientSet {
            workers: vec![WorkerClass {
                name: "cpu".into(),
                coefficients: WorkerCoefficients {
                    a: 0.1 + 0.2,
                    b: 1.0 / 3.0,
                    k: 8.16e-7,
                    floor: 5.4,
                    d0: 4.88,
                    d1: 0.0139,
                    d2: 2.95e-5,
                    upper: PhaseFactors::default(),
                    samples: PhaseSamples {
                        prefill: 3,
                        decode: 4,
                    },
                },
            }],
            links: vec![],
            paths: PathFactors::default(),
        };
        let text = serde_json::to_string(&set).unwrap();
        let back: CoefficientSet = serde_json::from_str(&text).unwrap();
        assert_eq!(back, set);
        assert_eq!(back.digest(), set.digest());
        assert_eq!(set.digest().len(), 32);
        let before = set.digest();
        set.workers[0].coefficients.d2 =
            f64::from_bits(set.workers[0].coefficients.d2.to_bits() + 1);
        assert_ne!(before, set.digest());
    }
}

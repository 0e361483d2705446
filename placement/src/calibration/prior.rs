//! Where fitting starts: published fits per accelerator and model, or a short self-measurement at worker start.

use super::fit::Fit;
use super::worker::{DECODE_SCALE, DECODE_SMALL, PREFILL_SCALE, PREFILL_SMALL};
use crate::coefficients::{
    LinkCoefficients, PhaseFactors, PhaseSamples, UNMEASURED_UPPER, WorkerCoefficients,
};

/// Fits to aiconfigurator 0.12's measured database (vLLM 0.24.0, bf16), reference cost model, section 2a. A model of a model:
/// off by a few to forty percent on a real device, which costs placement almost nothing until the first steps are seen.
/// Name, a, b, k, floor, d0, d1, d2.
const TABLE: [(&str, [f64; 7]); 6] = [
    (
        "h200-8b-tp1",
        [1.66, 0.01972, 8.16e-7, 5.4, 4.88, 0.0139, 2.95e-5],
    ),
    ("h100-8b-tp1", UNKNOWN),
    (
        "h200-32b-tp2",
        [4.98, 0.04846, 1.665e-6, 13.4, 10.56, 0.0299, 2.99e-5],
    ),
    (
        "h100-32b-tp2",
        [6.49, 0.04891, 1.621e-6, 16.8, 13.57, 0.0274, 4.22e-5],
    ),
    (
        "h200-70b-tp4",
        [4.18, 0.06119, 1.025e-6, 13.2, 11.93, 0.0393, 1.87e-5],
    ),
    (
        "h100-70b-tp4",
        [6.48, 0.06083, 9.99e-7, 16.7, 15.05, 0.0381, 2.65e-5],
    ),
];

/// An H100 with a model of 8 B parameters.
const UNKNOWN: [f64; 7] = [2.66, 0.01939, 8.07e-7, 7.0, 6.37, 0.0119, 4.17e-5];

/// Names of the built-in priors.
pub fn built_in_names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|&(name, _)| name)
}

/// What is believed of a worker of which nothing is known.
pub fn unknown_worker() -> WorkerCoefficients {
    coefficients(UNKNOWN)
}

/// A built-in prior by name (`h100-8b-tp1`, …).
pub fn built_in(name: &str) -> Option<WorkerCoefficients> {
    let (_, values) = *TABLE.iter().find(|(known, _)| *known == name)?;
    Some(coefficients(values))
}

fn coefficients([a, b, k, floor, d0, d1, d2]: [f64; 7]) -> WorkerCoefficients {
    WorkerCoefficients {
        a,
        b,
        k,
        floor,
        d0,
        d1,
        d2,
        upper: PhaseFactors::default(),
        samples: PhaseSamples::default(),
    }
}

/// A prefill step that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillMeasurement {
    pub tokens: u32,
    pub cached: u32,
    pub milliseconds: f64,
}

/// A decode step that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeMeasurement {
    pub sequences: u32,
    pub context: u64,
    pub milliseconds: f64,
}

/// A prior from a few steps measured at worker start. Three prefill steps of different lengths and two decode steps are enough;
/// what they do not determine is taken in proportion from a small transformer. `None` where a kind is missing altogether.
pub fn measured(
    prefill: &[PrefillMeasurement],
    decode: &[DecodeMeasurement],
) -> Option<WorkerCoefficients> {
    let usable = |milliseconds: f64| milliseconds.is_finite() && milliseconds > 0.0;
    let longest = prefill
        .iter()
        .filter(|one| usable(one.milliseconds) && one.tokens > 0)
        .max_by_key(|one| one.tokens)?;
    let widest = decode
        .iter()
        .filter(|one| usable(one.milliseconds) && one.sequences > 0)
        .max_by_key(|one| one.sequences)?;
    // Where a single step is all there is: nearly all of a long prefill is per token, nearly all of a decode step is fixed.
    let per_token = longest.milliseconds / f64::from(longest.tokens);
    let mut prefill_fit = Fit::new(
        [per_token, per_token * 0.9, per_token * 1e-4],
        PREFILL_SCALE,
        PREFILL_SMALL,
    );
    let step = widest.milliseconds;
    let mut decode_fit = Fit::new(
        [step * 0.9, step * 0.05, step * 1e-5],
        DECODE_SCALE,
        DECODE_SMALL,
    );
    // Each step counts several times: what is there has to outweigh the guess it starts from.
    for _ in 0..4 {
        for one in prefill {
            let (tokens, cached) = (f64::from(one.tokens), f64::from(one.cached));
            let attention = tokens * cached + tokens * tokens / 2.0;
            prefill_fit.observe(0, [1.0, tokens, attention], one.milliseconds);
        }
        for one in decode {
            let features = [1.0, f64::from(one.sequences), one.context as f64];
            decode_fit.observe(0, features, one.milliseconds);
        }
    }
    let [a, b, k] = prefill_fit.theta();
    let [d0, d1, d2] = decode_fit.theta();
    Some(WorkerCoefficients {
        a,
        b,
        k,
        floor: 0.0,
        d0,
        d1,
        d2,
        upper: PhaseFactors::default(),
        samples: PhaseSamples::default(),
    })
}

/// A prior for a link by kind of transport, on the careful side of what was measured (reference cost model, section 2c; 2 ms for
/// the lease protocol as in the placement lab). An unknown kind is taken for TCP.
pub fn link_prior(transport: &str) -> LinkCoefficients {
    let (alpha, gigabytes_per_second, per_descriptor) =
        match transport.to_ascii_lowercase().as_str() {
            "local" => (0.05, 8.0, 0.001),
            "shm" => (0.2, 6.0, 0.002),
            "rdma" => (0.4, 40.0, 0.001),
            "cudaipc" | "cuda-ipc" => (0.1, 300.0, 0.001),
            _ => (1.0, 1.0, 0.005),
        };
    LinkCoefficients {
        alpha,
        per_byte: 1e-6 / gigabytes_per_second,
        per_descriptor,
        synchronization: 2.0,
        upper: UNMEASURED_UPPER,
        samples: 0,
    }
}

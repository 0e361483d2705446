//! Real work in modelled time: a model whose steps say how long they take instead of being measured, for simulations.

use baton_placement::coefficients::WorkerCoefficients;

use super::simulated::step_duration;
use super::{Batch, Model, ModelError, ModelFacts, StepReport};
use crate::kv::store::BlockStore;

/// Another model's tokens and KV, in the time that the coefficients say.
pub struct Modelled {
    model: Box<dyn Model>,
    coefficients: WorkerCoefficients,
}

impl std::fmt::Debug for Modelled {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Modelled")
            .field("coefficients", &self.coefficients)
            .finish_non_exhaustive()
    }
}

impl Modelled {
    pub fn new(model: Box<dyn Model>, coefficients: WorkerCoefficients) -> Self {
        Self {
            model,
            coefficients,
        }
    }
}

impl Model for Modelled {
    fn facts(&self) -> &ModelFacts {
        self.model.facts()
    }

    fn forward(&mut self, batch: &Batch<'_>, kv: &BlockStore) -> Result<StepReport, ModelError> {
        let report = self.model.forward(batch, kv)?;
        Ok(StepReport {
            duration_milliseconds: Some(step_duration(&self.coefficients, batch)),
            ..report
        })
    }
}

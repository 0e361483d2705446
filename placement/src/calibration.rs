//! Learning the constants of the cost model from steps and transfers actually made.
//!
//! `calibration::fit` is the least-squares core with forgetting, `calibration::quantile` the upper factors, `calibration::worker`
//! and `calibration::link` what is fitted, `calibration::prior` where it starts from, `calibration::sharing` what workers of one kind
//! learn from each other. A worker fits its own steps and publishes
//! [`WorkerCoefficients`] as JSON over Watch; routers fit links from the transfers they dispatched.

mod fit;
mod link;
mod prior;
mod quantile;
mod sharing;
mod worker;

pub use link::LinkCalibrator;
pub use prior::{
    DecodeMeasurement, PrefillMeasurement, built_in, built_in_names, link_prior, measured,
    unknown_worker,
};
pub use quantile::RatioQuantile;
pub use sharing::shared;
pub use worker::{StepShape, WorkerCalibrator};

pub use crate::coefficients::{LinkCoefficients, PhaseFactors, PhaseSamples, WorkerCoefficients};

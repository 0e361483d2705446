//! Learning the constants of the cost model from steps and transfers actually made.
//!
//! `calibration::fit` is the least-squares core with forgetting, `calibration::quantile` the upper factors, `calibration::worker`
//! and `calibration::link` what is fitted, `calibration::prior` where it starts from. A worker fits its own steps and publishes
//! [`WorkerCoefficients`] as JSON over Watch; routers fit links from the transfers they dispatched.

mod fit;
mod link;
mod prior;
mod quantile;
mod worker;

pub use link::LinkCalibrator;
pub use prior::{
    DecodeMeasurement, PrefillMeasurement, built_in, built_in_names, link_prior, measured,
};
pub use quantile::RatioQuantile;
pub use worker::{StepShape, WorkerCalibrator};

pub use crate::coefficients::{LinkCoefficients, PhaseFactors, WorkerCoefficients};

//! placeholder essay
pub mod breaker;
pub mod budget;
pub mod calibration;
pub mod coefficients;
pub mod cost;
mod digest;
pub mod estimate;
pub mod fleet;
pub mod index;
pub mod place;
pub mod policy;
pub mod record;
pub mod replay;
pub mod rng;

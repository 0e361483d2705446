//! Reconciles the three resources of Baton into what a cluster runs.

pub mod admin;
pub mod app;
#[cfg(test)]
mod bounds;
pub mod cause;
pub mod condition;
pub mod controller;
#[cfg(test)]
mod documented;
pub mod fetch;
pub mod lease;
pub mod metrics;
pub mod objects;
pub mod policy;
pub mod pool;
pub mod random;
pub mod worker;

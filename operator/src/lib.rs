//! Reconciles the three resources of Baton into what a cluster runs.

pub mod pool;
pub mod fetch;
pub mod lease;
pub mod worker;

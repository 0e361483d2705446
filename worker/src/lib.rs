//! The daemon of a GPU pod: engines, KV pool, leases, transports, registration.

pub mod config;
pub mod engine;
pub mod kv;
pub mod model;
pub mod sampling;
pub mod serve;
pub mod transport;

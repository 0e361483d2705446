//! `baton-worker serve`: the daemon of one worker.
//!
//! - [`start`]: from a configuration to a worker that serves, and to its end. `engine`: model, pool and engine from a configuration.
//! - `compute`: the one thread that drives the engine. `service`: the gRPC calls; `daemon` is what they share.
//! - `operations`: what runs, by run; `results`: prefills, kept by operation id. `peers`: the lease protocol to other workers.
//! - `report`: load reports and the reaper. `traces`: spans of what is done. `card`: what is registered. `admin`, `drain` and `metrics`: HTTP.
//! - `offering`: the transports. [`command`]: the command line. `machine`: memory and processor. `local`: addresses within the process.
//!
//! Absent on purpose: Kubernetes, placement, text. A worker sees tokens and KV.

pub(crate) mod admin;
mod card;
pub mod command;
mod compute;
mod daemon;
pub(crate) mod drain;
pub(crate) mod engine;
mod local;
mod machine;
mod messages;
mod metrics;
pub(crate) mod offering;
mod operations;
pub(crate) mod peers;
mod report;
mod results;
pub(crate) mod service;
pub mod start;
mod traces;

pub use start::{Addresses, Running, Start, start};

use baton_system::entropy::NoEntropy;

use crate::kv::store::StoreError;
use crate::model::ModelError;

/// Why a worker did not start: one sentence that names the object, the field and the next step.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("{flag} {address}: {cause}: stop what listens there or choose another port")]
    Port {
        flag: &'static str,
        address: String,
        cause: std::io::Error,
    },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(
        "worker {worker}: {field}: {blocks} blocks of {block_bytes} bytes are too few for engine.maxSequences {sequences}, each needs one: \
         ask for at least {} bytes or lower maxSequences", sequences * block_bytes
    )]
    PoolTooSmall {
        worker: String,
        field: &'static str,
        blocks: u64,
        sequences: u64,
        block_bytes: u64,
    },
    #[error(
        "worker {worker}: {field}: {blocks} blocks are more than this machine can address: ask for fewer"
    )]
    PoolTooLarge {
        worker: String,
        field: &'static str,
        blocks: u64,
    },
    #[error(
        "worker {worker}: kvPool.transports: none of them works here, Local reaches this process only and Shm this host: add Tcp"
    )]
    NoTransport { worker: String },
    #[error(
        "processor: it lacks {missing}, which this build needs (x86-64-v3): run on a newer machine or rebuild without target-cpu"
    )]
    Processor { missing: &'static str },
    #[error("incarnation: {0}")]
    Random(#[from] NoEntropy),
    #[error("compute thread: {0}: check the limit on threads")]
    Thread(String),
    #[error("card: {0}: report this as a bug")]
    Card(String),
    #[error("{0}")]
    Fault(String),
}

//! What Baton's processes say to each other, and the rules that they share.
//!
//! Everything here is a value or a pure function: no I/O, no clock, no randomness, no Kubernetes. The router, the workers,
//! the simulator and the tests use the same tables, so they cannot disagree about what is legal.
//!
//! - [`wire`]: messages and stubs of `proto/worker.proto`.
//! - [`ids`]: names of runs, operations, workers, leases.
//! - [`card`]: what a worker registers; [`identity`]: when the KV of one worker means the same on another.
//! - [`hash`]: block hashes that *find* KV; [`header`] and [`checksum`]: what *proves* it.
//! - [`lifecycle`]: states of a run and the one table of legal events.
//! - [`failure`]: classes of failure and what is done about each.
//! - `samples`: a card for tests, behind the feature of that name.
//! - [`sse`]: reads server-sent events from the pieces of a stream.

pub mod card;
pub mod checksum;
pub mod failure;
pub mod hash;
pub mod header;
pub mod identity;
pub mod ids;
pub mod lifecycle;
#[cfg(any(test, feature = "samples"))]
pub mod samples;
pub mod sse;

#[allow(
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::pedantic
)]
pub mod wire {
    //! Messages and stubs generated from `proto/worker.proto`.
    tonic::include_proto!("baton.worker.v1");
}

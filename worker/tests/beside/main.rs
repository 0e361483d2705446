//! The daemon beside a server that is played here: over real HTTP, ZeroMQ and gRPC.

// The lint knows test functions only, and what they share is test code as well.
#![allow(clippy::unwrap_used)]

mod connector;
mod double;
mod events;
mod registration;
mod sglang;
mod watcher;

//! What routers and peers rely on in a worker, over real sockets and with real KV.

// The lint knows test functions only, and what they share is test code as well.
#![allow(clippy::unwrap_used)]

mod cases;
mod decode;
mod engine;
mod handoff;
mod harness;
mod lifecycle;
mod process;
mod router_gone;
mod shared_memory;
mod watch;

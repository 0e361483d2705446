//! What routers and peers rely on in a worker, over real sockets and with real KV.

mod decode;
mod engine;
mod handoff;
mod harness;
mod lifecycle;
mod watch;

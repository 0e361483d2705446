//! A stand-in for a vLLM server: it speaks as one does and computes nothing.
//!
//! - [`answers`], [`events`], [`handshake`], [`text`]: what it says, over HTTP and ZeroMQ. The bench of routers before engines
//!   (`benches/engines/fake.rs`) is made of them too.
//! - [`serving`]: its connections, in one thread.
//! - [`server`]: the program `vllm-stand-in`, which runs in pods in the place of `vllm serve`. [`started`]: the command line that it
//!   takes.

pub mod answers;
pub mod events;
pub mod handshake;
pub mod server;
pub mod serving;
pub mod started;
pub mod text;

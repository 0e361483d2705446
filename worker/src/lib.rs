//! The daemon of a GPU pod: engines, KV pool, leases, transports, registration.
//!
//! From the outside in:
//! - [`serve`]: the process. gRPC service, admin port, the one compute thread, what it registers and reports. [`config`]: what it is told.
//! - [`engine`]: sequences from admission to their last token, driven by `step()`: by the compute thread here, by a simulated clock
//!   in simulations. `engine::scheduler` decides what each step computes, and is pure.
//! - [`model`]: what a step computes: `Builtin` (GGUF on the processor), `tiny` (the same code, random weights), `Simulated`.
//!   [`sampling`]: from logits to a token.
//! - [`connector`]: the KV of an engine in another process, by its plug-in: published and taken like the pool's own.
//! - [`kv`]: blocks, their owners, the prefix cache, leases, and `kv::intake`, which proves what was handed over.
//! - [`beside`]: the daemon beside a server of its own, vLLM or SGLang: what it registers and reports of it, and its cache events.
//! - [`transport`]: how blocks move between workers, one trait with one conformance suite.
//!
//! What holds: one thread computes; a sequence's tokens do not depend on what is computed beside it; a block is free only when no
//! request and no transfer refers to it; nothing that came from a peer is used before it is proven.
//!
//! What is absent: Kubernetes, placement of requests (the cost formulas are `baton_placement`'s), text; `unsafe` outside of [`transport`].

pub mod beside;
pub mod config;
pub mod connector;
pub mod engine;
pub mod kv;
pub mod model;
pub mod sampling;
pub mod serve;
pub mod transport;

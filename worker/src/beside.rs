//! The daemon beside a server of its own: vLLM or SGLang, started by somebody else and called by routers at its own port.
//!
//! - [`events`]: what the server publishes of its prefix cache. [`index`]: the same under Baton's block hashes. [`follow`]: its batches
//!   without a hole.

pub mod events;
pub mod follow;
pub mod index;

#[cfg(test)]
mod frames;

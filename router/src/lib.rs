//! The router: an OpenAI-compatible front, placement of every request, dispatch to workers, and a record of each decision.
//!
//! - [`run`]: the seam between the front and dispatch.
//! - [`policy`]: policies in force.

pub mod policy;
pub mod run;

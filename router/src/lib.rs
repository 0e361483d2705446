//! The router: an OpenAI-compatible front, placement of every request, dispatch to workers, and a record of each decision.
//!
//! - [`openai`]: OpenAI's HTTP types.
//! - [`text`]: tokenising, chat templates, text of generated tokens.
//! - [`run`]: the seam between the front and dispatch.
//! - [`policy`]: policies in force.

pub mod openai;
pub mod policy;
pub mod run;
pub mod text;

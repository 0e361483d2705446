//! The router: an OpenAI-compatible front, placement of every request, dispatch to workers, and a record of each decision.
//!
//! In the order in which a request passes them:
//! - [`front`]: HTTP. [`openai`]: OpenAI's types. [`text`]: tokenising, chat templates, text of generated tokens.
//! - [`forward`]: requests that engines get as they came.
//! - [`run`]: the seam between the front and dispatch.
//! - [`dispatch`]: places a run, tries plans on workers, decides about failures.
//! - [`fleet`]: what is known of the workers. [`policy`]: how to place. [`learning`]: what runs teach.
//! - [`records`]: why each request went where. [`trace`]: its spans. [`metrics`], [`admin`]: for people and scrapers.
//! - [`cluster`]: workers and policies from a Kubernetes API server; [`followed`]: from files.
//! - [`app`]: one process from its flags.

pub mod admin;
pub mod app;
mod causes;
pub mod clock;
pub mod cluster;
pub mod dispatch;
pub mod fleet;
pub mod followed;
pub mod forward;
pub mod front;
pub mod learning;
pub mod metrics;
pub mod openai;
pub mod policy;
pub mod records;
pub mod run;
pub mod text;
pub mod trace;

//! Requests that are passed on to engines as they came: what Baton reads of them, and what it writes into them.
//!
//! A body is kept as its bytes. [`members`] finds the few top-level members that matter, [`asked`] reads them leniently (what an
//! engine may know is the engine's to refuse), [`prompt`] makes tokens of them where that can be done, and [`edit`] gives the bytes of
//! a leg: those that were sent, but for the members that Baton must add, replace or take away. Pure.

pub mod asked;
pub mod edit;
pub mod legs;
pub mod members;
pub mod prompt;

use baton_placement::record::Credit;
use bytes::Bytes;

use edit::Edit;

/// A request as it is passed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    /// Where the engine serves it: `/v1/chat/completions`.
    pub path: &'static str,
    /// As the client sent it.
    pub body: Bytes,
    /// The model that it names.
    pub model: String,
    /// The client asks for a stream of events.
    pub stream: bool,
    /// What every leg changes: members that are the router's to say, such as the salt of an API key.
    pub edits: Vec<Edit>,
    /// Tokens of the prompt; an estimate where it was not tokenised.
    pub prompt_tokens: u32,
    /// Whether prefixes are credited, and why not.
    pub credit: Credit,
    /// The field for which it has to stay on one worker.
    pub whole: Option<&'static str>,
}

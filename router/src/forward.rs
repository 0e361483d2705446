//! Requests that are passed on to engines as they came: what Baton reads of them, and what it writes into them.
//!
//! A body is kept as its bytes. [`members`] finds the few top-level members that matter, [`asked`] reads them leniently (what an
//! engine may know is the engine's to refuse), [`prompt`] makes tokens of them where that can be done, and [`legs`] gives the bytes of
//! a leg: those that were sent, but for the members that Baton must add, replace or take away ([`ours`], by [`edit`]). Pure.

pub mod asked;
pub mod edit;
pub mod legs;
pub mod members;
pub mod ours;
pub mod prompt;

use baton_placement::record::Credit;
use bytes::Bytes;

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
    /// What its API key says of it, where keys are in force.
    pub keyed: Option<Keyed>,
    /// Tokens of the prompt; an estimate where it was not tokenised.
    pub prompt_tokens: u32,
    /// Whether prefixes are credited, and why not.
    pub credit: Credit,
    /// The field for which it has to stay on one worker.
    pub whole: Option<&'static str>,
}

/// What the API key of a request says of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keyed {
    /// Where it is another than the client's.
    pub cache_salt: Option<String>,
    /// Smaller is more urgent, as with vLLM: the client's, or the most urgent that the key allows. `None`: the key has no bound.
    pub priority: Option<i64>,
}

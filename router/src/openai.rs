//! OpenAI's HTTP types: requests read strictly, answers and errors written in its form. Pure.
//!
//! - [`field`]: reads JSON with the path of each field, so that an error can name it.
//! - [`parameters`]: what both kinds of request have in common. `refused`: fields that are not honoured.
//! - [`chat`], [`completion`]: the two kinds of request.
//! - [`budget`]: how many tokens a request may generate.
//! - [`answer`]: bodies and chunks of both kinds.
//! - [`logprobs`]: log-probabilities in both forms.
//! - [`listing`]: `GET /v1/models`.
//! - [`error`]: errors and their types.

pub mod answer;
pub mod budget;
pub mod chat;
pub mod completion;
pub mod error;
pub mod field;
pub mod listing;
pub mod logprobs;
pub mod parameters;
mod refused;

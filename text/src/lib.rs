//! Text of one model into tokens, as its own files say. Pure.
//!
//! Routers tokenise with it, and the daemon beside a server compares what it gives with what the server computes with.
//!
//! - [`model`]: tokenizer, token bytes and chat template of one model. [`chat`]: what a template shows.
//! - [`bpe`]: the tokens of byte-level models, without what `tokenizers` spends on offsets. [`words`]: how these cut text first.
//! - [`segments`]: tokens of what prompts have in common.
//! - [`template`]: renders a chat as the model was trained to see it.
//!   `python_json`: its JSON filter.
//! - [`vocabulary`]: the bytes of each token.
//!
//! What is absent: text from tokens, which only routers make.

pub mod bpe;
pub mod chat;
pub mod model;
mod python_json;
#[cfg(any(test, feature = "samples"))]
pub mod samples;
pub mod segments;
pub mod template;
pub mod vocabulary;
pub mod words;

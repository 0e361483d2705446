//! Text of one model: prompts into tokens, tokens back into text, as its workers serve it. Pure but for [`library`].
//!
//! - [`library`]: compiles a model's tokenizer and template once and keeps them.
//! - [`model`]: tokenizer, token bytes and chat template of one model.
//! - [`bpe`]: the tokens of byte-level models, without what `tokenizers` spends on offsets. [`words`]: how these cut text first.
//! - [`segments`]: tokens of what prompts have in common.
//! - [`template`]: renders a chat as the model was trained to see it.
//!   `python_json`: its JSON filter.
//! - [`vocabulary`]: the bytes of each token.
//! - [`unicode`]: bytes into text, however characters are split over tokens.
//! - [`stop`]: finds stop strings across tokens.
//! - [`output`]: generated tokens into what may be shown.

pub mod bpe;
pub mod library;
pub mod model;
pub mod output;
mod python_json;
pub mod segments;
pub mod stop;
pub mod template;
pub mod unicode;
pub mod vocabulary;
pub mod words;

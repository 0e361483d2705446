//! Text of one model at the router: what `baton-text` makes of its files, kept, and tokens back into text.
//!
//! - [`library`]: compiles a model's tokenizer and template once and keeps them.
//! - [`unicode`]: bytes into text, however characters are split over tokens.
//! - [`stop`]: finds stop strings across tokens.
//! - [`output`]: generated tokens into what may be shown.

pub mod library;
pub mod output;
pub mod stop;
pub mod unicode;

pub use baton_text::{model, segments, template, vocabulary};

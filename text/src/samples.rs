//! A `tokenizer.json` of a few tokens, for the tests of all crates (feature `samples`).

use serde_json::{Value, json};

/// A tokenizer of a few tokens with the decoder given. Ids are positions in `tokens`; those in `special` are control tokens.
///
/// # Panics
/// One of `special` is not among `tokens`.
#[must_use]
pub fn tokenizer_json(tokens: &[&str], special: &[&str], decoder: &Value) -> Vec<u8> {
    let vocab: serde_json::Map<String, Value> = tokens
        .iter()
        .enumerate()
        .map(|(id, &token)| (token.to_owned(), json!(id)))
        .collect();
    let added: Vec<Value> = special
        .iter()
        .map(|name| {
            json!({"id": vocab[*name], "content": name, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false})
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "post_processor": null, "decoder": decoder,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []},
    })
    .to_string()
    .into_bytes()
}

//! Artifacts: the `tokenizer.json` and the chat template that a model hands to routers, built from what a model file says.
//!
//! A GGUF file holds a vocabulary, its merges and the *name* of a pre-tokenizer; routers read the format of Hugging Face's
//! `tokenizers`. The bytes are a function of the file alone, so workers of one file publish one digest.

use serde_json::{Map, Value, json};

/// What a token is, after GGUF's `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    Normal,
    /// Matched in text before anything else, never shown.
    Control,
    /// Matched in text before anything else, shown.
    UserDefined,
    /// In the table for its number only.
    Unused,
}

impl TokenKind {
    /// 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub fn from_gguf(kind: i64) -> Option<Self> {
        match kind {
            1 | 6 => Some(Self::Normal),
            2 | 3 => Some(Self::Control),
            4 => Some(Self::UserDefined),
            5 => Some(Self::Unused),
            _ => None,
        }
    }
}

/// A byte-level BPE vocabulary.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    /// Each token with its kind; its place is its id.
    pub tokens: Vec<(String, TokenKind)>,
    /// In order of priority.
    pub merges: Vec<(String, String)>,
    pub pre_tokenizer: PreTokenizer,
}

/// How text is cut before merges apply, by GGUF's name for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreTokenizer {
    /// GPT-2's pattern.
    Gpt2,
    /// Every digit alone, then GPT-2's pattern.
    Smollm,
    /// Llama 3's pattern; whole words of the vocabulary are taken as they are.
    Llama3,
    /// Qwen 2's pattern: Llama 3's with digits alone.
    Qwen2,
}

impl PreTokenizer {
    /// Reads `tokenizer.ggml.pre`.
    pub fn from_gguf(name: &str) -> Option<Self> {
        match name {
            "gpt-2" | "default" => Some(Self::Gpt2),
            "smollm" => Some(Self::Smollm),
            "llama-bpe" | "llama3" | "llama-v3" => Some(Self::Llama3),
            "qwen2" => Some(Self::Qwen2),
            _ => None,
        }
    }

    fn json(self) -> Value {
        let bytes = |pattern: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": pattern});
        let split = |digits: &str| {
            let pattern = format!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            );
            json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
        };
        let steps = match self {
            Self::Gpt2 => vec![bytes(true)],
            Self::Smollm => {
                vec![
                    json!({"type": "Digits", "individual_digits": true}),
                    bytes(true),
                ]
            }
            Self::Llama3 => vec![split(r"\p{N}{1,3}"), bytes(false)],
            Self::Qwen2 => vec![split(r"\p{N}"), bytes(false)],
        };
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}

/// The bytes of a `tokenizer.json`.
pub fn tokenizer_json(vocabulary: &Vocabulary) -> Vec<u8> {
    let mut entries = Map::new();
    let mut added = Vec::new();
    for (id, (token, kind)) in vocabulary.tokens.iter().enumerate() {
        entries.insert(token.clone(), json!(id));
        if matches!(kind, TokenKind::Control | TokenKind::UserDefined) {
            added.push(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": *kind == TokenKind::Control,
            }));
        }
    }
    let merges: Vec<Value> = vocabulary
        .merges
        .iter()
        .map(|(left, right)| json!([left, right]))
        .collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": vocabulary.pre_tokenizer.json(),
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": vocabulary.pre_tokenizer == PreTokenizer::Llama3,
            "vocab": entries,
            "merges": merges,
        },
    })
    .to_string()
    .into_bytes()
}

/// For a model that ships no template: the plainest that shows who speaks.
pub const PLAIN_TEMPLATE: &str = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";

/// The bytes of the chat-template artifact.
pub fn chat_template_json(
    template: &str,
    bos_token: Option<&str>,
    eos_token: Option<&str>,
    add_bos: bool,
) -> Vec<u8> {
    json!({"chat_template": template, "bos_token": bos_token, "eos_token": eos_token, "add_bos": add_bos})
        .to_string()
        .into_bytes()
}

/// Ids of the byte-level vocabulary below: bytes are their own ids, these follow.
pub const END_OF_TEXT: u32 = 256;
pub const MESSAGE_START: u32 = 257;
pub const MESSAGE_END: u32 = 258;
/// Tokens of the byte-level vocabulary without extras.
pub const BYTE_LEVEL_TOKENS: usize = 259;

/// A vocabulary that needs no training: one token for each byte, three control tokens, and as many extra words (" w259", …) as
/// it takes to have `size` tokens.
pub fn byte_level(size: usize) -> Vocabulary {
    let bytes = (0..=u8::MAX).map(|byte| (byte_character(byte).to_string(), TokenKind::Normal));
    let control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        .map(|token| (token.to_owned(), TokenKind::Control));
    let extra = (BYTE_LEVEL_TOKENS..size).map(|id| (format!("Ġw{id}"), TokenKind::Normal));
    Vocabulary {
        tokens: bytes.chain(control).chain(extra).collect(),
        merges: Vec::new(),
        pre_tokenizer: PreTokenizer::Gpt2,
    }
}

/// A chat template for the byte-level vocabulary.
pub const BYTE_LEVEL_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// GPT-2's printable stand-in for a byte: itself where it prints, else the next free character from U+0100 on.
fn byte_character(byte: u8) -> char {
    let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if prints(byte) {
        return char::from(byte);
    }
    let place = (0..byte).filter(|byte| !prints(*byte)).count() as u32;
    char::from_u32(0x100 + place).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests;

//! Which `tokenizer.json` is byte-level BPE of the kind that [`super`] makes tokens of.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;

use crate::words::Cut;

/// Why a tokenizer is left to the `tokenizers` crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it has {0}")]
pub struct Unfit(pub(super) &'static str);

/// What counts of the file.
#[derive(Debug)]
pub(super) struct Outline {
    pub(super) single_numerals: bool,
    pub(super) cut: Cut,
    pub(super) vocabulary: HashMap<String, u32>,
    pub(super) merges: Vec<(String, String)>,
    /// Words of the vocabulary are taken as they are.
    pub(super) ignore_merges: bool,
    /// It has a token for bytes that have none.
    pub(super) unknown: bool,
}

#[derive(Deserialize)]
struct File {
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: String,
    dropout: Option<f64>,
    unk_token: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    ignore_merges: bool,
    vocab: HashMap<String, u32>,
    merges: Vec<Pair>,
}

/// As it is written today, and as it was before tokens could hold spaces.
#[derive(Deserialize)]
#[serde(untagged)]
enum Pair {
    Two(String, String),
    Joined(String),
}

impl Outline {
    pub(super) fn read(json: &[u8]) -> Result<Self, Unfit> {
        let file: File =
            serde_json::from_slice(json).map_err(|_| Unfit("a model that is no BPE"))?;
        if file.normalizer.is_some() {
            return Err(Unfit("a normalizer"));
        }
        // This one changes offsets, not tokens.
        if file
            .post_processor
            .is_some_and(|step| step["type"] != "ByteLevel")
        {
            return Err(Unfit("a post-processor"));
        }
        let model = file.model;
        let affixes = [model.continuing_subword_prefix, model.end_of_word_suffix];
        if model.kind != "BPE"
            || model.dropout.is_some_and(|share| share > 0.0)
            || affixes.iter().flatten().any(|affix| !affix.is_empty())
        {
            return Err(Unfit("a model of another kind"));
        }
        let pairs = model.merges.into_iter().map(|pair| match pair {
            Pair::Two(left, right) => Some((left, right)),
            Pair::Joined(both) => {
                let (left, right) = both.split_once(' ')?;
                (!right.contains(' ')).then(|| (left.to_owned(), right.to_owned()))
            }
        });
        let merges = pairs.collect::<Option<Vec<_>>>();
        let (single_numerals, cut) = cut(file.pre_tokenizer.as_ref())?;
        Ok(Self {
            single_numerals,
            cut,
            vocabulary: model.vocab,
            merges: merges.ok_or(Unfit("a merge that is no pair"))?,
            ignore_merges: model.ignore_merges,
            unknown: model.unk_token.is_some() || model.byte_fallback,
        })
    }
}

/// Reads the `pre_tokenizer` member.
fn cut(pre_tokenizer: Option<&Value>) -> Result<(bool, Cut), Unfit> {
    const UNKNOWN: Unfit = Unfit("words of another kind");
    let first = pre_tokenizer.ok_or(UNKNOWN)?;
    let steps = match first["pretokenizers"].as_array() {
        Some(steps) => steps.as_slice(),
        None => std::slice::from_ref(first),
    };
    let Some((last, before)) = steps.split_last() else {
        return Err(UNKNOWN);
    };
    // In a file of old, the pattern is used without a word about it.
    let pattern = last["use_regex"].as_bool().unwrap_or(true);
    if last["type"] != "ByteLevel" || last["add_prefix_space"] != false {
        return Err(UNKNOWN);
    }
    match (before, pattern) {
        ([], true) => Ok((false, Cut::Gpt2)),
        ([], false) => Ok((false, Cut::Whole)),
        ([digits], true) if digits["type"] == "Digits" && digits["individual_digits"] == true => {
            Ok((true, Cut::Gpt2))
        }
        ([split], false) if split["type"] == "Split" => {
            if split["behavior"] != "Isolated" || split["invert"] != false {
                return Err(UNKNOWN);
            }
            let pattern = split["pattern"]["Regex"].as_str().ok_or(UNKNOWN)?;
            let digits = [(3, r"\p{N}{1,3}"), (1, r"\p{N}")]
                .into_iter()
                .find(|(_, digits)| pattern == llama3(digits));
            digits
                .map(|(digits, _)| (false, Cut::Llama3 { digits }))
                .ok_or(UNKNOWN)
        }
        _ => Err(UNKNOWN),
    }
}

/// The pattern of Llama 3, and with single digits that of Qwen 2.
pub(super) fn llama3(digits: &str) -> String {
    format!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
}

/// The character that stands for a byte in GPT-2's alphabet.
pub(super) fn character_of(byte: u8) -> char {
    let position = |first: u8| u32::from(byte - first);
    let code = match byte {
        0x00..=0x20 => 0x100 + position(0x00),
        0x7f..=0xa0 => 0x121 + position(0x7f),
        0xad => 0x143,
        itself => u32::from(itself),
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// Texts on which a tokenizer is compared before it is used.
pub(super) const SAMPLES: &[&str] = &[
    "The ferry left the harbour before sunrise; it's 1,234.5 miles, isn't it? WE'LL see...  \n\n\tfn main() { x += 1; }\r\n",
    "Grüße aus Köln — naïve café, Ελληνικά, русский язык, עברית, العربية, हिन्दी, 日本語のテキスト, 한국어, 🙂👩‍👩‍👧 x² ½ Ⅷ ٣٤",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|> <|begin_of_text|>x<|eot_id|>   trailing   ",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::byte_of;

    #[test]
    fn each_byte_has_its_character() {
        for byte in 0..=u8::MAX {
            assert_eq!(byte_of(character_of(byte)), Some(byte));
        }
    }
}

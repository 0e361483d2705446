//! The bytes that each token stands for, so that text is a concatenation and never has to be decoded again from its start.

use std::ops::Range;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::Tokenizer;

/// Bytes of every token of a model in running text: after something else, as generated text always is after a prompt. Decoders
/// that treat the first token of a text in a special way (no leading space) do not matter here.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    /// Control tokens, such as the end of a sequence: they have a name but are no text.
    control: Vec<bool>,
}

/// A tokenizer whose tokens are no concatenation of bytes, or no tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum UnsupportedDecoder {
    #[error("tokenizer.json is not readable: {0}")]
    Json(#[from] serde_json::Error),
    #[error(
        "tokenizer.json: decoder {0} is not supported: use ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse and Strip"
    )]
    Decoder(String),
    #[error("tokenizer.json: the names of all tokens are longer than 4 GiB together")]
    TooLarge,
}

/// One step from the name of a token to its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// Characters of GPT-2's alphabet for bytes.
    ByteLevel,
    Replace {
        from: String,
        to: String,
    },
    /// `<0x0A>` is a byte.
    ByteFallback,
    /// Tokens are words with a space between them.
    LeadingSpace,
}

impl Vocabulary {
    /// Reads the bytes of all tokens. `control` names further tokens that are no text.
    pub fn new(
        tokenizer: &Tokenizer,
        tokenizer_json: &[u8],
        control: &[&str],
    ) -> Result<Self, UnsupportedDecoder> {
        #[derive(Deserialize)]
        struct Outline {
            decoder: Option<Value>,
        }
        let outline: Outline = serde_json::from_slice(tokenizer_json)?;
        let steps = steps(outline.decoder.as_ref())?;
        let added = tokenizer.get_added_tokens_decoder();
        let size = tokenizer
            .get_vocab(true)
            .into_values()
            .max()
            .map_or(0, |largest| largest + 1);
        let mut vocabulary = Self::default();
        for id in 0..size {
            let name = tokenizer.id_to_token(id).unwrap_or_default();
            let special = added.get(&id).is_some_and(|token| token.special);
            vocabulary
                .control
                .push(special || control.contains(&name.as_str()));
            vocabulary.bytes.extend(decode(&steps, name));
            let end =
                u32::try_from(vocabulary.bytes.len()).map_err(|_| UnsupportedDecoder::TooLarge)?;
            vocabulary.ends.push(end);
        }
        Ok(vocabulary)
    }

    /// Token ids are below this.
    pub fn size(&self) -> u32 {
        u32::try_from(self.ends.len()).unwrap_or(u32::MAX)
    }

    /// The bytes of a token, of control tokens too. Empty for an id that the model does not have.
    pub fn bytes(&self, id: u32) -> &[u8] {
        &self.bytes[self.range(id)]
    }

    /// The bytes that a token adds to the text: none for control tokens.
    pub fn text(&self, id: u32) -> &[u8] {
        let control = usize::try_from(id)
            .ok()
            .and_then(|index| self.control.get(index));
        if control.copied().unwrap_or(true) {
            &[]
        } else {
            self.bytes(id)
        }
    }

    fn range(&self, id: u32) -> Range<usize> {
        let end = |index: usize| self.ends.get(index).map(|&end| end as usize);
        let index = id as usize;
        match (index.checked_sub(1).map_or(Some(0), end), end(index)) {
            (Some(start), Some(end)) => start..end,
            _ => 0..0,
        }
    }
}

/// Reads the `decoder` member. What it does at the start or end of a whole text does not count.
fn steps(decoder: Option<&Value>) -> Result<Vec<Step>, UnsupportedDecoder> {
    let Some(decoder) = decoder.filter(|decoder| !decoder.is_null()) else {
        return Ok(vec![Step::LeadingSpace]);
    };
    let mut steps = Vec::new();
    // Before `Fuse`, a step sees one token; after it, the whole text.
    let mut fused = false;
    let several = decoder["decoders"].as_array();
    for part in several.map_or(std::slice::from_ref(decoder), Vec::as_slice) {
        let unsupported = || UnsupportedDecoder::Decoder(part.to_string());
        match part["type"].as_str() {
            Some("ByteLevel") => steps.push(Step::ByteLevel),
            Some("Metaspace") => steps.push(Step::Replace {
                from: part["replacement"].as_str().unwrap_or("▁").to_owned(),
                to: " ".to_owned(),
            }),
            Some("Replace") if !fused => steps.push(Step::Replace {
                from: part["pattern"]["String"]
                    .as_str()
                    .ok_or_else(unsupported)?
                    .to_owned(),
                to: part["content"].as_str().ok_or_else(unsupported)?.to_owned(),
            }),
            Some("ByteFallback") => steps.push(Step::ByteFallback),
            Some("Fuse") => fused = true,
            Some("Strip") if fused && part["stop"].as_u64() == Some(0) => {}
            _ => return Err(unsupported()),
        }
    }
    Ok(steps)
}

fn decode(steps: &[Step], mut name: String) -> Vec<u8> {
    for step in steps {
        match step {
            Step::ByteLevel => {
                let bytes: Option<Vec<u8>> = name.chars().map(byte_of).collect();
                // Names of added tokens may hold other characters: they stand for themselves.
                return bytes.unwrap_or_else(|| name.into_bytes());
            }
            Step::Replace { from, to } => name = name.replace(from, to),
            Step::ByteFallback => {
                let digits = name
                    .strip_prefix("<0x")
                    .and_then(|rest| rest.strip_suffix('>'));
                let byte = digits
                    .filter(|digits| digits.len() == 2)
                    .and_then(|digits| u8::from_str_radix(digits, 16).ok());
                if let Some(byte) = byte {
                    return vec![byte];
                }
            }
            Step::LeadingSpace => name.insert(0, ' '),
        }
    }
    name.into_bytes()
}

/// The byte that a character stands for in GPT-2's alphabet: printable Latin-1 is itself, the other bytes follow from U+0100 on.
pub(super) fn byte_of(character: char) -> Option<u8> {
    /// Bytes that do not stand for themselves, in order.
    const OTHERS: [(u8, u8); 3] = [(0x00, 0x20), (0x7f, 0xa0), (0xad, 0xad)];
    let code = u32::from(character);
    if let Ok(byte) = u8::try_from(code) {
        let itself = OTHERS
            .iter()
            .all(|&(first, last)| !(first..=last).contains(&byte));
        return itself.then_some(byte);
    }
    let mut index = code.checked_sub(0x100)?;
    for (first, last) in OTHERS {
        let length = u32::from(last - first) + 1;
        if index < length {
            return Some(first + u8::try_from(index).ok()?);
        }
        index -= length;
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::samples::tokenizer_json;

    fn vocabulary(tokens: &[&str], special: &[&str], decoder: &Value) -> (Tokenizer, Vocabulary) {
        let json = tokenizer_json(tokens, special, decoder);
        let tokenizer = Tokenizer::from_bytes(&json).unwrap();
        let vocabulary = Vocabulary::new(&tokenizer, &json, &[]).unwrap();
        (tokenizer, vocabulary)
    }

    /// Text of `ids` after a first token, by the tokenizer itself.
    fn continued(tokenizer: &Tokenizer, ids: &[u32]) -> String {
        let before = tokenizer.decode(&[0], true).unwrap();
        let mut all = vec![0];
        all.extend_from_slice(ids);
        tokenizer.decode(&all, true).unwrap()[before.len()..].to_owned()
    }

    fn agrees(tokens: &[&str], special: &[&str], decoder: &Value) -> Vocabulary {
        let (tokenizer, vocabulary) = vocabulary(tokens, special, decoder);
        let ids: Vec<u32> = (0..u32::try_from(tokens.len()).unwrap()).collect();
        let bytes: Vec<u8> = ids
            .iter()
            .flat_map(|&id| vocabulary.text(id).to_vec())
            .collect();
        assert_eq!(String::from_utf8_lossy(&bytes), continued(&tokenizer, &ids));
        vocabulary
    }

    #[test]
    fn the_alphabet_covers_each_byte_once() {
        let mut seen: Vec<u8> = (0..0x200)
            .filter_map(char::from_u32)
            .filter_map(byte_of)
            .collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
        assert_eq!(
            (byte_of('Ġ'), byte_of('Ċ'), byte_of('a')),
            (Some(b' '), Some(b'\n'), Some(b'a'))
        );
    }

    #[test]
    fn byte_level_tokens_are_bytes_as_the_tokenizer_decodes_them() {
        let vocabulary = agrees(
            &["x", "Ġhello", "âĤ", "¬", "<|end|>", "▁raw", "Ċ"],
            &["<|end|>"],
            &json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}),
        );
        assert_eq!(vocabulary.bytes(2), b"\xe2\x82");
        assert_eq!(
            (vocabulary.text(4), vocabulary.bytes(4)),
            (&b""[..], &b"<|end|>"[..])
        );
        assert_eq!(vocabulary.bytes(99), b"");
        assert_eq!(vocabulary.size(), 7);
    }

    #[test]
    fn sentence_piece_tokens_are_bytes_as_the_tokenizer_decodes_them() {
        let decoder = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        let vocabulary = agrees(
            &["▁a", "▁hello", "<0xE2>", "<0x82>", "<0xAC>", "▁", "b"],
            &[],
            &decoder,
        );
        assert_eq!(vocabulary.text(1), b" hello");
        agrees(
            &["▁a", "▁hello", "b"],
            &[],
            &json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
        );
        agrees(&["a", "hello", "b"], &[], &Value::Null);
    }

    #[test]
    fn a_decoder_that_is_no_concatenation_is_refused_by_name() {
        let decoder = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
        let json = tokenizer_json(&["a"], &[], &decoder);
        let tokenizer = Tokenizer::from_bytes(&json).unwrap();
        let error = Vocabulary::new(&tokenizer, &json, &[])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("WordPiece") && error.contains("not supported"),
            "{error}"
        );
    }

    #[test]
    fn a_token_named_as_control_is_no_text() {
        let json = tokenizer_json(&["a", "</s>"], &[], &Value::Null);
        let tokenizer = Tokenizer::from_bytes(&json).unwrap();
        let vocabulary = Vocabulary::new(&tokenizer, &json, &["</s>"]).unwrap();
        assert_eq!(
            (vocabulary.text(0), vocabulary.text(1)),
            (&b" a"[..], &b""[..])
        );
    }
}

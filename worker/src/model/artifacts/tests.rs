//! Tokenizers and templates that models hand to routers.

use tokenizers::Tokenizer;

use super::*;

fn tokenizer(vocabulary: &Vocabulary) -> Tokenizer {
    Tokenizer::from_bytes(tokenizer_json(vocabulary)).expect("the crate reads what was built")
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer
        .encode(text, false)
        .expect("encodes")
        .get_ids()
        .to_vec()
}

const TEXTS: [&str; 6] = [
    "Hello, world!",
    "  two  spaces\tand a tab\r\n\n",
    "naïve Größe 你好 🙂",
    "fn main() { println!(\"{}\", 1234567890); }",
    "\u{0}\u{1}\u{7f}",
    "it's we'll they'd",
];

#[test]
fn byte_level_text_round_trips_and_bytes_are_ids() {
    let tokenizer = tokenizer(&byte_level(300));
    for text in TEXTS {
        let ids = ids(&tokenizer, text);
        assert_eq!(ids, text.bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(tokenizer.decode(&ids, false).expect("decodes"), text);
    }
    assert_eq!(ids(&tokenizer, "a<|im_start|>b"), [97, MESSAGE_START, 98]);
    assert_eq!(
        tokenizer.decode(&[97, 299], false).expect("decodes"),
        "a w299"
    );
    assert_eq!(
        tokenizer.decode(&[97, MESSAGE_END], true).expect("decodes"),
        "a"
    );
}

#[test]
fn digits_stand_alone_and_merges_apply_in_order() {
    let mut vocabulary = byte_level(BYTE_LEVEL_TOKENS);
    for (id, (left, right)) in [("l", "l"), ("1", "2"), ("Ġ", "a")].into_iter().enumerate() {
        assert_eq!(vocabulary.tokens.len(), BYTE_LEVEL_TOKENS + id);
        vocabulary
            .tokens
            .push((format!("{left}{right}"), TokenKind::Normal));
        vocabulary.merges.push((left.to_owned(), right.to_owned()));
    }
    let merged = |pre_tokenizer| {
        let vocabulary = Vocabulary {
            pre_tokenizer,
            ..vocabulary.clone()
        };
        ids(&tokenizer(&vocabulary), "12 all")
    };
    assert_eq!(merged(PreTokenizer::Gpt2), [260, 261, 259]);
    assert_eq!(merged(PreTokenizer::Smollm), [49, 50, 261, 259]);
    assert_eq!(merged(PreTokenizer::Llama3), [260, 261, 259]);
    assert_eq!(merged(PreTokenizer::Qwen2), [49, 50, 261, 259]);
}

#[test]
fn the_template_artifact_has_the_fields_that_routers_read() {
    let bytes = chat_template_json("{{ x }}", None, Some("<|im_end|>"), false);
    let value: Value = serde_json::from_slice(&bytes).expect("is JSON");
    assert_eq!(
        value,
        json!({"chat_template": "{{ x }}", "bos_token": null, "eos_token": "<|im_end|>", "add_bos": false})
    );
}

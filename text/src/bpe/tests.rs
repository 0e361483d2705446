//! The same tokens as the `tokenizers` crate makes, over random texts and vocabularies, and reasons to leave others to it.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::file::{character_of, llama3};
use super::*;
use crate::words::tests::text;

fn named(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| character_of(byte)).collect()
}

fn byte_level(pattern: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": pattern})
}

fn steps() -> Vec<Value> {
    let split = |digits: &str| json!({"type": "Split", "pattern": {"Regex": llama3(digits)}, "behavior": "Isolated", "invert": false});
    let sequence = |steps: Vec<Value>| json!({"type": "Sequence", "pretokenizers": steps});
    vec![
        sequence(vec![byte_level(true)]),
        byte_level(false),
        sequence(vec![
            json!({"type": "Digits", "individual_digits": true}),
            byte_level(true),
        ]),
        sequence(vec![split(r"\p{N}{1,3}"), byte_level(false)]),
        sequence(vec![split(r"\p{N}"), byte_level(false)]),
    ]
}

/// All bytes, two control tokens of which one begins the other, and a token for each merge: pairs of numbers that point into the
/// tokens made so far.
fn tokenizer(merges: &[(usize, usize)], steps: &Value, ignore_merges: bool) -> Value {
    let mut tokens: Vec<String> = (0..=u8::MAX).map(|byte| named(&[byte])).collect();
    let mut pairs = Vec::new();
    // Those that texts here are made of come first, so that merges meet.
    let common: Vec<usize> = b" eatwordTh'sl012\n.<|i"
        .iter()
        .map(|&byte| byte.into())
        .collect();
    for &(left, right) in merges {
        let pick = |number: usize, tokens: &[String]| {
            let place = number % (common.len() + tokens.len() - 256);
            let index = common.get(place).copied();
            tokens[index.unwrap_or(256 + place - common.len().min(place))].clone()
        };
        let (left, right) = (pick(left, &tokens), pick(right, &tokens));
        let merged = format!("{left}{right}");
        if merged.chars().count() < 12 && !tokens.contains(&merged) {
            tokens.push(merged);
            pairs.push(json!([left, right]));
        }
    }
    // A word that no merges lead to.
    tokens.push(named(b" word"));
    let vocabulary: serde_json::Map<String, Value> = tokens
        .iter()
        .enumerate()
        .map(|(id, token)| (token.clone(), json!(id)))
        .collect();
    let added = |id: usize, name: &str| json!({"id": id, "content": name, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [added(5_000, "<|i"), added(5_001, "<|i|>"), added(5_002, "\u{e9}t")],
        "pre_tokenizer": steps, "decoder": byte_level(true),
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": ignore_merges,
            "vocab": vocabulary, "merges": pairs},
    })
}

fn both(json: &Value) -> (Tokenizer, Result<BytePairs, Unfit>) {
    let json = json.to_string();
    let tokenizer = Tokenizer::from_bytes(&json).unwrap();
    let pairs = BytePairs::new(json.as_bytes(), &tokenizer);
    (tokenizer, pairs)
}

fn same(tokenizer: &Tokenizer, pairs: &BytePairs, text: &str) {
    let expected = tokenizer.encode_fast(text, false).unwrap();
    let segments = Segments::default();
    let tokens = pairs.encode(text, segments.of("")).unwrap();
    assert_eq!(tokens, expected.get_ids(), "{text:?}");
}

fn texts() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        2 => text(),
        2 => proptest::sample::select(vec!["<|i", "<|i|>", "<|", "ét", "é", " the", " word", "Then", "water ", "012"]).prop_map(str::to_owned),
        1 => "[eatword]{0,9}",
        // Words around and beyond the longest that are merged here.
        1 => (0usize..3, 250usize..300).prop_map(|(kind, length)| ["e", "at", "日"][kind].repeat(length)),
    ];
    proptest::collection::vec(piece, 0..5).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn tokens_are_those_of_the_crate(
        merges in proptest::collection::vec((any::<usize>(), any::<usize>()), 0..120),
        kind in 0usize..5,
        ignore_merges in any::<bool>(),
        texts in proptest::collection::vec(texts(), 12),
    ) {
        let (tokenizer, pairs) = both(&tokenizer(&merges, &steps()[kind], ignore_merges));
        let pairs = pairs.unwrap();
        for text in &texts {
            same(&tokenizer, &pairs, text);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Prompts of turns that come again, in any order and cut anywhere, under three salts.
    #[test]
    fn tokens_are_the_same_whatever_was_asked_before(
        turns in proptest::collection::vec(texts().prop_map(|text| text.repeat(1 + 300 / text.len().max(1))), 1..4),
        prompts in proptest::collection::vec((proptest::collection::vec((0usize..4, any::<proptest::sample::Index>()), 1..6), 0usize..3), 1..12),
        kind in 0usize..5,
    ) {
        let (tokenizer, pairs) = both(&tokenizer(&[(1, 2), (3, 9), (7, 1), (21, 22), (0, 24)], &steps()[kind], false));
        let pairs = pairs.unwrap();
        let segments = Segments::default();
        for (parts, salt) in &prompts {
            let mut text = String::new();
            for (turn, cut) in parts {
                let turn = &turns[turn % turns.len()];
                // Whole turns come again; one in two is cut.
                let place = cut.index(2 * turn.len() + 2).min(turn.len());
                let place = (0..=place).rev().find(|place| turn.is_char_boundary(*place));
                text.push_str(&turn[..place.unwrap_or(0)]);
                text.push_str("<|i|>");
            }
            let expected = tokenizer.encode_fast(text.as_str(), false).unwrap();
            let tokens = pairs.encode(&text, segments.of(["", "a", "b"][*salt])).unwrap();
            prop_assert_eq!(tokens, expected.get_ids());
        }
    }
}

/// The vocabulary of the quickstart's model, where its `tokenizer.json` is named in `BATON_TEST_TOKENIZER`.
#[test]
fn a_real_vocabulary_gives_the_same_tokens() {
    let Some(path) = std::env::var_os("BATON_TEST_TOKENIZER") else {
        eprintln!("skipped: BATON_TEST_TOKENIZER names no tokenizer.json");
        return;
    };
    let json = std::fs::read(path).unwrap();
    let tokenizer = Tokenizer::from_bytes(&json).unwrap();
    let pairs = BytePairs::new(&json, &tokenizer).unwrap();
    assert!(pairs.whole.len() > 1_000);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(3_000));
    runner
        .run(&texts(), |text| {
            same(&tokenizer, &pairs, &text);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_tokenizer_of_another_kind_is_left_to_the_crate_and_it_says_why() {
    let good = tokenizer(&[], &steps()[0], false);
    assert!(both(&good).1.is_ok());
    let changed = |path: &str, value: Value| {
        let mut json = good.clone();
        *json.pointer_mut(path).unwrap() = value;
        both(&json).1.unwrap_err().to_string()
    };
    for (path, value, reason) in [
        ("/normalizer", json!({"type": "NFC"}), "a normalizer"),
        (
            "/added_tokens/0/lstrip",
            json!(true),
            "added tokens that take more",
        ),
        (
            "/added_tokens/0/normalized",
            json!(true),
            "added tokens that take more",
        ),
        (
            "/pre_tokenizer/pretokenizers/0/add_prefix_space",
            json!(true),
            "words of another kind",
        ),
        (
            "/pre_tokenizer",
            json!({"type": "Whitespace"}),
            "words of another kind",
        ),
        ("/model/end_of_word_suffix", json!("</w>"), "another kind"),
        (
            "/post_processor",
            json!({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [
                {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {}}),
            "a post-processor",
        ),
    ] {
        let told = changed(path, value);
        assert!(told.contains(reason), "{path}: {told}");
    }
}

#[test]
fn a_byte_without_a_token_is_left_out_as_the_crate_does() {
    let mut lacking = tokenizer(&[(0, 1), (3, 1), (1, 3)], &steps()[0], false);
    lacking["model"]["vocab"]
        .as_object_mut()
        .unwrap()
        .remove("a");
    let (tokenizer, pairs) = both(&lacking);
    let pairs = pairs.unwrap();
    for text in ["a", "eat", "a eat tea", "aaa"] {
        same(&tokenizer, &pairs, text);
    }
    lacking["model"]["unk_token"] = json!("e");
    assert!(
        both(&lacking)
            .1
            .unwrap_err()
            .to_string()
            .contains("does not know")
    );
}

#[test]
fn nothing_is_no_tokens() {
    let pairs = both(&tokenizer(&[], &steps()[0], false)).1.unwrap();
    let segments = Segments::default();
    assert_eq!(pairs.encode("", segments.of("")).unwrap(), [0; 0]);
}

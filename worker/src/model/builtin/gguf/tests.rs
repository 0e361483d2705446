//! Files as they should be, and every way in which they are not.

use proptest::prelude::*;

use super::*;

/// Writes the header of a GGUF file, version 3.
#[derive(Default)]
struct Header {
    fields: Vec<(String, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, u32, u64)>,
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}

impl Header {
    fn with(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.fields
            .push((key.to_owned(), [&kind.to_le_bytes(), value].concat()));
        self
    }

    fn number(self, key: &str, value: u32) -> Self {
        self.with(key, 4, &value.to_le_bytes())
    }

    fn tensor(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        self.tensors
            .push((name.to_owned(), dims.to_vec(), kind, offset));
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.fields.len() as u64).to_le_bytes());
        for (key, value) in &self.fields {
            out.extend(text(key));
            out.extend(value);
        }
        for (name, dims, kind, offset) in &self.tensors {
            out.extend(text(name));
            out.extend((dims.len() as u32).to_le_bytes());
            out.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out
    }
}

/// A header that is right as far as it goes: every tensor but the embedding is missing.
fn header() -> Header {
    Header::default()
        .with("general.architecture", 8, &text("llama"))
        .number("llama.block_count", 2)
        .number("llama.embedding_length", 64)
        .number("llama.feed_forward_length", 128)
        .number("llama.attention.head_count", 4)
        .number("llama.attention.head_count_kv", 2)
        .number("llama.context_length", 512)
        .with(
            "llama.attention.layer_norm_rms_epsilon",
            6,
            &1e-5_f32.to_le_bytes(),
        )
        .tensor("token_embd.weight", &[64, 96], 0, 0)
}

fn message(bytes: &[u8]) -> String {
    parse(bytes, "m.gguf").expect_err("not a model").to_string()
}

fn blames(header: &Header, field: &str) {
    let message = message(&header.bytes());
    assert!(
        message.starts_with(&format!("model file m.gguf: {field}: ")),
        "expected {field} to be blamed: {message}"
    );
    assert!(!message.contains('\n'), "more than one line: {message}");
}

#[test]
fn the_first_thing_missing_is_named() {
    blames(&header(), "blk.0.attn_norm.weight");
    for index in 0..header().fields.len() {
        let mut lacking = header();
        let (field, _) = lacking.fields.remove(index);
        if field != "llama.attention.head_count_kv" {
            blames(&lacking, &field);
        }
    }
}

#[test]
fn absurd_sizes_are_refused_before_anything_is_allocated() {
    for field in [
        "llama.block_count",
        "llama.embedding_length",
        "llama.attention.head_count",
        "llama.context_length",
    ] {
        for value in [0, u32::MAX] {
            let mut absurd = header();
            absurd.fields.retain(|(key, _)| key != field);
            blames(&absurd.number(field, value), field);
        }
    }
    let huge = [64, u64::MAX / 64];
    let mut absurd = header();
    absurd.tensors.clear();
    absurd = absurd.tensor("token_embd.weight", &huge, 0, 0).tensor(
        "blk.0.attn_norm.weight",
        &[64],
        0,
        u64::MAX - 8,
    );
    blames(&absurd, "blk.0.attn_norm.weight");
}

#[test]
fn an_alignment_that_cannot_be_divided_by_is_refused_wherever_its_name_also_is() {
    let named = || header().with("general.name", 8, &text("general.alignment"));
    for value in [0, 3] {
        blames(
            &named().number("general.alignment", value),
            "general.alignment",
        );
        // After a value of each shape.
        let strings = [
            &8_u32.to_le_bytes()[..],
            &2_u64.to_le_bytes(),
            &text("general.alignment"),
            &text(""),
        ]
        .concat();
        let numbers = [&5_u32.to_le_bytes()[..], &2_u64.to_le_bytes(), &[0; 8]].concat();
        let nested = [&9_u32.to_le_bytes()[..], &1_u64.to_le_bytes(), &strings].concat();
        let mut after = header();
        for (key, value) in [("a", &strings), ("b", &numbers), ("c", &nested)] {
            after = after.with(key, 9, value);
        }
        after = after.with("d", 12, &[0; 8]).with("e", 7, &[0]);
        blames(
            &after.with("general.alignment", 2, &[value as u8, 0]),
            "general.alignment",
        );
    }
    // The name alone is no alignment, zeros or not behind it.
    blames(&named().number("x", 0), "blk.0.attn_norm.weight");
    blames(
        &named().number("general.alignment", 64),
        "blk.0.attn_norm.weight",
    );
}

#[test]
fn numbers_that_would_make_every_result_nan_are_refused() {
    const EPSILON: &str = "llama.attention.layer_norm_rms_epsilon";
    for epsilon in [f32::NAN, f32::INFINITY, 0.0, -1e-5, 2.0] {
        let mut wrong = header();
        wrong.fields.retain(|(key, _)| key != EPSILON);
        blames(&wrong.with(EPSILON, 6, &epsilon.to_le_bytes()), EPSILON);
    }
    for factor in [f32::NAN, f32::INFINITY, 0.0, -1.0] {
        let wrong = header().tensor("rope_freqs.weight", &[8], 0, 0);
        let mut bytes = wrong.bytes();
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(
            [1.0, 1.0, factor, 1.0, 1.0, 1.0, 1.0, 1.0_f32]
                .map(f32::to_le_bytes)
                .concat(),
        );
        let message = message(&bytes);
        assert!(
            message.starts_with("model file m.gguf: rope_freqs.weight: "),
            "{message}"
        );
    }
}

#[test]
fn other_architectures_and_other_types_are_named() {
    let mut other = header();
    other.fields[0].1 = [&8_u32.to_le_bytes(), &*text("mamba")].concat();
    blames(&other, "general.architecture");
    let mut other = header();
    other.fields[1].1 = [&8_u32.to_le_bytes(), &*text("two")].concat();
    blames(&other, "llama.block_count");
    let mut other = header();
    other.tensors[0].1 = vec![32, 96];
    blames(&other, "token_embd.weight");
}

#[test]
fn a_tensor_past_the_end_says_that_the_file_is_cut_off() {
    let cut = header().tensor("blk.0.attn_norm.weight", &[64], 0, 4096);
    blames(&cut, "blk.0.attn_norm.weight");
    assert!(message(&cut.bytes()).contains("cut off"));
}

#[test]
fn what_is_no_gguf_or_no_file_is_said_so() {
    assert!(message(b"PK\x03\x04").contains("does not begin with `GGUF`"));
    assert!(message(b"").contains("does not begin with `GGUF`"));
    let missing = std::path::Path::new("no/such/model.gguf");
    let error = super::super::load(missing)
        .expect_err("no file")
        .to_string();
    assert!(
        error.starts_with("model file no/such/model.gguf: "),
        "{error}"
    );
}

#[test]
fn every_cut_of_a_header_is_an_error() {
    let whole = header().bytes();
    for length in 0..whole.len() {
        message(&whole[..length]);
    }
}

proptest! {
    #[test]
    fn changed_bytes_are_errors_not_panics(changes in proptest::collection::vec((0_usize..600, any::<u8>()), 1..6)) {
        let mut bytes = header().bytes();
        let length = bytes.len();
        for (at, byte) in changes {
            bytes[4 + at % (length - 4)] = byte;
        }
        prop_assert!(parse(&bytes, "m.gguf").is_err());
    }

    #[test]
    fn noise_after_the_magic_is_an_error(noise in proptest::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(parse(&[b"GGUF\x03\0\0\0".as_slice(), &noise].concat(), "m.gguf").is_err());
    }
}

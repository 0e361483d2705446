//! Whole models of a few kilobytes, in the format that the Builtin engine loads.

/// GGUF's numbers for the types of tensors used here, with bytes of 32 weights.
const F32: (u32, usize) = (0, 128);
const F16: (u32, usize) = (1, 64);
const Q4_0: (u32, usize) = (2, 18);
const Q4_1: (u32, usize) = (3, 20);
const Q8_0: (u32, usize) = (8, 34);

const HIDDEN: u64 = 32;
const VOCABULARY: u64 = 4;

/// A model in each type of weights, with and without what a file may leave out.
pub fn seeds() -> Vec<(String, Vec<u8>)> {
    [
        ("q8", Q8_0, false),
        ("q4", Q4_0, true),
        ("q4-1", Q4_1, false),
        ("f16", F16, true),
    ]
    .into_iter()
    .map(|(name, kind, full)| (name.to_owned(), file(kind, full)))
    .collect()
}

#[derive(Default)]
struct File {
    fields: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: Vec<u8>,
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}

impl File {
    fn field(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.fields
            .push([&text(key), &kind.to_le_bytes()[..], value].concat());
    }

    fn number(&mut self, key: &str, value: u32) {
        self.field(key, 4, &value.to_le_bytes());
    }

    fn texts(&mut self, key: &str, values: &[&str]) {
        let count = (values.len() as u64).to_le_bytes();
        let values: Vec<u8> = values.iter().flat_map(|value| text(value)).collect();
        self.field(
            key,
            9,
            &[&8_u32.to_le_bytes()[..], &count, &values].concat(),
        );
    }

    fn tensor(&mut self, name: &str, dims: &[u64], (kind, bytes): (u32, usize)) {
        let mut entry = text(name);
        entry.extend((dims.len() as u32).to_le_bytes());
        entry.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        entry.extend(kind.to_le_bytes());
        entry.extend((self.data.len() as u64).to_le_bytes());
        self.tensors.push(entry);
        let weights = dims.iter().product::<u64>() as usize;
        // Halves and floats of this byte are small and finite.
        let length = (weights * bytes).div_ceil(32);
        self.data.extend(std::iter::repeat_n(0x20, length));
        self.data.resize(self.data.len().next_multiple_of(32), 0);
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.fields.len() as u64).to_le_bytes());
        out.extend(self.fields.concat());
        out.extend(self.tensors.concat());
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&self.data);
        out
    }
}

fn file(kind: (u32, usize), full: bool) -> Vec<u8> {
    let mut file = File::default();
    file.field("general.architecture", 8, &text("llama"));
    for (key, value) in [
        ("block_count", 1),
        ("embedding_length", HIDDEN as u32),
        ("feed_forward_length", 32),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("context_length", 64),
    ] {
        file.number(&format!("llama.{key}"), value);
    }
    file.field(
        "llama.attention.layer_norm_rms_epsilon",
        6,
        &1e-5_f32.to_le_bytes(),
    );
    file.field("tokenizer.ggml.model", 8, &text("gpt2"));
    file.texts("tokenizer.ggml.tokens", &["a", "b", "ab", "<end>"]);
    file.texts("tokenizer.ggml.merges", &["a b"]);
    if full {
        file.number("general.alignment", 32);
        file.number("llama.attention.key_length", 16);
        file.number("llama.attention.value_length", 16);
        file.number("llama.rope.dimension_count", 16);
        file.field("llama.rope.freq_base", 6, &10_000_f32.to_le_bytes());
        file.field("llama.rope.scaling.type", 8, &text("linear"));
        file.field("llama.rope.scaling.factor", 6, &2_f32.to_le_bytes());
        file.field("tokenizer.ggml.pre", 8, &text("smollm"));
        let kinds = [
            &5_u32.to_le_bytes()[..],
            &4_u64.to_le_bytes(),
            &[1, 1, 1, 3].map(i32::to_le_bytes).concat(),
        ];
        file.field("tokenizer.ggml.token_type", 9, &kinds.concat());
        file.number("tokenizer.ggml.bos_token_id", 3);
        file.number("tokenizer.ggml.eos_token_id", 3);
        file.field("tokenizer.ggml.add_bos_token", 7, &[1]);
        file.field(
            "tokenizer.chat_template",
            8,
            &text("{% for m in messages %}{{ m.content }}{% endfor %}"),
        );
        file.tensor("rope_freqs.weight", &[8], F32);
        file.tensor("output.weight", &[HIDDEN, VOCABULARY], kind);
    }
    file.tensor("token_embd.weight", &[HIDDEN, VOCABULARY], kind);
    file.tensor("output_norm.weight", &[HIDDEN], F32);
    for (part, dims) in [
        ("attn_norm", &[HIDDEN][..]),
        ("attn_q", &[HIDDEN, 32]),
        ("attn_k", &[HIDDEN, 16]),
        ("attn_v", &[HIDDEN, 16]),
        ("attn_output", &[32, HIDDEN]),
        ("ffn_norm", &[HIDDEN]),
        ("ffn_gate", &[HIDDEN, 32]),
        ("ffn_up", &[HIDDEN, 32]),
        ("ffn_down", &[32, HIDDEN]),
    ] {
        let kind = if dims.len() == 1 { F32 } else { kind };
        file.tensor(&format!("blk.0.{part}.weight"), dims, kind);
    }
    file.bytes()
}

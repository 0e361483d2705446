//! Tiny: a Llama model of two layers with random weights from a seed, for tests that need real KV but no download.
//!
//! Its arithmetic is the Builtin engine's, so what holds for it bit for bit holds there.

use baton_kernels::Matrix;

use super::artifacts::{self, BYTE_LEVEL_TOKENS, END_OF_TEXT, MESSAGE_END};
use super::builtin::Llama;
use super::builtin::llama::{Layer, NUMERICS, Weights};
use super::builtin::rope::RopeTable;
use super::{ModelFacts, Rope, Shape};

/// 512 bytes of KV per token; a context long enough for any test prompt.
pub const SHAPE: Shape = Shape {
    layers: 2,
    hidden: 64,
    feed_forward: 128,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    vocabulary: BYTE_LEVEL_TOKENS,
    max_context: 8192,
};

/// Makes the model of a seed.
pub fn model(seed: u64) -> Llama {
    let mut source = blake3::Hasher::new();
    source.update(b"baton tiny model v1");
    source.update(&seed.to_le_bytes());
    let weights_digest = *source.finalize().as_bytes();
    let mut random = Random(source.finalize_xof());

    let query = SHAPE.heads * SHAPE.head_dim;
    let key = SHAPE.kv_heads * SHAPE.head_dim;
    let (hidden, wide) = (SHAPE.hidden, SHAPE.feed_forward);
    let weights = Weights {
        embedding: random.matrix(SHAPE.vocabulary, hidden, 1.0),
        layers: (0..SHAPE.layers)
            .map(|_| Layer {
                attention_norm: random.norm(hidden),
                query: random.matrix(query, hidden, 2.0),
                key: random.matrix(key, hidden, 2.0),
                value: random.matrix(key, hidden, 1.5),
                output: random.matrix(hidden, query, 1.5),
                feed_forward_norm: random.norm(hidden),
                gate: random.matrix(wide, hidden, 1.5),
                up: random.matrix(wide, hidden, 1.5),
                down: random.matrix(hidden, wide, 1.5),
            })
            .collect(),
        norm: random.norm(hidden),
        // Not tied: a tied random model mostly repeats its input.
        head: Some(random.matrix(SHAPE.vocabulary, hidden, 4.0)),
        norm_epsilon: 1e-5,
    };
    let rope = Rope {
        base: 10_000.0,
        dimensions: SHAPE.head_dim,
        interleaved: true,
        scaling: "None".to_owned(),
    };
    let table = RopeTable::new(&rope, 1.0, &[]);
    let facts = ModelFacts {
        architecture: "llama".to_owned(),
        weights_digest,
        numerics: NUMERICS.to_owned(),
        shape: SHAPE,
        rope,
        eos_token_ids: vec![MESSAGE_END],
        bos_token_id: Some(END_OF_TEXT),
        tokenizer: artifacts::tokenizer_json(&artifacts::byte_level(SHAPE.vocabulary)).into(),
        chat_template: artifacts::chat_template_json(
            artifacts::BYTE_LEVEL_TEMPLATE,
            Some("<|endoftext|>"),
            Some("<|im_end|>"),
            false,
        )
        .into(),
    };
    Llama::new(facts, weights, table)
}

struct Random(blake3::OutputReader);

impl Random {
    /// Uniform in ±1.
    fn unit(&mut self) -> f32 {
        let mut bytes = [0; 4];
        self.0.fill(&mut bytes);
        // 24 bits are what a float holds exactly.
        (u32::from_le_bytes(bytes) >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Weights whose products have about `gain` times the size of what they are multiplied with.
    fn matrix(&mut self, rows: usize, columns: usize, gain: f32) -> Matrix {
        let size = gain * (3.0 / columns as f32).sqrt();
        let values: Vec<f32> = (0..rows * columns).map(|_| size * self.unit()).collect();
        Matrix::from_f32(&values, columns)
    }

    fn norm(&mut self, width: usize) -> Vec<f32> {
        (0..width).map(|_| 1.0 + 0.1 * self.unit()).collect()
    }
}

//! Facts of a model: what decides the meaning of its KV bytes, as the card states it.

use std::sync::Arc;

use baton_protocol::identity::{Attention, Fact, Layout, RouteFilter, SemanticIdentity};

/// What a card needs to know of a model: everything that decides what its KV bytes mean, and what it serves.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFacts {
    /// `llama` or `simulated`.
    pub architecture: String,
    /// BLAKE3 of the weights as loaded: of the file's bytes for a GGUF, of the seed and the shape for a generated model.
    pub weights_digest: [u8; 32],
    /// Names the arithmetic that turns weights and tokens into KV. Two workers whose numerics differ produce KV that differs.
    pub numerics: String,
    pub shape: Shape,
    pub rope: Rope,
    /// Ids that end a generation.
    pub eos_token_ids: Vec<u32>,
    pub bos_token_id: Option<u32>,
    /// A HF `tokenizer.json`.
    pub tokenizer: Arc<[u8]>,
    /// `{"chat_template", "bos_token", "eos_token", "add_bos"}` as JSON.
    pub chat_template: Arc<[u8]>,
}

/// Sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub layers: usize,
    pub hidden: usize,
    pub feed_forward: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocabulary: usize,
    /// Most tokens a sequence may have.
    pub max_context: usize,
}

impl Shape {
    /// Bytes of one KV value: f16.
    pub const KV_VALUE_BYTES: usize = 2;

    /// KV bytes of one token over all layers, keys and values.
    pub fn kv_bytes_per_token(&self) -> usize {
        2 * self.layers * self.kv_heads * self.head_dim * Self::KV_VALUE_BYTES
    }
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub base: f32,
    /// Leading values of a head that are rotated.
    pub dimensions: usize,
    /// Pairs are (2i, 2i+1) as in GGUF's Llama files, not (i, i + dimensions/2).
    pub interleaved: bool,
    /// `None`, or the rule and its parameters.
    pub scaling: String,
}

impl ModelFacts {
    /// What must be equal for KV to mean the same. `block_size` in tokens.
    pub fn identity(&self, block_size: usize) -> SemanticIdentity {
        SemanticIdentity {
            weights: Fact::observed(format!("blake3:{}", hex(&self.weights_digest))),
            kv_dtype: Fact::observed("f16".to_owned()),
            quantization: Fact::observed("None".to_owned()),
            attention: Fact::observed(Attention {
                layers: narrow(self.shape.layers),
                kv_heads: narrow(self.shape.kv_heads),
                head_size: narrow(self.shape.head_dim),
                kind: "Full".to_owned(),
            }),
            rope: Fact::observed(baton_protocol::identity::Rope {
                base: self.rope.base.to_string(),
                dimensions: narrow(self.rope.dimensions),
                scaling: self.rope.scaling.clone(),
            }),
            sliding_window: Fact::observed(0),
            processor: Fact::observed("None".to_owned()),
            block_size: Fact::observed(narrow(block_size)),
        }
    }

    /// How the KV lies in a block. The engine's own hash is the name of the numerics: other arithmetic gives other bytes.
    pub fn layout(&self) -> Layout {
        Layout {
            order: Fact::observed("layer,kv,token,head,dim".to_owned()),
            bytes_per_token: Fact::observed(self.shape.kv_bytes_per_token() as u64),
            tensor: Fact::observed(1),
            pipeline: Fact::observed(1),
            engine_hash: Fact::observed(self.numerics.clone()),
        }
    }

    /// Digests by which routers fetch the artifacts.
    pub fn route_filter(&self) -> RouteFilter {
        RouteFilter {
            tokenizer: Fact::observed(artifact_digest(&self.tokenizer)),
            chat_template: Fact::observed(artifact_digest(&self.chat_template)),
            adapters: Vec::new(),
        }
    }
}

/// Name of an artifact: BLAKE3 of its bytes, 64 hexadecimal digits.
pub fn artifact_digest(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

fn hex(digest: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*digest).to_hex().to_string()
}

// Shapes are checked against far smaller bounds when a model is made; a card holds 32 bits.
fn narrow(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

//! GGUF: from the bytes of a file to a model, every size checked against the file before anything is allocated for it.
//!
//! The container is read by candle. What is ours is the meaning: which fields and tensors a Llama model has, and a message that
//! names the one that is missing or wrong.

mod alignment;
mod container;
mod vocabulary;

use baton_kernels::BLOCK;

use super::super::{ModelError, ModelFacts, Rope, Shape};
use super::attention;
use super::llama::{Layer, Llama, NUMERICS, Weights};
use super::rope::RopeTable;
use container::Container;

/// More of any of these is a damaged file, not a model for one CPU thread.
const MOST_LAYERS: u64 = 1024;
const MOST_WIDTH: u64 = 1 << 17;
const MOST_CONTEXT: u64 = 1 << 24;

/// Makes a model of the bytes of a file. `file` names it in errors.
///
/// # Errors
/// [`ModelError::Malformed`] with the field or tensor to blame.
pub fn parse(bytes: &[u8], file: &str) -> Result<Llama, ModelError> {
    let mut container = Container::open(bytes, file)?;
    let architecture = container.text("general.architecture")?.to_owned();
    if architecture != "llama" {
        return Err(container.malformed(
            "general.architecture",
            format!("`{architecture}` is not served by Builtin, only `llama` is"),
        ));
    }
    let shape = shape(&container)?;
    let (rope, scale) = rope(&container, &shape)?;
    let factors = if container.has("rope_freqs.weight") {
        factors(&container, rope.dimensions / 2)?
    } else {
        Vec::new()
    };
    let norm_epsilon = epsilon(&container)?;
    let weights = weights(&mut container, &shape, norm_epsilon)?;
    let served = vocabulary::read(&container, shape.vocabulary)?;
    let table = RopeTable::new(&rope, scale, &factors);
    let facts = ModelFacts {
        architecture,
        weights_digest: *blake3::hash(bytes).as_bytes(),
        numerics: NUMERICS.to_owned(),
        shape,
        rope,
        eos_token_ids: served.eos_token_ids,
        bos_token_id: served.bos_token_id,
        tokenizer: served.tokenizer.into(),
        chat_template: served.chat_template.into(),
    };
    Ok(Llama::new(facts, weights, table))
}

fn shape(container: &Container<'_>) -> Result<Shape, ModelError> {
    let layers = container.size("llama.block_count", MOST_LAYERS)?;
    let hidden = container.size("llama.embedding_length", MOST_WIDTH)?;
    let feed_forward = container.size("llama.feed_forward_length", MOST_WIDTH)?;
    let heads = container.size("llama.attention.head_count", MOST_WIDTH)?;
    let kv_heads = if container.has_field("llama.attention.head_count_kv") {
        container.size("llama.attention.head_count_kv", MOST_WIDTH)?
    } else {
        heads
    };
    let head_dim = if container.has_field("llama.attention.key_length") {
        container.size("llama.attention.key_length", MOST_WIDTH)?
    } else {
        hidden / heads
    };
    attention::check_head_dim(head_dim, container.file())?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(container.malformed(
            "llama.attention.head_count_kv",
            format!("{heads} heads cannot share {kv_heads} KV heads evenly"),
        ));
    }
    if container.has_field("llama.attention.value_length")
        && container.size("llama.attention.value_length", MOST_WIDTH)? != head_dim
    {
        return Err(container.malformed(
            "llama.attention.value_length",
            format!("differs from the key length {head_dim}"),
        ));
    }
    for (field, columns) in [
        ("llama.embedding_length", hidden),
        ("llama.feed_forward_length", feed_forward),
        ("llama.attention.head_count", heads * head_dim),
    ] {
        if !columns.is_multiple_of(BLOCK) {
            return Err(container.malformed(
                field,
                format!("a width of {columns} is not a multiple of {BLOCK}"),
            ));
        }
    }
    Ok(Shape {
        layers,
        hidden,
        feed_forward,
        heads,
        kv_heads,
        head_dim,
        vocabulary: container.rows("token_embd.weight", hidden)?,
        max_context: container.size("llama.context_length", MOST_CONTEXT)?,
    })
}

fn rope(container: &Container<'_>, shape: &Shape) -> Result<(Rope, f64), ModelError> {
    let dimensions = if container.has_field("llama.rope.dimension_count") {
        container.size("llama.rope.dimension_count", MOST_WIDTH)?
    } else {
        shape.head_dim
    };
    if dimensions > shape.head_dim || dimensions % 2 != 0 {
        return Err(container.malformed(
            "llama.rope.dimension_count",
            format!(
                "{dimensions} is odd or more than the head size {}",
                shape.head_dim
            ),
        ));
    }
    let base = if container.has_field("llama.rope.freq_base") {
        container.number("llama.rope.freq_base")?
    } else {
        10_000.0
    };
    if !(base.is_finite() && base > 0.0) {
        return Err(container.malformed("llama.rope.freq_base", format!("{base} is not above 0")));
    }
    let rule = if container.has_field("llama.rope.scaling.type") {
        container.text("llama.rope.scaling.type")?
    } else {
        "none"
    };
    let (scale, mut scaling) = match rule {
        "none" => (1.0, "None".to_owned()),
        "linear" => {
            let scale = container.number("llama.rope.scaling.factor")?;
            if !(scale.is_finite() && scale > 0.0) {
                return Err(container.malformed(
                    "llama.rope.scaling.factor",
                    format!("{scale} is not above 0"),
                ));
            }
            (scale, format!("Linear({scale})"))
        }
        other => {
            return Err(container.malformed(
                "llama.rope.scaling.type",
                format!("`{other}` is not supported, only `none` and `linear` are"),
            ));
        }
    };
    if container.has("rope_freqs.weight") {
        // The factors are in the weights, which the digest covers.
        scaling.push_str(" with factors");
    }
    let rope = Rope {
        base: base as f32,
        dimensions,
        interleaved: true,
        scaling,
    };
    Ok((rope, scale))
}

/// Frequencies are divided by these.
fn factors(container: &Container<'_>, pairs: usize) -> Result<Vec<f32>, ModelError> {
    const FACTORS: &str = "rope_freqs.weight";
    let factors = container.vector(FACTORS, pairs)?;
    match factors
        .iter()
        .find(|factor| !(factor.is_normal() && **factor > 0.0))
    {
        Some(factor) => Err(container.malformed(FACTORS, format!("{factor} is not above 0"))),
        None => Ok(factors),
    }
}

/// Added to a mean square before its root divides: without it a row of zeros would become NaN.
fn epsilon(container: &Container<'_>) -> Result<f32, ModelError> {
    const EPSILON: &str = "llama.attention.layer_norm_rms_epsilon";
    let epsilon = container.number(EPSILON)?;
    if !(epsilon as f32).is_normal() || !(0.0..1.0).contains(&epsilon) {
        return Err(container.malformed(EPSILON, format!("{epsilon} is not between 0 and 1")));
    }
    Ok(epsilon as f32)
}

fn weights(
    container: &mut Container<'_>,
    shape: &Shape,
    norm_epsilon: f32,
) -> Result<Weights, ModelError> {
    let query = shape.heads * shape.head_dim;
    let key = shape.kv_heads * shape.head_dim;
    let mut layers = Vec::new();
    for index in 0..shape.layers {
        let name = |part: &str| format!("blk.{index}.{part}.weight");
        layers.push(Layer {
            attention_norm: container.vector(&name("attn_norm"), shape.hidden)?,
            query: container.matrix(&name("attn_q"), query, shape.hidden)?,
            key: container.matrix(&name("attn_k"), key, shape.hidden)?,
            value: container.matrix(&name("attn_v"), key, shape.hidden)?,
            output: container.matrix(&name("attn_output"), shape.hidden, query)?,
            feed_forward_norm: container.vector(&name("ffn_norm"), shape.hidden)?,
            gate: container.matrix(&name("ffn_gate"), shape.feed_forward, shape.hidden)?,
            up: container.matrix(&name("ffn_up"), shape.feed_forward, shape.hidden)?,
            down: container.matrix(&name("ffn_down"), shape.hidden, shape.feed_forward)?,
        });
    }
    let head = if container.has("output.weight") {
        Some(container.matrix("output.weight", shape.vocabulary, shape.hidden)?)
    } else {
        None
    };
    Ok(Weights {
        embedding: container.matrix("token_embd.weight", shape.vocabulary, shape.hidden)?,
        layers,
        norm: container.vector("output_norm.weight", shape.hidden)?,
        head,
        norm_epsilon,
    })
}

#[cfg(test)]
mod tests;

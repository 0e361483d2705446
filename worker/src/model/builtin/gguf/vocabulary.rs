//! The vocabulary of a GGUF file, as the artifacts that routers fetch.

use candle_core::quantized::gguf_file::Value;

use super::super::super::ModelError;
use super::super::super::artifacts::{self, PLAIN_TEMPLATE, PreTokenizer, TokenKind, Vocabulary};
use super::container::{Container, integer};

pub(super) struct Served {
    pub(super) tokenizer: Vec<u8>,
    pub(super) chat_template: Vec<u8>,
    pub(super) eos_token_ids: Vec<u32>,
    pub(super) bos_token_id: Option<u32>,
}

pub(super) fn read(container: &Container<'_>, size: usize) -> Result<Served, ModelError> {
    let model = container.text("tokenizer.ggml.model")?;
    if model != "gpt2" {
        return Err(container.malformed(
            "tokenizer.ggml.model",
            format!("`{model}` is not supported, only `gpt2` (byte-level BPE) is"),
        ));
    }
    let vocabulary = Vocabulary {
        tokens: tokens(container, size)?,
        merges: merges(container)?,
        pre_tokenizer: pre_tokenizer(container)?,
    };
    let optional = |field: &str| {
        container
            .has_field(field)
            .then(|| container.token_id(field, size))
            .transpose()
    };
    let bos_token_id = optional("tokenizer.ggml.bos_token_id")?;
    let eos_token_id = optional("tokenizer.ggml.eos_token_id")?;
    let mut eos_token_ids: Vec<u32> = eos_token_id.into_iter().collect();
    // Ends of a turn and of a message end a generation as well, where a file names them.
    for field in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        if let Some(id) = optional(field)?
            && !eos_token_ids.contains(&id)
        {
            eos_token_ids.push(id);
        }
    }
    let template = if container.has_field("tokenizer.chat_template") {
        container.text("tokenizer.chat_template")?
    } else {
        PLAIN_TEMPLATE
    };
    let add_bos = container.has_field("tokenizer.ggml.add_bos_token")
        && container.flag("tokenizer.ggml.add_bos_token")?;
    let text = |id: Option<u32>| {
        id.and_then(|id| vocabulary.tokens.get(id as usize))
            .map(|(token, _)| token.as_str())
    };
    Ok(Served {
        tokenizer: artifacts::tokenizer_json(&vocabulary),
        chat_template: artifacts::chat_template_json(
            template,
            text(bos_token_id),
            text(eos_token_id),
            add_bos,
        ),
        eos_token_ids,
        bos_token_id,
    })
}

fn tokens(container: &Container<'_>, size: usize) -> Result<Vec<(String, TokenKind)>, ModelError> {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    const KINDS: &str = "tokenizer.ggml.token_type";
    let tokens = container.array(TOKENS)?;
    if tokens.len() != size {
        return Err(container.malformed(
            TOKENS,
            format!(
                "has {} entries for an embedding of {size} rows",
                tokens.len()
            ),
        ));
    }
    let kinds = if container.has_field(KINDS) {
        container.array(KINDS)?
    } else {
        &[]
    };
    tokens
        .iter()
        .enumerate()
        .map(|(id, token)| {
            let Value::String(token) = token else {
                return Err(container.malformed(TOKENS, format!("entry {id} is not text")));
            };
            let kind = kinds.get(id).map_or(Some(TokenKind::Normal), |kind| {
                integer(kind).and_then(TokenKind::from_gguf)
            });
            kind.map(|kind| (token.clone(), kind)).ok_or_else(|| {
                container.malformed(KINDS, format!("entry {id} is not a known type"))
            })
        })
        .collect()
}

fn merges(container: &Container<'_>) -> Result<Vec<(String, String)>, ModelError> {
    const MERGES: &str = "tokenizer.ggml.merges";
    container
        .array(MERGES)?
        .iter()
        .enumerate()
        .map(|(index, merge)| match merge {
            Value::String(merge) => merge.split_once(' ').ok_or_else(|| {
                container.malformed(MERGES, format!("entry {index} is not two tokens"))
            }),
            _ => Err(container.malformed(MERGES, format!("entry {index} is not text"))),
        })
        .map(|merge| merge.map(|(left, right)| (left.to_owned(), right.to_owned())))
        .collect()
}

fn pre_tokenizer(container: &Container<'_>) -> Result<PreTokenizer, ModelError> {
    const PRE: &str = "tokenizer.ggml.pre";
    if !container.has_field(PRE) {
        return Ok(PreTokenizer::Gpt2);
    }
    let name = container.text(PRE)?;
    PreTokenizer::from_gguf(name).ok_or_else(|| {
        container.malformed(
            PRE,
            format!("`{name}` is not supported: gpt-2, smollm, llama-bpe and qwen2 are"),
        )
    })
}

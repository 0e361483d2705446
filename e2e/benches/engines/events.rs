//! What the stand-in's servers say they hold in their prefix caches: the beginnings that prompts share.

use anyhow::Result;
use baton_e2e::stand_in::text::Text;
use bytes::Bytes;
use rmpv::Value;

use crate::LENGTHS;
use crate::fake::BLOCK_SIZE;
use crate::prompts;

/// Batches of events in their order, one for each text: of the shared beginnings those whose number is `place` among each `of`.
pub(crate) fn held(text: &Text, (place, of): (usize, usize)) -> Result<Vec<Bytes>> {
    let mut batches = Vec::new();
    let mut next_hash = 1;
    for characters in LENGTHS {
        for number in (0..prompts::SHARED).filter(|number| number % of == place) {
            let tokens = text.chat_beginning(&prompts::shared(characters, number))?;
            let whole = tokens.len() / BLOCK_SIZE as usize;
            let hashes = next_hash..next_hash + whole as u64;
            next_hash = hashes.end;
            let tokens = &tokens[..whole * BLOCK_SIZE as usize];
            batches.push(batch(hashes.map(Value::from).collect(), tokens)?);
        }
    }
    Ok(batches)
}

/// `[time, [BlockStored], rank]`. Hashes are the engine's own names: anything that is not said twice.
fn batch(hashes: Vec<Value>, tokens: &[u32]) -> Result<Bytes> {
    let fields: [(&str, Value); 9] = [
        ("type", "BlockStored".into()),
        ("block_hashes", Value::Array(hashes)),
        ("parent_block_hash", Value::Nil),
        (
            "token_ids",
            tokens.iter().map(|token| Value::from(*token)).collect(),
        ),
        ("block_size", BLOCK_SIZE.into()),
        ("lora_id", Value::Nil),
        ("medium", "GPU".into()),
        ("group_idx", 0.into()),
        ("kv_cache_spec_kind", "full_attention".into()),
    ];
    let stored = fields.map(|(name, value)| (Value::from(name), value));
    let batch = Value::Array(vec![
        Value::F64(1.0),
        Value::Array(vec![Value::Map(stored.to_vec())]),
        0.into(),
    ]);
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, &batch)?;
    Ok(bytes.into())
}

//! What vLLM's NixlConnector says of itself: the metadata of its handshakes, as a decode worker would ask for it.

use bytes::Bytes;
use rmpv::ValueRef;
use rmpv::decode::read_value_ref_with_max_depth;

use super::sockets;

/// `["get_meta_msg", 0, 0]`: of pipeline rank 0, tensor rank 0.
const QUESTION: &[u8] = b"\x93\xc4\x0cget_meta_msg\0\0";
const DEPTH: usize = 16;

/// Facts of a running connector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Handshake {
    /// Equal, or the engines refuse each other.
    pub(crate) compatibility_hash: String,
    /// Of this process of the engine.
    pub(crate) engine_id: String,
    pub(crate) block_size: u32,
    /// Bytes of a block in each region, of this rank.
    pub(crate) block_lengths: Vec<u64>,
    /// Such as `LBHNC`.
    pub(crate) layout: String,
    pub(crate) attention_backend: String,
}

/// Asks the connector at `host:port`.
///
/// # Errors
/// In words: nothing answers, or not with a handshake.
pub(crate) async fn handshake(address: &str) -> Result<Handshake, String> {
    let frames = sockets::ask(&format!("tcp://{address}"), QUESTION)
        .await
        .map_err(|error| error.to_string())?;
    frames
        .first()
        .and_then(read)
        .ok_or_else(|| format!("{address}: the answer is no handshake of NIXL's"))
}

fn read(payload: &Bytes) -> Option<Handshake> {
    let outer = read_value_ref_with_max_depth(&mut payload.as_ref(), DEPTH).ok()?;
    let ValueRef::Binary(inner) = field(&outer, "agent_metadata_bytes")? else {
        return None;
    };
    let inner = read_value_ref_with_max_depth(&mut &inner[..], DEPTH).ok()?;
    let ValueRef::Array(lengths) = field(&inner, "block_lens")? else {
        return None;
    };
    Some(Handshake {
        compatibility_hash: text(&outer, "compatibility_hash")?,
        engine_id: text(&inner, "engine_id")?,
        block_size: u32::try_from(field(&inner, "block_size")?.as_u64()?).ok()?,
        block_lengths: lengths.iter().filter_map(ValueRef::as_u64).collect(),
        layout: text(&inner, "kv_cache_layout")?,
        attention_backend: text(&inner, "attn_backend_name").unwrap_or_default(),
    })
}

fn field<'a>(map: &'a ValueRef<'a>, name: &str) -> Option<&'a ValueRef<'a>> {
    let ValueRef::Map(pairs) = map else {
        return None;
    };
    let pair = pairs.iter().find(|(key, _)| match key {
        ValueRef::String(key) => key.as_str() == Some(name),
        _ => false,
    });
    pair.map(|(_, value)| value)
}

fn text(map: &ValueRef<'_>, name: &str) -> Option<String> {
    match field(map, name)? {
        ValueRef::String(text) => text.as_str().map(str::to_owned),
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use rmpv::Value;

    use super::*;

    /// A connector's answer, as msgspec writes it.
    pub(crate) fn answer(handshake: &Handshake) -> Vec<u8> {
        let map = |pairs: Vec<(&str, Value)>| {
            let pairs = pairs.into_iter().map(|(key, value)| (key.into(), value));
            let mut written = Vec::new();
            rmpv::encode::write_value(&mut written, &Value::Map(pairs.collect())).unwrap();
            written
        };
        let lengths = handshake
            .block_lengths
            .iter()
            .map(|length| (*length).into());
        let inner = map(vec![
            ("engine_id", handshake.engine_id.as_str().into()),
            ("agent_metadata", Value::Binary(vec![1, 2, 3])),
            ("block_lens", Value::Array(lengths.collect())),
            ("kv_cache_layout", handshake.layout.as_str().into()),
            ("block_size", handshake.block_size.into()),
            (
                "attn_backend_name",
                handshake.attention_backend.as_str().into(),
            ),
            ("region_num_blocks", Value::Nil),
        ]);
        map(vec![
            (
                "compatibility_hash",
                handshake.compatibility_hash.as_str().into(),
            ),
            ("agent_metadata_bytes", Value::Binary(inner)),
        ])
    }

    #[test]
    fn a_handshake_is_read_and_anything_else_is_not() {
        let handshake = Handshake {
            compatibility_hash: "c0ffee".into(),
            engine_id: "e1".into(),
            block_size: 32,
            block_lengths: vec![4096, 4096],
            layout: "LBHNC".into(),
            attention_backend: "CPU_ATTN".into(),
        };
        let answer = answer(&handshake);
        assert_eq!(read(&Bytes::from(answer.clone())), Some(handshake));
        for length in 0..answer.len() {
            assert_eq!(read(&Bytes::copy_from_slice(&answer[..length])), None);
        }
    }
}

//! Events of an engine's prefix cache, from the MessagePack that vLLM and SGLang publish. Pure, and total over any bytes.
//!
//! A batch is an array `[time, [event …], rank]`. An event is a map with a `type` (vLLM 0.26 and later, SGLang 0.5.23), or an array
//! that begins with the type (before); both are read, with any fields left out or added at the end. A batch whose bytes are no
//! MessagePack is an error; one event of it that is not understood is [`Event::Unread`], and the others are kept.
//!
//! Nothing is bounded here but depth: a batch holds fewer values than it has bytes, and its reader bounds the bytes.

use rmpv::ValueRef;
use rmpv::decode::read_value_ref_with_max_depth;

/// Deeper than any event nests.
const DEPTH: usize = 16;

/// An engine's own name of a block. Opaque: only equal or not.
///
/// Engines that publish whole digests are taken by their last 64 bits, which is what the others publish of the same digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineHash(pub u64);

/// What an engine published at once.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Seconds since the epoch, by the engine's clock.
    pub time: f64,
    pub events: Vec<Event>,
    /// Of the data-parallel rank that published it.
    pub rank: u64,
}

/// One change of the engine's cache.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Stored(Stored),
    Removed(Removed),
    /// The whole cache was dropped.
    Cleared,
    /// Of a type, or with contents, that this build does not know. How many blocks it is about is unknown.
    Unread,
}

/// Blocks that can be hit from now on, each the child of the one before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub hashes: Vec<EngineHash>,
    /// What the first of them follows; none: the sequence begins with it.
    pub parent: Option<EngineHash>,
    pub tokens: Vec<u32>,
    /// Tokens of a block.
    pub block_size: u32,
    pub adapter: Option<String>,
    pub place: Place,
    pub kind: GroupKind,
    /// The client's cache salt, where the event tells it.
    pub salt: Option<String>,
    /// For each block what else shaped it, as canonical bytes; empty: nothing.
    pub extra: Vec<Vec<u8>>,
}

/// Copies that are gone, one for each hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    pub hashes: Vec<EngineHash>,
    pub place: Place,
}

/// Where a copy of a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// The KV cache group: layers that share a block table.
    pub group: u32,
    pub medium: Medium,
    /// In another process' reach, not in this engine's.
    pub remote: bool,
}

/// What memory holds a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Medium {
    Device,
    Host,
    Storage,
}

/// What the layers of a group need of the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// All of it: a prefix is as long as its blocks are.
    Whole,
    /// A window or a state: which of its blocks a hit needs is for the engine to know.
    Partial,
}

/// Bytes that are no batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed batch of cache events: {0}")]
pub struct Malformed(&'static str);

/// Reads one batch.
///
/// # Errors
/// [`Malformed`]: the bytes are not MessagePack, or not an array of a time and a list.
pub fn decode(mut bytes: &[u8]) -> Result<Batch, Malformed> {
    let value = read_value_ref_with_max_depth(&mut bytes, DEPTH)
        .map_err(|_| Malformed("not MessagePack, cut off, or too deep"))?;
    let ValueRef::Array(fields) = value else {
        return Err(Malformed("not an array"));
    };
    let [time, events, rest @ ..] = fields.as_slice() else {
        return Err(Malformed("fewer than two fields"));
    };
    let time = number(time).ok_or(Malformed("its time is no number"))?;
    let ValueRef::Array(events) = events else {
        return Err(Malformed("its events are no array"));
    };
    Ok(Batch {
        time,
        events: events
            .iter()
            .map(|event| read(event).unwrap_or(Event::Unread))
            .collect(),
        rank: rest.first().and_then(ValueRef::as_u64).unwrap_or(0),
    })
}

/// Fields of a stored event in the order in which arrays have them, after the type.
const STORED: [&str; 11] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];
const REMOVED: [&str; 3] = ["block_hashes", "medium", "group_idx"];

/// The fields of one event, in either form.
#[derive(Clone, Copy)]
enum Fields<'a> {
    Named(&'a [(ValueRef<'a>, ValueRef<'a>)]),
    Placed(&'a [ValueRef<'a>]),
}

impl<'a> Fields<'a> {
    /// A field that is absent or nil is `None`.
    fn get(self, order: &[&str], name: &str) -> Option<&'a ValueRef<'a>> {
        let value = match self {
            Self::Named(pairs) => pairs
                .iter()
                .find(|(key, _)| text(key) == Some(name))
                .map(|(_, value)| value),
            Self::Placed(values) => {
                let place = order.iter().position(|known| *known == name)?;
                values.get(place)
            }
        };
        value.filter(|value| !matches!(value, ValueRef::Nil))
    }
}

fn read(event: &ValueRef<'_>) -> Option<Event> {
    let (name, fields) = match event {
        ValueRef::Map(pairs) => {
            let fields = Fields::Named(pairs);
            (text(fields.get(&[], "type")?)?, fields)
        }
        ValueRef::Array(values) => {
            let (name, values) = values.split_first()?;
            (text(name)?, Fields::Placed(values))
        }
        _ => return None,
    };
    match name {
        "BlockStored" => stored(fields).map(Event::Stored),
        "BlockRemoved" => removed(fields).map(Event::Removed),
        "AllBlocksCleared" => Some(Event::Cleared),
        _ => None,
    }
}

fn stored(fields: Fields<'_>) -> Option<Stored> {
    let field = |name| fields.get(&STORED, name);
    let hashes = hashes(field("block_hashes")?)?;
    let tokens = list(field("token_ids")?)?
        .iter()
        .map(|token| token.as_u64().and_then(|token| u32::try_from(token).ok()))
        .collect::<Option<Vec<u32>>>()?;
    let parent = match field("parent_block_hash") {
        Some(parent) => Some(hash(parent)?),
        None => None,
    };
    let adapter = match field("lora_name") {
        Some(name) => Some(text(name)?.to_owned()),
        // Before it had a name, an adapter had a number.
        None => field("lora_id")
            .and_then(ValueRef::as_u64)
            .map(|id| format!("#{id}")),
    };
    let mut salt = match field("cache_salt") {
        Some(salt) => Some(text(salt)?.to_owned()),
        None => None,
    };
    let mut extra = vec![Vec::new(); hashes.len()];
    if let Some(keys) = field("extra_keys") {
        for (index, (keys, extra)) in list(keys)?.iter().zip(&mut extra).enumerate() {
            if matches!(keys, ValueRef::Nil) {
                continue;
            }
            let keys = without_adapter(list(keys)?, adapter.as_deref());
            // A sequence's first block alone carries the salt, as a text among its keys. An image's name stands with its place.
            match keys {
                [key] if index == 0 && parent.is_none() && text(key).is_some() => {
                    salt = text(key).map(str::to_owned);
                }
                keys => *extra = canonical(keys),
            }
        }
    }
    Some(Stored {
        block_size: u32::try_from(field("block_size")?.as_u64()?).ok()?,
        place: place(fields, &STORED)?,
        kind: match field("kv_cache_spec_kind") {
            None => GroupKind::Whole,
            Some(kind) => match text(kind)? {
                "full_attention" | "mla_attention" | "sink_full_attention" => GroupKind::Whole,
                _ => GroupKind::Partial,
            },
        },
        hashes,
        parent,
        tokens,
        adapter,
        salt,
        extra,
    })
}

fn removed(fields: Fields<'_>) -> Option<Removed> {
    Some(Removed {
        hashes: hashes(fields.get(&REMOVED, "block_hashes")?)?,
        place: place(fields, &REMOVED)?,
    })
}

fn place(fields: Fields<'_>, order: &[&str]) -> Option<Place> {
    let group = match fields.get(order, "group_idx") {
        Some(group) => u32::try_from(group.as_u64()?).ok()?,
        None => 0,
    };
    let medium = match fields.get(order, "medium") {
        None => Medium::Device,
        Some(medium) => match text(medium)? {
            "GPU" => Medium::Device,
            "CPU" | "CPU_PINNED" => Medium::Host,
            _ => Medium::Storage,
        },
    };
    let locality = fields.get(order, "locality").and_then(text);
    Some(Place {
        group,
        medium,
        remote: locality == Some("REMOTE"),
    })
}

/// Keys name the adapter first where there is one; it is told apart from them already.
fn without_adapter<'a>(keys: &'a [ValueRef<'a>], adapter: Option<&str>) -> &'a [ValueRef<'a>] {
    match keys.split_first() {
        Some((first, rest)) if adapter.is_some() && text(first) == adapter => rest,
        _ => keys,
    }
}

/// The shortest encoding of what was said: two engines that say the same give the same bytes.
fn canonical(keys: &[ValueRef<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for key in keys {
        // Writing into memory does not fail.
        let _ = rmpv::encode::write_value_ref(&mut bytes, key);
    }
    bytes
}

fn hashes(value: &ValueRef<'_>) -> Option<Vec<EngineHash>> {
    list(value)?.iter().map(hash).collect()
}

fn hash(value: &ValueRef<'_>) -> Option<EngineHash> {
    match value {
        ValueRef::Integer(number) => number
            .as_u64()
            // Signed: the same bits.
            .or_else(|| number.as_i64().map(i64::cast_unsigned))
            .map(EngineHash),
        ValueRef::Binary(bytes) => {
            let tail = &bytes[bytes.len().saturating_sub(8)..];
            let mut last = [0; 8];
            last[8 - tail.len()..].copy_from_slice(tail);
            if tail.is_empty() {
                return None;
            }
            Some(EngineHash(u64::from_be_bytes(last)))
        }
        _ => None,
    }
}

fn list<'a>(value: &'a ValueRef<'a>) -> Option<&'a [ValueRef<'a>]> {
    match value {
        ValueRef::Array(values) => Some(values),
        _ => None,
    }
}

fn text<'a>(value: &'a ValueRef<'_>) -> Option<&'a str> {
    match value {
        ValueRef::String(text) => text.as_str(),
        _ => None,
    }
}

fn number(value: &ValueRef<'_>) -> Option<f64> {
    match value {
        ValueRef::F64(number) => Some(*number),
        ValueRef::F32(number) => Some(f64::from(*number)),
        ValueRef::Integer(number) => number.as_f64(),
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod tests;

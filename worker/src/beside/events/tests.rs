//! Decoding: one of each in both forms, what a real server sent, and any bytes.

use proptest::prelude::*;
use rmpv::Value;

use super::*;
use crate::beside::frames::{AGGREGATED, DECODE, PREFILL, REPLAY, payloads};

/// One of each, as vLLM 0.33 writes them: maps with lengths longer than needed.
const MAPS: &str = "93cb3ff800000000000093de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c40401010101b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920102aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c40401010101a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400";
/// The same as older ones do: arrays.
const ARRAYS: &str = "93cb3ff8000000000000939aab426c6f636b53746f72656491c40401010101c092010202c0a3475055c091c00094ac426c6f636b52656d6f76656491c40401010101a34750550091b0416c6c426c6f636b73436c656172656400";

fn bytes(hexadecimal: &str) -> Vec<u8> {
    hexadecimal
        .as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

const DEVICE: Place = Place {
    group: 0,
    medium: Medium::Device,
    remote: false,
};

/// A batch as the older versions wrote it: every map turned into an array, in the order of the fields.
pub(crate) fn as_arrays(payload: &[u8]) -> Vec<u8> {
    let mut value = rmpv::decode::read_value(&mut &payload[..]).unwrap();
    let Value::Array(fields) = &mut value else {
        panic!("a batch is an array");
    };
    let Value::Array(events) = &mut fields[1] else {
        panic!("its events are one too");
    };
    for event in events {
        let name = event["type"].clone();
        let order: &[&str] = match name.as_str().unwrap() {
            "BlockStored" => &STORED,
            "BlockRemoved" => &REMOVED,
            _ => &[],
        };
        let mut array = vec![name];
        array.extend(order.iter().map(|field| event[*field].clone()));
        *event = Value::Array(array);
    }
    let mut written = Vec::new();
    rmpv::encode::write_value(&mut written, &value).unwrap();
    written
}

#[test]
fn both_forms_say_the_same() {
    let batch = decode(&bytes(MAPS)).unwrap();
    assert_eq!(batch, decode(&bytes(ARRAYS)).unwrap());
    let name = vec![EngineHash(0x0101_0101)];
    assert_eq!(batch.time, 1.5);
    assert_eq!(
        batch.events,
        [
            Event::Stored(Stored {
                hashes: name.clone(),
                parent: None,
                tokens: vec![1, 2],
                block_size: 2,
                adapter: None,
                place: DEVICE,
                kind: GroupKind::Whole,
                salt: None,
                extra: vec![Vec::new()],
            }),
            Event::Removed(Removed {
                hashes: name,
                place: DEVICE,
            }),
            Event::Cleared,
        ]
    );
}

#[test]
fn everything_that_a_real_server_sent_is_read_in_both_forms() {
    let mut kinds = [0; 3];
    for file in [AGGREGATED, PREFILL, DECODE, REPLAY] {
        for payload in payloads(file) {
            let batch = decode(&payload).unwrap();
            assert_eq!(batch, decode(&as_arrays(&payload)).unwrap());
            for event in batch.events {
                match event {
                    Event::Stored(stored) => {
                        kinds[0] += 1;
                        assert_eq!(stored.block_size, 32);
                        assert_eq!(stored.tokens.len(), 32 * stored.hashes.len());
                    }
                    Event::Removed(_) => kinds[1] += 1,
                    Event::Cleared => kinds[2] += 1,
                    Event::Unread => panic!("{file:p}: an event was not read"),
                }
            }
        }
    }
    assert!(kinds.iter().all(|count| *count >= 4), "{kinds:?}");
}

fn one(event: Value) -> Event {
    let batch = Value::Array(vec![1.5.into(), Value::Array(vec![event])]);
    let mut written = Vec::new();
    rmpv::encode::write_value(&mut written, &batch).unwrap();
    decode(&written).unwrap().events.remove(0)
}

fn map(pairs: &[(&str, Value)]) -> Value {
    Value::Map(
        pairs
            .iter()
            .map(|(key, value)| ((*key).into(), value.clone()))
            .collect(),
    )
}

fn array(values: &[Value]) -> Value {
    Value::Array(values.to_vec())
}

fn told(more: &[(&str, Value)]) -> Event {
    let mut pairs = vec![
        ("type", "BlockStored".into()),
        ("block_hashes", array(&[7.into(), 8.into()])),
        (
            "token_ids",
            array(&[1.into(), 2.into(), 3.into(), 4.into()]),
        ),
        ("block_size", 2.into()),
    ];
    pairs.extend_from_slice(more);
    one(map(&pairs))
}

fn stored_with(more: &[(&str, Value)]) -> Stored {
    match told(more) {
        Event::Stored(stored) => stored,
        other => panic!("{other:?}"),
    }
}

#[test]
fn hashes_of_every_width_are_taken_by_their_last_64_bits() {
    let digest: Vec<u8> = (0..32).collect();
    let removed = |hash: Value| {
        one(map(&[
            ("type", "BlockRemoved".into()),
            ("block_hashes", array(&[hash])),
        ]))
    };
    let expected = |hash| {
        Event::Removed(Removed {
            hashes: vec![EngineHash(hash)],
            place: DEVICE,
        })
    };
    assert_eq!(
        removed(Value::Binary(digest)),
        expected(0x1819_1a1b_1c1d_1e1f)
    );
    assert_eq!(removed(u64::MAX.into()), expected(u64::MAX));
    assert_eq!(removed((-2_i64).into()), expected(u64::MAX - 1));
    assert_eq!(removed(Value::Binary(vec![1; 2])), expected(0x0101));
    assert_eq!(removed(Value::Binary(Vec::new())), Event::Unread);
}

#[test]
fn a_salt_an_adapter_and_an_image_are_told_apart() {
    let keys =
        |first: &[Value], second: &[Value]| ("extra_keys", array(&[array(first), array(second)]));
    let salted = stored_with(&[keys(&["s1".into()], &[])]);
    assert_eq!(salted.salt.as_deref(), Some("s1"));
    assert!(salted.extra.iter().all(Vec::is_empty));
    let adapted = stored_with(&[
        ("lora_name", "a".into()),
        keys(&["a".into(), "s1".into()], &["a".into()]),
    ]);
    assert_eq!(adapted.adapter.as_deref(), Some("a"));
    assert_eq!(adapted.salt.as_deref(), Some("s1"));
    assert!(adapted.extra.iter().all(Vec::is_empty));
    let image = array(&["image".into(), 0.into()]);
    let shown = stored_with(&[keys(
        std::slice::from_ref(&image),
        std::slice::from_ref(&image),
    )]);
    assert_eq!(shown.salt, None);
    assert!(!shown.extra[0].is_empty() && shown.extra[0] == shown.extra[1]);
    // A block in the middle of a sequence carries no salt.
    let middle = stored_with(&[("parent_block_hash", 1.into()), keys(&["x".into()], &[])]);
    assert_eq!(middle.salt, None);
    assert!(!middle.extra[0].is_empty());
    let sglang = stored_with(&[("cache_salt", "s2".into())]);
    assert_eq!(sglang.salt.as_deref(), Some("s2"));
}

#[test]
fn groups_media_and_reach_are_read_and_what_is_unknown_is_told() {
    let place = |more: &[(&str, Value)]| stored_with(more).place;
    assert_eq!(place(&[]), DEVICE);
    assert_eq!(
        place(&[("medium", "CPU_PINNED".into())]).medium,
        Medium::Host
    );
    assert_eq!(place(&[("medium", "DISK".into())]).medium, Medium::Storage);
    assert_eq!(place(&[("group_idx", 3.into())]).group, 3);
    assert!(place(&[("locality", "REMOTE".into())]).remote);
    let kind = |kind: &str| stored_with(&[("kv_cache_spec_kind", kind.into())]).kind;
    assert_eq!(kind("mla_attention"), GroupKind::Whole);
    for partial in ["sliding_window", "mamba", "of_the_future"] {
        assert_eq!(kind(partial), GroupKind::Partial);
    }
    // Fields of later versions change nothing.
    assert!(matches!(
        told(&[("lookahead_token_ids", array(&[])), ("new", true.into())]),
        Event::Stored(_)
    ));
    // Pairs of tokens are not tokens.
    assert_eq!(
        told(&[("token_ids", array(&[]))]),
        told(&[]),
        "the first of two fields counts"
    );
    let pairs = array(&[array(&[1.into(), 2.into()])]);
    let bigram = map(&[
        ("type", "BlockStored".into()),
        ("block_hashes", array(&[7.into()])),
        ("token_ids", pairs),
        ("block_size", 1.into()),
    ]);
    assert_eq!(one(bigram), Event::Unread);
    assert_eq!(one(map(&[("type", "BlockMoved".into())])), Event::Unread);
    assert_eq!(one(Value::Nil), Event::Unread);
}

#[test]
fn bytes_that_are_no_batch_say_why() {
    for (bytes, why) in [
        (&b""[..], "not MessagePack"),
        (b"\x93", "not MessagePack"),
        (b"\x80", "not an array"),
        (b"\x91\x01", "fewer than two"),
        (b"\x92\xa1x\x90", "its time"),
        (b"\x92\x01\x80", "its events"),
    ] {
        let error = decode(bytes).unwrap_err().to_string();
        assert!(error.contains(why), "{bytes:?}: {error}");
    }
    // Arrays in arrays without end, and one that claims four billion values.
    assert!(decode(&[0x91; 100_000]).is_err());
    assert!(decode(b"\x92\x01\xdd\xff\xff\xff\xff\x01").is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode(&bytes);
    }

    #[test]
    fn a_changed_byte_of_a_real_batch_is_read_or_refused(at in any::<prop::sample::Index>(), value in any::<u8>()) {
        let payload = payloads(PREFILL).remove(0);
        let mut changed = payload.to_vec();
        let at = at.index(changed.len());
        changed[at] = value;
        if let Ok(batch) = decode(&changed) {
            for event in batch.events {
                if let Event::Stored(stored) = event {
                    prop_assert_eq!(stored.extra.len(), stored.hashes.len());
                }
            }
        }
    }
}

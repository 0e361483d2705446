//! What vLLM and SGLang publish of their prefix caches, from its bytes into the index under Baton's hashes.
//!
//! An input is a sequence of batches: two bytes say how long one is (little-endian), then the batch in MessagePack.

use std::collections::{HashMap, HashSet};

use baton_protocol::hash::{BlockHash, HashKey};
use baton_worker::beside::events::{Event, decode};
use baton_worker::beside::index::{Index, Settings};
use baton_worker::kv::events::{CacheChange, EventsSince};

/// Hashes that the log may hold: more than any input has.
const LOG: usize = 1 << 20;

/// Puts a batch in front of the next one.
pub fn frame(input: &mut Vec<u8>, batch: &[u8]) {
    input.extend_from_slice(&(batch.len() as u16).to_le_bytes());
    input.extend_from_slice(batch);
}

/// Every batch can be read, and nothing is left over.
pub fn accepts(input: &[u8]) -> bool {
    let mut rest = input;
    while let Some((length, after)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length));
        let Some((batch, after)) = after.split_at_checked(length) else {
            return false;
        };
        if decode(batch).is_err() {
            return false;
        }
        rest = after;
    }
    !input.is_empty() && rest.is_empty()
}

/// Whatever was published: an event tells no more than its bytes can hold, and who reads the index' changes knows what it holds.
///
/// # Panics
/// If that is not so.
pub fn check(mut input: &[u8]) {
    let settings = Settings {
        key: HashKey::from_bytes(&[1; 32]),
        kv_identity: "identity".to_owned(),
        block_size: 32,
        blocks: 100,
        adapters: HashMap::new(),
    };
    let mut index = Index::new(settings, LOG);
    while let Some((length, rest)) = input.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
        let (batch, rest) = rest.split_at(length);
        input = rest;
        match decode(batch) {
            Ok(read) => {
                for event in read.events {
                    if let Event::Stored(stored) = &event {
                        assert!(stored.hashes.len() + stored.tokens.len() <= batch.len());
                        assert_eq!(stored.extra.len(), stored.hashes.len());
                    }
                    assert!(index.apply(&event), "no input is long enough for that");
                }
            }
            Err(error) => assert!(error.to_string().len() < 100),
        }
        assert!(index.waiting() <= 100, "orphans are bounded");
    }
    let EventsSince::Events(events) = index.since(0) else {
        panic!("the log is long enough");
    };
    let mut known: HashSet<BlockHash> = HashSet::new();
    for event in events {
        match event.change {
            CacheChange::Stored(hashes) => {
                for hash in hashes {
                    assert!(known.insert(hash), "stored while it is there");
                }
            }
            CacheChange::Removed(hashes) => {
                for hash in hashes {
                    assert!(known.remove(&hash), "removed while it is not there");
                }
            }
            CacheChange::Cleared => known.clear(),
        }
    }
    let held: HashSet<BlockHash> = index.snapshot().1.into_iter().collect();
    assert_eq!(held.len(), index.len());
    assert_eq!(held, known);
}

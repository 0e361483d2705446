//! A worker's Watch stream, from its bytes into what the router knows of it and into the prefix index.
//!
//! An input is a sequence of messages: one byte says of which of two workers it is, two how long it is (little-endian), then
//! the message in protobuf. The byte's second bit makes the stream break before it.

use std::collections::HashSet;

use baton_placement::index::{ExactIndex, IndexEvent, PrefixIndex};
use baton_protocol::hash::BlockHash;
use baton_protocol::wire::{self, watch_event::Event};
use baton_router::clock::Moment;
use baton_router::fleet::state::Tracked;
use prost::Message;

/// Names of the workers, by slot.
pub const WORKERS: [&str; 2] = ["a", "b"];

/// Puts a message in front of the next one.
pub fn frame(input: &mut Vec<u8>, worker: u8, event: &wire::WatchEvent) {
    let bytes = event.encode_to_vec();
    input.push(worker);
    input.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
    input.extend_from_slice(&bytes);
}

/// What the index must hold of a worker, by the plainest rules.
#[derive(Default)]
struct Expected {
    incarnation: Option<u64>,
    loading: Option<HashSet<BlockHash>>,
    live: bool,
    held: HashSet<BlockHash>,
}

impl Expected {
    fn nothing(&mut self) {
        self.loading = None;
        self.live = false;
        self.held.clear();
    }

    fn take(&mut self, event: &wire::WatchEvent) {
        match &event.event {
            Some(Event::SnapshotBegin(_)) => {
                self.loading = Some(HashSet::new());
                self.live = false;
            }
            Some(Event::SnapshotEnd(_)) => {
                if let Some(blocks) = self.loading.take() {
                    self.held = blocks;
                    self.live = true;
                }
            }
            Some(Event::Stored(stored)) => {
                if let Some(blocks) = self.changed() {
                    blocks.extend(hashes(&stored.hashes));
                }
            }
            Some(Event::Removed(removed)) => {
                let gone: HashSet<BlockHash> = hashes(&removed.hashes).collect();
                if let Some(blocks) = self.changed() {
                    blocks.retain(|block| !gone.contains(block));
                }
            }
            Some(Event::Cleared(_)) => {
                if let Some(blocks) = self.changed() {
                    blocks.clear();
                }
            }
            _ => {}
        }
    }

    fn changed(&mut self) -> Option<&mut HashSet<BlockHash>> {
        match &mut self.loading {
            Some(blocks) => Some(blocks),
            None if self.live => Some(&mut self.held),
            None => None,
        }
    }
}

fn hashes(bytes: &[u8]) -> impl Iterator<Item = BlockHash> {
    BlockHash::unpack(bytes)
        .expect("the worker's state took it")
        .into_iter()
}

/// Plays the messages and holds the index against the plain rules after each.
pub fn check(input: &[u8]) {
    let mut index = ExactIndex::new();
    let mut workers: [Tracked; 2] =
        std::array::from_fn(|slot| Tracked::new(WORKERS[slot].into(), slot as u32));
    let mut expected: [Expected; 2] = Default::default();
    let mut met: Vec<BlockHash> = Vec::new();
    let mut now = 1_000_000;
    let mut rest = input;
    while let Some(([head, low, high], after)) = rest.split_first_chunk::<3>() {
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(after.len());
        let (message, after) = after.split_at(length);
        rest = after;
        let Ok(event) = wire::WatchEvent::decode(message) else {
            continue;
        };
        // The wire form of what was read says the same.
        let again = wire::WatchEvent::decode(event.encode_to_vec().as_slice());
        let again = again.expect("what was written can be read");
        assert_eq!(again.encode_to_vec(), event.encode_to_vec());

        let slot = usize::from(head & 1);
        let (worker, model) = (&mut workers[slot], &mut expected[slot]);
        if head & 2 != 0 {
            worker.disconnected();
            worker.connected(Moment(now));
        }
        if model.incarnation.replace(event.incarnation) != Some(event.incarnation) {
            model.nothing();
        }
        if let Some(Event::Stored(stored)) = &event.event {
            met.extend(BlockHash::unpack(&stored.hashes).unwrap_or_default());
        }
        now += 1_000;
        match worker.apply(event.clone(), &mut index, Moment(now)) {
            Ok(_) => model.take(&event),
            Err(error) => {
                model.nothing();
                assert!(worker.resume().is_none(), "resumes after: {error}");
            }
        }
        if worker.resume().is_some() {
            assert!(model.live, "resumes although no snapshot is whole");
        }
        compare(&index, &expected, &met);
    }
    for slot in 0..2 {
        index.apply(slot, IndexEvent::Cleared);
    }
    assert_eq!(index.blocks(), 0, "blocks are left of no worker");
}

/// Every message can be read, and nothing is left over.
pub fn accepts(input: &[u8]) -> bool {
    let mut rest = input;
    while let Some(([_, low, high], after)) = rest.split_first_chunk::<3>() {
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        let Some((message, after)) = after.split_at_checked(length) else {
            return false;
        };
        if wire::WatchEvent::decode(message).is_err() {
            return false;
        }
        rest = after;
    }
    !input.is_empty() && rest.is_empty()
}

fn compare(index: &ExactIndex, expected: &[Expected; 2], met: &[BlockHash]) {
    let distinct: HashSet<&BlockHash> = expected.iter().flat_map(|one| &one.held).collect();
    assert_eq!(index.blocks(), distinct.len());
    // The blocks in the order in which they were met are a prompt as good as any.
    let hits = index.matches(met);
    for (slot, one) in (0_u32..).zip(expected) {
        let depth = met
            .iter()
            .take_while(|block| one.held.contains(block))
            .count();
        assert_eq!(hits.depth(slot) as usize, depth, "worker {slot}");
    }
}

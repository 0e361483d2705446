//! The index: against the plainest model over random histories, on what a real server sent, and case by case.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::beside::events::{Medium, decode};
use crate::beside::frames::{AGGREGATED, DECODE, PREFILL, REPLAY, payloads};
use crate::kv::events::EventsSince;

const SIZE: u32 = 2;

fn settings(blocks: usize, block_size: u32) -> Settings {
    Settings {
        key: HashKey::from_bytes(&[7; 32]),
        kv_identity: "identity".into(),
        block_size,
        blocks,
        adapters: HashMap::from([("a".to_owned(), "r1".to_owned())]),
    }
}

fn index() -> Index {
    Index::new(settings(1000, SIZE), 100_000)
}

fn hasher(salt: &str) -> BlockHasher {
    BlockHasher::new(&HashKey::from_bytes(&[7; 32]), "identity", salt)
}

fn place(group: u32) -> Place {
    Place {
        group,
        medium: Medium::Device,
        remote: false,
    }
}

/// An engine's name of the block that ends a sequence.
fn name(path: &[u32]) -> EngineHash {
    let bytes: Vec<u8> = path.iter().flat_map(|token| token.to_le_bytes()).collect();
    let digest = blake3::hash(&bytes);
    EngineHash(u64::from_le_bytes(
        digest.as_bytes()[..8].try_into().unwrap(),
    ))
}

/// Blocks `from..` of a sequence.
fn stored(tokens: &[u32], from: usize, group: u32) -> Stored {
    let size = SIZE as usize;
    let blocks = tokens.len() / size;
    Stored {
        hashes: (from..blocks)
            .map(|at| name(&tokens[..(at + 1) * size]))
            .collect(),
        parent: (from > 0).then(|| name(&tokens[..from * size])),
        tokens: tokens[from * size..].to_vec(),
        block_size: SIZE,
        adapter: None,
        place: place(group),
        kind: GroupKind::Whole,
        salt: None,
        extra: vec![Vec::new(); blocks - from],
    }
}

fn removed(path: &[u32], group: u32) -> Event {
    Event::Removed(Removed {
        hashes: vec![name(path)],
        place: place(group),
    })
}

fn held(index: &mut Index) -> BTreeSet<BlockHash> {
    index.snapshot().1.into_iter().collect()
}

/// What a watcher knows who has read the whole log.
fn replayed(index: &mut Index) -> BTreeSet<BlockHash> {
    let EventsSince::Events(events) = index.since(0) else {
        panic!("the log is long enough");
    };
    let mut known = BTreeSet::new();
    for event in events {
        match event.change {
            CacheChange::Stored(hashes) => known.extend(hashes),
            CacheChange::Removed(hashes) => known.retain(|hash| !hashes.contains(hash)),
            CacheChange::Cleared => known.clear(),
        }
    }
    known
}

fn chain(tokens: &[u32], salt: &str) -> Vec<BlockHash> {
    hasher(salt).chain(tokens, SIZE as usize)
}

/// What the index must hold, by the plainest rules: of every block its copies, and whether all before it was ever told.
#[derive(Default)]
struct Model {
    blocks: BTreeMap<Vec<u32>, (BTreeMap<u32, u32>, bool)>,
}

impl Model {
    fn store(&mut self, tokens: &[u32], from: usize, group: u32) {
        let size = SIZE as usize;
        for at in from..tokens.len() / size {
            let path = tokens[..(at + 1) * size].to_vec();
            let (copies, _) = self.blocks.entry(path).or_default();
            *copies.entry(group).or_default() += 1;
            // In the order in which they are told: a parent that is known now may be gone by the next event.
            self.settle();
        }
    }

    fn remove(&mut self, path: &[u32], group: u32) {
        let Some((copies, _)) = self.blocks.get_mut(path) else {
            return;
        };
        if let Some(count) = copies.get_mut(&group) {
            *count -= 1;
            if *count == 0 {
                copies.remove(&group);
            }
        }
        if copies.is_empty() {
            self.blocks.remove(path);
        }
    }

    fn settle(&mut self) {
        loop {
            let known: BTreeSet<Vec<u32>> = self
                .blocks
                .iter()
                .filter(|(_, (_, known))| *known)
                .map(|(path, _)| path.clone())
                .collect();
            let mut changed = false;
            for (path, (_, is_known)) in &mut self.blocks {
                let parent = &path[..path.len() - SIZE as usize];
                if !*is_known && (parent.is_empty() || known.contains(parent)) {
                    *is_known = true;
                    changed = true;
                }
            }
            if !changed {
                return;
            }
        }
    }

    fn held(&self) -> BTreeSet<BlockHash> {
        self.blocks
            .iter()
            .filter(|(_, (_, known))| *known)
            .map(|(path, _)| *chain(path, "").last().unwrap())
            .collect()
    }
}

#[derive(Clone, Debug)]
enum Move {
    Store {
        tokens: Vec<u32>,
        from: usize,
        group: u32,
    },
    Remove {
        tokens: Vec<u32>,
        group: u32,
    },
    Clear,
}

/// Sequences over two tokens: many share their beginnings.
fn sequence() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0..2_u32, 1..=4)
        .prop_map(|half| half.iter().flat_map(|token| [*token, 9]).collect())
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        6 => (sequence(), 0..4_usize, 0..2_u32).prop_map(|(tokens, from, group)| {
            let from = from.min(tokens.len() / SIZE as usize - 1);
            Move::Store { tokens, from, group }
        }),
        6 => (sequence(), 0..2_u32).prop_map(|(tokens, group)| Move::Remove { tokens, group }),
        1 => Just(Move::Clear),
    ];
    prop::collection::vec(one, 0..60)
}

proptest! {
    #[test]
    fn the_index_is_the_model_after_any_history(moves in moves()) {
        let (mut index, mut model) = (index(), Model::default());
        for one in moves {
            match one {
                Move::Store { tokens, from, group } => {
                    model.store(&tokens, from, group);
                    prop_assert!(index.apply(&Event::Stored(stored(&tokens, from, group))));
                }
                Move::Remove { tokens, group } => {
                    model.remove(&tokens, group);
                    prop_assert!(index.apply(&removed(&tokens, group)));
                }
                Move::Clear => {
                    model = Model::default();
                    index.apply(&Event::Cleared);
                }
            }
            prop_assert_eq!(held(&mut index), model.held());
            let orphans = model.blocks.values().filter(|(_, known)| !known).count();
            prop_assert_eq!(index.waiting(), orphans);
        }
        prop_assert_eq!(replayed(&mut index), model.held());
    }
}

#[test]
fn what_a_real_server_sent_is_indexed_alike_in_both_forms() {
    for file in [AGGREGATED, PREFILL, DECODE, REPLAY] {
        let mut indexes = [false, true].map(|arrays| {
            let mut index = Index::new(settings(400, 32), 100_000);
            for payload in payloads(file) {
                let payload = if arrays {
                    crate::beside::events::tests::as_arrays(&payload)
                } else {
                    payload.to_vec()
                };
                for event in decode(&payload).unwrap().events {
                    assert!(index.apply(&event));
                }
            }
            index
        });
        let [maps, arrays] = &mut indexes;
        assert!(!maps.is_empty());
        assert_eq!(maps.counts().hidden(), 0, "{:?}", maps.counts());
        assert_eq!(held(maps), held(arrays));
        assert_eq!(held(maps), replayed(maps));
        assert_eq!(maps.waiting(), 0);
    }
}

/// Prefill and decode worker of a pair served the same prompts: the index of either finds them.
#[test]
fn a_prompt_of_the_capture_is_found_by_the_routers_own_hashes() {
    let mut index = Index::new(settings(400, 32), 100_000);
    let batches: Vec<_> = payloads(DECODE)
        .iter()
        .map(|payload| decode(payload).unwrap())
        .collect();
    let Event::Stored(first) = &batches[0].events[0] else {
        panic!("the capture begins with a prompt");
    };
    let prompt = first.tokens.clone();
    for batch in batches {
        for event in batch.events {
            index.apply(&event);
        }
    }
    let found = held(&mut index);
    let hashes = hasher("").chain(&prompt, 32);
    assert_eq!(hashes.len(), 22);
    assert!(hashes.iter().all(|hash| found.contains(hash)));
}

#[test]
fn a_block_that_was_computed_twice_is_gone_when_both_copies_are() {
    let mut index = index();
    for _ in 0..2 {
        index.apply(&Event::Stored(stored(&[1, 2], 0, 0)));
    }
    index.apply(&removed(&[1, 2], 0));
    assert_eq!(index.len(), 1);
    index.apply(&removed(&[1, 2], 0));
    assert_eq!(index.len(), 0);
    index.apply(&removed(&[1, 2], 0));
    assert_eq!(index.counts().skipped(Cause::UnknownRemoval), 1);
    assert_eq!(index.counts().hidden(), 0);
}

#[test]
fn groups_and_media_hold_a_block_each_on_their_own() {
    let mut index = index();
    index.apply(&Event::Stored(stored(&[1, 2], 0, 0)));
    let mut host = stored(&[1, 2], 0, 0);
    host.place.medium = Medium::Host;
    // An event that says no tokens: a copy of what is known.
    host.tokens.clear();
    host.block_size = 0;
    index.apply(&Event::Stored(host.clone()));
    index.apply(&removed(&[1, 2], 0));
    assert_eq!(index.len(), 1);
    index.apply(&Event::Removed(Removed {
        hashes: host.hashes.clone(),
        place: host.place,
    }));
    assert_eq!(index.len(), 0);
    index.apply(&Event::Stored(host));
    assert_eq!(index.counts().skipped(Cause::Placeholder), 1);
}

#[test]
fn what_was_told_twice_is_found_out_by_the_engines_memory() {
    let mut index = Index::new(settings(3, SIZE), 1000);
    for _ in 0..4 {
        index.apply(&Event::Stored(stored(&[1, 2], 0, 0)));
    }
    assert_eq!(index.counts().skipped(Cause::ToldTwice), 3);
    index.apply(&removed(&[1, 2], 0));
    assert_eq!(index.len(), 0);
}

#[test]
fn copies_beside_the_device_do_not_count_against_its_memory() {
    let mut index = Index::new(settings(3, SIZE), 1000);
    // Computed twice at once: two real copies.
    for _ in 0..2 {
        index.apply(&Event::Stored(stored(&[1, 2], 0, 0)));
    }
    for token in 3..40 {
        let mut host = stored(&[token, token], 0, 0);
        host.place.medium = Medium::Host;
        index.apply(&Event::Stored(host));
    }
    assert_eq!(index.counts().skipped(Cause::ToldTwice), 0);
    index.apply(&removed(&[1, 2], 0));
    assert_eq!(index.len(), 38, "its second copy is still there");
    index.apply(&removed(&[1, 2], 0));
    assert_eq!(index.len(), 37);
}

#[test]
fn an_engine_with_more_blocks_than_its_card_says_is_not_counted_at_each_event() {
    let mut index = Index::new(settings(3, SIZE), 1000);
    let told = |index: &mut Index, token: u32| {
        index.apply(&Event::Stored(stored(&[token, token], 0, 0)));
        index.counts().skipped(Cause::ToldTwice)
    };
    for token in 0..22 {
        assert_eq!(told(&mut index, token), 0);
    }
    assert_eq!(told(&mut index, 1), 1);
    assert_eq!((told(&mut index, 2), told(&mut index, 3)), (1, 1));
    assert_eq!(told(&mut index, 4), 4, "a tenth more than there were");
}

#[test]
fn what_cannot_be_indexed_is_counted_by_its_cause() {
    let base = || stored(&[1, 2, 3, 4], 0, 0);
    let cases: [(Cause, u64, Event); 6] = [
        (
            Cause::GroupKind,
            2,
            Event::Stored(Stored {
                kind: GroupKind::Partial,
                ..base()
            }),
        ),
        (
            Cause::BlockSize,
            2,
            Event::Stored(Stored {
                block_size: 4,
                ..base()
            }),
        ),
        (
            Cause::Lengths,
            2,
            Event::Stored(Stored {
                tokens: vec![1, 2, 3],
                ..base()
            }),
        ),
        (
            Cause::Remote,
            2,
            Event::Stored(Stored {
                place: Place {
                    remote: true,
                    ..place(0)
                },
                ..base()
            }),
        ),
        (Cause::Orphan, 1, Event::Stored(stored(&[1, 2, 3, 4], 1, 0))),
        (Cause::Unread, 1, Event::Unread),
    ];
    for (cause, blocks, event) in cases {
        let mut index = index();
        index.apply(&event);
        assert_eq!(index.counts().skipped(cause), blocks, "{cause:?}");
        assert_eq!(index.counts().hidden(), blocks);
        assert_eq!(index.len(), 0);
    }
    let mut index = Index::new(settings(1, SIZE), 1000);
    index.apply(&Event::Stored(stored(&[1, 2, 3, 4, 5, 6], 1, 0)));
    assert_eq!(index.counts().skipped(Cause::OrphansFull), 1);
    assert_eq!(index.waiting(), 1);
    // A removal in a group that only holds windows is none of an unknown block.
    index.apply(&Event::Stored(Stored {
        kind: GroupKind::Partial,
        place: place(1),
        ..base()
    }));
    index.apply(&removed(&[1, 2], 1));
    assert_eq!(index.counts().skipped(Cause::UnknownRemoval), 0);
}

#[test]
fn salts_and_adapters_have_hashes_of_their_own() {
    let mut index = index();
    let tokens = [1, 2, 3, 4];
    index.apply(&Event::Stored(stored(&tokens, 0, 0)));
    let renamed = |mut stored: Stored, by: u64| {
        for hash in &mut stored.hashes {
            hash.0 ^= by;
        }
        stored
    };
    let salted = Stored {
        salt: Some("s1".into()),
        ..renamed(stored(&tokens, 0, 0), 1)
    };
    index.apply(&Event::Stored(salted));
    let adapted = Stored {
        adapter: Some("a".into()),
        ..renamed(stored(&tokens, 0, 0), 2)
    };
    index.apply(&Event::Stored(adapted));
    let found = held(&mut index);
    assert_eq!(found.len(), 6);
    for salt in ["", "s1"] {
        assert!(chain(&tokens, salt).iter().all(|hash| found.contains(hash)));
    }
    // What shaped a block is in its hash after its tokens.
    let plain = hasher("");
    let first = plain.child(plain.root(), &tokens[..2], b"adapter a r1");
    assert!(found.contains(&first));
}

#[test]
fn an_index_that_grows_beyond_reason_is_given_up() {
    let mut index = Index::new(settings(10, SIZE), 1000);
    let many: Vec<u32> = (0..2 * (SMALLEST_BOUND as u32 + 1)).collect();
    let mut stored = stored(&[1, 2], 0, 0);
    stored.hashes = (0..=SMALLEST_BOUND as u64).map(EngineHash).collect();
    stored.extra = vec![Vec::new(); stored.hashes.len()];
    stored.tokens = many;
    assert!(!index.apply(&Event::Stored(stored)));
    assert!(index.is_empty());
}

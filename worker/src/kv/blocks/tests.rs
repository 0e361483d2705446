//! Tests of the block table alone, with hashes made up to collide.

use super::*;

const SCOPE: &str = "";

fn entry(hash: u128, parent: Option<BlockId>, tokens: &[u32]) -> Entry {
    Entry {
        hash: BlockHash(hash),
        parent,
        depth: u32::from(parent.is_some()),
        tokens: tokens.into(),
        scope: CacheScope::salted(SCOPE),
    }
}

fn taken(blocks: &mut Blocks) -> BlockId {
    let mut removed = Vec::new();
    let id = blocks.take(&mut removed).expect("a block is there");
    assert!(removed.is_empty());
    blocks.set_header(id, BlockHeader::default());
    id
}

fn found(blocks: &Blocks, hash: u128, parent: Option<BlockId>, tokens: &[u32]) -> Option<BlockId> {
    blocks.find(BlockHash(hash), parent, tokens, &CacheScope::salted(SCOPE))
}

#[test]
fn a_collision_never_serves_another_content() {
    let mut blocks = Blocks::new(4);
    let first = taken(&mut blocks);
    let second = taken(&mut blocks);
    assert_eq!(
        blocks.register(first, entry(1, None, &[1, 2])),
        Registered::New
    );
    assert_eq!(
        blocks.register(second, entry(1, None, &[3, 4])),
        Registered::Private
    );
    assert_eq!(found(&blocks, 1, None, &[1, 2]), Some(first));
    assert_eq!(found(&blocks, 1, None, &[3, 4]), None);
}

#[test]
fn equal_tokens_of_another_tenant_or_adapter_are_another_content() {
    let mut blocks = Blocks::new(2);
    let id = taken(&mut blocks);
    blocks.register(id, entry(1, None, &[1, 2]));
    let salted = CacheScope::salted("tenant");
    let adapted = CacheScope {
        extra: Arc::from(*b"adapter"),
        ..CacheScope::salted(SCOPE)
    };
    assert_eq!(blocks.find(BlockHash(1), None, &[1, 2], &salted), None);
    assert_eq!(blocks.find(BlockHash(1), None, &[1, 2], &adapted), None);
}

#[test]
fn a_child_after_a_colliding_parent_is_not_found_after_the_other_one() {
    let mut blocks = Blocks::new(4);
    let parent = taken(&mut blocks);
    let child = taken(&mut blocks);
    let impostor = taken(&mut blocks);
    blocks.register(parent, entry(1, None, &[1, 2]));
    blocks.register(child, entry(2, Some(parent), &[5, 6]));
    assert_eq!(
        blocks.register(impostor, entry(1, None, &[3, 4])),
        Registered::Private
    );
    // The same tokens with the same hash, but what came before is another content.
    assert_eq!(found(&blocks, 2, Some(impostor), &[5, 6]), None);
    assert_eq!(found(&blocks, 2, Some(parent), &[5, 6]), Some(child));
}

#[test]
fn the_leaf_goes_before_its_parent_however_old_the_parent_is() {
    let mut blocks = Blocks::new(3);
    let parent = taken(&mut blocks);
    let child = taken(&mut blocks);
    let other = taken(&mut blocks);
    blocks.register(parent, entry(1, None, &[1]));
    blocks.register(child, entry(2, Some(parent), &[2]));
    blocks.register(other, entry(3, None, &[3]));
    // Oldest first: parent, child, other.
    for id in [parent, child, other] {
        blocks.drop_reference(id, Holder::Request);
    }
    let mut removed = Vec::new();
    let order: Vec<_> = (0..3).map_while(|_| blocks.take(&mut removed)).collect();
    assert_eq!(order, [child, parent, other]);
    assert_eq!(removed, [BlockHash(2), BlockHash(1), BlockHash(3)]);
}

#[test]
fn a_block_used_again_is_evicted_later() {
    let mut blocks = Blocks::new(2);
    let (first, second) = (taken(&mut blocks), taken(&mut blocks));
    blocks.register(first, entry(1, None, &[1]));
    blocks.register(second, entry(2, None, &[2]));
    blocks.drop_reference(first, Holder::Request);
    blocks.drop_reference(second, Holder::Request);
    blocks.hold(first, Holder::Request);
    blocks.drop_reference(first, Holder::Request);
    assert_eq!(blocks.take(&mut Vec::new()), Some(second));
}

#[test]
fn every_use_of_a_block_has_its_own_generation() {
    let mut blocks = Blocks::new(1);
    let mut last = Generation(0);
    for _ in 0..5 {
        let id = taken(&mut blocks);
        assert!(blocks.generation(id) > last);
        last = blocks.generation(id);
        blocks.drop_reference(id, Holder::Request);
    }
}

#[test]
fn a_block_with_either_reference_is_not_free() {
    let mut blocks = Blocks::new(1);
    let id = taken(&mut blocks);
    blocks.hold(id, Holder::Transfer);
    blocks.drop_reference(id, Holder::Request);
    assert_eq!(blocks.take(&mut Vec::new()), None);
    blocks.drop_reference(id, Holder::Transfer);
    assert_eq!(blocks.take(&mut Vec::new()), Some(id));
}

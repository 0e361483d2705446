//! The shared pool: dropping, watching, and many threads at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use baton_protocol::hash::HashKey;
use baton_protocol::ids::{Generation, Incarnation, LeaseId, RunId, TransferId, WorkerId};

use super::*;
use crate::kv::clock::MonotonicClock;
use crate::kv::events::{CacheChange, CacheEvent};
use crate::kv::{CacheScope, Geometry};

const BLOCK_SIZE: usize = 4;

fn pool(blocks: usize) -> KvPool {
    let config = PoolConfig {
        geometry: Geometry {
            block_size: BLOCK_SIZE,
            bytes_per_token: 16,
        },
        blocks,
        kv_identity: "tiny".to_owned(),
        layout: 3,
        hash_key: HashKey::from_bytes(&[1; 32]),
        event_capacity: 1024,
    };
    KvPool::new(config, u64::MAX, Arc::new(MonotonicClock::start())).expect("a small pool")
}

fn reserve(pool: &KvPool, tokens: &[u32]) -> Result<Reservation, PoolFull> {
    pool.reserve(&Reserve {
        tokens,
        scope: &CacheScope::default(),
        room: 0,
        leave_last: true,
    })
}

#[test]
fn a_dropped_reservation_is_released() {
    let pool = pool(4);
    let reservation = reserve(&pool, &[1; 16]).expect("room");
    assert_eq!(
        reserve(&pool, &[2]).expect_err("full"),
        PoolFull {
            needed: 1,
            available: 0
        }
    );
    drop(reservation);
    assert_eq!(pool.counts().free, 4);
}

#[test]
fn a_reservation_grows_until_the_pool_is_full() {
    let pool = pool(3);
    let mut reservation = reserve(&pool, &[1; 4]).expect("room");
    pool.grow(&mut reservation, 4).expect("it has that");
    assert_eq!(reservation.blocks().len(), 1);
    pool.grow(&mut reservation, 9).expect("room");
    assert_eq!(
        (reservation.blocks().len(), reservation.capacity_tokens()),
        (3, 12)
    );
    assert!(pool.grow(&mut reservation, 13).is_err());
    assert_eq!(reservation.blocks().len(), 3);
}

#[test]
fn blocks_that_may_stay_partly_filled_are_zero_when_they_are_taken() {
    let pool = pool(4);
    let everything = reserve(&pool, &[1; 16]).expect("room");
    for block in everything.blocks() {
        pool.store().write(*block).fill(0xaa);
    }
    drop(everything);
    let zero = |block: BlockId| pool.store().read(block).iter().all(|byte| *byte == 0);
    let mut reservation = reserve(&pool, &[2; 6]).expect("room");
    assert!(zero(reservation.blocks()[1]));
    pool.grow(&mut reservation, 14).expect("room");
    assert!(zero(reservation.blocks()[2]) && zero(reservation.blocks()[3]));
}

#[tokio::test]
async fn a_watcher_hears_of_stored_and_removed_blocks() {
    let pool = pool(2);
    let mut watch = pool.watch_events();
    let mut reservation = reserve(&pool, &[1; 4]).expect("room");
    pool.complete_block(&mut reservation, 0, &[1; 4])
        .expect("in order");
    watch.changed().await.expect("the pool lives");
    assert_eq!(*watch.borrow_and_update(), 1);
    drop(reservation);
    assert!(
        !watch.has_changed().expect("the pool lives"),
        "still in the cache"
    );
    let _all = reserve(&pool, &[2; 8]).expect("room after eviction");
    watch.changed().await.expect("the pool lives");
    let EventsSince::Events(events) = pool.events_since(1) else {
        panic!("kept");
    };
    let [
        CacheEvent {
            sequence: 2,
            change: CacheChange::Removed(hashes),
        },
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert_eq!(hashes.len(), 1);
    assert_eq!(pool.snapshot(), (2, vec![]));
}

/// What a block of these tokens must hold.
fn content(prefix: &[u32]) -> u8 {
    prefix.iter().fold(7_u8, |sum, token| {
        sum.wrapping_mul(31).wrapping_add(*token as u8)
    })
}

#[test]
fn a_look_at_a_lease_finds_all_that_is_there_and_nothing_for_anybody_else() {
    let pool = pool(8);
    let tokens: Vec<u32> = (0..16).collect();
    let mut reservation = reserve(&pool, &tokens).expect("room");
    let id = LeaseId([7; 16]);
    let open = LeaseOpen {
        id,
        run: RunId::from("run"),
        duration: 60_000,
        skip_blocks: 1,
    };
    let opened = pool.open_lease(&mut reservation, &open).expect("new");
    let generation = opened.generation;
    let reader = Reader {
        transfer: TransferId::from("t"),
        worker: WorkerId::from("d"),
        incarnation: Incarnation(1),
    };
    pool.claim(id, generation, &reader).expect("granted");
    let look = |transfer: &str, wanted: Range<u32>| {
        let mut found = Vec::new();
        let then = pool.next_blocks(
            id,
            generation,
            &TransferId::from(transfer),
            wanted,
            &mut found,
        );
        let found: Vec<BlockId> = found.iter().map(|entry| entry.block).collect();
        (found, then.expect("no contradiction"))
    };
    for (index, block) in tokens.chunks(BLOCK_SIZE).enumerate().take(3) {
        pool.complete_block(&mut reservation, index, block)
            .expect("in order");
    }
    let blocks = reservation.blocks().to_vec();
    assert_eq!(look("t", 1..100), (blocks[1..3].to_vec(), Next::Wait));
    let (found, then) = look("t", 1..2);
    assert_eq!(found, blocks[1..2]);
    assert!(matches!(then, Next::Block { entry, sealed: None } if entry.block == blocks[2]));
    pool.complete_block(&mut reservation, 3, &tokens[12..])
        .expect("in order");
    pool.seal(&reservation, tokens.len()).expect("complete");
    let end = Next::Sealed { end: 4 };
    assert_eq!(look("t", 2..100), (blocks[2..].to_vec(), end));
    assert_eq!(look("t", 4..100), (Vec::new(), end));
    assert_eq!(look("u", 1..100), (Vec::new(), Next::Gone(Gone::Claimed)));
    pool.cancel_run(&RunId::from("run"));
    assert!(matches!(look("t", 1..100), (found, Next::Gone(_)) if found.is_empty()));
}

/// Threads with prompts that share prefixes, each checking that every block it holds has the bytes of its own prefix, while leases
/// are opened, read, and left to expire.
#[test]
fn threads_never_see_each_others_bytes() {
    let pool = pool(40);
    let lease_number = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4_u32 {
            let (pool, lease_number) = (&pool, &lease_number);
            scope.spawn(move || {
                for round in 0..1000_u32 {
                    let seed = (thread * 7919 + round).wrapping_mul(2_654_435_761);
                    let length = 1 + (seed >> 8) as usize % 30;
                    let branch = (seed >> 16) as usize % 20;
                    let tokens: Vec<u32> = (0..length)
                        .map(|at| if at < branch { 1 } else { 2 + seed % 3 })
                        .collect();
                    let reservation = loop {
                        pool.reap();
                        match reserve(pool, &tokens) {
                            Ok(reservation) => break reservation,
                            // The others end, and unreported leases expire.
                            Err(_) => std::thread::yield_now(),
                        }
                    };
                    one_request(pool, lease_number, reservation, &tokens, seed);
                }
            });
        }
    });
    assert!(
        lease_number.load(Ordering::SeqCst) > 1000,
        "leases were part of it"
    );
    pool.cancel_run(&RunId::from("run"));
    let counts = pool.counts();
    assert_eq!(counts.leaked, 0, "{counts:?}");
    assert_eq!(counts.free + counts.cached, counts.total, "{counts:?}");
    assert!(
        lease_number.load(Ordering::SeqCst) > 100,
        "leases were part of it"
    );
}

fn one_request(
    pool: &KvPool,
    lease_number: &AtomicU32,
    mut reservation: Reservation,
    tokens: &[u32],
    seed: u32,
) {
    let leased = (seed & 1 == 0).then(|| {
        let number = lease_number.fetch_add(1, Ordering::SeqCst);
        let mut id = [0; 16];
        id[..4].copy_from_slice(&number.to_le_bytes());
        let open = LeaseOpen {
            id: LeaseId(id),
            run: RunId::from("run"),
            duration: 2,
            skip_blocks: 0,
        };
        let opened = pool.open_lease(&mut reservation, &open).expect("a new id");
        (open.id, opened.generation)
    });
    let full = tokens.len() / BLOCK_SIZE;
    for index in reservation.completed_blocks()..full {
        let byte = content(&tokens[..(index + 1) * BLOCK_SIZE]);
        pool.store().write(reservation.blocks()[index]).fill(byte);
        pool.complete_block(
            &mut reservation,
            index,
            &tokens[index * BLOCK_SIZE..][..BLOCK_SIZE],
        )
        .expect("in order");
    }
    for index in 0..full {
        let byte = content(&tokens[..(index + 1) * BLOCK_SIZE]);
        let bytes = pool.store().read(reservation.blocks()[index]);
        assert!(
            bytes.iter().all(|found| *found == byte),
            "block {index} of {tokens:?}"
        );
    }
    let Some((lease, generation)) = leased else {
        return;
    };
    // A lease may have expired under a slow thread; then it serves nothing, which is what it must do.
    if pool.seal(&reservation, tokens.len()).is_err() {
        return;
    }
    drop(reservation);
    read_lease(pool, lease, generation, tokens, seed);
}

fn read_lease(pool: &KvPool, lease: LeaseId, generation: Generation, tokens: &[u32], seed: u32) {
    let transfer = TransferId(format!("{lease:?}"));
    let reader = Reader {
        transfer: transfer.clone(),
        worker: WorkerId::from("d"),
        incarnation: Incarnation(1),
    };
    if pool.claim(lease, generation, &reader).is_err() {
        return;
    }
    for index in 0..(tokens.len() / BLOCK_SIZE) as u32 {
        let Next::Block { entry, .. } = pool.next_block(lease, generation, &transfer, index) else {
            return;
        };
        let before = pool.header(entry.block);
        let sum = checksum(&pool.store().read(entry.block));
        let after = pool.header(entry.block);
        if before == entry.header && after == entry.header {
            assert_eq!(sum, before.checksum, "block {index} of {tokens:?}");
        } else {
            let now = pool.next_block(lease, generation, &transfer, index);
            assert!(matches!(now, Next::Gone(_)), "reused only after the lease");
        }
    }
    // Some readers report, the others let it expire.
    if seed & 2 == 0 {
        pool.complete_read(lease, generation, &transfer, true);
    }
}

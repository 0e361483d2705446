//! Tests of the pool's state by hand: prefix hits, duplicates, leases over blocks.

mod quarantine;

use baton_protocol::hash::HashKey;
use baton_protocol::ids::{Generation, Incarnation, LeaseId, RunId, TransferId, WorkerId};

use super::*;
use crate::kv::events::EventsSince;
use crate::kv::lease::{Completion, Gone, LeaseOpen, Next, Reader};

pub(super) fn config(blocks: usize) -> PoolConfig {
    PoolConfig {
        geometry: Geometry {
            block_size: 4,
            bytes_per_token: 8,
        },
        blocks,
        kv_identity: "tiny".to_owned(),
        layout: 77,
        hash_key: HashKey::from_bytes(&[9; 32]),
        event_capacity: 1 << 20,
    }
}

struct Case {
    state: PoolState,
    scope: CacheScope,
}

impl Case {
    fn new(blocks: usize) -> Self {
        Self {
            state: PoolState::new(config(blocks)),
            scope: CacheScope::salted(""),
        }
    }

    fn reserve(
        &mut self,
        tokens: &[u32],
        leave_last: bool,
    ) -> Result<reserving::Reserved, PoolFull> {
        self.reserve_beside(tokens, leave_last, 0)
    }

    fn reserve_beside(
        &mut self,
        tokens: &[u32],
        leave_last: bool,
        spare: usize,
    ) -> Result<reserving::Reserved, PoolFull> {
        let reserve = Reserve {
            tokens,
            scope: &self.scope,
            room: 0,
            leave_last,
        };
        self.state.reserve(&reserve, spare)
    }

    /// Reserves, and completes every full block.
    fn filled(&mut self, tokens: &[u32]) -> ReservationId {
        let reserved = self.reserve(tokens, false).expect("there is room");
        self.fill(reserved.id, tokens);
        reserved.id
    }

    fn fill(&mut self, id: ReservationId, tokens: &[u32]) {
        let from = self.state.reservations[&id].completed;
        for (index, block) in tokens.chunks_exact(4).enumerate().skip(from) {
            let proof = Proof::Checked(1);
            self.state
                .complete(id, index, block, proof)
                .expect("in order");
        }
    }

    fn open(&mut self, id: ReservationId, lease: u8, skip_blocks: u32) -> Generation {
        let open = LeaseOpen {
            id: LeaseId([lease; 16]),
            run: RunId::from("run"),
            duration: 1000,
            skip_blocks,
        };
        self.state
            .open_lease(id, &open, 0)
            .expect("a new lease")
            .generation
    }
}

fn tokens(count: u32) -> Vec<u32> {
    (0..count).collect()
}

fn reader(transfer: &str) -> Reader {
    Reader {
        transfer: TransferId::from(transfer),
        worker: WorkerId::from("d0"),
        incarnation: Incarnation(1),
    }
}

#[test]
fn a_second_request_hits_what_the_first_computed() {
    let mut case = Case::new(16);
    let first = case.filled(&tokens(10));
    case.state.release(first, 0);
    let mut longer = tokens(10);
    longer.extend([90, 91, 92]);
    let second = case.reserve(&longer, true).expect("room");
    assert_eq!(second.cached_blocks, 2);
    assert_eq!(second.blocks.len(), 4);
}

#[test]
fn the_last_token_is_left_to_compute_only_when_asked() {
    let mut case = Case::new(16);
    let first = case.filled(&tokens(8));
    case.state.release(first, 0);
    assert_eq!(
        case.reserve(&tokens(8), true).expect("room").cached_blocks,
        1
    );
    assert_eq!(
        case.reserve(&tokens(8), false).expect("room").cached_blocks,
        2
    );
}

#[test]
fn the_same_content_computed_twice_is_kept_once() {
    let mut case = Case::new(16);
    let first = case.reserve(&tokens(8), true).expect("room");
    let second = case.reserve(&tokens(8), true).expect("room");
    case.fill(first.id, &tokens(8));
    case.fill(second.id, &tokens(8));
    let table = |id| case.state.reservations[&id].blocks.clone();
    assert_eq!(table(first.id), table(second.id));
    assert_eq!(case.state.counts().active, 2);
    assert_eq!(case.state.counts().free, 14);
}

#[test]
fn a_full_pool_says_what_is_missing_and_takes_nothing() {
    let mut case = Case::new(4);
    let first = case.filled(&tokens(12));
    let other: Vec<u32> = (100..109).collect();
    let told = case.state.events.see();
    let full = case.reserve(&other, true).expect_err("one block is left");
    assert_eq!(
        full,
        PoolFull {
            needed: 3,
            available: 1
        }
    );
    // A hit prefix is not counted as needed, and is not evicted to make room for its own continuation.
    case.state.release(first, 0);
    let mut longer = tokens(12);
    longer.extend(100..105);
    let full = case
        .reserve(&longer, true)
        .expect_err("three hit, one left, two needed");
    assert_eq!(
        full,
        PoolFull {
            needed: 2,
            available: 1
        }
    );
    assert_eq!(case.state.counts().cached, 3);
    let EventsSince::Events(events) = case.state.events.since(told) else {
        panic!("all events are kept");
    };
    assert!(
        events.is_empty(),
        "a refused request evicts nothing: {events:?}"
    );
}

#[test]
fn completing_out_of_order_or_partly_is_refused() {
    let mut case = Case::new(4);
    let id = case.reserve(&tokens(8), true).expect("room").id;
    assert!(matches!(
        case.state.complete(id, 1, &[0; 4], Proof::Checked(0)),
        Err(CompleteError::OutOfOrder {
            index: 1,
            expected: 0
        })
    ));
    assert!(matches!(
        case.state.complete(id, 0, &[0; 3], Proof::Checked(0)),
        Err(CompleteError::NotFull { .. })
    ));
    assert!(matches!(
        case.state.complete(id, 2, &[0; 4], Proof::Checked(0)),
        Err(CompleteError::OutOfRange { .. })
    ));
}

#[test]
fn a_lease_publishes_what_is_not_skipped_and_ends_with_the_partial_block() {
    let mut case = Case::new(8);
    let id = case.reserve(&tokens(10), true).expect("room").id;
    let generation = case.open(id, 1, 1);
    let (lease, claimant) = (LeaseId([1; 16]), reader("t"));
    case.state
        .leases
        .claim(lease, generation, &claimant, 0)
        .expect("granted");
    let transfer = &claimant.transfer;
    let next = |case: &mut Case, index| {
        case.state
            .leases
            .next(lease, generation, transfer, index, 0)
    };

    assert_eq!(next(&mut case, 1), Next::Wait);
    case.fill(id, &tokens(10));
    assert_eq!(next(&mut case, 0), Next::Gone(Gone::OutOfRange));
    let Next::Block {
        entry,
        sealed: None,
    } = next(&mut case, 1)
    else {
        panic!("the second block is published");
    };
    assert_eq!((entry.header.fill, entry.header.layout), (4, 77));
    assert_eq!(next(&mut case, 2), Next::Wait);

    assert_eq!(case.state.seal(id, 10, 55, 0), Ok(2));
    case.state.release(id, 0);
    let Next::Block {
        entry,
        sealed: Some(3),
    } = next(&mut case, 2)
    else {
        panic!("the last block is published");
    };
    assert_eq!(
        (entry.header.fill, entry.header.checksum, entry.header.hash),
        (2, 55, BlockHash(0))
    );
    assert_eq!(next(&mut case, 3), Next::Sealed { end: 3 });
    assert_eq!(case.state.counts().leased, 3);

    let done = case
        .state
        .complete_read(lease, generation, transfer, true, 0);
    assert_eq!(done, Completion::Accepted);
    let counts = case.state.counts();
    assert_eq!(
        (counts.leased, counts.cached, counts.free, counts.leaked),
        (0, 2, 6, 0)
    );
}

#[test]
fn a_lease_whose_prefill_ends_early_is_cancelled_at_once() {
    let mut case = Case::new(8);
    let id = case.reserve(&tokens(8), true).expect("room").id;
    let generation = case.open(id, 1, 0);
    let proof = Proof::Checked(0);
    case.state
        .complete(id, 0, &tokens(4), proof)
        .expect("in order");
    let mut changes = {
        case.state
            .leases
            .claim(LeaseId([1; 16]), generation, &reader("t"), 0)
            .expect("granted");
        case.state
            .leases
            .subscribe(LeaseId([1; 16]), generation, &TransferId::from("t"), 0)
            .expect("its reader")
    };
    changes.mark_unchanged();
    case.state.release(id, 0);
    assert!(changes.has_changed().is_err(), "whoever waits is woken");
    let claim = case
        .state
        .leases
        .claim(LeaseId([1; 16]), generation, &reader("t"), 0);
    assert_eq!(claim, Err(Gone::Cancelled));
    assert_eq!(case.state.counts().leased, 0);
}

#[test]
fn sealing_before_all_blocks_are_complete_is_refused() {
    let mut case = Case::new(8);
    let id = case.reserve(&tokens(8), true).expect("room").id;
    case.open(id, 1, 0);
    assert!(case.state.seal(id, 8, 0, 0).is_err());
    case.fill(id, &tokens(8));
    assert_eq!(case.state.seal(id, 8, 0, 0), Ok(2));
    assert!(case.state.seal(id, 8, 0, 0).is_err(), "twice");
}

#[test]
fn blocks_that_were_not_checked_are_never_offered() {
    let mut case = Case::new(16);
    let id = case.reserve(&tokens(12), false).expect("room").id;
    let prove = |case: &mut Case, id, index: usize, proof| {
        let block = &tokens(12)[index * 4..][..4];
        case.state
            .complete(id, index, block, proof)
            .expect("in order")
    };
    prove(&mut case, id, 0, Proof::Checked(1));
    prove(&mut case, id, 1, Proof::Promised(2));
    // Checked, but its chain is not: nobody could be given the one without the other.
    prove(&mut case, id, 2, Proof::Checked(3));
    let hits = |case: &mut Case| case.reserve(&tokens(12), false).expect("room");
    assert_eq!(hits(&mut case).cached_blocks, 1);
    case.state.release(id, 0);
    assert_eq!(hits(&mut case).cached_blocks, 1);
    assert_eq!(case.state.blocks.hashes().len(), 1);
    assert_eq!(case.state.counts().leaked, 0);
}

#[test]
fn what_was_not_checked_gives_way_to_what_was() {
    let mut case = Case::new(16);
    let late = case.reserve(&tokens(8), false).expect("room").id;
    let proven = case.filled(&tokens(4));
    let known = case.state.reservations[&proven].blocks[0];
    let complete = |case: &mut Case, index: usize, proof| {
        let block = &tokens(8)[index * 4..][..4];
        case.state
            .complete(late, index, block, proof)
            .expect("in order")
    };
    assert_eq!(complete(&mut case, 0, Proof::Promised(1)), known);
    complete(&mut case, 1, Proof::Checked(1));
    assert_eq!(
        case.reserve(&tokens(8), false).expect("room").cached_blocks,
        2
    );
}

#[test]
fn what_is_hit_is_not_counted_as_spare_as_well() {
    let mut case = Case::new(6);
    let first = case.filled(&tokens(16));
    case.state.release(first, 0);
    let mut longer = tokens(16);
    longer.extend([90, 91, 92, 93]);
    // Four are hit and one is taken: one of six is left, whatever is cached.
    let full = case
        .reserve_beside(&longer, true, 2)
        .expect_err("one is left");
    assert_eq!(
        full,
        PoolFull {
            needed: 3,
            available: 2
        }
    );
    assert_eq!(case.state.counts().cached, 4, "a refusal holds nothing");
    let reserved = case.reserve_beside(&longer, true, 1).expect("one is left");
    assert_eq!(reserved.cached_blocks, 4);
    assert_eq!(case.state.blocks.available(), 1);
}

#[test]
fn a_block_that_was_not_zeroed_is_never_sealed_partly_filled() {
    let mut case = Case::new(8);
    let id = case.reserve(&tokens(12), true).expect("room").id;
    case.open(id, 1, 0);
    let proof = Proof::Checked(1);
    case.state
        .complete(id, 0, &tokens(4), proof)
        .expect("in order");
    assert!(
        case.state.seal(id, 6, 0, 0).is_err(),
        "the second block was reserved to be filled whole"
    );
}

#[test]
fn the_reaper_finds_an_expired_lease_behind_a_renewed_one() {
    let mut case = Case::new(8);
    let ids: Vec<_> = (0..3_u32)
        .map(|number| {
            let tokens = vec![number; 4];
            let id = case.filled(&tokens);
            let generation = case.open(id, number as u8, 0);
            case.state.seal(id, 4, 0, 0).expect("complete");
            case.state.release(id, 0);
            (LeaseId([number as u8; 16]), generation)
        })
        .collect();
    let (lease, generation) = ids[0];
    case.state
        .leases
        .claim(lease, generation, &reader("t"), 900)
        .expect("in time");
    let reaped = case.state.reap(1500);
    assert_eq!((reaped.leases, reaped.blocks), (2, 2));
    assert_eq!(case.state.leases.counters.orphan_blocks_reaped, 2);
    assert_eq!(case.state.counts().leased, 1);
}

#[test]
fn another_runs_lease_is_not_released() {
    let mut case = Case::new(8);
    let id = case.filled(&tokens(4));
    case.open(id, 1, 0);
    assert!(
        !case
            .state
            .release_lease(LeaseId([1; 16]), &RunId::from("other"), 0)
    );
    assert!(
        case.state
            .release_lease(LeaseId([1; 16]), &RunId::from("run"), 0)
    );
}

#[test]
fn a_cleared_cache_hits_nothing_and_loses_no_block() {
    let mut case = Case::new(8);
    let running = case.filled(&tokens(8));
    let ended = case.filled(&[50; 4]);
    case.state.release(ended, 0);
    case.state.clear_cache();
    assert_eq!(
        case.reserve(&tokens(8), false).expect("room").cached_blocks,
        0
    );
    case.state.release(running, 0);
    assert_eq!(case.state.counts().leaked, 0);
    assert_eq!(case.state.counts().cached, 0);
}

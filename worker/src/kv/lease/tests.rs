//! Tests of the lease protocol alone: who is granted what, and what a late message meets.

use baton_protocol::ids::{Generation, Incarnation, LeaseId, RunId, TransferId, WorkerId};

use super::table::{LeaseError, LeaseTable};
use super::{Completion, Gone, LeaseOpen, Reader};

const LEASE: LeaseId = LeaseId([3; 16]);

fn open(table: &mut LeaseTable, now: u64) -> Result<Generation, LeaseError> {
    let open = LeaseOpen {
        id: LEASE,
        run: RunId::from("r"),
        duration: 100,
        skip_blocks: 0,
    };
    table.open(&open, now).map(|opened| opened.generation)
}

fn reader(transfer: &str, incarnation: u64) -> Reader {
    Reader {
        transfer: TransferId::from(transfer),
        worker: WorkerId::from("d"),
        incarnation: Incarnation(incarnation),
    }
}

#[test]
fn one_claimant_and_its_repeated_claim() {
    let mut table = LeaseTable::default();
    let generation = open(&mut table, 0).expect("new");
    let granted = table
        .claim(LEASE, generation, &reader("a", 1), 10)
        .expect("first");
    assert_eq!(granted.for_milliseconds, 100);
    assert!(table.claim(LEASE, generation, &reader("a", 1), 20).is_ok());
    assert_eq!(
        table.claim(LEASE, generation, &reader("b", 1), 20),
        Err(Gone::Claimed)
    );
    let wrong = Generation(generation.0 + 1);
    assert_eq!(
        table.claim(LEASE, wrong, &reader("a", 1), 20),
        Err(Gone::WrongGeneration)
    );
}

#[test]
fn nothing_is_granted_at_or_after_expiry_even_before_the_reaper_came() {
    let mut table = LeaseTable::default();
    let generation = open(&mut table, 0).expect("new");
    assert!(table.claim(LEASE, generation, &reader("a", 1), 99).is_ok());
    assert!(
        table
            .renew(LEASE, generation, &TransferId::from("a"), 198)
            .is_ok()
    );
    assert_eq!(
        table.renew(LEASE, generation, &TransferId::from("a"), 298),
        Err(Gone::Expired)
    );
    assert_eq!(
        table.claim(LEASE, generation, &reader("a", 1), 298),
        Err(Gone::Expired)
    );
    let (completion, ended) = table.complete(LEASE, generation, &TransferId::from("a"), true, 298);
    assert_eq!(completion, Completion::Stale);
    assert!(ended.is_none(), "the reaper frees, not the late reader");
    assert_eq!(table.expire(298).len(), 1);
}

#[test]
fn its_owner_extends_a_lease_for_as_long_as_it_fills_it() {
    let mut table = LeaseTable::default();
    let generation = open(&mut table, 0).expect("new");
    assert!(table.extend(LEASE, 90), "nobody has claimed it");
    assert!(table.expire(189).is_empty());
    table
        .claim(LEASE, generation, &reader("a", 1), 150)
        .expect("alive");
    assert!(table.extend(LEASE, 200), "claimed");
    // A reader's time is never cut short, and the seal gives the owner nothing any more.
    table.live_mut(LEASE).expect("alive").seal();
    assert!(!table.extend(LEASE, 290));
    assert!(table.expire(299).is_empty());
    assert_eq!(
        table.renew(LEASE, generation, &TransferId::from("a"), 300),
        Err(Gone::Expired)
    );
}

#[test]
fn its_owner_does_not_bring_back_a_lease_that_has_ended() {
    let mut table = LeaseTable::default();
    let generation = open(&mut table, 0).expect("new");
    assert!(!table.extend(LEASE, 100), "the reaper has not come yet");
    assert_eq!(table.expire(100).len(), 1);
    assert!(!table.extend(LEASE, 100));
    assert_eq!(
        table.claim(LEASE, generation, &reader("a", 1), 101),
        Err(Gone::Expired)
    );
    assert!(!table.extend(LeaseId([9; 16]), 101), "never opened");
}

#[test]
fn late_messages_meet_a_tombstone_for_twice_the_lease() {
    let mut table = LeaseTable::default();
    let generation = open(&mut table, 0).expect("new");
    assert_eq!(table.expire(100).len(), 1);
    assert_eq!(
        table.claim(LEASE, generation, &reader("a", 1), 299),
        Err(Gone::Expired)
    );
    assert_eq!(open(&mut table, 299), Err(LeaseError::Reused));
    assert!(table.expire(299).is_empty());
    assert_eq!(table.tombstones(), 1);
    assert!(table.expire(300).is_empty());
    assert_eq!(table.tombstones(), 0);
    assert_eq!(
        table.claim(LEASE, generation, &reader("a", 1), 301),
        Err(Gone::Unknown)
    );
}

#[test]
fn a_repeated_completion_is_answered_as_the_first() {
    let mut table = LeaseTable::default();
    let generation = open(&mut table, 0).expect("new");
    let transfer = TransferId::from("a");
    table
        .claim(LEASE, generation, &reader("a", 1), 0)
        .expect("granted");
    let (first, ended) = table.complete(LEASE, generation, &transfer, true, 5);
    assert_eq!(first, Completion::Accepted);
    assert!(ended.is_some());
    let (second, ended) = table.complete(LEASE, generation, &transfer, true, 6);
    assert_eq!(second, Completion::Accepted);
    assert!(ended.is_none());
    let (other, _) = table.complete(LEASE, generation, &TransferId::from("b"), true, 6);
    assert_eq!(other, Completion::Stale);
}

#[test]
fn a_completion_without_a_claim_ends_nothing() {
    let mut table = LeaseTable::default();
    let generation = open(&mut table, 0).expect("new");
    let (completion, ended) = table.complete(LEASE, generation, &TransferId::from("a"), true, 1);
    assert_eq!(completion, Completion::Stale);
    assert!(ended.is_none());
    assert!(table.claim(LEASE, generation, &reader("a", 1), 2).is_ok());
}

#[test]
fn a_restarted_reader_frees_the_claim_of_its_dead_process() {
    let mut table = LeaseTable::default();
    let generation = open(&mut table, 0).expect("new");
    table
        .claim(LEASE, generation, &reader("a", 1), 0)
        .expect("granted");
    table
        .claim(LEASE, generation, &reader("b", 2), 1)
        .expect("its former process is dead");
    assert_eq!(table.counters.dead_claims, 1);
    assert_eq!(
        table.claim(LEASE, generation, &reader("a", 1), 2),
        Err(Gone::DeadReader)
    );
    assert!(
        table
            .renew(LEASE, generation, &TransferId::from("b"), 2)
            .is_ok()
    );
    assert_eq!(
        table.renew(LEASE, generation, &TransferId::from("a"), 2),
        Err(Gone::Claimed)
    );
}

#[test]
fn a_claim_that_names_no_living_lease_says_nothing_of_any_process() {
    let mut table = LeaseTable::default();
    let generation = open(&mut table, 0).expect("new");
    table
        .claim(LEASE, generation, &reader("a", 1), 0)
        .expect("granted");
    let stranger = reader("b", 9);
    let unknown = LeaseId([9; 16]);
    assert_eq!(
        table.claim(unknown, generation, &stranger, 1),
        Err(Gone::Unknown)
    );
    assert_eq!(
        table.claim(LEASE, Generation(generation.0 + 1), &stranger, 1),
        Err(Gone::WrongGeneration)
    );
    assert_eq!(table.counters.dead_claims, 0);
    let transfer = TransferId::from("a");
    assert!(table.renew(LEASE, generation, &transfer, 2).is_ok());
    // Late as well: after the end of the lease.
    assert_eq!(table.expire(102).len(), 1);
    assert_eq!(
        table.claim(LEASE, generation, &stranger, 103),
        Err(Gone::Expired)
    );
    let next = LeaseOpen {
        id: LeaseId([4; 16]),
        run: RunId::from("r"),
        duration: 100,
        skip_blocks: 0,
    };
    let opened = table.open(&next, 104).expect("new");
    assert!(
        table
            .claim(next.id, opened.generation, &reader("c", 1), 105)
            .is_ok(),
        "the living process is not shut out"
    );
}

#[test]
fn a_lease_without_duration_is_refused() {
    let open = LeaseOpen {
        id: LEASE,
        run: RunId::from("r"),
        duration: 0,
        skip_blocks: 0,
    };
    assert_eq!(
        LeaseTable::default().open(&open, 0),
        Err(LeaseError::NoDuration)
    );
}

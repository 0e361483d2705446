//! Blocks that a peer may still read: what keeps them, and what frees them.

use super::*;

/// A sealed lease of two blocks that fill the pool, claimed and read one-sidedly; it has expired.
fn read_one_sidedly(case: &mut Case) -> OneSidedRead {
    let id = case.filled(&tokens(8));
    let generation = case.open(id, 1, 0);
    let (lease, transfer) = (LeaseId([1; 16]), TransferId::from("t"));
    let early = case.state.one_sided_begin(lease, generation, &transfer, 0);
    assert_eq!(early.err(), Some(Gone::NotClaimed));
    case.state
        .leases
        .claim(lease, generation, &reader("t"), 0)
        .expect("granted");
    let read = case
        .state
        .one_sided_begin(lease, generation, &transfer, 0)
        .expect("legal");
    case.state.seal(id, 8, 0, 0).expect("complete");
    case.state.release(id, 0);

    let reaped = case.state.reap(5000);
    assert_eq!((reaped.leases, reaped.blocks), (1, 0));
    assert_eq!(case.state.counts().quarantined, 2);
    assert_eq!(case.state.reap(u64::MAX).blocks, 0);
    assert!(
        case.reserve(&[7; 4], true).is_err(),
        "time alone frees nothing that a peer may read"
    );
    read
}

#[test]
fn blocks_under_a_one_sided_read_are_quarantined_until_its_end_is_reported() {
    let mut case = Case::new(2);
    let read = read_one_sidedly(&mut case);
    assert_eq!(case.state.one_sided_end(read), 2);
    assert_eq!(case.state.counts().quarantined, 0);
    assert!(case.reserve(&[7; 4], true).is_ok());
    assert_eq!(case.state.reap(u64::MAX).quarantined, 0);
}

#[test]
fn a_connection_that_is_torn_down_without_a_word_ends_the_quarantine_of_its_reads() {
    let mut case = Case::new(2);
    // A connection's task is dropped with all it holds.
    drop(read_one_sidedly(&mut case));
    let reaped = case.state.reap(5001);
    assert_eq!(
        (reaped.leases, reaped.blocks, reaped.quarantined),
        (0, 2, 2)
    );
    assert_eq!(case.state.leases.counters.quarantined_blocks_reaped, 2);
    assert_eq!(case.state.leases.counters.orphan_blocks_reaped, 2);
    let counts = case.state.counts();
    assert_eq!((counts.quarantined, counts.leaked), (0, 0));
    assert!(case.reserve(&[7; 4], true).is_ok());
}

#[test]
fn the_reaper_looks_at_every_quarantine() {
    let mut case = Case::new(9);
    let mut reads: Vec<_> = (0..9_u32)
        .map(|number| {
            let id = case.filled(&[number; 4]);
            let generation = case.open(id, number as u8, 0);
            let (lease, claimant) = (LeaseId([number as u8; 16]), reader("t"));
            let claimed = case.state.leases.claim(lease, generation, &claimant, 0);
            claimed.expect("granted");
            case.state.seal(id, 4, 0, 0).expect("complete");
            case.state.release(id, 0);
            let begun = case
                .state
                .one_sided_begin(lease, generation, &claimant.transfer, 0);
            Some(begun.expect("legal"))
        })
        .collect();
    case.state.reap(5000);
    assert_eq!(case.state.counts().quarantined, 9);
    // Whatever order they are kept in, one that goes on stands before one that is over.
    for (index, read) in reads.iter_mut().enumerate() {
        if index % 2 == 1 {
            *read = None;
        }
    }
    assert_eq!(case.state.reap(5001).quarantined, 4);
    assert_eq!(case.state.counts().quarantined, 5);
}

#[test]
fn a_read_that_is_over_when_its_lease_ends_is_no_quarantine() {
    let mut case = Case::new(2);
    let id = case.filled(&tokens(8));
    let generation = case.open(id, 1, 0);
    let (lease, claimant) = (LeaseId([1; 16]), reader("t"));
    let claimed = case.state.leases.claim(lease, generation, &claimant, 0);
    claimed.expect("granted");
    let begin = |case: &mut Case| {
        case.state
            .one_sided_begin(lease, generation, &claimant.transfer, 0)
            .expect("legal")
    };
    let first = begin(&mut case);
    drop(begin(&mut case));
    assert_eq!(case.state.one_sided_end(first), 0, "the lease holds on");
    case.state.seal(id, 8, 0, 0).expect("complete");
    case.state.release(id, 0);
    assert_eq!(case.state.reap(5000).blocks, 2);
    assert_eq!(case.state.counts().quarantined, 0);
}

//! Headers beside pieces, on the machine that there is: one thread, and two that race.

use baton_protocol::hash::BlockHash;
use baton_protocol::header::BlockHeader;
use baton_protocol::ids::Generation;

use super::header::Cell;

fn header(generation: u64) -> BlockHeader {
    BlockHeader {
        hash: BlockHash(u128::from(generation) << 70 | 5),
        generation: Generation(generation),
        layout: generation + 1,
        checksum: !generation,
        fill: generation as u32,
    }
}

#[test]
fn a_header_is_there_from_publish_to_retract() {
    let cell = Cell::default();
    assert_eq!(cell.read(), None);
    cell.publish(&header(3));
    let seen = cell.read().expect("published");
    assert_eq!(seen.header, header(3));
    assert!(cell.still(&seen));
    cell.retract();
    assert_eq!(cell.read(), None);
    assert!(!cell.still(&seen));
    cell.publish(&header(3));
    assert!(
        !cell.still(&seen),
        "the same header again is not the same reading"
    );
}

#[test]
fn publishing_the_same_header_disturbs_no_reader() {
    let cell = Cell::default();
    cell.publish(&header(3));
    let seen = cell.read().expect("published");
    cell.publish(&header(3));
    assert!(cell.still(&seen));
    cell.publish(&header(4));
    assert!(!cell.still(&seen));
}

#[test]
fn no_reader_sees_half_of_a_header() {
    let cell = Cell::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for generation in 1..200_000 {
                cell.publish(&header(generation));
            }
        });
        let mut last = 0;
        while last < 199_999 {
            if let Some(seen) = cell.read() {
                assert_eq!(seen.header, header(seen.header.generation.0));
                assert!(seen.header.generation.0 >= last);
                last = seen.header.generation.0;
            }
        }
    });
}

//! Headers beside pieces under every order that the memory model allows two threads, which no machine at hand shows.
//!
//! The header is the one that serves, compiled once more over the checker's atomics. Beside the property stand its negative controls: one
//! ordering weakened, in which the checker must find the fault. One that finds none checks nothing.
//!
//! A piece is one atomic word here. In memory it is bytes that a reader copies while they may change; that such a copy behaves as relaxed
//! loads of its words is taken for granted, as by every sequence lock.

use std::panic::catch_unwind;

use baton_protocol::hash::BlockHash;
use baton_protocol::header::BlockHeader;
use baton_protocol::ids::Generation;
use loom::model::Builder;
use loom::sync::Arc;
use loom::thread;

use self::atomic::{AtomicU64, Broken, Ordering, broken};
use self::header::Cell;

#[allow(
    unreachable_pub,
    clippy::duplicate_mod,
    reason = "the file that serves, over other atomics"
)]
#[path = "header.rs"]
mod header;

/// The checker's, of which one may be weaker than was asked for.
mod atomic {
    use std::cell::Cell;

    pub(super) use loom::sync::atomic::Ordering;
    use loom::sync::atomic::{AtomicU64 as Checked, fence as checked_fence};

    /// The ordering that is left away.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Broken {
        Nothing,
        ReleaseFence,
        AcquireFence,
        ReleaseStore,
        AcquireLoad,
    }

    thread_local! {
        // The checker's threads are coroutines of the one that called it.
        static BROKEN: Cell<Broken> = const { Cell::new(Broken::Nothing) };
    }

    /// Leaves it away from now on.
    pub(super) fn broken(rule: Broken) {
        BROKEN.set(rule);
    }

    fn is_broken(rule: Broken) -> bool {
        BROKEN.get() == rule
    }

    pub(super) fn fence(order: Ordering) {
        let gone = match order {
            Ordering::Release => Broken::ReleaseFence,
            _ => Broken::AcquireFence,
        };
        if !is_broken(gone) {
            checked_fence(order);
        }
    }

    #[derive(Debug, Default)]
    pub(super) struct AtomicU64(Checked);

    impl AtomicU64 {
        pub(super) fn load(&self, order: Ordering) -> u64 {
            let weak = is_broken(Broken::AcquireLoad);
            self.0.load(if weak { Ordering::Relaxed } else { order })
        }

        pub(super) fn store(&self, value: u64, order: Ordering) {
            let weak = is_broken(Broken::ReleaseStore);
            self.0
                .store(value, if weak { Ordering::Relaxed } else { order });
        }
    }
}

/// Threads that are stopped in favour of another, in one order. All of them without a bound are 70 times as many, and find no more.
const STOPPED: usize = 3;

/// Another one in each of its words.
fn header(content: u64) -> BlockHeader {
    BlockHeader {
        hash: BlockHash(u128::from(content) << 64 | u128::from(content)),
        generation: Generation(content),
        layout: content,
        checksum: content,
        fill: content as u32,
    }
}

/// The owner puts other bytes into a piece while a reader copies it.
fn a_piece_changes_while_it_is_read() {
    let cell = Arc::new(Cell::default());
    let piece = Arc::new(AtomicU64::default());
    piece.store(1, Ordering::Relaxed);
    cell.publish(&header(1));
    // The reader is the second thread: the checker looks for other orders from the last access to a word only, and the owner's own
    // looks at the sequence would hide the reader's.
    let reader = thread::spawn({
        let (cell, piece) = (Arc::clone(&cell), Arc::clone(&piece));
        move || {
            let Some(seen) = cell.read() else {
                return;
            };
            let copied = piece.load(Ordering::Relaxed);
            assert_eq!(seen.header, header(seen.header.layout), "half a header");
            if cell.still(&seen) {
                assert_eq!(copied, seen.header.layout, "bytes of another header");
            }
        }
    });
    cell.retract();
    piece.store(2, Ordering::Relaxed);
    cell.publish(&header(2));
    assert!(reader.join().is_ok());
}

fn holds_without(rule: Broken) -> bool {
    let mut checker = Builder::new();
    checker.preemption_bound = Some(STOPPED);
    broken(rule);
    let held = catch_unwind(move || checker.check(a_piece_changes_while_it_is_read)).is_ok();
    broken(Broken::Nothing);
    held
}

#[test]
fn what_is_seen_unchanged_is_whole_and_its_header_its_own() {
    assert!(holds_without(Broken::Nothing));
}

#[test]
fn each_ordering_is_needed() {
    for rule in [
        Broken::ReleaseFence,
        Broken::AcquireFence,
        Broken::ReleaseStore,
        Broken::AcquireLoad,
    ] {
        assert!(!holds_without(rule), "nothing is found without {rule:?}");
    }
}

//! A worker's events, in order and out of it.

use baton_placement::index::ExactIndex;

use super::*;
use crate::fleet::samples;

const SECOND: u64 = 1_000_000;

struct Bench {
    worker: Tracked,
    index: ExactIndex,
    now: Moment,
}

impl Bench {
    fn new() -> Self {
        let mut worker = Tracked::new("d".into(), 0);
        worker.connected(Moment(SECOND));
        Self {
            worker,
            index: ExactIndex::default(),
            now: Moment(SECOND),
        }
    }

    fn send(
        &mut self,
        incarnation: u64,
        sequence: u64,
        event: watch_event::Event,
    ) -> Result<Change, WatchError> {
        let event = wire::WatchEvent {
            incarnation,
            sequence,
            event: Some(event),
        };
        self.worker.apply(event, &mut self.index, self.now)
    }

    /// Card and a snapshot of these blocks; the last sequence is 2.
    fn snapshot(&mut self, incarnation: u64, blocks: &[u128]) {
        let mut card = samples::card("d");
        card.incarnation = Incarnation(incarnation);
        self.send(incarnation, 0, card_event(&card)).unwrap();
        self.send(incarnation, 1, begin()).unwrap();
        self.send(incarnation, 2, stored(blocks)).unwrap();
        self.send(
            incarnation,
            2,
            watch_event::Event::SnapshotEnd(wire::SnapshotEnd {}),
        )
        .unwrap();
    }

    fn depth(&self, chain: &[u128]) -> u32 {
        let chain: Vec<_> = chain.iter().copied().map(BlockHash).collect();
        self.index.matches(&chain).depth(0)
    }
}

fn card_event(card: &Card) -> watch_event::Event {
    watch_event::Event::Card(wire::Card {
        json: card.to_json().unwrap(),
    })
}

fn begin() -> watch_event::Event {
    watch_event::Event::SnapshotBegin(wire::SnapshotBegin {})
}

fn packed(blocks: &[u128]) -> bytes::Bytes {
    let hashes: Vec<_> = blocks.iter().copied().map(BlockHash).collect();
    BlockHash::pack(&hashes).into()
}

fn stored(blocks: &[u128]) -> watch_event::Event {
    watch_event::Event::Stored(wire::BlocksStored {
        hashes: packed(blocks),
    })
}

fn removed(blocks: &[u128]) -> watch_event::Event {
    watch_event::Event::Removed(wire::BlocksRemoved {
        hashes: packed(blocks),
    })
}

fn load(load_sequence: u64) -> watch_event::Event {
    watch_event::Event::Load(wire::Load {
        load_sequence,
        ..wire::Load::default()
    })
}

#[test]
fn a_snapshot_counts_when_it_is_whole_and_deltas_follow_it() {
    let mut bench = Bench::new();
    bench.send(1, 0, card_event(&samples::card("d"))).unwrap();
    bench.send(1, 4, begin()).unwrap();
    bench.send(1, 5, stored(&[1, 2])).unwrap();
    assert_eq!(bench.depth(&[1, 2]), 0, "the snapshot is not whole yet");
    assert_eq!(bench.worker.resume(), None);
    bench
        .send(1, 5, watch_event::Event::SnapshotEnd(wire::SnapshotEnd {}))
        .unwrap();
    assert_eq!(bench.depth(&[1, 2, 3]), 2);
    bench.send(1, 6, stored(&[3])).unwrap();
    assert_eq!(bench.depth(&[1, 2, 3]), 3);
    bench.send(1, 7, removed(&[2])).unwrap();
    assert_eq!(bench.depth(&[1, 2, 3]), 1);
    let expected = Resume {
        incarnation: Incarnation(1),
        sequence: 7,
    };
    assert_eq!(bench.worker.resume(), Some(expected));
}

#[test]
fn a_hole_drops_the_index_and_the_next_stream_starts_anew() {
    let mut bench = Bench::new();
    bench.snapshot(1, &[1, 2]);
    let error = bench.send(1, 4, stored(&[3])).unwrap_err();
    assert!(
        matches!(
            error,
            WatchError::Gap {
                expected: 3,
                found: 4,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(bench.depth(&[1, 2]), 0);
    assert_eq!(bench.worker.resume(), None);
    bench.snapshot(1, &[1, 2]);
    assert_eq!(bench.depth(&[1, 2]), 2);
}

#[test]
fn a_load_report_shows_that_cache_events_were_lost_before_it() {
    let mut bench = Bench::new();
    bench.snapshot(1, &[1]);
    assert!(bench.send(1, 2, load(1)).is_ok());
    assert!(matches!(
        bench.send(1, 3, load(2)),
        Err(WatchError::Gap { .. })
    ));
}

#[test]
fn another_incarnation_inherits_nothing() {
    let mut bench = Bench::new();
    bench.snapshot(1, &[1, 2]);
    bench.send(1, 2, load(9)).unwrap();
    let mut card = samples::card("d");
    card.incarnation = Incarnation(2);
    bench.send(2, 0, card_event(&card)).unwrap();
    assert_eq!(bench.depth(&[1, 2]), 0);
    assert_eq!(bench.worker.load, None);
    assert_eq!(bench.worker.card.as_ref().unwrap().incarnation.0, 2);
}

#[test]
fn silence_and_a_broken_stream_make_it_lost_and_draining_keeps_it_from_new_work() {
    let mut bench = Bench::new();
    bench.snapshot(1, &[]);
    assert_eq!(bench.worker.state(bench.now), WorkerState::Ready);
    let later = bench.now.plus(SILENCE + Duration::from_millis(2));
    assert_eq!(bench.worker.state(later), WorkerState::Lost);
    assert!(bench.worker.silent_at().unwrap() <= later);
    bench
        .send(
            1,
            2,
            watch_event::Event::Draining(wire::Draining { draining: true }),
        )
        .unwrap();
    assert_eq!(bench.worker.state(bench.now), WorkerState::Draining);
    bench.worker.disconnected();
    assert_eq!(bench.worker.state(bench.now), WorkerState::Lost);
}

#[test]
fn a_worker_under_another_name_and_one_without_a_card_are_refused() {
    let mut bench = Bench::new();
    let error = bench.send(1, 0, load(1)).unwrap_err().to_string();
    assert_eq!(error, "worker d sent a load report before its card");
    let error = bench
        .send(1, 0, card_event(&samples::card("other")))
        .unwrap_err()
        .to_string();
    assert!(error.contains("worker d calls itself other"), "{error}");
}

#[test]
fn constants_that_are_no_costs_are_not_taken() {
    let mut bench = Bench::new();
    bench.snapshot(1, &[]);
    let mut sound = baton_placement::calibration::built_in("h100-8b-tp1").unwrap();
    let send = |bench: &mut Bench, coefficients: &WorkerCoefficients| {
        let json = serde_json::to_string(coefficients).unwrap();
        let event = watch_event::Event::Coefficients(wire::Coefficients { json });
        bench.send(1, 2, event).unwrap();
    };
    send(&mut bench, &sound);
    assert_eq!(bench.worker.coefficients, Some(sound));
    let good = sound;
    sound.d1 = -0.5;
    send(&mut bench, &sound);
    assert_eq!(
        bench.worker.coefficients,
        Some(good),
        "the last good ones stay"
    );
}

#[test]
fn the_end_of_a_snapshot_that_never_began_makes_nothing_live() {
    let mut bench = Bench::new();
    bench.send(1, 0, card_event(&samples::card("d"))).unwrap();
    let end = watch_event::Event::SnapshotEnd(wire::SnapshotEnd {});
    assert_eq!(bench.send(1, 0, end).unwrap(), Change::Nothing);
    bench.send(1, 1, stored(&[7])).unwrap();
    assert_eq!(bench.depth(&[7]), 0, "events without a place to count from");
    assert_eq!(bench.worker.resume(), None);
}

#[test]
fn the_largest_sequence_has_no_event_after_it() {
    let mut bench = Bench::new();
    bench.send(1, 0, card_event(&samples::card("d"))).unwrap();
    bench.send(1, u64::MAX, begin()).unwrap();
    let gap = bench.send(1, u64::MAX, stored(&[7])).unwrap_err();
    assert!(matches!(gap, WatchError::Gap { expected: 0, .. }), "{gap}");
    assert_eq!(bench.worker.resume(), None);
}

//! A worker's stream as it is sent: a card, a snapshot, changes.

use baton_protocol::card::Card;
use baton_protocol::hash::BlockHash;
use baton_protocol::ids::Incarnation;
use baton_protocol::samples;
use baton_protocol::wire::{self, watch_event::Event};

use crate::kv_events::{WORKERS, frame};

/// Streams of one worker and of two.
pub fn seeds() -> Vec<(String, Vec<u8>)> {
    let changes = |worker: u8| {
        let mut stream = Stream::new(worker, 1);
        stream.snapshot(&[1, 2, 3]);
        stream.change(stored(&[4, 5]));
        stream.change(removed(&[2]));
        stream.load();
        stream.change(Event::Cleared(wire::CacheCleared {}));
        stream.change(stored(&[1]));
        stream.bytes
    };
    let mut restarted = Stream::new(0, 1);
    restarted.snapshot(&[1]);
    restarted.incarnation = 2;
    restarted.sequence = 0;
    restarted.snapshot(&[2]);
    // The stream breaks here and goes on.
    restarted.worker = 2;
    restarted.change(stored(&[3]));
    restarted.worker = 0;
    // A hole.
    restarted.sequence += 5;
    restarted.change(stored(&[4]));
    restarted.send(Event::Draining(wire::Draining { draining: true }));
    restarted.send(Event::Coefficients(wire::Coefficients {
        json: "{}".to_owned(),
    }));
    vec![
        ("one".to_owned(), changes(0)),
        ("two".to_owned(), [changes(0), changes(1)].concat()),
        ("restarted".to_owned(), restarted.bytes),
    ]
}

struct Stream {
    bytes: Vec<u8>,
    worker: u8,
    incarnation: u64,
    sequence: u64,
}

impl Stream {
    fn new(worker: u8, incarnation: u64) -> Self {
        Self {
            bytes: Vec::new(),
            worker,
            incarnation,
            sequence: 0,
        }
    }

    fn send(&mut self, event: Event) {
        let event = wire::WatchEvent {
            incarnation: self.incarnation,
            sequence: self.sequence,
            event: Some(event),
        };
        frame(&mut self.bytes, self.worker, &event);
    }

    fn change(&mut self, event: Event) {
        self.sequence += 1;
        self.send(event);
    }

    fn snapshot(&mut self, blocks: &[u128]) {
        let json = card(WORKERS[usize::from(self.worker & 1)], self.incarnation)
            .to_json()
            .expect("a card can be written");
        self.send(Event::Card(wire::Card { json }));
        self.change(Event::SnapshotBegin(wire::SnapshotBegin {}));
        self.change(stored(blocks));
        self.send(Event::SnapshotEnd(wire::SnapshotEnd {}));
    }

    fn load(&mut self) {
        self.send(Event::Load(wire::Load {
            load_sequence: 1,
            queued_tokens: 5,
            running_sequences: 2,
            context_tokens: 99,
            queued_sequences: 1,
            blocks: Some(wire::BlockCounts {
                total: 64,
                free: 60,
                ..wire::BlockCounts::default()
            }),
            step_remaining_milliseconds: 1.5,
            leases_open: 1,
            draining: false,
            late_reads: 0,
            failed_transfers: 0,
            expired_leases: 0,
            events_skipped: 0,
            event_gaps: 0,
            preemptions: 0,
            ended_transfers: 0,
        }));
    }
}

fn packed(blocks: &[u128]) -> Vec<u8> {
    let hashes: Vec<BlockHash> = blocks.iter().copied().map(BlockHash).collect();
    BlockHash::pack(&hashes)
}

fn stored(blocks: &[u128]) -> Event {
    Event::Stored(wire::BlocksStored {
        hashes: packed(blocks).into(),
    })
}

fn removed(blocks: &[u128]) -> Event {
    Event::Removed(wire::BlocksRemoved {
        hashes: packed(blocks).into(),
    })
}

fn card(worker: &str, incarnation: u64) -> Card {
    Card {
        incarnation: Incarnation(incarnation),
        ..samples::card(worker)
    }
}

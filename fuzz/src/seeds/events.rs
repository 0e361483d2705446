//! A worker's stream as it is sent: a card, a snapshot, changes.

use baton_protocol::card::{
    Capacity, Card, ChunkPolicy, Dispatch, EngineName, ModelName, Role, TextCheck, TopologyDomain,
    TransportOffer, WIRE_VERSIONS,
};
use baton_protocol::hash::BlockHash;
use baton_protocol::identity::{Attention, Fact, Layout, Rope, RouteFilter, SemanticIdentity};
use baton_protocol::ids::Incarnation;
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
    let identity = SemanticIdentity {
        weights: Fact::observed("w".into()),
        kv_dtype: Fact::observed("F16".into()),
        quantization: Fact::observed("None".into()),
        attention: Fact::observed(Attention {
            layers: 2,
            kv_heads: 2,
            head_size: 16,
            kind: "Full".into(),
        }),
        rope: Fact::observed(Rope {
            base: "10000".into(),
            dimensions: 16,
            scaling: "None".into(),
        }),
        sliding_window: Fact::observed(0),
        processor: Fact::observed("None".into()),
        block_size: Fact::observed(16),
    };
    let layout = Layout {
        order: Fact::observed("layer,kv,token,head,dim".into()),
        bytes_per_token: Fact::observed(512),
        tensor: Fact::observed(1),
        pipeline: Fact::observed(1),
        engine_hash: Fact::observed("None".into()),
    };
    Card {
        worker: worker.into(),
        incarnation: Incarnation(incarnation),
        roles: vec![Role::Prefill, Role::Decode],
        pool: "p".into(),
        pool_role: Role::Decode,
        revision: "local".into(),
        model: ModelName {
            name: "m".into(),
            revision: String::new(),
        },
        kv_identity: identity.digest(),
        identity,
        route_filter: RouteFilter {
            tokenizer: Fact::observed("t".into()),
            chat_template: Fact::observed("c".into()),
            adapters: Vec::new(),
        },
        layout_digest: layout.digest(),
        layout,
        engine: EngineName {
            kind: "Builtin".into(),
            version: "1".into(),
            connector: "Baton".into(),
        },
        accelerator: "cpu".into(),
        capacity: Capacity {
            blocks: 64,
            block_size: 16,
            max_sequences: 8,
            max_batched_tokens: 2048,
            max_context: 1024,
        },
        transports: vec![TransportOffer {
            kind: "Tcp".into(),
            address: "127.0.0.1:1".into(),
        }],
        topology: vec![TopologyDomain {
            level: "host".into(),
            domain: "h".into(),
        }],
        chunk: ChunkPolicy::Bounded {
            minimum_tokens: 128,
            maximum_tokens: 2048,
        },
        dispatch: Dispatch::Grpc,
        text: TextCheck::Verified,
        control_address: "127.0.0.1:2".into(),
        notices: Vec::new(),
        wire_versions: WIRE_VERSIONS,
    }
}

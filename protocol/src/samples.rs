//! A card for tests, whole and valid: that of a worker of a small model. Behind the feature `samples`, for the tests of other crates.

use crate::card::{
    Capacity, Card, ChunkPolicy, Dispatch, EngineName, ModelName, Role, TextCheck, TopologyDomain,
    TransportOffer, WIRE_VERSIONS,
};
use crate::identity::{Attention, Fact, Layout, Rope, RouteFilter, SemanticIdentity};
use crate::ids::Incarnation;

/// Of a decode pool.
pub fn card(worker: &str) -> Card {
    let identity = SemanticIdentity {
        weights: Fact::observed("w".into()),
        kv_dtype: Fact::observed("F16".into()),
        quantization: Fact::observed("None".into()),
        attention: Fact::observed(Attention {
            layers: 30,
            kv_heads: 3,
            head_size: 64,
            kind: "Full".into(),
        }),
        rope: Fact::observed(Rope {
            base: "100000".into(),
            dimensions: 64,
            scaling: "None".into(),
        }),
        sliding_window: Fact::observed(0),
        processor: Fact::observed("None".into()),
        block_size: Fact::observed(16),
    };
    let layout = Layout {
        order: Fact::observed("layer,kv,token,head,dim".into()),
        bytes_per_token: Fact::observed(23_040),
        tensor: Fact::observed(1),
        pipeline: Fact::observed(1),
        engine_hash: Fact::observed("None".into()),
    };
    Card {
        worker: worker.into(),
        incarnation: Incarnation(1),
        roles: vec![Role::Prefill, Role::Decode],
        pool: "d".into(),
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
            version: "0.1.0".into(),
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
            address: "127.0.0.1:7001".into(),
        }],
        topology: vec![TopologyDomain {
            level: "host".into(),
            domain: "h1".into(),
        }],
        chunk: ChunkPolicy::Bounded {
            minimum_tokens: 128,
            maximum_tokens: 2048,
        },
        dispatch: Dispatch::Grpc,
        text: TextCheck::Verified,
        control_address: "127.0.0.1:7000".into(),
        notices: Vec::new(),
        wire_versions: WIRE_VERSIONS,
    }
}

/// Of a prefill pool.
pub fn prefill_card(worker: &str) -> Card {
    Card {
        pool: "p".into(),
        pool_role: Role::Prefill,
        ..card(worker)
    }
}

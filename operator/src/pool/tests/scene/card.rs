//! The card of a worker that is what its pod was made to be.

use baton_crds::labels;
use baton_protocol::card::{
    Capacity, Card, ChunkPolicy, Dispatch, EngineName, ModelName, Role, TextCheck, TransportOffer,
    WIRE_VERSIONS,
};
use baton_protocol::identity::{Attention, Fact, Layout, Rope, RouteFilter, SemanticIdentity};
use baton_protocol::ids::Incarnation;
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

/// The card that a worker of the pod would write: what its configuration says.
pub(in crate::pool::tests) fn card(pod: &Pod) -> Card {
    let annotations = pod.metadata.annotations.as_ref().unwrap();
    let configuration: Value = serde_json::from_str(&annotations[labels::WORKER_CONFIG]).unwrap();
    let text = |pointer: &str| {
        let value = configuration.pointer(pointer).unwrap();
        value.as_str().unwrap_or_default().to_owned()
    };
    let block_size = configuration.pointer("/engine/blockSize").unwrap();
    let block_size = u32::try_from(block_size.as_u64().unwrap()).unwrap();
    let identity = SemanticIdentity {
        weights: Fact::observed("w".into()),
        kv_dtype: Fact::observed("f16".into()),
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
        block_size: Fact::observed(block_size),
    };
    let layout = Layout {
        order: Fact::observed("layer,kv,token,head,dim".into()),
        bytes_per_token: Fact::observed(256),
        tensor: Fact::observed(1),
        pipeline: Fact::observed(1),
        engine_hash: Fact::observed("None".into()),
    };
    Card {
        worker: text("/name").as_str().into(),
        incarnation: Incarnation(1),
        roles: vec![Role::Prefill, Role::Decode],
        pool: text("/pool"),
        pool_role: match text("/role").as_str() {
            "Prefill" => Role::Prefill,
            _ => Role::Decode,
        },
        revision: text("/revision"),
        model: ModelName {
            name: text("/model/name"),
            revision: text("/model/revision"),
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
            kind: text("/engine/type"),
            version: "0.1.0".into(),
            connector: "Baton".into(),
        },
        accelerator: String::new(),
        capacity: Capacity {
            blocks: 64,
            block_size,
            max_sequences: 8,
            max_batched_tokens: 256,
            max_context: 1024,
        },
        transports: vec![TransportOffer {
            kind: "Tcp".into(),
            address: "10.0.0.1:7001".into(),
        }],
        topology: Vec::new(),
        chunk: ChunkPolicy::Fixed { tokens: 256 },
        dispatch: Dispatch::Grpc,
        text: TextCheck::Verified,
        control_address: "10.0.0.1:7000".into(),
        notices: Vec::new(),
        wire_versions: WIRE_VERSIONS,
    }
}

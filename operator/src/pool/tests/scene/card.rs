//! The card of a worker that is what its pod was made to be.

use baton_crds::labels;
use baton_protocol::card::{Capacity, Card, ChunkPolicy, EngineName, ModelName, Role};
use baton_protocol::identity::{Fact, Layout, SemanticIdentity};
use baton_protocol::samples;
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
    // Of a server beside the daemon alone.
    let told = |pointer: &str| configuration.pointer(pointer).and_then(Value::as_str);
    let longest = configuration.pointer("/engine/maxModelLength");
    let longest = longest
        .and_then(Value::as_u64)
        .map(|longest| u32::try_from(longest).unwrap());
    let devices = |pointer: &str| {
        let count = configuration.pointer(pointer).and_then(Value::as_u64);
        Fact::observed(u32::try_from(count.unwrap_or(1)).unwrap())
    };
    let sample = samples::card(&text("/name"));
    let identity = SemanticIdentity {
        block_size: Fact::observed(block_size),
        kv_dtype: told("/engine/dtype").map_or(sample.identity.kv_dtype, |dtype| {
            Fact::observed(dtype.to_owned())
        }),
        ..sample.identity
    };
    let layout = Layout {
        tensor: devices("/parallelism/tensor"),
        pipeline: devices("/parallelism/pipeline"),
        ..sample.layout
    };
    Card {
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
        layout_digest: layout.digest(),
        layout,
        engine: EngineName {
            kind: text("/engine/type"),
            connector: told("/engine/connector").map_or(sample.engine.connector, str::to_owned),
            ..sample.engine
        },
        accelerator: String::new(),
        capacity: Capacity {
            block_size,
            max_context: longest.unwrap_or(sample.capacity.max_context),
            ..sample.capacity
        },
        topology: Vec::new(),
        chunk: ChunkPolicy::Fixed { tokens: 256 },
        ..sample
    }
}

//! The command line of `vllm`.

use serde_json::{Value, json};

use super::{EngineCommand, EngineStart};
use crate::pool::{Connector, Dtype, KvCacheDtype, Quantization};
use crate::resources::PoolRole;

pub(super) fn command(start: &EngineStart<'_>) -> EngineCommand {
    let spec = start.spec;
    let engine = &spec.engine;
    let (model, revision) = start.model();
    let mut command = EngineCommand::default();
    command.arguments.extend(["serve".to_owned(), model]);
    if let Some(revision) = revision {
        command.flag("--revision", &revision);
    }
    command.flag("--host", &start.listen);
    command.flag("--port", &start.ports.http);
    // Else it goes by its path.
    command.flag("--served-model-name", &&spec.model.name);
    command.flag("--block-size", &engine.block_size);
    if let Some(length) = engine.max_model_length {
        command.flag("--max-model-len", &length);
    }
    if let Some(word) = dtype(engine.dtype) {
        command.flag("--dtype", &word);
    }
    if let Some(word) = kv_cache_dtype(engine.kv_cache_dtype) {
        command.flag("--kv-cache-dtype", &word);
    }
    if let Some(word) = quantization(engine.quantization) {
        command.flag("--quantization", &word);
    }
    let devices = &spec.parallelism;
    if devices.tensor > 1 {
        command.flag("--tensor-parallel-size", &devices.tensor);
    }
    if devices.pipeline > 1 {
        command.flag("--pipeline-parallel-size", &devices.pipeline);
    }
    if devices.expert > 1 {
        command.switch("--enable-expert-parallel");
    }
    if let Some(transfer) = transfer(start) {
        command.flag("--kv-transfer-config", &transfer);
    }
    // The router's index of cached prefixes.
    let events = json!({
        "enable_kv_cache_events": true,
        "publisher": "zmq",
        "endpoint": start.events_endpoint(),
        "replay_endpoint": start.replay_endpoint(),
        "topic": start.topic(),
    });
    command.flag("--kv-events-config", &events);
    // The answer says how many tokens were cached, which a record holds against the router's credit.
    command.switch("--enable-prompt-tokens-details");
    command.environment = environment(start);
    command
}

fn transfer(start: &EngineStart<'_>) -> Option<Value> {
    // `kv_both` is deprecated with NIXL. The other role's work stays possible: a consumer computes a prompt that comes without
    // parameters, a producer answers a whole request.
    let role = match start.role {
        PoolRole::Prefill => "kv_producer",
        PoolRole::Decode => "kv_consumer",
    };
    // KV that cannot be read, or is not the right one, is computed anew where it is needed; by default the request would fail.
    let policy = "recompute";
    let lease_seconds = start.spec.kv_pool.lease_seconds;
    match start.spec.engine.connector() {
        Connector::Nixl => Some(json!({
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": { "kv_lease_duration": lease_seconds },
        })),
        Connector::Baton => Some(json!({
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "baton_vllm.connector",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": { "socket": start.connector.socket },
        })),
        Connector::Mooncake | Connector::None => None,
    }
}

fn environment(start: &EngineStart<'_>) -> Vec<(&'static str, String)> {
    // Where it is told no address, vLLM takes the one of the way out of the machine, which may be another network.
    let mut environment = vec![("VLLM_HOST_IP", start.reached.to_owned())];
    match start.spec.engine.connector() {
        Connector::Nixl => environment.extend([
            // Its default, `localhost`, would be told to peers of other machines.
            ("VLLM_NIXL_SIDE_CHANNEL_HOST", start.reached.to_owned()),
            (
                "VLLM_NIXL_SIDE_CHANNEL_PORT",
                start.ports.connector.to_string(),
            ),
        ]),
        Connector::Baton => environment.push(("PYTHONPATH", start.connector.package.to_owned())),
        Connector::Mooncake | Connector::None => {}
    }
    environment
}

fn dtype(dtype: Dtype) -> Option<&'static str> {
    match dtype {
        Dtype::Auto => None,
        Dtype::F16 => Some("float16"),
        Dtype::BF16 => Some("bfloat16"),
        Dtype::F32 => Some("float32"),
    }
}

fn kv_cache_dtype(dtype: KvCacheDtype) -> Option<&'static str> {
    match dtype {
        KvCacheDtype::Auto => None,
        KvCacheDtype::F16 => Some("float16"),
        KvCacheDtype::BF16 => Some("bfloat16"),
        KvCacheDtype::F8E4M3 => Some("fp8_e4m3"),
        KvCacheDtype::F8E5M2 => Some("fp8_e5m2"),
    }
}

fn quantization(quantization: Quantization) -> Option<&'static str> {
    match quantization {
        Quantization::Auto | Quantization::None => None,
        Quantization::Fp8 => Some("fp8"),
        Quantization::Awq => Some("awq"),
        Quantization::Gptq => Some("gptq"),
    }
}

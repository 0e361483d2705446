//! The command line of SGLang's server, for a Python that has it.

use serde_json::json;

use super::{EngineCommand, EngineStart};
use crate::pool::{Connector, Dtype, KvCacheDtype, Quantization};
use crate::resources::PoolRole;

pub(super) fn command(start: &EngineStart<'_>) -> EngineCommand {
    let spec = start.spec;
    let engine = &spec.engine;
    let (model, revision) = start.model();
    let mut command = EngineCommand::default();
    command
        .arguments
        .extend(["-m", "sglang.launch_server"].map(ToOwned::to_owned));
    command.flag("--model-path", &model);
    if let Some(revision) = revision {
        command.flag("--revision", &revision);
    }
    // Its default is loopback.
    command.flag("--host", &start.listen);
    command.flag("--port", &start.ports.http);
    command.flag("--served-model-name", &&spec.model.name);
    command.flag("--page-size", &engine.block_size);
    if let Some(length) = engine.max_model_length {
        command.flag("--context-length", &length);
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
    for (name, count) in [
        ("--tp-size", devices.tensor),
        ("--pp-size", devices.pipeline),
        ("--ep-size", devices.expert),
    ] {
        if count > 1 {
            command.flag(name, &count);
        }
    }
    let backend = match engine.connector() {
        Connector::Mooncake => Some("mooncake"),
        Connector::Nixl => Some("nixl"),
        Connector::Baton | Connector::None => None,
    };
    if let Some(backend) = backend {
        let mode = match start.role {
            PoolRole::Prefill => "prefill",
            PoolRole::Decode => "decode",
        };
        command.flag("--disaggregation-mode", &mode);
        command.flag("--disaggregation-transfer-backend", &backend);
        command.flag("--disaggregation-bootstrap-port", &start.ports.connector);
    }
    let events = json!({
        "publisher": "zmq",
        "endpoint": start.events_endpoint(),
        "replay_endpoint": start.replay_endpoint(),
        "topic": start.topic(),
    });
    command.flag("--kv-events-config", &events);
    // Off by default, and dashboards read them.
    command.switch("--enable-metrics");
    // The answer says how many tokens were cached, which a record holds against the router's credit.
    command.switch("--enable-cache-report");
    // Asked for its health it would else generate a token each time.
    let generates = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION";
    command.environment = vec![(generates, "0".to_owned())];
    command
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
        // F16 is refused where pools are read: SGLang has no word for it.
        KvCacheDtype::Auto | KvCacheDtype::F16 => None,
        KvCacheDtype::BF16 => Some("bf16"),
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

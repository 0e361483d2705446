//! What of a pool depends on the kind of its engine: model source, types of numbers, connector, devices, memory.

use crate::pool::{
    Connector, Dtype, EngineType, KvCacheDtype, Parallelism, PoolSpec, Quantization,
};
use crate::source::ModelLocation;

/// Paths and messages.
pub(super) fn pool(spec: &PoolSpec) -> Vec<(&'static str, String)> {
    let mut problems = devices(spec);
    let engine = &spec.engine;
    let kind = engine.engine_type;
    let word = kind.word();
    if let Ok(location) = spec.model.source.location() {
        let message = match (kind, location) {
            (EngineType::Builtin, ModelLocation::Hub { .. }) => Some(
                "scheme \"hf\" is for engines VLLM and SGLang, which fetch by themselves: give Builtin a .gguf file".to_owned(),
            ),
            (EngineType::Vllm | EngineType::SgLang, ModelLocation::PyPi { .. } | ModelLocation::Tiny { .. }) => {
                Some(format!("schemes pypi and builtin are for engine Builtin: give {word} a model's folder (hostPath, file://) or hf://ORGANISATION/NAME"))
            }
            _ => None,
        };
        problems.extend(message.map(|message| ("spec.model.source.uri", message)));
    }
    if !kind.is_server() {
        let computed = [
            (
                "spec.engine.dtype",
                engine.dtype == Dtype::Auto,
                format!("{:?}", engine.dtype),
            ),
            (
                "spec.engine.quantization",
                engine.quantization == Quantization::Auto,
                format!("{:?}", engine.quantization),
            ),
        ];
        for (path, fits, found) in computed {
            if !fits {
                let message = format!("found {found}, must be Auto with engine {word}");
                problems.push((path, message));
            }
        }
    }
    problems.extend(kv_cache_dtype(spec).map(|message| ("spec.engine.kvCacheDtype", message)));
    problems.extend(connector(spec).map(|message| ("spec.engine.connector", message)));
    let memory = spec.kv_pool.bytes.is_some() || spec.kv_pool.blocks.is_some();
    if kind.is_server() && engine.connector() != Connector::Baton && memory {
        let message = format!(
            "bytes and blocks must be left out with engine {word}, unless its connector is Baton: the engine owns its memory, size it with spec.engine.args"
        );
        problems.push(("spec.kvPool", message));
    }
    problems
}

fn kv_cache_dtype(spec: &PoolSpec) -> Option<String> {
    let found = spec.engine.kv_cache_dtype;
    let allowed = match (spec.engine.engine_type, found) {
        (_, KvCacheDtype::Auto)
        | (EngineType::Vllm, _)
        | (EngineType::Builtin | EngineType::Simulated, KvCacheDtype::F16) => return None,
        (EngineType::Builtin | EngineType::Simulated, _) => "Auto or F16",
        (EngineType::SgLang, KvCacheDtype::F16) => "Auto, BF16, F8E4M3 or F8E5M2",
        (EngineType::SgLang, _) => return None,
    };
    let word = spec.engine.engine_type.word();
    Some(format!(
        "found {found:?}, must be {allowed} with engine {word}"
    ))
}

fn connector(spec: &PoolSpec) -> Option<String> {
    let found = spec.engine.connector();
    let allowed: &[Connector] = match spec.engine.engine_type {
        EngineType::Builtin | EngineType::Simulated => &[Connector::Baton],
        EngineType::Vllm => &[Connector::Nixl, Connector::Baton, Connector::None],
        EngineType::SgLang => &[Connector::Mooncake, Connector::Nixl, Connector::None],
    };
    (!allowed.contains(&found)).then(|| {
        let allowed: Vec<String> = allowed.iter().map(|one| format!("{one:?}")).collect();
        let word = spec.engine.engine_type.word();
        format!(
            "found {found:?}, must be one of {} with engine {word}",
            allowed.join(", ")
        )
    })
}

fn devices(spec: &PoolSpec) -> Vec<(&'static str, String)> {
    let Parallelism {
        tensor,
        pipeline,
        expert,
        data,
        nodes_per_replica,
    } = spec.parallelism;
    let kind = spec.engine.engine_type;
    let word = kind.word();
    let counts = [
        ("spec.parallelism.tensor", tensor),
        ("spec.parallelism.pipeline", pipeline),
        ("spec.parallelism.expert", expert),
        ("spec.parallelism.data", data),
        ("spec.parallelism.nodesPerReplica", nodes_per_replica),
    ];
    if !kind.is_server() {
        return counts
            .into_iter()
            .filter(|(_, count)| *count > 1)
            .map(|(path, count)| {
                (
                    path,
                    format!("found {count}, must be 1: engine {word} uses one device"),
                )
            })
            .collect();
    }
    let mut problems = Vec::new();
    if data > 1 {
        problems.push((
            "spec.parallelism.data",
            format!("found {data}, must be 1: copies behind one port have caches that no router can tell apart, raise spec.replicas instead"),
        ));
    }
    if nodes_per_replica > 1 {
        problems.push((
            "spec.parallelism.nodesPerReplica",
            format!("found {nodes_per_replica}, must be 1: replicas of several nodes are not supported yet by this version"),
        ));
    }
    let batons = spec.engine.connector() == Connector::Baton;
    for (path, count) in counts.into_iter().take(2).filter(|_| batons) {
        if count > 1 {
            problems.push((
                path,
                format!("found {count}, must be 1 with connector Baton, which reads one device's blocks: use Nixl"),
            ));
        }
    }
    if kind == EngineType::Vllm && expert != 1 && expert != tensor {
        problems.push((
            "spec.parallelism.expert",
            format!("found {expert}, must be 1 or {tensor}: vLLM shares experts over all {tensor} devices of tensor, or over none"),
        ));
    }
    if kind == EngineType::SgLang && tensor % expert.max(1) != 0 {
        problems.push((
            "spec.parallelism.expert",
            format!("found {expert}, must divide spec.parallelism.tensor, which is {tensor}"),
        ));
    }
    problems
}

//! The card of a server beside the daemon: each fact as observed, as declared, or unknown. Pure.

use baton_protocol::card::{
    Capacity, Card, ChunkPolicy, Dispatch, EngineName, ModelName, Split, TextCheck, TransportOffer,
    WIRE_VERSIONS,
};
use baton_protocol::identity::{Adapter, Fact, FactSource, Layout, RouteFilter, SemanticIdentity};
use baton_protocol::ids::{Incarnation, WorkerId};
use serde_json::Value;

use super::folder::{Described, ModelFolder};
use super::nixl::Handshake;
use super::sockets::Endpoint;
use super::told::Told;
use crate::config::{Connector, Dtype, EngineKind, WorkerConfig};
use crate::model::facts::artifact_digest;

/// Assumed where the server does not say its own: vLLM's default depends on its device, 128 on a processor, 256 or 1,024 on a GPU.
const SEQUENCES: u32 = 256;

/// What was found out.
#[derive(Debug)]
pub(crate) struct Found<'a> {
    pub(crate) incarnation: Incarnation,
    pub(crate) told: &'a Told,
    pub(crate) handshake: Option<&'a Handshake>,
    pub(crate) folder: Option<&'a ModelFolder>,
    pub(crate) text: TextCheck,
    /// Of the daemon.
    pub(crate) control_address: String,
    /// Of the server, as routers call it.
    pub(crate) url: String,
    /// Of NIXL's handshakes, as others reach them.
    pub(crate) side_channel: Option<String>,
    /// Host and port of SGLang's bootstrap server, as others reach it.
    pub(crate) bootstrap: Option<(String, u16)>,
}

/// The card, with what is wanting or contradicted as notices.
pub(crate) fn write(config: &WorkerConfig, found: Found<'_>) -> Card {
    let engine = &config.engine;
    let told = found.told;
    let nothing = Value::Null;
    let described = Described::of(found.folder.map_or(&nothing, |folder| &folder.config));
    let kv_dtype = kv_dtype(config, told, described);
    let identity = SemanticIdentity {
        weights: weights(config, found.folder),
        quantization: scales(&kv_dtype),
        attention: described.attention(),
        rope: described.rope(),
        sliding_window: described.sliding_window(),
        processor: described.processor(),
        block_size: told
            .metrics
            .block_size
            .map_or(Fact::declared(engine.block_size), Fact::observed),
        kv_dtype,
    };
    let layout = layout(config, &found, described, &identity);
    let route_filter = RouteFilter {
        tokenizer: artifact(found.folder.and_then(|folder| folder.tokenizer.as_ref())),
        chat_template: artifact(found.folder.map(|folder| &folder.chat_template)),
        adapters: adapters(config, told),
    };
    let block_size = told.metrics.block_size.unwrap_or(engine.block_size);
    let batched = told
        .max_batched_tokens
        .unwrap_or_else(|| engine.batched_tokens());
    let mut notices = notices(config, &found, described);
    notices.extend(contradictions(config, &found));
    Card {
        worker: WorkerId::from(config.name.as_str()),
        incarnation: found.incarnation,
        roles: config.roles.clone(),
        pool: config.pool.clone(),
        pool_role: config.role,
        revision: config.revision.clone(),
        model: ModelName {
            name: config.model.name.clone(),
            revision: config.model.revision.clone(),
        },
        kv_identity: identity.digest(),
        identity,
        route_filter,
        layout_digest: layout.digest(),
        layout,
        engine: EngineName {
            kind: engine.kind.word().to_owned(),
            version: told.version.clone(),
            connector: engine.connector.word().to_owned(),
        },
        // Servers of one pool are started alike: they learn their costs together.
        accelerator: format!("of pool {}, revision {}", config.pool, config.revision),
        capacity: Capacity {
            blocks: told.metrics.blocks.unwrap_or(0),
            block_size,
            max_sequences: told.max_sequences.unwrap_or(SEQUENCES),
            max_batched_tokens: batched,
            max_context: told.max_length,
        },
        transports: transports(
            engine.connector,
            found.side_channel,
            found.bootstrap.as_ref(),
        ),
        topology: config.topology.clone(),
        chunk: ChunkPolicy::Fixed { tokens: batched },
        dispatch: Dispatch::OpenAiHttp {
            url: found.url,
            model: String::new(),
            split: split(config, found.bootstrap.as_ref()),
        },
        text: found.text,
        control_address: found.control_address,
        notices,
        wire_versions: WIRE_VERSIONS,
    }
}

fn split(config: &WorkerConfig, bootstrap: Option<&(String, u16)>) -> Split {
    let lease_milliseconds = config.kv_pool.lease_seconds * 1000;
    match config.engine.connector {
        Connector::Nixl => Split::NixlPull { lease_milliseconds },
        Connector::Baton => Split::Baton { lease_milliseconds },
        Connector::Sglang => bootstrap.map_or(Split::None, |(host, port)| Split::Bootstrap {
            host: host.clone(),
            port: *port,
        }),
        Connector::None => Split::None,
    }
}

/// What a pair has in common where the engines move KV themselves.
fn transports(
    connector: Connector,
    side_channel: Option<String>,
    bootstrap: Option<&(String, u16)>,
) -> Vec<TransportOffer> {
    let address = match connector {
        Connector::Nixl => side_channel,
        Connector::Sglang => bootstrap.map(|(host, port)| format!("{host}:{port}")),
        Connector::None | Connector::Baton => None,
    };
    let offer = |address| TransportOffer {
        kind: connector.word().to_owned(),
        address,
    };
    address.map(offer).into_iter().collect()
}

/// The files' digest; without the files what the pool calls them.
fn weights(config: &WorkerConfig, folder: Option<&ModelFolder>) -> Fact<String> {
    match folder {
        Some(folder) => Fact::observed(folder.weights.clone()),
        None if !config.model.revision.is_empty() => {
            let model = &config.model;
            Fact::declared(format!("declared:{}@{}", model.name, model.revision))
        }
        None => Fact::unknown(),
    }
}

/// The cache's own format where the server names one, else the weights'.
fn kv_dtype(config: &WorkerConfig, told: &Told, described: Described<'_>) -> Fact<String> {
    let cache = told.metrics.cache_dtype.as_deref();
    if let Some(cache) = cache.filter(|cache| *cache != "auto") {
        return Fact::observed(Dtype::canonical(cache));
    }
    if cache.is_none()
        && let Some(declared) = config.engine.kv_cache_dtype.stated()
    {
        return Fact::declared(declared);
    }
    if let Some(dtype) = &told.dtype {
        return Fact::observed(Dtype::canonical(dtype));
    }
    if let Some(declared) = config.engine.dtype.as_ref().and_then(Dtype::stated) {
        return Fact::declared(declared);
    }
    match described.dtype().map(Dtype::canonical) {
        // A server narrows these to what its devices like: to what is its own choice.
        None => Fact::unknown(),
        Some(wide) if wide == "F32" => Fact::unknown(),
        // What the files say; a server's arguments may say another.
        Some(dtype) => Fact::declared(dtype),
    }
}

/// Scales of a narrow format are part of the weights' files; other formats have none. Known as well as the format is.
fn scales(kv_dtype: &Fact<String>) -> Fact<String> {
    let Some(dtype) = kv_dtype.known() else {
        return Fact::unknown();
    };
    let scales = if dtype.starts_with("F8") {
        "scales of the weights' files"
    } else {
        "None"
    };
    match kv_dtype.source() {
        FactSource::Observed => Fact::observed(scales.to_owned()),
        _ => Fact::declared(scales.to_owned()),
    }
}

fn layout(
    config: &WorkerConfig,
    found: &Found<'_>,
    described: Described<'_>,
    identity: &SemanticIdentity,
) -> Layout {
    let value_bytes = identity.kv_dtype.known().map(|dtype| match dtype.as_str() {
        "F32" => 4,
        dtype if dtype.starts_with("F8") => 1,
        _ => 2,
    });
    let by_shape = value_bytes.and_then(|bytes| described.bytes_per_token(bytes));
    let by_regions = found.handshake.and_then(|handshake| {
        let rank: u64 = handshake.block_lengths.iter().sum();
        let ranks = u64::from(config.parallelism.tensor * config.parallelism.pipeline);
        (rank * ranks).checked_div(u64::from(handshake.block_size))
    });
    Layout {
        order: match (found.handshake, &found.told.layout) {
            (Some(handshake), _) => Fact::observed(handshake.layout.clone()),
            (None, Some(layout)) => Fact::observed(layout.clone()),
            (None, None) => Fact::unknown(),
        },
        bytes_per_token: by_shape
            .or(by_regions)
            .filter(|bytes| *bytes > 0)
            .map_or_else(Fact::unknown, Fact::observed),
        tensor: size(found.told.tensor, config.parallelism.tensor),
        pipeline: size(found.told.pipeline, config.parallelism.pipeline),
        engine_hash: match (found.handshake, config.engine.connector) {
            (Some(handshake), _) => Fact::observed(handshake.compatibility_hash.clone()),
            (None, Connector::Nixl) => Fact::unknown(),
            (None, _) => Fact::observed("None".to_owned()),
        },
    }
}

fn size(observed: Option<u32>, declared: u32) -> Fact<u32> {
    observed.map_or(Fact::declared(declared), Fact::observed)
}

fn artifact(bytes: Option<&bytes::Bytes>) -> Fact<String> {
    bytes.map_or_else(Fact::unknown, |bytes| {
        Fact::observed(artifact_digest(bytes))
    })
}

/// Those that the server names, with the revisions that were declared.
fn adapters(config: &WorkerConfig, told: &Told) -> Vec<Adapter> {
    let revision = |name: &str| {
        let declared = config.engine.adapters.iter();
        let mut declared = declared.filter(|adapter| adapter.name == name);
        declared
            .next()
            .map_or(String::new(), |adapter| adapter.revision.clone())
    };
    let mut adapters: Vec<_> = told
        .adapters
        .iter()
        .map(|name| Adapter {
            name: name.clone(),
            revision: revision(name),
        })
        .collect();
    adapters.sort();
    adapters
}

/// What the worker lacks, in sentences.
fn notices(config: &WorkerConfig, found: &Found<'_>, described: Described<'_>) -> Vec<String> {
    let mut notices = Vec::new();
    let told = found.told;
    if config.engine.kind == EngineKind::Vllm {
        notices.push(
            "load: queued tokens are estimated, from the requests that wait and the mean length of prompts".to_owned(),
        );
    }
    if told.max_sequences.is_none() {
        notices.push(format!(
            "capacity.maxSequences: the server does not say how many requests it runs at once: {SEQUENCES} is assumed{}",
            match config.engine.kind {
                EngineKind::Vllm => " (vLLM tells with VLLM_SERVER_DEV_MODE=1 only)",
                _ => "",
            }
        ));
    }
    match told.events.as_slice() {
        [] => notices.push(
            "events: the server publishes none, so no prefix is credited: start it with --kv-events-config".to_owned(),
        ),
        [one] => {
            // Where it is reached makes no difference here.
            if let Err(error) = Endpoint::of_engine(config.engine.kind, &one.endpoint, "") {
                notices.push(format!("events: {error}: until then no prefix is credited"));
            }
        }
        ranks => notices.push(format!(
            "events: {} data-parallel ranks publish, and which of them serves a request is not known, so no prefix is credited",
            ranks.len()
        )),
    }
    if let TextCheck::Unverified { reason } = &found.text {
        notices.push(format!(
            "tokenizer: unverified: {reason}: no prefix is credited"
        ));
    }
    if told.metrics.prefix_caching == Some(false) {
        notices.push(
            "the server caches no prefixes: start it with --enable-prefix-caching".to_owned(),
        );
    }
    if found.folder.is_none() {
        notices.push(
            "model.source is absent: the model's files are not seen, so its attention, positions and tokenizer are unknown and it \
             pairs with no other worker: mount the folder that the server loads"
                .to_owned(),
        );
    } else if described.attention().known().is_none() {
        notices.push(
            "config.json does not describe the attention in a way that is known here".to_owned(),
        );
    }
    notices
}

/// Where the server is not what was declared: what is observed counts, and the operator's gate refuses the worker by it.
fn contradictions(config: &WorkerConfig, found: &Found<'_>) -> Vec<String> {
    let engine = &config.engine;
    let told = found.told;
    let mut list = Vec::new();
    let mut compare = |field: &str, declared: Option<String>, observed: Option<String>| {
        if let (Some(declared), Some(observed)) = (declared, observed)
            && declared != observed
        {
            list.push(format!(
                "{field}: declared is {declared}, the server has {observed}: correct the declaration or the server's arguments"
            ));
        }
    };
    let text = |number: Option<u32>| number.map(|number| number.to_string());
    compare(
        "engine.blockSize",
        Some(engine.block_size.to_string()),
        text(told.metrics.block_size),
    );
    compare(
        "engine.maxModelLength",
        text(engine.max_model_length),
        Some(told.max_length.to_string()),
    );
    let canonical = |dtype: &String| Dtype::canonical(dtype);
    compare(
        "engine.dtype",
        engine.dtype.as_ref().and_then(Dtype::stated),
        told.dtype.as_ref().map(canonical),
    );
    let cache = told.metrics.cache_dtype.as_deref();
    compare(
        "engine.kvCacheDtype",
        engine.kv_cache_dtype.stated(),
        cache.filter(|cache| *cache != "auto").map(Dtype::canonical),
    );
    let scheme = engine
        .quantization
        .as_ref()
        .map(|scheme| scheme.0.to_ascii_lowercase());
    let folder = found
        .folder
        .map(|folder| &folder.config["quantization_config"]);
    let loaded = folder.map(|loaded| match loaded["quant_method"].as_str() {
        Some(method) => method.to_ascii_lowercase(),
        None => "none".to_owned(),
    });
    // Weights in full may be quantised as they are loaded.
    compare(
        "engine.quantization",
        scheme.filter(|scheme| scheme != "auto"),
        loaded.filter(|loaded| loaded != "none"),
    );
    list
}

#[cfg(test)]
mod tests;

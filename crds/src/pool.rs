//! `PoolSpec`, the one spec of `PrefillPool` and `DecodePool`: replicas of one model on one engine.
//!
//! Integers are signed, as Kubernetes' schemas want them; the reader lets no negative one through. What only a cluster can
//! honour is in `pool::cluster`.

mod cluster;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use cluster::{
    Accelerator, DEFAULT_ACCELERATOR, Disruption, EnvironmentVariable, Rdma, ResourceRequirements,
    Rollout, Template, TemplateMetadata,
};

use crate::source::{ModelLocation, SourceError};

/// What a pool's workers are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolSpec {
    /// Workers. Default 1.
    #[serde(default = "one")]
    pub replicas: i32,
    pub model: Model,
    pub engine: Engine,
    #[serde(default)]
    pub parallelism: Parallelism,
    #[serde(default, skip_serializing_if = "Accelerator::is_empty")]
    pub accelerator: Accelerator,
    #[serde(default)]
    pub kv_pool: KvPool,
    #[serde(default)]
    pub topology: Topology,
    #[serde(default, skip_serializing_if = "Rollout::is_default")]
    pub rollout: Rollout,
    #[serde(default, skip_serializing_if = "Disruption::is_empty")]
    pub disruption: Disruption,
    #[serde(default, skip_serializing_if = "Template::is_empty")]
    pub template: Template,
}

/// Which model, and where its weights are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Model {
    /// As clients ask for it.
    pub name: String,
    /// Only `engine.type: Simulated` needs none.
    #[serde(default)]
    pub source: ModelSource,
    /// The author's name of this state of the weights. The weights' own digest decides what is compatible; this is for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
}

/// At most one of the fields is there; [`ModelSource::location`] says which.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelSource {
    /// On the machine: a `.gguf` file for `Builtin`, a model's folder for `VLLM` and `SGLang`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// A place with a scheme, see [`ModelLocation`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uri: Option<String>,
    /// An OCI image that holds the weights; only a cluster can mount one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// A claim in the pool's namespace; only a cluster has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<String>,
}

impl ModelSource {
    /// The one source that is given.
    ///
    /// # Errors
    /// None or several are given, or `uri` has a scheme or a shape that is not known.
    pub fn location(&self) -> Result<ModelLocation, SourceError> {
        ModelLocation::of(self)
    }
}

/// What computes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Engine {
    #[serde(rename = "type")]
    pub engine_type: EngineType,
    /// Of the container that computes. Default: the operator's, which `VLLM` and `SGLang` do not have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// After Baton's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// After Baton's own, whose names (`BATON_…`) are not free.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvironmentVariable>,
    /// Of weights and activations.
    #[serde(default)]
    pub dtype: Dtype,
    /// Of the KV cache.
    #[serde(default)]
    pub kv_cache_dtype: KvCacheDtype,
    #[serde(default)]
    pub quantization: Quantization,
    /// Tokens in a block of the KV cache, a power of two. Default 16.
    #[serde(default = "sixteen")]
    pub block_size: i32,
    /// Longest context, prompt and answer together, in tokens. Default: the model's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_model_length: Option<i64>,
    /// What moves KV; [`Engine::connector`] knows the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connector: Option<Connector>,
    /// How long steps take; only for `type: Simulated`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub simulated: Option<SimulatedTiming>,
}

impl Engine {
    /// What moves KV. Default: what the engine can without anything added to it.
    #[must_use]
    pub fn connector(&self) -> Connector {
        self.connector.unwrap_or(match self.engine_type {
            EngineType::Builtin | EngineType::Simulated => Connector::Baton,
            EngineType::Vllm => Connector::Nixl,
            EngineType::SgLang => Connector::Mooncake,
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineType {
    /// Baton's own, for GGUF models of the Llama architecture on a CPU.
    Builtin,
    /// Block bookkeeping and transfers as real, computing time from constants.
    Simulated,
    /// A vLLM server, with Baton's daemon beside it.
    #[serde(rename = "VLLM")]
    Vllm,
    /// An SGLang server, with Baton's daemon beside it.
    #[serde(rename = "SGLang")]
    SgLang,
}

impl EngineType {
    /// As the resources write it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Builtin => "Builtin",
            Self::Simulated => "Simulated",
            Self::Vllm => "VLLM",
            Self::SgLang => "SGLang",
        }
    }

    /// Whether it is a server of its own, to which the router speaks directly; the worker is a daemon beside it then.
    #[must_use]
    pub fn is_server(self) -> bool {
        match self {
            Self::Builtin | Self::Simulated => false,
            Self::Vllm | Self::SgLang => true,
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dtype {
    #[default]
    Auto,
    F16,
    BF16,
    F32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvCacheDtype {
    #[default]
    Auto,
    F16,
    BF16,
    F8E4M3,
    F8E5M2,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Quantization {
    /// As the model's files have it.
    #[default]
    Auto,
    /// The files are not quantized; nothing is done to them.
    None,
    Fp8,
    Awq,
    Gptq,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Connector {
    /// Baton's transports, each block verified.
    Baton,
    /// The engine moves KV over NIXL.
    Nixl,
    /// The engine moves KV over Mooncake.
    Mooncake,
    /// KV stays where it was computed.
    None,
}

/// Constants of the cost formulas, in units in which they are integers. What is left out is the simulated engine's own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SimulatedTiming {
    /// Least time of a prefill step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_floor_microseconds: Option<i64>,
    /// `a` of `a + b·n + k·(n·c + n²/2)`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_base_microseconds: Option<i64>,
    /// `b`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_per_token_nanoseconds: Option<i64>,
    /// `k`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_per_token_pair_picoseconds: Option<i64>,
    /// `d0` of `d0 + d1·B + d2·S`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_base_microseconds: Option<i64>,
    /// `d1`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_per_sequence_nanoseconds: Option<i64>,
    /// `d2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_per_context_token_picoseconds: Option<i64>,
    /// Spread of a step around its formula.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jitter_percent: Option<i64>,
    /// Of the spread.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<i64>,
}

/// Devices of one replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Parallelism {
    pub tensor: i32,
    pub pipeline: i32,
    pub expert: i32,
    pub data: i32,
    /// More than one makes a replica a group of pods.
    pub nodes_per_replica: i32,
}

impl Default for Parallelism {
    fn default() -> Self {
        Self {
            tensor: 1,
            pipeline: 1,
            expert: 1,
            data: 1,
            nodes_per_replica: 1,
        }
    }
}

/// Memory for KV, and how it is handed over. At most one of `bytes` and `blocks` is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KvPool {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks: Option<i64>,
    /// For how long handed-over KV is kept without a sign of its reader. Default 30.
    pub lease_seconds: i64,
    /// What the workers offer, preferred first. Default `[Local, Shm, Tcp]`.
    pub transports: Vec<Transport>,
}

impl Default for KvPool {
    fn default() -> Self {
        Self {
            bytes: None,
            blocks: None,
            lease_seconds: 30,
            transports: vec![Transport::Local, Transport::Shm, Transport::Tcp],
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Transport {
    /// Within one process.
    Local,
    /// Within one host: the reader maps the other worker's memory.
    Shm,
    Tcp,
}

/// Where the workers stand.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Topology {
    /// Levels over whose domains the pods are spread evenly.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub spread: Vec<String>,
    /// Levels at which all pods have to be in one domain.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub require_same: Vec<String>,
    /// Level (`host`, `rack`) → this pool's domain at it. Only where there is no node to read it from.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub domain: BTreeMap<String, String>,
}

/// Levels of topology, nearest first, where no operator's configuration says otherwise.
pub const LEVELS: [&str; 4] = ["nvlink", "host", "rack", "zone"];

impl Topology {
    /// Level and domain, nearest level first.
    pub fn path(&self) -> impl Iterator<Item = (&'static str, &str)> {
        LEVELS
            .into_iter()
            .filter_map(|level| Some((level, self.domain.get(level)?.as_str())))
    }
}

fn one() -> i32 {
    1
}

fn sixteen() -> i32 {
    16
}

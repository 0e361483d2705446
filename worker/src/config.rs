//! Configuration of one worker process: the JSON file that whoever starts it writes (`baton up`, the operator).
//!
//! Unknown fields are errors: a misspelt one must not silently mean its default.

mod engine;

use std::fs;
use std::path::{Path, PathBuf};

use baton_protocol::card::{Role, TopologyDomain};
use serde::{Deserialize, Serialize};

pub use engine::{
    AdapterName, Connector, Dtype, EngineKind, EngineSettings, Quantization, SimulatedTiming,
};

/// One worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WorkerConfig {
    /// Stable over restarts of the process.
    pub name: String,
    pub pool: String,
    /// Of the pool.
    pub role: Role,
    /// What the engine may be used for; both where absent.
    #[serde(default = "both_roles")]
    pub roles: Vec<Role>,
    /// Hash of the pool's pod template.
    #[serde(default = "local_revision")]
    pub revision: String,
    pub model: ModelConfig,
    pub engine: EngineSettings,
    /// Devices of a server that runs beside the daemon.
    #[serde(default)]
    pub parallelism: Parallelism,
    #[serde(default)]
    pub kv_pool: KvPoolConfig,
    /// From the nearest level to the farthest.
    #[serde(default)]
    pub topology: Vec<TopologyDomain>,
    /// Mixed steps stay within 5/6 of this; absent: a fixed chunk of 512 tokens beside decode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot_objective_milliseconds: Option<f64>,
    /// How long SIGTERM waits for what runs.
    #[serde(default = "default_drain_seconds")]
    pub drain_timeout_seconds: u64,
}

/// Which model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModelConfig {
    /// As clients ask for it.
    pub name: String,
    #[serde(default)]
    pub revision: String,
    /// Absent: a server that runs beside the daemon reads files that the daemon cannot see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<ModelSource>,
}

/// Where the weights are from: `{"path": "/m.gguf"}` or `{"builtin": {"name": "tiny", "seed": 7}}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ModelSource {
    /// A GGUF file of the Llama architecture; for a server that runs beside the daemon the folder that it loads.
    Path(PathBuf),
    /// Weights made from a seed.
    Builtin(BuiltinModel),
}

/// A model that needs no file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuiltinModel {
    pub name: BuiltinName,
    #[serde(default)]
    pub seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BuiltinName {
    Tiny,
}

/// How many devices share one copy of a model, by the dimension that is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parallelism {
    pub tensor: u32,
    pub pipeline: u32,
    pub data: u32,
    pub expert: u32,
}

impl Default for Parallelism {
    fn default() -> Self {
        Self {
            tensor: 1,
            pipeline: 1,
            data: 1,
            expert: 1,
        }
    }
}

/// Memory for KV and how it is handed over. At most one of `blocks` and `bytes`; neither: a quarter of the free memory, but no more
/// than all sequences at their longest can use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct KvPoolConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// How long handed-over KV is kept without a sign of its reader.
    pub lease_seconds: u64,
    /// What is offered, preferred first.
    pub transports: Vec<TransportName>,
}

impl Default for KvPoolConfig {
    fn default() -> Self {
        Self {
            blocks: None,
            bytes: None,
            lease_seconds: 30,
            transports: vec![TransportName::Local, TransportName::Shm, TransportName::Tcp],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TransportName {
    /// Within one process.
    Local,
    /// Within one host.
    Shm,
    Tcp,
}

impl TransportName {
    pub fn word(self) -> &'static str {
        match self {
            Self::Local => "Local",
            Self::Shm => "Shm",
            Self::Tcp => "Tcp",
        }
    }
}

/// A configuration that cannot be used: wrong input, exit status 2.
#[derive(Debug, thiserror::Error)]
// Causes are in the sentence, and no `source` beside it: whoever prints the chain would say them twice.
pub enum ConfigError {
    #[error("configuration {file}: {cause}: give the path of a readable file")]
    Unreadable {
        file: PathBuf,
        cause: std::io::Error,
    },
    #[error("configuration {file}: {cause}: correct the file")]
    Malformed {
        file: PathBuf,
        cause: serde_json::Error,
    },
    #[error("configuration of worker {worker}: {field}: {problem}")]
    Field {
        worker: String,
        field: &'static str,
        problem: String,
    },
}

impl WorkerConfig {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`ConfigError`] names the file and the first problem.
    pub fn read(file: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(file).map_err(|cause| ConfigError::Unreadable {
            file: file.to_owned(),
            cause,
        })?;
        let config: Self = serde_json::from_str(&text).map_err(|cause| ConfigError::Malformed {
            file: file.to_owned(),
            cause,
        })?;
        config.check()?;
        Ok(config)
    }

    /// Checks what types cannot.
    ///
    /// # Errors
    /// [`ConfigError::Field`] names the first field that is out of range.
    pub fn check(&self) -> Result<(), ConfigError> {
        let engine = &self.engine;
        let rules: [(bool, &'static str, String); 14] = [
            (
                self.model.source.is_some() || engine.kind != EngineKind::Builtin,
                "model.source",
                "absent: engine.type Builtin loads its model from a file: name it".to_owned(),
            ),
            (
                self.parallelism_is_sound(),
                "parallelism",
                "each of tensor, pipeline, data and expert must be from 1 to 65536".to_owned(),
            ),
            (
                !self.name.is_empty(),
                "name",
                "empty: give the worker a name".to_owned(),
            ),
            (
                !self.roles.is_empty(),
                "roles",
                "empty: give Prefill, Decode or both, or leave it out".to_owned(),
            ),
            (
                engine.block_size.is_power_of_two() && (2..=1024).contains(&engine.block_size),
                "engine.blockSize",
                format!(
                    "{}: must be a power of two from 2 to 1024",
                    engine.block_size
                ),
            ),
            (
                engine.max_model_length.is_none_or(|length| length >= 2),
                "engine.maxModelLength",
                "must be at least 2: a prompt token and one to come".to_owned(),
            ),
            (
                (1..=4096).contains(&engine.max_sequences),
                "engine.maxSequences",
                format!("{}: must be from 1 to 4096", engine.max_sequences),
            ),
            (
                engine.batched_tokens() >= engine.max_sequences,
                "engine.maxBatchedTokens",
                format!(
                    "{}: must be at least engine.maxSequences ({}), or decoding would wait",
                    engine.batched_tokens(),
                    engine.max_sequences
                ),
            ),
            (
                engine.max_waiting >= 1,
                "engine.maxWaiting",
                "0: at least one request must be able to wait for its first step".to_owned(),
            ),
            (
                engine.simulated.is_none() || engine.kind == EngineKind::Simulated,
                "engine.simulated",
                "only with engine.type Simulated: leave it out".to_owned(),
            ),
            (
                self.kv_pool.blocks.is_none() || self.kv_pool.bytes.is_none(),
                "kvPool",
                "both blocks and bytes are given: give one of them".to_owned(),
            ),
            (
                (1..=3600).contains(&self.kv_pool.lease_seconds),
                "kvPool.leaseSeconds",
                format!("{}: must be from 1 to 3600", self.kv_pool.lease_seconds),
            ),
            (
                !self.kv_pool.transports.is_empty(),
                "kvPool.transports",
                "empty: name at least one, such as Tcp".to_owned(),
            ),
            (
                self.tpot_objective_milliseconds
                    .is_none_or(|objective| objective.is_finite() && objective > 0.0),
                "tpotObjectiveMilliseconds",
                "must be a positive number of milliseconds".to_owned(),
            ),
        ];
        for (holds, field, problem) in rules {
            if !holds {
                return Err(ConfigError::Field {
                    worker: self.name.clone(),
                    field,
                    problem,
                });
            }
        }
        engine
            .check_beside()
            .map_err(|(field, problem)| ConfigError::Field {
                worker: self.name.clone(),
                field,
                problem,
            })
    }

    fn parallelism_is_sound(&self) -> bool {
        let Parallelism {
            tensor,
            pipeline,
            data,
            expert,
        } = self.parallelism;
        [tensor, pipeline, data, expert]
            .iter()
            .all(|size| (1..=65_536).contains(size))
    }
}

fn both_roles() -> Vec<Role> {
    vec![Role::Prefill, Role::Decode]
}

fn local_revision() -> String {
    "local".to_owned()
}

fn default_drain_seconds() -> u64 {
    30
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALLEST: &str = r#"{
        "name": "d0", "pool": "decode", "role": "Decode",
        "model": {"name": "tiny", "source": {"builtin": {"name": "tiny", "seed": 7}}},
        "engine": {"type": "Builtin"}
    }"#;

    fn changed(pointer: &str, value: serde_json::Value) -> Result<(), String> {
        let mut json: serde_json::Value = serde_json::from_str(SMALLEST).unwrap();
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        json.pointer_mut(parent).unwrap()[field] = value;
        let config: WorkerConfig =
            serde_json::from_value(json).map_err(|error| error.to_string())?;
        config.check().map_err(|error| error.to_string())
    }

    #[test]
    fn the_smallest_configuration_has_sensible_defaults() {
        let config: WorkerConfig = serde_json::from_str(SMALLEST).unwrap();
        config.check().unwrap();
        assert_eq!(config.roles, [Role::Prefill, Role::Decode]);
        assert_eq!(config.engine.block_size, 16);
        assert_eq!(config.kv_pool.lease_seconds, 30);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<WorkerConfig>(&text).unwrap(), config);
    }

    #[test]
    fn a_server_beside_the_daemon_is_told_where_it_is() {
        let config: WorkerConfig = serde_json::from_value(serde_json::json!({
            "name": "p0", "pool": "prefill", "role": "Prefill",
            "model": {"name": "tiny", "revision": "r1", "source": {"path": "/models/tiny"}},
            "engine": {
                "type": "VLLM", "url": "http://127.0.0.1:8200", "blockSize": 32, "maxModelLength": 4096,
                "dtype": "BF16", "kvCacheDtype": "Auto", "quantization": "None", "connector": "Nixl",
                "sideChannel": "127.0.0.1:5600", "startTimeoutSeconds": 60,
                "adapters": [{"name": "a", "revision": "1"}],
            },
            "parallelism": {"tensor": 2, "pipeline": 1, "data": 1, "expert": 1},
        }))
        .unwrap();
        config.check().unwrap();
        assert_eq!(config.engine.kv_cache_dtype.stated(), None);
        assert_eq!(
            Dtype("torch.bfloat16".into()).stated().as_deref(),
            Some("BF16")
        );
        assert_eq!(config.parallelism.tensor, 2);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<WorkerConfig>(&text).unwrap(), config);
    }

    #[test]
    fn each_bad_value_is_refused_by_its_field() {
        for (pointer, value, field) in [
            ("/name", "".into(), "name: empty"),
            ("/engine/blockSize", 24.into(), "engine.blockSize: 24"),
            ("/engine/maxSequences", 0.into(), "engine.maxSequences: 0"),
            (
                "/engine/maxBatchedTokens",
                8.into(),
                "engine.maxBatchedTokens: 8",
            ),
            (
                "/engine/simulated",
                serde_json::json!({}),
                "engine.simulated",
            ),
            (
                "/kvPool",
                serde_json::json!({"blocks": 4, "bytes": 4}),
                "kvPool: both",
            ),
            (
                "/kvPool",
                serde_json::json!({"leaseSeconds": 0}),
                "kvPool.leaseSeconds: 0",
            ),
            (
                "/tpotObjectiveMilliseconds",
                (-1).into(),
                "tpotObjectiveMilliseconds",
            ),
            ("/engine/blocksize", 16.into(), "unknown field `blocksize`"),
            (
                "/model/source",
                serde_json::json!({"url": "x"}),
                "unknown variant `url`",
            ),
            (
                "/engine/url",
                "http://127.0.0.1:8000".into(),
                "engine.url: engine.type Builtin is no server",
            ),
            (
                "/engine/type",
                "VLLM".into(),
                "engine.url: \"\": must be http://HOST:PORT",
            ),
            (
                "/engine",
                serde_json::json!({"type": "VLLM", "url": "http://h:1", "connector": "Sglang"}),
                "engine.connector: VLLM has no connector Sglang",
            ),
            (
                "/engine",
                serde_json::json!({"type": "VLLM", "url": "http://h:1", "connector": "Nixl"}),
                "engine.sideChannel: connector Nixl needs HOST:PORT",
            ),
            (
                "/engine",
                serde_json::json!({"type": "VLLM", "url": "http://h:1", "connector": "Baton"}),
                "engine.connectorSocket",
            ),
            (
                "/parallelism",
                serde_json::json!({"tensor": 0}),
                "parallelism: each",
            ),
            (
                "/model",
                serde_json::json!({"name": "m"}),
                "model.source: absent",
            ),
        ] {
            let error = changed(pointer, value).unwrap_err();
            assert!(error.contains(field), "{pointer}: {error}");
        }
    }
}

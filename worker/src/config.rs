//! Configuration of one worker process: the JSON file that whoever starts it writes (`baton up`, the operator).
//!
//! Unknown fields are errors: a misspelt one must not silently mean its default.

use std::fs;
use std::path::{Path, PathBuf};

use baton_protocol::card::{Role, TopologyDomain};
use serde::{Deserialize, Serialize};

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
    pub source: ModelSource,
}

/// Where the weights are from: `{"path": "/m.gguf"}` or `{"builtin": {"name": "tiny", "seed": 7}}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ModelSource {
    /// A GGUF file of the Llama architecture.
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

/// What computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EngineSettings {
    #[serde(rename = "type")]
    pub kind: EngineKind,
    /// Tokens of a KV block.
    #[serde(default = "default_block_size")]
    pub block_size: u32,
    /// Tokens of one sequence; absent: the model's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_model_length: Option<u32>,
    /// Sequences that may hold memory at once.
    #[serde(default = "default_sequences")]
    pub max_sequences: u32,
    /// Tokens of one step; absent: what suits the engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_batched_tokens: Option<u32>,
    /// Requests that may wait.
    #[serde(default = "default_waiting")]
    pub max_waiting: u32,
    /// Only with `type: Simulated`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub simulated: Option<SimulatedTiming>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineKind {
    Builtin,
    Simulated,
}

impl EngineSettings {
    /// Tokens of one step.
    ///
    /// A processor computes some hundred tokens a second, so Builtin takes short steps: between them cancellations are heard and
    /// blocks published, and a step's fixed cost is a few milliseconds. An accelerator wants long ones.
    pub fn batched_tokens(&self) -> u32 {
        let suitable = match self.kind {
            EngineKind::Builtin => 256,
            EngineKind::Simulated => 2048,
        };
        self.max_batched_tokens
            .unwrap_or(suitable.max(self.max_sequences))
    }
}

impl EngineKind {
    pub fn word(self) -> &'static str {
        match self {
            Self::Builtin => "Builtin",
            Self::Simulated => "Simulated",
        }
    }
}

/// Constants of simulated steps, as a pool's `engine.simulated` gives them. What is left out is the simulated engine's own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct SimulatedTiming {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_floor_microseconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_base_microseconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_per_token_nanoseconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_per_token_pair_picoseconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_base_microseconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_per_sequence_nanoseconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_per_context_token_picoseconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jitter_percent: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
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
pub enum ConfigError {
    #[error("configuration {file}: {source}: give the path of a readable file")]
    Unreadable {
        file: PathBuf,
        source: std::io::Error,
    },
    #[error("configuration {file}: {source}: correct the file")]
    Malformed {
        file: PathBuf,
        source: serde_json::Error,
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
        let text = fs::read_to_string(file).map_err(|source| ConfigError::Unreadable {
            file: file.to_owned(),
            source,
        })?;
        let config: Self =
            serde_json::from_str(&text).map_err(|source| ConfigError::Malformed {
                file: file.to_owned(),
                source,
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
        let rules: [(bool, &'static str, String); 12] = [
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
        Ok(())
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

fn default_block_size() -> u32 {
    16
}

fn default_sequences() -> u32 {
    16
}

fn default_waiting() -> u32 {
    256
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
        ] {
            let error = changed(pointer, value).unwrap_err();
            assert!(error.contains(field), "{pointer}: {error}");
        }
    }
}

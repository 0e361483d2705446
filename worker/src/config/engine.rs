//! What computes: an engine of the daemon's own, or a server that runs beside it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

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

    // From here on: only with `type: VLLM` or `SGLang`, where the daemon runs beside a server that somebody else starts.
    /// Of the server, as the daemon reaches it, such as `http://127.0.0.1:8200`. Routers are told its port and the daemon's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Of the weights as loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Dtype>,
    /// `Auto`: the weights'.
    #[serde(default)]
    pub kv_cache_dtype: Dtype,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<Quantization>,
    /// Who moves KV.
    #[serde(default)]
    pub connector: Connector,
    /// `host:port` of the handshakes of vLLM's NixlConnector; an empty host is the daemon's own, as routers are told it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub side_channel: Option<String>,
    /// Unix socket that Baton's connector inside vLLM calls; the daemon listens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connector_socket: Option<PathBuf>,
    /// Of SGLang's bootstrap server, on a prefill worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap_port: Option<u16>,
    /// How long the daemon waits for the server before it ends with a sentence.
    #[serde(default = "default_start_timeout")]
    pub start_timeout_seconds: u64,
    /// Adapters that the server was started with.
    #[serde(default)]
    pub adapters: Vec<AdapterName>,
}

/// An adapter and what tells its versions apart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AdapterName {
    pub name: String,
    #[serde(default)]
    pub revision: String,
}

/// Who moves KV between servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Connector {
    /// Nobody: whole requests only.
    #[default]
    None,
    /// vLLM's NixlConnector.
    Nixl,
    /// Baton's connector inside vLLM, with the daemon beside it.
    Baton,
    /// SGLang's own.
    Sglang,
}

impl Connector {
    pub fn word(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Nixl => "Nixl",
            Self::Baton => "Baton",
            Self::Sglang => "Sglang",
        }
    }
}

/// A number format, as resources write it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Dtype(pub String);

impl Dtype {
    /// As cards name it, in capitals; `None` where it is left to somebody else (`Auto`).
    pub fn stated(&self) -> Option<String> {
        let text = self.0.trim();
        if text.is_empty() || text.eq_ignore_ascii_case("auto") {
            return None;
        }
        Some(Self::canonical(text))
    }

    /// One name for each format, whoever spells it: `bfloat16` and `torch.bfloat16` are `BF16`.
    pub fn canonical(name: &str) -> String {
        let name = name.trim();
        let name = name.strip_prefix("torch.").unwrap_or(name);
        match name.to_ascii_lowercase().as_str() {
            "bfloat16" | "bf16" => "BF16".to_owned(),
            "float16" | "half" | "fp16" | "f16" => "F16".to_owned(),
            "float32" | "float" | "fp32" | "f32" => "F32".to_owned(),
            "fp8" | "fp8_e4m3" | "f8e4m3" | "float8_e4m3fn" => "F8E4M3".to_owned(),
            "fp8_e5m2" | "f8e5m2" | "float8_e5m2" => "F8E5M2".to_owned(),
            other => other.to_ascii_uppercase(),
        }
    }
}

/// A scheme, as resources write it; `None` is none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Quantization(pub String);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineKind {
    Builtin,
    Simulated,
    #[serde(rename = "VLLM")]
    Vllm,
    #[serde(rename = "SGLang")]
    Sglang,
}

impl EngineSettings {
    /// Tokens of one step.
    ///
    /// A processor computes some hundred tokens a second, so Builtin takes short steps: between them cancellations are heard and
    /// blocks published, and a step's fixed cost is a few milliseconds. An accelerator wants long ones.
    pub fn batched_tokens(&self) -> u32 {
        let suitable = match self.kind {
            EngineKind::Builtin => 256,
            EngineKind::Simulated | EngineKind::Vllm | EngineKind::Sglang => 2048,
        };
        self.max_batched_tokens
            .unwrap_or(suitable.max(self.max_sequences))
    }

    /// Checks what only a server beside the daemon has.
    pub(super) fn check_beside(&self) -> Result<(), (&'static str, String)> {
        let kind = self.kind.word();
        if !self.kind.is_beside() {
            let alone = [
                (self.url.is_none(), "engine.url"),
                (self.side_channel.is_none(), "engine.sideChannel"),
                (self.connector_socket.is_none(), "engine.connectorSocket"),
                (self.bootstrap_port.is_none(), "engine.bootstrapPort"),
            ];
            for (absent, field) in alone {
                if !absent {
                    let problem =
                        format!("engine.type {kind} is no server of its own: leave it out");
                    return Err((field, problem));
                }
            }
            return Ok(());
        }
        let url = self.url.as_deref().unwrap_or_default();
        let rules: [(bool, &'static str, String); 5] = [
            (
                url.strip_prefix("http://").is_some_and(is_host_and_port),
                "engine.url",
                format!("{url:?}: must be http://HOST:PORT of the {kind} server, without a path"),
            ),
            (
                match self.connector {
                    Connector::None => true,
                    Connector::Nixl | Connector::Baton => self.kind == EngineKind::Vllm,
                    Connector::Sglang => self.kind == EngineKind::Sglang,
                },
                "engine.connector",
                format!("{kind} has no connector {}", self.connector.word()),
            ),
            (
                self.connector != Connector::Nixl
                    || self.side_channel.as_deref().is_some_and(|address| {
                        is_host_and_port(address) || is_host_and_port(&format!("own{address}"))
                    }),
                "engine.sideChannel",
                "connector Nixl needs HOST:PORT, as in VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT"
                    .to_owned(),
            ),
            (
                self.connector != Connector::Baton || self.connector_socket.is_some(),
                "engine.connectorSocket",
                "connector Baton needs the path of a Unix socket".to_owned(),
            ),
            (
                (1..=86_400).contains(&self.start_timeout_seconds),
                "engine.startTimeoutSeconds",
                format!("{}: must be from 1 to 86400", self.start_timeout_seconds),
            ),
        ];
        rules
            .into_iter()
            .find(|(holds, ..)| !holds)
            .map_or(Ok(()), |(_, field, problem)| Err((field, problem)))
    }
}

fn is_host_and_port(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, port)| {
        !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok_and(|port| port > 0)
    })
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

fn default_start_timeout() -> u64 {
    900
}

impl EngineKind {
    pub fn word(self) -> &'static str {
        match self {
            Self::Builtin => "Builtin",
            Self::Simulated => "Simulated",
            Self::Vllm => "VLLM",
            Self::Sglang => "SGLang",
        }
    }

    /// Whether it is a server of its own, and the daemon runs beside it.
    pub fn is_beside(self) -> bool {
        matches!(self, Self::Vllm | Self::Sglang)
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

//! The configuration of a worker, made from its pool: what `baton-worker serve --config` reads. Pure.
//!
//! `baton up` writes it into a file of the machine, the operator into an annotation of the pod: both make it here.

use serde_json::{Value, json};

use crate::pool::{
    Connector, Dtype, EngineType, PoolSpec, Quantization, SimulatedTiming, Transport,
};
use crate::resources::PoolRole;

/// Where a worker finds its model's weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Weights {
    /// A `.gguf` file or a model's folder that the worker can open.
    Path(std::path::PathBuf),
    /// A name that the engine fetches by itself; the worker beside it has no files then.
    Hub {
        name: String,
        revision: Option<String>,
    },
    /// Made by the worker itself.
    Tiny { seed: u64 },
}

/// The server that a worker is the daemon of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerOfWorker {
    /// As the daemon reaches it, such as `http://127.0.0.1:8000`. For routers the daemon's own host takes the place of this one.
    pub url: String,
    /// Port of NIXL's side channel or of SGLang's bootstrap server.
    pub connector_port: u16,
    /// Host of NIXL's side channel; `None`: the daemon's own host for others, which only it knows.
    pub connector_host: Option<String>,
    /// Where the daemon waits for Baton's connector.
    pub connector_socket: String,
    /// How long the daemon waits for the server to answer.
    pub start_timeout_seconds: i64,
}

/// One worker of a pool.
#[derive(Debug, Clone)]
pub struct WorkerConfiguration<'a> {
    pub spec: &'a PoolSpec,
    pub role: PoolRole,
    /// Of the worker; stable over restarts of its process.
    pub name: &'a str,
    pub pool: &'a str,
    /// Hash of the pool's pod template; `None` where there are no templates.
    pub revision: Option<&'a str>,
    /// As the worker sees them. `None` for a simulated worker, which reads none, and beside a server whose files it does not see.
    pub weights: Option<&'a Weights>,
    /// Where the engine is a server of its own.
    pub server: Option<&'a ServerOfWorker>,
    /// Level and domain, nearest level first.
    pub topology: Vec<(&'a str, &'a str)>,
    /// The tightest objective of the policies that use the pool: the worker bounds its mixed steps by it.
    pub tpot_objective_milliseconds: Option<i64>,
    /// How long a worker that is told to end waits for what it runs.
    pub drain_seconds: i64,
}

impl WorkerConfiguration<'_> {
    #[must_use]
    pub fn to_json(&self) -> Value {
        let spec = self.spec;
        let source = match self.weights {
            Some(Weights::Path(path)) => Some(json!({ "path": path })),
            Some(Weights::Tiny { seed }) => {
                Some(json!({ "builtin": { "name": "tiny", "seed": seed } }))
            }
            Some(Weights::Hub { .. }) => None,
            None if self.server.is_some() => None,
            None => Some(json!({ "builtin": { "name": "tiny", "seed": 0 } })),
        };
        let mut engine = json!({
            "type": spec.engine.engine_type.word(),
            "blockSize": spec.engine.block_size,
        });
        if let Some(length) = spec.engine.max_model_length {
            engine["maxModelLength"] = length.into();
        }
        if let Some(timing) = &spec.engine.simulated {
            engine["simulated"] = json!(seeded(timing, self.name));
        }
        if let Some(server) = self.server {
            server.describe(spec, &mut engine);
        }
        let mut kv_pool = json!({
            "leaseSeconds": spec.kv_pool.lease_seconds,
            "transports": spec.kv_pool.transports.iter().map(transport).collect::<Vec<_>>(),
        });
        if let Some(blocks) = spec.kv_pool.blocks {
            kv_pool["blocks"] = blocks.into();
        }
        if let Some(bytes) = spec.kv_pool.bytes {
            kv_pool["bytes"] = bytes.into();
        }
        let topology: Vec<Value> = self
            .topology
            .iter()
            .map(|(level, domain)| json!({ "level": level, "domain": domain }))
            .collect();
        let mut configuration = json!({
            "name": self.name,
            "pool": self.pool,
            "role": match self.role { PoolRole::Prefill => "Prefill", PoolRole::Decode => "Decode" },
            "model": {
                "name": spec.model.name,
                "revision": spec.model.revision.as_deref().unwrap_or_default(),
            },
            "engine": engine,
            "kvPool": kv_pool,
            "topology": topology,
            "drainTimeoutSeconds": self.drain_seconds,
        });
        if let Some(source) = source {
            configuration["model"]["source"] = source;
        }
        if self.server.is_some() {
            configuration["parallelism"] = json!({
                "tensor": spec.parallelism.tensor,
                "pipeline": spec.parallelism.pipeline,
                "data": spec.parallelism.data,
                "expert": spec.parallelism.expert,
            });
        }
        if let Some(roles) = self.only_roles() {
            configuration["roles"] = roles;
        }
        if let Some(revision) = self.revision {
            configuration["revision"] = revision.into();
        }
        if let Some(objective) = self.tpot_objective_milliseconds {
            configuration["tpotObjectiveMilliseconds"] = objective.into();
        }
        configuration
    }

    /// SGLang's servers are started for one of the two and can do nothing else.
    fn only_roles(&self) -> Option<Value> {
        let engine = &self.spec.engine;
        let one = engine.engine_type == EngineType::SgLang && engine.connector() != Connector::None;
        one.then(|| match self.role {
            PoolRole::Prefill => json!(["Prefill"]),
            PoolRole::Decode => json!(["Decode"]),
        })
    }
}

impl ServerOfWorker {
    /// What the daemon is told of the server beside it: where it is, and what the pool says that it is.
    fn describe(&self, spec: &PoolSpec, engine: &mut Value) {
        let connector = spec.engine.connector();
        engine["url"] = self.url.as_str().into();
        engine["startTimeoutSeconds"] = self.start_timeout_seconds.into();
        engine["kvCacheDtype"] = json!(spec.engine.kv_cache_dtype);
        // What is left to the engine is declared by nobody.
        if spec.engine.dtype != Dtype::Auto {
            engine["dtype"] = json!(spec.engine.dtype);
        }
        if spec.engine.quantization != Quantization::Auto {
            engine["quantization"] = json!(spec.engine.quantization);
        }
        let sglang = spec.engine.engine_type == EngineType::SgLang;
        engine["connector"] = match connector {
            Connector::None => "None".into(),
            // Whatever moves its bytes, what is said to it is the same.
            _ if sglang => "Sglang".into(),
            connector => json!(connector),
        };
        match connector {
            Connector::None => {}
            _ if sglang => engine["bootstrapPort"] = self.connector_port.into(),
            Connector::Baton => {
                engine["connectorSocket"] = self.connector_socket.as_str().into();
            }
            Connector::Nixl | Connector::Mooncake => {
                let host = self.connector_host.as_deref().unwrap_or_default();
                engine["sideChannel"] = format!("{host}:{}", self.connector_port).into();
            }
        }
    }
}

/// Workers of one pool differ in their noise, the same way at every start.
fn seeded(timing: &SimulatedTiming, name: &str) -> SimulatedTiming {
    let hash = blake3::hash(format!("{} {name}", timing.seed.unwrap_or_default()).as_bytes());
    let bytes = hash.as_bytes();
    let seed = i64::from(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    SimulatedTiming {
        seed: Some(seed),
        ..timing.clone()
    }
}

fn transport(transport: &Transport) -> &'static str {
    match transport {
        Transport::Local => "Local",
        Transport::Shm => "Shm",
        Transport::Tcp => "Tcp",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(engine: &Value) -> PoolSpec {
        serde_json::from_value(json!({
            "model": {"name": "m", "revision": "r2"},
            "engine": engine,
            "kvPool": {"bytes": 1_000_000, "leaseSeconds": 3, "transports": ["Tcp", "Local"]},
        }))
        .unwrap()
    }

    #[test]
    fn a_pods_worker_is_told_what_its_pool_declares() {
        let spec = spec(&json!({"type": "Builtin", "blockSize": 32, "maxModelLength": 512}));
        let weights = Weights::Path("/model/m.gguf".into());
        let configuration = WorkerConfiguration {
            spec: &spec,
            role: PoolRole::Decode,
            name: "d-abc-x1",
            pool: "d",
            revision: Some("abc"),
            weights: Some(&weights),
            server: None,
            topology: Vec::new(),
            tpot_objective_milliseconds: Some(60),
            drain_seconds: 300,
        };
        assert_eq!(
            configuration.to_json(),
            json!({
                "name": "d-abc-x1", "pool": "d", "role": "Decode", "revision": "abc",
                "model": {"name": "m", "revision": "r2", "source": {"path": "/model/m.gguf"}},
                "engine": {"type": "Builtin", "blockSize": 32, "maxModelLength": 512},
                "kvPool": {"bytes": 1_000_000, "leaseSeconds": 3, "transports": ["Tcp", "Local"]},
                "topology": [], "drainTimeoutSeconds": 300, "tpotObjectiveMilliseconds": 60,
            })
        );
    }

    /// As a daemon beside a server on this machine is told.
    fn beside(engine: &Value, connector_host: Option<&str>) -> Value {
        let mut spec = spec(engine);
        spec.parallelism.tensor = 2;
        let weights = Weights::Path("/models/tiny".into());
        let server = ServerOfWorker {
            url: "http://127.0.0.1:8200".into(),
            connector_port: 5600,
            connector_host: connector_host.map(Into::into),
            connector_socket: "/run/baton/connector.sock".into(),
            start_timeout_seconds: 900,
        };
        let configuration = WorkerConfiguration {
            spec: &spec,
            role: PoolRole::Prefill,
            name: "p-0",
            pool: "p",
            revision: None,
            weights: Some(&weights),
            server: Some(&server),
            topology: Vec::new(),
            tpot_objective_milliseconds: None,
            drain_seconds: 5,
        };
        configuration.to_json()
    }

    #[test]
    fn a_daemon_is_told_where_its_server_is_and_what_the_pool_says_of_it() {
        let told = beside(
            &json!({"type": "VLLM", "blockSize": 32, "maxModelLength": 512, "dtype": "BF16"}),
            Some("127.0.0.1"),
        );
        let engine = json!({
            "type": "VLLM", "url": "http://127.0.0.1:8200", "blockSize": 32, "maxModelLength": 512,
            "dtype": "BF16", "kvCacheDtype": "Auto", "connector": "Nixl",
            "sideChannel": "127.0.0.1:5600", "startTimeoutSeconds": 900,
        });
        assert_eq!(told["engine"], engine);
        assert_eq!(told["model"]["source"], json!({"path": "/models/tiny"}));
        assert_eq!(
            told["parallelism"],
            json!({"tensor": 2, "pipeline": 1, "data": 1, "expert": 1})
        );
        assert_eq!(told["roles"], Value::Null, "it can do both");
    }

    #[test]
    fn a_daemon_is_told_what_its_connector_needs_and_nothing_else() {
        let members = |engine: &Value| {
            let told = beside(engine, None)["engine"].clone();
            [
                "connector",
                "sideChannel",
                "connectorSocket",
                "bootstrapPort",
            ]
            .map(|member| told[member].clone())
        };
        let null = Value::Null;
        assert_eq!(
            members(&json!({"type": "VLLM"})),
            [json!("Nixl"), json!(":5600"), null.clone(), null.clone()],
            "the daemon's own host for others"
        );
        assert_eq!(
            members(&json!({"type": "VLLM", "connector": "Baton"})),
            [
                json!("Baton"),
                null.clone(),
                json!("/run/baton/connector.sock"),
                null.clone()
            ]
        );
        for connector in ["Mooncake", "Nixl"] {
            assert_eq!(
                members(&json!({"type": "SGLang", "connector": connector})),
                [json!("Sglang"), null.clone(), null.clone(), json!(5600)]
            );
        }
        assert_eq!(
            members(&json!({"type": "SGLang", "connector": "None"})),
            [json!("None"), null.clone(), null.clone(), null]
        );
    }

    #[test]
    fn a_server_of_sglang_can_do_one_thing_only() {
        assert_eq!(
            beside(&json!({"type": "SGLang"}), None)["roles"],
            json!(["Prefill"])
        );
        let alone = json!({"type": "SGLang", "connector": "None"});
        assert_eq!(beside(&alone, None)["roles"], Value::Null);
    }

    #[test]
    fn the_noise_of_two_workers_differs_and_that_of_one_does_not() {
        let spec = spec(&json!({"type": "Simulated", "simulated": {"prefillBaseMicroseconds": 7}}));
        let timing = |name: &str| {
            let configuration = WorkerConfiguration {
                spec: &spec,
                role: PoolRole::Prefill,
                name,
                pool: "p",
                revision: None,
                weights: None,
                server: None,
                topology: vec![("host", "a")],
                tpot_objective_milliseconds: None,
                drain_seconds: 5,
            };
            configuration.to_json()["engine"]["simulated"].clone()
        };
        assert_eq!(timing("a")["prefillBaseMicroseconds"], 7);
        assert_eq!(timing("a"), timing("a"));
        assert_ne!(timing("a"), timing("b"));
    }
}

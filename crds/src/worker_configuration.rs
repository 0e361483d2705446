//! The configuration of a worker, made from its pool: what `baton-worker serve --config` reads. Pure.
//!
//! `baton up` writes it into a file of the machine, the operator into an annotation of the pod: both make it here.

use serde_json::{Value, json};

use crate::pool::{PoolSpec, SimulatedTiming, Transport};
use crate::resources::PoolRole;

/// Where a worker finds its model's weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Weights {
    /// A `.gguf` file that the worker can open.
    File(std::path::PathBuf),
    /// Made by the worker itself.
    Tiny { seed: u64 },
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
    /// `None` for a simulated worker, which reads no weights.
    pub weights: Option<&'a Weights>,
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
            Some(Weights::File(path)) => json!({ "path": path }),
            Some(Weights::Tiny { seed }) => json!({ "builtin": { "name": "tiny", "seed": seed } }),
            None => json!({ "builtin": { "name": "tiny", "seed": 0 } }),
        };
        let mut engine = json!({
            "type": format!("{:?}", spec.engine.engine_type),
            "blockSize": spec.engine.block_size,
        });
        if let Some(length) = spec.engine.max_model_length {
            engine["maxModelLength"] = length.into();
        }
        if let Some(timing) = &spec.engine.simulated {
            engine["simulated"] = json!(seeded(timing, self.name));
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
                "source": source,
            },
            "engine": engine,
            "kvPool": kv_pool,
            "topology": topology,
            "drainTimeoutSeconds": self.drain_seconds,
        });
        if let Some(revision) = self.revision {
            configuration["revision"] = revision.into();
        }
        if let Some(objective) = self.tpot_objective_milliseconds {
            configuration["tpotObjectiveMilliseconds"] = objective.into();
        }
        configuration
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
        let weights = Weights::File("/model/m.gguf".into());
        let configuration = WorkerConfiguration {
            spec: &spec,
            role: PoolRole::Decode,
            name: "d-abc-x1",
            pool: "d",
            revision: Some("abc"),
            weights: Some(&weights),
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

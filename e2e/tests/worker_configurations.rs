//! What pools say reaches their workers: the configuration that `crds` writes is one that `worker` reads, for every engine and
//! connector, on a machine and in a pod.

use anyhow::{Context, Result, ensure};
use baton_crds::{PoolRole, PoolSpec, ServerOfWorker, Weights, WorkerConfiguration};
use baton_worker::config::{Connector, EngineKind, WorkerConfig};
use serde_json::json;

const ENGINES: &[(&str, &[&str])] = &[
    ("Builtin", &["Baton"]),
    ("Simulated", &["Baton"]),
    ("VLLM", &["Nixl", "Baton", "None"]),
    ("SGLang", &["Mooncake", "Nixl", "None"]),
];

#[test]
fn every_configuration_that_is_written_is_read() -> Result<()> {
    for (engine, connectors) in ENGINES {
        for connector in *connectors {
            for (place, host) in [("machine", Some("127.0.0.1")), ("pod", None)] {
                let read = configuration(engine, connector, host)
                    .and_then(|written| read(&written))
                    .with_context(|| format!("{engine} with {connector} on a {place}"))?;
                ensure!(read.engine.block_size == 32, "{read:?}");
                let server =
                    read.engine.kind == EngineKind::Vllm || read.engine.kind == EngineKind::Sglang;
                ensure!(read.engine.url.is_some() == server, "{read:?}");
                let moved = read.engine.connector != Connector::None;
                ensure!(!server || moved == (*connector != "None"), "{read:?}");
            }
        }
    }
    Ok(())
}

fn configuration(engine: &str, connector: &str, host: Option<&str>) -> Result<String> {
    let spec: PoolSpec = serde_json::from_value(json!({
        "model": {"name": "m", "revision": "r1"},
        "engine": {"type": engine, "connector": connector, "blockSize": 32, "maxModelLength": 4096},
    }))?;
    let server = ServerOfWorker {
        url: "http://127.0.0.1:8000".to_owned(),
        connector_port: 5600,
        connector_host: host.map(ToOwned::to_owned),
        connector_socket: "/run/baton/connector.sock".to_owned(),
        start_timeout_seconds: 600,
    };
    let weights = Weights::Path("/models/m".into());
    let configuration = WorkerConfiguration {
        spec: &spec,
        role: PoolRole::Prefill,
        name: "p-0",
        pool: "p",
        revision: Some("abc"),
        weights: Some(&weights),
        server: spec.engine.engine_type.is_server().then_some(&server),
        topology: vec![("host", "a")],
        tpot_objective_milliseconds: Some(40),
        drain_seconds: 5,
    };
    Ok(configuration.to_json().to_string())
}

fn read(written: &str) -> Result<WorkerConfig> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("worker.json");
    std::fs::write(&file, written)?;
    WorkerConfig::read(&file).with_context(|| written.to_owned())
}

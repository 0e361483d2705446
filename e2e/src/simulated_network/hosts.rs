//! Hosts of the simulated network: the real router and the real workers, started as their processes start them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use baton_protocol::hash::HashKey;
use baton_router::app::{flags::Flags, serve_until};
use baton_router::clock::{Clock, Moment};
use baton_worker::config::{SimulatedTiming, WorkerConfig};
use baton_worker::kv::KvPool;
use baton_worker::serve::{Addresses, Start, start};
use baton_worker::transport::fault::Fault;
use clap::Parser as _;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::Instant;

use super::machine::{SkewedClock, system};
use super::plan::{EngineKind, Plan, WorkerPlan};
use super::sockets::SimulatedNetwork;
use super::{ROUTER, ports};

/// Wall time when a simulation begins, microseconds.
const EPOCH: u64 = 1_764_000_000_000_000;
/// Between two looks at what a worker still does.
const LOOK: Duration = Duration::from_millis(50);

/// What the hosts of one simulation share with whoever watches it.
#[derive(Debug)]
pub struct Stage {
    pub plan: Plan,
    pub network: SimulatedNetwork,
    /// Router's and workers' files.
    pub folder: PathBuf,
    /// A known defect, for tests of the simulation itself.
    pub defect: Option<Defect>,
    seen: Mutex<Seen>,
}

/// Something that must not go unnoticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Defect {
    /// Prefill workers send a wrong byte now and then, and readers do not look at checksums.
    UncheckedBytes,
    /// Leases never expire: the clocks of prefill workers stand still.
    LeasesForEver,
}

#[derive(Debug, Default)]
struct Seen {
    starts: BTreeMap<String, u64>,
    workers: BTreeMap<String, Looked>,
    router_starts: Vec<Instant>,
}

/// A worker from inside.
#[derive(Clone, Debug)]
pub struct Looked {
    pub pool: KvPool,
    /// That have not ended, at the last look.
    pub operations: usize,
}

impl Stage {
    /// # Errors
    /// Files cannot be written.
    pub fn new(plan: Plan, folder: &Path, defect: Option<Defect>) -> Result<Self> {
        let mut policy = plan.policy.clone();
        if defect == Some(Defect::UncheckedBytes) {
            policy.verify.checksum = baton_placement::policy::Checksum::Off;
        }
        let workers: Vec<_> = plan
            .workers
            .iter()
            .map(|worker| {
                json!({"name": worker.name, "control": format!("{}:{}", worker.name, ports::CONTROL)})
            })
            .collect();
        std::fs::write(folder.join("workers.json"), json!(workers).to_string())?;
        std::fs::write(
            folder.join("policies.json"),
            serde_json::to_string(&[policy])?,
        )?;
        Ok(Self {
            plan,
            network: SimulatedNetwork::default(),
            folder: folder.to_owned(),
            defect,
            seen: Mutex::default(),
        })
    }

    fn seen<T>(&self, look: impl FnOnce(&mut Seen) -> T) -> T {
        look(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The seed of a host's next start.
    fn begin(&self, host: &str) -> u64 {
        let start = self.seen(|seen| {
            let starts = seen.starts.entry(host.to_owned()).or_default();
            *starts += 1;
            *starts
        });
        let digest = blake3::hash(format!("{} {host} {start}", self.plan.seed).as_bytes());
        let mut seed = [0; 8];
        seed.copy_from_slice(&digest.as_bytes()[..8]);
        u64::from_le_bytes(seed)
    }

    /// Workers as they were seen last.
    pub fn workers(&self) -> BTreeMap<String, Looked> {
        self.seen(|seen| seen.workers.clone())
    }

    /// How often the router was started.
    pub fn router_starts(&self) -> usize {
        self.seen(|seen| seen.router_starts.len())
    }

    /// The router, from its flags to its end.
    ///
    /// # Errors
    /// It does not start, or ends.
    pub async fn router(self: Arc<Self>) -> Result<()> {
        let seed = self.begin(ROUTER);
        self.seen(|seen| seen.router_starts.push(Instant::now()));
        let text = |path: PathBuf| path.to_str().map(str::to_owned).context("a path");
        let flags = Flags::try_parse_from([
            "baton-router".to_owned(),
            format!("--listen=0.0.0.0:{}", ports::API),
            format!("--admin=0.0.0.0:{}", ports::ROUTER_ADMIN),
            format!("--policy-file={}", text(self.folder.join("policies.json"))?),
            format!("--workers-file={}", text(self.folder.join("workers.json"))?),
            format!("--state-dir={}", text(self.state())?),
            format!("--router-id=r{}", self.router_starts()),
        ])?;
        let passed = turmoil::sim_elapsed().unwrap_or_default();
        let clock = Clock::anchored(Moment(EPOCH).plus(passed));
        let system = system(&self.network, seed);
        serve_until(flags, system, clock, std::future::pending()).await
    }

    /// Where the router writes.
    pub fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// A worker, from its configuration to its end.
    ///
    /// # Errors
    /// It does not start, or ends by itself.
    pub async fn worker(self: Arc<Self>, worker: WorkerPlan) -> Result<()> {
        let seed = self.begin(&worker.name);
        let any = |port: u16| SocketAddr::from(([0, 0, 0, 0], port));
        let addresses = Addresses {
            control: any(ports::CONTROL),
            transfer: any(ports::TRANSFER),
            admin: any(ports::WORKER_ADMIN),
            advertise: Some(worker.name.clone()),
        };
        let mut skew = worker.skew;
        let mut what = Start::new(
            self.configuration(&worker)?,
            addresses,
            HashKey::from_bytes(&[0; 32]),
        );
        match self.defect {
            Some(Defect::LeasesForEver) if worker.prefill => skew.per_mille = 0,
            Some(Defect::UncheckedBytes) if worker.prefill => what.fault = Some(Fault::FlipByte(2)),
            _ => {}
        }
        what.system = system(&self.network, seed);
        what.clock = Arc::new(SkewedClock::start(skew));
        if self.plan.engine == EngineKind::Tiny {
            what.modelled = Some(timing());
        }
        let running = start(what).await?;
        let pool = running.pool().clone();
        loop {
            let looked = Looked {
                pool: pool.clone(),
                operations: running.operations(),
            };
            self.seen(|seen| seen.workers.insert(worker.name.clone(), looked));
            tokio::select! {
                biased;
                () = running.failed() => anyhow::bail!("{} has stopped by itself", worker.name),
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    fn configuration(&self, worker: &WorkerPlan) -> Result<WorkerConfig> {
        let (pool, role) = if worker.prefill {
            ("prefill", "Prefill")
        } else {
            ("decode", "Decode")
        };
        let mut engine = json!({"maxSequences": 8, "maxBatchedTokens": 64, "maxWaiting": 16});
        match self.plan.engine {
            EngineKind::Simulated => {
                engine["type"] = json!("Simulated");
                engine["simulated"] = serde_json::to_value(timing())?;
            }
            EngineKind::Tiny => engine["type"] = json!("Builtin"),
        }
        Ok(serde_json::from_value(json!({
            "name": worker.name, "pool": pool, "role": role,
            "model": {"name": "m", "source": {"builtin": {"name": "tiny", "seed": 7}}},
            "engine": engine,
            "kvPool": {
                "blocks": self.plan.blocks,
                "leaseSeconds": self.plan.lease_seconds,
                "transports": ["Tcp"],
            },
        }))?)
    }
}

/// Long enough that every phase of a request can be met by a fault.
fn timing() -> SimulatedTiming {
    SimulatedTiming {
        prefill_floor_microseconds: Some(3_000),
        prefill_base_microseconds: Some(2_000),
        prefill_per_token_nanoseconds: Some(500_000),
        prefill_per_token_pair_picoseconds: Some(0),
        decode_base_microseconds: Some(8_000),
        decode_per_sequence_nanoseconds: Some(500_000),
        decode_per_context_token_picoseconds: Some(0),
        jitter_percent: None,
        seed: None,
    }
}

//! A router before two simulated workers whose steps take no time: each a process, the router under callgrind where asked.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::binaries::program;
use baton_e2e::http::Client;
use baton_e2e::process::{Process, tail};
use baton_e2e::wait;
use baton_placement::policy::{Overrides, Policy, Pooling};
use serde_json::{Value, json};

/// A router under callgrind takes some fifty times as long.
const SOON: Duration = Duration::from_secs(120);

pub(crate) struct Stage {
    // Ended before their folder goes.
    router: Process,
    _workers: Vec<Process>,
    folder: tempfile::TempDir,
    pub(crate) api: SocketAddr,
    /// Of the worker that decodes.
    pub(crate) control: String,
    pub(crate) kv_identity: String,
    under_callgrind: bool,
}

impl Stage {
    /// With the text of this model, else the byte-level vocabulary.
    pub(crate) async fn start(model: Option<&Path>, under_callgrind: bool) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut workers = Vec::new();
        let mut listed = Vec::new();
        for (role, pool) in [("Prefill", "prefill"), ("Decode", "decode")] {
            let process = worker(folder.path(), role, pool, model)?;
            let control = process.said("control_address=", SOON).await?;
            listed.push(json!({"name": pool, "control": control}));
            workers.push(process);
        }
        let path = |name: &str| folder.path().join(name);
        let mut policy = Policy::new("m", "m", &["prefill"], &["decode"]);
        policy.generation = 1;
        policy.overrides = Overrides::Allowed;
        policy.pooling = Pooling::Strict;
        std::fs::write(path("policies.json"), serde_json::to_string(&[policy])?)?;
        std::fs::write(path("workers.json"), json!(listed).to_string())?;

        let mut command = if under_callgrind {
            let mut command = Command::new("valgrind");
            command
                .args(["--tool=callgrind", "--instr-atstart=no"])
                .arg(format!(
                    "--callgrind-out-file={}",
                    path("callgrind").display()
                ))
                .arg(program("baton-router")?);
            command
        } else {
            Command::new(program("baton-router")?)
        };
        command.args(["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
        for (flag, name) in [
            ("--policy-file", "policies.json"),
            ("--workers-file", "workers.json"),
            ("--state-dir", "state"),
        ] {
            command.arg(flag).arg(path(name));
        }
        let router = Process::start_command("baton-router", folder.path(), command)?;
        let api = router.said(" listen=", SOON).await?.parse()?;
        let admin = Client::new(router.said(" admin=", SOON).await?.parse()?);
        let kv_identity = ready(&admin, &router).await?;
        let control = listed[1]["control"].as_str().context("control")?.to_owned();
        Ok(Self {
            router,
            _workers: workers,
            folder,
            api,
            control,
            kv_identity,
            under_callgrind,
        })
    }

    /// The router's process.
    pub(crate) fn router(&self) -> u32 {
        self.router.id()
    }

    /// Counts instructions from now on, or no longer.
    pub(crate) fn count(&self, on: bool) -> Result<()> {
        ensure!(
            self.under_callgrind,
            "the router does not run under callgrind"
        );
        let word = if on { "on" } else { "off" };
        let told = Command::new("callgrind_control")
            .args(["-i", word, &self.router().to_string()])
            .output()?;
        ensure!(told.status.success(), "callgrind_control: {told:?}");
        Ok(())
    }

    /// Ends the router; the instructions that were counted, and the profile, which is kept.
    pub(crate) fn instructions(mut self) -> Result<(u64, PathBuf)> {
        self.router.signal(rustix::process::Signal::TERM);
        self.router.wait(SOON)?;
        let profile = self.folder.path().join("callgrind");
        let text = std::fs::read_to_string(&profile)?;
        let total = text
            .lines()
            .find_map(|line| line.strip_prefix("totals: "))
            .context("the profile has no total")?
            .trim()
            .parse()?;
        let kept = std::env::temp_dir().join(format!("baton-router.{}.callgrind", self.router()));
        std::fs::copy(&profile, &kept)?;
        Ok((total, kept))
    }
}

fn worker(folder: &Path, role: &str, pool: &str, model: Option<&Path>) -> Result<Process> {
    let source = match model {
        Some(path) => json!({"path": path}),
        None => json!({"builtin": {"name": "tiny", "seed": 0}}),
    };
    let nothing = json!({
        "prefillFloorMicroseconds": 0, "prefillBaseMicroseconds": 0, "prefillPerTokenNanoseconds": 0,
        "prefillPerTokenPairPicoseconds": 0, "decodeBaseMicroseconds": 0, "decodePerSequenceNanoseconds": 0,
        "decodePerContextTokenPicoseconds": 0, "jitterPercent": 0, "seed": 1,
    });
    let config = json!({
        "name": pool, "pool": pool, "role": role, "model": {"name": "m", "revision": "", "source": source},
        "engine": {"type": "Simulated", "blockSize": 16, "simulated": nothing}, "kvPool": {"blocks": 40_000},
        "topology": [{"level": "host", "domain": "here"}], "drainTimeoutSeconds": 5,
    });
    let file = folder.join(format!("{pool}.json"));
    std::fs::write(&file, config.to_string())?;
    let home = folder.join(pool);
    std::fs::create_dir(&home)?;
    let mut command = Command::new(program("baton-worker")?);
    command.args(["serve", "--config"]).arg(&file);
    for flag in ["--control", "--transfer", "--admin"] {
        command.args([flag, "127.0.0.1:0"]);
    }
    Process::start_command("baton-worker", &home, command)
}

/// The KV identity of its workers, when all are known and their tokenizer is there.
async fn ready(admin: &Client, router: &Process) -> Result<String> {
    wait::until("the router knows its workers", SOON, async || {
        let told = |error: anyhow::Error| error.to_string();
        let view: Value = admin.get_json("/v1/fleet").await.map_err(told)?;
        let workers = view["workers"].as_array().cloned().unwrap_or_default();
        let ready = workers.iter().filter(|worker| worker["state"] == "Ready");
        if ready.count() < 2 || admin.get("/readyz").await.map_err(told)?.status != 200 {
            return Err(tail(&router.errors(), 5));
        }
        let identity = workers[0]["kvIdentity"].as_str();
        Ok(identity.unwrap_or_default().to_owned())
    })
    .await
}

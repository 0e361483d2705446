//! Baton's part: a daemon beside each of the stand-in's servers, and a router over them, each a process of its own.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use baton_e2e::binaries::program;
use baton_e2e::http::Client;
use baton_e2e::process::{Process, tail};
use baton_e2e::record::Record;
use baton_e2e::wait;
use baton_placement::policy::{Overrides, Policy, Pooling};
use serde_json::json;

use crate::MODEL;
use crate::client::{self, Target};
use crate::fake::{BLOCK_SIZE, Counts, Kind, Listening, MAX_LENGTH, Settings};
use crate::peers::Servers;

const SOON: Duration = Duration::from_secs(60);

/// The stand-in's process and its servers.
#[derive(Debug)]
pub(crate) struct Fakes {
    process: Process,
    /// Of Baton's fleet whose tokens are checked, and of every other router.
    pub(crate) checked: Servers,
    /// The same without `/tokenize`.
    pub(crate) unchecked: Servers,
}

impl Fakes {
    /// Two servers for prefill and two for decode, twice, in one process.
    pub(crate) async fn start(model: &Path, folder: &Path) -> Result<Self> {
        let kinds = |tokenizes: bool| {
            [0, 1, 0, 1].map(|place| Kind {
                tokenizes,
                holds: tokenizes.then_some((place, 2)),
            })
        };
        let settings = Settings {
            model: model.to_owned(),
            servers: [kinds(true), kinds(false)].concat(),
        };
        let file = folder.join("fake.json");
        fs::write(&file, serde_json::to_string(&settings)?)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("fake").arg(&file);
        let mut process = Process::start_command("fake", folder, command)?;
        let found = wait::until("the stand-in listens", SOON, async || {
            if let Some(status) = process.ended() {
                return Ok(Err(status));
            }
            let said = process.output();
            let (line, _) = said.split_once('\n').ok_or("it says nothing")?;
            serde_json::from_str::<Vec<Listening>>(line)
                .map(Ok)
                .map_err(|error| error.to_string())
        })
        .await?;
        let Ok(found) = found else {
            bail!("the stand-in ended: {}", tail(&process.errors(), 5));
        };
        let servers = |from: usize| -> Result<Servers> {
            Ok(Servers {
                prefill: found.get(from..from + 2).context("prefill")?.to_vec(),
                decode: found.get(from + 2..from + 4).context("decode")?.to_vec(),
            })
        };
        Ok(Self {
            checked: servers(0)?,
            unchecked: servers(4)?,
            process,
        })
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }
}

/// What all of these servers have answered so far.
pub(crate) async fn counts(servers: &Servers) -> Result<Counts> {
    let mut sum = Counts::default();
    for server in servers.prefill.iter().chain(&servers.decode) {
        let counts = Client::new(server.http).get_json("/counts").await?;
        let counts: Counts = serde_json::from_value(counts)?;
        sum.whole += counts.whole;
        sum.prefills += counts.prefills;
        sum.pulls += counts.pulls;
        sum.rooms += counts.rooms;
    }
    Ok(sum)
}

/// A router and its daemons.
#[derive(Debug)]
pub(crate) struct Fleet {
    // Ended before the daemons.
    router: Process,
    _daemons: Vec<Process>,
    api: SocketAddr,
    admin: Client,
}

impl Fleet {
    /// Starts all and waits until a request is answered each way.
    ///
    /// # Errors
    /// That is not so in time, with what the processes said.
    pub(crate) async fn start(model: &Path, servers: &Servers, folder: &Path) -> Result<Self> {
        fs::create_dir(folder)?;
        let mut daemons = Vec::new();
        let mut listed = Vec::new();
        let pools = [("Prefill", &servers.prefill), ("Decode", &servers.decode)];
        for (role, servers) in pools {
            for (number, server) in servers.iter().enumerate() {
                let name = format!("{}-{number}", role.to_lowercase());
                daemons.push((name.clone(), daemon(folder, &name, role, server, model)?));
            }
        }
        for (name, process) in &daemons {
            let control = process.said("listening control ", SOON).await?;
            listed.push(json!({"name": name, "control": control}));
        }
        let mut policy = Policy::new(MODEL, MODEL, &["prefill"], &["decode"]);
        policy.generation = 1;
        policy.overrides = Overrides::Allowed;
        policy.pooling = Pooling::Strict;
        fs::write(
            folder.join("policies.json"),
            serde_json::to_string(&[policy])?,
        )?;
        fs::write(folder.join("workers.json"), json!(listed).to_string())?;
        let mut command = Command::new(program("baton-router")?);
        command.args(["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
        for (flag, name) in [
            ("--policy-file", "policies.json"),
            ("--workers-file", "workers.json"),
            ("--state-dir", "state"),
        ] {
            command.arg(flag).arg(folder.join(name));
        }
        let router = Process::start_command("baton-router", folder, command)?;
        let api = router.said(" listen=", SOON).await?.parse()?;
        let admin = Client::new(router.said(" admin=", SOON).await?.parse()?);
        let fleet = Self {
            router,
            _daemons: daemons.into_iter().map(|(_, process)| process).collect(),
            api,
            admin,
        };
        fleet.ready().await?;
        Ok(fleet)
    }

    pub(crate) fn id(&self) -> u32 {
        self.router.id()
    }

    /// Whole requests, or split ones.
    pub(crate) fn target(&self, split: bool) -> Target {
        let mode = if split { "Disaggregated" } else { "Aggregated" };
        Target {
            addresses: vec![self.api],
            headers: vec![("x-baton-mode", mode)],
        }
    }

    /// The decision record of one request.
    pub(crate) async fn record(&self, split: bool, prompt: &str) -> Result<Record> {
        let run = client::once(&self.target(split), prompt).await?;
        Record::of(&self.admin, &run.context("no x-baton-run")?).await
    }

    async fn ready(&self) -> Result<()> {
        let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2});
        for split in [false, true] {
            let target = self.target(split);
            let client = Client::new(self.api);
            wait::until("Baton's router answers", SOON, async || {
                let answer = client
                    .post("/v1/chat/completions", &target.headers, &body)
                    .await
                    .map_err(|error| error.to_string())?;
                if answer.status == 200 {
                    return Ok(());
                }
                let log = tail(&self.router.errors(), 5);
                Err(format!(
                    "status {}: {}; {log}",
                    answer.status,
                    answer.text()
                ))
            })
            .await?;
        }
        wait::until("all workers are ready", SOON, async || {
            let view = self.admin.get_json("/v1/fleet").await;
            let view = view.map_err(|error| error.to_string())?;
            let workers = view["workers"].as_array().cloned().unwrap_or_default();
            let ready = workers.iter().filter(|worker| worker["state"] == "Ready");
            if ready.count() == 4 {
                Ok(())
            } else {
                Err(view.to_string())
            }
        })
        .await
    }
}

fn daemon(
    folder: &Path,
    name: &str,
    role: &str,
    server: &Listening,
    model: &Path,
) -> Result<Process> {
    let config = json!({
        "name": name, "pool": role.to_lowercase(), "role": role,
        "model": {"name": MODEL, "revision": "r1", "source": {"path": model}},
        "engine": {"type": "VLLM", "url": format!("http://{}", server.http), "blockSize": BLOCK_SIZE,
            "maxModelLength": MAX_LENGTH, "dtype": "BF16", "kvCacheDtype": "Auto", "quantization": "None",
            "connector": "Nixl", "sideChannel": server.side_channel, "startTimeoutSeconds": 60},
        "kvPool": {"leaseSeconds": 30},
        "topology": [{"level": "host", "domain": "here"}], "drainTimeoutSeconds": 5,
    });
    let file = folder.join(format!("{name}.json"));
    fs::write(&file, config.to_string())?;
    let home: PathBuf = folder.join(name);
    fs::create_dir(&home)?;
    let mut command = Command::new(program("baton-worker")?);
    command.args(["serve", "--config"]).arg(&file);
    for flag in ["--control", "--transfer", "--admin"] {
        command.args([flag, "127.0.0.1:0"]);
    }
    Process::start_command("baton-worker", &home, command)
}

/// Whether requests really went to two servers each, or to one: what was counted between two looks.
pub(crate) fn check_legs(split: bool, before: Counts, after: Counts) -> Result<()> {
    let whole = after.whole - before.whole;
    let pulls = after.pulls - before.pulls;
    let prefills = after.prefills - before.prefills;
    let rooms = after.rooms - before.rooms;
    let said = format!("{whole} whole, {prefills} prefills, {pulls} pulls, {rooms} legs of rooms");
    if split {
        ensure!(
            whole == 0 && prefills + pulls + rooms >= 2,
            "requests were not split: {said}"
        );
    } else {
        ensure!(
            whole > 0 && pulls + rooms == 0,
            "requests were split: {said}"
        );
    }
    Ok(())
}

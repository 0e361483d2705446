//! A running `baton up`: started, looked at, and ended with everything that it started.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::Signal;
use serde::Deserialize;
use serde_json::Value;
use tempfile::TempDir;

use crate::binaries::repository;
use crate::disaster::is_fresh;
use crate::http::Client;
use crate::idle;
use crate::manifest::Manifest;
use crate::metrics::Metrics;
use crate::process::{Process, runs, signal_process, tail};
use crate::wait;

/// The model is fetched and loaded within this; a machine that has neither is slow.
const READY: Duration = Duration::from_secs(300);

/// A clean end takes less: drains and a few processes, real servers of engines among them.
const ENDED: Duration = Duration::from_secs(90);

/// All metrics of a fleet are read within this, unless a process is frozen: it takes a connection and never answers.
const METRICS: Duration = Duration::from_secs(10);

/// One `baton up`. Call [`Fleet::end`] at the end of a test: what is dropped before prints what the processes wrote.
#[derive(Debug)]
pub struct Fleet {
    up: Process,
    /// The OpenAI API.
    pub api: Client,
    /// The router's admin address.
    pub admin: Client,
    folder: TempDir,
    /// Every process that was ever in `processes.json`.
    seen: Mutex<BTreeSet<u32>>,
    ended: bool,
}

/// A line of `processes.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Started {
    pub name: String,
    pub role: String,
    pub pid: u32,
    pub address: String,
}

impl Fleet {
    /// The fleet of `examples/quickstart.yaml`: the small real model.
    ///
    /// # Errors
    /// It does not become ready.
    pub async fn quickstart() -> Result<Self> {
        Self::up(&repository().join("examples/quickstart.yaml")).await
    }

    /// The same with more lines of its policy's `spec`, indented by two.
    ///
    /// # Errors
    /// It does not become ready.
    pub async fn quickstart_with(policy: &str) -> Result<Self> {
        let example = std::fs::read_to_string(repository().join("examples/quickstart.yaml"))?;
        let mode = "  mode: Conditional\n";
        ensure!(example.matches(mode).count() == 1, "{example}");
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("fleet.yaml");
        std::fs::write(&file, example.replace(mode, &format!("{mode}{policy}")))?;
        Self::start(folder, &file, &[]).await
    }

    /// A fleet of a test's own resources.
    ///
    /// # Errors
    /// It does not become ready.
    pub async fn of(manifest: &Manifest) -> Result<Self> {
        Self::of_with(manifest, &[]).await
    }

    /// The same with variables in the environment of every process.
    ///
    /// # Errors
    /// It does not become ready.
    pub async fn of_with(manifest: &Manifest, variables: &[(&str, &str)]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("fleet.yaml");
        std::fs::write(&file, manifest.text())?;
        Self::start(folder, &file, variables).await
    }

    /// The same over a state directory that something is done to first.
    ///
    /// # Errors
    /// That fails, or the fleet does not become ready.
    pub async fn prepared(
        manifest: &Manifest,
        prepare: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("fleet.yaml");
        std::fs::write(&file, manifest.text())?;
        let state = folder.path().join("state");
        std::fs::create_dir(&state)?;
        prepare(&state)?;
        Self::start(folder, &file, &[]).await
    }

    /// The fleet of a file.
    ///
    /// # Errors
    /// It does not become ready.
    pub async fn up(file: &Path) -> Result<Self> {
        Self::start(tempfile::tempdir()?, file, &[]).await
    }

    /// A fleet whose processes take long to start.
    ///
    /// # Errors
    /// It does not become ready within that time.
    pub async fn slow(text: &str, within: Duration, variables: &[(&str, &str)]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("fleet.yaml");
        std::fs::write(&file, text)?;
        let seconds = within.as_secs().to_string();
        let mut variables = variables.to_vec();
        variables.push(("BATON_READY_SECONDS", &seconds));
        Self::within(folder, &file, within, &variables).await
    }

    async fn start(folder: TempDir, file: &Path, variables: &[(&str, &str)]) -> Result<Self> {
        Self::within(folder, file, READY, variables).await
    }

    async fn within(
        folder: TempDir,
        file: &Path,
        patience: Duration,
        variables: &[(&str, &str)],
    ) -> Result<Self> {
        let state = folder.path().join("state");
        let arguments = [
            "up",
            "-f",
            path(file)?,
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
            "--state-dir",
            path(&state)?,
        ];
        let mut up = Process::start("baton", folder.path(), &arguments, variables)?;
        let ready = wait::until("baton up is ready", patience, async || {
            if let Some(status) = up.ended() {
                return Ok(Err(anyhow!("baton up ended with {status}")));
            }
            match ready_line(&up.output()) {
                Some(addresses) => Ok(Ok(addresses)),
                None => Err(tail(&up.output(), 5)),
            }
        })
        .await
        .and_then(|ready| ready);
        let (api, admin) = match ready {
            Ok(addresses) => addresses,
            Err(error) => {
                let told = format!("{}\n{}", tail(&up.errors(), 20), logs(&state));
                return Err(error.context(told));
            }
        };
        let fleet = Self {
            up,
            api: Client::new(api),
            admin: Client::new(admin),
            folder,
            seen: Mutex::default(),
            ended: false,
        };
        fleet.processes()?;
        Ok(fleet)
    }

    /// The state directory.
    pub fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    /// What `processes.json` holds now.
    ///
    /// # Errors
    /// It is not there, or not as documented.
    pub fn processes(&self) -> Result<Vec<Started>> {
        let file = self.state().join("processes.json");
        let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let started: Vec<Started> =
            serde_json::from_str(&text).with_context(|| format!("processes.json: {text}"))?;
        if let Ok(mut seen) = self.seen.lock() {
            seen.extend(started.iter().map(|process| process.pid));
        }
        Ok(started)
    }

    /// `GET /v1/fleet`.
    ///
    /// # Errors
    /// The router does not say.
    pub async fn view(&self) -> Result<Value> {
        self.admin.get_json("/v1/fleet").await
    }

    /// Workers of `GET /v1/fleet`, of one role or of all.
    ///
    /// # Errors
    /// The router does not say.
    pub async fn workers(&self, role: Option<&str>) -> Result<Vec<Value>> {
        let view = self.view().await?;
        let workers = view["workers"].as_array().context("no workers")?;
        Ok(workers
            .iter()
            .filter(|worker| {
                role.is_none_or(|role| {
                    worker["role"]
                        .as_str()
                        .is_some_and(|found| found.eq_ignore_ascii_case(role))
                })
            })
            .cloned()
            .collect())
    }

    /// The router's metrics.
    ///
    /// # Errors
    /// They cannot be read.
    pub async fn metrics(&self) -> Result<Metrics> {
        Metrics::parse(&self.admin.get("/metrics").await?.well()?.text())
    }

    /// The metrics of a worker that `baton up` has started, as its own process says them.
    ///
    /// # Errors
    /// They cannot be read.
    pub async fn worker_metrics(&self, name: &str) -> Result<Metrics> {
        let answer = self.worker_admin(name)?.get("/metrics").await?;
        Metrics::parse(&answer.well()?.text())
    }

    /// The card of the daemon beside a server, as it says it itself.
    ///
    /// # Errors
    /// It has none now.
    pub async fn worker_card(&self, name: &str) -> Result<Value> {
        self.worker_admin(name)?.get_json("/v1/card").await
    }

    fn worker_admin(&self, name: &str) -> Result<Client> {
        let file = self.state().join("logs").join(format!("{name}.log"));
        let log = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let admin = admin_of(&log).with_context(|| format!("{name} says no address: {log}"))?;
        Ok(Client::new(admin))
    }

    /// Waits until no worker runs, queues, leases or quarantines anything and the router serves nobody: as every worker has just reported
    /// it to the router, and by each one's own metrics.
    ///
    /// # Errors
    /// Something is left after that time, or a block was leaked.
    pub async fn idle(&self, within: Duration) -> Result<()> {
        wait::until("the fleet is idle", within, async || {
            let workers = self
                .workers(None)
                .await
                .map_err(|error| error.to_string())?;
            let stale = workers.iter().filter(|worker| !is_fresh(worker));
            let stale = stale.map(|worker| format!("{}: no fresh report: {worker}", worker["id"]));
            let occupied = workers.iter().filter_map(idle::occupied);
            let busy: Vec<String> = occupied.chain(stale).collect();
            if !busy.is_empty() || workers.is_empty() {
                return Err(busy.join("; "));
            }
            tokio::time::timeout(METRICS, self.says_idle())
                .await
                .map_err(|_| format!("metrics are not read within {METRICS:?}"))?
                .map_err(|error| format!("{error:#}"))
        })
        .await
    }

    /// That each process says so itself.
    async fn says_idle(&self) -> Result<()> {
        idle::router(&self.metrics().await?).context("router")?;
        let processes = self.processes()?;
        let mut workers = processes
            .iter()
            .filter(|process| matches!(process.role.as_str(), "prefill" | "decode"))
            .peekable();
        ensure!(workers.peek().is_some(), "no workers in {processes:?}");
        for worker in workers {
            let metrics = self.worker_metrics(&worker.name).await;
            metrics
                .and_then(|metrics| idle::worker(&metrics))
                .with_context(|| worker.name.clone())?;
        }
        Ok(())
    }

    /// What `baton up` has told the person who started it.
    pub fn notes(&self) -> String {
        self.up.errors()
    }

    /// Sends `baton up` a signal.
    pub fn signal(&mut self, signal: Signal) {
        self.up.signal(signal);
    }

    /// Ends it as Ctrl-C does; it must end well and leave no process behind.
    ///
    /// # Errors
    /// It ends badly, or something it started still runs.
    pub async fn end(mut self) -> Result<()> {
        self.processes()?;
        self.up.signal(Signal::INT);
        let status = self.up.wait(ENDED)?;
        let left: Vec<u32> = self.left();
        ensure!(
            status.success(),
            "baton up ended with {status}: {}",
            tail(&self.up.errors(), 5)
        );
        if !left.is_empty() {
            bail!("still running after baton up has ended: {left:?}");
        }
        self.ended = true;
        Ok(())
    }

    fn left(&self) -> Vec<u32> {
        let Ok(seen) = self.seen.lock() else {
            return Vec::new();
        };
        seen.iter().copied().filter(|pid| runs(*pid)).collect()
    }
}

impl Drop for Fleet {
    #[allow(clippy::print_stderr, reason = "what a failed test's processes wrote")]
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // Read once more: a child that was restarted meanwhile must not outlive the test.
        let _ = self.processes();
        self.up.signal(Signal::TERM);
        let _ = self.up.wait(ENDED);
        for pid in self.left() {
            signal_process(pid, Signal::KILL);
        }
        eprintln!("--- baton up\n{}", tail(&self.up.errors(), 20));
        eprintln!("{}", logs(&self.state()));
    }
}

/// Addresses in the line `ready http://HOST:PORT admin http://HOST:PORT`.
fn ready_line(output: &str) -> Option<(SocketAddr, SocketAddr)> {
    let line = output
        .lines()
        .find_map(|line| line.strip_prefix("ready "))?;
    let (api, admin) = line.split_once(" admin ")?;
    let address = |url: &str| url.trim().strip_prefix("http://")?.parse().ok();
    Some((address(api)?, address(admin)?))
}

/// The admin address in the last line `listening control ADDRESS transfer ADDRESS admin ADDRESS` of a worker's log.
fn admin_of(log: &str) -> Option<SocketAddr> {
    let mut lines = log.lines().rev();
    let line = lines.find(|line| line.starts_with("listening control "))?;
    let (_, admin) = line.rsplit_once(" admin ")?;
    admin.trim().parse().ok()
}

/// The ends of all logs of a state directory.
fn logs(state: &Path) -> String {
    let Ok(entries) = std::fs::read_dir(state.join("logs")) else {
        return String::new();
    };
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files
        .iter()
        .map(|file| {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            format!("--- {}\n{}\n", file.display(), tail(&text, 15))
        })
        .collect()
}

/// # Errors
/// The path is not text.
pub fn path(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("{} is no text", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ready_line_gives_both_addresses() {
        let output = "loading\nready http://127.0.0.1:8000 admin http://127.0.0.1:8001\n";
        let (api, admin) = ready_line(output).unwrap();
        assert_eq!((api.port(), admin.port()), (8000, 8001));
        assert_eq!(ready_line("ready"), None);
    }

    #[test]
    fn a_worker_is_asked_where_it_listens_now() {
        let line = |port: u16| format!("listening control h:1 transfer - admin 127.0.0.1:{port}\n");
        let log = format!(
            "INFO serving\n{}WARN a word\n{}INFO more\n",
            line(7),
            line(8)
        );
        assert_eq!(admin_of(&log).map(|address| address.port()), Some(8));
        assert_eq!(admin_of("INFO serving\n"), None);
    }
}

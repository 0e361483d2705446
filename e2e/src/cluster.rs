//! A real Kubernetes under test: started by `e2e/cluster/cluster` and ended with the value, or one that exists.
//!
//! - [`kubectl`]: the client, which is the real program.
//! - [`imagined`]: a node whose pods are processes of this machine. [`operated`]: the operator beside a control plane, [`two_pools`]: with
//!   something to do. [`faulty`]: a way to the API server that fails as told.
//! - [`existing`]: a cluster that is somebody's. [`helm`]: its charts. [`history`]: what happens to a pool's pods.
//! - [`installed`]: Baton on nodes, as its charts install it. [`load`]: clients that ask meanwhile. [`service`]: what follows its pods.
//! - `proxy`: the API server as plain HTTP, for what is asked all the time.
//!
//! `BATON_E2E_KUBECONFIG` names a cluster that exists: it is used, by one test at a time, and nothing of it is started or stopped.
//! Otherwise each value is a cluster of its own. A machine that cannot have one is told from a test that fails: [`Cluster::control_plane`] then says why on one
//! line and gives none. `BATON_IDLE_SECONDS`: see [`quiet`].

pub mod existing;
pub mod faulty;
pub mod helm;
pub mod history;
pub mod imagined;
pub mod installed;
pub mod kubectl;
pub mod load;
pub mod operated;
mod proxy;
pub mod service;
pub mod two_pools;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::binaries::repository;
use crate::http::Client;
use crate::skipped;
use existing::Existing;
use kubectl::Kubectl;

/// The variable that names the kubeconfig of a cluster that exists.
const EXISTING: &str = "BATON_E2E_KUBECONFIG";

/// A cluster, for as long as the value lives.
#[derive(Debug)]
pub enum Cluster {
    /// Started by this test, with all its state in a folder. Kept for its `Drop` too: the state must outlive what runs on it.
    Own { kubectl: Kubectl, folder: TempDir },
    /// It was there before.
    Existing(Box<Existing>),
}

impl Cluster {
    /// etcd and an API server: it takes objects and checks them. Whether anything comes of them is left to chance.
    ///
    /// # Errors
    /// It does not start.
    pub fn api_server() -> Result<Option<Self>> {
        match Self::existing() {
            Some(found) => found.map(Some),
            None => Self::started("api-server", 0),
        }
    }

    /// etcd, API server, controller-manager and scheduler; pods are scheduled onto nodes that a test makes up, and never run.
    ///
    /// # Errors
    /// It does not start.
    pub fn control_plane() -> Result<Option<Self>> {
        match Self::existing() {
            Some(found) => found.map(Some),
            None => Self::started("control-plane", 0),
        }
    }

    /// The same with nodes on which pods run, each with GPUs in its status and labels of its place.
    ///
    /// # Errors
    /// It does not start.
    pub fn with_nodes(count: usize) -> Result<Option<Self>> {
        match Self::existing() {
            Some(found) => found.map(Some),
            None => Self::started(kind(count), count),
        }
    }

    /// A cluster that may be broken on purpose, whose log of writes can be read, whose nodes a test may make up: never one that exists.
    ///
    /// # Errors
    /// It does not start.
    pub fn to_break(nodes: usize) -> Result<Option<Self>> {
        if exists() {
            skipped(
                "BATON_E2E_KUBECONFIG is set, and this test needs a cluster of its own: it breaks it, makes nodes up, or reads its log of writes",
            );
            return Ok(None);
        }
        Self::started(kind(nodes), nodes)
    }

    pub fn kubectl(&self) -> &Kubectl {
        match self {
            Self::Own { kubectl, .. } => kubectl,
            Self::Existing(existing) => existing.kubectl(),
        }
    }

    /// Whether this test has started it, and may do with its nodes what it wants.
    pub fn is_own(&self) -> bool {
        matches!(self, Self::Own { .. })
    }

    /// Where the state of a cluster of this test is: `logs/`, with `audit.jsonl` of every write.
    ///
    /// # Errors
    /// The cluster was there before: it keeps its state elsewhere.
    pub fn folder(&self) -> Result<&Path> {
        match self {
            Self::Own { folder, .. } => Ok(folder.path()),
            Self::Existing(_) => bail!("the cluster is not this test's own"),
        }
    }

    /// Where programs are that go before those of `PATH`.
    pub fn programs(&self) -> PathBuf {
        let folder = match self {
            Self::Own { folder, .. } => folder.path(),
            Self::Existing(existing) => existing.folder(),
        };
        folder.join("bin")
    }

    /// Asks the program for something that happens to a cluster of this test, such as `node-down`, and returns what it prints.
    ///
    /// # Errors
    /// It fails; the error is what the program says.
    pub fn program(&self, what: &str, arguments: &[&str]) -> Result<String> {
        program(&with_directory(what, self.folder()?, arguments)?)
    }

    /// Brings images onto every node of a cluster of this test; one that exists has to have them.
    ///
    /// # Errors
    /// A node does not take one.
    pub fn load(&self, images: &[PathBuf]) -> Result<()> {
        if self.is_own() {
            let images: Vec<_> = images.iter().map(|image| image.to_string_lossy()).collect();
            let images: Vec<&str> = images.iter().map(AsRef::as_ref).collect();
            self.program("load", &images)?;
        }
        Ok(())
    }

    /// Makes an image of a program, which lies at the path `inside` in it, and brings it onto every node of a cluster of this test.
    ///
    /// # Errors
    /// It is not made, or the cluster is not this test's own.
    pub fn load_program(&self, image: &str, built: &Path, inside: &str) -> Result<()> {
        let file = inside.trim_start_matches('/').replace('/', "-");
        let target = self.folder()?.join(format!("{file}.tar"));
        let (built, tar) = (built.to_string_lossy(), target.to_string_lossy());
        program(&["image", image, &built, inside, &tar])?;
        self.load(std::slice::from_ref(&target))
    }

    /// A client of a Service's port, from this machine.
    ///
    /// # Errors
    /// There is no such Service, or the cluster is not this test's own.
    pub fn expose(&self, name: &str, service: &str, port: &str) -> Result<Client> {
        let url = self.program("expose", &[name, service, port])?;
        let address = url.trim().strip_prefix("http://").context("no URL")?;
        Ok(Client::new(address.parse()?))
    }

    fn existing() -> Option<Result<Self>> {
        let kubeconfig = PathBuf::from(std::env::var_os(EXISTING)?);
        let found = Existing::find(&kubeconfig);
        Some(found.map(|existing| Self::Existing(Box::new(existing))))
    }

    fn started(kind: &str, nodes: usize) -> Result<Option<Self>> {
        if !possible(kind)? {
            return Ok(None);
        }
        let folder = tempfile::Builder::new()
            .prefix("baton-cluster-")
            .tempdir()?;
        let kubeconfig = up(nodes, std::process::id(), folder.path())?;
        let kubectl = folder.path().join("bin/kubectl");
        let kubectl = Kubectl::new(&kubectl, Path::new(kubeconfig.trim()));
        Ok(Some(Self::Own { kubectl, folder }))
    }

    /// Starts a control plane that is to end when that process does, and leaves it to itself. False where the machine cannot.
    ///
    /// # Errors
    /// It does not start.
    pub fn owned_by(process: u32, folder: &Path) -> Result<bool> {
        Ok(possible(kind(0))? && up(0, process, folder).map(|_| true)?)
    }
}

/// Whether tests are to use a cluster that exists.
fn exists() -> bool {
    std::env::var_os(EXISTING).is_some()
}

/// The archives of these images in `target/images`, or in the folder that `BATON_IMAGES` names. Nothing, after a line that says so,
/// where one is missing: not every machine can make them.
pub fn images(names: &[&str]) -> Option<Vec<PathBuf>> {
    let folder = std::env::var_os("BATON_IMAGES")
        .map_or_else(|| repository().join("target/images"), PathBuf::from);
    let archives = names.iter().map(|name| folder.join(format!("{name}.tar")));
    let archives: Vec<PathBuf> = archives.collect();
    if let Some(missing) = archives.iter().find(|archive| !archive.is_file()) {
        let missing = missing.display();
        skipped(&format!("{missing} is not there: run `make images`"));
        return None;
    }
    Some(archives)
}

/// For how long a test watches that nothing is written to a cluster at rest: `BATON_IDLE_SECONDS`, or 65 s, in which workers and routers
/// are asked again.
pub fn quiet() -> Duration {
    let seconds = std::env::var("BATON_IDLE_SECONDS");
    let seconds = seconds.ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(65))
}

/// What a cluster of so many nodes needs.
fn kind(nodes: usize) -> &'static str {
    if nodes == 0 { "control-plane" } else { "nodes" }
}

/// Whether this machine can have nodes, a control plane, an API server, or helm; where it cannot, the reason is on a line of its own.
fn possible(kind: &str) -> Result<bool> {
    let can = command(&["can", kind]).output()?;
    if !can.status.success() {
        let reason = String::from_utf8_lossy(&can.stdout);
        ensure!(
            !reason.trim().is_empty(),
            "e2e/cluster/cluster: {}",
            String::from_utf8_lossy(&can.stderr)
        );
        skipped(&format!("no {kind} on this machine: {}", reason.trim()));
    }
    Ok(can.status.success())
}

/// Starts it and returns the path of its kubeconfig.
fn up(nodes: usize, owner: u32, folder: &Path) -> Result<String> {
    let (nodes, owner) = (nodes.to_string(), owner.to_string());
    let arguments = ["--nodes", &nodes, "--owner", &owner];
    program(&with_directory("up", folder, &arguments)?)
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Self::Own { folder, .. } = self {
            // What went wrong is on standard error by then, and the guard that `up` started tries once more.
            let ended = with_directory("down", folder.path(), &[]).and_then(|all| program(&all));
            if let Err(error) = ended {
                skipped(&format!(
                    "the end of {}: {error:#}",
                    folder.path().display()
                ));
            }
        }
    }
}

fn with_directory<'a>(what: &'a str, folder: &'a Path, more: &[&'a str]) -> Result<Vec<&'a str>> {
    let folder = folder.to_str().context("a folder's name is not text")?;
    Ok([&[what, "--directory", folder], more].concat())
}

/// What the program prints; what it tells meanwhile goes where the test's own errors go.
fn program(arguments: &[&str]) -> Result<String> {
    let output = command(arguments)
        .stderr(Stdio::piped())
        .output()
        .context("cannot start e2e/cluster/cluster: it needs python3")?;
    if !output.status.success() {
        let what = arguments.first().copied().unwrap_or_default();
        bail!(
            "cluster {what}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(repository().join("e2e/cluster/cluster"));
    command.args(arguments).stdin(Stdio::null());
    command
}

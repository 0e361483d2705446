//! Baton on real nodes, as its charts install it: pools, a policy, a client of the router's Service.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::kubectl::{Kubectl, condition};
use super::{Cluster, service};
use crate::binaries::program;
use crate::http::Client;
use crate::metrics::Metrics;
use crate::record::Record;
use crate::wait;

/// The namespace that the charts are installed in, and that their router serves.
pub const NAMESPACE: &str = "baton";

/// A pool of the tiny model whose images are there has long been Ready, and a drain of idle workers has long ended.
pub const SOON: Duration = Duration::from_secs(120);

/// Records are written off the hot path: one may have its end a moment after its answer.
const RECORDED: Duration = Duration::from_secs(10);

/// A cluster with Baton on it.
#[derive(Debug)]
pub struct Installed {
    pub cluster: Cluster,
    /// Through the router's Service.
    pub api: Client,
}

impl Installed {
    /// Starts nodes, brings the images there, installs the charts; or installs them on a cluster that exists. `values` are of the chart
    /// `baton`, `name=value`.
    ///
    /// # Errors
    /// It does not start.
    pub async fn on_nodes(count: usize, values: &[&str]) -> Result<Option<Self>> {
        Self::on(|| Cluster::with_nodes(count), values).await
    }

    /// The same on nodes that may be broken: never on a cluster that exists.
    ///
    /// # Errors
    /// It does not start.
    pub async fn to_break(count: usize, values: &[&str]) -> Result<Option<Self>> {
        Self::on(|| Cluster::to_break(count), values).await
    }

    async fn on(
        start: impl FnOnce() -> Result<Option<Cluster>>,
        values: &[&str],
    ) -> Result<Option<Self>> {
        let names = ["baton-operator", "baton-router", "baton-worker"];
        // One that exists has its own.
        let images = if super::exists() {
            Some(Vec::new())
        } else {
            super::images(&names)
        };
        let Some(images) = images else {
            return Ok(None);
        };
        if !super::possible("helm")? {
            return Ok(None);
        }
        let Some(cluster) = start()? else {
            return Ok(None);
        };
        let api = if let Cluster::Existing(existing) = &cluster {
            existing.install(NAMESPACE, values)?;
            existing.service(NAMESPACE, "baton-router", "http")
        } else {
            cluster.load(&images)?;
            let set: Vec<&str> = values.iter().flat_map(|value| ["--set", value]).collect();
            let url = cluster.program("install", &set)?;
            let address = url.trim().strip_prefix("http://").context("no URL")?;
            Client::new(address.parse()?)
        };
        let baton = Self { cluster, api };
        baton.reachable().await?;
        Ok(Some(baton))
    }

    /// Waits until the Service leads to routers that answer, and to nothing else: it follows their pods a moment later.
    ///
    /// # Errors
    /// It does not in time.
    pub async fn reachable(&self) -> Result<()> {
        let what = "the Service leads to living routers alone";
        service::settled(what, SOON, self.api, "/v1/models", |_| Ok(())).await
    }

    pub fn kubectl(&self) -> &Kubectl {
        self.cluster.kubectl()
    }

    /// Applies a manifest in the namespace of the router.
    ///
    /// # Errors
    /// It is refused.
    pub fn apply(&self, manifest: &str) -> Result<String> {
        let namespace = format!("--namespace={NAMESPACE}");
        self.kubectl()
            .run_with(&["apply", &namespace, "--filename=-"], manifest)
    }

    /// kubectl in the namespace of the router.
    ///
    /// # Errors
    /// Its exit status is not zero; the error is what it said.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        let namespace = format!("--namespace={NAMESPACE}");
        self.kubectl().run(&[arguments, &[&namespace]].concat())
    }

    /// Objects of the namespace.
    ///
    /// # Errors
    /// There is no such kind.
    pub fn list(&self, arguments: &[&str]) -> Result<Vec<Value>> {
        let namespace = format!("--namespace={NAMESPACE}");
        self.kubectl().list(&[arguments, &[&namespace]].concat())
    }

    /// Waits until an object is as wanted; `look` returns what it misses.
    ///
    /// # Errors
    /// It is not in time.
    pub fn until<T>(
        &self,
        what: &str,
        arguments: &[&str],
        look: impl FnMut(&Value) -> Result<T, String>,
    ) -> Result<T> {
        let namespace = format!("--namespace={NAMESPACE}");
        let all = [arguments, &[&namespace]].concat();
        self.kubectl().until(what, SOON, &all, look)
    }

    /// Waits until every pool and policy is Ready for the generation that was applied last.
    ///
    /// # Errors
    /// One is not in time; the error is its conditions.
    pub fn ready(&self) -> Result<()> {
        for kind in ["prefillpools", "decodepools", "routepolicies"] {
            self.until(&format!("{kind} are Ready"), &[kind], |list| {
                let items = list["items"].as_array().cloned().unwrap_or_default();
                for item in items {
                    let current =
                        item["status"]["observedGeneration"] == item["metadata"]["generation"];
                    if condition(&item, "Ready").0 != "True" || !current {
                        return Err(format!("{}: {}", item["metadata"]["name"], item["status"]));
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Pods of a pool, without those that are on their way out.
    ///
    /// # Errors
    /// kubectl fails.
    pub fn workers(&self, pool: &str) -> Result<Vec<Value>> {
        let selector = format!("--selector=serving.baton.dev/pool={pool}");
        let mut pods = self.list(&["pods", &selector])?;
        pods.retain(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        Ok(pods)
    }

    /// What a worker says of itself: its last report of what it runs and holds.
    ///
    /// # Errors
    /// It does not answer.
    pub fn load(&self, worker: &str) -> Result<Value> {
        Ok(serde_json::from_str(&self.of(worker, 7002, "v1/load")?)?)
    }

    /// What a GET of a pod's port gives, through the API server.
    ///
    /// # Errors
    /// It does not answer with status 200.
    pub fn of(&self, pod: &str, port: u16, path: &str) -> Result<String> {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}:{port}/proxy/{path}");
        self.kubectl().run(&["get", "--raw", &path])
    }

    /// A worker holds nothing for a hand-off and has lost no block, by its report and by its metrics.
    ///
    /// # Errors
    /// It does, or does not answer.
    pub fn holds_nothing(&self, worker: &str) -> Result<()> {
        let load = self.load(worker)?;
        ensure!(load["leasesOpen"] == 0, "{worker}: {load}");
        let metrics = Metrics::parse(&self.of(worker, 7002, "metrics")?)?;
        for (name, labels) in [
            ("baton_kv_blocks", &[("state", "leased")][..]),
            ("baton_kv_blocks", &[("state", "quarantined")]),
            ("baton_kv_leaked_blocks", &[]),
        ] {
            // There it is, and it is zero.
            let blocks = metrics.sum(name, labels);
            ensure!(
                blocks == Some(0.0),
                "{worker}: {name} {labels:?} is {blocks:?}"
            );
        }
        Ok(())
    }

    /// The decision record of a run that has ended, as `kubectl baton explain` finds it among the routers.
    ///
    /// # Errors
    /// It finds none, or one without an end.
    pub fn explain(&self, run: &str) -> Result<Record> {
        let told = ["explain", run, "--namespace", NAMESPACE, "--output", "json"];
        wait::until_blocking(&format!("{run} is explained"), RECORDED, || {
            let record = self.baton(&told).and_then(|record| {
                let record: Value = serde_json::from_str(&record).context(record)?;
                Ok(Record(record))
            });
            let record = record.map_err(|error| format!("{error:#}"))?;
            match record.0["outcome"]["status"].is_string() {
                true => Ok(record),
                false => Err(format!("it has no end: {}", record.0)),
            }
        })
    }

    /// Calls the command as kubectl's plugin.
    ///
    /// # Errors
    /// It fails; the error is what it said.
    pub fn baton(&self, arguments: &[&str]) -> Result<String> {
        let programs = plugin(&self.cluster)?;
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{path}", programs.display());
        let output = self
            .kubectl()
            .command(&[])
            .env("PATH", path)
            .arg("baton")
            .args(arguments)
            .output()?;
        ensure!(
            output.status.success(),
            "kubectl baton {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// A folder with the command under test as a plugin of kubectl.
///
/// # Errors
/// The command is not built.
pub fn plugin(cluster: &Cluster) -> Result<PathBuf> {
    let programs = cluster.programs();
    let link = programs.join("kubectl-baton");
    let built = program("baton")?;
    if std::fs::read_link(&link).ok().as_deref() != Some(&built) {
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(&built, &link)?;
    }
    Ok(programs)
}

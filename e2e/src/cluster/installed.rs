//! Baton on real nodes, as its charts install it: pools, a policy, a client of the router's Service.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::kubectl::{Kubectl, condition};
use super::{Cluster, service};
use crate::binaries::program;
use crate::http::Client;
use crate::record::Record;

/// The namespace that the charts are installed in, and that their router serves.
pub const NAMESPACE: &str = "baton";

/// A pool of the tiny model whose images are there has long been Ready, and a drain of idle workers has long ended.
pub const SOON: Duration = Duration::from_secs(120);

/// A cluster with Baton on it.
#[derive(Debug)]
pub struct Installed {
    pub cluster: Cluster,
    /// Through the router's Service.
    pub api: Client,
}

impl Installed {
    /// Starts nodes, brings the images there, installs the charts. `values` are of the chart `baton`, `name=value`.
    ///
    /// # Errors
    /// It does not start.
    pub async fn on_nodes(count: usize, values: &[&str]) -> Result<Option<Self>> {
        let names = ["baton-operator", "baton-router", "baton-worker"];
        let Some(images) = super::images(&names) else {
            return Ok(None);
        };
        let Some(cluster) = Cluster::to_break(count)? else {
            return Ok(None);
        };
        cluster.load(&images)?;
        let set: Vec<&str> = values.iter().flat_map(|value| ["--set", value]).collect();
        let url = cluster.program("install", &set)?;
        let address = url.trim().strip_prefix("http://").context("no URL")?;
        let api = Client::new(address.parse()?);
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

    /// The decision record of a run, as `kubectl baton explain` finds it among the routers.
    ///
    /// # Errors
    /// It finds none.
    pub fn explain(&self, run: &str) -> Result<Record> {
        let output = self.baton(&["explain", run, "--namespace", NAMESPACE, "--output", "json"])?;
        Ok(Record(serde_json::from_str(&output).context(output)?))
    }

    /// Calls the command as kubectl's plugin.
    ///
    /// # Errors
    /// It fails; the error is what it said.
    pub fn baton(&self, arguments: &[&str]) -> Result<String> {
        let folder = self.cluster.folder()?.join("bin");
        let path = std::env::var("PATH").unwrap_or_default();
        let output = Command::new(folder.join("kubectl"))
            .env("KUBECONFIG", self.kubectl().kubeconfig())
            .env(
                "PATH",
                format!("{}:{path}", plugin(self.cluster.folder()?)?),
            )
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

/// A folder with kubectl and, as its plugin, the command under test.
fn plugin(state: &Path) -> Result<String> {
    let link = state.join("bin/kubectl-baton");
    let built = program("baton")?;
    if std::fs::read_link(&link).ok().as_deref() != Some(&built) {
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(&built, &link)?;
    }
    Ok(state.join("bin").to_string_lossy().into_owned())
}

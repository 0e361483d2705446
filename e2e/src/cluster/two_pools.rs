//! What tests of the operator roll from revision to revision: a decode and a prefill pool of tiny workers beside a control plane, and
//! what must hold at every step of the way.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use super::history::History;
use super::imagined::ImaginedNode;
use super::kubectl::condition;
use super::operated::Operated;
use crate::process::signal_process;

/// Of the decode pool; the prefill pool has one.
pub const REPLICAS: usize = 3;
/// Of them, at every step of a rollout: `REPLICAS - maxUnavailable`.
pub const LEAST: usize = REPLICAS - 1;
const NAMESPACE: &str = "tried";

/// A control plane with a namespace and a node.
#[derive(Debug)]
pub struct TwoPools {
    pub baton: Operated,
    _node: ImaginedNode,
}

impl TwoPools {
    /// Starts all but an operator; none where the machine cannot have a cluster.
    ///
    /// # Errors
    /// It does not start.
    pub fn start() -> Result<Option<Self>> {
        let Some(baton) = Operated::start()? else {
            return Ok(None);
        };
        baton.kubectl().run(&["create", "namespace", NAMESPACE])?;
        let folder = baton.cluster.folder()?.join("pods");
        std::fs::create_dir_all(&folder)?;
        let node = ImaginedNode::start(baton.kubectl(), "imagined", &folder)?;
        Ok(Some(Self { baton, _node: node }))
    }

    /// Applies the pools and their policy. Another number of blocks makes another revision.
    ///
    /// # Errors
    /// They are refused.
    pub fn apply(&self, blocks: u32) -> Result<()> {
        self.baton.kubectl().apply(&pools(blocks))?;
        Ok(())
    }

    /// Waits until both pools are ready for the generation that was applied last.
    ///
    /// # Errors
    /// One is not in time; the error is its status.
    pub fn ready(&self, within: Duration) -> Result<()> {
        for pool in ["decodepool/decode", "prefillpool/prefill"] {
            let what = format!("{pool} is ready");
            let all = [pool, "--namespace=tried"];
            self.baton.kubectl().until(&what, within, &all, |pool| {
                let current =
                    pool["status"]["observedGeneration"] == pool["metadata"]["generation"];
                match condition(pool, "Ready").0.as_str() {
                    "True" if current => Ok(()),
                    _ => Err(pool["status"].to_string()),
                }
            })?;
        }
        Ok(())
    }

    /// What happens to the decode pool's pods from here on.
    ///
    /// # Errors
    /// kubectl does not start.
    pub fn history(&self) -> Result<History> {
        History::start(self.baton.kubectl(), NAMESPACE, "decode")
    }

    /// # Errors
    /// kubectl fails.
    pub fn pods(&self, pool: &str) -> Result<Vec<Value>> {
        let selector = format!("--selector=serving.baton.dev/pool={pool}");
        let pods = ["pods", "--namespace=tried", &selector];
        self.baton.kubectl().list(&pods)
    }

    /// Stops the process in a pod of the pool and waits until its probe has noticed: it answers nobody any more, and does not end when asked.
    ///
    /// # Errors
    /// There is none, or nobody notices in time.
    pub fn freeze(&self, pool: &str, within: Duration) -> Result<()> {
        let pods = self.pods(pool)?;
        let pod = pods.first().context("the pool has no pod")?;
        let container = pod["status"]["containerStatuses"][0]["containerID"].as_str();
        let process = container.and_then(|id| id.strip_prefix("imagined://"));
        signal_process(
            process.context("a pod without a process")?.parse()?,
            Signal::STOP,
        );
        let name = pod["metadata"]["name"].as_str().unwrap_or_default();
        let all = ["pod", name, "--namespace=tried"];
        let what = format!("{name} is not Ready any more");
        self.baton.kubectl().until(&what, within, &all, |pod| {
            match condition(pod, "Ready").0.as_str() {
                "False" => Ok(()),
                _ => Err(pod["status"].to_string()),
            }
        })
    }

    /// Both pools have as many pods as they want, each pool's of one revision.
    ///
    /// # Errors
    /// They have not.
    pub fn rest(&self) -> Result<()> {
        for (pool, count) in [("decode", REPLICAS), ("prefill", 1)] {
            let pods = self.pods(pool)?;
            let revisions: Vec<&str> = pods
                .iter()
                .filter_map(|pod| pod["metadata"]["labels"]["serving.baton.dev/revision"].as_str())
                .collect();
            ensure!(
                pods.len() == count && revisions.iter().all(|revision| *revision == revisions[0]),
                "{pool} came to rest with {revisions:?}"
            );
        }
        Ok(())
    }

    /// Read from the log of every write: no pod is deleted twice, and no pool ever has more pods than it wants. Returns how many pods
    /// were made. Whoever has not heard the answer to a deletion may ask once more: it names the pod's uid, so it meets the same pod or
    /// none; `unheard` counts such answers by pod.
    ///
    /// # Errors
    /// One of it is not so.
    pub fn nothing_twice(&self, unheard: impl Fn(&str) -> usize) -> Result<usize> {
        let (writes, _) = self.baton.writes(0)?;
        let mut deleted: BTreeMap<&str, usize> = BTreeMap::new();
        let mut live: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let mut made = 0;
        for write in &writes {
            if write.resource != "pods" || !write.is_the_operators() || !write.has_succeeded() {
                continue;
            }
            let Some((pool, _)) = write.name.split_once('-') else {
                continue;
            };
            let pods = live.entry(pool).or_default();
            match write.verb.as_str() {
                "create" => {
                    made += 1;
                    pods.push(&write.name);
                    let most = if pool == "decode" { REPLICAS } else { 1 };
                    ensure!(
                        pods.len() <= most,
                        "{pool} has too many pods at once: {pods:?}"
                    );
                }
                "delete" => {
                    pods.retain(|name| *name != write.name);
                    let times = deleted.entry(&write.name).or_default();
                    *times += 1;
                    ensure!(
                        *times <= 1 + unheard(&write.name),
                        "{} was deleted twice",
                        write.name
                    );
                }
                _ => {}
            }
        }
        Ok(made)
    }
}

fn pools(blocks: u32) -> String {
    // Kubernetes looks at a namespace that is deleted again after half of its pods' grace period, which is little longer than a drain.
    let rollout = "{drainTimeoutSeconds: 30}";
    let spec = |replicas: usize| {
        format!(
            "{{replicas: {replicas}, model: {{name: tiny, source: {{uri: \"builtin://tiny?seed=7\"}}}}, engine: {{type: Builtin}}, kvPool: {{blocks: {blocks}}}, rollout: {rollout}}}"
        )
    };
    format!(
        "apiVersion: serving.baton.dev/v1alpha1\nkind: DecodePool\nmetadata: {{name: decode, namespace: tried}}\nspec: {}\n---\n\
         apiVersion: serving.baton.dev/v1alpha1\nkind: PrefillPool\nmetadata: {{name: prefill, namespace: tried}}\nspec: {}\n---\n\
         apiVersion: serving.baton.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {{name: tiny, namespace: tried}}\n\
         spec: {{model: tiny, prefillPools: [{{name: prefill}}], decodePools: [{{name: decode}}]}}\n",
        spec(REPLICAS),
        spec(1)
    )
}

//! What tests of the operator roll from revision to revision: a decode and a prefill pool of tiny workers beside a control plane, and
//! what must hold at every step of the way.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::NamedTempFile;

use super::imagined::ImaginedNode;
use super::kubectl::condition;
use super::operated::Operated;

/// Of the decode pool; the prefill pool has one.
pub const REPLICAS: usize = 3;
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

    /// # Errors
    /// kubectl fails.
    pub fn pods(&self, pool: &str) -> Result<Vec<Value>> {
        let selector = format!("--selector=serving.baton.dev/pool={pool}");
        let pods = ["pods", "--namespace=tried", &selector];
        self.baton.kubectl().list(&pods)
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
    let spec = |replicas: usize| {
        format!(
            "{{replicas: {replicas}, model: {{name: tiny, source: {{uri: \"builtin://tiny?seed=7\"}}}}, engine: {{type: Builtin}}, kvPool: {{blocks: {blocks}}}}}"
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

/// Everything that happens to pods, as a watch of the API server shows it.
#[derive(Debug)]
pub struct History {
    seen: NamedTempFile,
    watch: std::process::Child,
}

impl History {
    /// # Errors
    /// kubectl does not start.
    pub fn start(baton: &Operated) -> Result<Self> {
        let seen = NamedTempFile::new()?;
        let pools = "--selector=serving.baton.dev/pool";
        let all = ["get", "pods", "--watch", "--output-watch-events"];
        let watch = baton
            .kubectl()
            .command(&[&all[..], &["--output=json", "--namespace=tried", pools]].concat())
            .stdout(Stdio::from(seen.reopen()?))
            .spawn()?;
        Ok(Self { seen, watch })
    }

    /// Of the decode pool, at every step: as soon as all its replicas have served, whoever is taken out by the operator leaves at least
    /// `REPLICAS - maxUnavailable` behind. Returns how many were taken out.
    ///
    /// # Errors
    /// The floor was broken at a step, or the watch has seen none.
    pub fn floor_kept(mut self) -> Result<usize> {
        const LEAST: usize = REPLICAS - 1;
        self.watch.kill()?;
        self.watch.wait()?;
        let seen = std::fs::read(self.seen.path())?;
        // By name. Whoever was ready once and was not taken out since is available: what its probe says meanwhile is not the operator's.
        let mut available: BTreeSet<String> = BTreeSet::new();
        let mut taken = BTreeSet::new();
        let mut whole = false;
        for event in serde_json::Deserializer::from_slice(&seen).into_iter::<Value>() {
            // The last one may be cut off.
            let Ok(event) = event else { break };
            let pod = &event["object"];
            let name = pod["metadata"]["name"].as_str().context("a pod's name")?;
            if pod["metadata"]["labels"]["serving.baton.dev/pool"] != "decode" {
                continue;
            }
            let goes = event["type"] == "DELETED"
                || !pod["metadata"]["deletionTimestamp"].is_null()
                || condition(pod, "serving.baton.dev/draining").0 == "True";
            if goes && available.remove(name) {
                taken.insert(name.to_owned());
                ensure!(
                    !whole || available.len() >= LEAST,
                    "{name} was taken out, and only {available:?} are left"
                );
            } else if !goes && condition(pod, "Ready").0 == "True" {
                available.insert(name.to_owned());
                whole |= available.len() == REPLICAS;
            }
        }
        ensure!(whole, "the watch has never seen {REPLICAS} that serve");
        Ok(taken.len())
    }
}

impl Drop for History {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.watch.kill();
        let _ = self.watch.wait();
    }
}

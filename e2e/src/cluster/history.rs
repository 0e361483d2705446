//! Everything that happens to the pods of a pool, as a watch of the API server shows it: how many are there to serve at every step.

use std::collections::BTreeSet;
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::NamedTempFile;

use super::kubectl::{Kubectl, condition};
use crate::wait;

/// A watch that runs.
#[derive(Debug)]
pub struct History {
    seen: NamedTempFile,
    watch: Child,
}

/// What a watch has seen.
struct Steps {
    /// Whether as many as wanted have ever served at a time.
    whole: bool,
    /// How many were taken out.
    taken: usize,
}

impl History {
    /// Begins to watch the pods of a pool.
    ///
    /// # Errors
    /// kubectl does not start.
    pub fn start(kubectl: &Kubectl, namespace: &str, pool: &str) -> Result<Self> {
        let seen = NamedTempFile::new()?;
        let namespace = format!("--namespace={namespace}");
        let pool = format!("--selector=serving.baton.dev/pool={pool}");
        let all = ["get", "pods", "--watch", "--output-watch-events"];
        let watch = kubectl
            .command(&[&all[..], &["--output=json", &namespace, &pool]].concat())
            .stdout(Stdio::from(seen.reopen()?))
            .spawn()?;
        Ok(Self { seen, watch })
    }

    /// Waits until the watch has seen so many that serve: nothing that is done to them from then on is missed.
    ///
    /// # Errors
    /// It has not in time.
    pub fn has_seen(&self, replicas: usize, within: Duration) -> Result<()> {
        let what = format!("a watch sees {replicas} pods that serve");
        wait::until_blocking(&what, within, || {
            let steps = self.steps(replicas, 0);
            match steps.map_err(|error| format!("{error:#}"))?.whole {
                true => Ok(()),
                false => Err("fewer".to_owned()),
            }
        })
    }

    /// At every step: as soon as all replicas have served, whoever is taken out leaves at least so many behind. Returns how many were
    /// taken out.
    ///
    /// # Errors
    /// The floor was broken at a step, or the watch has seen none.
    pub fn floor_kept(mut self, replicas: usize, least: usize) -> Result<usize> {
        self.watch.kill()?;
        self.watch.wait()?;
        let steps = self.steps(replicas, least)?;
        ensure!(
            steps.whole,
            "the watch has never seen {replicas} that serve"
        );
        Ok(steps.taken)
    }

    fn steps(&self, replicas: usize, least: usize) -> Result<Steps> {
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
            let goes = event["type"] == "DELETED"
                || !pod["metadata"]["deletionTimestamp"].is_null()
                || condition(pod, "serving.baton.dev/draining").0 == "True";
            if goes && available.remove(name) {
                taken.insert(name.to_owned());
                ensure!(
                    !whole || available.len() >= least,
                    "{name} was taken out, and only {available:?} are left"
                );
            } else if !goes && condition(pod, "Ready").0 == "True" {
                available.insert(name.to_owned());
                whole |= available.len() == replicas;
            }
        }
        Ok(Steps {
            whole,
            taken: taken.len(),
        })
    }
}

impl Drop for History {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.watch.kill();
        let _ = self.watch.wait();
    }
}

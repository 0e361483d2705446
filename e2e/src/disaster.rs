//! Killing, freezing and waking the processes of a fleet, and waiting until they are back.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::fleet::{Fleet, Started};
use crate::process::{runs, signal_process};
use crate::record::Record;
use crate::wait;

/// A process is started again, registers, and is seen by the router within this.
const BACK: Duration = Duration::from_secs(60);

/// After a death nothing is held for longer than this: all that may follow one after the other, and nearly twice that for a busy machine.
/// It only bounds a wait.
pub const SETTLED: Duration = Duration::from_millis(
    // A dead peer's connection is noticed within five seconds.
    5_000
        // Leases of the manifests last three, and the reaper looks every quarter of that.
        + 3_000
        + 750
        // The router's longest pause before it watches a worker anew, and an idle worker's next report.
        + 1_000
        + 1_000
        // The busy machine.
        + 19_250,
);

/// Something of a fleet's worker shows within this.
const SEEN: Duration = Duration::from_secs(20);

/// What records and metrics call it when the worker that computes the prompt is lost: its own stream broke, or its reader noticed first.
const PREFILL_LOST: [&str; 6] = [
    "prefill-lost",
    "source-lost",
    "lease-gone",
    "stale",
    "partial",
    "timeout",
];
/// The same for the worker that generates.
const DECODE_LOST: [&str; 1] = ["decode-lost"];

/// A process that was killed, and the incarnation that died with it if it was a worker.
#[derive(Clone, Debug)]
#[must_use = "wait for it to be back"]
pub struct Killed {
    process: Started,
    incarnation: Option<Value>,
}

/// A process that was stopped and is woken when this is dropped, so that a failed test leaves nothing frozen.
#[derive(Debug)]
#[must_use = "it is woken when this is dropped"]
pub struct Frozen(Started);

impl Fleet {
    /// The only process of a role, or the first.
    ///
    /// # Errors
    /// There is none.
    pub fn first(&self, role: &str) -> Result<Started> {
        self.processes()?
            .into_iter()
            .find(|process| process.role == role)
            .with_context(|| format!("no {role} process"))
    }

    /// The process of that name. Workers go by the name of their process.
    ///
    /// # Errors
    /// There is none.
    pub fn named(&self, name: &str) -> Result<Started> {
        self.processes()?
            .into_iter()
            .find(|process| process.name == name)
            .with_context(|| format!("no process {name}"))
    }

    /// SIGKILL.
    ///
    /// # Errors
    /// The router does not say which incarnation dies; nothing is killed then.
    pub async fn kill(&self, process: Started) -> Result<Killed> {
        let incarnation = match process.role.as_str() {
            "router" => None,
            _ => self.incarnation(&process.name).await?,
        };
        signal_process(process.pid, Signal::KILL);
        Ok(Killed {
            process,
            incarnation,
        })
    }

    async fn incarnation(&self, worker: &str) -> Result<Option<Value>> {
        let workers = self.workers(None).await?;
        let found = workers.into_iter().find(|found| found["id"] == worker);
        Ok(found.map(|mut found| found["incarnation"].take()))
    }

    /// SIGSTOP.
    pub fn freeze(&self, process: Started) -> Frozen {
        signal_process(process.pid, Signal::STOP);
        Frozen(process)
    }

    /// Waits until a killed process runs again and, if it is a worker, is ready for the router in its new incarnation.
    ///
    /// # Errors
    /// It is not in time.
    pub async fn back(&self, killed: &Killed) -> Result<Started> {
        let before = &killed.process;
        wait::until(&format!("{} is back", before.name), BACK, async || {
            let text = |error: anyhow::Error| error.to_string();
            let now = self.named(&before.name).map_err(text)?;
            if now.pid == before.pid || !runs(now.pid) {
                return Err(format!("{now:?}"));
            }
            if now.role != "router" {
                let workers = self.workers(None).await.map_err(text)?;
                let ready = workers.iter().any(|worker| {
                    worker["id"] == before.name.as_str()
                        && Some(&worker["incarnation"]) != killed.incarnation.as_ref()
                        && is_fresh(worker)
                });
                if !ready {
                    return Err(format!("{workers:?}"));
                }
            }
            Ok(now)
        })
        .await
    }

    /// That a run's first plan was with this worker, that it was lost under it, and that the run went on without it. The record names the
    /// cause where a remote plan was given up for a local one; why one worker took another's place is in the router's log.
    ///
    /// # Errors
    /// It is otherwise.
    pub fn lost(&self, record: &Record, worker: &Started) -> Result<()> {
        let (role, name) = (worker.role.as_str(), worker.name.as_str());
        let causes: &[&str] = match role {
            "prefill" => &PREFILL_LOST,
            _ => &DECODE_LOST,
        };
        let told = &record.0;
        let first = record.chosen()?;
        ensure!(first[role] == name, "{name} was not in it: {first}");
        ensure!(record.attempts()? > 1, "it was not disturbed: {told}");
        let fallback = &told["fallback"]["cause"];
        ensure!(
            fallback.is_null() || causes.iter().any(|cause| fallback == cause),
            "given up for {fallback} when {name} was lost: {told}"
        );
        let later = told["laterDecisions"].as_array();
        let later = later.into_iter().flatten().find_map(|later| {
            let chosen = later["chosen"].as_u64()?;
            later["candidates"].get(usize::try_from(chosen).ok()?)
        });
        ensure!(
            later.is_some() || !fallback.is_null(),
            "nothing says how it went on: {told}"
        );
        if let Some(later) = later {
            ensure!(
                later["prefill"] != name && later["decode"] != name,
                "placed on {name} again: {later}"
            );
        }
        let states = told["states"].as_array().context("no states")?;
        let again = states
            .iter()
            .find(|entry| entry["attempt"] == 2 && entry["worker"] == name);
        ensure!(again.is_none(), "{name} did it again: {told}");
        let log = std::fs::read_to_string(self.state().join("logs/router.log"))?;
        let run = record.text("run");
        let of_run: Vec<&str> = log.lines().filter(|line| line.contains(run)).collect();
        let named = [format!("worker {name} "), format!("worker {name}:")];
        let is_told = of_run.iter().any(|line| {
            let why = causes
                .iter()
                .any(|cause| line.contains(&format!("cause={cause:?}")));
            why && named.iter().any(|name| line.contains(name.as_str()))
        });
        ensure!(is_told, "no word of {name} being lost: {of_run:?}");
        Ok(())
    }

    /// Waits until some worker of a role is as described, and gives its process.
    ///
    /// # Errors
    /// None is in time.
    pub async fn worker_that(
        &self,
        what: &str,
        role: &str,
        holds: impl Fn(&Value) -> bool,
    ) -> Result<Started> {
        let name = wait::until(what, SEEN, async || {
            let workers = self
                .workers(Some(role))
                .await
                .map_err(|error| error.to_string())?;
            workers
                .iter()
                .find(|worker| holds(worker))
                .and_then(|worker| worker["id"].as_str().map(str::to_owned))
                .ok_or_else(|| format!("{workers:?}"))
        })
        .await?;
        self.named(&name)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        signal_process(self.0.pid, Signal::CONT);
    }
}

/// A worker that is ready and has reported lately: what is said of it is of now, and not of before it was lost.
pub(crate) fn is_fresh(worker: &Value) -> bool {
    /// Reports come twice a second at least.
    const LATELY: f64 = 3_000.0;
    worker["state"] == "Ready"
        && worker["reportAgeMilliseconds"]
            .as_f64()
            .is_some_and(|age| age < LATELY)
}

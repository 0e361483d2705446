//! A second router over chosen workers of a fleet: the real ones, or stand-ins before them.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::fleet::{Fleet, path};
use crate::http::Client;
use crate::interposer::Interposer;
use crate::process::{Process, tail};
use crate::wait;

const SOON: Duration = Duration::from_secs(30);

/// A router with a policy of the fleet's and workers of its own choice.
#[derive(Debug)]
pub struct LoneRouter {
    // Ended before its folder goes.
    process: Process,
    folder: TempDir,
    pub api: Client,
    pub admin: Client,
}

/// Name and control address of the only worker of a role.
///
/// # Errors
/// There is none.
pub fn control(fleet: &Fleet, role: &str) -> Result<(String, String)> {
    let worker = fleet
        .processes()?
        .into_iter()
        .find(|process| process.role == role)
        .with_context(|| format!("no {role} worker"))?;
    Ok((worker.name, worker.address))
}

impl LoneRouter {
    /// Over the fleet's decode worker and these stand-ins.
    ///
    /// # Errors
    /// It does not start, or does not know all of them in time.
    pub async fn over(fleet: &Fleet, stand_ins: &[&Interposer]) -> Result<Self> {
        Self::with(fleet, stand_ins, &[]).await
    }

    /// The same with more flags.
    ///
    /// # Errors
    /// It does not start, or does not know all of them in time.
    pub async fn with(fleet: &Fleet, stand_ins: &[&Interposer], flags: &[&str]) -> Result<Self> {
        Self::start(fleet, &list(fleet, stand_ins)?, None, flags).await
    }

    /// Over all workers of the fleet, with a state folder that stays when it ends: the next one finds what it left.
    ///
    /// # Errors
    /// It does not start, or does not know all of them in time.
    pub async fn beside(fleet: &Fleet, state: &Path) -> Result<Self> {
        let workers = fleet.processes()?.into_iter();
        let workers = workers.filter(|process| matches!(&*process.role, "prefill" | "decode"));
        let workers: Vec<Value> = workers
            .map(|process| json!({"name": process.name, "control": process.address}))
            .collect();
        Self::start(fleet, &workers, Some(state), &[]).await
    }

    /// Over these stand-ins only.
    ///
    /// # Errors
    /// It does not start, or does not know all of them in time.
    pub async fn between(fleet: &Fleet, stand_ins: &[&Interposer]) -> Result<Self> {
        Self::start(fleet, &lines(stand_ins), None, &[]).await
    }

    async fn start(
        fleet: &Fleet,
        list: &[Value],
        state: Option<&Path>,
        flags: &[&str],
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let workers = folder.path().join("workers.json");
        std::fs::write(&workers, json!(list).to_string())?;
        let state = state.map_or_else(|| folder.path().join("state"), Path::to_owned);
        let policies = fleet.state().join("configuration/policies.json");
        let key = fleet.state().join("hash.key");
        let arguments = [
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
            "--policy-file",
            path(&policies)?,
            "--workers-file",
            path(&workers)?,
            "--state-dir",
            path(&state)?,
            "--hash-key-file",
            path(&key)?,
        ];
        let arguments = [&arguments, flags].concat();
        let mut process = Process::start("baton-router", folder.path(), &arguments, &[])?;
        let found = wait::until("the router listens", SOON, async || {
            // First: what it wrote last is in the text then.
            let ended = process.ended();
            let text = format!("{}{}", process.output(), process.errors());
            let address = |field: &str| {
                let (_, rest) = text.split_once(field)?;
                rest.split_whitespace().next()?.parse().ok()
            };
            match (address(" listen="), address(" admin=")) {
                (Some(api), Some(admin)) => Ok(Ok((Client::new(api), Client::new(admin)))),
                _ => match ended {
                    Some(status) => Ok(Err(anyhow!(
                        "the router ended with {status}: {}",
                        tail(&text, 5)
                    ))),
                    None => Err(tail(&text, 5)),
                },
            }
        });
        let (api, admin) = found.await.and_then(|found| found)?;
        let router = Self {
            process,
            folder,
            api,
            admin,
        };
        router.knows(list.len()).await?;
        Ok(router)
    }

    /// Takes other stand-ins instead.
    ///
    /// # Errors
    /// It does not know all of them in time.
    pub async fn take(&self, fleet: &Fleet, stand_ins: &[&Interposer]) -> Result<()> {
        let list = list(fleet, stand_ins)?;
        // Written beside and renamed, so that it is never read half.
        let partial: PathBuf = self.folder.path().join("workers.partial");
        std::fs::write(&partial, json!(list).to_string())?;
        std::fs::rename(&partial, self.folder.path().join("workers.json"))?;
        self.knows(list.len()).await
    }

    /// `GET /v1/fleet`.
    ///
    /// # Errors
    /// The router does not say.
    pub async fn view(&self) -> Result<Value> {
        self.admin.get_json("/v1/fleet").await
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn signal(&mut self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn wait(&mut self, within: Duration) -> Result<ExitStatus> {
        self.process.wait(within)
    }

    /// Everything that it wrote so far.
    pub fn whole_log(&self) -> String {
        format!("{}{}", self.process.output(), self.process.errors())
    }

    /// The end of what it wrote.
    pub fn log(&self) -> String {
        tail(&self.whole_log(), 20)
    }

    async fn knows(&self, count: usize) -> Result<()> {
        wait::until("the router knows its workers", SOON, async || {
            let view = self.view().await.map_err(|error| error.to_string())?;
            let workers = view["workers"].as_array().cloned().unwrap_or_default();
            let ready = |worker: &Value| worker["state"] == "Ready";
            if workers.len() == count && workers.iter().all(ready) {
                // Known is not enough: a model's tokenizer is fetched from its worker first.
                match self.admin.get("/readyz").await {
                    Ok(answer) if answer.status == 200 => Ok(()),
                    Ok(answer) => Err(answer.text()),
                    Err(error) => Err(error.to_string()),
                }
            } else {
                let seen = workers
                    .iter()
                    .map(|worker| format!("{} {}", worker["id"], worker["state"]));
                let seen: Vec<String> = seen.collect();
                Err(format!("{}\n{}", seen.join(", "), self.log()))
            }
        })
        .await
    }
}

/// Workers of `--workers-file`: the fleet's decode worker, and these.
fn list(fleet: &Fleet, stand_ins: &[&Interposer]) -> Result<Vec<Value>> {
    let (name, address) = control(fleet, "decode")?;
    let mut workers = vec![json!({"name": name, "control": address})];
    workers.extend(lines(stand_ins));
    Ok(workers)
}

fn lines(stand_ins: &[&Interposer]) -> Vec<Value> {
    let line = |stand_in: &&Interposer| json!({"name": stand_in.name, "control": stand_in.address.to_string()});
    stand_ins.iter().map(line).collect()
}

//! The disk of the state folder is full: requests are served, the loss is counted, and records are written again afterwards. A router that
//! starts on such a disk serves too, or says why it cannot.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::http::Client;
use baton_e2e::lone_router::LoneRouter;
use baton_e2e::manifest::Manifest;
use baton_e2e::metrics::Metrics;
use baton_e2e::openai::{Ask, Output};
use baton_e2e::record::Record;
use baton_e2e::{scenario, skipped, wait};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

const SOON: Duration = Duration::from_secs(20);

/// A state folder fits, the filling takes the rest. A router makes some twenty files.
const OPTIONS: &str = "size=1m,nr_inodes=200";

/// A small file system in memory, gone with this.
#[derive(Debug)]
struct SmallDisk(TempDir);

impl SmallDisk {
    /// None where this machine lets nobody mount.
    fn mount() -> Result<Option<Self>> {
        let folder = tempfile::tempdir()?;
        let made = Command::new("mount")
            .args(["-t", "tmpfs", "-o", OPTIONS, "baton-test"])
            .arg(folder.path())
            .output();
        let why = match made {
            Ok(made) if made.status.success() => return Ok(Some(Self(folder))),
            Ok(made) => String::from_utf8_lossy(&made.stderr).trim().to_owned(),
            Err(error) => error.to_string(),
        };
        skipped(&format!("no file system can be mounted here: {why}"));
        Ok(None)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn filling(&self, number: u32) -> PathBuf {
        self.path().join(format!("filling-{number}"))
    }

    /// Takes all bytes that are free, those in the last page of a log too.
    fn fill(&self) -> Result<()> {
        let mut files = vec![File::create(self.filling(0))?];
        for log in std::fs::read_dir(self.path().join("logs"))
            .into_iter()
            .flatten()
        {
            files.push(File::options().append(true).open(log?.path())?);
        }
        for mut file in files {
            while file.write_all(&[b' '; 512]).is_ok() {}
        }
        Ok(())
    }

    /// Takes all files that may still be made.
    fn fill_files(&self) -> Result<()> {
        for number in 1..1_000 {
            if File::create(self.filling(number)).is_err() {
                return Ok(());
            }
        }
        bail!("the disk takes any number of files");
    }

    /// Gives back what was taken.
    fn free(&self) -> Result<()> {
        for number in 0..1_000 {
            let file = self.filling(number);
            if file.exists() {
                std::fs::remove_file(file)?;
            }
        }
        Ok(())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a router may still have its file open when a test fails.
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

fn ask(salt: &str) -> Ask {
    let prompt: Vec<u32> = (3..90).collect();
    Ask::ids("tiny", &prompt, 8)
        .with("ignore_eos", true)
        .with("cache_salt", salt)
}

/// What a worker answers that computes everything itself.
async fn reference(fleet: &Fleet) -> Result<Output> {
    let answer = ask("reference").mode("Aggregated").send(&fleet.api).await?;
    ensure!(answer.output.output_tokens == 8, "{answer:?}");
    Ok(answer.output)
}

/// The run of a request that is handed over and answered with what is right.
async fn serve(api: &Client, salt: &str, right: &Output) -> Result<String> {
    let answer = ask(salt).mode("Disaggregated").send(api).await?;
    ensure!(
        answer.output == *right,
        "{salt}: {:?} instead of {right:?}",
        answer.output
    );
    Ok(answer.run)
}

/// Some requests; what is on no disk of them is still known, and says what happened. The last record.
async fn serve_some(api: &Client, admin: &Client, salt: &str, right: &Output) -> Result<Record> {
    let mut last = None;
    for index in 0..20 {
        let run = serve(api, &format!("{salt}-{index}"), right).await?;
        let record = Record::of(admin, &run).await?;
        record.check_order()?;
        last = Some(record);
    }
    last.context("no request")
}

async fn losses_are_counted(admin: &Client) -> Result<()> {
    wait::until("lost records are counted", SOON, async || {
        let told = |error: anyhow::Error| error.to_string();
        let answer = admin.get("/metrics").await.map_err(told)?;
        let metrics = Metrics::parse(&answer.text()).map_err(told)?;
        let lost = metrics.count("baton_record_overflow_total", &[]);
        (lost > 0.0).then_some(()).ok_or(format!("{lost} are"))
    })
    .await
}

/// Waits until a run's record is a whole line of a record file.
async fn is_written(state: &Path, run: &str) -> Result<()> {
    let folder = state.join("decisions");
    let lines = || -> Result<String> {
        let mut text = String::new();
        for entry in std::fs::read_dir(&folder)? {
            // A line that was cut may end within a letter.
            text.push_str(&String::from_utf8_lossy(&std::fs::read(entry?.path())?));
        }
        Ok(text)
    };
    wait::until("the record is written", SOON, async || {
        let text = lines().map_err(|error| error.to_string())?;
        let whole = |line: &str| serde_json::from_str::<Value>(line).is_ok();
        let mut mine = text.lines().filter(|line| line.contains(run));
        let found = mine.any(whole);
        found.then_some(()).ok_or(text)
    })
    .await
}

/// How many are kept, whole, of the two that a record names by digest: its policy and its coefficients.
async fn named_and_kept(admin: &Client, record: &Record) -> Result<usize> {
    let policy = record.0["policy"]["digest"].as_str().context("policy")?;
    let coefficients = record.text("coefficients");
    let mut kept = 0;
    for path in [
        format!("/v1/policies/{policy}"),
        format!("/v1/coefficients/{coefficients}"),
    ] {
        let answer = admin.get(&path).await?;
        match answer.status {
            200 => {
                answer.json().context(path)?;
                kept += 1;
            }
            404 => {}
            other => bail!("{path}: {other}: {}", answer.text()),
        }
    }
    Ok(kept)
}

/// Everything is on one disk: records, artifacts, configuration, and the logs of all processes, which have nowhere to complain.
#[test]
fn a_full_state_disk_costs_records_and_no_request() {
    scenario(async {
        let Some(disk) = SmallDisk::mount()? else {
            return Ok(());
        };
        let fleet = Fleet::prepared(&Manifest::tiny(), |state| {
            std::fs::remove_dir(state)?;
            Ok(std::os::unix::fs::symlink(disk.path(), state)?)
        })
        .await?;
        let right = reference(&fleet).await?;
        let first = serve(&fleet.api, "first", &right).await?;
        is_written(disk.path(), &first).await?;

        disk.fill()?;
        serve_some(&fleet.api, &fleet.admin, "full", &right).await?;
        losses_are_counted(&fleet.admin).await?;
        fleet.idle(SOON).await?;

        disk.free()?;
        let last = serve(&fleet.api, "last", &right).await?;
        is_written(disk.path(), &last).await?;
        let record = Record::of(&fleet.admin, &last).await?;
        let kept = named_and_kept(&fleet.admin, &record).await?;
        ensure!(kept == 2, "{kept} of what it names are kept");
        fleet.end().await
    });
}

/// The fleet's own disk has room: only a second router's has not, from before its first record.
#[test]
fn a_router_that_starts_on_a_full_disk_serves_or_says_why_not() {
    scenario(async {
        let Some(disk) = SmallDisk::mount()? else {
            return Ok(());
        };
        let fleet = Fleet::of(&Manifest::tiny()).await?;
        let right = reference(&fleet).await?;
        let mut router = LoneRouter::beside(&fleet, disk.path()).await?;
        disk.fill()?;
        for start in ["first", "second"] {
            let record = serve_some(&router.api, &router.admin, start, &right).await?;
            losses_are_counted(&router.admin).await?;
            let kept = named_and_kept(&router.admin, &record).await?;
            ensure!(kept == 0, "the disk is full, and {kept} are kept");
            router.signal(Signal::KILL);
            router.wait(SOON)?;
            if start == "first" {
                let again = LoneRouter::beside(&fleet, disk.path()).await;
                router = again.context("again, on a full disk")?;
            }
        }

        disk.fill_files()?;
        let refused = match LoneRouter::beside(&fleet, disk.path()).await {
            Ok(_) => bail!("it starts where no file can be made"),
            Err(error) => format!("{error:#}"),
        };
        let state = disk.path().display().to_string();
        for part in [
            "state folder",
            &state,
            "No space left on device",
            "--state-dir",
        ] {
            ensure!(refused.contains(part), "{part}: {refused}");
        }

        disk.free()?;
        let router = LoneRouter::beside(&fleet, disk.path()).await?;
        let last = serve(&router.api, "last", &right).await?;
        is_written(disk.path(), &last).await?;
        let record = Record::of(&router.admin, &last).await?;
        let kept = named_and_kept(&router.admin, &record).await?;
        ensure!(kept == 2, "{kept} of what it names are kept");
        drop(router);
        fleet.end().await
    });
}

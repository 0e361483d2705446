//! The disk of the state folder is full: requests are served, the loss is counted, and records are written again afterwards.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::Ask;
use baton_e2e::record::Record;
use baton_e2e::{scenario, skipped, wait};

const SOON: Duration = Duration::from_secs(20);

/// Some records fit, the filling takes the rest.
const SIZE: &str = "size=128k";

/// A small file system in memory, gone with this.
#[derive(Debug)]
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let made = Command::new("mount")
            .args(["-t", "tmpfs", "-o", SIZE, "baton-test"])
            .arg(folder)
            .output()
            .context("mount")?;
        ensure!(
            made.status.success(),
            "{}",
            String::from_utf8_lossy(&made.stderr).trim()
        );
        Ok(Self(folder.to_owned()))
    }

    fn filling(&self) -> PathBuf {
        self.0.join("filling")
    }

    /// Takes all that is free.
    fn fill(&self) -> Result<()> {
        use std::io::Write as _;
        let mut file = std::fs::File::create(self.filling())?;
        while file.write_all(&[0; 512]).is_ok() {}
        Ok(())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: the router may still have its file open when a test fails.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

async fn serve(fleet: &Fleet, salt: &str) -> Result<String> {
    let prompt: Vec<u32> = (3..90).collect();
    let answer = Ask::ids("tiny", &prompt, 4)
        .with("ignore_eos", true)
        .with("cache_salt", salt)
        .mode("Disaggregated")
        .send(&fleet.api)
        .await?;
    ensure!(answer.output.output_tokens == 4, "{answer:?}");
    Ok(answer.run)
}

/// Runs in the record files.
fn written(folder: &Path) -> Result<String> {
    let mut text = String::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "jsonl")
        {
            text.push_str(&std::fs::read_to_string(path)?);
        }
    }
    Ok(text)
}

#[test]
fn a_full_state_disk_costs_records_and_no_request() {
    scenario(async {
        let mut disk = None;
        let fleet = Fleet::prepared(&Manifest::tiny(), |state| {
            disk = SmallDisk::mount(&state.join("decisions"))
                .map_err(|error| skipped(&format!("no file system can be mounted here: {error:#}")))
                .ok();
            Ok(())
        })
        .await?;
        let Some(disk) = disk else {
            return fleet.end().await;
        };
        let folder = fleet.state().join("decisions");
        let first = serve(&fleet, "first").await?;
        wait::until("the first record is written", SOON, async || {
            let text = written(&folder).map_err(|error| error.to_string())?;
            text.contains(&first).then_some(()).ok_or(text)
        })
        .await?;

        disk.fill()?;
        for index in 0..40 {
            let run = serve(&fleet, &format!("full-{index}")).await?;
            // What is on no disk is still known, and says what happened.
            Record::of(&fleet.admin, &run).await?.check_order()?;
        }
        wait::until("lost records are counted", SOON, async || {
            let metrics = fleet.metrics().await.map_err(|error| error.to_string())?;
            let lost = metrics.count("baton_record_overflow_total", &[]);
            (lost > 0.0).then_some(()).ok_or(format!("{lost} are"))
        })
        .await?;
        fleet.idle(SOON).await?;

        std::fs::remove_file(disk.filling())?;
        let last = serve(&fleet, "last").await?;
        wait::until("records are written again", SOON, async || {
            let text = written(&folder).map_err(|error| error.to_string())?;
            let lines_are_whole = text
                .lines()
                .filter(|line| line.contains(&last))
                .any(|line| serde_json::from_str::<serde_json::Value>(line).is_ok());
            lines_are_whole.then_some(()).ok_or(text)
        })
        .await?;
        fleet.end().await
    });
}

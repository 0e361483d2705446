//! What the command makes of a fleet's records: explained, replayed, tampered with, replayed under another policy.

use std::path::PathBuf;
use std::process::Output;

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::{binaries, wait};
use serde_json::Value;

use super::{MODEL, SOON};

async fn command(arguments: &[&str]) -> Result<Output> {
    let program = binaries::program("baton")?;
    let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
    Ok(tokio::task::spawn_blocking(move || {
        std::process::Command::new(program).args(arguments).output()
    })
    .await??)
}

fn command_now(arguments: &[&str]) -> Result<Output> {
    Ok(std::process::Command::new(binaries::program("baton")?)
        .args(arguments)
        .output()?)
}

fn told(output: &Output) -> String {
    format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

pub(crate) async fn explain_prints_what_a_person_reads(fleet: &Fleet, run: &str) -> Result<()> {
    let state = fleet.state();
    let state = state.to_str().context("state directory")?;
    let admin = fleet.admin.address().to_string();
    for place in [["--state-dir", state], ["--admin", &admin]] {
        let output = command(&["explain", run, place[0], place[1]]).await?;
        let text = told(&output);
        ensure!(output.status.code() == Some(0), "{text}");
        for word in [
            "Remote", "Local", "prefill", "transfer", "queue", "estimate", "actual",
        ] {
            ensure!(
                text.to_lowercase().contains(&word.to_lowercase()),
                "{word} is not in\n{text}"
            );
        }
        let output = command(&["explain", run, place[0], place[1], "--output", "json"]).await?;
        let parsed: Value =
            serde_json::from_slice(&output.stdout).with_context(|| told(&output))?;
        ensure!(parsed["run"] == run, "{parsed}");
    }
    let output = command(&["explain", "no-such-run", "--state-dir", state]).await?;
    ensure!(output.status.code() == Some(2), "{}", told(&output));
    Ok(())
}

fn record_files(fleet: &Fleet) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(fleet.state().join("decisions"))? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "jsonl")
        {
            files.push(path);
        }
    }
    ensure!(!files.is_empty(), "no record files");
    Ok(files)
}

fn replay(files: &[PathBuf], more: &[&str]) -> Result<Output> {
    let mut arguments = vec!["replay"];
    for file in files {
        arguments.push(file.to_str().context("file name")?);
    }
    arguments.extend_from_slice(more);
    command_now(&arguments)
}

pub(crate) fn replay_reproduces_every_record(fleet: &Fleet) -> Result<()> {
    let files = record_files(fleet)?;
    let records = || {
        let texts = files.iter().map(std::fs::read_to_string);
        texts
            .map(|text| text.map(|text| text.lines().count()))
            .sum()
    };
    // The runs whose clients went are over, and their records may still come.
    let what = "the records replayed are those that there are";
    let (records, output) = wait::until_blocking(what, SOON, || {
        let before: std::io::Result<usize> = records();
        let output = replay(&files, &["--output", "json"]);
        match (before, output, records()) {
            (Ok(before), Ok(output), Ok(after)) if before == after => Ok((before, output)),
            other => Err(format!("{other:?}")),
        }
    })?;
    let text = told(&output);
    ensure!(output.status.code() == Some(0), "{text}");
    let replayed: Value = serde_json::from_slice(&output.stdout).context(text)?;
    ensure!(
        records >= 4 && replayed["records"] == records && replayed["same"] == records,
        "{records} records: {replayed}"
    );
    Ok(())
}

/// What was decided does not follow from what is recorded any more.
pub(crate) fn a_tampered_record_is_found(fleet: &Fleet) -> Result<()> {
    let files = record_files(fleet)?;
    let text = std::fs::read_to_string(&files[0])?;
    for field in ["prefill", "queue"] {
        let mut lines: Vec<Value> = text
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<_, _>>()?;
        let record = lines.last_mut().context("no record")?;
        let chosen = record["chosen"].as_u64().context("nothing was chosen")?;
        let term = &mut record["candidates"][usize::try_from(chosen)?]["terms"][field];
        let was = term.as_f64().context("no such term")?;
        *term = (was + 0.001).into();
        let folder = fleet.state().join("decisions");
        let file = folder.join("tampered.jsonl");
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&file, text)?;
        let output = replay(std::slice::from_ref(&file), &[]);
        std::fs::remove_file(&file)?;
        let output = output?;
        ensure!(
            output.status.code() == Some(1),
            "{field} was {was}, a thousandth more is not noticed: {}",
            told(&output)
        );
    }
    Ok(())
}

pub(crate) fn another_policy_names_what_would_move(fleet: &Fleet, remote: &str) -> Result<()> {
    let file = fleet.state().join("aggregated.yaml");
    std::fs::write(
        &file,
        format!(
            "apiVersion: serving.baton.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {{name: aggregated}}\nspec:\n  \
             model: {MODEL}\n  prefillPools: [{{name: prefill}}]\n  decodePools: [{{name: decode}}]\n  mode: Aggregated\n"
        ),
    )?;
    let output = replay(
        &record_files(fleet)?,
        &["--policy", file.to_str().context("file name")?],
    )?;
    let text = told(&output);
    ensure!(output.status.code() == Some(0), "{text}");
    ensure!(
        text.contains(remote),
        "{remote} would have stayed local, but is not named:\n{text}"
    );
    Ok(())
}

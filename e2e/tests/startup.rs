//! What cannot start says so: one clear line, a status that is not zero, nothing left running.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::binaries;
use baton_e2e::manifest::Manifest;
use baton_e2e::process::{Process, runs, tail};

/// Loading a model and giving up on it takes less.
const SOON: Duration = Duration::from_secs(120);

/// How `baton up` ended on a manifest that it cannot serve.
struct Refusal {
    code: Option<i32>,
    /// Standard error.
    said: String,
    /// Standard output.
    shown: String,
}

impl Refusal {
    /// The status is this one, the message holds all of these, and it is one line that a person can act on.
    fn expect(&self, code: i32, words: &[&str]) -> Result<()> {
        let told = format!("status {:?}\n{}\n{}", self.code, self.shown, self.said);
        ensure!(
            self.code == Some(code),
            "status {code} was expected: {told}"
        );
        let lines: Vec<&str> = self
            .said
            .lines()
            .filter(|line| {
                words
                    .iter()
                    .all(|word| line.to_lowercase().contains(&word.to_lowercase()))
            })
            .collect();
        ensure!(!lines.is_empty(), "no line with all of {words:?}: {told}");
        ensure!(
            !self.said.contains("panicked") && !self.said.contains("backtrace"),
            "not a message for people: {told}"
        );
        ensure!(
            !self.shown.contains("ready http"),
            "it said that it is ready: {told}"
        );
        Ok(())
    }
}

fn up(folder: &Path, manifest: &str, more: &[&str]) -> Result<Refusal> {
    let file = folder.join("fleet.yaml");
    std::fs::write(&file, manifest)?;
    let state = folder.join("state");
    let mut arguments = vec!["up", "-f", text(&file)?, "--state-dir", text(&state)?];
    arguments.extend_from_slice(more);
    for (flag, address) in [("--listen", "127.0.0.1:0"), ("--admin", "127.0.0.1:0")] {
        if !more.contains(&flag) {
            arguments.extend_from_slice(&[flag, address]);
        }
    }
    let mut process = Process::start("baton", folder, &arguments, &[])?;
    let status = process
        .wait(SOON)
        .with_context(|| format!("{}\n{}", process.output(), tail(&process.errors(), 20)))?;
    let refusal = Refusal {
        code: status.code(),
        said: process.errors(),
        shown: process.output(),
    };
    nothing_runs(&state)?;
    Ok(refusal)
}

/// Whatever is still in the table of processes has ended.
fn nothing_runs(state: &Path) -> Result<()> {
    let Ok(table) = std::fs::read_to_string(state.join("processes.json")) else {
        return Ok(());
    };
    let table: serde_json::Value = serde_json::from_str(&table)?;
    for process in table.as_array().into_iter().flatten() {
        let pid = u32::try_from(process["pid"].as_u64().context("no pid")?)?;
        ensure!(!runs(pid), "{process} still runs");
    }
    Ok(())
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is no text")
}

fn tiny(change: impl FnOnce(&mut Manifest)) -> String {
    let mut manifest = Manifest::tiny();
    change(&mut manifest);
    manifest.text()
}

#[test]
fn a_port_in_use_is_named() -> Result<()> {
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    for flag in ["--listen", "--admin"] {
        let folder = tempfile::tempdir()?;
        up(folder.path(), &tiny(|_| ()), &[flag, &address])?.expect(1, &[&address, "in use"])?;
    }
    Ok(())
}

#[test]
fn a_missing_model_file_is_named() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let manifest = tiny(|manifest| manifest.source = "hostPath: /nowhere/model.gguf".to_owned());
    let refusal = up(folder.path(), &manifest, &[])?;
    ensure!(
        refusal.code.is_some_and(|code| code != 0),
        "{:?}: {}",
        refusal.code,
        refusal.said
    );
    refusal.expect(refusal.code.unwrap_or(0), &["/nowhere/model.gguf"])
}

#[test]
fn a_corrupt_model_file_is_named_with_what_is_wrong() -> Result<()> {
    for (name, bytes) in [
        ("empty.gguf", Vec::new()),
        ("text.gguf", b"this is no model".repeat(64)),
        // The right magic and version, then more tensors than any file holds.
        ("short.gguf", [&b"GGUF\x03\0\0\0"[..], &[0xff; 64]].concat()),
    ] {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join(name);
        std::fs::write(&file, bytes)?;
        let manifest =
            tiny(|manifest| manifest.source = format!("hostPath: \"{}\"", file.display()));
        let refusal = up(folder.path(), &manifest, &[])?;
        ensure!(
            refusal.code.is_some_and(|code| code != 0),
            "{name}: {:?}",
            refusal.code
        );
        refusal
            .expect(refusal.code.unwrap_or(0), &[name])
            .context(name)?;
    }
    Ok(())
}

#[test]
fn too_little_memory_for_one_sequence_is_said_with_what_is_needed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let manifest = tiny(|manifest| manifest.kv_pool = "{blocks: 2}".to_owned());
    let refusal = up(folder.path(), &manifest, &[])?;
    ensure!(
        refusal.code.is_some_and(|code| code != 0),
        "{:?}: {}",
        refusal.code,
        refusal.said
    );
    refusal.expect(refusal.code.unwrap_or(0), &["kvPool"])
}

#[test]
fn more_memory_than_there_is_is_said_with_how_much() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let manifest = tiny(|manifest| manifest.kv_pool = "{bytes: 1125899906842624}".to_owned());
    let refusal = up(folder.path(), &manifest, &[])?;
    ensure!(
        refusal.code.is_some_and(|code| code != 0),
        "{:?}: {}",
        refusal.code,
        refusal.said
    );
    refusal.expect(refusal.code.unwrap_or(0), &["kvPool"])
}

#[test]
fn a_state_folder_that_cannot_be_written_is_named() -> Result<()> {
    let folder = tempfile::tempdir()?;
    // A file where the folder should be: nobody can make a folder of it, root neither.
    std::fs::write(folder.path().join("state"), "")?;
    let refusal = up(folder.path(), &tiny(|_| ()), &[])?;
    let state = folder.path().join("state");
    ensure!(
        refusal.code.is_some_and(|code| code != 0),
        "{:?}: {}",
        refusal.code,
        refusal.said
    );
    refusal.expect(refusal.code.unwrap_or(0), &[text(&state)?])
}

#[test]
fn a_mistake_in_a_manifest_is_named_by_file_line_and_path() -> Result<()> {
    for (wrong, right, line, words) in [
        (
            "  replica: 1\n",
            "  replicas: 1\n",
            5,
            ["spec.replica", "replicas"],
        ),
        (
            "  replicas: -1\n",
            "  replicas: 1\n",
            5,
            ["spec.replicas", "-1"],
        ),
        (
            "  pooling: Loose\n",
            "  pooling: Strict\n",
            0,
            ["spec.pooling", "Strict"],
        ),
    ] {
        let folder = tempfile::tempdir()?;
        let text = tiny(|_| ());
        let manifest = text.replacen(right, wrong, 1);
        ensure!(manifest != text, "{right} is not in the manifest");
        let place = if line == 0 {
            "fleet.yaml:".to_owned()
        } else {
            format!("fleet.yaml:{line}")
        };
        up(folder.path(), &manifest, &[])?.expect(2, &[&place, words[0], words[1]])?;
    }
    Ok(())
}

#[test]
fn wrong_usage_ends_with_two() -> Result<()> {
    for arguments in [&["up"][..], &["up", "-f", "/nowhere.yaml"], &["dance"]] {
        let output = Command::new(binaries::program("baton")?)
            .args(arguments)
            .output()?;
        ensure!(output.status.code() == Some(2), "{arguments:?}: {output:?}");
    }
    for program in ["baton-router", "baton-worker"] {
        let output = Command::new(binaries::program(program)?)
            .arg("--nonsense")
            .output()?;
        ensure!(output.status.code() == Some(2), "{program}: {output:?}");
    }
    Ok(())
}

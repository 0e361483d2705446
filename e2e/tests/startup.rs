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

/// How a program alone ended: it must end by itself.
fn alone(program: &str, folder: &Path, arguments: &[&str]) -> Result<Refusal> {
    let mut process = Process::start(program, folder, arguments, &[])?;
    let status = process.wait(SOON)?;
    Ok(Refusal {
        code: status.code(),
        said: process.errors(),
        shown: process.output(),
    })
}

fn worker(folder: &Path, source: &serde_json::Value, more: &[&str]) -> Result<Refusal> {
    let config = serde_json::json!({
        "name": "w", "pool": "decode", "role": "Decode",
        "model": {"name": "tiny", "source": source},
        "engine": {"type": "Builtin"},
        "kvPool": {"blocks": 64},
    });
    let file = folder.join("worker.json");
    std::fs::write(&file, config.to_string())?;
    let mut arguments = vec!["serve", "--config", text(&file)?];
    arguments.extend_from_slice(more);
    for flag in ["--control", "--transfer", "--admin"] {
        if !more.contains(&flag) {
            arguments.extend_from_slice(&[flag, "127.0.0.1:0"]);
        }
    }
    alone("baton-worker", folder, &arguments)
}

#[test]
fn a_worker_names_the_port_that_is_in_use() -> Result<()> {
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let tiny = serde_json::json!({"builtin": {"name": "tiny", "seed": 1}});
    for flag in ["--control", "--transfer", "--admin"] {
        let folder = tempfile::tempdir()?;
        worker(folder.path(), &tiny, &[flag, &address])?.expect(1, &[&address, "in use"])?;
    }
    Ok(())
}

#[test]
fn a_worker_names_the_model_file_that_it_cannot_load() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let corrupt = folder.path().join("corrupt.gguf");
    std::fs::write(&corrupt, b"GGUF and nothing that follows from it")?;
    for (path, name) in [
        (Path::new("/nowhere/model.gguf"), "/nowhere/model.gguf"),
        (corrupt.as_path(), "corrupt.gguf"),
    ] {
        let source = serde_json::json!({"path": path});
        let refusal = worker(folder.path(), &source, &[])?;
        ensure!(
            refusal.code.is_some_and(|code| code == 1 || code == 2),
            "{name}: {:?}",
            refusal.code
        );
        refusal.expect(refusal.code.unwrap_or(0), &[name])?;
    }
    Ok(())
}

#[test]
fn a_router_names_the_file_the_port_or_the_folder_that_it_cannot_use() -> Result<()> {
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let taken = taken.local_addr()?.to_string();
    let folder = tempfile::tempdir()?;
    let file = |name: &str, contents: &str| -> Result<String> {
        let path = folder.path().join(name);
        std::fs::write(&path, contents)?;
        Ok(text(&path)?.to_owned())
    };
    let workers = file("workers.json", "[]")?;
    let policies = file(
        "policies.json",
        r#"[{"name": "p", "model": "m", "decodePools": ["decode"]}]"#,
    )?;
    let broken = file("broken.json", "[{]")?;
    let misspelt = file(
        "misspelt.json",
        r#"[{"name": "p", "model": "m", "decodePools": ["decode"], "moed": "Aggregated"}]"#,
    )?;
    let state = text(&folder.path().join("state"))?.to_owned();
    let free = "127.0.0.1:0";
    for (listen, admin, policy_file, workers_file, state_dir, code, words) in [
        (
            &*taken,
            free,
            &policies,
            &workers,
            &state,
            1,
            [&*taken, "in use"],
        ),
        (
            free,
            &*taken,
            &policies,
            &workers,
            &state,
            1,
            [&*taken, "in use"],
        ),
        (
            free,
            free,
            &broken,
            &workers,
            &state,
            2,
            ["broken.json", "policy"],
        ),
        (
            free,
            free,
            &misspelt,
            &workers,
            &state,
            2,
            ["misspelt.json", "moed"],
        ),
        (
            free,
            free,
            &policies,
            &broken,
            &state,
            2,
            ["broken.json", "workers"],
        ),
        // A file where the folder should be.
        (
            free,
            free,
            &policies,
            &workers,
            &workers,
            1,
            ["workers.json", "state"],
        ),
    ] {
        alone(
            "baton-router",
            folder.path(),
            &[
                "--listen",
                listen,
                "--admin",
                admin,
                "--policy-file",
                policy_file,
                "--workers-file",
                workers_file,
                "--state-dir",
                state_dir,
            ],
        )?
        .expect(code, &words)?;
    }
    Ok(())
}

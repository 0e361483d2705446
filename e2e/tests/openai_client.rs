//! Clients that people use work unchanged: the PyPI `openai` package, and plain `curl -N`.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use baton_e2e::binaries::repository;
use baton_e2e::fleet::Fleet;
use baton_e2e::{scenario, skipped};
use serde_json::Value;

const MODEL: &str = "smollm2-135m-instruct";

/// Pinned: a new release of the client must not break an old commit.
const PACKAGE: &str = "openai==3.51.0";

#[test]
fn the_clients_that_people_use_work_unchanged() {
    scenario(async {
        let fleet = Fleet::quickstart().await?;
        let address = fleet.api.address().to_string();
        let done = tokio::task::spawn_blocking(move || {
            curl_streams(&address)?;
            the_openai_package_works(&address)
        });
        done.await??;
        fleet.end().await
    });
}

fn curl_streams(address: &str) -> Result<()> {
    let body = format!(
        "{{\"model\":\"{MODEL}\",\"stream\":true,\"max_tokens\":5,\"temperature\":0,\"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}]}}"
    );
    let url = format!("http://{address}/v1/chat/completions");
    let output = Command::new("curl")
        .args(["-sS", "-N", "--max-time", "120", &url])
        .args(["-H", "content-type: application/json", "-d", &body])
        .output();
    let output = match output {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            skipped("curl is not installed");
            return Ok(());
        }
        output => output?,
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let data: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .collect();
    ensure!(data.last() == Some(&"[DONE]"), "no end:\n{text}");
    for chunk in &data[..data.len() - 1] {
        let chunk: Value = serde_json::from_str(chunk)?;
        ensure!(chunk["object"] == "chat.completion.chunk", "{chunk}");
    }
    ensure!(data.len() > 3, "everything came in one piece:\n{text}");
    Ok(())
}

fn the_openai_package_works(address: &str) -> Result<()> {
    let python = match environment() {
        Ok(python) => python,
        Err(error) => {
            skipped(&format!("no Python environment with {PACKAGE}: {error:#}"));
            return Ok(());
        }
    };
    let status = Command::new(python)
        .arg(repository().join("e2e/python/client.py"))
        .args([&format!("http://{address}/v1"), MODEL])
        .stdin(Stdio::null())
        .status()?;
    ensure!(status.success(), "client.py ended with {status}");
    Ok(())
}

/// A virtual environment under `target`, made once.
fn environment() -> Result<PathBuf> {
    let folder = repository().join("target/e2e-venv");
    let python = folder.join("bin/python");
    let has_it = |python: &PathBuf| {
        let version = PACKAGE.rsplit('=').next().unwrap_or_default();
        Command::new(python)
            .args([
                "-c",
                &format!("import openai; assert openai.__version__ == '{version}'"),
            ])
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    if has_it(&python) {
        return Ok(python);
    }
    run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    run(Command::new(&python).args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        PACKAGE,
    ]))?;
    ensure!(has_it(&python), "{PACKAGE} was installed and is not there");
    Ok(python)
}

fn run(command: &mut Command) -> Result<()> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

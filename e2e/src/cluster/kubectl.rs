//! kubectl, as a user has it: what it prints, what it refuses, and waiting for what it shows.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::wait;

/// Until new definitions are served.
const SERVED: Duration = Duration::from_secs(60);
/// Between two looks at an object: each starts a program of 140 MB and computes for a tenth of a second, which is taken from what is
/// waited for.
const PAUSE: Duration = Duration::from_millis(200);

/// One cluster's client.
#[derive(Debug, Clone)]
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
}

impl Kubectl {
    pub(super) fn new(program: &Path, kubeconfig: &Path) -> Self {
        Self {
            program: program.to_owned(),
            kubeconfig: kubeconfig.to_owned(),
        }
    }

    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// A command to start oneself, where its output is read while it runs.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .env("KUBECONFIG", &self.kubeconfig)
            .args(arguments)
            .stdin(Stdio::null());
        command
    }

    /// What it prints.
    ///
    /// # Errors
    /// Its exit status is not zero; the error is what it said.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        said(arguments, &self.command(arguments).output()?)
    }

    /// The same with a text on standard input, for `--filename=-`.
    ///
    /// # Errors
    /// Its exit status is not zero; the error is what it said.
    pub fn run_with(&self, arguments: &[&str], input: &str) -> Result<String> {
        said(arguments, &self.fed(arguments, input)?)
    }

    /// What it complains of.
    ///
    /// # Errors
    /// It does not complain.
    pub fn refused(&self, arguments: &[&str], input: &str) -> Result<String> {
        let output = self.fed(arguments, input)?;
        if output.status.success() {
            bail!(
                "kubectl {} was expected to be refused and said: {}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stdout)
            );
        }
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// One object or a list, as JSON.
    ///
    /// # Errors
    /// It is not there.
    pub fn get(&self, arguments: &[&str]) -> Result<Value> {
        let all = [&["get", "--output=json"], arguments].concat();
        serde_json::from_str(&self.run(&all)?).context("kubectl printed something else than JSON")
    }

    /// The `items` of a list.
    ///
    /// # Errors
    /// There is no such kind.
    pub fn list(&self, arguments: &[&str]) -> Result<Vec<Value>> {
        match self.get(arguments)?.get_mut("items") {
            Some(Value::Array(items)) => Ok(std::mem::take(items)),
            _ => bail!("kubectl get {} gave no list", arguments.join(" ")),
        }
    }

    /// Whether the cluster's version has such a kind.
    pub fn knows(&self, kind: &str) -> bool {
        self.run(&["get", kind, "--output=name"]).is_ok()
    }

    /// Applies a manifest and returns what was said about each object.
    ///
    /// # Errors
    /// It is refused.
    pub fn apply(&self, manifest: &str) -> Result<String> {
        self.run_with(&["apply", "--filename=-"], manifest)
    }

    /// Reads an object until it is as wanted; `look` returns what it misses.
    ///
    /// # Errors
    /// It is not within the time; the error says what was missed last.
    pub fn until<T>(
        &self,
        what: &str,
        within: Duration,
        arguments: &[&str],
        mut look: impl FnMut(&Value) -> Result<T, String>,
    ) -> Result<T> {
        wait::until_pausing(what, within, PAUSE, || {
            let seen = self.get(arguments).map_err(|error| format!("{error:#}"))?;
            look(&seen)
        })
    }

    /// Waits until the API server serves all definitions.
    ///
    /// # Errors
    /// It does not within a minute.
    pub fn definitions_are_served(&self) -> Result<()> {
        let arguments = [
            "wait",
            "--for=condition=Established",
            "customresourcedefinitions",
            "--all",
            "--timeout=10s",
        ];
        wait::until_pausing("the definitions are served", SERVED, PAUSE, || {
            // kubectl waits for a condition that is not true, but not for one of an object without any: a new definition has none at first.
            self.run(&arguments).map_err(|error| format!("{error:#}"))
        })?;
        Ok(())
    }

    fn fed(&self, arguments: &[&str], input: &str) -> Result<Output> {
        let mut child = self
            .command(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", self.program.display()))?;
        if let Some(mut stdin) = child.stdin.take() {
            // Older ones take what begins with a brace for JSON; YAML begins so too.
            if serde_json::from_str::<serde::de::IgnoredAny>(input).is_err() {
                let _ = stdin.write_all(b"---\n");
            }
            // It may have refused its arguments and gone; what it said then is the answer.
            let _ = stdin.write_all(input.as_bytes());
        }
        Ok(child.wait_with_output()?)
    }
}

fn said(arguments: &[&str], output: &Output) -> Result<String> {
    if !output.status.success() {
        bail!(
            "kubectl {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The status of a condition of an object: `True`, `False`, `Unknown`, or nothing where it has none of that type. With its reason and
/// message, as kubectl's users read them.
pub fn condition(object: &Value, kind: &str) -> (String, String, String) {
    let found = object
        .pointer("/status/conditions")
        .and_then(Value::as_array)
        .and_then(|all| all.iter().find(|condition| condition["type"] == kind));
    let field = |name: &str| {
        found
            .and_then(|condition| condition[name].as_str())
            .unwrap_or_default()
            .to_owned()
    };
    (field("status"), field("reason"), field("message"))
}

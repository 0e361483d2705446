//! The program `kubectl`: run with the user's context, and its failures told apart.

use std::io::ErrorKind;
use std::process::Stdio;

use serde_json::Value;
use tokio::process::Command;

use crate::arguments::ClusterArguments;

/// Why `kubectl` did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(
        "kubectl is not on the PATH: install it, or forward a router's admin port yourself and name it with --admin"
    )]
    Missing,
    #[error("kubectl: {0}")]
    NotFound(String),
    #[error("kubectl: {0}: ask for the right, or use another --context")]
    Forbidden(String),
    #[error("kubectl: {0}")]
    Other(String),
}

/// How the user's cluster is reached.
#[derive(Debug, Clone)]
pub(super) struct Kubectl {
    namespace: Option<String>,
    context: Option<String>,
}

impl Kubectl {
    pub(super) fn new(arguments: &ClusterArguments) -> Self {
        Self {
            namespace: arguments.namespace.clone(),
            context: arguments.context.clone(),
        }
    }

    /// For messages.
    pub(super) fn place(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("namespace {namespace}"),
            None => "the current namespace of kubectl".to_owned(),
        }
    }

    /// Ends with this value.
    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        for (flag, value) in [
            ("--context", &self.context),
            ("--namespace", &self.namespace),
        ] {
            if let Some(value) = value {
                // One word, so that no value is taken for a flag.
                command.arg(format!("{flag}={value}"));
            }
        }
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    /// What it prints.
    ///
    /// # Errors
    /// It cannot be run, or says no.
    pub(super) async fn text(&self, arguments: &[&str]) -> Result<String, Failure> {
        let output = self
            .command(arguments)
            .output()
            .await
            .map_err(|error| not_run(&error))?;
        if !output.status.success() {
            return Err(failure(&String::from_utf8_lossy(&output.stderr)));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// # Errors
    /// As [`Self::text`], or it prints no JSON.
    pub(super) async fn json(&self, arguments: &[&str]) -> Result<Value, Failure> {
        let arguments = [arguments, &["--output", "json"]].concat();
        let text = self.text(&arguments).await?;
        serde_json::from_str(&text).map_err(|error| {
            Failure::Other(format!("{} prints no JSON: {error}", arguments.join(" ")))
        })
    }
}

pub(super) fn not_run(error: &std::io::Error) -> Failure {
    match error.kind() {
        ErrorKind::NotFound => Failure::Missing,
        _ => Failure::Other(format!("cannot be run: {error}")),
    }
}

/// What its standard error means.
pub(super) fn failure(stderr: &str) -> Failure {
    let reason = stderr.trim().trim_start_matches("error: ").to_owned();
    if reason.contains("(NotFound)") {
        Failure::NotFound(reason)
    } else if reason.contains("(Forbidden)") {
        Failure::Forbidden(reason)
    } else if reason.is_empty() {
        Failure::Other("it failed without a word".to_owned())
    } else {
        Failure::Other(reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_told_apart_by_the_servers_word() {
        let gone = "Error from server (NotFound): pods \"r\" not found\n";
        assert!(matches!(failure(gone), Failure::NotFound(_)));
        let no = "Error from server (Forbidden): secrets \"s\" is forbidden: User \"u\" cannot get resource";
        assert!(
            failure(no)
                .to_string()
                .ends_with("ask for the right, or use another --context")
        );
        let away = "error: The connection to the server h:1 was refused";
        assert_eq!(
            failure(away).to_string(),
            "kubectl: The connection to the server h:1 was refused"
        );
        assert_eq!(failure("").to_string(), "kubectl: it failed without a word");
    }

    #[test]
    fn context_and_namespace_are_passed_on() {
        let kubectl = Kubectl {
            namespace: Some("serving".to_owned()),
            context: Some("prod".to_owned()),
        };
        let command = kubectl.command(&["get", "pods"]);
        let words: Vec<_> = command.as_std().get_args().collect();
        assert_eq!(
            words,
            ["--context=prod", "--namespace=serving", "get", "pods"]
        );
    }
}

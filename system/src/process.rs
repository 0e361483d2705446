//! A process around what it does: its log, its threads, and the status it ends with.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use tracing_subscriber::EnvFilter;

/// What the user gave cannot be used: exit status 2. Everything else that goes wrong is status 1.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct WrongInput(pub String);

/// What one process has of its own.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// Begins the line that says why it ended.
    pub name: &'static str,
    /// Threads that serve; none: one for each core.
    pub threads: Option<usize>,
    /// How long work that blocks a thread is waited for after the end.
    pub blocked: Duration,
}

impl Process {
    /// Does the work and ends; an error is one line on standard error. The log is written there too, as `RUST_LOG` asks.
    pub fn run(self, work: impl Future<Output = Result<()>>) -> ExitCode {
        let log = tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::new(filter(
                std::env::var("RUST_LOG").ok().as_deref(),
            )))
            .with_writer(std::io::stderr)
            // It would complain about a full disk on the same standard error, and end the thread that had something to say.
            .log_internal_errors(false)
            .with_ansi(false)
            .finish();
        // Not its `init`, which would take in what libraries write to the `log` crate.
        if let Err(error) = tracing::subscriber::set_global_default(log) {
            return self.end(&format!("log: {error}"), 1);
        }
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        if let Some(threads) = self.threads {
            builder.worker_threads(threads);
        }
        let runtime = match builder.enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                return self.end(
                    &format!("async runtime: {error}: check the limit on threads"),
                    1,
                );
            }
        };
        let result = runtime.block_on(work);
        runtime.shutdown_timeout(self.blocked);
        match result {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => self.end(&format!("{error:#}"), status(&error)),
        }
    }

    fn end(self, message: &str, status: u8) -> ExitCode {
        // Without standard error there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "{}: {message}", self.name);
        ExitCode::from(status)
    }
}

/// The status that a process ends with because of this.
pub fn status(error: &anyhow::Error) -> u8 {
    if error.is::<WrongInput>() { 2 } else { 1 }
}

/// Directives of the log, given those of the environment. Kubernetes' client tells of each try, and what comes of it is said by whoever
/// asked: it is heard only where it is named.
fn filter(asked: Option<&str>) -> String {
    let asked = asked.filter(|asked| !asked.is_empty()).unwrap_or("info");
    if asked.contains("kube") {
        asked.to_owned()
    } else {
        format!("{asked},kube_client=off,kube_runtime=off")
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn kubernetes_client_is_heard_only_where_it_is_named() {
        assert_eq!(filter(None), filter(Some("")));
        assert!(filter(None).starts_with("info,kube_client=off"));
        assert_eq!(filter(Some("kube=debug")), "kube=debug");
    }

    #[test]
    fn input_is_told_from_failure_whatever_is_said_around_it() {
        let wrong = Err::<(), _>(WrongInput("no such file".to_owned())).context("reading x");
        assert_eq!(status(&wrong.unwrap_err()), 2);
        assert_eq!(status(&anyhow::anyhow!("broken")), 1);
    }
}

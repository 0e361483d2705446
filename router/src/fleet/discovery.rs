//! Which workers there are: a list that changes. Here from a file; in a cluster, later, from the API server's watch.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_protocol::ids::WorkerId;
use serde::Deserialize;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// How often the file is looked at. A restart of a worker keeps its entry, so this delays only additions and removals.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A worker that there should be.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    pub name: WorkerId,
    /// `HOST:PORT` of its gRPC service, as this router reaches it.
    pub control: String,
}

/// A workers file that cannot be used. The last good list stays in force.
#[derive(Debug, thiserror::Error)]
pub enum WorkersFileError {
    #[error("workers file {path} is not readable: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("workers file {path} is not a list of {{\"name\",\"control\"}}: {source}")]
    Parse {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error("workers file {path} names worker {name} twice: give each worker its own name")]
    Twice { path: PathBuf, name: WorkerId },
    #[error("workers file {path}: control of worker {name} is {control:?}, not HOST:PORT")]
    Address {
        path: PathBuf,
        name: WorkerId,
        control: String,
    },
}

/// Something that knows which workers there are. Sends a list at each change until it is stopped.
pub trait Discovery: Send + 'static {
    fn run(
        self,
        lists: watch::Sender<Vec<Listed>>,
        stop: CancellationToken,
    ) -> impl Future<Output = ()> + Send;
}

/// A JSON file `[{"name", "control"}]`, read again when its contents change.
#[derive(Debug)]
pub struct WorkersFile {
    path: PathBuf,
    contents: Vec<u8>,
    complained: Option<String>,
}

impl WorkersFile {
    /// Reads it for the first time; then an unusable file is an error of start-up.
    pub fn open(path: &Path) -> Result<(Self, Vec<Listed>), WorkersFileError> {
        let contents = read(path)?;
        let list = parse(path, &contents)?;
        let file = Self {
            path: path.to_owned(),
            contents,
            complained: None,
        };
        Ok((file, list))
    }

    /// The list, if it is another one.
    fn look(&mut self) -> Result<Option<Vec<Listed>>, WorkersFileError> {
        let contents = read(&self.path)?;
        if contents == self.contents {
            return Ok(None);
        }
        let list = parse(&self.path, &contents)?;
        self.contents = contents;
        Ok(Some(list))
    }
}

impl Discovery for WorkersFile {
    async fn run(mut self, lists: watch::Sender<Vec<Listed>>, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            match self.look() {
                Ok(None) => self.complained = None,
                Ok(Some(list)) => {
                    info!(workers = list.len(), file = %self.path.display(), "workers file changed");
                    self.complained = None;
                    lists.send_replace(list);
                }
                Err(error) => {
                    let error = error.to_string();
                    // A file that is being written is unreadable for a moment: say it once per reason.
                    if self.complained.as_ref() != Some(&error) {
                        warn!("{error}; the last good list stays in force");
                        self.complained = Some(error);
                    }
                }
            }
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, WorkersFileError> {
    std::fs::read(path).map_err(|source| WorkersFileError::Read {
        path: path.to_owned(),
        source,
    })
}

fn parse(path: &Path, contents: &[u8]) -> Result<Vec<Listed>, WorkersFileError> {
    let list: Vec<Listed> =
        serde_json::from_slice(contents).map_err(|source| WorkersFileError::Parse {
            path: path.to_owned(),
            source,
        })?;
    let mut names = BTreeSet::new();
    for worker in &list {
        if !names.insert(&worker.name) {
            return Err(WorkersFileError::Twice {
                path: path.to_owned(),
                name: worker.name.clone(),
            });
        }
        let usable = worker
            .control
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        if !usable {
            return Err(WorkersFileError::Address {
                path: path.to_owned(),
                name: worker.name.clone(),
                control: worker.control.clone(),
            });
        }
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_gives_the_new_list_and_a_broken_one_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("workers.json");
        std::fs::write(&path, r#"[{"name":"d","control":"127.0.0.1:7000"}]"#).unwrap();
        let (mut file, list) = WorkersFile::open(&path).unwrap();
        assert_eq!(list.len(), 1);
        assert_eq!(file.look().unwrap(), None);
        std::fs::write(&path, "[").unwrap();
        assert!(file.look().is_err());
        std::fs::write(&path, "[]").unwrap();
        assert_eq!(file.look().unwrap(), Some(Vec::new()));
    }

    #[test]
    fn an_unusable_list_names_worker_and_field() {
        let path = Path::new("w.json");
        let error = |text: &str| parse(path, text.as_bytes()).unwrap_err().to_string();
        assert!(
            error(r#"[{"name":"d","control":"7000"}]"#).contains("control of worker d is \"7000\"")
        );
        let twice = r#"[{"name":"d","control":"a:1"},{"name":"d","control":"b:2"}]"#;
        assert!(error(twice).contains("names worker d twice"));
        assert!(error(r#"[{"name":"d"}]"#).contains("control"));
    }
}

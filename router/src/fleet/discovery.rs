//! Which workers there are: a list that changes. Here from a file; in a cluster from [`crate::cluster`].

use std::collections::BTreeSet;
use std::path::PathBuf;

use baton_protocol::ids::WorkerId;
use serde::Deserialize;

use crate::followed::{Followed, Unusable};

/// One level of a worker's place in the topology, and its domain there where that is known.
pub type Domain = (String, Option<String>);

/// A worker that there should be.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    pub name: WorkerId,
    /// `HOST:PORT` of its gRPC service, as this router reaches it.
    pub control: String,
    /// Where it is, nearest level first, by whoever lists it: over what its card says of these levels.
    #[serde(skip)]
    pub domains: Vec<Domain>,
    /// Whoever lists it will end it: nothing more is placed on it, whatever it says itself.
    #[serde(skip)]
    pub leaving: bool,
}

/// Workers of a file, kept current.
pub type WorkersFile = Followed<Vec<Listed>>;

/// Reads a file of workers, `[{"name", "control"}]`, for the first time.
///
/// # Errors
/// It cannot be read, or is no such list.
pub fn open(path: PathBuf) -> Result<WorkersFile, Unusable> {
    Followed::open("workers", vec![path.clone()], move |contents, _| {
        let contents = contents.first().map_or(&[][..], Vec::as_slice);
        parse(contents).map_err(|error| format!("workers file {}: {error}", path.display()))
    })
}

/// A list of workers that cannot be used.
#[derive(Debug, thiserror::Error)]
enum WorkersListError {
    #[error("it is not a list of {{\"name\",\"control\"}}: {0}")]
    Parse(#[from] serde_json::Error),
    #[error("it names worker {0} twice: give each worker its own name")]
    Twice(WorkerId),
    #[error("control of worker {name} is {control:?}, not HOST:PORT")]
    Address { name: WorkerId, control: String },
}

fn parse(contents: &[u8]) -> Result<Vec<Listed>, WorkersListError> {
    let list: Vec<Listed> = serde_json::from_slice(contents)?;
    let mut names = BTreeSet::new();
    for Listed { name, control, .. } in &list {
        if !names.insert(name) {
            return Err(WorkersListError::Twice(name.clone()));
        }
        let usable = control
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        if !usable {
            return Err(WorkersListError::Address {
                name: name.clone(),
                control: control.clone(),
            });
        }
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_gives_the_new_list_and_a_broken_one_leaves_the_last() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("workers.json");
        std::fs::write(&path, r#"[{"name":"d","control":"127.0.0.1:7000"}]"#).unwrap();
        let file = open(path.clone()).unwrap();
        assert_eq!(file.in_force().len(), 1);
        assert!(!file.look());
        std::fs::write(&path, "[").unwrap();
        assert!(file.look());
        assert_eq!(file.in_force().len(), 1);
        assert!(file.refused().unwrap().contains("workers.json"));
        std::fs::write(&path, "[]").unwrap();
        assert!(file.look());
        assert!(file.in_force().is_empty());
    }

    #[test]
    fn an_unusable_list_names_worker_and_field() {
        let error = |text: &str| parse(text.as_bytes()).unwrap_err().to_string();
        assert!(
            error(r#"[{"name":"d","control":"7000"}]"#).contains("control of worker d is \"7000\"")
        );
        let twice = r#"[{"name":"d","control":"a:1"},{"name":"d","control":"b:2"}]"#;
        assert!(error(twice).contains("names worker d twice"));
        assert!(error(r#"[{"name":"d"}]"#).contains("control"));
    }
}

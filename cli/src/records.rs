//! Decision records, from a state directory or from a router.

mod awaited;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use baton_placement::coefficients::CoefficientSet;
use baton_placement::policy::Policy;
use baton_placement::record::DecisionRecord;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::arguments::RecordArguments;
use crate::client::{Client, token};
use crate::failure::wrong_input;

pub(crate) use awaited::Awaited;

/// Where records are.
#[derive(Debug)]
pub(crate) enum Records {
    StateDir(PathBuf),
    Router(Box<Client>),
}

/// Records that a router is asked for at once; it keeps about as many.
const LAST: usize = 1024;

impl Records {
    /// # Errors
    /// The token's file cannot be read, or the address is none.
    pub(crate) fn of(arguments: &RecordArguments) -> anyhow::Result<Self> {
        Ok(match &arguments.admin {
            Some(address) => {
                let token = token(arguments.admin_token_file.as_deref())?;
                Self::Router(Box::new(Client::new(address)?.with_token(token)))
            }
            None => Self::StateDir(arguments.state_dir.clone()),
        })
    }

    /// The record of one run, or the newest of all for `last`.
    pub(crate) async fn find(&self, run: &str) -> anyhow::Result<Option<DecisionRecord>> {
        match self {
            Self::StateDir(folder) => find_in_files(folder, run),
            Self::Router(client) if run == "last" => Ok(self.last(client, 1).await?.pop()),
            Self::Router(client) => {
                let answer = client.get(&format!("/v1/decisions/{run}")).await?;
                if answer.status.as_u16() == 404 {
                    return Ok(None);
                }
                if !answer.status.is_success() {
                    bail!("{} answers {}", client.base(), answer.complaint());
                }
                Ok(Some(record(answer.body)?))
            }
        }
    }

    async fn last(&self, client: &Client, count: usize) -> anyhow::Result<Vec<DecisionRecord>> {
        let body = client
            .get_good(&format!("/v1/decisions?last={count}"))
            .await?;
        // A list, or an object that holds one.
        let list = match body {
            Value::Array(list) => list,
            mut body => match body["decisions"].take() {
                Value::Array(list) => list,
                _ => bail!(
                    "{} answers something other than a list of decisions",
                    client.base()
                ),
            },
        };
        list.into_iter().map(record).collect()
    }

    /// All records there are, oldest first.
    pub(crate) async fn all(&self) -> anyhow::Result<Vec<DecisionRecord>> {
        match self {
            Self::StateDir(folder) => {
                let mut records = Vec::new();
                for file in files(folder)? {
                    records.extend(read(&file)?);
                }
                Ok(records)
            }
            Self::Router(client) => {
                let mut records = self.last(client, LAST).await?;
                records.sort_by(|a, b| a.time.cmp(&b.time));
                Ok(records)
            }
        }
    }
}

fn record(json: Value) -> anyhow::Result<DecisionRecord> {
    serde_json::from_value(json)
        .context("cannot understand a decision record: it may be of another version of Baton")
}

/// The record files of a state directory, oldest first.
pub(crate) fn files(state_dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let folder = state_dir.join("decisions");
    let entries = std::fs::read_dir(&folder).map_err(|error| {
        wrong_input(format!(
            "cannot read {}: {error}; name the state directory of a baton up with --state-dir, or a router with --admin",
            folder.display()
        ))
    })?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "jsonl")
        })
        .collect();
    files.sort();
    Ok(files)
}

/// The records of a file. The last line of a file that is being written may be incomplete, and is left out then.
pub(crate) fn read(file: &Path) -> anyhow::Result<Vec<DecisionRecord>> {
    let open = std::fs::File::open(file)
        .map_err(|error| wrong_input(format!("cannot read {}: {error}", file.display())))?;
    let mut reader = BufReader::new(open);
    let mut records = Vec::new();
    // Bytes, since a line that is being written may end inside a character.
    let mut line = Vec::new();
    for number in 1_usize.. {
        line.clear();
        let length = reader
            .read_until(b'\n', &mut line)
            .with_context(|| format!("cannot read {}", file.display()))?;
        if length == 0 {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        match serde_json::from_slice(&line) {
            Ok(record) => records.push(record),
            Err(_) if !line.ends_with(b"\n") => break,
            Err(error) => {
                return Err(wrong_input(format!(
                    "{}:{number}: not a decision record: {error}",
                    file.display()
                )));
            }
        }
    }
    Ok(records)
}

/// Newest files first, so that a run of today is found without reading all days. Only lines that hold the id are parsed.
fn find_in_files(state_dir: &Path, run: &str) -> anyhow::Result<Option<DecisionRecord>> {
    for file in files(state_dir)?.into_iter().rev() {
        let bytes =
            std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let text = String::from_utf8_lossy(&bytes);
        let found = text
            .lines()
            .rev()
            .filter(|line| !line.trim().is_empty() && (run == "last" || line.contains(run)))
            .filter_map(|line| serde_json::from_str::<DecisionRecord>(line).ok())
            .find(|record| run == "last" || record.run.0 == run);
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// Coefficient sets and policies by digest, as they lie in a state directory beside `decisions/`.
#[derive(Debug)]
pub(crate) struct Digests {
    /// Folders that may hold `coefficients/` and `policies/`.
    roots: Vec<PathBuf>,
    coefficients: BTreeMap<String, CoefficientSet>,
    policies: BTreeMap<String, Policy>,
}

impl Digests {
    /// `near`: a state directory, its `decisions/`, or files in there.
    pub(crate) fn new<'a>(near: impl IntoIterator<Item = &'a Path>) -> Self {
        let mut roots = Vec::new();
        for path in near {
            for root in path.ancestors().take(3) {
                // The parent of a relative name is the folder where we are.
                let root = if root.as_os_str().is_empty() {
                    Path::new(".")
                } else {
                    root
                };
                if !roots.contains(&root.to_path_buf()) {
                    roots.push(root.to_path_buf());
                }
            }
        }
        Self {
            roots,
            coefficients: BTreeMap::new(),
            policies: BTreeMap::new(),
        }
    }

    /// Fetches from the router what these records name; files are not looked at for it.
    pub(crate) async fn fetch(
        &mut self,
        client: &Client,
        records: &[DecisionRecord],
    ) -> anyhow::Result<()> {
        for record in records {
            let later = record.later_decisions.iter();
            let sets = later.map(|decision| &decision.coefficients);
            for digest in std::iter::once(&record.coefficients).chain(sets) {
                if !self.coefficients.contains_key(digest) {
                    let set = fetched(client, "coefficients", digest).await?;
                    self.coefficients.insert(digest.clone(), set);
                }
            }
            let digest = &record.policy.digest;
            if !self.policies.contains_key(digest) {
                let policy = fetched(client, "policies", digest).await?;
                self.policies.insert(digest.clone(), policy);
            }
        }
        Ok(())
    }

    pub(crate) fn coefficients(&mut self, digest: &str) -> anyhow::Result<&CoefficientSet> {
        load(&self.roots, "coefficients", digest, &mut self.coefficients)
    }

    pub(crate) fn policy(&mut self, digest: &str) -> anyhow::Result<&Policy> {
        load(&self.roots, "policies", digest, &mut self.policies)
    }
}

async fn fetched<T: DeserializeOwned>(
    client: &Client,
    kind: &str,
    digest: &str,
) -> anyhow::Result<T> {
    let path = format!("/v1/{kind}/{digest}");
    let body = client.get_good(&path).await?;
    serde_json::from_value(body)
        .with_context(|| format!("cannot understand {}{path}", client.base()))
}

fn load<'a, T: DeserializeOwned>(
    roots: &[PathBuf],
    folder: &str,
    digest: &str,
    known: &'a mut BTreeMap<String, T>,
) -> anyhow::Result<&'a T> {
    use std::collections::btree_map::Entry;
    match known.entry(digest.to_owned()) {
        Entry::Occupied(entry) => Ok(entry.into_mut()),
        Entry::Vacant(entry) => {
            let name = format!("{folder}/{digest}.json");
            let file = roots.iter().map(|root| root.join(&name)).find(|file| file.is_file()).ok_or_else(|| {
                wrong_input(format!(
                    "{name} is not beside the records: replay needs the state directory whole (decisions, coefficients, policies)"
                ))
            })?;
            let text = std::fs::read_to_string(&file)
                .with_context(|| format!("cannot read {}", file.display()))?;
            let value = serde_json::from_str(&text)
                .with_context(|| format!("cannot understand {}", file.display()))?;
            Ok(entry.insert(value))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::sample::line;

    #[tokio::test]
    async fn a_run_is_found_in_any_file_and_last_is_the_newest() {
        let folder = tempfile::tempdir().unwrap();
        let decisions = folder.path().join("decisions");
        std::fs::create_dir(&decisions).unwrap();
        std::fs::write(
            decisions.join("1.jsonl"),
            format!("{}\n{}\n", line("r0-a"), line("r0-b")),
        )
        .unwrap();
        // The last line is being written.
        std::fs::write(
            decisions.join("2.jsonl"),
            format!("{}\n{}", line("r0-c"), &line("r0-d")[..40]),
        )
        .unwrap();
        let records = Records::StateDir(folder.path().to_owned());
        assert_eq!(records.find("r0-a").await.unwrap().unwrap().run.0, "r0-a");
        assert_eq!(records.find("last").await.unwrap().unwrap().run.0, "r0-c");
        assert!(
            records.find("r0").await.unwrap().is_none(),
            "a part of an id is no id"
        );
        let all: Vec<String> = records
            .all()
            .await
            .unwrap()
            .into_iter()
            .map(|record| record.run.0)
            .collect();
        assert_eq!(all, ["r0-a", "r0-b", "r0-c"]);
    }

    #[test]
    fn a_line_that_is_no_record_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.jsonl");
        std::fs::write(&file, format!("{}\n{{}}\n", line("r0-a"))).unwrap();
        let error = read(&file).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("{}:2: not a decision record", file.display())),
            "{error}"
        );
    }

    #[test]
    fn digests_are_found_beside_the_records() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("policies")).unwrap();
        let policy = Policy::new("p", "m", &[], &["d"]);
        let text = serde_json::to_string(&policy).unwrap();
        std::fs::write(folder.path().join("policies/abc.json"), text).unwrap();
        let file = folder.path().join("decisions/1.jsonl");
        let mut digests = Digests::new([file.as_path()]);
        assert_eq!(*digests.policy("abc").unwrap(), policy);
        let error = digests.policy("xyz").unwrap_err().to_string();
        assert!(
            error.starts_with("policies/xyz.json is not beside the records"),
            "{error}"
        );
    }

    #[test]
    fn a_last_line_that_ends_inside_a_character_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("decisions")).unwrap();
        let file = folder.path().join("decisions/1.jsonl");
        let mut bytes = format!("{}\n{{\"explanation\":\"p →", line("r-1")).into_bytes();
        bytes.pop();
        std::fs::write(&file, bytes).unwrap();
        assert_eq!(read(&file).unwrap().len(), 1);
        let found = find_in_files(folder.path(), "last").unwrap().unwrap();
        assert_eq!(found.run.0, "r-1");
    }
}

//! Policies in force: read from a file, checked, kept by generation. A file that cannot be honoured leaves the last good one in force.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use baton_placement::policy::{Overrides, Policy, PolicyError};
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::clock::{Clock, Moment};

/// How often the file is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// One policy in force, as requests are served under it. A request keeps its policy when the file changes.
#[derive(Clone, Debug)]
pub struct PolicyHandle {
    /// Name of the resource.
    pub name: String,
    /// As clients ask for it.
    pub model: String,
    pub aliases: Vec<String>,
    /// `overrides: Allowed`: the `x-baton-mode` header counts.
    pub allows_overrides: bool,
    pub generation: u64,
    pub digest: String,
    /// When it came into force.
    pub since: Moment,
    pub policy: Arc<Policy>,
}

impl PolicyHandle {
    pub fn new(policy: Policy, since: Moment) -> Self {
        Self {
            name: policy.name.clone(),
            model: policy.model.clone(),
            aliases: policy.aliases.clone(),
            allows_overrides: policy.overrides == Overrides::Allowed,
            generation: policy.generation,
            digest: policy.digest(),
            since,
            policy: Arc::new(policy),
        }
    }
}

/// A policy file that cannot be honoured.
#[derive(Debug, thiserror::Error)]
pub enum PolicyFileError {
    #[error("policy file {path} is not readable: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("policy file {path} is not a list of policies: {source}")]
    Parse {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error("policy file {path}: {source}")]
    Refused { path: PathBuf, source: PolicyError },
    #[error(
        "policy file {path}: model name {model:?} is claimed by policies {first} and {second}: one policy serves a model"
    )]
    Twice {
        path: PathBuf,
        model: String,
        first: String,
        second: String,
    },
    #[error("policy file {path} names policy {name} twice: give each policy its own name")]
    SameName { path: PathBuf, name: String },
    #[error("policy file {path} holds no policy: add one")]
    Empty { path: PathBuf },
}

/// The policies of one reading, by every name that clients may use.
#[derive(Clone, Debug, Default)]
pub struct PolicySet {
    pub policies: Vec<Arc<PolicyHandle>>,
    by_model: HashMap<String, Arc<PolicyHandle>>,
}

impl PolicySet {
    /// Reads policies. One that did not change keeps its handle; one that did gets the next generation where the file gives none.
    pub fn parse(
        path: &Path,
        contents: &[u8],
        before: &Self,
        now: Moment,
    ) -> Result<Self, PolicyFileError> {
        let policies: Vec<Policy> =
            serde_json::from_slice(contents).map_err(|source| PolicyFileError::Parse {
                path: path.to_owned(),
                source,
            })?;
        let mut set = Self::default();
        for mut policy in policies {
            policy.check().map_err(|source| PolicyFileError::Refused {
                path: path.to_owned(),
                source,
            })?;
            if set.policies.iter().any(|other| other.name == policy.name) {
                return Err(PolicyFileError::SameName {
                    path: path.to_owned(),
                    name: policy.name,
                });
            }
            let old = before.policies.iter().find(|old| old.name == policy.name);
            if policy.generation == 0 {
                policy.generation = old.map_or(1, |old| old.generation);
                if old.is_some_and(|old| *old.policy != policy) {
                    policy.generation += 1;
                }
            }
            let handle = match old {
                Some(old) if *old.policy == policy => old.clone(),
                _ => Arc::new(PolicyHandle::new(policy, now)),
            };
            for name in std::iter::once(&handle.model).chain(&handle.aliases) {
                if let Some(other) = set.by_model.insert(name.clone(), handle.clone()) {
                    return Err(PolicyFileError::Twice {
                        path: path.to_owned(),
                        model: name.clone(),
                        first: other.name.clone(),
                        second: handle.name.clone(),
                    });
                }
            }
            set.policies.push(handle);
        }
        if set.policies.is_empty() {
            return Err(PolicyFileError::Empty {
                path: path.to_owned(),
            });
        }
        Ok(set)
    }

    pub fn of_model(&self, model: &str) -> Option<Arc<PolicyHandle>> {
        self.by_model.get(model).cloned()
    }
}

/// What is in force, and why a later file is not.
#[derive(Clone, Debug, Default)]
pub struct InForce {
    pub set: Arc<PolicySet>,
    pub refused: Option<String>,
    /// Because it could not be read.
    unreadable: bool,
}

/// A policy file, read again when its contents change.
#[derive(Debug)]
pub struct PolicyFile {
    path: PathBuf,
    clock: Clock,
    in_force: ArcSwap<InForce>,
}

impl PolicyFile {
    /// Reads it for the first time; then a file that cannot be honoured is an error of start-up.
    pub fn open(path: &Path, clock: Clock) -> Result<(Self, Vec<u8>), PolicyFileError> {
        let contents = read(path)?;
        let set = PolicySet::parse(path, &contents, &PolicySet::default(), clock.now())?;
        let file = Self {
            path: path.to_owned(),
            clock,
            in_force: ArcSwap::from_pointee(InForce {
                set: Arc::new(set),
                ..InForce::default()
            }),
        };
        Ok((file, contents))
    }

    pub fn in_force(&self) -> Arc<InForce> {
        self.in_force.load_full()
    }

    /// Follows the file until it is stopped.
    pub async fn follow(self: Arc<Self>, mut contents: Vec<u8>, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            self.look(&mut contents);
        }
    }

    fn look(&self, contents: &mut Vec<u8>) {
        let found = match read(&self.path) {
            // It was looked at before; anew where it could not be read meanwhile, so that what is said of it is true again.
            Ok(found) if found == *contents && !self.unreadable() => return,
            Ok(found) => found,
            Err(error) => return self.refuse(&error),
        };
        let before = self.in_force();
        match PolicySet::parse(&self.path, &found, &before.set, self.clock.now()) {
            Ok(set) => {
                for policy in &set.policies {
                    info!(
                        policy = policy.name,
                        generation = policy.generation,
                        "policy in force"
                    );
                }
                self.in_force.store(Arc::new(InForce {
                    set: Arc::new(set),
                    ..InForce::default()
                }));
            }
            Err(error) => self.refuse(&error),
        }
        *contents = found;
    }

    fn unreadable(&self) -> bool {
        self.in_force().unreadable
    }

    fn refuse(&self, error: &PolicyFileError) {
        let reason = error.to_string();
        let before = self.in_force();
        if before.refused.as_ref() == Some(&reason) {
            return;
        }
        warn!("{reason}; the last good policies stay in force");
        self.in_force.store(Arc::new(InForce {
            set: before.set.clone(),
            unreadable: matches!(error, PolicyFileError::Read { .. }),
            refused: Some(reason),
        }));
    }
}

fn read(path: &Path) -> Result<Vec<u8>, PolicyFileError> {
    std::fs::read(path).map_err(|source| PolicyFileError::Read {
        path: path.to_owned(),
        source,
    })
}

/// A policy in `GET /v1/policies`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedPolicy {
    pub name: String,
    pub generation: u64,
    pub digest: String,
    /// RFC 3339.
    pub since: String,
    pub policy: Arc<Policy>,
}

impl From<&PolicyHandle> for ListedPolicy {
    fn from(handle: &PolicyHandle) -> Self {
        Self {
            name: handle.name.clone(),
            generation: handle.generation,
            digest: handle.digest.clone(),
            since: handle.since.rfc3339(),
            policy: handle.policy.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(text: &str) -> (tempfile::TempDir, PolicyFile, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policies.json");
        std::fs::write(&path, text).unwrap();
        let (file, contents) = PolicyFile::open(&path, Clock::start()).unwrap();
        (folder, file, contents)
    }

    const CHAT: &str = r#"[{"name":"chat","model":"m","aliases":["gpt"],"decodePools":["d"]}]"#;

    #[test]
    fn a_changed_policy_gets_the_next_generation_and_a_bad_one_leaves_the_last_good_in_force() {
        let (_folder, file, mut contents) = open(CHAT);
        let first = file.in_force().set.of_model("gpt").unwrap();
        assert_eq!((first.generation, first.allows_overrides), (1, false));

        std::fs::write(
            &file.path,
            CHAT.replace(
                "\"decodePools\"",
                "\"overrides\":\"Allowed\",\"decodePools\"",
            ),
        )
        .unwrap();
        file.look(&mut contents);
        let second = file.in_force().set.of_model("m").unwrap();
        assert_eq!((second.generation, second.allows_overrides), (2, true));
        assert_ne!(first.digest, second.digest);

        std::fs::write(&file.path, CHAT.replace("[\"d\"]", "[]")).unwrap();
        file.look(&mut contents);
        let in_force = file.in_force();
        assert!(
            in_force.refused.as_ref().unwrap().contains("decodePools"),
            "{in_force:?}"
        );
        assert_eq!(in_force.set.of_model("m").unwrap().generation, 2);

        std::fs::write(&file.path, CHAT).unwrap();
        file.look(&mut contents);
        assert_eq!(file.in_force().refused, None);
        assert_eq!(file.in_force().set.of_model("m").unwrap().generation, 3);
    }

    #[test]
    fn a_file_that_can_be_read_again_is_not_refused_any_more() {
        let (_folder, file, mut contents) = open(CHAT);
        std::fs::remove_file(&file.path).unwrap();
        file.look(&mut contents);
        let gone = file.in_force().refused.clone().unwrap();
        assert!(gone.contains("not readable"), "{gone}");
        std::fs::write(&file.path, CHAT).unwrap();
        file.look(&mut contents);
        assert_eq!(file.in_force().refused, None);
        assert_eq!(file.in_force().set.of_model("m").unwrap().generation, 1);

        // One that is refused for what it says stays so, as long as it says it.
        std::fs::write(&file.path, "[]").unwrap();
        for _ in 0..2 {
            file.look(&mut contents);
            let refused = file.in_force().refused.clone().unwrap();
            assert!(refused.contains("holds no policy"), "{refused}");
        }
    }

    #[test]
    fn policies_of_one_name_are_refused() {
        let text = r#"[{"name":"chat","model":"m","decodePools":["d"]},
            {"name":"chat","model":"n","decodePools":["d"]}]"#;
        let parsed = PolicySet::parse(
            Path::new("f"),
            text.as_bytes(),
            &PolicySet::default(),
            Moment(0),
        );
        let error = parsed.unwrap_err().to_string();
        assert!(error.contains("names policy chat twice"), "{error}");
    }

    #[test]
    fn one_model_has_one_policy() {
        let text = r#"[{"name":"chat","model":"m","aliases":["gpt"],"decodePools":["d"]},
            {"name":"other","model":"gpt","decodePools":["d"]}]"#;
        let error = PolicySet::parse(
            Path::new("f"),
            text.as_bytes(),
            &PolicySet::default(),
            Moment(0),
        )
        .unwrap_err()
        .to_string();
        assert!(
            error.contains("\"gpt\" is claimed by policies chat and other"),
            "{error}"
        );
    }
}

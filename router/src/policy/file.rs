//! Policies of a file: a JSON list, read again when it changes. A list that cannot be honoured leaves the last good one in force.

use std::path::PathBuf;
use std::sync::Arc;

use baton_placement::policy::{Policy, PolicyError};

use super::{Claimed, InForce, PolicyHandle, PolicySet, Refusal};
use crate::clock::{Clock, Moment};
use crate::followed::{Followed, Unusable};

/// Policies of a file, kept current.
pub type PolicyFile = Followed<PolicySet>;

/// Reads a file of policies for the first time.
///
/// # Errors
/// It cannot be read or honoured.
pub fn open(path: PathBuf, clock: Clock) -> Result<PolicyFile, Unusable> {
    Followed::open("policies", vec![path.clone()], move |contents, before| {
        let contents = contents.first().map_or(&[][..], Vec::as_slice);
        let nothing = PolicySet::default();
        parse(contents, before.unwrap_or(&nothing), clock.now())
            .map_err(|error| format!("policy file {}: {error}", path.display()))
    })
}

impl From<&PolicyFile> for InForce {
    fn from(file: &PolicyFile) -> Self {
        let refusal = |reason| Refusal {
            name: None,
            generation: None,
            models: Vec::new(),
            reason,
        };
        Self {
            set: file.in_force(),
            refused: file.refused().into_iter().map(refusal).collect(),
        }
    }
}

/// A list of policies that cannot be honoured.
#[derive(Debug, thiserror::Error)]
enum PolicyListError {
    #[error("it is not a list of policies: {0}")]
    Parse(#[from] serde_json::Error),
    #[error(transparent)]
    Refused(#[from] PolicyError),
    #[error(
        "model name {model:?} is claimed by policies {first} and {second}: one policy serves a model"
    )]
    Twice {
        model: String,
        first: String,
        second: String,
    },
    #[error("it names policy {0} twice: give each policy its own name")]
    SameName(String),
    #[error("it holds no policy: add one")]
    Empty,
}

/// Reads policies. One that did not change keeps its handle; one that did gets the next generation where the file gives none.
fn parse(contents: &[u8], before: &PolicySet, now: Moment) -> Result<PolicySet, PolicyListError> {
    let policies: Vec<Policy> = serde_json::from_slice(contents)?;
    let mut set = PolicySet::default();
    for mut policy in policies {
        policy.check()?;
        if set.named(&policy.name).is_some() {
            return Err(PolicyListError::SameName(policy.name));
        }
        let old = before.named(&policy.name);
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
        let second = handle.name.clone();
        set.add(handle)
            .map_err(|Claimed { model, by }| PolicyListError::Twice {
                model,
                first: by.name.clone(),
                second,
            })?;
    }
    if set.policies.is_empty() {
        return Err(PolicyListError::Empty);
    }
    Ok(set)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn opened(text: &str) -> (tempfile::TempDir, PathBuf, PolicyFile) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policies.json");
        std::fs::write(&path, text).unwrap();
        let file = open(path.clone(), Clock::start()).unwrap();
        (folder, path, file)
    }

    fn refused(file: &PolicyFile) -> Option<String> {
        let in_force = InForce::from(file);
        in_force
            .refused
            .first()
            .map(|refusal| refusal.reason.clone())
    }

    fn rewrite(file: &PolicyFile, path: &Path, text: &str) {
        std::fs::write(path, text).unwrap();
        file.look();
    }

    const CHAT: &str = r#"[{"name":"chat","model":"m","aliases":["gpt"],"decodePools":["d"]}]"#;

    #[test]
    fn a_changed_policy_gets_the_next_generation_and_a_bad_one_leaves_the_last_good_in_force() {
        let (_folder, path, file) = opened(CHAT);
        let first = file.in_force().of_model("gpt").unwrap();
        assert_eq!((first.generation, first.allows_overrides), (1, false));

        let allowed = CHAT.replace(
            "\"decodePools\"",
            "\"overrides\":\"Allowed\",\"decodePools\"",
        );
        rewrite(&file, &path, &allowed);
        let second = file.in_force().of_model("m").unwrap();
        assert_eq!((second.generation, second.allows_overrides), (2, true));
        assert_ne!(first.digest, second.digest);

        rewrite(&file, &path, &CHAT.replace("[\"d\"]", "[]"));
        let reason = refused(&file).unwrap();
        assert!(
            reason.contains("decodePools") && reason.contains("policies.json"),
            "{reason}"
        );
        assert_eq!(file.in_force().of_model("m").unwrap().generation, 2);

        rewrite(&file, &path, CHAT);
        assert_eq!(refused(&file), None);
        assert_eq!(file.in_force().of_model("m").unwrap().generation, 3);
    }

    #[test]
    fn a_file_that_can_be_read_again_is_not_refused_any_more() {
        let (_folder, path, file) = opened(CHAT);
        std::fs::remove_file(&path).unwrap();
        file.look();
        let gone = refused(&file).unwrap();
        assert!(gone.contains("No such file"), "{gone}");
        rewrite(&file, &path, CHAT);
        assert_eq!(refused(&file), None);
        assert_eq!(file.in_force().of_model("m").unwrap().generation, 1);

        // One that is refused for what it says stays so, as long as it says it.
        for _ in 0..2 {
            rewrite(&file, &path, "[]");
            let reason = refused(&file).unwrap();
            assert!(reason.contains("holds no policy"), "{reason}");
        }
    }

    fn wrong(text: &str) -> String {
        let parsed = parse(text.as_bytes(), &PolicySet::default(), Moment(0));
        parsed.unwrap_err().to_string()
    }

    #[test]
    fn policies_of_one_name_are_refused() {
        let error = wrong(
            r#"[{"name":"chat","model":"m","decodePools":["d"]},
            {"name":"chat","model":"n","decodePools":["d"]}]"#,
        );
        assert!(error.contains("names policy chat twice"), "{error}");
    }

    #[test]
    fn one_model_has_one_policy() {
        let error = wrong(
            r#"[{"name":"chat","model":"m","aliases":["gpt"],"decodePools":["d"]},
            {"name":"other","model":"gpt","decodePools":["d"]}]"#,
        );
        assert!(
            error.contains("\"gpt\" is claimed by policies chat and other"),
            "{error}"
        );
    }
}

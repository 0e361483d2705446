//! Files of resources, as the commands read them.

use std::path::{Path, PathBuf};

use baton_crds::placement::to_policy;
use baton_crds::{Problem, Resources, RoutePolicy, read_documents, read_fleet};
use baton_placement::policy::Policy;

use crate::failure::wrong_input;
use crate::terminal::note;

/// The resources of all files, which have to make a whole. Warnings are noted.
pub(crate) fn fleet(files: &[PathBuf]) -> anyhow::Result<Resources> {
    let texts = texts(files)?;
    let pairs = texts
        .iter()
        .map(|(name, text)| (name.as_str(), text.as_str()));
    accept(read_fleet(pairs))
}

/// The resources of one file, which may name others that are not there.
pub(crate) fn alone(file: &Path) -> anyhow::Result<Resources> {
    let texts = texts(std::slice::from_ref(&file.to_path_buf()))?;
    let pairs = texts
        .iter()
        .map(|(name, text)| (name.as_str(), text.as_str()));
    accept(read_documents(pairs))
}

/// One of the policies as placement has it.
pub(crate) fn policy(policy: &RoutePolicy, resources: &Resources) -> anyhow::Result<Policy> {
    to_policy(policy, &resources.pools).map_err(|problem| refused(&[problem]))
}

fn accept(read: Result<Resources, Vec<Problem>>) -> anyhow::Result<Resources> {
    match read {
        Ok(resources) => {
            for warning in &resources.warnings {
                note(&format!("warning: {warning}"));
            }
            Ok(resources)
        }
        Err(problems) => Err(refused(&problems)),
    }
}

/// All problems, one a line.
pub(crate) fn refused(problems: &[Problem]) -> anyhow::Error {
    let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
    wrong_input(lines.join("\n"))
}

fn texts(files: &[PathBuf]) -> anyhow::Result<Vec<(String, String)>> {
    files
        .iter()
        .map(|file| {
            let name = file.display().to_string();
            let text = std::fs::read_to_string(file).map_err(|error| {
                wrong_input(format!(
                    "cannot read {name}: {error}; give a file of resources with -f"
                ))
            })?;
            Ok((name, text))
        })
        .collect()
}

//! Every word that the operator gives as the reason of a condition or of an event is explained in `docs/cluster.md`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const DOCUMENT: &str = include_str!("../../docs/cluster.md");

/// Where reasons are given.
const PLACES: [&str; 5] = [
    "pool",
    "pool.rs",
    "policy",
    "policy.rs",
    "controller/pools.rs",
];

/// Words there that are Kubernetes' own, or names of kinds and fields.
const OTHERS: [&str; 29] = [
    "Always",
    "AlwaysAllow",
    "Auto",
    "ContainersReady",
    "CreateContainerConfigError",
    "CreateContainerError",
    "DecodePool",
    "Directory",
    "DisruptionTarget",
    "ErrImageNeverPull",
    "ErrImagePull",
    "Failed",
    "FallbackToLogsOnError",
    "False",
    "File",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "Memory",
    "OOMKilled",
    "Pod",
    "PodScheduled",
    "PrefillPool",
    "RegistryUnavailable",
    "RunContainerError",
    "RuntimeDefault",
    "ScheduleAnyway",
    "Succeeded",
    "True",
];

#[test]
fn every_reason_of_a_condition_or_an_event_is_in_the_document_for_clusters() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut words = BTreeSet::new();
    for place in PLACES {
        for file in files(&source.join(place)) {
            words.extend(words_of(&fs::read_to_string(file).unwrap()));
        }
    }
    let (others, reasons): (Vec<_>, Vec<_>) = words
        .iter()
        .map(String::as_str)
        .partition(|word| OTHERS.contains(word));
    let known = ["NameTaken", "DrainTakenBack", "NotAdopted", "PoolMissing"];
    let unseen = known.into_iter().filter(|word| !reasons.contains(word));
    assert_eq!(unseen.collect::<Vec<_>>(), [""; 0], "they are not found");
    let gone = OTHERS.into_iter().filter(|word| !others.contains(word));
    assert_eq!(
        gone.collect::<Vec<_>>(),
        [""; 0],
        "nobody says them any more"
    );
    let untold = reasons
        .into_iter()
        .filter(|word| !DOCUMENT.contains(&format!("`{word}`")));
    assert_eq!(untold.collect::<Vec<_>>(), [""; 0], "explain them there");
}

/// Files of the source, without those of tests.
fn files(place: &Path) -> Vec<PathBuf> {
    let name = place.file_stem().unwrap();
    if name == "tests" {
        return Vec::new();
    }
    if place.is_file() {
        return vec![place.to_owned()];
    }
    let entries = fs::read_dir(place).unwrap();
    let all = entries.map(|entry| entry.unwrap().path());
    all.flat_map(|place| files(&place)).collect()
}

/// Texts that are one word in CamelCase.
fn words_of(source: &str) -> impl Iterator<Item = String> {
    let code = source
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let texts = code.flat_map(|line| line.split('"').skip(1).step_by(2));
    texts
        .filter(|text| {
            text.starts_with(|c: char| c.is_ascii_uppercase())
                && text.chars().all(|c| c.is_ascii_alphabetic())
                && text.contains(|c: char| c.is_ascii_lowercase())
        })
        .map(str::to_owned)
}

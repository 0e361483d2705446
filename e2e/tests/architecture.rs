//! The cut of the crates: which may know which, where engines and Kubernetes may be, and how files are kept.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use baton_e2e::binaries::repository;
use serde_json::Value;

/// Crates of the workspace that each may name in `[dependencies]` and `[build-dependencies]`.
const MAY_DEPEND: &[(&str, &[&str])] = &[
    ("baton-protocol", &[]),
    ("baton-crds", &["baton-protocol", "baton-placement"]),
    ("baton-placement", &["baton-protocol"]),
    ("baton-kernels", &[]),
    ("baton-system", &[]),
    ("baton-telemetry", &[]),
    ("baton-text", &[]),
    (
        "baton-worker",
        &[
            "baton-protocol",
            "baton-placement",
            "baton-kernels",
            "baton-system",
            "baton-telemetry",
            "baton-text",
        ],
    ),
    (
        "baton-router",
        &[
            "baton-protocol",
            "baton-crds",
            "baton-placement",
            "baton-system",
            "baton-telemetry",
            "baton-text",
        ],
    ),
    (
        "baton-operator",
        &["baton-protocol", "baton-crds", "baton-system"],
    ),
    (
        "baton",
        &[
            "baton-protocol",
            "baton-crds",
            "baton-placement",
            "baton-worker",
            "baton-router",
        ],
    ),
    (
        "baton-e2e",
        &[
            "baton-protocol",
            "baton-crds",
            "baton-placement",
            "baton-system",
            "baton-text",
            "baton-worker",
            "baton-router",
            "baton",
        ],
    ),
    (
        "baton-fuzz",
        &[
            "baton-protocol",
            "baton-crds",
            "baton-placement",
            "baton-text",
            "baton-worker",
            "baton-router",
        ],
    ),
];

/// Crates without input and output: nothing that opens, sends or waits.
const PURE: [&str; 4] = [
    "baton-protocol",
    "baton-placement",
    "baton-kernels",
    "baton-text",
];
const INPUT_AND_OUTPUT: [&str; 6] = ["tokio", "hyper", "axum", "hyper-util", "rustix", "tempfile"];

/// What only one crate may depend on, by the beginning of its name.
const ONLY_IN: [(&str, &[&str]); 4] = [
    ("candle", &["baton-worker"]),
    ("kube", &["baton-operator", "baton-router"]),
    ("k8s-openapi", &["baton-operator", "baton-router"]),
    ("tokenizers", &["baton-text"]),
];

const LONGEST_FILE: usize = 500;

/// Where code may be that the compiler does not check.
const UNSAFE_IN: [&str; 2] = ["kernels/src/lanes/avx512.rs", "worker/src/transport"];

/// Direct dependencies of each crate of the workspace, tests' own left out.
fn dependencies() -> Result<BTreeMap<String, BTreeSet<String>>> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args([
            "metadata",
            "--offline",
            "--no-deps",
            "--format-version",
            "1",
        ])
        .current_dir(repository())
        .output()?;
    ensure!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok(list(&metadata["packages"])
        .iter()
        .map(|package| {
            let named = list(&package["dependencies"])
                .iter()
                .filter(|dependency| dependency["kind"].as_str() != Some("dev"))
                .map(|dependency| text(&dependency["name"]))
                .collect();
            (text(&package["name"]), named)
        })
        .collect())
}

fn sources(folder: &Path, into: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            sources(&path, into)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
    Ok(())
}

/// Every Rust file of every crate: `src`, `tests`, `benches`.
fn all_sources() -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(repository())? {
        let folder = entry?.path();
        if !folder.join("Cargo.toml").is_file() {
            continue;
        }
        for part in ["src", "tests", "benches"] {
            if folder.join(part).is_dir() {
                sources(&folder.join(part), &mut files)?;
            }
        }
    }
    ensure!(files.len() > 50, "only {} files found", files.len());
    Ok(files)
}

fn report(problems: &[String]) -> Result<()> {
    ensure!(problems.is_empty(), "\n{}", problems.join("\n"));
    Ok(())
}

#[test]
fn dependencies_point_one_way() -> Result<()> {
    let crates = dependencies()?;
    let mut problems = Vec::new();
    for (name, named) in &crates {
        let Some((_, allowed)) = MAY_DEPEND.iter().find(|(known, _)| known == name) else {
            problems.push(format!(
                "{name} is a new crate: say here what it may depend on"
            ));
            continue;
        };
        for dependency in named
            .iter()
            .filter(|dependency| crates.contains_key(*dependency))
        {
            if !allowed.contains(&dependency.as_str()) {
                problems.push(format!("{name} must not depend on {dependency}"));
            }
        }
    }
    report(&problems)
}

#[test]
fn pure_crates_have_nothing_to_do_input_or_output_with() -> Result<()> {
    let crates = dependencies()?;
    let mut problems = Vec::new();
    for name in PURE {
        let named = crates
            .get(name)
            .with_context(|| format!("no crate {name}"))?;
        for dependency in INPUT_AND_OUTPUT.iter().filter(|one| named.contains(**one)) {
            problems.push(format!("{name} must not depend on {dependency}"));
        }
    }
    report(&problems)
}

#[test]
fn engines_and_kubernetes_stay_where_they_belong() -> Result<()> {
    let mut problems = Vec::new();
    for (name, named) in dependencies()? {
        for (prefix, allowed) in ONLY_IN {
            for dependency in named.iter().filter(|one| one.starts_with(prefix)) {
                if !allowed.contains(&name.as_str()) {
                    problems.push(format!("{name} must not depend on {dependency}"));
                }
            }
        }
    }
    report(&problems)
}

/// The request path does not know Kubernetes: in the router one module does, and what compiles it is behind that module.
#[test]
fn the_router_names_kubernetes_in_one_module() -> Result<()> {
    let router = repository().join("router");
    let mut files = Vec::new();
    for part in ["src", "tests"] {
        sources(&router.join(part), &mut files)?;
    }
    let mut problems = Vec::new();
    let mut found = 0;
    for path in files {
        let text = std::fs::read_to_string(&path)?;
        let shown = path.strip_prefix(&router).unwrap_or(&path);
        let own = shown == Path::new("src/cluster.rs") || shown.starts_with("src/cluster");
        for name in ["kube::", "k8s_openapi::", "baton_crds::"] {
            if !text.contains(name) {
                continue;
            }
            found += 1;
            if !own {
                problems.push(format!("{} names {name}", shown.display()));
            }
        }
    }
    // What finds nothing where there is some proves nothing.
    ensure!(found > 1, "found {found} in all");
    report(&problems)
}

#[test]
fn every_file_says_its_subject_first_and_is_short() -> Result<()> {
    let mut problems = Vec::new();
    for path in all_sources()? {
        let text = std::fs::read_to_string(&path)?;
        let lines = text.lines().count();
        let shown = path.strip_prefix(repository()).unwrap_or(&path).display();
        if lines > LONGEST_FILE {
            problems.push(format!(
                "{shown} has {lines} lines, {LONGEST_FILE} are allowed"
            ));
        }
        if !text.starts_with("//! ") {
            problems.push(format!(
                "{shown} does not begin with `//! ` and its subject"
            ));
        }
        if path.file_name().is_some_and(|name| name == "mod.rs") {
            problems.push(format!(
                "{shown}: a folder has its contents in a file beside it"
            ));
        }
    }
    report(&problems)
}

#[test]
fn files_are_named_after_their_subject() -> Result<()> {
    let problems: Vec<String> = all_sources()?
        .iter()
        .filter(|path| {
            path.file_stem()
                .and_then(|stem| stem.to_str())
                .is_some_and(|stem| {
                    ["utils", "util", "helpers", "common", "manager", "misc"].contains(&stem)
                })
        })
        .map(|path| format!("{} says nothing about what it holds", path.display()))
        .collect();
    report(&problems)
}

#[test]
fn unchecked_code_stays_where_it_is_argued() -> Result<()> {
    let mut problems = Vec::new();
    let mut found = 0;
    for path in all_sources()? {
        let text = std::fs::read_to_string(&path)?;
        let shown = path.strip_prefix(repository()).unwrap_or(&path);
        let blocks = text
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"))
            .filter(|line| line.contains(concat!("unsafe", " ")))
            .count();
        found += blocks;
        if blocks > 0 && !UNSAFE_IN.iter().any(|folder| shown.starts_with(folder)) {
            problems.push(format!("{} has {blocks} of it", shown.display()));
        }
    }
    // What finds nothing where there is some proves nothing.
    ensure!(found > 1, "found {found} in all");
    report(&problems)
}

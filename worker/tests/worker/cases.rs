//! The table of known ownership faults in `docs/handoff-cases.md` is whole, and every test that it names exists.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

const CASES: usize = 34;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Names of the functions in all source files of the crates.
fn functions() -> HashSet<String> {
    let mut found = HashSet::new();
    let mut folders: Vec<PathBuf> = ["protocol", "placement", "router", "worker", "cli", "e2e"]
        .iter()
        .map(|name| repository().join(name))
        .collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let names = text.split("fn ").skip(1).map(|rest| {
                    rest.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
                        .next()
                        .unwrap_or_default()
                        .to_owned()
                });
                found.extend(names);
            }
        }
    }
    found
}

#[test]
fn every_known_fault_has_its_row_and_every_named_test_exists() {
    let text = fs::read_to_string(repository().join("docs/handoff-cases.md")).unwrap();
    let rows: Vec<Vec<&str>> = text
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| #"))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let numbers: Vec<usize> = rows.iter().map(|row| row[0].parse().unwrap()).collect();
    assert_eq!(numbers, (1..=CASES).collect::<Vec<_>>());
    let functions = functions();
    for row in rows {
        let [number, _, wrong, excluded, tests] = row[..] else {
            panic!("case {row:?} has not five columns");
        };
        assert!(!wrong.is_empty() && !excluded.is_empty(), "case {number}");
        let named: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty(), "case {number} names no test");
        for name in named {
            assert!(functions.contains(name), "case {number}: no test {name}");
        }
    }
}

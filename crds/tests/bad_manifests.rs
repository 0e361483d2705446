//! Manifests that are refused, each with the line, the field and the sentence that its author sees.
//!
//! Every case is the good fleet below with one passage replaced. The comment `#!` in the replacement marks the line that
//! has to be named.

use baton_crds::{Problem, read_fleet};
use cases::{FLEET, all};

#[path = "bad_manifests/cases.rs"]
mod cases;

fn problems(text: &str) -> Vec<Problem> {
    read_fleet([("fleet.yaml", text)])
        .map(|_| ())
        .err()
        .unwrap_or_default()
}

#[test]
fn the_fleet_that_the_cases_change_is_good() {
    assert_eq!(problems(FLEET), []);
}

#[test]
fn each_bad_manifest_names_line_field_and_what_is_allowed() {
    let mut failures = String::new();
    for case in all() {
        let text = case.manifest();
        let line = text
            .lines()
            .position(|line| line.contains("#!"))
            .map(|index| index as u64 + 1);
        let problems = problems(&text);
        let found = problems.iter().any(|problem| {
            problem.path == case.path
                && problem.message.contains(case.message)
                && line.is_none_or(|line| problem.line == line)
                && problem.line > 0
                && problem.file == "fleet.yaml"
        });
        if !found {
            let shown: Vec<String> = problems.iter().map(ToString::to_string).collect();
            failures += &format!(
                "\nline {line:?} {}: {}\n  found {shown:#?}\n",
                case.path, case.message
            );
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

/// What a cluster takes although `baton up` does not is about other objects, which may come later, and about levels of topology, whose
/// names are the operator's configuration.
#[test]
fn a_cluster_takes_only_what_depends_on_more_than_the_object() {
    let taken: Vec<&str> = all()
        .filter(|case| case.cluster.is_empty())
        .map(|case| case.path)
        .collect();
    for path in &taken {
        assert!(
            path.contains("Pools[0]")
                || path.contains("room")
                || path.contains("row")
                || path.ends_with("Level"),
            "{path}"
        );
    }
    assert!(all().count() - taken.len() >= 40);
}

#[test]
fn all_problems_are_reported_in_the_order_of_lines() {
    let text = FLEET
        .replacen("    blockSize: 16", "    blocksize: 16", 1)
        .replacen("    leaseSeconds: 30", "    leaseSeconds: 0", 1)
        .replacen("  mode: Conditional", "  mode: Sometimes", 1)
        .replacen("  aliases: [small]", "  aliases: [small, tiny, tiny]", 1);
    let problems = problems(&text);
    let paths: Vec<&str> = problems
        .iter()
        .map(|problem| problem.path.as_str())
        .collect();
    assert_eq!(
        paths,
        [
            "spec.engine.blocksize",
            "spec.kvPool.leaseSeconds",
            "spec.aliases[2]",
            "spec.mode"
        ],
        "{problems:#?}"
    );
    assert!(problems.is_sorted_by_key(|problem| problem.line));
}

#[test]
fn a_pool_with_a_problem_is_not_reported_as_missing_too() {
    let text = FLEET.replacen("    blockSize: 16", "    blockSize: 17", 1);
    let problems = problems(&text);
    assert_eq!(problems.len(), 1, "{problems:#?}");
}

#[test]
fn a_sentence_says_it_all() {
    let text = FLEET.replacen("    blockSize: 16", "    blockSize: 9999", 1);
    assert_eq!(
        problems(&text)[0].to_string(),
        "fleet.yaml:15: PrefillPool prefill: spec.engine.blockSize: found 9999, must be an integer from 2 to 1024"
    );
}

#[test]
fn the_same_name_twice_names_both_places() {
    let second = FLEET.split("---\n").nth(1).unwrap();
    let error = read_fleet([("a.yaml", FLEET), ("b.yaml", second)]).unwrap_err();
    assert_eq!(error.len(), 1, "{error:#?}");
    assert_eq!((error[0].file.as_str(), error[0].line), ("b.yaml", 4));
    assert_eq!(
        error[0].message,
        "is there already at a.yaml:27: rename one of the two"
    );
}

#[test]
fn a_model_has_one_policy() {
    let policy = FLEET
        .split("---\n")
        .nth(2)
        .unwrap()
        .replace("  name: tiny\nspec", "  name: other\nspec");
    let policy = policy
        .replace("model: tiny", "model: small")
        .replace("aliases: [small]", "aliases: [little]");
    let error = read_fleet([("a.yaml", FLEET), ("b.yaml", &policy)]).unwrap_err();
    let claimed = error
        .iter()
        .find(|problem| problem.message.contains("already"))
        .unwrap();
    assert_eq!(claimed.path, "spec.model");
    assert_eq!(
        claimed.message,
        "model small is served by RoutePolicy tiny already: one policy per model"
    );
}

#[test]
fn what_is_no_yaml_or_no_resource_is_said_with_its_line() {
    let error = problems("apiVersion: serving.baton.dev/v1alpha1\nkind: [PrefillPool\n");
    assert!(
        error[0].message.starts_with("not valid YAML: "),
        "{error:?}"
    );
    assert!(error[0].line > 0, "{error:?}");
    let error = problems(&FLEET.replacen("  replicas: 1", "  replicas: 1\n  replicas: 2", 1));
    assert_eq!(error[0].line, 9, "{error:?}");
    assert!(error[0].message.contains("duplicate"), "{error:?}");
    assert_eq!(
        problems("# nothing\n")[0].message,
        "holds no resource; give a PrefillPool, a DecodePool or a RoutePolicy"
    );
    assert!(
        problems("- a\n- b\n")[0]
            .message
            .contains("must be an object with apiVersion, kind, metadata, spec")
    );
    let no_policy = FLEET.split("---\n").next().unwrap();
    assert!(
        problems(no_policy)[0]
            .message
            .starts_with("no RoutePolicy given")
    );
}

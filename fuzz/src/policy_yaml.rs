//! The three resources, from YAML to their types and back.

use baton_crds::resources::Metadata;
use baton_crds::{GROUP, Problem, Resources, VERSION, read_documents, read_fleet};
use serde_json::{Value, json};

/// A problem says where, what was found and what is allowed, and shortens what it shows.
const LONGEST_PROBLEM: usize = 2048;

/// Reads any text. What it makes of a file, it makes of what it understood as well.
pub fn check(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let lines = 1 + text
        .bytes()
        .filter(|byte| matches!(byte, b'\n' | b'\r'))
        .count() as u64;
    match read_documents([("f.yaml", text)]) {
        Ok(resources) => round_trip(&resources),
        Err(problems) => said_well(&problems, lines),
    }
    match read_fleet([("f.yaml", text)]) {
        Ok(resources) => assert!(!resources.policies.is_empty(), "a fleet without a policy"),
        Err(problems) => said_well(&problems, lines),
    }
}

/// Its documents are resources.
pub fn accepts(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_ok_and(|text| read_documents([("f.yaml", text)]).is_ok())
}

fn said_well(problems: &[Problem], lines: u64) {
    assert!(!problems.is_empty(), "refused without a reason");
    for problem in problems {
        // Separators that only YAML takes for line ends are not counted here.
        assert!(problem.line <= lines, "line {} of {lines}", problem.line);
        assert!(!problem.message.is_empty());
        let shown = problem.to_string();
        assert!(shown.len() <= LONGEST_PROBLEM, "{} bytes", shown.len());
        assert!(shown.starts_with("f.yaml"));
    }
}

fn round_trip(resources: &Resources) {
    // A file is refused for whatever an object of a cluster is: levels, which a cluster names itself, are all that it knows better.
    for object in objects(resources) {
        let problems = baton_crds::check_object(&object);
        assert!(problems.is_empty(), "{problems:?}\n{object}");
    }
    let text: Vec<String> = objects(resources).iter().map(plain).collect();
    let again = read_documents([("f.yaml", text.join("\n---\n").as_str())])
        .unwrap_or_else(|problems| panic!("{}\n{problems:?}", text.join("\n---\n")));
    assert_eq!(again.pools.len(), resources.pools.len());
    for (again, pool) in again.pools.iter().zip(&resources.pools) {
        assert_eq!(
            (&again.metadata, &again.spec, again.role),
            (&pool.metadata, &pool.spec, pool.role)
        );
    }
    assert_eq!(again.policies.len(), resources.policies.len());
    for (again, policy) in again.policies.iter().zip(&resources.policies) {
        assert_eq!(
            (&again.metadata, &again.spec),
            (&policy.metadata, &policy.spec)
        );
    }
}

/// Every resource as an API server would have it.
fn objects(resources: &Resources) -> Vec<Value> {
    let pools = resources.pools.iter().map(|pool| {
        let spec = serde_json::to_value(&pool.spec).expect("a spec can be written");
        document(pool.role.kind(), &pool.metadata, &spec)
    });
    let policies = resources.policies.iter().map(|policy| {
        let spec = serde_json::to_value(&policy.spec).expect("a spec can be written");
        document("RoutePolicy", &policy.metadata, &spec)
    });
    pools.chain(policies).collect()
}

fn document(kind: &str, metadata: &Metadata, spec: &Value) -> Value {
    json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": kind,
        "metadata": {
            "name": metadata.name, "namespace": metadata.namespace, "labels": metadata.labels,
            "generation": metadata.generation, "creationTimestamp": metadata.created,
        },
        "spec": spec,
    })
}

/// JSON is YAML once everything beyond visible ASCII is escaped in YAML's way.
fn plain(value: &Value) -> String {
    let mut out = String::new();
    for character in value.to_string().chars() {
        match u32::from(character) {
            0x20..=0x7e => out.push(character),
            code @ ..=0xffff => out.push_str(&format!("\\u{code:04x}")),
            code => out.push_str(&format!("\\U{code:08x}")),
        }
    }
    out
}

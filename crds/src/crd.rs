//! The CustomResourceDefinitions of the three kinds, made from the schema's tables.
//!
//! | module | subject |
//! |---|---|
//! | `structure` | tables → the structural schema that an API server holds objects against |
//! | `rules` | what a field may hold given another one, in CEL: the same as `crate::rules` says in Rust |
//!
//! Conventions, each for a reason: nothing is nullable (`kubectl explain` and server-side apply cannot say it), there are no floats and no
//! unsigned integers (Kubernetes' formats have none), every text, list and map has a bound (the cost of rules is estimated from them), no
//! object keeps fields that it does not know (a misspelt one has to be an error), messages say what must be.

mod rules;
mod structure;

use serde_json::{Value, json};

use crate::resources::PoolRole;
use crate::schema::Field;
use crate::schema::policy::ROUTE_POLICY;
use crate::schema::pool::POOL;
use crate::schema::status::{POLICY_STATUS, POOL_STATUS};
use crate::{GROUP, VERSION};

/// One kind, as Kubernetes is told of it.
struct Definition {
    kind: &'static str,
    plural: &'static str,
    short: &'static str,
    about: &'static str,
    spec: &'static [Field],
    status: &'static [Field],
}

static DEFINITIONS: [Definition; 3] = [
    Definition {
        kind: "PrefillPool",
        plural: "prefillpools",
        short: "pfp",
        about: "Workers that compute prompts and hand their KV cache over.",
        spec: POOL,
        status: POOL_STATUS,
    },
    Definition {
        kind: "DecodePool",
        plural: "decodepools",
        short: "dcp",
        about: "Workers that generate tokens, from KV that was handed over to them or that they computed themselves.",
        spec: POOL,
        status: POOL_STATUS,
    },
    Definition {
        kind: "RoutePolicy",
        plural: "routepolicies",
        short: "rtp",
        about: "Joins pools to a model and says how its requests are placed.",
        spec: ROUTE_POLICY,
        status: POLICY_STATUS,
    },
];

/// Name of the CustomResourceDefinition and the definition, of each kind.
#[must_use]
pub fn definitions() -> Vec<(String, Value)> {
    DEFINITIONS
        .iter()
        .map(|kind| (format!("{}.{GROUP}", kind.plural), definition(kind)))
        .collect()
}

/// Path from the repository's root and text of each file that is made of the definitions.
#[must_use]
pub fn files() -> Vec<(String, String)> {
    let mut files = Vec::new();
    for (name, mut definition) in definitions() {
        let plural = name.split('.').next().unwrap_or_default().to_owned();
        files.push((
            format!("crds/generated/{plural}.yaml"),
            document(&definition),
        ));
        // Deleting the chart must not delete every pool with it.
        definition["metadata"]["annotations"] = json!({"helm.sh/resource-policy": "keep"});
        files.push((
            format!("charts/baton-crds/templates/{plural}.yaml"),
            document(&definition),
        ));
    }
    files
}

fn document(definition: &Value) -> String {
    let yaml = serde_saphyr::to_string(definition).unwrap_or_default();
    format!(
        "# Made by `cargo run -p baton-crds --bin crdgen` from crds/src/schema/: change it there.\n{yaml}"
    )
}

fn definition(kind: &Definition) -> Value {
    let pool = PoolRole::of_kind(kind.kind).is_some();
    let mut spec = structure::object(kind.spec);
    rules::add(&mut spec, pool);
    spec["description"] = json!("What is wanted.");
    let mut status = structure::object(kind.status);
    status["description"] = json!("What is, as the operator sees it.");
    let mut version = json!({
        "name": VERSION,
        "served": true,
        "storage": true,
        "additionalPrinterColumns": if pool { pool_columns() } else { policy_columns() },
        "subresources": {"status": {}},
        "selectableFields": [{"jsonPath": if pool { ".spec.model.name" } else { ".spec.model" }}],
        "schema": {"openAPIV3Schema": {
            "type": "object",
            "description": kind.about,
            "required": ["metadata", "spec"],
            "properties": {
                "apiVersion": {"type": "string", "description": format!("{GROUP}/{VERSION}")},
                "kind": {"type": "string", "description": kind.kind},
                "metadata": {"type": "object"},
                "spec": spec,
                "status": status,
            },
            "x-kubernetes-validations": rules::of_names(),
        }},
    });
    if pool {
        version["subresources"]["scale"] = json!({
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        });
    }
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": format!("{}.{GROUP}", kind.plural),
            "labels": {crate::labels::APP_PART_OF: crate::labels::PART_OF_BATON},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.kind,
                "listKind": format!("{}List", kind.kind),
                "plural": kind.plural,
                "singular": kind.kind.to_lowercase(),
                "shortNames": [kind.short],
                "categories": ["baton"],
            },
            "versions": [version],
        },
    })
}

fn column(name: &str, kind: &str, path: &str, about: &str) -> Value {
    json!({"name": name, "type": kind, "jsonPath": path, "description": about})
}

/// Shown with `-o wide` only.
fn detail(name: &str, kind: &str, path: &str, about: &str) -> Value {
    let mut column = column(name, kind, path, about);
    column["priority"] = json!(1);
    column
}

fn condition(kind: &str, member: &str) -> String {
    format!(".status.conditions[?(@.type==\"{kind}\")].{member}")
}

fn pool_columns() -> Value {
    json!([
        column(
            "Ready",
            "string",
            ".status.ready",
            "Ready pods of those wanted."
        ),
        column(
            "Up-to-date",
            "integer",
            ".status.updatedReplicas",
            "Pods of the current revision."
        ),
        column(
            "Draining",
            "integer",
            ".status.drainingReplicas",
            "Pods that finish what they run."
        ),
        column(
            "Model",
            "string",
            ".spec.model.name",
            "As clients ask for it."
        ),
        column(
            "Revision",
            "string",
            ".status.revisions[0].hash",
            "The current one."
        ),
        column(
            "Age",
            "date",
            ".metadata.creationTimestamp",
            "Since it was created."
        ),
        detail(
            "Available",
            "integer",
            ".status.availableReplicas",
            "Pods that serve."
        ),
        detail("Engine", "string", ".spec.engine.type", "What computes."),
        detail(
            "Reason",
            "string",
            &condition("Ready", "reason"),
            "Of the condition Ready."
        ),
        detail(
            "Message",
            "string",
            &condition("Ready", "message"),
            "Of the condition Ready."
        ),
    ])
}

fn policy_columns() -> Value {
    json!([
        column("Model", "string", ".spec.model", "As clients ask for it."),
        column("Mode", "string", ".spec.mode", "How requests are placed."),
        column(
            "Ready",
            "string",
            &condition("Ready", "status"),
            "In force on every router and serving."
        ),
        column(
            "Disaggregating",
            "string",
            &condition("Disaggregating", "status"),
            "Whether prefill can be remote.",
        ),
        column(
            "Age",
            "date",
            ".metadata.creationTimestamp",
            "Since it was created."
        ),
        detail(
            "Accepted",
            "string",
            &condition("Accepted", "status"),
            "Whether it can be honoured."
        ),
        detail(
            "Compatible",
            "string",
            &condition("Compatible", "status"),
            "Whether its pools can hand over KV."
        ),
        detail(
            "Reason",
            "string",
            &condition("Ready", "reason"),
            "Of the condition Ready."
        ),
        detail(
            "Message",
            "string",
            &condition("Ready", "message"),
            "Of the condition Ready."
        ),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every object of a schema, with its path.
    fn walk(schema: &Value, path: &str, see: &mut impl FnMut(&str, &Value)) {
        see(path, schema);
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            walk(property, &format!("{path}.{name}"), see);
        }
        for inner in ["items", "additionalProperties"] {
            if let Some(inner) = schema.get(inner) {
                walk(inner, &format!("{path}[]"), see);
            }
        }
    }

    #[test]
    fn everything_is_bounded_and_nothing_is_kept_unknown() {
        for (name, definition) in definitions() {
            let schema =
                &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
            for part in ["spec", "status"] {
                walk(&schema[part], part, &mut |path, schema| {
                    let has = |member: &str| schema.get(member).is_some();
                    for never in [
                        "nullable",
                        "x-kubernetes-preserve-unknown-fields",
                        "x-kubernetes-embedded-resource",
                    ] {
                        assert!(!has(never), "{name} {path} has {never}");
                    }
                    match schema["type"].as_str() {
                        Some("string") => assert!(
                            has("maxLength") || has("enum"),
                            "{name} {path} has no bound"
                        ),
                        Some("integer") => {
                            assert!(has("minimum"), "{name} {path} has no bound");
                            assert!(
                                ["int32", "int64"].contains(&schema["format"].as_str().unwrap())
                            );
                        }
                        Some("array") => assert!(
                            has("maxItems") && has("x-kubernetes-list-type"),
                            "{name} {path} has no bound or no list type"
                        ),
                        Some("object") => assert!(
                            !has("additionalProperties") || has("maxProperties"),
                            "{name} {path} has no bound"
                        ),
                        Some("boolean") => {}
                        None if has("x-kubernetes-int-or-string") => {}
                        other => panic!("{name} {path} has type {other:?}"),
                    }
                });
            }
        }
    }

    /// `kubectl apply` keeps a copy of the whole in an annotation, and 262144 bytes is all that annotations may have.
    #[test]
    fn a_definition_fits_an_annotation() {
        for (name, definition) in definitions() {
            let length = definition.to_string().len();
            assert!(length < 200_000, "{name} has {length} bytes");
        }
    }

    #[test]
    fn messages_of_rules_say_what_must_be() {
        for (name, definition) in definitions() {
            let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
            let mut rules = 0;
            walk(schema, "", &mut |path, schema| {
                for rule in schema["x-kubernetes-validations"]
                    .as_array()
                    .into_iter()
                    .flatten()
                {
                    rules += 1;
                    let message = rule["message"].as_str().unwrap_or_default();
                    assert!(
                        ["must", "not supported yet", "give "]
                            .iter()
                            .any(|word| message.contains(word)),
                        "{name} {path}: {message:?}"
                    );
                }
            });
            assert!(rules > 10, "{name} has {rules}");
        }
    }
}

//! One object as the API server gives it: checked as a file is, since it may be older than a rule, and then typed.

use serde_json::Value;

use crate::check::Findings;
use crate::node::Node;
use crate::policy::RoutePolicySpec;
use crate::pool::PoolSpec;
use crate::problem::Problem;
use crate::resources::{Origin, Pool, PoolRole, RoutePolicy, spec_fields, typed};
use crate::schema::METADATA;
use crate::{GROUP, VERSION, rules};

impl Pool {
    /// A `PrefillPool` or `DecodePool` of a cluster.
    ///
    /// # Errors
    /// Every problem of the object; each names object and field, and no file.
    pub fn from_object(object: &Value) -> Result<Self, Vec<Problem>> {
        let (kind, title, origin) = examined(object)?;
        let Some(role) = PoolRole::of_kind(&kind) else {
            return Err(vec![origin.problem(
                title,
                "kind",
                "must be PrefillPool or DecodePool".to_owned(),
            )]);
        };
        let (metadata, spec) = typed::<PoolSpec>(&origin, &title).map_err(|one| vec![one])?;
        let problems = rules::pool(&spec, &origin, &title, None);
        if problems.is_empty() {
            Ok(Self {
                role,
                metadata,
                spec,
                origin,
            })
        } else {
            Err(problems)
        }
    }
}

impl RoutePolicy {
    /// A `RoutePolicy` of a cluster.
    ///
    /// # Errors
    /// As with [`Pool::from_object`].
    pub fn from_object(object: &Value) -> Result<Self, Vec<Problem>> {
        let (kind, title, origin) = examined(object)?;
        if kind != "RoutePolicy" {
            return Err(vec![origin.problem(
                title,
                "kind",
                "must be RoutePolicy".to_owned(),
            )]);
        }
        let (metadata, spec) =
            typed::<RoutePolicySpec>(&origin, &title).map_err(|one| vec![one])?;
        let problems = rules::policy(&spec, &origin, &title, None);
        if problems.is_empty() {
            Ok(Self {
                metadata,
                spec,
                origin,
            })
        } else {
            Err(problems)
        }
    }
}

/// Everything wrong with an object of a cluster, of any of the three kinds. What it may hold given other objects is not looked at.
#[must_use]
pub fn check_object(object: &Value) -> Vec<Problem> {
    let kind = object["kind"].as_str().unwrap_or_default();
    let problems = if PoolRole::of_kind(kind).is_some() {
        Pool::from_object(object).err()
    } else {
        RoutePolicy::from_object(object).err()
    };
    problems.unwrap_or_default()
}

/// Kind, title and document of an object whose name and spec hold against the schema. The rest of the metadata is Kubernetes' own
/// affair.
fn examined(object: &Value) -> Result<(String, String, Origin), Vec<Problem>> {
    let kind = object["kind"].as_str().unwrap_or_default().to_owned();
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let title = format!("{kind} {name}").trim().to_owned();
    let document = Node::from_json(object);
    let mut findings = Findings::new("", title.clone());
    let wanted = format!("{GROUP}/{VERSION}");
    if object["apiVersion"] != wanted.as_str() {
        findings.problem(0, "apiVersion", format!("must be {wanted}"));
    }
    if let Some(name) = document.get("metadata").and_then(|node| node.entry("name")) {
        findings.known(name, "metadata.name", METADATA);
    } else {
        findings.problem(0, "metadata.name", "is required".to_owned());
    }
    match (spec_fields(&kind), document.get("spec")) {
        (None, _) => findings.problem(0, "kind", format!("found \"{kind}\", not one of Baton's")),
        (_, None) => findings.problem(0, "spec", "is required".to_owned()),
        (Some(fields), Some(spec)) => findings.object(spec, 0, "spec", fields),
    }
    let problems = std::mem::take(&mut findings.problems);
    if problems.is_empty() {
        let origin = Origin {
            file: String::new(),
            document,
        };
        Ok((kind, title, origin))
    } else {
        Err(problems)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::placement::to_policy;

    fn object(kind: &str, spec: &Value) -> Value {
        json!({
            "apiVersion": "serving.baton.dev/v1alpha1", "kind": kind,
            "metadata": {
                "name": "p", "namespace": "n", "generation": 7, "uid": "u", "creationTimestamp": "2026-11-30T00:00:00Z",
                "labels": {"a": ""}, "deletionTimestamp": "2026-11-30T00:00:00Z", "managedFields": [{}],
            },
            "spec": spec, "status": {"anything": 1},
        })
    }

    fn pool_spec() -> Value {
        json!({
            "model": {"name": "m", "source": {"uri": "builtin://tiny"}}, "engine": {"type": "Builtin"},
            "accelerator": {"count": 2}, "topology": {"domain": {"row": "r1"}},
        })
    }

    #[test]
    fn an_object_becomes_what_a_file_would() {
        let pool = Pool::from_object(&object("DecodePool", &pool_spec())).unwrap();
        assert_eq!(pool.role, PoolRole::Decode);
        assert_eq!(pool.metadata.generation, 7);
        assert_eq!(pool.metadata.namespace, "n");
        assert_eq!(
            pool.metadata.created.as_deref(),
            Some("2026-11-30T00:00:00Z")
        );
        assert_eq!(pool.spec.accelerators(), 2);
        let policy = json!({"model": "m", "decodePools": [{"name": "p"}], "topology": {"farthestLevel": "row"}});
        let policy = RoutePolicy::from_object(&object("RoutePolicy", &policy)).unwrap();
        let policy = to_policy(&policy, [&pool]).unwrap();
        assert_eq!(
            (policy.generation, policy.decode_pools),
            (7, vec!["p".to_owned()])
        );
        assert_eq!(policy.transports, ["Local", "Shm", "Tcp"]);
    }

    #[test]
    fn problems_name_object_and_field_and_no_file() {
        let mut spec = pool_spec();
        spec["engine"]["blockSize"] = json!(24);
        spec["rollout"] = json!({"maxSurge": 0, "maxUnavailable": 0});
        let problems = check_object(&object("PrefillPool", &spec));
        assert_eq!(
            problems[0].to_string(),
            "PrefillPool p: spec.engine.blockSize: found 24, must be a power of two from 2 to 1024"
        );
        assert_eq!(problems[1].path, "spec.rollout");
        spec["engine"]["blockSise"] = json!(24);
        let problems = check_object(&object("PrefillPool", &spec));
        assert_eq!(problems[0].path, "spec.engine.blockSise");
        assert_eq!(check_object(&object("PrefillPool", &pool_spec())), []);
    }

    #[test]
    fn what_is_none_of_the_kinds_is_said() {
        assert_eq!(
            check_object(&object("Pod", &json!({})))[0].to_string(),
            "Pod p: kind: found \"Pod\", not one of Baton's"
        );
        let mut unnamed = object("DecodePool", &pool_spec());
        unnamed["metadata"]["name"] = json!("x".repeat(41));
        assert_eq!(check_object(&unnamed)[0].path, "metadata.name");
        assert_eq!(check_object(&json!(null))[0].path, "apiVersion");
    }

    #[test]
    fn labels_that_select_nothing_are_said_in_words_of_a_cluster() {
        let policy =
            json!({"model": "m", "decodePools": [{"selector": {"matchLabels": {"a": "b"}}}]});
        let policy = RoutePolicy::from_object(&object("RoutePolicy", &policy)).unwrap();
        assert_eq!(
            to_policy(&policy, []).unwrap_err().to_string(),
            "RoutePolicy p: spec.decodePools[0]: no DecodePool of namespace n has these labels: label one so, or give its name"
        );
    }
}

//! The three kinds as the API server speaks of them.
//!
//! An object whose spec cannot be read must not stop a watch, so every watch holds a [`Guarded`] one; what is wrong with it is said
//! in its status. A status that cannot be read is as good as none: it is made anew.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use baton_crds::status::{PoolStatus, RoutePolicyStatus};
use baton_crds::{GROUP, PoolRole, PoolSpec, RoutePolicySpec, VERSION};
use kube::Resource;
use kube::core::{DeserializeGuard, DynamicResourceScope, NamespaceResourceScope, ObjectMeta};
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

/// An object, or why it cannot be read, with its metadata in both cases.
pub type Guarded<K> = DeserializeGuard<K>;

/// Which of the two pool kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolKind(pub PoolRole);

impl Hash for PoolKind {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.kind().hash(state);
    }
}

/// A `PrefillPool` or a `DecodePool`.
#[derive(Clone, Debug)]
pub struct Pool {
    pub metadata: ObjectMeta,
    pub spec: PoolSpec,
    /// As the API server gave it, with what `spec` has no place for.
    written: Value,
    pub status: Option<PoolStatus>,
}

impl Pool {
    /// Rules that the object breaks; it may be older than a rule.
    #[must_use]
    pub fn problems(&self, role: PoolRole) -> Vec<String> {
        problems(role.kind(), &self.metadata, &self.written)
    }
}

impl<'de> Deserialize<'de> for Pool {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (metadata, spec, written, status) = Written::deserialize(deserializer)?.typed()?;
        Ok(Self {
            metadata,
            spec,
            written,
            status,
        })
    }
}

impl Resource for Pool {
    type DynamicType = PoolKind;
    type Scope = DynamicResourceScope;

    fn kind(kind: &PoolKind) -> Cow<'_, str> {
        kind.0.kind().into()
    }
    fn group(_: &PoolKind) -> Cow<'_, str> {
        GROUP.into()
    }
    fn version(_: &PoolKind) -> Cow<'_, str> {
        VERSION.into()
    }
    fn plural(kind: &PoolKind) -> Cow<'_, str> {
        match kind.0 {
            PoolRole::Prefill => "prefillpools".into(),
            PoolRole::Decode => "decodepools".into(),
        }
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// A `RoutePolicy`.
#[derive(Clone, Debug)]
pub struct RoutePolicy {
    pub metadata: ObjectMeta,
    pub spec: RoutePolicySpec,
    /// As the API server gave it.
    written: Value,
    pub status: Option<RoutePolicyStatus>,
}

impl RoutePolicy {
    /// Rules that the object breaks; it may be older than a rule.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        problems("RoutePolicy", &self.metadata, &self.written)
    }
}

impl<'de> Deserialize<'de> for RoutePolicy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (metadata, spec, written, status) = Written::deserialize(deserializer)?.typed()?;
        Ok(Self {
            metadata,
            spec,
            written,
            status,
        })
    }
}

impl Resource for RoutePolicy {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "RoutePolicy".into()
    }
    fn group((): &()) -> Cow<'_, str> {
        GROUP.into()
    }
    fn version((): &()) -> Cow<'_, str> {
        VERSION.into()
    }
    fn plural((): &()) -> Cow<'_, str> {
        "routepolicies".into()
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// Labels of an object; none where it has none.
#[must_use]
pub fn labels(metadata: &ObjectMeta) -> BTreeMap<String, String> {
    metadata.labels.clone().unwrap_or_default()
}

/// An object before its parts have types.
#[derive(Deserialize)]
struct Written {
    #[serde(default)]
    kind: String,
    #[serde(default)]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Value,
    #[serde(default)]
    status: Value,
}

impl Written {
    fn typed<S, T, E>(self) -> Result<(ObjectMeta, S, Value, Option<T>), E>
    where
        S: DeserializeOwned,
        T: DeserializeOwned,
        E: Error,
    {
        let spec = S::deserialize(&self.spec).map_err(|error| {
            // The rules name the field; the type knows only what it met.
            let problems = problems(&self.kind, &self.metadata, &self.spec);
            match problems.as_slice() {
                [] => E::custom(format!("spec: {error}")),
                found => E::custom(found.join("; ")),
            }
        })?;
        let status = serde_json::from_value(self.status).ok();
        Ok((self.metadata, spec, self.spec, status))
    }
}

fn problems(kind: &str, metadata: &ObjectMeta, spec: &Value) -> Vec<String> {
    let object = json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": kind,
        "metadata": {"name": metadata.name},
        "spec": spec,
    });
    let problems = baton_crds::check_object(&object);
    problems.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(spec: &Value, status: &Value) -> Guarded<Pool> {
        let object = json!({
            "apiVersion": "serving.baton.dev/v1alpha1", "kind": "DecodePool",
            "metadata": {"name": "d", "namespace": "n", "uid": "u", "generation": 3},
            "spec": spec, "status": status,
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_spec_that_cannot_be_read_leaves_the_metadata_and_the_reason() {
        let error = read(&json!({"model": 3}), &json!({})).0.unwrap_err();
        assert_eq!(error.metadata.name.as_deref(), Some("d"));
        assert_eq!(error.metadata.generation, Some(3));
        assert!(error.error.contains("spec.model: "), "{error}");
    }

    #[test]
    fn a_status_that_cannot_be_read_is_none() {
        let spec = json!({"model": {"name": "m"}, "engine": {"type": "Simulated"}});
        let pool = read(&spec, &json!({"replicas": "many"})).0.unwrap();
        assert_eq!(pool.status, None);
        assert_eq!(pool.spec.replicas, 1);
        let pool = read(&spec, &json!({"replicas": 2})).0.unwrap();
        assert_eq!(pool.status.unwrap().replicas, 2);
    }

    #[test]
    fn what_breaks_a_rule_is_named_with_its_field() {
        let spec =
            json!({"model": {"name": "m"}, "engine": {"type": "Simulated", "blockSize": 17}});
        let problems = read(&spec, &json!({}))
            .0
            .unwrap()
            .problems(PoolRole::Decode);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(
            problems[0].starts_with("DecodePool d: spec.engine.blockSize"),
            "{problems:?}"
        );
    }

    #[test]
    fn paths_are_those_of_the_kinds() {
        let path = |role| Pool::url_path(&PoolKind(role), Some("n"));
        assert_eq!(
            path(PoolRole::Prefill),
            "/apis/serving.baton.dev/v1alpha1/namespaces/n/prefillpools"
        );
        assert_eq!(
            path(PoolRole::Decode),
            "/apis/serving.baton.dev/v1alpha1/namespaces/n/decodepools"
        );
        assert_eq!(
            RoutePolicy::url_path(&(), None),
            "/apis/serving.baton.dev/v1alpha1/routepolicies"
        );
    }
}

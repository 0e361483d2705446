//! What the API server has shown so far, and what follows from each change of it. Pure.

use std::sync::Arc;

use baton_crds::placement::to_policy;
use baton_crds::{Pool, PoolRole, RoutePolicy};
use baton_placement::policy::Policy;
use k8s_openapi::api::core::v1::Pod;
use kube::api::DynamicObject;
use serde_json::Value;

use super::{index, pods};
use crate::clock::Moment;
use crate::fleet::discovery::Listed;
use crate::policy::InForce;

/// All objects of one kind, as they are now.
#[derive(Clone, Debug)]
pub enum Shown {
    Workers(Vec<Arc<Pod>>),
    Routers(Vec<Arc<Pod>>),
    Policies(Vec<Arc<DynamicObject>>),
    Pools(PoolRole, Vec<Arc<DynamicObject>>),
}

/// What somebody has to be told.
#[derive(Clone, Debug)]
pub enum Change {
    Workers(Vec<Listed>),
    Routers(u32),
    Policies(InForce),
}

/// The namespace, as far as it was listed.
#[derive(Debug)]
pub struct World {
    /// Names of the levels of topology, nearest first.
    levels: Vec<String>,
    workers: Option<Vec<Listed>>,
    routers: Option<u32>,
    policies: Option<Vec<Arc<DynamicObject>>>,
    prefill: Option<Vec<Pool>>,
    decode: Option<Vec<Pool>>,
}

impl World {
    pub fn new(levels: Vec<String>) -> Self {
        Self {
            levels,
            workers: None,
            routers: None,
            policies: None,
            prefill: None,
            decode: None,
        }
    }

    /// Each kind was listed once.
    pub fn is_listed(&self) -> bool {
        self.workers.is_some() && self.routers.is_some() && self.policies_listed()
    }

    /// A policy is read with its pools: before they are listed it would be refused, or mean something else.
    fn policies_listed(&self) -> bool {
        self.policies.is_some() && self.prefill.is_some() && self.decode.is_some()
    }

    /// Takes what is shown, and says what has changed by it. `before`: the policies in force.
    pub fn take(&mut self, shown: Shown, before: &InForce, now: Moment) -> Option<Change> {
        match shown {
            Shown::Workers(found) => {
                let list = pods::workers(&found, &self.levels);
                let changed = self.workers.as_ref() != Some(&list);
                self.workers = Some(list.clone());
                changed.then_some(Change::Workers(list))
            }
            Shown::Routers(found) => {
                let count = pods::routers(&found);
                (self.routers.replace(count) != Some(count)).then_some(Change::Routers(count))
            }
            Shown::Policies(found) => {
                self.policies = Some(found);
                self.policies_now(before, now)
            }
            Shown::Pools(role, found) => {
                // One that is not understood is the operator's to complain of; a policy that names it waits for its workers.
                let pools = found
                    .iter()
                    .filter_map(|pool| Pool::from_object(&json(pool)).ok());
                let pools: Vec<Pool> = pools.collect();
                match role {
                    PoolRole::Prefill => self.prefill = Some(pools),
                    PoolRole::Decode => self.decode = Some(pools),
                }
                self.policies_now(before, now)
            }
        }
    }

    fn policies_now(&self, before: &InForce, now: Moment) -> Option<Change> {
        if !self.policies_listed() {
            return None;
        }
        let pools: Vec<&Pool> = self.prefill.iter().chain(&self.decode).flatten().collect();
        let read = |object: &DynamicObject| policy(object, &pools);
        let objects = self.policies.as_deref().unwrap_or_default();
        let next = index::policies(&before.set, objects, now, read);
        let same = next.refused == before.refused && next.set.is(&before.set);
        (!same).then_some(Change::Policies(next))
    }
}

fn policy(object: &DynamicObject, pools: &[&Pool]) -> Result<Policy, String> {
    let policy = RoutePolicy::from_object(&json(object)).map_err(|problems| {
        let problems: Vec<String> = problems
            .iter()
            .map(|problem| format!("{}: {}", problem.path, problem.message))
            .collect();
        problems.join("; ")
    })?;
    let converted = to_policy(&policy, pools.iter().copied())
        .map_err(|problem| format!("{}: {}", problem.path, problem.message))?;
    // The pools' workers would answer in the name of a model that they are not.
    for (role, names) in [
        (PoolRole::Prefill, &converted.prefill_pools),
        (PoolRole::Decode, &converted.decode_pools),
    ] {
        let named = |pool: &&&Pool| pool.role == role && names.contains(&pool.metadata.name);
        for pool in pools.iter().filter(named) {
            let (theirs, ours) = (&pool.spec.model.name, &converted.model);
            if theirs != ours {
                return Err(format!(
                    "spec.{}: {} serves model {theirs}, this policy serves {ours}: they must be the same",
                    role.references(),
                    pool.title()
                ));
            }
        }
    }
    Ok(converted)
}

/// The object as it was read.
fn json(object: &DynamicObject) -> Value {
    // What was made of JSON becomes JSON again; `null` would be refused as no object.
    serde_json::to_value(object).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::pods::tests::pod;
    use super::*;

    const NOW: Moment = Moment(5_000_000);

    fn object(kind: &str, name: &str, spec: &Value) -> Arc<DynamicObject> {
        let object = json!({
            "apiVersion": "serving.baton.dev/v1alpha1", "kind": kind,
            "metadata": {"name": name, "namespace": "n", "generation": 3, "labels": {"tier": name}},
            "spec": spec,
        });
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn decode_pool(name: &str) -> Arc<DynamicObject> {
        let spec = json!({
            "model": {"name": "m", "source": {"uri": "builtin://tiny"}}, "engine": {"type": "Builtin"},
            "kvPool": {"transports": ["Tcp"]},
        });
        object("DecodePool", name, &spec)
    }

    fn route(pools: &Value) -> Arc<DynamicObject> {
        object(
            "RoutePolicy",
            "p",
            &json!({"model": "m", "decodePools": pools}),
        )
    }

    fn in_force(change: Option<Change>) -> InForce {
        let Some(Change::Policies(next)) = change else {
            panic!("{change:?}");
        };
        next
    }

    #[test]
    fn policies_are_read_once_their_pools_are_listed_and_again_when_those_change() {
        let mut world = World::new(Vec::new());
        let nothing = InForce::default();
        let by_label = route(&json!([{"selector": {"matchLabels": {"tier": "d"}}}]));
        let policies = Shown::Policies(vec![by_label]);
        assert!(world.take(policies, &nothing, NOW).is_none());
        let prefill = Shown::Pools(PoolRole::Prefill, Vec::new());
        assert!(world.take(prefill, &nothing, NOW).is_none());
        let decode = |pools| Shown::Pools(PoolRole::Decode, pools);
        let none = in_force(world.take(decode(Vec::new()), &nothing, NOW));
        assert!(none.set.policies.is_empty());
        let reason = &none.refused[0].reason;
        assert!(
            reason.starts_with("spec.decodePools[0]: no DecodePool"),
            "{reason}"
        );

        let all = vec![decode_pool("d"), decode_pool("other")];
        let next = in_force(world.take(decode(all.clone()), &none, NOW));
        let policy = next.set.of_model("m").unwrap();
        assert_eq!((policy.generation, next.refused.len()), (3, 0));
        assert_eq!(policy.policy.decode_pools, ["d"]);
        assert_eq!(policy.policy.transports, ["Tcp"]);
        assert!(
            world.take(decode(all), &next, NOW).is_none(),
            "nothing has changed"
        );
        // The pool goes: the policy is refused, and what was good stays.
        let gone = in_force(world.take(decode(Vec::new()), &next, NOW));
        assert_eq!((gone.set.policies.len(), gone.refused.len()), (1, 1));
    }

    #[test]
    fn an_object_that_breaks_a_rule_is_refused_by_field_and_a_broken_pool_refuses_nobody() {
        let mut world = World::new(Vec::new());
        let nothing = InForce::default();
        world.take(Shown::Pools(PoolRole::Prefill, Vec::new()), &nothing, NOW);
        let broken = object("DecodePool", "d", &json!({"modl": 1}));
        world.take(Shown::Pools(PoolRole::Decode, vec![broken]), &nothing, NOW);
        let misspelt = object("RoutePolicy", "q", &json!({"model": "o", "decodePool": []}));
        let named = route(&json!([{"name": "d"}]));
        let next = in_force(world.take(Shown::Policies(vec![named, misspelt]), &nothing, NOW));
        assert_eq!(next.set.of_model("m").unwrap().policy.decode_pools, ["d"]);
        let refusal = &next.refused[0];
        assert_eq!(refusal.name.as_deref(), Some("q"));
        assert!(
            refusal.reason.contains("spec.decodePool: "),
            "{}",
            refusal.reason
        );
    }

    #[test]
    fn a_policy_whose_pool_serves_another_model_is_refused() {
        let mut world = World::new(Vec::new());
        let nothing = InForce::default();
        world.take(Shown::Pools(PoolRole::Prefill, Vec::new()), &nothing, NOW);
        world.take(
            Shown::Pools(PoolRole::Decode, vec![decode_pool("d")]),
            &nothing,
            NOW,
        );
        let other = object(
            "RoutePolicy",
            "q",
            &json!({"model": "o", "decodePools": [{"name": "d"}]}),
        );
        let next = in_force(world.take(Shown::Policies(vec![other]), &nothing, NOW));
        assert!(next.set.policies.is_empty());
        assert_eq!(
            next.refused[0].reason,
            "spec.decodePools: DecodePool d serves model m, this policy serves o: they must be the same"
        );
    }

    #[test]
    fn workers_and_routers_are_told_when_they_change() {
        let mut world = World::new(Vec::new());
        let nothing = InForce::default();
        let pods = |names: &[&str]| {
            let read = |name: &&str| Arc::new(serde_json::from_value(pod(name)).unwrap());
            names.iter().map(read).collect::<Vec<Arc<Pod>>>()
        };
        let mut workers = |names: &[&str]| {
            let change = world.take(Shown::Workers(pods(names)), &nothing, NOW);
            change.map(|change| match change {
                Change::Workers(list) => list.iter().map(|one| one.name.to_string()).collect(),
                other => panic!("{other:?}"),
            })
        };
        // An empty list is something to know, too.
        assert_eq!(workers(&[]), Some(Vec::<String>::new()));
        assert_eq!(workers(&[]), None);
        assert_eq!(
            workers(&["b", "a"]),
            Some(vec!["a".to_owned(), "b".to_owned()])
        );
        assert_eq!(workers(&["a", "b"]), None);
        let mut routers = |count: usize| {
            let names: Vec<String> = (0..count).map(|name| name.to_string()).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            match world.take(Shown::Routers(pods(&names)), &nothing, NOW) {
                Some(Change::Routers(count)) => Some(count),
                None => None,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(
            [routers(0), routers(1), routers(2), routers(2), routers(1)],
            [Some(1), None, Some(2), None, Some(1)]
        );
        assert!(!world.is_listed());
        for shown in [
            Shown::Policies(Vec::new()),
            Shown::Pools(PoolRole::Prefill, Vec::new()),
            Shown::Pools(PoolRole::Decode, Vec::new()),
        ] {
            assert!(!world.is_listed());
            world.take(shown, &nothing, NOW);
        }
        assert!(world.is_listed());
    }
}

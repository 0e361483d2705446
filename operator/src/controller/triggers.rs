//! What has to be looked at after a change.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use baton_crds::{PoolRole, labels as names};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt as _;
use kube::core::PartialObjectMeta;

use super::caches::{Caches, says_role};
use super::key::{PolicyKey, PoolKey};
use super::watches::Change;
use super::work::Work;
use crate::objects::{Guarded, Pool, RoutePolicy};

/// A rollout changes many pods within moments: one look after them does.
const POOL_AFTER: Duration = Duration::from_millis(50);
/// A policy looks at what pools say of themselves, which they say after their own look.
const POLICY_AFTER: Duration = Duration::from_millis(250);

/// The queues of both controllers.
#[derive(Clone, Debug)]
pub struct Triggers {
    pub caches: Caches,
    pub pools: Arc<Work<PoolKey>>,
    pub policies: Arc<Work<PolicyKey>>,
}

impl Triggers {
    /// A pool has changed. What it declares matters to the pools and policies beside it, how it is doing to the policies only.
    pub fn pool(&self, role: PoolRole, change: &Change<'_, Guarded<Pool>>) {
        let Change::One {
            before,
            now,
            object,
        } = change
        else {
            return self.all();
        };
        let namespace = object.namespace().unwrap_or_default();
        let declared = |pool: &Guarded<Pool>| {
            (
                pool.uid(),
                pool.meta_generation(),
                pool.labels().clone(),
                pool.meta_deleting(),
            )
        };
        if before.as_deref().map(declared) == now.map(declared) {
            // Its status, which is the echo of its own look: to look again because of it would never end where a look fails.
            self.policies_of(&namespace);
        } else {
            // One that is gone is in the cache no more.
            self.touch_pool(role, *object);
            self.namespace(&namespace);
        }
    }

    /// A policy has changed: the pools that it names or named, and policies that want the same model.
    pub fn policy(&self, change: &Change<'_, Guarded<RoutePolicy>>) {
        let Change::One {
            before,
            now,
            object,
        } = change
        else {
            return self.all();
        };
        let namespace = object.namespace().unwrap_or_default();
        let declared = |policy: &Guarded<RoutePolicy>| {
            (
                policy.uid(),
                policy.meta_generation(),
                policy.meta_deleting(),
            )
        };
        if before.as_deref().map(declared) != now.map(declared) {
            self.touch_policy(*object);
            self.namespace(&namespace);
        }
    }

    /// A pod with a pool's label.
    pub fn worker(&self, change: &Change<'_, Pod>) {
        let Change::One { before, object, .. } = change else {
            return self.all();
        };
        for pod in before.as_deref().into_iter().chain([*object]) {
            for key in pools_of(pod) {
                self.pools.touch(key, POOL_AFTER);
            }
        }
    }

    /// A router's pod.
    pub fn router(&self, change: &Change<'_, Pod>) {
        match change {
            Change::One { object, .. } => {
                self.policies_of(&object.namespace().unwrap_or_default());
            }
            Change::All => self.all(),
        }
    }

    /// Of a node only its being there and its labels matter. It reports on itself every few minutes, which changes neither.
    pub fn node(&self, change: &Change<'_, PartialObjectMeta<Node>>) {
        let Change::One {
            before,
            now,
            object,
        } = change
        else {
            return self.all();
        };
        let labels = |node: &PartialObjectMeta<Node>| node.metadata.labels.clone();
        if before.as_deref().map(labels) == now.map(labels) {
            return;
        }
        let name = object.name_any();
        let on_it = |pod: &Pod| {
            pod.spec
                .as_ref()
                .is_some_and(|spec| spec.node_name.as_deref() == Some(&name))
        };
        let pods = self.caches.workers.state_filter(on_it);
        let keys: BTreeSet<PoolKey> = pods.iter().flat_map(|pod| pools_of(pod)).collect();
        for key in keys {
            self.pools.touch(key, POOL_AFTER);
        }
    }

    /// A disruption budget with a pool's labels.
    pub fn budget(&self, change: &Change<'_, PodDisruptionBudget>) {
        match change {
            Change::One { object, .. } => {
                for key in pools_of_labels(*object) {
                    self.pools.touch(key, POOL_AFTER);
                }
            }
            Change::All => self.all(),
        }
    }

    fn namespace(&self, namespace: &str) {
        for (role, pool) in self.caches.pools_of(namespace) {
            self.touch_pool(role, &*pool);
        }
        self.policies_of(namespace);
    }

    fn policies_of(&self, namespace: &str) {
        for policy in self.caches.policies_of(namespace) {
            self.touch_policy(&*policy);
        }
    }

    /// Everything: what went while a watch was cut is in no change.
    pub fn all(&self) {
        for (role, pools) in [
            (PoolRole::Prefill, &self.caches.prefill),
            (PoolRole::Decode, &self.caches.decode),
        ] {
            for pool in pools.state() {
                self.touch_pool(role, &*pool);
            }
        }
        for policy in self.caches.policies.state() {
            self.touch_policy(&*policy);
        }
    }

    fn touch_pool(&self, role: PoolRole, pool: &impl kube::ResourceExt) {
        let key = PoolKey {
            role,
            namespace: pool.namespace().unwrap_or_default(),
            name: pool.name_any(),
        };
        self.pools.touch(key, POOL_AFTER);
    }

    fn touch_policy(&self, policy: &impl kube::ResourceExt) {
        let key = PolicyKey {
            namespace: policy.namespace().unwrap_or_default(),
            name: policy.name_any(),
        };
        self.policies.touch(key, POLICY_AFTER);
    }
}

/// The pools that a pod's labels name: one, or both of the name where it names no role.
fn pools_of(pod: &Pod) -> Vec<PoolKey> {
    match says_role(pod) {
        Some(role) => pools_of_labels(pod)
            .into_iter()
            .filter(|key| key.role == role)
            .collect(),
        None => pools_of_labels(pod),
    }
}

fn pools_of_labels(object: &impl kube::ResourceExt) -> Vec<PoolKey> {
    let Some(name) = object.labels().get(names::POOL) else {
        return Vec::new();
    };
    [PoolRole::Prefill, PoolRole::Decode]
        .into_iter()
        .map(|role| PoolKey {
            role,
            namespace: object.namespace().unwrap_or_default(),
            name: name.clone(),
        })
        .collect()
}

/// What of an object's metadata tells a change of what is wanted from one of what is.
trait Declared {
    fn meta_generation(&self) -> Option<i64>;
    fn meta_deleting(&self) -> bool;
}

impl<K: kube::Resource> Declared for K {
    fn meta_generation(&self) -> Option<i64> {
        self.meta().generation
    }
    fn meta_deleting(&self) -> bool {
        self.meta().deletion_timestamp.is_some()
    }
}

#[cfg(test)]
mod tests;

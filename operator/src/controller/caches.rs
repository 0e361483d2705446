//! What the watches have seen, and the questions that controllers ask of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_crds::{PoolRole, labels as names};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt as _;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store};

use super::key::{PolicyKey, PoolKey};
use crate::objects::{Guarded, Pool, PoolKind, RoutePolicy, labels};

/// Readers of all caches.
#[derive(Clone, Debug)]
pub struct Caches {
    pub prefill: Store<Guarded<Pool>>,
    pub decode: Store<Guarded<Pool>>,
    pub policies: Store<Guarded<RoutePolicy>>,
    /// Pods that carry a pool's label.
    pub workers: Store<Pod>,
    /// Pods of routers.
    pub routers: Store<Pod>,
    pub nodes: Store<PartialObjectMeta<Node>>,
    pub budgets: Store<PodDisruptionBudget>,
}

/// Writers of all caches, for the watches.
#[derive(Debug)]
pub struct Fillers {
    pub prefill: Writer<Guarded<Pool>>,
    pub decode: Writer<Guarded<Pool>>,
    pub policies: Writer<Guarded<RoutePolicy>>,
    pub workers: Writer<Pod>,
    pub routers: Writer<Pod>,
    pub nodes: Writer<PartialObjectMeta<Node>>,
    pub budgets: Writer<PodDisruptionBudget>,
}

impl Caches {
    /// Empty caches and what fills them.
    #[must_use]
    pub fn new() -> (Self, Fillers) {
        let fillers = Fillers {
            prefill: Writer::new(PoolKind(PoolRole::Prefill)),
            decode: Writer::new(PoolKind(PoolRole::Decode)),
            policies: Writer::new(()),
            workers: Writer::new(()),
            routers: Writer::new(()),
            nodes: Writer::new(()),
            budgets: Writer::new(()),
        };
        let caches = Self {
            prefill: fillers.prefill.as_reader(),
            decode: fillers.decode.as_reader(),
            policies: fillers.policies.as_reader(),
            workers: fillers.workers.as_reader(),
            routers: fillers.routers.as_reader(),
            nodes: fillers.nodes.as_reader(),
            budgets: fillers.budgets.as_reader(),
        };
        (caches, fillers)
    }

    /// Returns when every cache has been filled once.
    ///
    /// # Errors
    /// A watch has ended before.
    pub async fn filled(&self) -> Result<(), kube::runtime::reflector::store::WriterDropped> {
        self.prefill.wait_until_ready().await?;
        self.decode.wait_until_ready().await?;
        self.policies.wait_until_ready().await?;
        self.workers.wait_until_ready().await?;
        self.routers.wait_until_ready().await?;
        self.nodes.wait_until_ready().await?;
        self.budgets.wait_until_ready().await
    }

    fn pools(&self, role: PoolRole) -> &Store<Guarded<Pool>> {
        match role {
            PoolRole::Prefill => &self.prefill,
            PoolRole::Decode => &self.decode,
        }
    }

    #[must_use]
    pub fn pool(&self, key: &PoolKey) -> Option<Arc<Guarded<Pool>>> {
        let reference = ObjectRef::new_with(&key.name, PoolKind(key.role)).within(&key.namespace);
        self.pools(key.role).get(&reference)
    }

    #[must_use]
    pub fn policy(&self, key: &PolicyKey) -> Option<Arc<Guarded<RoutePolicy>>> {
        let reference = ObjectRef::new_with(&key.name, ()).within(&key.namespace);
        self.policies.get(&reference)
    }

    /// Pools of a namespace that can be read, with their role.
    #[must_use]
    pub fn pools_of(&self, namespace: &str) -> Vec<(PoolRole, Arc<Guarded<Pool>>)> {
        let mut all = Vec::new();
        for role in [PoolRole::Prefill, PoolRole::Decode] {
            let here = |pool: &Guarded<Pool>| pool.namespace().as_deref() == Some(namespace);
            let pools = self.pools(role).state_filter(here);
            all.extend(pools.into_iter().map(|pool| (role, pool)));
        }
        all.sort_by_key(|(role, pool)| (*role, pool.name_any()));
        all
    }

    #[must_use]
    pub fn policies_of(&self, namespace: &str) -> Vec<Arc<Guarded<RoutePolicy>>> {
        let here = |policy: &Guarded<RoutePolicy>| policy.namespace().as_deref() == Some(namespace);
        let mut policies = self.policies.state_filter(here);
        policies.sort_by_key(|policy| policy.name_any());
        policies
    }

    /// Pods that carry the pool's label, those of others too. One that says to be of the other role is of the pool of that role.
    #[must_use]
    pub fn pods_of(&self, key: &PoolKey) -> Vec<Arc<Pod>> {
        self.workers.state_filter(|pod| {
            pod.namespace().as_deref() == Some(&key.namespace)
                && pod.labels().get(names::POOL) == Some(&key.name)
                && says_role(pod).is_none_or(|role| role == key.role)
        })
    }

    /// Labels of the nodes on which these pods are, as far as the nodes are there.
    #[must_use]
    pub fn nodes_of(&self, pods: &[Pod]) -> BTreeMap<String, BTreeMap<String, String>> {
        pods.iter()
            .filter_map(|pod| pod.spec.as_ref()?.node_name.as_deref())
            .filter_map(|name| {
                let node = self.nodes.get(&ObjectRef::new(name))?;
                Some((name.to_owned(), labels(&node.metadata)))
            })
            .collect()
    }

    #[must_use]
    pub fn budget(&self, namespace: &str, name: &str) -> Option<PodDisruptionBudget> {
        let reference = ObjectRef::new(name).within(namespace);
        self.budgets
            .get(&reference)
            .map(|budget| budget.as_ref().clone())
    }

    /// Pods of the namespace's routers.
    #[must_use]
    pub fn routers_of(&self, namespace: &str) -> Vec<Arc<Pod>> {
        let here = |pod: &Pod| pod.namespace().as_deref() == Some(namespace);
        let mut pods = self.routers.state_filter(here);
        pods.sort_by_key(|pod| pod.name_any());
        pods
    }
}

/// The role that a pod's label names.
#[must_use]
pub fn says_role(pod: &Pod) -> Option<PoolRole> {
    match pod.labels().get(names::ROLE)?.as_str() {
        "prefill" => Some(PoolRole::Prefill),
        "decode" => Some(PoolRole::Decode),
        _ => None,
    }
}

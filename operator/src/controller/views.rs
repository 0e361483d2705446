//! Cached objects as the planner of policies sees them.

use std::collections::BTreeMap;

use baton_crds::labels as names;
use kube::ResourceExt as _;

use super::caches::Caches;
use super::reports::Reports;
use crate::objects::labels;
use crate::policy::PoolView;
use crate::policy::observed::Cards;

/// Pools of a namespace that can be read and are not being deleted.
#[must_use]
pub fn pools(caches: &Caches, namespace: &str) -> Vec<PoolView> {
    caches
        .pools_of(namespace)
        .iter()
        .filter_map(|(role, pool)| {
            let pool = pool.0.as_ref().ok()?;
            if pool.metadata.deletion_timestamp.is_some() {
                return None;
            }
            Some(PoolView {
                role: *role,
                name: pool.name_any(),
                labels: labels(&pool.metadata),
                spec: pool.spec.clone(),
                status: pool.status.clone().unwrap_or_default(),
            })
        })
        .collect()
}

/// A card of each revision of the namespace's pools of which one was read.
#[must_use]
pub fn cards(caches: &Caches, reports: &Reports, namespace: &str) -> Cards {
    let mut cards = BTreeMap::new();
    for (role, pool) in caches.pools_of(namespace) {
        let key = super::key::PoolKey {
            role,
            namespace: namespace.to_owned(),
            name: pool.name_any(),
        };
        let pods = caches.pods_of(&key);
        let pods: Vec<_> = pods.iter().map(|pod| pod.as_ref().clone()).collect();
        let (reports, _) = reports.of(&pods);
        for pod in &pods {
            let revision = pod.labels().get(names::REVISION);
            let card = reports
                .get(&pod.name_any())
                .and_then(|report| report.card.as_ref().ok());
            if let (Some(revision), Some(card)) = (revision, card) {
                cards
                    .entry((role, key.name.clone(), revision.clone()))
                    .or_insert_with(|| card.clone());
            }
        }
    }
    cards
}

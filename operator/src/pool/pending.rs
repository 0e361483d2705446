//! Own writes that a cache does not show yet.
//!
//! A watch lags behind the writes of the one who watches. A planner that reads only the cache would create a pod twice, or choose a
//! second pod to drain because it does not see that the first one drains. So the answers of own writes are kept until the cache
//! has caught up, and laid over it. Nothing here has to survive a restart: a cache that was just filled is not behind.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// After this the cache is believed in any case: a pod that somebody else deleted at once may never be shown.
const EXPIRY: SignedDuration = SignedDuration::from_secs(300);

/// Own writes to the pods of one pool, by uid.
#[derive(Debug, Clone, Default)]
pub struct Pending {
    written: BTreeMap<String, Written>,
    deleted: BTreeMap<String, Timestamp>,
}

#[derive(Debug, Clone)]
struct Written {
    pod: Pod,
    /// The cache has never shown it.
    created: bool,
    at: Timestamp,
}

impl Pending {
    /// A pod as the API server answered a creation with.
    pub fn created(&mut self, pod: Pod, now: Timestamp) {
        self.remember(pod, true, now);
    }

    /// A pod as the API server answered a patch of it or of its status with.
    pub fn patched(&mut self, pod: Pod, now: Timestamp) {
        self.remember(pod, false, now);
    }

    /// The API server took a deletion, or says that the pod is gone.
    pub fn deleted(&mut self, uid: &str, now: Timestamp) {
        self.deleted.insert(uid.to_owned(), now);
    }

    fn remember(&mut self, pod: Pod, created: bool, now: Timestamp) {
        let Some(uid) = pod.metadata.uid.clone() else {
            return;
        };
        let known = self.written.get(&uid);
        if known.is_some_and(|known| version(&known.pod) > version(&pod)) {
            return;
        }
        let created = created || known.is_some_and(|known| known.created);
        let written = Written {
            pod,
            created,
            at: now,
        };
        self.written.insert(uid, written);
    }

    /// Forgets what the cache shows by now, and what is too old.
    pub fn settle<'a>(&mut self, cache: impl IntoIterator<Item = &'a Pod>, now: Timestamp) {
        let shown: BTreeMap<&str, &Pod> = cache
            .into_iter()
            .filter_map(|pod| Some((pod.metadata.uid.as_deref()?, pod)))
            .collect();
        let young = |at: Timestamp| now.duration_since(at) < EXPIRY;
        self.written.retain(|uid, written| {
            young(written.at)
                && match shown.get(uid.as_str()) {
                    Some(cached) => version(cached) < version(&written.pod),
                    None => written.created,
                }
        });
        self.deleted.retain(|uid, at| {
            let unseen = shown
                .get(uid.as_str())
                .map_or(self.written.contains_key(uid), |pod| {
                    pod.metadata.deletion_timestamp.is_none()
                });
            young(*at) && unseen
        });
    }

    /// Nothing is awaited.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.written.is_empty() && self.deleted.is_empty()
    }

    /// The pods of the cache with own writes laid over.
    #[must_use]
    pub fn overlay<'a>(&self, cache: impl IntoIterator<Item = &'a Pod>) -> Vec<Pod> {
        let mut pods: BTreeMap<String, Pod> = BTreeMap::new();
        for pod in cache {
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            let newer = self
                .written
                .get(&uid)
                .filter(|written| version(&written.pod) > version(pod));
            let pod = newer.map_or(pod, |written| &written.pod);
            pods.insert(uid, pod.clone());
        }
        for (uid, written) in &self.written {
            if written.created && !pods.contains_key(uid) {
                pods.insert(uid.clone(), written.pod.clone());
            }
        }
        for (uid, at) in &self.deleted {
            if let Some(pod) = pods.get_mut(uid) {
                pod.metadata.deletion_timestamp.get_or_insert(Time(*at));
            }
        }
        pods.into_values().collect()
    }
}

/// Resource versions of one kind grow; a text that is no number counts as the oldest.
fn version(pod: &Pod) -> u128 {
    let text = pod.metadata.resource_version.as_deref();
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

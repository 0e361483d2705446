//! Workers, policies and fellow routers from a Kubernetes API server: the router's only module that knows Kubernetes.
//!
//! - [`pods`]: which pods are workers, where they are, and how many routers there are (pure).
//! - [`index`]: what is in force and what is refused, from the objects that there are (pure).
//! - [`shown`]: what was listed so far, and what follows from a change (pure).
//! - [`watching`]: one kind's objects, watched for ever.
//!
//! One router serves one namespace. It reads; it writes nothing to the API server. What it has read stays in force while the API
//! server is away: workers are heard directly, so that requests do not notice.

pub mod index;
pub mod pods;
pub mod shown;
#[cfg(test)]
mod tests;
mod watching;

use std::sync::Arc;

use baton_crds::labels;
use baton_crds::{GROUP, PoolRole, VERSION};
use futures::StreamExt as _;
use futures::stream::{BoxStream, select_all};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::runtime::watcher;
use kube::{Api, Client, Config};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::admin::readiness::Joining;
use crate::clock::Clock;
use crate::fleet::Workers;
use crate::fleet::discovery::Listed;
use crate::metrics::Metrics;
use crate::policy::Policies;
use shown::{Change, Shown, World};
use watching::watched;

/// Why there is no cluster to read from.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error(
        "no Kubernetes API server is known: {0}; run the router in a pod with a service account, or set KUBECONFIG"
    )]
    Unknown(#[from] kube::config::InferConfigError),
    #[error("the Kubernetes API server {address} cannot be talked to: {source}")]
    Client {
        address: String,
        source: kube::Error,
    },
}

/// The namespace that this router serves, as the API server shows it.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    namespace: String,
    /// Names of the levels of topology, nearest first.
    levels: Vec<String>,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = formatter.debug_struct("Cluster");
        shown
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// Where what is read goes.
#[derive(Debug)]
pub struct Outlets {
    pub lists: watch::Sender<Vec<Listed>>,
    pub workers: Arc<Workers>,
    pub policies: Arc<Policies>,
    pub joining: Arc<Joining>,
    pub metrics: Arc<Metrics>,
    pub clock: Clock,
}

impl Cluster {
    /// The cluster that this process runs in, or the one of `KUBECONFIG`. Without a namespace the process's own is served.
    ///
    /// # Errors
    /// There is none. One that does not answer is no error: it is tried until it does.
    pub async fn of_this_process(
        namespace: Option<&str>,
        levels: Vec<String>,
    ) -> Result<Self, ClusterError> {
        let config = Config::infer().await?;
        let namespace = namespace.unwrap_or(&config.default_namespace).to_owned();
        let address = config.cluster_url.to_string();
        let client =
            Client::try_from(config).map_err(|source| ClusterError::Client { address, source })?;
        Ok(Self::new(client, namespace, levels))
    }

    pub fn new(client: Client, namespace: String, levels: Vec<String>) -> Self {
        Self {
            client,
            namespace,
            levels,
        }
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Follows what there is until it is stopped.
    pub async fn follow(self, outlets: Outlets, stop: CancellationToken) {
        let mut world = World::new(self.levels.clone());
        let mut shown = select_all(self.watches(&outlets.metrics));
        loop {
            let next = tokio::select! {
                () = stop.cancelled() => return,
                next = shown.next() => next,
            };
            // A watch never ends by itself.
            let Some(next) = next else { return };
            let now = outlets.clock.now();
            let before = outlets.policies.in_force();
            if let Some(change) = world.take(next, &before, now) {
                outlets.apply(change);
            }
            if world.is_listed() {
                outlets.joining.listed(now);
            }
        }
    }

    fn watches(&self, metrics: &Arc<Metrics>) -> Vec<BoxStream<'static, Shown>> {
        let pods = |selector: String, kind| {
            let api: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
            let config = watcher::Config::default().labels(&selector);
            watched(api, config, (), kind, metrics.clone())
        };
        let objects = |kind: &'static str, plural: &str| {
            let gvk = GroupVersionKind::gvk(GROUP, VERSION, kind);
            let resource = ApiResource::from_gvk_with_plural(&gvk, plural);
            let api: Api<DynamicObject> =
                Api::namespaced_with(self.client.clone(), &self.namespace, &resource);
            let config = watcher::Config::default();
            watched(api, config, resource, kind, metrics.clone())
        };
        let pools = |role: PoolRole, plural: &str| {
            objects(role.kind(), plural).map(move |pools| Shown::Pools(role, pools))
        };
        vec![
            pods(labels::POOL.to_owned(), "WorkerPod")
                .map(Shown::Workers)
                .boxed(),
            pods(
                format!("{}={}", labels::APP_NAME, labels::ROUTER_APP),
                "RouterPod",
            )
            .map(Shown::Routers)
            .boxed(),
            objects("RoutePolicy", "routepolicies")
                .map(Shown::Policies)
                .boxed(),
            pools(PoolRole::Prefill, "prefillpools").boxed(),
            pools(PoolRole::Decode, "decodepools").boxed(),
        ]
    }
}

impl Outlets {
    fn apply(&self, change: Change) {
        match change {
            Change::Workers(list) => {
                info!(workers = list.len(), "the list of worker pods has changed");
                self.lists.send_replace(list);
            }
            Change::Routers(count) => {
                info!(routers = count, "the number of routers has changed");
                self.workers.shared_by(count);
            }
            Change::Policies(next) => {
                let before = self.policies.in_force();
                let new = |refusal: &&_| !before.refused.contains(refusal);
                for refusal in next.refused.iter().filter(new) {
                    warn!(
                        policy = refusal.name.as_deref().unwrap_or_default(),
                        generation = refusal.generation.unwrap_or_default(),
                        reason = refusal.reason,
                        "policy refused; its last good version, if there is one, stays in force"
                    );
                }
                self.policies.put(next);
            }
        }
    }
}

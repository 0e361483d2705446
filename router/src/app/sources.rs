//! Where a router's workers and policies come from: two files, or the API server of a cluster.

use std::sync::Arc;

use anyhow::Result;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::info;

use super::flags::{Flags, Origin};
use super::wrong;
use crate::admin::readiness::{Joining, Readiness};
use crate::clock::Clock;
use crate::cluster::{Cluster, Outlets};
use crate::fleet::Workers;
use crate::fleet::discovery::{self, Listed, WorkersFile};
use crate::metrics::Metrics;
use crate::policy::file::{self, PolicyFile};
use crate::policy::{InForce, Policies};

/// Opened, and not followed yet.
#[derive(Debug)]
pub(super) enum Sources {
    Files {
        policies: Arc<PolicyFile>,
        workers: Arc<WorkersFile>,
    },
    Cluster {
        cluster: Cluster,
        joining: Arc<Joining>,
    },
}

impl Sources {
    /// # Errors
    /// Flags that go not together, files that cannot be used, no cluster to be found: wrong input.
    pub(super) async fn open(flags: &Flags, clock: Clock) -> Result<Self> {
        Ok(match flags.origin().map_err(wrong)? {
            Origin::Files { policies, workers } => Self::Files {
                policies: Arc::new(file::open(policies.to_owned(), clock).map_err(wrong)?),
                workers: Arc::new(discovery::open(workers.to_owned()).map_err(wrong)?),
            },
            Origin::Kubernetes { namespace, levels } => {
                let cluster = Cluster::of_this_process(namespace, levels)
                    .await
                    .map_err(wrong)?;
                info!(
                    namespace = cluster.namespace(),
                    "workers and policies come from the API server"
                );
                Self::Cluster {
                    cluster,
                    joining: Arc::default(),
                }
            }
        })
    }

    /// What is in force before anything is followed.
    pub(super) fn policies(&self) -> Policies {
        match self {
            Self::Files { policies, .. } => Policies::new(policies.in_force()),
            Self::Cluster { .. } => Policies::default(),
        }
    }

    /// Who is listed before anything is followed.
    pub(super) fn workers(&self) -> Vec<Listed> {
        match self {
            Self::Files { workers, .. } => workers.in_force().to_vec(),
            Self::Cluster { .. } => Vec::new(),
        }
    }

    pub(super) fn readiness(&self) -> Readiness {
        match self {
            Self::Files { .. } => Readiness::Serving,
            Self::Cluster { joining, .. } => Readiness::Joining(joining.clone()),
        }
    }

    /// Follows them until it is stopped.
    pub(super) fn follow(self, outlets: Found, tasks: &TaskTracker, stop: &CancellationToken) {
        let Found {
            lists,
            workers,
            policies,
            metrics,
            clock,
        } = outlets;
        match self {
            Self::Files {
                policies: policy_file,
                workers: workers_file,
            } => {
                let told = move |file: &PolicyFile| policies.put(InForce::from(file));
                tasks.spawn(policy_file.follow_telling(stop.clone(), told));
                let told = move |file: &WorkersFile| {
                    lists.send_replace(file.in_force().to_vec());
                };
                tasks.spawn(workers_file.follow_telling(stop.clone(), told));
            }
            Self::Cluster { cluster, joining } => {
                let outlets = Outlets {
                    lists,
                    workers,
                    policies,
                    joining,
                    metrics,
                    clock,
                };
                tasks.spawn(cluster.follow(outlets, stop.clone()));
            }
        }
    }
}

/// Where what is found goes.
pub(super) struct Found {
    pub(super) lists: watch::Sender<Vec<Listed>>,
    pub(super) workers: Arc<Workers>,
    pub(super) policies: Arc<Policies>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) clock: Clock,
}

//! Where Baton's connector inside the server moves KV: memory of the daemon, with leases, transports and proofs as every worker has
//! them. One staging for each life of the server.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_protocol::card::{Card, Role, TransportOffer};
use baton_protocol::failure::HandoffFailure;
use baton_protocol::hash::HashKey;
use baton_protocol::identity::Fact;
use baton_system::System;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::shared::Shared;
use crate::config::{Connector, WorkerConfig};
use crate::connector::{Layout, Listener, Operations, Service, Untold, Worker};
use crate::kv::clock::Clock;
use crate::kv::intake::Received;
use crate::kv::intake::client::{CallFailed, LeaseClient};
use crate::kv::lease::look_every;
use crate::kv::lease::table::{LeaseCounters, LeaseCounts};
use crate::kv::{BlockCounts, Geometry, KvPool};
use crate::serve::StartError;
use crate::serve::engine::{make_pool, pool_blocks};
use crate::serve::offering::{Offered, Offering};
use crate::serve::peers::Peers;
use crate::serve::service::leases::Owner;
use crate::transport::choice::Left;
use crate::transport::fault::Fault;

/// How long the end of a staging's tasks is waited for: their sockets are needed for the next one.
const ENDING: Duration = Duration::from_secs(5);

/// For the plug-in to call again, after the first call that told its blocks, before the server is registered without. It does within
/// 0.5 s, or after the 5 s that it waits for an answer to a call that nobody took while the server was loading.
const JOINING: Duration = Duration::from_secs(20);

/// What the stagings of all lives are made from.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) listener: Arc<Listener>,
    pub(crate) transfer: SocketAddr,
    pub(crate) advertise: Option<String>,
    pub(crate) host: Option<String>,
    pub(crate) fault: Option<Fault>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) hash_key: HashKey,
    pub(crate) system: System,
}

/// Listens for the plug-in, where the server has one.
///
/// # Errors
/// [`StartError::Port`]: the socket cannot be made.
pub(crate) fn listen(config: &WorkerConfig) -> Result<Option<Arc<Listener>>, StartError> {
    let Some(path) = config
        .engine
        .connector_socket
        .as_deref()
        .filter(|_| config.engine.connector == Connector::Baton)
    else {
        return Ok(None);
    };
    Listener::bind(path)
        .map(|listener| Some(Arc::new(listener)))
        .map_err(|cause| StartError::Port {
            flag: "engine.connectorSocket",
            address: path.display().to_string(),
            cause,
        })
}

impl Place {
    /// What the server's blocks look like, once its plug-in calls.
    ///
    /// # Errors
    /// It does not in time, in a sentence.
    pub(crate) async fn layout(&self, patience: Duration) -> Result<Layout, String> {
        match timeout(patience, self.listener.layout()).await {
            Ok(Ok(layout)) => Ok(layout),
            Ok(Err(error)) => Err(format!("engine.connectorSocket: {error}")),
            Err(_) => Err(
                "engine.connectorSocket: connector Baton is declared, and no BatonConnector has called: start the server with it, and \
                 with this socket"
                    .to_owned(),
            ),
        }
    }

    /// Writes into the card what the plug-in said, and serves its blocks until `stop`. Returns once the plug-in is served, as a prompt
    /// that the server takes before is not handed over, or when it has not been for [`JOINING`]: see [`Staging::takes_none`].
    ///
    /// # Errors
    /// A sentence: there is no memory, or no transport.
    pub(crate) async fn open(
        &self,
        shared: &Arc<Shared>,
        layout: Layout,
        card: &mut Card,
        stop: CancellationToken,
    ) -> Result<Staging, String> {
        let config = &shared.config;
        let block_size = layout.block_size.max(1);
        let geometry = Geometry {
            block_size,
            bytes_per_token: layout.block_bytes / block_size,
        };
        card.layout.order = Fact::observed("layer, then as the engine's cache".to_owned());
        card.layout.bytes_per_token = Fact::observed(geometry.bytes_per_token as u64);
        card.layout.engine_hash = Fact::observed(layout.digest.clone());
        card.layout_digest = card.layout.digest();
        let longest = card.capacity.max_context as usize;
        let text = |error: StartError| error.to_string();
        let blocks = pool_blocks(config, geometry, longest).map_err(text)?;
        card.notices.extend(too_small(geometry, blocks, longest));
        let (key, clock) = (self.hash_key.clone(), Arc::clone(&self.clock));
        let pool = make_pool(card, geometry, blocks, key, clock).map_err(text)?;
        let mut tasks = JoinSet::new();
        let offering = Offering {
            config,
            listen: self.transfer,
            advertise: self.advertise.as_deref(),
            local: None,
            host: self.host.as_deref(),
            fault: self.fault,
            network: Arc::clone(&self.system.network),
            stop: stop.clone(),
        };
        let Offered {
            transports,
            offers,
            notices,
        } = offering
            .listen(&pool, card, &mut tasks)
            .await
            .map_err(text)?;
        card.notices.extend(notices);
        card.transports = offers
            .into_iter()
            .map(|offer| TransportOffer {
                kind: offer.kind,
                address: offer.address,
            })
            .collect();
        let around = Arc::new(Around {
            shared: Arc::clone(shared),
            peers: Peers::new(Arc::clone(&self.system.network)),
            given_up: GivenUp::default(),
            joined: watch::Sender::new(false),
        });
        let lease_milliseconds = config.kv_pool.lease_seconds * 1000;
        let operations = Operations::default();
        let service = Service {
            layout,
            pool: pool.clone(),
            registered: (&*card).into(),
            transports,
            operations: operations.clone(),
            lease_milliseconds,
            entropy: Arc::clone(&self.system.entropy),
            worker: Arc::clone(&around) as Arc<dyn Worker>,
            stop: stop.clone(),
        };
        let listener = Arc::clone(&self.listener);
        tasks.spawn(async move { listener.serve(service).await });
        tasks.spawn(reap(pool.clone(), lease_milliseconds, stop));
        if !around.joined(JOINING).await {
            tracing::warn!(
                worker = %config.name,
                "engine.connectorSocket: BatonConnector has called once and not again: prompts are not handed over until it does, and a \
                 prefill server is sent none; see the server's log"
            );
        }
        Ok(Staging {
            pool,
            around,
            operations,
            tasks: Mutex::new(tasks),
        })
    }
}

/// What is to be said of a staging that does not hold the longest prompt: each longer one is computed where it should be read, too.
fn too_small(geometry: Geometry, blocks: usize, longest: usize) -> Option<String> {
    let needed = geometry.blocks_for(longest);
    (blocks < needed).then(|| {
        format!(
            "kvPool.blocks: {blocks} blocks hold prompts of {} tokens, the model takes {longest}: longer ones are not handed over; raise it \
             to {needed}, or kvPool.bytes to {}",
            blocks * geometry.block_size,
            needed * geometry.block_bytes()
        )
    })
}

/// That of one life.
#[derive(Debug)]
pub(crate) struct Staging {
    pool: KvPool,
    around: Arc<Around>,
    operations: Operations,
    tasks: Mutex<JoinSet<()>>,
}

impl Staging {
    /// Leases that have not ended, and those that ended because nobody came.
    pub(crate) fn leases(&self) -> (u32, u64) {
        let counts = self.pool.lease_counts();
        let expired = self.pool.lease_counters().expired;
        (counts.total(), expired)
    }

    /// No plug-in is served, and so the server's prompts would be computed for nobody: a prefill server is to be sent none. One that
    /// decodes computes its own.
    pub(crate) fn takes_none(&self) -> bool {
        self.around.shared.config.role == Role::Prefill && !*self.around.joined.borrow()
    }

    /// What whoever reads a prompt's KV is told, once there is something of it: see [`Operations::parameters`].
    ///
    /// # Errors
    /// There will be nothing of it, or no plug-in is served whom its request could reach.
    pub(crate) fn parameters(
        &self,
        operation: String,
    ) -> impl Future<Output = Result<String, Untold>> + use<> {
        let (operations, joined) = (self.operations.clone(), *self.around.joined.borrow());
        async move {
            if !joined {
                let why = "no BatonConnector is served: the server's prompts are not handed over";
                return Err(Untold::Nothing(why.to_owned()));
            }
            operations.parameters(&operation).await
        }
    }

    /// Its blocks by owner.
    pub(crate) fn counts(&self) -> BlockCounts {
        self.pool.counts()
    }

    /// Its leases by state, and what has happened to leases.
    pub(crate) fn lease_counts(&self) -> (LeaseCounts, LeaseCounters) {
        (self.pool.lease_counts(), self.pool.lease_counters())
    }

    /// Hand-offs that were given up by this worker as their reader: those that failed, and those whose owner had ended the lease.
    pub(crate) fn given_up(&self) -> (u64, u64) {
        self.around.given_up.counts()
    }

    /// Waits until its tasks have ended, after its life has.
    pub(crate) async fn closed(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        let all = async { while tasks.join_next().await.is_some() {} };
        if timeout(ENDING, all).await.is_err() {
            tracing::warn!("the connector's service has not ended in time: it is dropped");
        }
    }
}

impl Owner for Staging {
    fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// Reports are made by the clock.
    fn changed(&self) {}
}

/// Hears what becomes of hand-offs.
#[derive(Debug)]
struct Around {
    shared: Arc<Shared>,
    peers: Peers,
    given_up: GivenUp,
    /// Whether an engine is served.
    joined: watch::Sender<bool>,
}

/// Hand-offs that this worker gave up as their reader.
#[derive(Debug, Default)]
struct GivenUp {
    failed: AtomicU64,
    ended: AtomicU64,
}

impl GivenUp {
    /// A lease that its owner had ended, as when the prompt was given up there, says nothing of the way between the two: what routers hold
    /// against links does not have it.
    fn count(&self, cause: HandoffFailure) {
        let counter = match cause {
            HandoffFailure::LeaseGone => &self.ended,
            _ => &self.failed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn counts(&self) -> (u64, u64) {
        let counts = [&self.failed, &self.ended];
        counts.map(|counter| counter.load(Ordering::Relaxed)).into()
    }
}

impl Around {
    /// Waits for an engine, at most so long. False when none came.
    async fn joined(&self, at_most: Duration) -> bool {
        let mut joined = self.joined.subscribe();
        timeout(at_most, joined.wait_for(|joined| *joined))
            .await
            .is_ok()
    }
}

impl Worker for Around {
    fn owner(&self, control_address: &str) -> Result<Arc<dyn LeaseClient>, CallFailed> {
        Ok(Arc::new(self.peers.at(control_address)?))
    }

    fn taken(&self, received: &Received) {
        self.shared.metrics.handoff_taken(received);
    }

    fn failed(&self, cause: HandoffFailure) {
        self.given_up.count(cause);
        self.shared.metrics.handoff_failed(cause);
    }

    fn left(&self, left: &Left<'_>) {
        self.shared
            .metrics
            .transport_left(left.from, left.obstacle.word());
    }

    fn changed(&self) {}

    fn engine_joined(&self) {
        self.joined.send_replace(true);
    }

    /// The life ends when the server does not answer any more; a plug-in that only lost its connection makes another, and
    /// [`Staging::takes_none`] until then.
    fn engine_gone(&self) {
        self.joined.send_replace(false);
    }
}

/// Frees what expired leases hold.
async fn reap(pool: KvPool, lease_milliseconds: u64, stop: CancellationToken) {
    let period = look_every(lease_milliseconds);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(period) => {}
        }
        let reaped = pool.reap();
        if reaped.leases > 0 {
            tracing::warn!(
                leases = reaped.leases,
                blocks = reaped.blocks,
                "leases expired: nobody read or renewed them"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_that_its_owner_has_ended_is_not_counted_as_a_failure_of_the_way() {
        let given_up = GivenUp::default();
        let causes = [
            HandoffFailure::LeaseGone,
            HandoffFailure::ChecksumMismatch,
            HandoffFailure::LeaseGone,
            HandoffFailure::SourceLost,
            HandoffFailure::LeaseGone,
        ];
        for cause in causes {
            given_up.count(cause);
        }
        assert_eq!(given_up.counts(), (2, 3));
    }

    #[test]
    fn a_staging_that_does_not_hold_the_longest_prompt_is_told_of() {
        let geometry = Geometry {
            block_size: 16,
            bytes_per_token: 8,
        };
        assert_eq!(too_small(geometry, 64, 1024), None);
        assert_eq!(too_small(geometry, 65, 1025), None);
        let notice = too_small(geometry, 64, 1025).expect("a block is missing");
        for word in [
            "kvPool.blocks",
            "to 65",
            "kvPool.bytes to 8320",
            "1024",
            "1025",
        ] {
            assert!(notice.contains(word), "{word}: {notice}");
        }
    }
}

//! Starting a worker, and ending it: sockets, model, pool, engine and tasks, in an order in which every failure is one sentence.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::card::{Card, TransportOffer};
use baton_protocol::hash::HashKey;
use baton_protocol::ids::Incarnation;
use baton_protocol::wire;
use baton_protocol::wire::worker_server::WorkerServer;
use baton_system::System;
use baton_system::entropy;
use baton_system::network::{Listener, grpc};
use baton_telemetry::export::Exporter;
use baton_telemetry::settings::Settings;
use baton_telemetry::tracer::Tracer;
use bytes::Bytes;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Server;

use super::compute::{self, Driver, Outlets};
use super::daemon::Daemon;
use super::drain::Ended;
use super::metrics::Metrics;
use super::offering::{Offered, Offering, advertised};
use super::operations::Operations;
use super::peers::Peers;
use super::results::Results;
use super::service::Service;
use super::traces::Traces;
use super::{StartError, admin, card, engine, machine, report};
use crate::config::{SimulatedTiming, WorkerConfig};
use crate::kv::KvPool;
use crate::kv::clock::{Clock, MonotonicClock};
use crate::model::facts::artifact_digest;
use crate::transport::fault::Fault;
use crate::transport::local::LocalTransport;

/// How long the end of each part is waited for; what does not end by then is dropped.
const ENDING: Duration = Duration::from_secs(5);
/// A connection whose peer does not answer a ping for this long is dead, and so are its operations.
pub(crate) const KEEPALIVE: Duration = Duration::from_secs(10);

/// Streams of one router: two for each operation that may be live on a large worker, and a few of its own.
pub(crate) const STREAMS: u32 = 10_000;

/// Where a worker listens. Port 0 takes a free one.
#[derive(Clone, Debug)]
pub struct Addresses {
    pub control: SocketAddr,
    pub transfer: SocketAddr,
    pub admin: SocketAddr,
    /// Host that others reach this worker by, where it is not the one it listens on.
    pub advertise: Option<String>,
}

impl Addresses {
    /// Free ports of loopback.
    pub fn loopback() -> Self {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            control: any,
            transfer: any,
            admin: any,
            advertise: None,
        }
    }
}

/// All that a worker starts from.
#[derive(Debug)]
pub struct Start {
    pub config: WorkerConfig,
    pub addresses: Addresses,
    pub hash_key: HashKey,
    /// Sockets, random numbers and threads.
    pub system: System,
    /// Time of leases and results.
    pub clock: Arc<dyn Clock>,
    /// Shared by workers in one process; without it `Local` is not offered.
    pub local: Option<LocalTransport>,
    /// Id of this host, of [`crate::transport::shm::host`]; without it `Shm` is not offered.
    pub host: Option<String>,
    /// Where spans go; without it nothing is traced.
    pub tracing: Option<Settings>,
    /// For tests only.
    pub fault: Option<Fault>,
    /// For tests only: see `BATON_FAULT_CARD`.
    pub card_change: Option<String>,
    /// For simulations only: how long the steps of a `Builtin` engine take, whose work is real and whose clock is not.
    pub modelled: Option<SimulatedTiming>,
}

impl Start {
    pub fn new(config: WorkerConfig, addresses: Addresses, hash_key: HashKey) -> Self {
        Self {
            config,
            addresses,
            hash_key,
            system: System::machine(),
            clock: Arc::new(MonotonicClock::start()),
            local: None,
            host: None,
            tracing: None,
            fault: None,
            card_change: None,
            modelled: None,
        }
    }
}

/// A worker that serves. Dropping it stops its tasks without waiting for them; [`Self::stop`] waits.
#[derive(Debug)]
pub struct Running {
    daemon: Arc<Daemon>,
    control: SocketAddr,
    admin: SocketAddr,
    transfer: Option<String>,
    tasks: JoinSet<()>,
    compute: Option<Driver>,
    drain_timeout: Duration,
}

/// Starts a worker and returns when it serves.
///
/// # Errors
/// [`StartError`] names what is wrong and what to do; nothing keeps running then.
pub async fn start(start: Start) -> Result<Running, StartError> {
    if let Some(missing) = machine::missing_instructions() {
        return Err(StartError::Processor { missing });
    }
    let system = start.system;
    let control = bind(&system, "--control", start.addresses.control).await?;
    let admin_listener = bind(&system, "--admin", start.addresses.admin).await?;
    let control_address = local_address("--control", &control)?;
    let admin_address = local_address("--admin", &admin_listener)?;

    let config = Arc::new(start.config);
    let (blocking, modelled) = (Arc::clone(&config), start.modelled);
    let model = on_a_thread(&system, move || {
        engine::load_model(&blocking, modelled.as_ref())
    })
    .await??;
    let facts = model.facts().clone();
    let geometry = crate::kv::Geometry {
        block_size: config.engine.block_size as usize,
        bytes_per_token: facts.shape.kv_bytes_per_token(),
    };
    let asked = config
        .engine
        .max_model_length
        .map_or(usize::MAX, |length| length as usize);
    let longest = asked.min(facts.shape.max_context);
    let blocks = engine::pool_blocks(&config, geometry, longest)?;
    let incarnation = entropy::bytes(&*system.entropy)?;
    let mut card = card::write(
        &config,
        card::Running {
            incarnation: Incarnation(u64::from_le_bytes(incarnation)),
            facts: &facts,
            accelerator: engine::accelerator(&config.engine),
            blocks,
            max_context: longest.min(blocks.saturating_mul(geometry.block_size)),
            control_address: advertised(start.addresses.advertise.as_deref(), control_address),
            transports: Vec::new(),
            notices: notices(),
        },
    );
    if let Some(change) = &start.card_change {
        tracing::warn!(
            change,
            "BATON_FAULT_CARD is set: the card claims what is not so"
        );
        card::alter(&mut card, change)?;
    }
    let pool = engine::make_pool(&card, geometry, blocks, start.hash_key, start.clock)?;
    let (blocking, engine_pool) = (Arc::clone(&config), pool.clone());
    let engine = on_a_thread(&system, move || {
        engine::make_engine(&blocking, model, engine_pool)
    })
    .await??;

    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let offered = Offering {
        config: &config,
        listen: start.addresses.transfer,
        advertise: start.addresses.advertise.as_deref(),
        local: start.local,
        host: start.host.as_deref(),
        fault: start.fault,
        network: Arc::clone(&system.network),
        stop: stop.clone(),
    };
    let Offered {
        transports,
        offers,
        notices,
    } = offered.listen(&pool, &card, &mut tasks).await?;
    card.notices.extend(notices);
    card.transports = offers
        .iter()
        .map(|offer| TransportOffer {
            kind: offer.kind.clone(),
            address: offer.address.clone(),
        })
        .collect();

    let board = Arc::clone(engine.board());
    let metrics = Arc::new(Metrics::new(&config.pool));
    let tracer = match start.tracing {
        None => Tracer::off(),
        Some(settings) => {
            let (tracer, exporter) =
                Exporter::new(settings, identity(&config, &card), metrics.spans());
            // Ends after `stop`, with what the last operations have left.
            tasks.spawn(exporter.run(stop.clone()));
            tracer
        }
    };
    let traces = Traces::new(tracer, &card);
    let changed = Arc::new(Notify::new());
    let coefficients = watch::Sender::new(engine.coefficients());
    let settings = &config.engine;
    let (commands, compute) = compute::spawn(
        engine,
        settings.max_sequences.saturating_add(settings.max_waiting) as usize,
        Outlets {
            coefficients: coefficients.clone(),
            changed: Arc::clone(&changed),
            metrics: Arc::clone(&metrics),
        },
        system.threads,
        stop.clone(),
    )
    .map_err(|error| StartError::Thread(error.to_string()))?;

    let transfer = offers
        .iter()
        .find(|offer| offer.kind == "Tcp")
        .map(|offer| offer.address.clone());
    let daemon = Arc::new(Daemon {
        card_json: card
            .to_json()
            .map_err(|error| StartError::Card(error.to_string()))?,
        artifacts: [&facts.tokenizer, &facts.chat_template]
            .into_iter()
            .map(|file| (artifact_digest(file), Bytes::copy_from_slice(file)))
            .collect(),
        card,
        pool,
        board,
        commands,
        transports,
        offers,
        operations: Operations::default(),
        results: Results::default(),
        peers: Peers::new(Arc::clone(&system.network)),
        entropy: system.entropy,
        metrics,
        traces,
        lease_duration: config.kv_pool.lease_seconds * 1000,
        draining: watch::Sender::new(false),
        load: watch::Sender::new(wire::Load::default()),
        coefficients,
        changed,
        tracker: TaskTracker::new(),
        stop: stop.clone(),
        started: Instant::now(),
    });
    daemon.load.send_replace(daemon.report());
    serve(&daemon, control, admin_listener, &mut tasks);
    tracing::info!(worker = %daemon.card.worker, incarnation = %daemon.card.incarnation, %control_address, blocks, "serving");
    Ok(Running {
        daemon,
        control: control_address,
        admin: admin_address,
        transfer,
        tasks,
        compute: Some(compute),
        drain_timeout: Duration::from_secs(config.drain_timeout_seconds),
    })
}

/// What a worker's spans say about their process.
fn identity(config: &WorkerConfig, card: &Card) -> [(&'static str, String); 5] {
    [
        ("service.name", "baton-worker".to_owned()),
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        (
            "service.instance.id",
            format!("{}-{}", card.worker, card.incarnation),
        ),
        ("baton.worker", card.worker.to_string()),
        ("baton.pool", config.pool.clone()),
    ]
}

fn serve(
    daemon: &Arc<Daemon>,
    control: Listener,
    admin_listener: Listener,
    tasks: &mut JoinSet<()>,
) {
    let stop = daemon.stop.clone();
    let service = WorkerServer::new(Service(Arc::clone(daemon)));
    let server = Server::builder()
        .max_concurrent_streams(Some(STREAMS))
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .add_service(service)
        .serve_with_incoming_shutdown(grpc::incoming(control), stop.clone().cancelled_owned());
    let guard = stop.clone();
    tasks.spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(%error, "the control service has failed");
        }
        guard.cancel();
    });
    let router = admin::router(Arc::clone(daemon));
    tasks.spawn(async move {
        let served = axum::serve(admin_listener, router)
            .with_graceful_shutdown(stop.clone().cancelled_owned());
        if let Err(error) = served.await {
            tracing::error!(%error, "the admin service has failed");
        }
        stop.cancel();
    });
    tasks.spawn(report::report(Arc::clone(daemon)));
    tasks.spawn(report::reap(Arc::clone(daemon)));
}

impl Running {
    pub fn card(&self) -> &Card {
        &self.daemon.card
    }

    pub fn control_address(&self) -> SocketAddr {
        self.control
    }

    pub fn admin_address(&self) -> SocketAddr {
        self.admin
    }

    /// Of the `Tcp` transport.
    pub fn transfer_address(&self) -> Option<&str> {
        self.transfer.as_deref()
    }

    /// Its KV, for tests that count blocks.
    pub fn pool(&self) -> &KvPool {
        &self.daemon.pool
    }

    /// Operations that have not ended, for tests that count them.
    pub fn operations(&self) -> usize {
        self.daemon.operations.count()
    }

    /// Ends when the worker has stopped by itself: its engine or a service has failed.
    pub async fn failed(&self) {
        self.daemon.stop.cancelled().await;
    }

    /// Takes no more operations, and waits until those that run and all leases have ended, at most the configured time. False
    /// when some have not.
    pub async fn drain(&self) -> bool {
        self.daemon.drain(self.drain_timeout).await == Ended::Empty
    }

    /// Ends all operations and tasks and waits for them.
    pub async fn stop(mut self) {
        self.daemon.set_draining(true);
        self.daemon.operations.cancel_all();
        self.daemon.tracker.close();
        if tokio::time::timeout(ENDING, self.daemon.tracker.wait())
            .await
            .is_err()
        {
            tracing::warn!("some operations have not ended in time: they are dropped");
        }
        self.daemon.stop.cancel();
        if let Some(compute) = self.compute.take() {
            match tokio::time::timeout(ENDING, compute.join()).await {
                Ok(true) => {}
                Ok(false) => tracing::error!("the compute thread has panicked"),
                Err(_) => {
                    tracing::warn!("the compute thread is still in a step: it is left behind");
                }
            }
        }
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(ENDING, all).await.is_err() {
            tracing::warn!("some connections have not ended in time: they are dropped");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.daemon.stop.cancel();
    }
}

fn notices() -> Vec<String> {
    vec![
        "Rdma: this build has no RDMA transport".to_owned(),
        "CudaIpc: this build has no CUDA transport".to_owned(),
    ]
}

pub(crate) async fn bind(
    system: &System,
    flag: &'static str,
    address: SocketAddr,
) -> Result<Listener, StartError> {
    let address = address.to_string();
    system
        .network
        .listen(&address)
        .await
        .map_err(|cause| StartError::Port {
            flag,
            address,
            cause,
        })
}

pub(crate) fn local_address(
    flag: &'static str,
    listener: &Listener,
) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(|cause| StartError::Port {
        flag,
        address: "its own address".to_owned(),
        cause,
    })
}

/// Loading and measuring take seconds: not on a thread that other tasks need.
async fn on_a_thread<T: Send + 'static>(
    system: &System,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, StartError> {
    system
        .threads
        .run(work)
        .await
        .map_err(|error| StartError::Thread(error.to_string()))
}

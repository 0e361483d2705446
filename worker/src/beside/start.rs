//! Starting a daemon beside a server, and ending it. It serves at once: that its server is there is said by its readiness.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::wire::worker_server::WorkerServer;
use baton_system::network::grpc;
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tonic::transport::Server as GrpcServer;

use super::admin;
use super::http::Server;
use super::service::Service;
use super::shared::Shared;
use super::staging::{self, Place};
use super::supervise::Supervisor;
use crate::serve::StartError;
use crate::serve::start::{KEEPALIVE, STREAMS, Start, bind, local_address};

/// How long the end of each part is waited for; what does not end by then is dropped.
const ENDING: Duration = Duration::from_secs(5);

/// A daemon that serves. Dropping it stops its tasks without waiting for them; [`Self::stop`] waits.
#[derive(Debug)]
pub struct Running {
    shared: Arc<Shared>,
    control: SocketAddr,
    admin: SocketAddr,
    tasks: JoinSet<()>,
    given_up: Arc<Mutex<Option<String>>>,
    drain_timeout: Duration,
}

/// Starts a daemon beside the server that `engine.url` names, and returns when it serves. Its server may come later.
///
/// # Errors
/// [`StartError`] names what is wrong and what to do; nothing keeps running then.
pub async fn start(start: Start) -> Result<Running, StartError> {
    let system = start.system;
    let control = bind(&system, "--control", start.addresses.control).await?;
    let admin_listener = bind(&system, "--admin", start.addresses.admin).await?;
    let control_address = local_address("--control", &control)?;
    let admin_address = local_address("--admin", &admin_listener)?;
    let drain_timeout = Duration::from_secs(start.config.drain_timeout_seconds);
    let url = start.config.engine.url.clone().unwrap_or_default();
    let place = staging::listen(&start.config)?.map(|listener| Place {
        listener,
        transfer: start.addresses.transfer,
        advertise: start.addresses.advertise.clone(),
        host: start.host,
        fault: start.fault,
        clock: start.clock,
        hash_key: start.hash_key.clone(),
        system: system.clone(),
    });
    let shared = Shared::new(start.config);
    let stop = shared.stop.clone();
    let mut tasks = JoinSet::new();

    let server = GrpcServer::builder()
        .max_concurrent_streams(Some(STREAMS))
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .add_service(WorkerServer::new(Service(Arc::clone(&shared))))
        .serve_with_incoming_shutdown(grpc::incoming(control), stop.clone().cancelled_owned());
    let guard = stop.clone();
    tasks.spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(%error, "the control service has failed");
        }
        guard.cancel();
    });
    let router = admin::router(Arc::clone(&shared));
    let guard = stop.clone();
    tasks.spawn(async move {
        let served = axum::serve(admin_listener, router)
            .with_graceful_shutdown(guard.clone().cancelled_owned());
        if let Err(error) = served.await {
            tracing::error!(%error, "the admin service has failed");
        }
        guard.cancel();
    });
    let supervisor = Supervisor {
        server: Server::new(Arc::clone(&system.network), &url),
        shared: Arc::clone(&shared),
        system,
        hash_key: start.hash_key,
        place,
        control: control_address,
        advertise: start.addresses.advertise,
    };
    let given_up = Arc::new(Mutex::new(None));
    let said = Arc::clone(&given_up);
    tasks.spawn(async move {
        if let Err(why) = supervisor.run().await {
            *said.lock() = Some(why.to_string());
        }
        stop.cancel();
    });
    Ok(Running {
        shared,
        control: control_address,
        admin: admin_address,
        tasks,
        given_up,
        drain_timeout,
    })
}

impl Running {
    pub fn control_address(&self) -> SocketAddr {
        self.control
    }

    pub fn admin_address(&self) -> SocketAddr {
        self.admin
    }

    /// Ends when the daemon has stopped by itself; why, in one sentence, where it is not in the log.
    pub async fn failed(&self) -> Option<String> {
        self.shared.stop.cancelled().await;
        self.given_up.lock().clone()
    }

    /// Takes no more, and waits until the server runs nothing, at most the configured time. False when it still runs something.
    pub async fn drain(&self) -> bool {
        self.shared.drain(self.drain_timeout).await
    }

    /// Ends all tasks and waits for them.
    pub async fn stop(mut self) {
        self.shared.set_draining(true);
        if let Some(life) = self.shared.current() {
            life.ended.cancel();
        }
        self.shared.stop.cancel();
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(ENDING, all).await.is_err() {
            tracing::warn!("some connections have not ended in time: they are dropped");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

//! The operator's HTTP port: health for probes, metrics for scrapers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use baton_system::scrape;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

/// What the handlers read.
#[derive(Debug, Default)]
pub struct Admin {
    pub metrics: Arc<Metrics>,
    /// The caches are filled. A follower is ready too: it can take over at once.
    pub ready: AtomicBool,
    pub stopping: CancellationToken,
}

/// The port's routes.
pub fn routes(admin: Arc<Admin>) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(admin)
}

async fn ready(State(admin): State<Arc<Admin>>) -> Response {
    if admin.stopping.is_cancelled() {
        (StatusCode::SERVICE_UNAVAILABLE, "stopping").into_response()
    } else if admin.ready.load(Ordering::Acquire) {
        "ready".into_response()
    } else {
        let missing = "the resources of Baton, pods and nodes are not listed yet: see the log";
        (StatusCode::SERVICE_UNAVAILABLE, missing).into_response()
    }
}

async fn metrics(State(admin): State<Arc<Admin>>) -> Response {
    scrape::answer(admin.metrics.text())
}

/// Binds the port.
///
/// # Errors
/// The address is taken or not this machine's.
pub async fn bind(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .map_err(|error| anyhow::anyhow!("--listen {address}: {error}: give a free address"))
}

/// Serves until `stop`; requests under way end first.
pub async fn serve(listener: TcpListener, admin: Arc<Admin>, stop: CancellationToken) {
    let served = axum::serve(listener, routes(admin))
        .with_graceful_shutdown(stop.cancelled_owned())
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the HTTP port has failed");
    }
}

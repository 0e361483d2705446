//! Connections of the public port: small packets at once, slow heads refused, a shutdown that lets runs end.

use std::time::Duration;

use axum::Router;
use baton_system::network::{ACCEPT_PAUSE, Listener, Stream};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::FrontConfig;

/// Serves until `shutdown`, then lets requests in flight end for the configured time and closes what is left.
pub async fn serve(
    listener: Listener,
    routes: Router,
    config: &FrontConfig,
    shutdown: CancellationToken,
) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            Some(ended) = connections.join_next(), if !connections.is_empty() => report(ended),
            accepted = listener.accept(), if connections.len() < config.max_connections => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream, routes.clone(), config.head_timeout, shutdown.clone()));
                }
                Err(error) => {
                    tracing::warn!("a connection was not accepted: {error}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    let drain = async {
        while let Some(ended) = connections.join_next().await {
            report(ended);
        }
    };
    if tokio::time::timeout(config.drain_timeout, drain)
        .await
        .is_err()
    {
        tracing::warn!(
            connections = connections.len(),
            "closed connections that did not end in time"
        );
        connections.shutdown().await;
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!("a connection ended by a fault: {error}");
    }
}

async fn connection(
    stream: Stream,
    routes: Router,
    head_timeout: Duration,
    shutdown: CancellationToken,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_timeout)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        // Clients that leave early are no fault.
        tracing::debug!("a connection broke off: {error}");
    }
}

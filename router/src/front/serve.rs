//! A port: takes connections as long as there are seats, refuses the others, and ends so that runs in flight can.

use std::time::Duration;

use axum::Router;
use baton_system::network::{ACCEPT_PAUSE, Listener, Stream};
use tokio::io::AsyncWriteExt;
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::connection::{self, Port};
use super::counts::Counts;
use super::limits::FrontConfig;
use super::seats::Seats;
use crate::openai::error::ApiError;

/// Connections that are told why they are refused, at a time; each takes up to a second. More are closed without a word.
const REFUSALS: usize = 256;

/// After the drain, for the last words of streams that were cut.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Serves until `shutdown`, then lets requests in flight end for the configured time and closes what is left. Its connections are
/// not counted.
pub async fn serve(
    listener: Listener,
    routes: Router,
    config: &FrontConfig,
    shutdown: CancellationToken,
) {
    let port = Port {
        routes,
        config: config.clone(),
        identity: None,
        counts: Counts::default(),
        shutdown,
    };
    serve_port(listener, port, &CancellationToken::new()).await;
}

/// The same, with all that a port may have. `cut` is cancelled when the time for runs in flight is over, shortly before their
/// connections are closed.
pub(super) async fn serve_port(listener: Listener, port: Port, cut: &CancellationToken) {
    let seats = Seats::new(port.config.max_connections, port.counts.clone());
    let mut connections = JoinSet::new();
    let mut refusals = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = port.shutdown.cancelled() => break,
            Some(ended) = connections.join_next(), if !connections.is_empty() => report(ended),
            Some(ended) = refusals.join_next(), if !refusals.is_empty() => report(ended),
            accepted = listener.accept() => {
                accept(accepted, &seats, &port, &mut connections, &mut refusals).await;
            }
        }
    }
    seats.send_idle_away();
    // Clients that do not know yet are told to go elsewhere. They are not waited for.
    let mut late = JoinSet::new();
    let drain = async {
        while !connections.is_empty() {
            tokio::select! {
                biased;
                Some(ended) = connections.join_next() => report(ended),
                Some(ended) = late.join_next(), if !late.is_empty() => report(ended),
                accepted = listener.accept() => {
                    accept(accepted, &seats, &port, &mut late, &mut refusals).await;
                }
            }
        }
    };
    if timeout(port.config.drain_timeout, drain).await.is_err() {
        tracing::warn!(
            connections = connections.len(),
            "requests that did not end in time are cut off"
        );
        cut.cancel();
        let last_words = async {
            while let Some(ended) = connections.join_next().await {
                report(ended);
            }
        };
        let _ = timeout(LAST_WORDS, last_words).await;
    }
    drop(listener);
    for tasks in [&mut connections, &mut late, &mut refusals] {
        tasks.shutdown().await;
    }
}

async fn accept(
    accepted: std::io::Result<(Stream, std::net::SocketAddr)>,
    seats: &std::sync::Arc<Seats>,
    port: &Port,
    connections: &mut JoinSet<()>,
    refusals: &mut JoinSet<()>,
) {
    match accepted {
        Ok((stream, _)) => match seats.take() {
            Some(seat) => {
                connections.spawn(connection::serve(stream, seat, port.clone()));
            }
            // Before a handshake nobody would understand.
            None if port.identity.is_none() && refusals.len() < REFUSALS => {
                refusals.spawn(refuse(stream, port.config.max_connections));
            }
            None => {}
        },
        Err(error) => {
            tracing::warn!("a connection was not accepted: {error}");
            // Out of descriptors, most likely: an idle client gives one back.
            seats.send_one_away();
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }
}

/// 503 for a connection that has no seat.
async fn refuse(mut stream: Stream, most: usize) {
    let error = ApiError::overloaded(format!(
        "all {most} connections of this router are busy: try again"
    ));
    // Two levels of strings always serialise.
    let body = serde_json::to_string(&error.body()).unwrap_or_default();
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: {}\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{body}",
        error.retry_after_seconds.unwrap_or(1),
        body.len()
    );
    // A fresh connection has room for it.
    if stream.write_all(answer.as_bytes()).await.is_ok() {
        connection::part(stream).await;
    }
}

fn report(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && !error.is_cancelled()
    {
        tracing::error!("a connection ended by a fault: {error}");
    }
}

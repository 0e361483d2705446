//! How a source takes readers' connections, whatever they come over: as many as it may serve, the next ones told so, every one a
//! task of one set that ends with it.

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use baton_system::network::{ACCEPT_PAUSE, Listener, Stream};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// Refusals that wait for their reader to take them: as many as a burst of readers; beyond it a connection is just closed.
const REFUSALS: usize = 64;

/// Gives connections. One that is dropped while it waits loses none.
pub(super) trait Door {
    type Connection;
    type Peer: Display + Send + 'static;

    /// The next connection, and whose it is.
    fn accept(&self) -> impl Future<Output = io::Result<(Self::Connection, Self::Peer)>> + Send;
}

impl Door for Listener {
    type Connection = Stream;
    type Peer = SocketAddr;

    async fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        Self::accept(self).await
    }
}

impl Door for UnixListener {
    type Connection = UnixStream;
    type Peer = &'static str;

    async fn accept(&self) -> io::Result<(UnixStream, &'static str)> {
        Ok((Self::accept(self).await?.0, "a process of this host"))
    }
}

/// Serves at most `readers` connections at a time until `stop`.
pub(super) async fn serve<D: Door, Served, Refused>(
    door: D,
    readers: usize,
    stop: CancellationToken,
    serve: impl Fn(D::Connection) -> Served,
    refuse: impl Fn(D::Connection) -> Refused,
) where
    Served: Future<Output = io::Result<()>> + Send + 'static,
    Refused: Future<Output = ()> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(readers));
    let refusals = Arc::new(Semaphore::new(REFUSALS));
    // Dropped with this future, which ends them all.
    let mut connections = JoinSet::new();
    loop {
        let (connection, peer) = tokio::select! {
            () = stop.cancelled() => break,
            Some(ended) = connections.join_next() => {
                if let Err(error) = ended {
                    warn!(%error, "a transfer connection ended by a bug");
                }
                continue;
            }
            accepted = door.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    warn!(%error, "accepting a transfer connection failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
        };
        let stop = stop.clone();
        if let Ok(permit) = Arc::clone(&places).try_acquire_owned() {
            let served = serve(connection);
            connections.spawn(async move {
                let ended = tokio::select! {
                    () = stop.cancelled() => Ok(()),
                    ended = served => ended,
                };
                if let Err(error) = ended {
                    debug!(%peer, %error, "a transfer connection ended early");
                }
                drop(permit);
            });
            continue;
        }
        warn!(%peer, readers, "too many transfer connections, one refused");
        if let Ok(permit) = Arc::clone(&refusals).try_acquire_owned() {
            let refused = refuse(connection);
            connections.spawn(async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = refused => {}
                }
                drop(permit);
            });
        }
    }
    while connections.join_next().await.is_some() {}
}

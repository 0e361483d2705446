//! Client of a worker: its card and its load over HTTP, its drain over gRPC. Each call has a deadline and each answer a bound.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use baton_protocol::card::Card;
use baton_protocol::wire::DrainRequest;
use baton_protocol::wire::worker_client::WorkerClient;
use tonic::transport::Endpoint;

use crate::fetch::{Fetch, FetchError};
use crate::pool::WorkerLoad;

/// Port of the control service in a worker's pod.
pub const CONTROL: u16 = 7000;
/// Port of the admin service in a worker's pod.
pub const ADMIN: u16 = 7002;

const DRAIN_WITHIN: Duration = Duration::from_secs(2);

/// Why a worker could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error("http://{address}{path} answers what is no {what}: {source}")]
    Shape {
        address: SocketAddr,
        path: &'static str,
        what: &'static str,
        source: serde_json::Error,
    },
    #[error("worker at {address} was not asked to drain: {source}")]
    Connect {
        address: SocketAddr,
        source: tonic::transport::Error,
    },
    #[error("worker at {address} does not drain: {status}")]
    Refused {
        address: SocketAddr,
        status: Box<tonic::Status>,
    },
    #[error("worker at {address} did not answer a drain request within {} s", DRAIN_WITHIN.as_secs())]
    Late { address: SocketAddr },
}

/// `GET /v1/load`, as far as it decides about draining and warmth.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Load {
    running_sequences: u64,
    queued_sequences: u64,
    leases_open: u64,
    draining: bool,
    /// Of a daemon beside a server.
    #[serde(default)]
    lacks_plug_in: bool,
    blocks: Blocks,
}

#[derive(serde::Deserialize)]
struct Blocks {
    cached: u64,
}

impl From<Load> for WorkerLoad {
    fn from(load: Load) -> Self {
        Self {
            running_sequences: load.running_sequences,
            queued_sequences: load.queued_sequences,
            leases_open: load.leases_open,
            draining: load.draining,
            lacks_plug_in: load.lacks_plug_in,
            cached_blocks: load.blocks.cached,
        }
    }
}

/// Asks workers.
#[derive(Clone, Debug, Default)]
pub struct Workers {
    fetch: Fetch,
}

impl Workers {
    /// The card of the worker in the pod at `pod`.
    ///
    /// # Errors
    /// It does not answer in time, or not with a card.
    pub async fn card(&self, pod: IpAddr) -> Result<Card, WorkerError> {
        self.card_at(SocketAddr::new(pod, ADMIN)).await
    }

    /// As [`Workers::card`], of the admin port `admin`.
    ///
    /// # Errors
    /// As [`Workers::card`].
    pub async fn card_at(&self, admin: SocketAddr) -> Result<Card, WorkerError> {
        self.read(admin, "/v1/card", "card").await
    }

    /// The load of the worker in the pod at `pod`.
    ///
    /// # Errors
    /// It does not answer in time, or not with a load.
    pub async fn load(&self, pod: IpAddr) -> Result<WorkerLoad, WorkerError> {
        self.load_at(SocketAddr::new(pod, ADMIN)).await
    }

    /// As [`Workers::load`], of the admin port `admin`.
    ///
    /// # Errors
    /// As [`Workers::load`].
    pub async fn load_at(&self, admin: SocketAddr) -> Result<WorkerLoad, WorkerError> {
        let load: Load = self.read(admin, "/v1/load", "load").await?;
        Ok(load.into())
    }

    async fn read<T: serde::de::DeserializeOwned>(
        &self,
        address: SocketAddr,
        path: &'static str,
        what: &'static str,
    ) -> Result<T, WorkerError> {
        let body = self.fetch.get(address, path).await?;
        serde_json::from_slice(&body).map_err(|source| WorkerError::Shape {
            address,
            path,
            what,
            source,
        })
    }
}

/// Asks the worker whose control service is at `address` to take no new work, or with `undo` to take it again.
///
/// # Errors
/// It cannot be reached, does not answer in time, or refuses.
pub async fn drain(address: SocketAddr, undo: bool) -> Result<(), WorkerError> {
    let call = async {
        let connect = |source| WorkerError::Connect { address, source };
        let channel = Endpoint::from_shared(format!("http://{address}"))
            .map_err(connect)?
            .connect()
            .await
            .map_err(connect)?;
        WorkerClient::new(channel)
            .drain(DrainRequest { undo })
            .await
            .map_err(|status| WorkerError::Refused {
                address,
                status: Box::new(status),
            })
    };
    match tokio::time::timeout(DRAIN_WITHIN, call).await {
        Ok(answer) => answer.map(|_| ()),
        Err(_) => Err(WorkerError::Late { address }),
    }
}

#[cfg(test)]
mod tests;

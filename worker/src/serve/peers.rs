//! The lease protocol spoken to other workers over gRPC.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::ids::{Generation, LeaseId, TransferId};
use baton_protocol::wire::worker_client::WorkerClient;
use baton_protocol::wire::{self, claim_reply, renew_reply};
use baton_system::network::{Network, grpc};
use bytes::Bytes;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

use crate::kv::intake::client::{CallFailed, Grant, LeaseClient};
use crate::kv::lease::{Completion, Gone, Granted, Reader};

/// For a connection to be made, and for each call: several round trips across a site, short beside a lease.
const CONNECT: Duration = Duration::from_secs(2);
const CALL: Duration = Duration::from_secs(2);
/// While a call is under way. A connection whose other end is gone without a word is given up with it: later calls make another.
const PING_EVERY: Duration = Duration::from_secs(1);

/// Connections kept. A fleet has fewer prefill workers than this for one decode worker; beyond it all are made anew.
const CONNECTIONS: usize = 256;

/// Connections to other workers, one for each address, made when first used.
#[derive(Clone, Debug)]
pub(crate) struct Peers {
    network: Arc<dyn Network>,
    channels: Arc<Mutex<HashMap<String, Channel>>>,
}

impl Peers {
    pub(crate) fn new(network: Arc<dyn Network>) -> Self {
        Self {
            network,
            channels: Arc::default(),
        }
    }

    pub(crate) fn at(&self, address: &str) -> Result<Peer, CallFailed> {
        let mut channels = self.channels.lock();
        if let Some(channel) = channels.get(address) {
            return Ok(Peer::new(WorkerClient::new(channel.clone())));
        }
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| CallFailed(format!("worker at {address}: {error}")))?
            .connect_timeout(CONNECT)
            .timeout(CALL)
            .http2_keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(CALL);
        let channel = grpc::channel(Arc::clone(&self.network), &endpoint);
        if channels.len() >= CONNECTIONS {
            channels.clear();
        }
        channels.insert(address.to_owned(), channel.clone());
        Ok(Peer::new(WorkerClient::new(channel)))
    }
}

/// One other worker.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    client: WorkerClient<Channel>,
    /// Span of the transfer that it is asked for; empty: none.
    traceparent: String,
}

impl Peer {
    fn new(client: WorkerClient<Channel>) -> Self {
        Self {
            client,
            traceparent: String::new(),
        }
    }

    /// Says where the owner's part of the transfer belongs.
    #[must_use]
    pub(crate) fn traced(mut self, traceparent: String) -> Self {
        self.traceparent = traceparent;
        self
    }
}

async fn call<T>(
    answer: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, CallFailed> {
    answer
        .await
        .map(Response::into_inner)
        .map_err(|status| CallFailed(format!("{:?}: {}", status.code(), status.message())))
}

fn granted(granted: &wire::Granted) -> Granted {
    Granted {
        for_milliseconds: granted.for_milliseconds,
    }
}

fn gone(gone: &wire::Gone) -> Gone {
    // A word of a later version is gone all the same.
    Gone::ALL
        .into_iter()
        .find(|known| known.to_string() == gone.reason)
        .unwrap_or(Gone::Unknown)
}

fn no_outcome() -> CallFailed {
    CallFailed("the answer has no outcome: the worker speaks another version".to_owned())
}

impl LeaseClient for Peer {
    fn claim<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        reader: &'a Reader,
    ) -> BoxFuture<'a, Result<Grant, CallFailed>> {
        Box::pin(async move {
            let request = wire::ClaimRequest {
                lease: Bytes::copy_from_slice(&lease.0),
                generation: generation.0,
                transfer: reader.transfer.0.clone(),
                reader: reader.worker.0.clone(),
                reader_incarnation: reader.incarnation.0,
                traceparent: self.traceparent.clone(),
            };
            let mut client = self.client.clone();
            let reply = call(client.claim(request)).await?;
            match reply.outcome.ok_or_else(no_outcome)? {
                claim_reply::Outcome::Granted(answer) => Ok(Ok(granted(&answer))),
                claim_reply::Outcome::Gone(answer) => Ok(Err(gone(&answer))),
            }
        })
    }

    fn renew<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        transfer: &'a TransferId,
    ) -> BoxFuture<'a, Result<Grant, CallFailed>> {
        Box::pin(async move {
            let request = wire::RenewRequest {
                lease: Bytes::copy_from_slice(&lease.0),
                generation: generation.0,
                transfer: transfer.0.clone(),
            };
            let mut client = self.client.clone();
            let reply = call(client.renew(request)).await?;
            match reply.outcome.ok_or_else(no_outcome)? {
                renew_reply::Outcome::Granted(answer) => Ok(Ok(granted(&answer))),
                renew_reply::Outcome::Gone(answer) => Ok(Err(gone(&answer))),
            }
        })
    }

    fn complete<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        transfer: &'a TransferId,
        verified: bool,
    ) -> BoxFuture<'a, Result<Completion, CallFailed>> {
        Box::pin(async move {
            let request = wire::CompleteRequest {
                lease: Bytes::copy_from_slice(&lease.0),
                generation: generation.0,
                transfer: transfer.0.clone(),
                verified,
            };
            let mut client = self.client.clone();
            let reply = call(client.complete(request)).await?;
            Ok(if reply.stale {
                Completion::Stale
            } else {
                Completion::Accepted
            })
        })
    }
}

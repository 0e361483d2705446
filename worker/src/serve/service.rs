//! The gRPC service: one file for each call that does more than ask the pool.

mod decode;
mod handoff;
pub(crate) mod leases;
mod prefill;
pub(crate) mod watch;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::ids::{OperationId, RunId};
use baton_protocol::wire::worker_server::Worker;
use baton_protocol::wire::{self, DecodeEvent, PrefillEvent, WatchEvent};
use bytes::Bytes;
use futures::Stream;
use tonic::{Request, Response, Status, Streaming};

use super::daemon::Daemon;
use super::messages::narrow;

/// Bytes of one message of an artifact: well below the 4 MiB that gRPC takes by default.
const ARTIFACT_CHUNK: usize = 1 << 18;
/// How long a cancellation waits for its operations to end: the longest step, within reason. They end after it all the same.
const CANCEL_WAIT: Duration = Duration::from_secs(5);

pub(crate) type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Implements `baton.worker.v1.Worker`.
#[derive(Clone, Debug)]
pub(crate) struct Service(pub(crate) Arc<Daemon>);

#[tonic::async_trait]
impl Worker for Service {
    type WatchStream = Answers<WatchEvent>;
    type PrefillStream = Answers<PrefillEvent>;
    type DecodeStream = Answers<DecodeEvent>;
    type ArtifactStream = Answers<wire::ArtifactChunk>;

    async fn watch(
        &self,
        request: Request<wire::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let events = watch::events(Arc::clone(&self.0), request.into_inner());
        Ok(Response::new(Box::pin(events)))
    }

    async fn prefill(
        &self,
        request: Request<wire::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let events = prefill::events(&self.0, request.into_inner()).await?;
        Ok(Response::new(Box::pin(events)))
    }

    async fn decode(
        &self,
        request: Request<Streaming<wire::DecodeRequest>>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        let events = decode::events(&self.0, request.into_inner()).await?;
        Ok(Response::new(Box::pin(events)))
    }

    async fn cancel(
        &self,
        request: Request<wire::CancelRequest>,
    ) -> Result<Response<wire::CancelReply>, Status> {
        let request = request.into_inner();
        let run = RunId::from(request.run);
        let only = Some(request.operation).filter(|operation| !operation.is_empty());
        let only = only.map(OperationId::from);
        let ends = self.0.operations.cancel(&run, only.as_ref());
        let cancelled = narrow(ends.len());
        let all = async {
            for end in ends {
                end.cancelled().await;
            }
        };
        // They have been told; that some are still in a long step is no failure of the call.
        let _ = tokio::time::timeout(CANCEL_WAIT, all).await;
        match only {
            None => {
                self.0.pool.cancel_run(&run);
            }
            Some(operation) => {
                if let Some(lease) = self.0.results.lease_of(&operation) {
                    self.0.pool.release_lease(lease, &run);
                }
            }
        }
        self.0.changed.notify_one();
        Ok(Response::new(wire::CancelReply { cancelled }))
    }

    async fn claim(
        &self,
        request: Request<wire::ClaimRequest>,
    ) -> Result<Response<wire::ClaimReply>, Status> {
        leases::claim(&*self.0, request.into_inner()).map(Response::new)
    }

    async fn renew(
        &self,
        request: Request<wire::RenewRequest>,
    ) -> Result<Response<wire::RenewReply>, Status> {
        leases::renew(&*self.0, &request.into_inner()).map(Response::new)
    }

    async fn complete(
        &self,
        request: Request<wire::CompleteRequest>,
    ) -> Result<Response<wire::CompleteReply>, Status> {
        leases::complete(&*self.0, request.into_inner()).map(Response::new)
    }

    async fn release(
        &self,
        request: Request<wire::ReleaseRequest>,
    ) -> Result<Response<wire::ReleaseReply>, Status> {
        leases::release(&*self.0, request.into_inner()).map(Response::new)
    }

    /// A prefill's stream says it here, with its lease.
    async fn parameters(
        &self,
        _: Request<wire::ParametersRequest>,
    ) -> Result<Response<wire::ParametersReply>, Status> {
        Err(Status::unimplemented(format!(
            "worker {}: only beside an engine with Baton's connector",
            self.0.card.worker
        )))
    }

    async fn drain(
        &self,
        request: Request<wire::DrainRequest>,
    ) -> Result<Response<wire::DrainReply>, Status> {
        self.0.set_draining(!request.into_inner().undo);
        Ok(Response::new(wire::DrainReply {
            operations: narrow(self.0.operations.count()),
            leases: self.0.pool.lease_counts().total(),
        }))
    }

    async fn artifact(
        &self,
        request: Request<wire::ArtifactRequest>,
    ) -> Result<Response<Self::ArtifactStream>, Status> {
        let digest = request.into_inner().digest;
        let Some(bytes) = self.0.artifacts.get(&digest) else {
            return Err(Status::not_found(format!(
                "artifact {digest}: worker {} has no such file: take the digests from its card",
                self.0.card.worker
            )));
        };
        Ok(Response::new(chunks(bytes)))
    }
}

/// A file in messages.
pub(crate) fn chunks(bytes: &Bytes) -> Answers<wire::ArtifactChunk> {
    let chunks: Vec<Result<wire::ArtifactChunk, Status>> = (0..bytes.len())
        .step_by(ARTIFACT_CHUNK)
        .map(|begin| {
            let end = (begin + ARTIFACT_CHUNK).min(bytes.len());
            let data: Bytes = bytes.slice(begin..end);
            Ok(wire::ArtifactChunk { data })
        })
        .collect();
    Box::pin(futures::stream::iter(chunks))
}

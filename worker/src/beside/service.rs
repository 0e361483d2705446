//! The gRPC service beside a server: what is told of it. What it computes is asked for at its own port.

use std::sync::Arc;

use baton_protocol::card::Dispatch;
use baton_protocol::wire::worker_server::Worker;
use baton_protocol::wire::{self, DecodeEvent, PrefillEvent, WatchEvent};
use tonic::{Code, Request, Response, Status, Streaming};

use super::life::Life;
use super::shared::Shared;
use super::staging::Staging;
use crate::config::Connector;
use crate::connector::Untold;
use crate::serve::service::{Answers, chunks, leases, watch};

/// Implements `baton.worker.v1.Worker`.
#[derive(Clone, Debug)]
pub(crate) struct Service(pub(crate) Arc<Shared>);

impl Service {
    fn called_over_http(&self) -> Status {
        let url = match self.0.current().map(|life| life.card.dispatch.clone()) {
            Some(Dispatch::OpenAiHttp { url, .. }) => url,
            _ => "its card's dispatch.url".to_owned(),
        };
        Status::failed_precondition(format!(
            "worker {}: its server is called over HTTP: send the request to {url}",
            self.0.config.name
        ))
    }

    fn staged(&self) -> Result<Arc<Life>, Status> {
        self.0.living().map_err(Status::unavailable)
    }

    fn staging<'a>(&self, life: &'a Life) -> Result<&'a Staging, Status> {
        life.staging
            .as_ref()
            .ok_or_else(|| self.no_lease(Code::FailedPrecondition))
    }

    fn untold(&self, untold: &Untold) -> Status {
        let words = format!("worker {}: {untold}", self.0.config.name);
        match untold {
            Untold::Id(_) => Status::invalid_argument(words),
            Untold::Many => Status::resource_exhausted(words),
            Untold::Unknown => Status::not_found(words),
            Untold::Nothing(_) => Status::failed_precondition(words),
        }
    }

    fn no_lease(&self, code: Code) -> Status {
        let name = &self.0.config.name;
        let words = match self.0.config.engine.connector {
            Connector::None => format!("worker {name}: its server hands no KV over"),
            by => format!(
                "worker {name}: its server moves KV by connector {}, which has no leases here",
                by.word()
            ),
        };
        Status::new(code, words)
    }
}

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
        let life = self.0.living().map_err(Status::unavailable)?;
        let events = watch::events(life, request.into_inner());
        Ok(Response::new(Box::pin(events)))
    }

    async fn prefill(
        &self,
        _: Request<wire::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        Err(self.called_over_http())
    }

    async fn decode(
        &self,
        _: Request<Streaming<wire::DecodeRequest>>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        Err(self.called_over_http())
    }

    /// Nothing runs here: whoever called the server closes its connection.
    async fn cancel(
        &self,
        _: Request<wire::CancelRequest>,
    ) -> Result<Response<wire::CancelReply>, Status> {
        Ok(Response::new(wire::CancelReply { cancelled: 0 }))
    }

    async fn claim(
        &self,
        request: Request<wire::ClaimRequest>,
    ) -> Result<Response<wire::ClaimReply>, Status> {
        let life = self.staged()?;
        leases::claim(self.staging(&life)?, request.into_inner()).map(Response::new)
    }

    async fn renew(
        &self,
        request: Request<wire::RenewRequest>,
    ) -> Result<Response<wire::RenewReply>, Status> {
        let life = self.staged()?;
        leases::renew(self.staging(&life)?, &request.into_inner()).map(Response::new)
    }

    async fn complete(
        &self,
        request: Request<wire::CompleteRequest>,
    ) -> Result<Response<wire::CompleteReply>, Status> {
        let life = self.staged()?;
        leases::complete(self.staging(&life)?, request.into_inner()).map(Response::new)
    }

    async fn release(
        &self,
        request: Request<wire::ReleaseRequest>,
    ) -> Result<Response<wire::ReleaseReply>, Status> {
        let life = self.staged()?;
        leases::release(self.staging(&life)?, request.into_inner()).map(Response::new)
    }

    async fn parameters(
        &self,
        request: Request<wire::ParametersRequest>,
    ) -> Result<Response<wire::ParametersReply>, Status> {
        // The life is not held while it is waited for: it may end meanwhile, and whoever waits hears of that.
        let told = {
            let life = self.staged()?;
            let staging = life.staging.as_ref();
            let staging = staging.ok_or_else(|| self.no_lease(Code::Unimplemented))?;
            staging.parameters(request.into_inner().operation)
        };
        let json = told.await.map_err(|untold| self.untold(&untold))?;
        Ok(Response::new(wire::ParametersReply { json }))
    }

    async fn drain(
        &self,
        request: Request<wire::DrainRequest>,
    ) -> Result<Response<wire::DrainReply>, Status> {
        self.0.set_draining(!request.into_inner().undo);
        Ok(Response::new(wire::DrainReply {
            operations: self.0.operations(),
            leases: self.0.leases(),
        }))
    }

    async fn artifact(
        &self,
        request: Request<wire::ArtifactRequest>,
    ) -> Result<Response<Self::ArtifactStream>, Status> {
        let life = self.0.living().map_err(Status::unavailable)?;
        let digest = request.into_inner().digest;
        let Some(bytes) = life.artifacts.get(&digest) else {
            return Err(Status::not_found(format!(
                "artifact {digest}: worker {} has no such file: take the digests from its card",
                self.0.config.name
            )));
        };
        Ok(Response::new(chunks(bytes)))
    }
}

//! Stands before one worker and changes what it says of itself: its card, and its descriptors of KV. Everything else is passed
//! on, and what was asked is counted.
//!
//! A worker whose KV means something else is hard to come by in every way that it can differ. Its card is all that a router
//! has to go by, and a descriptor is all that another worker has.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use baton_protocol::card::{Card, Dispatch};
use baton_protocol::identity::Fact;
use baton_protocol::wire::watch_event::Event;
use baton_protocol::wire::worker_client::WorkerClient;
use baton_protocol::wire::worker_server::{Worker, WorkerServer};
use baton_protocol::wire::{
    ArtifactChunk, ArtifactRequest, CancelReply, CancelRequest, ClaimReply, ClaimRequest,
    CompleteReply, CompleteRequest, DecodeEvent, DecodeRequest, Descriptor, DrainReply,
    DrainRequest, ParametersReply, ParametersRequest, PrefillEvent, PrefillRequest, ReleaseReply,
    ReleaseRequest, RenewReply, RenewRequest, WatchEvent, WatchRequest, prefill_event,
};
use baton_worker::model::facts::artifact_digest;
use futures::{Stream, StreamExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

/// What is changed.
#[derive(Clone, Copy, Debug)]
pub struct Changes {
    /// Digests in a card are made right again afterwards, as a worker that really differs would have them.
    pub card: fn(&mut Card),
    pub descriptor: fn(&mut Descriptor),
    /// Serve another text in place of one that the card names, and name that.
    pub artifact: Option<Artifact>,
    /// Where the card says that the worker's engine is called.
    pub engine: Option<SocketAddr>,
}

/// A text that a card names by digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Artifact {
    Tokenizer,
    ChatTemplate,
}

impl Artifact {
    fn named_in(self, card: &mut Card) -> &mut Fact<String> {
        match self {
            Self::Tokenizer => &mut card.route_filter.tokenizer,
            Self::ChatTemplate => &mut card.route_filter.chat_template,
        }
    }
}

impl Changes {
    /// None.
    pub fn none() -> Self {
        Self {
            card: |_| (),
            descriptor: |_| (),
            artifact: None,
            engine: None,
        }
    }

    /// Of the place where the worker's engine is called only.
    pub fn of_engine(engine: SocketAddr) -> Self {
        Self {
            engine: Some(engine),
            ..Self::none()
        }
    }

    /// Of the card only.
    pub fn of_card(card: fn(&mut Card)) -> Self {
        Self {
            card,
            ..Self::none()
        }
    }

    /// Of one text only.
    pub fn of_artifact(artifact: Artifact) -> Self {
        Self {
            artifact: Some(artifact),
            ..Self::none()
        }
    }

    /// Of descriptors only.
    pub fn of_descriptor(descriptor: fn(&mut Descriptor)) -> Self {
        Self {
            descriptor,
            ..Self::none()
        }
    }
}

/// One changed worker. It serves until it is dropped.
#[derive(Debug)]
pub struct Interposer {
    pub name: String,
    pub address: SocketAddr,
    dispatched: Arc<AtomicU64>,
    server: JoinHandle<()>,
}

impl Interposer {
    /// Serves under `name` what the worker at `upstream` (`HOST:PORT` of its control service) serves.
    ///
    /// # Errors
    /// The worker cannot be reached, or no port is free.
    pub async fn before(upstream: &str, name: &str, changes: Changes) -> Result<Self> {
        let channel = Endpoint::from_shared(format!("http://{upstream}"))?
            .connect()
            .await
            .with_context(|| format!("worker {upstream}"))?;
        let client = WorkerClient::new(channel);
        let artifact = match changes.artifact {
            Some(artifact) => Some(altered(&client, artifact).await?),
            None => None,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let dispatched = Arc::new(AtomicU64::new(0));
        let stand_in = StandIn {
            client,
            name: name.to_owned(),
            address,
            changes,
            artifact,
            dispatched: dispatched.clone(),
        };
        // Owned by the interposer, which ends it.
        let server = tokio::spawn(async move {
            let service = WorkerServer::new(stand_in);
            let served =
                Server::builder().serve_with_incoming(service, TcpListenerStream::new(listener));
            // A server that fails shows as a worker that is lost.
            let _ = served.await;
        });
        Ok(Self {
            name: name.to_owned(),
            address,
            dispatched,
            server,
        })
    }

    /// Operations that a router gave it.
    pub fn dispatched(&self) -> u64 {
        self.dispatched.load(Ordering::SeqCst)
    }
}

impl Drop for Interposer {
    fn drop(&mut self) {
        self.server.abort();
    }
}

#[derive(Clone)]
struct StandIn {
    client: WorkerClient<Channel>,
    name: String,
    address: SocketAddr,
    changes: Changes,
    /// What is served in place of another text.
    artifact: Option<Altered>,
    dispatched: Arc<AtomicU64>,
}

#[derive(Clone, Debug)]
struct Altered {
    artifact: Artifact,
    digest: String,
    bytes: Vec<u8>,
}

/// The worker's own text with a space behind it: it means the same, and is another one.
async fn altered(client: &WorkerClient<Channel>, artifact: Artifact) -> Result<Altered> {
    let mut events = client
        .clone()
        .watch(WatchRequest::default())
        .await?
        .into_inner();
    let mut card = loop {
        let event = events.message().await?.context("no card")?;
        if let Some(Event::Card(card)) = event.event {
            break Card::from_json(&card.json)?;
        }
    };
    let known = artifact.named_in(&mut card).known().cloned();
    let request = ArtifactRequest {
        digest: known.context("the card names no such text")?,
    };
    let mut chunks = client.clone().artifact(request).await?.into_inner();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.message().await? {
        bytes.extend_from_slice(&chunk.data);
    }
    bytes.push(b' ');
    Ok(Altered {
        artifact,
        digest: artifact_digest(&bytes),
        bytes,
    })
}

impl StandIn {
    fn card(&self, card: &mut Card) {
        card.worker = self.name.as_str().into();
        card.control_address = self.address.to_string();
        (self.changes.card)(card);
        if let (Some(engine), Dispatch::OpenAiHttp { url, .. }) =
            (self.changes.engine, &mut card.dispatch)
        {
            *url = format!("http://{engine}");
        }
        if let Some(altered) = &self.artifact {
            *altered.artifact.named_in(card) = Fact::observed(altered.digest.clone());
        }
        card.kv_identity = card.identity.digest();
        card.layout_digest = card.layout.digest();
    }

    fn dispatch(&self) -> WorkerClient<Channel> {
        self.dispatched.fetch_add(1, Ordering::SeqCst);
        self.client.clone()
    }
}

type Reply<T> = Result<Response<T>, Status>;
type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn passed<T: Send + 'static>(response: Response<Streaming<T>>) -> Response<Events<T>> {
    response.map(|stream| stream.boxed())
}

#[tonic::async_trait]
impl Worker for StandIn {
    type WatchStream = Events<WatchEvent>;

    async fn watch(&self, request: Request<WatchRequest>) -> Reply<Self::WatchStream> {
        let events = self.client.clone().watch(request).await?.into_inner();
        let stand_in = self.clone();
        let changed = events.map(move |event| {
            let mut event = event?;
            if let Some(Event::Card(message)) = &mut event.event {
                let unreadable =
                    |error: &dyn std::fmt::Display| Status::internal(error.to_string());
                let mut card =
                    Card::from_json(&message.json).map_err(|error| unreadable(&error))?;
                stand_in.card(&mut card);
                message.json = card.to_json().map_err(|error| unreadable(&error))?;
            }
            Ok(event)
        });
        Ok(Response::new(changed.boxed()))
    }

    type PrefillStream = Events<PrefillEvent>;

    async fn prefill(&self, request: Request<PrefillRequest>) -> Reply<Self::PrefillStream> {
        let events = self.dispatch().prefill(request).await?.into_inner();
        let change = self.changes.descriptor;
        let changed = events.map(move |event| {
            let mut event = event?;
            if let Some(prefill_event::Event::Lease(lease)) = &mut event.event
                && let Some(descriptor) = &mut lease.descriptor
            {
                change(descriptor);
            }
            Ok(event)
        });
        Ok(Response::new(changed.boxed()))
    }

    type DecodeStream = Events<DecodeEvent>;

    async fn decode(
        &self,
        request: Request<Streaming<DecodeRequest>>,
    ) -> Reply<Self::DecodeStream> {
        // A request that breaks off ends; the worker sees its end.
        let messages = request
            .into_inner()
            .filter_map(|message| std::future::ready(message.ok()));
        self.dispatch().decode(messages).await.map(passed)
    }

    async fn cancel(&self, request: Request<CancelRequest>) -> Reply<CancelReply> {
        self.client.clone().cancel(request).await
    }

    async fn claim(&self, request: Request<ClaimRequest>) -> Reply<ClaimReply> {
        self.client.clone().claim(request).await
    }

    async fn renew(&self, request: Request<RenewRequest>) -> Reply<RenewReply> {
        self.client.clone().renew(request).await
    }

    async fn complete(&self, request: Request<CompleteRequest>) -> Reply<CompleteReply> {
        self.client.clone().complete(request).await
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Reply<ReleaseReply> {
        self.client.clone().release(request).await
    }

    /// As a worker of an earlier release: a router then sends the second leg after the first one's answer, and whoever stands between the
    /// two finds them one after the other.
    async fn parameters(&self, _: Request<ParametersRequest>) -> Reply<ParametersReply> {
        Err(Status::unimplemented(
            "what stands before a worker tells nothing early",
        ))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Reply<DrainReply> {
        self.client.clone().drain(request).await
    }

    type ArtifactStream = Events<ArtifactChunk>;

    async fn artifact(&self, request: Request<ArtifactRequest>) -> Reply<Self::ArtifactStream> {
        match &self.artifact {
            Some(altered) if altered.digest == request.get_ref().digest => {
                let chunk = ArtifactChunk {
                    data: altered.bytes.clone().into(),
                };
                Ok(Response::new(futures::stream::iter([Ok(chunk)]).boxed()))
            }
            _ => self.client.clone().artifact(request).await.map(passed),
        }
    }
}

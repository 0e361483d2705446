//! A worker that plays a script over real gRPC: for what real workers cannot be made to do on purpose.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use baton_protocol::card::Card;
use baton_protocol::identity::Fact;
use baton_protocol::ids::Incarnation;
use baton_protocol::wire::worker_server::{Worker, WorkerServer};
use baton_protocol::wire::{self, decode_event, prefill_event, watch_event};
use futures::future::BoxFuture;
use futures::{Stream, StreamExt};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream, UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use crate::obedient;

/// What a worker serves as its tokenizer and its template.
pub(crate) const ARTIFACT: &[u8] = b"{}";

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
/// One Decode call: what the router sends, and where answers go.
pub(crate) type DecodeScript =
    Box<dyn FnOnce(Streaming<wire::DecodeRequest>, Answers) -> BoxFuture<'static, ()> + Send>;

/// Where a Decode script answers.
#[derive(Clone)]
pub(crate) struct Answers(mpsc::Sender<Result<wire::DecodeEvent, Status>>);

/// A Decode call that a test answers step by step.
pub(crate) struct OpenDecode {
    /// Whom it was made to.
    pub(crate) worker: String,
    pub(crate) requests: Streaming<wire::DecodeRequest>,
    pub(crate) answers: Answers,
}

/// A Prefill call that a test answers step by step.
pub(crate) struct OpenPrefill {
    /// Whom it was made to.
    pub(crate) worker: String,
    pub(crate) request: wire::PrefillRequest,
    pub(crate) events: Reports,
}

/// Where the answers to a Prefill go.
#[derive(Clone)]
pub(crate) struct Reports(mpsc::Sender<Result<wire::PrefillEvent, Status>>);

impl Reports {
    pub(crate) async fn send(&self, event: prefill_event::Event) {
        let _ = self
            .0
            .send(Ok(wire::PrefillEvent { event: Some(event) }))
            .await;
    }

    /// Ends the stream with an error, as a process does that is killed.
    pub(crate) async fn fail(&self) {
        let _ = self.0.send(Err(Status::unavailable("killed"))).await;
    }

    /// The router has let go of the stream.
    pub(crate) async fn closed(&self) {
        self.0.closed().await;
    }
}

/// What becomes of calls that no script is waiting for.
enum Manner {
    /// They are refused: the test expects none.
    Strict,
    /// They are served as a good worker serves them.
    Obedient,
    /// The test answers them.
    Directed {
        decodes: mpsc::UnboundedSender<OpenDecode>,
        prefills: mpsc::UnboundedSender<OpenPrefill>,
    },
}

/// Calls that the test answers.
pub(crate) struct Calls {
    pub(crate) decodes: mpsc::UnboundedReceiver<OpenDecode>,
    pub(crate) prefills: mpsc::UnboundedReceiver<OpenPrefill>,
}

impl Answers {
    pub(crate) async fn send(&self, event: decode_event::Event) {
        let _ = self
            .0
            .send(Ok(wire::DecodeEvent { event: Some(event) }))
            .await;
    }

    /// Ends the stream with an error, as a process does that is killed.
    pub(crate) async fn fail(&self) {
        let _ = self.0.send(Err(Status::unavailable("killed"))).await;
    }

    /// The router has let go of the stream.
    pub(crate) async fn closed(&self) {
        self.0.closed().await;
    }
}

/// What happened at a worker.
#[derive(Debug, PartialEq)]
pub(crate) enum Seen {
    /// With the sequence it resumes from.
    Watch(Option<u64>),
    Prefill(Box<wire::PrefillRequest>),
    Cancel(String),
    /// Of one operation.
    CancelOperation(String),
    Artifact,
}

/// A router that has sent a prompt and asks how it is read.
pub(crate) struct OpenParameters {
    pub(crate) operation: String,
    pub(crate) told: oneshot::Sender<Result<wire::ParametersReply, Status>>,
}

struct State {
    card: Mutex<Card>,
    /// Who is told of such questions; `None`: they are not answered, as by a daemon of an earlier release.
    asked: Mutex<Option<mpsc::UnboundedSender<OpenParameters>>>,
    artifact: Vec<u8>,
    decodes: Mutex<VecDeque<DecodeScript>>,
    prefills: Mutex<VecDeque<Vec<prefill_event::Event>>>,
    manner: Mutex<Manner>,
    /// The last sequence and load that were told, said again every second: an idle worker lives.
    told: Mutex<(u64, wire::Load)>,
    /// Watch streams that were opened.
    watched: AtomicUsize,
    /// Nobody is there.
    gone: AtomicBool,
    /// The open Watch stream.
    watch: Mutex<Option<mpsc::UnboundedSender<Result<wire::WatchEvent, Status>>>>,
    seen: mpsc::UnboundedSender<Seen>,
}

/// One scripted worker. Its server ends with the test's runtime.
pub(crate) struct Double {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    pub(crate) seen: mpsc::UnboundedReceiver<Seen>,
    state: Arc<State>,
}

impl Double {
    pub(crate) async fn start(card: Card, artifact: &[u8]) -> Self {
        Self::registered(card, ARTIFACT, artifact).await
    }

    /// Its card names `promised` as tokenizer and template; it serves `artifact`.
    pub(crate) async fn registered(mut card: Card, promised: &[u8], artifact: &[u8]) -> Self {
        let digest = blake3::hash(promised).to_hex().to_string();
        card.route_filter.tokenizer = Fact::observed(digest.clone());
        card.route_filter.chat_template = Fact::observed(digest);
        let (sender, seen) = mpsc::unbounded_channel();
        let name = card.worker.to_string();
        let state = Arc::new(State {
            artifact: artifact.to_vec(),
            asked: Mutex::default(),
            decodes: Mutex::default(),
            prefills: Mutex::default(),
            manner: Mutex::new(Manner::Strict),
            told: Mutex::default(),
            watched: AtomicUsize::new(0),
            gone: AtomicBool::new(false),
            watch: Mutex::default(),
            seen: sender,
            card: Mutex::new(card),
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = WorkerServer::from_arc(Arc::new(Service(state.clone())));
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener)),
        );
        Self {
            name,
            address,
            seen,
            state,
        }
    }

    /// Scripts the next Decode call.
    pub(crate) fn decode<F, Fut>(&self, script: F)
    where
        F: FnOnce(Streaming<wire::DecodeRequest>, Answers) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let script: DecodeScript =
            Box::new(|requests, answers| Box::pin(script(requests, answers)));
        self.state.decodes.lock().unwrap().push_back(script);
    }

    /// Scripts the next Prefill call.
    pub(crate) fn prefill(&self, events: Vec<prefill_event::Event>) {
        self.state.prefills.lock().unwrap().push_back(events);
    }

    /// From now on whoever asks for a prompt's parameters is answered by the test.
    pub(crate) fn is_asked(&self) -> mpsc::UnboundedReceiver<OpenParameters> {
        let (sender, asked) = mpsc::unbounded_channel();
        *self.state.asked.lock().unwrap() = Some(sender);
        asked
    }

    /// From now on calls come to the test.
    pub(crate) fn direct(&self) -> Calls {
        Self::direct_all(std::slice::from_ref(self))
    }

    /// From now on calls to any of them come to the test, in the order in which they are made.
    pub(crate) fn direct_all(doubles: &[Self]) -> Calls {
        let (decodes, decode_calls) = mpsc::unbounded_channel();
        let (prefills, prefill_calls) = mpsc::unbounded_channel();
        for double in doubles {
            *double.state.manner.lock().unwrap() = Manner::Directed {
                decodes: decodes.clone(),
                prefills: prefills.clone(),
            };
        }
        Calls {
            decodes: decode_calls,
            prefills: prefill_calls,
        }
    }

    /// From now on calls are served.
    pub(crate) fn obey(&self) {
        *self.state.manner.lock().unwrap() = Manner::Obedient;
    }

    /// Whoever opens a Watch stream from now on finds another process.
    pub(crate) fn reborn(&self, incarnation: u64) {
        self.state.card.lock().unwrap().incarnation = Incarnation(incarnation);
    }

    /// As if its process were gone: the Watch stream breaks, and no call is answered until it is back.
    pub(crate) fn vanish(&self) {
        self.state.gone.store(true, Ordering::Relaxed);
        let watch = self.state.watch.lock().unwrap();
        let killed = Status::unavailable("killed");
        watch.as_ref().unwrap().send(Err(killed)).unwrap();
    }

    pub(crate) fn come_back(&self) {
        self.state.gone.store(false, Ordering::Relaxed);
    }

    /// How many Watch streams were opened; the last one is the one that [`Self::tell`] speaks on.
    pub(crate) fn watched(&self) -> usize {
        self.state.watched.load(Ordering::Relaxed)
    }

    /// Sends an event on the open Watch stream.
    pub(crate) fn tell(&self, sequence: u64, event: watch_event::Event) {
        let mut told = self.state.told.lock().unwrap();
        told.0 = sequence;
        if let watch_event::Event::Load(load) = &event {
            told.1 = *load;
        }
        let event = self.state.event(sequence, event);
        let watch = self.state.watch.lock().unwrap();
        watch.as_ref().unwrap().send(Ok(event)).unwrap();
    }

    /// The next call that `wanted` accepts.
    pub(crate) async fn until(&mut self, wanted: impl Fn(&Seen) -> bool) -> Seen {
        loop {
            let seen = self.seen.recv().await.unwrap();
            if wanted(&seen) {
                return seen;
            }
        }
    }
}

impl State {
    fn name(&self) -> String {
        self.card.lock().unwrap().worker.to_string()
    }

    fn answers(&self) -> Result<(), Status> {
        if self.gone.load(Ordering::Relaxed) {
            return Err(Status::unavailable("killed"));
        }
        Ok(())
    }

    fn event(&self, sequence: u64, event: watch_event::Event) -> wire::WatchEvent {
        wire::WatchEvent {
            incarnation: self.card.lock().unwrap().incarnation.0,
            sequence,
            event: Some(event),
        }
    }
}

async fn beat(
    state: Arc<State>,
    watching: mpsc::UnboundedSender<Result<wire::WatchEvent, Status>>,
) {
    let mut ticks = tokio::time::interval(std::time::Duration::from_secs(1));
    ticks.tick().await;
    loop {
        tokio::select! {
            () = watching.closed() => return,
            _ = ticks.tick() => {}
        }
        // Held while it is sent: what is told meanwhile comes after it.
        let told = state.told.lock().unwrap();
        let load = watch_event::Event::Load(told.1);
        let _ = watching.send(Ok(state.event(told.0, load)));
    }
}

struct Service(Arc<State>);

#[tonic::async_trait]
impl Worker for Service {
    type WatchStream = Events<wire::WatchEvent>;
    type PrefillStream = Events<wire::PrefillEvent>;
    type DecodeStream = Events<wire::DecodeEvent>;
    type ArtifactStream = Events<wire::ArtifactChunk>;

    async fn watch(
        &self,
        request: Request<wire::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let state = &self.0;
        state.answers()?;
        let _ = state.seen.send(Seen::Watch(request.into_inner().sequence));
        let (sender, receiver) = mpsc::unbounded_channel();
        let json = state.card.lock().unwrap().to_json().unwrap();
        for event in [
            watch_event::Event::Card(wire::Card { json }),
            watch_event::Event::SnapshotBegin(wire::SnapshotBegin {}),
            watch_event::Event::SnapshotEnd(wire::SnapshotEnd {}),
            watch_event::Event::Load(wire::Load {
                load_sequence: 1,
                ..wire::Load::default()
            }),
        ] {
            let _ = sender.send(Ok(state.event(0, event)));
        }
        *state.told.lock().unwrap() = Default::default();
        *state.watch.lock().unwrap() = Some(sender.clone());
        state.watched.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(beat(state.clone(), sender));
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(
            receiver,
        ))))
    }

    async fn prefill(
        &self,
        request: Request<wire::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        self.0.answers()?;
        let request = request.into_inner();
        let _ = self.0.seen.send(Seen::Prefill(Box::new(request.clone())));
        let (reports, events) = mpsc::channel(64);
        match &*self.0.manner.lock().unwrap() {
            Manner::Strict => {}
            Manner::Obedient => {
                tokio::spawn(obedient::prefill(request, Reports(reports)));
                return Ok(Response::new(Box::pin(ReceiverStream::new(events))));
            }
            Manner::Directed { prefills, .. } => {
                let reports = Reports(reports);
                let _ = prefills.send(OpenPrefill {
                    worker: self.0.name(),
                    request,
                    events: reports,
                });
                return Ok(Response::new(Box::pin(ReceiverStream::new(events))));
            }
        }
        let script = self.0.prefills.lock().unwrap().pop_front();
        let events = script.ok_or_else(|| Status::internal("no prefill is scripted"))?;
        let events = events
            .into_iter()
            .map(|event| Ok(wire::PrefillEvent { event: Some(event) }));
        Ok(Response::new(Box::pin(futures::stream::iter(events))))
    }

    async fn decode(
        &self,
        request: Request<Streaming<wire::DecodeRequest>>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        self.0.answers()?;
        let script = self.0.decodes.lock().unwrap().pop_front();
        let (answers, events) = mpsc::channel(64);
        let (requests, answers) = (request.into_inner(), Answers(answers));
        match (script, &*self.0.manner.lock().unwrap()) {
            (Some(script), _) => {
                tokio::spawn(script(requests, answers));
            }
            (None, Manner::Strict) => return Err(Status::internal("no decode is scripted")),
            (None, Manner::Obedient) => {
                tokio::spawn(obedient::decode(requests, answers));
            }
            (None, Manner::Directed { decodes, .. }) => {
                let _ = decodes.send(OpenDecode {
                    worker: self.0.name(),
                    requests,
                    answers,
                });
            }
        }
        Ok(Response::new(Box::pin(ReceiverStream::new(events))))
    }

    async fn cancel(
        &self,
        request: Request<wire::CancelRequest>,
    ) -> Result<Response<wire::CancelReply>, Status> {
        let request = request.into_inner();
        let _ = self.0.seen.send(if request.operation.is_empty() {
            Seen::Cancel(request.run)
        } else {
            Seen::CancelOperation(request.operation)
        });
        Ok(Response::new(wire::CancelReply::default()))
    }

    async fn artifact(
        &self,
        _: Request<wire::ArtifactRequest>,
    ) -> Result<Response<Self::ArtifactStream>, Status> {
        let _ = self.0.seen.send(Seen::Artifact);
        let data = self.0.artifact.clone().into();
        let chunks = futures::stream::iter([Ok(wire::ArtifactChunk { data })]);
        Ok(Response::new(chunks.boxed()))
    }

    async fn claim(
        &self,
        _: Request<wire::ClaimRequest>,
    ) -> Result<Response<wire::ClaimReply>, Status> {
        Err(Status::unimplemented("no router claims"))
    }

    async fn renew(
        &self,
        _: Request<wire::RenewRequest>,
    ) -> Result<Response<wire::RenewReply>, Status> {
        Err(Status::unimplemented("no router renews"))
    }

    async fn complete(
        &self,
        _: Request<wire::CompleteRequest>,
    ) -> Result<Response<wire::CompleteReply>, Status> {
        Err(Status::unimplemented("no router completes"))
    }

    async fn release(
        &self,
        _: Request<wire::ReleaseRequest>,
    ) -> Result<Response<wire::ReleaseReply>, Status> {
        Ok(Response::new(wire::ReleaseReply {}))
    }

    async fn parameters(
        &self,
        request: Request<wire::ParametersRequest>,
    ) -> Result<Response<wire::ParametersReply>, Status> {
        let asked = self.0.asked.lock().unwrap().clone();
        let asked = asked.ok_or_else(|| Status::unimplemented("of an earlier release"))?;
        let (told, answer) = oneshot::channel();
        let operation = request.into_inner().operation;
        let _ = asked.send(OpenParameters { operation, told });
        let nobody = |_| Err(Status::internal("the test does not answer"));
        answer.await.unwrap_or_else(nobody).map(Response::new)
    }

    async fn drain(
        &self,
        _: Request<wire::DrainRequest>,
    ) -> Result<Response<wire::DrainReply>, Status> {
        Err(Status::unimplemented("no router drains"))
    }
}

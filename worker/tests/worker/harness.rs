//! Workers in this process, over real gRPC and TCP, and a client that dispatches as a router does.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::hash::HashKey;
use baton_protocol::wire::worker_client::WorkerClient;
use baton_protocol::wire::{
    self, DecodeEvent, DecodeRequest, DecodeStart, Operation, PrefillEvent, PrefillRequest,
    Sampling, Stopping, Token, decode_event, decode_request, prefill_event,
};
use baton_worker::config::WorkerConfig;
use baton_worker::kv::clock::Clock;
use baton_worker::serve::{Addresses, Running, Start, start};
use baton_worker::transport::fault::Fault;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

/// Whatever is waited for in a test takes milliseconds; a test that waits this long has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn config(name: &str) -> WorkerConfig {
    serde_json::from_value(serde_json::json!({
        "name": name, "pool": name, "role": "Decode",
        "model": {"name": "tiny", "source": {"builtin": {"name": "tiny", "seed": 7}}},
        "engine": {"type": "Builtin", "maxSequences": 8},
        "kvPool": {"blocks": 256, "transports": ["Tcp"]},
    }))
    .unwrap()
}

/// Steps of a millisecond for each prompt token and two for each decode step: long enough to act within one phase.
pub(crate) fn simulated(name: &str) -> WorkerConfig {
    let mut config = config(name);
    config.engine = serde_json::from_value(serde_json::json!({
        "type": "Simulated", "maxSequences": 8, "maxBatchedTokens": 64,
        "simulated": {
            "prefillFloorMicroseconds": 1000, "prefillBaseMicroseconds": 0, "prefillPerTokenNanoseconds": 1_000_000,
            "prefillPerTokenPairPicoseconds": 0, "decodeBaseMicroseconds": 2000, "decodePerSequenceNanoseconds": 0,
            "decodePerContextTokenPicoseconds": 0, "jitterPercent": 0,
        },
    }))
    .unwrap();
    config
}

/// A worker under test.
pub(crate) struct Worker {
    pub(crate) running: Running,
    pub(crate) client: WorkerClient<Channel>,
}

#[derive(Default)]
pub(crate) struct With {
    pub(crate) fault: Option<Fault>,
    pub(crate) clock: Option<Arc<dyn Clock>>,
    pub(crate) card_change: Option<&'static str>,
    /// Id of the host that it believes to be on.
    pub(crate) host: Option<&'static str>,
    /// As in a pod: it listens on every address, and others are told this one.
    pub(crate) advertise: Option<&'static str>,
}

pub(crate) async fn worker(config: WorkerConfig) -> Worker {
    worker_with(config, With::default()).await
}

pub(crate) async fn worker_with(config: WorkerConfig, with: With) -> Worker {
    let mut addresses = Addresses::loopback();
    if let Some(host) = with.advertise {
        let any = SocketAddr::from(([0, 0, 0, 0], 0));
        addresses = Addresses {
            control: any,
            transfer: any,
            admin: any,
            advertise: Some(host.to_owned()),
        };
    }
    let mut what = Start::new(config, addresses, HashKey::from_bytes(&[1; 32]));
    what.fault = with.fault;
    what.card_change = with.card_change.map(str::to_owned);
    what.host = with.host.map(str::to_owned);
    if let Some(clock) = with.clock {
        what.clock = clock;
    }
    let running = Box::pin(start(what)).await.unwrap();
    let endpoint =
        Endpoint::from_shared(format!("http://{}", running.card().control_address)).unwrap();
    let client = WorkerClient::new(endpoint.connect_lazy());
    Worker { running, client }
}

impl Worker {
    pub(crate) fn identity(&self) -> String {
        self.running.card().kv_identity.clone()
    }

    /// Stops it and checks that no block is lost: each is free or cached.
    pub(crate) async fn end(self) {
        self.settled().await;
        let pool = self.running.pool().clone();
        self.running.stop().await;
        let counts = pool.counts();
        assert_eq!(counts.leaked, 0, "{counts:?}");
        assert_eq!(counts.free + counts.cached, counts.total, "{counts:?}");
    }

    /// Waits until nothing is held; fails when something stays.
    pub(crate) async fn settled(&self) {
        let pool = self.running.pool();
        until("no block is held", || {
            let counts = pool.counts();
            counts.active + counts.leased + counts.quarantined == 0
        })
        .await;
    }

    pub(crate) async fn cancel(&self, run: &str) -> u32 {
        self.cancel_operation(run, "").await
    }

    pub(crate) async fn cancel_operation(&self, run: &str, operation: &str) -> u32 {
        let request = wire::CancelRequest {
            run: run.to_owned(),
            operation: operation.to_owned(),
        };
        self.client
            .clone()
            .cancel(request)
            .await
            .unwrap()
            .into_inner()
            .cancelled
    }

    pub(crate) async fn prefill(&self, request: PrefillRequest) -> Streaming<PrefillEvent> {
        self.client
            .clone()
            .prefill(request)
            .await
            .unwrap()
            .into_inner()
    }

    pub(crate) async fn decode(&self, start: DecodeStart) -> Decode {
        let (to, from) = mpsc::channel(8);
        to.send(message(decode_request::Message::Start(start)))
            .await
            .unwrap();
        let events = self
            .client
            .clone()
            .decode(ReceiverStream::new(from))
            .await
            .unwrap()
            .into_inner();
        Decode { to, events }
    }

    /// All tokens of a whole request on this worker.
    pub(crate) async fn generate(&self, run: &Run) -> Vec<u32> {
        let mut decode = self.decode(run.decode(self, false)).await;
        let mut tokens = Vec::new();
        loop {
            match decode.next().await {
                decode_event::Event::Token(token) => tokens.push(token.id),
                decode_event::Event::Finished(_) => return tokens,
                decode_event::Event::Refused(refused) => panic!("{refused:?}"),
                decode_event::Event::Failed(failed) => panic!("{failed:?}"),
                _ => {}
            }
        }
    }
}

/// An open Decode stream.
pub(crate) struct Decode {
    pub(crate) to: mpsc::Sender<DecodeRequest>,
    pub(crate) events: Streaming<DecodeEvent>,
}

impl Decode {
    pub(crate) async fn next(&mut self) -> decode_event::Event {
        self.maybe().await.expect("the stream goes on")
    }

    pub(crate) async fn maybe(&mut self) -> Option<decode_event::Event> {
        let event = tokio::time::timeout(PATIENCE, self.events.message())
            .await
            .expect("an event comes")
            .unwrap()?;
        event.event
    }

    pub(crate) async fn send(&self, event: decode_request::Message) {
        self.to.send(message(event)).await.unwrap();
    }

    /// Skips to the first event that `wanted` takes.
    pub(crate) async fn until<T>(
        &mut self,
        wanted: impl Fn(&decode_event::Event) -> Option<T>,
    ) -> T {
        loop {
            let event = self.next().await;
            if let Some(found) = wanted(&event) {
                return found;
            }
        }
    }
}

pub(crate) fn message(message: decode_request::Message) -> DecodeRequest {
    DecodeRequest {
        message: Some(message),
    }
}

pub(crate) async fn next_prefill(
    events: &mut Streaming<PrefillEvent>,
) -> Option<prefill_event::Event> {
    let event = tokio::time::timeout(PATIENCE, events.message())
        .await
        .expect("an event comes")
        .unwrap()?;
    event.event
}

/// One client request.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) name: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) sampling: Sampling,
    pub(crate) stopping: Stopping,
}

impl Run {
    /// Greedy, as many tokens as asked for whatever they are.
    pub(crate) fn new(name: &str, prompt: usize, max_tokens: u32) -> Self {
        Self {
            name: name.to_owned(),
            tokens: prompt_tokens(name, prompt),
            sampling: Sampling {
                top_p: 1.0,
                ..Sampling::default()
            },
            stopping: Stopping {
                max_tokens,
                ignore_eos: true,
                ..Stopping::default()
            },
        }
    }

    pub(crate) fn seeded(mut self, seed: u64) -> Self {
        self.sampling.temperature = 1.0;
        self.sampling.seed = seed;
        self
    }

    pub(crate) fn named(&self, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            ..self.clone()
        }
    }

    pub(crate) fn operation(&self, worker: &Worker, step: &str) -> Operation {
        Operation {
            run: self.name.clone(),
            attempt: 1,
            id: format!("{}/1/{step}", self.name),
            deadline_milliseconds: 30_000,
            kv_identity: worker.identity(),
            ..Operation::default()
        }
    }

    pub(crate) fn decode(&self, worker: &Worker, handoff: bool) -> DecodeStart {
        DecodeStart {
            operation: Some(self.operation(worker, "decode")),
            tokens: self.tokens.clone(),
            sampling: Some(self.sampling),
            stopping: Some(self.stopping.clone()),
            handoff,
            first_token_by_prefill: handoff,
            ..DecodeStart::default()
        }
    }

    pub(crate) fn prefill(&self, worker: &Worker) -> PrefillRequest {
        PrefillRequest {
            operation: Some(self.operation(worker, "prefill")),
            tokens: self.tokens.clone(),
            sampling: Some(self.sampling),
            stopping: Some(self.stopping.clone()),
            sample_first: true,
            ..PrefillRequest::default()
        }
    }
}

/// Another prompt for each name, the same for the same.
pub(crate) fn prompt_tokens(name: &str, count: usize) -> Vec<u32> {
    let mut state = name.bytes().fold(17_u64, |state, byte| {
        state.wrapping_mul(31) + u64::from(byte)
    });
    (0..count)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32 % 250
        })
        .collect()
}

/// What came of a remote run.
#[derive(Debug, Default)]
pub(crate) struct Remote {
    pub(crate) tokens: Vec<u32>,
    pub(crate) transferred: Option<wire::TransferCompleted>,
    pub(crate) failed: Option<wire::TransferFailed>,
    /// Events of the decode side, by kind, tokens left out.
    pub(crate) decode_events: Vec<&'static str>,
    pub(crate) prefill_events: Vec<&'static str>,
}

/// Drives a remote run as a router does: reserve, prefill, descriptor, first token; `recompute` after a failed hand-off.
pub(crate) async fn remote(prefill: &Worker, decode: &Worker, run: &Run) -> Remote {
    remote_with(prefill, decode, run, true).await
}

pub(crate) async fn remote_with(
    prefill: &Worker,
    decode: &Worker,
    run: &Run,
    first_by_prefill: bool,
) -> Remote {
    remote_by(prefill, decode, run, first_by_prefill, |_| {}).await
}

/// The same, with the descriptor changed on its way.
pub(crate) async fn remote_by(
    prefill: &Worker,
    decode: &Worker,
    run: &Run,
    first_by_prefill: bool,
    change: impl Fn(&mut wire::Descriptor),
) -> Remote {
    let mut came = Remote::default();
    let mut start = run.decode(decode, true);
    start.first_token_by_prefill = first_by_prefill;
    let mut stream = decode.decode(start).await;
    let reserved = match stream.next().await {
        decode_event::Event::Reserved(reserved) => reserved,
        other => panic!("{other:?}"),
    };
    let mut request = run.prefill(prefill);
    request.sample_first = first_by_prefill;
    request.skip_blocks = reserved.cached_tokens / 16;
    let mut source = prefill.prefill(request).await;
    let mut source_open = true;
    loop {
        tokio::select! {
            event = next_prefill(&mut source), if source_open => match event {
                None => source_open = false,
                Some(event) => {
                    came.prefill_events.push(prefill_kind(&event));
                    match event {
                        prefill_event::Event::Lease(lease) => {
                            let mut descriptor = lease.descriptor.expect("more than one token");
                            change(&mut descriptor);
                            stream.send(decode_request::Message::Descriptor(descriptor)).await;
                        }
                        prefill_event::Event::FirstToken(token) => {
                            came.tokens.push(token.id);
                            stream.send(decode_request::Message::FirstToken(token)).await;
                        }
                        prefill_event::Event::Refused(refused) => panic!("{refused:?}"),
                        prefill_event::Event::Failed(failed) => panic!("{failed:?}"),
                        _ => {}
                    }
                }
            },
            event = stream.next() => {
                if !matches!(event, decode_event::Event::Token(_)) {
                    came.decode_events.push(decode_kind(&event));
                }
                match event {
                    decode_event::Event::Token(Token { id, position, .. }) => {
                        assert_eq!(position as usize, run.tokens.len() + came.tokens.len());
                        came.tokens.push(id);
                    }
                    decode_event::Event::TransferCompleted(done) => came.transferred = Some(done),
                    decode_event::Event::TransferFailed(failed) => {
                        came.failed = Some(failed);
                        // The first token may be on its way still: it is sent before.
                        while let Some(event) = next_prefill(&mut source).await {
                            if let prefill_event::Event::FirstToken(token) = event {
                                came.tokens.push(token.id);
                                stream.send(decode_request::Message::FirstToken(token)).await;
                            }
                        }
                        source_open = false;
                        stream.send(decode_request::Message::Recompute(wire::RecomputeLocally::default())).await;
                    }
                    decode_event::Event::Finished(_) => return came,
                    decode_event::Event::Failed(failed) => panic!("{failed:?}"),
                    _ => {}
                }
            }
        }
    }
}

fn prefill_kind(event: &prefill_event::Event) -> &'static str {
    match event {
        prefill_event::Event::Refused(_) => "refused",
        prefill_event::Event::Lease(_) => "lease",
        prefill_event::Event::Published(_) => "published",
        prefill_event::Event::FirstToken(_) => "first_token",
        prefill_event::Event::Sealed(_) => "sealed",
        prefill_event::Event::Failed(_) => "failed",
        prefill_event::Event::Started(_) => "started",
    }
}

fn decode_kind(event: &decode_event::Event) -> &'static str {
    match event {
        decode_event::Event::Refused(_) => "refused",
        decode_event::Event::Reserved(_) => "reserved",
        decode_event::Event::TransferStarted(_) => "transfer_started",
        decode_event::Event::TransferCompleted(_) => "transfer_completed",
        decode_event::Event::TransferFailed(_) => "transfer_failed",
        decode_event::Event::DecodeStarted(_) => "decode_started",
        decode_event::Event::Token(_) => "token",
        decode_event::Event::Finished(_) => "finished",
        decode_event::Event::Failed(_) => "failed",
        decode_event::Event::PrefillStarted(_) => "prefill_started",
        decode_event::Event::PrefillCompleted(_) => "prefill_completed",
    }
}

/// Waits for a condition, asking again and again; a condition that does not come fails the test.
pub(crate) async fn until(what: &str, condition: impl Fn() -> bool) {
    let asking = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(
        tokio::time::timeout(PATIENCE, asking).await.is_ok(),
        "{what}: not after {PATIENCE:?}"
    );
}

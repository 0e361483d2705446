//! The same worker asked without a router: gRPC, tokens in, tokens out.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use baton_e2e::fleet::Fleet;
use baton_protocol::wire::worker_client::WorkerClient;
use baton_protocol::wire::{self, decode_event::Event, decode_request::Message};
use tonic::transport::{Channel, Endpoint};

pub(crate) struct Direct {
    client: WorkerClient<Channel>,
    kv_identity: String,
    calls: std::sync::atomic::AtomicU64,
}

impl Direct {
    pub(crate) async fn connect(address: &str, fleet: &Fleet) -> Result<Self> {
        let workers = fleet.workers(Some("decode")).await?;
        let kv_identity = workers[0]["kvIdentity"].as_str().context("kvIdentity")?;
        let channel = Endpoint::from_shared(format!("http://{address}"))?
            .tcp_nodelay(true)
            .connect()
            .await?;
        Ok(Self {
            client: WorkerClient::new(channel),
            kv_identity: kv_identity.to_owned(),
            calls: std::sync::atomic::AtomicU64::new(0),
        })
    }

    /// From the call to the first token; the rest is read to its end. A byte is a token of the simulated worker's vocabulary.
    pub(crate) async fn first_token(&self, prompt: &str, tokens: u32) -> Result<Duration> {
        let call = self
            .calls
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let run = format!("direct-{call}");
        let start = wire::DecodeStart {
            operation: Some(wire::Operation {
                id: format!("{run}/1/decode"),
                run,
                attempt: 1,
                kv_identity: self.kv_identity.clone(),
                deadline_milliseconds: 60_000,
                // Not the prefix that the router's request is to compute.
                cache_salt: "direct".to_owned(),
                ..wire::Operation::default()
            }),
            tokens: prompt.bytes().map(u32::from).collect(),
            sampling: Some(wire::Sampling {
                top_p: 1.0,
                ..wire::Sampling::default()
            }),
            stopping: Some(wire::Stopping {
                max_tokens: tokens,
                ignore_eos: true,
                ..wire::Stopping::default()
            }),
            ..wire::DecodeStart::default()
        };
        let start = wire::DecodeRequest {
            message: Some(Message::Start(start)),
        };
        let mut client = self.client.clone();
        let began = Instant::now();
        let mut events = client
            .decode(tokio_stream::iter([start]))
            .await?
            .into_inner();
        let mut first = None;
        let mut count = 0;
        while let Some(event) = events.message().await? {
            match event.event {
                Some(Event::Token(_)) => {
                    first.get_or_insert_with(|| began.elapsed());
                    count += 1;
                }
                Some(Event::Refused(refused)) => bail!("refused: {refused:?}"),
                Some(Event::Failed(failed)) => bail!("failed: {failed:?}"),
                _ => {}
            }
        }
        ensure!(count == tokens, "{count} tokens");
        first.context("no token")
    }
}

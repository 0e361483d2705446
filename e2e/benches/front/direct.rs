//! The same worker asked without a router: gRPC, tokens in, tokens out.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use baton_protocol::wire::worker_client::WorkerClient;
use baton_protocol::wire::{self, decode_event::Event, decode_request::Message};
use baton_text::model::ModelText;
use baton_worker::model::{Model as _, builtin};
use tonic::transport::{Channel, Endpoint};

use crate::stage::Stage;

/// How a prompt becomes tokens.
pub(crate) enum Text {
    /// A byte is a token.
    Bytes,
    Of(Box<ModelText>),
}

impl Text {
    /// That of a GGUF file, else bytes.
    pub(crate) fn of(model: Option<&Path>) -> Result<Self> {
        let Some(path) = model else {
            return Ok(Self::Bytes);
        };
        let model = builtin::load(path)?;
        let facts = model.facts();
        let model = ModelText::compile(&facts.tokenizer, &facts.chat_template)?;
        Ok(Self::Of(Box::new(model)))
    }

    pub(crate) fn tokens(&self, prompt: &str) -> Result<Vec<u32>> {
        match self {
            Self::Bytes => Ok(prompt.bytes().map(u32::from).collect()),
            Self::Of(model) => Ok(model.encode(prompt, true, "")?),
        }
    }
}

pub(crate) struct Direct {
    client: WorkerClient<Channel>,
    kv_identity: String,
    text: Text,
    calls: std::sync::atomic::AtomicU64,
}

impl Direct {
    pub(crate) async fn connect(stage: &Stage, text: Text) -> Result<Self> {
        let channel = Endpoint::from_shared(format!("http://{}", stage.control))?
            .tcp_nodelay(true)
            .connect()
            .await?;
        Ok(Self {
            client: WorkerClient::new(channel),
            kv_identity: stage.kv_identity.clone(),
            text,
            calls: std::sync::atomic::AtomicU64::new(0),
        })
    }

    /// How many tokens a prompt has.
    pub(crate) fn length(&self, prompt: &str) -> Result<usize> {
        Ok(self.text.tokens(prompt)?.len())
    }

    /// From the call to the first token; the rest is read to its end.
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
            tokens: self.text.tokens(prompt)?,
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

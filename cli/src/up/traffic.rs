//! Requests to the router that is up, and what became of them.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, bail};
use baton_placement::record::DecisionRecord;
use serde_json::{Value, json};

use crate::client::{Client, Events};
use crate::records::{Awaited, Records};

/// A record is written when its run has ended.
const RECORD_WAIT: Duration = Duration::from_secs(10);

/// Sends to one router.
#[derive(Debug)]
pub(crate) struct Traffic {
    api: Client,
    admin: Client,
    records: Records,
}

/// One request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask<'a> {
    pub(crate) model: &'a str,
    pub(crate) prompt: &'a str,
    pub(crate) mode: Option<&'a str>,
    /// Requests of different salts share no cached prefix.
    pub(crate) salt: &'a str,
    pub(crate) max_tokens: u32,
}

/// What came back.
#[derive(Debug)]
pub(crate) struct Answered {
    pub(crate) text: String,
    /// The tokens as text, one each.
    pub(crate) tokens: Vec<String>,
    pub(crate) record: DecisionRecord,
}

impl Traffic {
    pub(crate) fn new(listen: SocketAddr, admin: Client) -> anyhow::Result<Self> {
        Ok(Self {
            api: Client::new(&listen.to_string())?,
            records: Records::Router(Box::new(admin.clone())),
            admin,
        })
    }

    /// Sends greedily and waits for the end and for the record.
    pub(crate) async fn ask(&self, ask: Ask<'_>) -> anyhow::Result<Answered> {
        let mut body = body(ask);
        body["logprobs"] = true.into();
        let answer = self
            .api
            .post("/v1/chat/completions", &headers(ask), &body)
            .await?;
        if !answer.status.is_success() {
            bail!(
                "the router refuses a request for {}: {}",
                ask.model,
                answer.complaint()
            );
        }
        let run = answer.run().context("the router gave no run id")?;
        let choice = &answer.body["choices"][0];
        let tokens = choice["logprobs"]["content"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|token| token["token"].as_str().unwrap_or_default().to_owned())
            .collect();
        let text = choice["message"]["content"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let mut awaited = Awaited::from_now(&self.records);
        let record = awaited.record(&run, RECORD_WAIT).await?;
        Ok(Answered {
            text,
            tokens,
            record,
        })
    }

    /// Starts a request that generates until its answer is dropped or full, and waits for its first token.
    pub(crate) async fn generate(&self, ask: Ask<'_>) -> anyhow::Result<Generating> {
        let mut body = body(ask);
        body["stream"] = true.into();
        body["ignore_eos"] = true.into();
        let mut events = match self
            .api
            .stream("/v1/chat/completions", &headers(ask), &body)
            .await?
        {
            Ok(events) => events,
            Err(answer) => bail!(
                "the router refuses a request for {}: {}",
                ask.model,
                answer.complaint()
            ),
        };
        events
            .next()
            .await?
            .context("a stream ended before its first token")?;
        Ok(Generating { events })
    }

    /// The fleet as the router sees it.
    pub(crate) async fn fleet(&self) -> anyhow::Result<Value> {
        self.admin.get_good("/v1/fleet").await
    }
}

/// A request that generates. Dropped, it is cancelled.
#[derive(Debug)]
pub(crate) struct Generating {
    events: Events,
}

impl Generating {
    /// Takes what comes until nothing does.
    pub(crate) async fn drain(mut self) -> anyhow::Result<()> {
        while self.events.next().await?.is_some() {}
        Ok(())
    }
}

fn body(ask: Ask<'_>) -> Value {
    json!({
        "model": ask.model,
        "messages": [{"role": "user", "content": ask.prompt}],
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "cache_salt": ask.salt,
    })
}

fn headers(ask: Ask<'_>) -> Vec<(&'static str, &str)> {
    ask.mode
        .map(|mode| ("x-baton-mode", mode))
        .into_iter()
        .collect()
}

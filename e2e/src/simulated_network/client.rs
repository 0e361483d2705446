//! What a client sees of one request in the simulated network.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::plan::{RequestPlan, TOTAL};
use super::sockets::SimulatedNetwork;
use super::{ROUTER, ports};

/// A run is over by then, whatever happens: its own longest time, and what it takes to say so.
const STUCK: Duration = Duration::from_millis(TOTAL + 3_000);
/// For an admin interface that nothing is wrong with.
const ADMIN: Duration = Duration::from_secs(5);

/// What must be the same whatever way an answer went.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    pub text: String,
    pub finish: String,
    pub prompt_tokens: u64,
    pub output_tokens: u64,
}

/// How it came to an end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    Complete(Answer),
    /// An error instead of an answer.
    Refused {
        status: u16,
        error: String,
    },
    /// An error event within a stream.
    Failed {
        text: String,
        error: String,
    },
    /// The connection broke, or could not be made.
    Broken {
        text: String,
        why: String,
    },
    /// The client left.
    Left {
        text: String,
    },
    /// Nothing came to an end.
    Stuck {
        text: String,
    },
}

/// One request and what came of it. Times in simulated time.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Index in the plan.
    pub request: usize,
    pub asks: usize,
    pub run: Option<String>,
    pub began: Instant,
    pub ended_at: Instant,
    pub ended: Ended,
}

impl Outcome {
    /// Text that the client has.
    pub fn text(&self) -> &str {
        match &self.ended {
            Ended::Complete(answer) => &answer.text,
            Ended::Failed { text, .. }
            | Ended::Broken { text, .. }
            | Ended::Left { text }
            | Ended::Stuck { text } => text,
            Ended::Refused { .. } => "",
        }
    }
}

/// What has come so far; it outlives the future that fills it.
#[derive(Debug, Default)]
struct Heard {
    run: Option<String>,
    text: String,
    answer: Answer,
}

/// Asks, and stays until the end or until it leaves as planned.
pub async fn ask(
    network: &SimulatedNetwork,
    request: usize,
    plan: &RequestPlan,
    body: &Value,
) -> Outcome {
    let mut body = body.clone();
    if !plan.stream {
        body["stream"] = json!(false);
        body["stream_options"] = Value::Null;
    }
    let began = Instant::now();
    let mut heard = Heard::default();
    let patience = plan.leaves_after.map_or(STUCK, Duration::from_millis);
    let ended = match timeout(patience, exchange(network, plan, &body, &mut heard)).await {
        Ok(Ok(ended)) => ended,
        Ok(Err(error)) => Ended::Broken {
            text: heard.text.clone(),
            why: format!("{error:#}"),
        },
        Err(_) if plan.leaves_after.is_some() => Ended::Left {
            text: heard.text.clone(),
        },
        Err(_) => Ended::Stuck {
            text: heard.text.clone(),
        },
    };
    Outcome {
        request,
        asks: plan.asks,
        run: heard.run,
        began,
        ended_at: Instant::now(),
        ended,
    }
}

async fn exchange(
    network: &SimulatedNetwork,
    plan: &RequestPlan,
    body: &Value,
    heard: &mut Heard,
) -> Result<Ended> {
    let mut request = http::Request::post("/v1/completions")
        .header("host", ROUTER)
        .header("content-type", "application/json");
    if let Some(mode) = plan.mode {
        request = request.header("x-baton-mode", mode);
    }
    let request = request.body(Full::new(Bytes::from(body.to_string())))?;
    let mut open = send(network, ROUTER, ports::API, request).await?;
    heard.run = open.header("x-baton-run");
    if !plan.stream || open.status != 200 {
        let whole = open.whole().await?;
        return heard.whole(open.status, &whole);
    }
    let mut pending = Vec::new();
    while let Some(data) = open.more().await? {
        pending.extend_from_slice(&data);
        while let Some(end) = pending.windows(2).position(|two| two == b"\n\n") {
            let block: Vec<u8> = pending.drain(..end + 2).collect();
            if let Some(ended) = heard.event(&String::from_utf8(block)?)? {
                return Ok(ended);
            }
        }
    }
    bail!("the stream ends without [DONE] and without an error")
}

impl Heard {
    fn whole(&mut self, status: u16, body: &[u8]) -> Result<Ended> {
        let body: Value = serde_json::from_slice(body).context("the body is no JSON")?;
        if status != 200 {
            let error = &body["error"];
            ensure!(
                error["message"].is_string() && error["type"].is_string(),
                "no error of OpenAI's form: {body}"
            );
            return Ok(Ended::Refused {
                status,
                error: error.to_string(),
            });
        }
        self.take(&body);
        self.text = self.answer.text.clone();
        Ok(Ended::Complete(self.answer.clone()))
    }

    fn event(&mut self, block: &str) -> Result<Option<Ended>> {
        let Some((_, data)) = block.split_once("data: ") else {
            return Ok(None);
        };
        let data = data.trim_end();
        if data == "[DONE]" {
            ensure!(!self.answer.finish.is_empty(), "no finish_reason came");
            return Ok(Some(Ended::Complete(self.answer.clone())));
        }
        let chunk: Value = serde_json::from_str(data)?;
        if block.starts_with("event: error") || chunk.get("error").is_some() {
            return Ok(Some(Ended::Failed {
                text: self.text.clone(),
                error: chunk.to_string(),
            }));
        }
        self.take(&chunk);
        self.text = self.answer.text.clone();
        Ok(None)
    }

    fn take(&mut self, chunk: &Value) {
        let choice = &chunk["choices"][0];
        self.answer.text += choice["text"].as_str().unwrap_or_default();
        if let Some(finish) = choice["finish_reason"].as_str() {
            finish.clone_into(&mut self.answer.finish);
        }
        let usage = &chunk["usage"];
        if let (Some(prompt), Some(output)) = (
            usage["prompt_tokens"].as_u64(),
            usage["completion_tokens"].as_u64(),
        ) {
            self.answer.prompt_tokens = prompt;
            self.answer.output_tokens = output;
        }
    }
}

/// An answer that is coming. Dropping it hangs up.
struct Open {
    status: u16,
    headers: http::HeaderMap,
    body: Incoming,
    _connection: AbortOnDropHandle<()>,
}

impl Open {
    fn header(&self, name: &str) -> Option<String> {
        let value = self.headers.get(name)?.to_str().ok()?;
        Some(value.to_owned())
    }

    async fn more(&mut self) -> Result<Option<Bytes>> {
        while let Some(frame) = self.body.frame().await {
            if let Ok(data) = frame?.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    async fn whole(&mut self) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        while let Some(data) = self.more().await? {
            all.extend_from_slice(&data);
        }
        Ok(all)
    }
}

async fn send(
    network: &SimulatedNetwork,
    host: &str,
    port: u16,
    request: http::Request<Full<Bytes>>,
) -> Result<Open> {
    let socket = network.open(&format!("{host}:{port}")).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await?;
    let connection = AbortOnDropHandle::new(tokio::spawn(async move {
        // An error of the connection shows as one of the body.
        let _ = connection.await;
    }));
    let (parts, body) = sender.send_request(request).await?.into_parts();
    Ok(Open {
        status: parts.status.as_u16(),
        headers: parts.headers,
        body,
        _connection: connection,
    })
}

/// The body of an admin page.
///
/// # Errors
/// It cannot be had in time, or its status is another than 200.
pub async fn get(network: &SimulatedNetwork, host: &str, port: u16, path: &str) -> Result<String> {
    let request = http::Request::get(path)
        .header("host", host)
        .body(Full::default())?;
    let answer = async {
        let mut open = send(network, host, port, request).await?;
        let whole = open.whole().await?;
        ensure!(open.status == 200, "status {}", open.status);
        Ok(String::from_utf8(whole)?)
    };
    timeout(ADMIN, answer)
        .await
        .map_err(|_| anyhow::anyhow!("no answer in {ADMIN:?}"))
        .and_then(|answer| answer)
        .with_context(|| format!("GET {path} of {host}"))
}

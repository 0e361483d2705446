//! The program `vllm-stand-in`: in a pod in the place of `vllm serve`, with its command line and its environment.
//!
//! It answers what Baton's daemon and routers ask of vLLM, and completions: ` 0 1 2 …`, a token at a time at the pace that it is told.
//! NIXL's part is played as far as the network goes: an answer names this server's side channel, and whoever is to read asks there first.
//! SIGTERM ends it at once, with whatever it answers: a pod that is ended before its drain breaks its streams.
//!
//! What tests ask it for, of no vLLM, is beneath `/stand-in/`: `told` (what it was started with, and what it was asked for), `hurry` (no
//! pauses from now on), `exit` (ends the process; the next one of the pod answers 503 like a server that loads) and `serve` (which ends
//! that).

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::{self, LocalBoxStream};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

use super::answers::{self, Measured};
use super::events::Events;
use super::handshake::{self, Handshakes, Teller};
use super::serving;
use super::started::Started;
use super::text::Text;
use crate::told;

type Body = answers::Body<StreamBody<LocalBoxStream<'static, Result<Frame<Bytes>, Infallible>>>>;

/// What it says that it is: no release of vLLM.
pub const VERSION: &str = "0.32.0+stand-in";
const BLOCKS: u32 = 10_000;
/// Exit status after `/stand-in/exit`.
pub const EXIT: u8 = 3;
/// There while the next process is to answer 503. The shared memory of a pod outlives its containers' processes.
const HELD: &str = "/dev/shm/stand-in-held";
/// For the answer of `/stand-in/exit` to leave.
const LEAVING: Duration = Duration::from_millis(200);

/// The text of so many tokens.
pub fn counted(tokens: u32) -> String {
    (0..tokens).map(|token| format!(" {token}")).collect()
}

/// What matters of a request.
#[derive(Debug, Deserialize)]
struct Asked {
    #[serde(default)]
    prompt: Value,
    #[serde(default)]
    stream: bool,
    max_tokens: Option<u32>,
    kv_transfer_params: Option<Remote>,
    stream_options: Option<StreamOptions>,
}

#[derive(Debug, Deserialize)]
struct Remote {
    #[serde(default)]
    do_remote_decode: bool,
    remote_engine_id: Option<String>,
    remote_host: Option<String>,
    remote_port: Option<u16>,
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

/// Requests of this process.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    running: u32,
    taken: u64,
    /// Answered with `kv_transfer_params`.
    prefills: u64,
    /// With those of another server, which was there.
    pulls: u64,
}

struct Server {
    started: Started,
    text: Text,
    engine_id: String,
    /// Of the process.
    since: f64,
    events: Option<Events>,
    _handshakes: Option<Handshakes>,
    counts: RefCell<Counts>,
    hurries: CancellationToken,
    ends: CancellationToken,
}

/// Serves until it is told to end.
///
/// # Errors
/// It cannot start.
pub fn run() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let started = Started::of(&arguments, &std::env::vars().collect())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    LocalSet::new().block_on(&runtime, serve(started))
}

async fn serve(started: Started) -> Result<ExitCode> {
    // Process 1 of a container: without somebody who listens the signal is nobody's.
    let mut terminated = signal(SignalKind::terminate())?;
    let text = Text::read(&started.model)
        .with_context(|| format!("the model in {}", started.model.display()))?;
    let since = answers::seconds_since_epoch();
    let engine_id = format!("stand-in-{:016x}", since.to_bits());
    let events = match &started.events {
        Some((endpoint, replay)) => Some(Events::open(endpoint, replay, Vec::new()).await?),
        None => None,
    };
    let handshakes = match &started.side_channel {
        Some((host, port)) => {
            let teller = Teller {
                engine_id: &engine_id,
                block_size: started.block_size,
                blocks: BLOCKS,
            };
            Some(Handshakes::open(&format!("{host}:{port}"), teller).await?)
        }
        None => None,
    };
    let listener = TcpListener::bind(&started.listen).await?;
    told(&format!(
        "vllm-stand-in serves {} on {}: it computes nothing",
        started.name, started.listen
    ));
    let server = Rc::new(Server {
        started,
        text,
        engine_id,
        since,
        events,
        _handshakes: handshakes,
        counts: RefCell::default(),
        hurries: CancellationToken::new(),
        ends: CancellationToken::new(),
    });
    let ends = server.ends.clone();
    let asked = server.clone();
    let serving = serving::serve(listener, move |request| {
        let server = asked.clone();
        async move { server.answer(request).await }
    });
    let told_to_exit = async {
        ends.cancelled().await;
        tokio::time::sleep(LEAVING).await;
    };
    let status = tokio::select! {
        () = serving => ExitCode::SUCCESS,
        _ = terminated.recv() => ExitCode::SUCCESS,
        () = told_to_exit => ExitCode::from(EXIT),
    };
    let running = server.counts.borrow().running;
    told(&format!(
        "vllm-stand-in ends; requests under way: {running}"
    ));
    Ok(status)
}

impl Server {
    async fn answer(self: Rc<Self>, request: Request<Incoming>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        if let Some(order) = path.strip_prefix("/stand-in/") {
            return match self.ordered(order) {
                Ok(said) => answers::json(&said),
                Err(error) => {
                    answers::failed(StatusCode::INTERNAL_SERVER_ERROR, &format!("{error:#}"))
                }
            };
        }
        if Path::new(HELD).exists() {
            return answers::failed(StatusCode::SERVICE_UNAVAILABLE, "it loads");
        }
        if parts.method == Method::GET {
            return self.get(path);
        }
        let Ok(body) = body.collect().await.map(|body| body.to_bytes()) else {
            return answers::failed(StatusCode::BAD_REQUEST, "the body broke off");
        };
        match path {
            "/v1/completions" => self.complete(&body).await,
            "/tokenize" => match self.text.tokenize(&body) {
                Ok(tokens) => answers::json(&answers::tokenized(&tokens, self.started.max_length)),
                Err(error) => answers::failed(StatusCode::BAD_REQUEST, &error.to_string()),
            },
            _ => answers::failed(StatusCode::NOT_FOUND, "Not Found"),
        }
    }

    fn get(&self, path: &str) -> Response<Body> {
        let started = &self.started;
        let counts = *self.counts.borrow();
        match path {
            "/health" => answers::empty(),
            "/version" => answers::json(&json!({"version": VERSION})),
            "/v1/models" => answers::json(&answers::models(&started.name, started.max_length)),
            "/kv_event_sources" => answers::json(&answers::event_sources(self.events.as_ref())),
            "/metrics" => answers::text(answers::metrics(&Measured {
                model: &started.name,
                started: self.since,
                running: counts.running,
                answered: counts.taken - u64::from(counts.running),
                block_size: started.block_size,
                blocks: BLOCKS,
            })),
            _ => answers::failed(StatusCode::NOT_FOUND, "Not Found"),
        }
    }

    /// What only tests ask for. A GET, which is all that the way through an API server's proxy takes without a body.
    fn ordered(&self, order: &str) -> Result<Value> {
        match order {
            "told" => {
                let environment: BTreeMap<String, String> = std::env::vars().collect();
                let counts = *self.counts.borrow();
                return Ok(json!({
                    "arguments": std::env::args().skip(1).collect::<Vec<_>>(),
                    "environment": environment,
                    "user": rustix::process::getuid().as_raw(),
                    "running": counts.running,
                    "taken": counts.taken,
                    "prefills": counts.prefills,
                    "pulls": counts.pulls,
                }));
            }
            "hurry" => self.hurries.cancel(),
            "exit" => {
                std::fs::write(HELD, "").context(HELD)?;
                self.ends.cancel();
            }
            // Asked again where the first answer was lost.
            "serve" => match std::fs::remove_file(HELD) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(error).context(HELD);
                }
                _ => {}
            },
            _ => anyhow::bail!("{order}: must be told, hurry, exit or serve"),
        }
        Ok(json!({"done": order}))
    }

    async fn complete(self: Rc<Self>, body: &Bytes) -> Response<Body> {
        let asked: Asked = match serde_json::from_slice(body) {
            Ok(asked) => asked,
            Err(error) => return answers::failed(StatusCode::BAD_REQUEST, &error.to_string()),
        };
        let prompt = match &asked.prompt {
            Value::Array(ids) => Ok(ids.len()),
            _ => self.text.tokenize(body).map(|tokens| tokens.len()),
        };
        let prompt = match prompt {
            Ok(prompt) => prompt,
            Err(error) => return answers::failed(StatusCode::BAD_REQUEST, &error.to_string()),
        };
        let answer = Answer::begin(self.clone(), prompt, &asked);
        let remote = asked.kv_transfer_params.as_ref();
        if let Some(remote) = remote.filter(|remote| remote.remote_engine_id.is_some()) {
            if let Err(error) = remote.is_there().await {
                return answers::failed(StatusCode::INTERNAL_SERVER_ERROR, &format!("{error:#}"));
            }
            self.counts.borrow_mut().pulls += 1;
        }
        if asked.stream {
            return answers::events(StreamBody::new(
                stream::unfold(answer, Answer::next).boxed_local(),
            ));
        }
        for _ in 0..answer.tokens {
            self.pause().await;
        }
        let hands_over = remote.is_some_and(|remote| remote.do_remote_decode);
        let mut said = answer.whole();
        if let Some((host, port)) = self.started.side_channel.as_ref().filter(|_| hands_over) {
            self.counts.borrow_mut().prefills += 1;
            let parameters = answers::handed_over(&self.engine_id, (host, *port), body.len());
            said["kv_transfer_params"] = parameters;
        }
        answers::json(&said)
    }

    /// Between two tokens.
    async fn pause(&self) {
        tokio::select! {
            () = self.hurries.cancelled() => {}
            () = tokio::time::sleep(self.started.pace) => {}
        }
    }
}

impl Remote {
    /// Whether the server that computed the prompt still answers where it said.
    async fn is_there(&self) -> Result<()> {
        let id = self.remote_engine_id.as_deref().unwrap_or_default();
        let host = self.remote_host.as_deref().context("no remote_host")?;
        let port = self.remote_port.context("no remote_port")?;
        handshake::is_there(&format!("{host}:{port}"), id).await
    }
}

/// One request under way: until it is dropped, by its end or by a client that leaves.
struct Answer {
    server: Rc<Server>,
    prompt: usize,
    tokens: u32,
    usage: bool,
    /// Of the next event.
    place: u32,
}

impl Answer {
    fn begin(server: Rc<Server>, prompt: usize, asked: &Asked) -> Self {
        let mut counts = server.counts.borrow_mut();
        counts.running += 1;
        counts.taken += 1;
        drop(counts);
        let options = asked.stream_options.as_ref();
        Self {
            server,
            prompt,
            tokens: asked.max_tokens.unwrap_or(16).max(1),
            usage: options.is_some_and(|options| options.include_usage),
            place: 0,
        }
    }

    fn usage(&self) -> Value {
        let (prompt, tokens) = (self.prompt, self.tokens);
        json!({"prompt_tokens": prompt, "total_tokens": prompt + tokens as usize, "completion_tokens": tokens})
    }

    fn object(&self, choices: &Value, usage: &Value) -> Value {
        json!({
            "id": "cmpl-8f14e45fceea167a", "object": "text_completion", "created": 1_795_959_233, "model": self.server.started.name,
            "choices": choices, "usage": usage,
        })
    }

    fn whole(&self) -> Value {
        let choice = json!({
            "index": 0, "text": counted(self.tokens), "logprobs": null, "finish_reason": "length", "stop_reason": null,
        });
        self.object(&json!([choice]), &self.usage())
    }

    /// The next event of the stream, and what comes after it.
    async fn next(mut self) -> Option<(Result<Frame<Bytes>, Infallible>, Self)> {
        let place = self.place;
        self.place += 1;
        let data = if place < self.tokens {
            self.server.pause().await;
            let last = place + 1 == self.tokens;
            let choice = json!({
                "index": 0, "text": format!(" {place}"), "logprobs": null,
                "finish_reason": last.then_some("length"), "stop_reason": null,
            });
            self.object(&json!([choice]), &Value::Null).to_string()
        } else if place == self.tokens && self.usage {
            self.object(&json!([]), &self.usage()).to_string()
        } else if place == self.tokens + u32::from(self.usage) {
            "[DONE]".to_owned()
        } else {
            return None;
        };
        let event = Bytes::from(format!("data: {data}\n\n"));
        Some((Ok(Frame::data(event)), self))
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.server.counts.borrow_mut().running -= 1;
    }
}

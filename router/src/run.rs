//! The seam between the HTTP front and dispatch: one tokenised request goes in, tokens come out.
//!
//! The front owns text (OpenAI's types, templates, tokenising, stop strings); dispatch owns workers (placement, attempts, hand-offs,
//! records). Neither knows the other's insides. Dropping a [`RunHandle`] before its end means that the client is gone: the run is
//! cancelled on every worker that it touched.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use baton_placement::record::Credit;
use baton_protocol::failure::FailureClass;
use baton_protocol::ids::RunId;
use baton_protocol::wire;
use baton_telemetry::context::TraceContext;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::forward::Forward;
use crate::policy::PolicyHandle;

/// Events that wait for a slow client: at 100 tokens a second, 2.5 s of output. When it is full the run stops reading from its
/// worker, and the worker is held back by its stream.
pub const EVENTS_IN_FLIGHT: usize = 256;

/// Pieces of an engine's answer that wait for a slow client, of [`PIECE`] bytes at most: as much memory as tokens take.
pub const PIECES_IN_FLIGHT: usize = 16;

/// Bytes of a piece of an engine's answer.
pub const PIECE: usize = 16 << 10;

/// A value of the `x-baton-mode` header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Aggregated,
    Disaggregated,
    Conditional,
}

impl Mode {
    pub fn word(self) -> &'static str {
        match self {
            Self::Aggregated => "Aggregated",
            Self::Disaggregated => "Disaggregated",
            Self::Conditional => "Conditional",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.word())
    }
}

/// A header value that names no mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("x-baton-mode {0:?} is unknown: use Aggregated, Disaggregated or Conditional")]
pub struct UnknownMode(pub String);

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(word: &str) -> Result<Self, UnknownMode> {
        [Self::Aggregated, Self::Disaggregated, Self::Conditional]
            .into_iter()
            .find(|mode| mode.word() == word)
            .ok_or_else(|| UnknownMode(word.to_owned()))
    }
}

/// One client request, tokenised, or passed on to engines that tokenise it.
#[derive(Clone, Debug)]
pub struct RunRequest {
    /// `x-request-id`, the client's or made.
    pub request_id: String,
    pub policy: Arc<PolicyHandle>,
    /// The prompt. Empty where an engine tokenises it and it could not be done here.
    pub tokens: Vec<u32>,
    /// Set where the request is passed on as it came; then `tokens` only find what workers hold, and `sampling` says nothing.
    pub forward: Option<Arc<Forward>>,
    pub sampling: wire::Sampling,
    pub stopping: wire::Stopping,
    /// Empty: none.
    pub cache_salt: String,
    /// Larger is more urgent.
    pub priority: i32,
    /// `x-baton-mode`; counts only where the policy allows overrides.
    pub mode: Option<Mode>,
    /// False: one choice of several, `echo` and the like stay on one worker.
    pub splittable: bool,
    /// What the client asked for, as OpenTelemetry's GenAI conventions name it.
    pub operation: &'static str,
    /// W3C trace context of the client.
    pub traceparent: Option<TraceContext>,
    pub received: Instant,
}

impl RunRequest {
    /// Tokens of the prompt; an estimate where nobody here has tokenised it.
    pub fn prompt_tokens(&self) -> u32 {
        match &self.forward {
            Some(forward) => forward.prompt_tokens,
            None => u32::try_from(self.tokens.len()).unwrap_or(u32::MAX),
        }
    }
}

/// What comes out of a run. After `Finished` or `Failed` nothing follows.
#[derive(Clone, Debug)]
pub enum RunEvent {
    /// A request that was passed on: status and headers of the engine's answer. First, and once.
    Answer(EngineHead),
    /// Bytes of that answer, as the engine sent them; whole frames where it is a stream of events.
    Bytes(Bytes),
    Token {
        id: u32,
        logprobs: Option<wire::Logprobs>,
    },
    Finished {
        reason: wire::FinishReason,
        usage: Usage,
    },
    Failed(RunFailure),
}

/// Token counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u32,
    /// Prompt tokens whose KV was found in a cache.
    pub cached_tokens: u32,
    pub output_tokens: u32,
}

/// How an engine's answer begins: what of it is passed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineHead {
    pub status: StatusCode,
    /// Without those that are about one connection.
    pub headers: HeaderMap,
}

impl EngineHead {
    /// A stream of server-sent events.
    pub fn streams(&self) -> bool {
        let value = self.headers.get(CONTENT_TYPE);
        let value = value.and_then(|value| value.to_str().ok());
        value.is_some_and(|value| value.starts_with("text/event-stream"))
    }
}

/// What an engine said instead of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineRefusal {
    pub head: EngineHead,
    pub body: Bytes,
}

/// A run that ended without a result, as the client is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFailure {
    /// The engine's own words, where it gave any: the client gets them as they are.
    pub engine: Option<Box<EngineRefusal>>,
    /// The engine has told the client itself, in its stream.
    pub told: bool,
    pub class: FailureClass,
    /// HTTP status where nothing has been sent yet.
    pub status: u16,
    pub message: String,
    /// The request's field that is at fault.
    pub param: Option<String>,
    /// Machine-readable, as in OpenAI's `error.code`.
    pub code: &'static str,
    /// Whole seconds, on each 429 and 503.
    pub retry_after_seconds: Option<u64>,
}

/// The client's end of a run.
#[derive(Debug)]
pub struct RunHandle {
    pub run: RunId,
    events: mpsc::Receiver<RunEvent>,
    /// Tells dispatch how many tokens counted when a stop string was found.
    stop: Option<oneshot::Sender<u32>>,
    delivered: u32,
    stopped: bool,
    _cancel_on_drop: DropGuard,
}

impl RunHandle {
    /// The next event; `None` after the last. Cancel-safe.
    pub async fn next(&mut self) -> Option<RunEvent> {
        loop {
            let event = self.events.recv().await?;
            match event {
                // On their way when the stop string was found: they are not part of the answer.
                RunEvent::Token { .. } if self.stopped => {}
                RunEvent::Token { .. } => {
                    self.delivered += 1;
                    return Some(event);
                }
                RunEvent::Finished { usage, .. } if self.stopped => {
                    return Some(RunEvent::Finished {
                        reason: wire::FinishReason::Stop,
                        usage: Usage {
                            output_tokens: self.delivered,
                            ..usage
                        },
                    });
                }
                RunEvent::Finished { .. }
                | RunEvent::Failed(_)
                | RunEvent::Answer(_)
                | RunEvent::Bytes(_) => return Some(event),
            }
        }
    }

    /// A stop string was found in the text of the tokens delivered so far: the workers are cancelled and the run ends well. The
    /// next event is `Finished` with reason `Stop`.
    pub fn stop_matched(&mut self) {
        self.stopped = true;
        if let Some(stop) = self.stop.take() {
            // The run may have ended by itself.
            let _ = stop.send(self.delivered);
        }
    }
}

/// Dispatch's end of a run.
#[derive(Debug)]
pub struct RunSink {
    pub events: mpsc::Sender<RunEvent>,
    /// The place of the last event, which needs no other.
    pub last: Option<mpsc::OwnedPermit<RunEvent>>,
    /// Cancelled when the client is gone.
    pub client_gone: CancellationToken,
    /// Resolves with the tokens that count when a stop string was found; fails when the handle is dropped.
    pub stop: oneshot::Receiver<u32>,
}

/// Both ends of a run whose answer is made from tokens.
pub fn channel(run: RunId) -> (RunSink, RunHandle) {
    channel_of(run, EVENTS_IN_FLIGHT)
}

/// Both ends of a run, with so many events between them.
pub fn channel_of(run: RunId, events: usize) -> (RunSink, RunHandle) {
    let (sender, receiver) = mpsc::channel(events.max(1) + 1);
    let (stop_sender, stop_receiver) = oneshot::channel();
    let client_gone = CancellationToken::new();
    let handle = RunHandle {
        run,
        events: receiver,
        stop: Some(stop_sender),
        delivered: 0,
        stopped: false,
        _cancel_on_drop: client_gone.clone().drop_guard(),
    };
    let sink = RunSink {
        last: sender.clone().try_reserve_owned().ok(),
        events: sender,
        client_gone,
        stop: stop_receiver,
    };
    (sink, handle)
}

/// A served model, for `GET /v1/models`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelListing {
    /// The policy's model or one of its aliases.
    pub id: String,
    /// When its policy came into force, seconds since the epoch.
    pub created: i64,
    /// Longest sequence that a worker of the model takes, in tokens; `None` while no worker is known.
    pub max_context: Option<u32>,
}

/// What turns text of one model into tokens and back, as its workers serve it.
#[derive(Clone, Debug)]
pub struct TextArtifacts {
    /// BLAKE3 of `tokenizer`, hex. Compile once per digest.
    pub tokenizer_digest: String,
    /// A Hugging Face `tokenizer.json`.
    pub tokenizer: Bytes,
    /// BLAKE3 of `chat_template`, hex.
    pub chat_template_digest: String,
    /// JSON: `chat_template`, `bos_token`, `eos_token`, `add_bos`.
    pub chat_template: Bytes,
    /// Longest sequence that every worker of the model takes, in tokens.
    pub max_context: u32,
}

/// What the front needs to know to pass requests of a model on.
#[derive(Clone, Debug)]
pub struct PassedOn {
    /// Longest sequence that a worker of the model takes, in tokens.
    pub max_context: u32,
    /// What makes the engine's tokens of text, or why nothing here does.
    pub text: Result<Arc<TextArtifacts>, Credit>,
}

/// What the front asks of dispatch. The router has one implementation, `dispatch::Dispatcher`; a test of the front
/// may script its own with [`channel`].
pub trait Dispatch: Send + Sync + fmt::Debug {
    /// The policy in force for a model name or alias.
    fn policy(&self, model: &str) -> Option<Arc<PolicyHandle>>;

    fn models(&self) -> Vec<ModelListing>;

    /// Tokenizer and chat template of a policy's model; `None` until a worker has served them.
    fn artifacts(&self, policy: &PolicyHandle) -> Option<Arc<TextArtifacts>>;

    /// What keeps each model from being served now that cannot be.
    fn unserved(&self) -> Vec<String> {
        self.ready().err().into_iter().collect()
    }

    /// The policy that would serve a model that none serves, where it is refused.
    fn refused(&self, _model: &str) -> Option<String> {
        None
    }

    /// Whether requests can be served now, of one model at least; otherwise what is missing.
    fn ready(&self) -> Result<(), String>;

    /// How requests of a policy are passed on to engines as they come; `None`: they are tokenised here for good.
    fn passed_on(&self, _policy: &PolicyHandle) -> Option<PassedOn> {
        None
    }

    /// Whether any policy's requests are passed on: only then is a body looked at before it is parsed.
    fn passes_on(&self) -> bool {
        false
    }

    /// Begins a run. Never blocks.
    fn start(&self, request: RunRequest) -> RunHandle;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: u32) -> RunEvent {
        RunEvent::Token { id, logprobs: None }
    }

    #[tokio::test]
    async fn after_a_stop_string_only_the_end_comes_and_counts_what_was_delivered() {
        let (sink, mut handle) = channel("r".into());
        for id in 0..3 {
            sink.events.send(token(id)).await.unwrap();
        }
        handle.next().await.unwrap();
        handle.next().await.unwrap();
        handle.stop_matched();
        assert_eq!(sink.stop.await, Ok(2));
        let usage = Usage {
            prompt_tokens: 7,
            cached_tokens: 0,
            output_tokens: 3,
        };
        sink.events
            .send(RunEvent::Finished {
                reason: wire::FinishReason::Cancelled,
                usage,
            })
            .await
            .unwrap();
        let Some(RunEvent::Finished { reason, usage }) = handle.next().await else {
            panic!("the run has not finished");
        };
        assert_eq!(reason, wire::FinishReason::Stop);
        assert_eq!((usage.prompt_tokens, usage.output_tokens), (7, 2));
    }

    #[tokio::test]
    async fn dropping_the_handle_says_that_the_client_is_gone() {
        let (sink, handle) = channel("r".into());
        assert!(!sink.client_gone.is_cancelled());
        drop(handle);
        sink.client_gone.cancelled().await;
    }

    #[test]
    fn a_mode_that_nobody_knows_is_named() {
        assert_eq!("Conditional".parse(), Ok(Mode::Conditional));
        let error = "fast".parse::<Mode>().unwrap_err().to_string();
        assert!(error.contains("\"fast\""), "{error}");
    }
}

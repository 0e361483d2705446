//! What the stand-in answers: vLLM's shapes, made beforehand where they are the same each time.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll};

use baton_e2e::stand_in::answers::{self, Measured};
use bytes::Bytes;
use http::Response;
use hyper::body::Frame;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::MODEL;
use crate::fake::{BLOCK_SIZE, BLOCKS, Counts};

pub(crate) type Body = answers::Body<Frames>;

/// What matters of a request.
#[derive(Debug, Deserialize)]
pub(crate) struct Asked {
    #[serde(default)]
    pub(crate) stream: bool,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    pub(crate) kv_transfer_params: Option<Remote>,
    pub(crate) bootstrap_room: Option<Value>,
    stream_options: Option<StreamOptions>,
}

/// `kv_transfer_params` of a request.
#[derive(Debug, Deserialize)]
pub(crate) struct Remote {
    #[serde(default)]
    pub(crate) do_remote_decode: bool,
    pub(crate) remote_engine_id: Option<String>,
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

impl Asked {
    fn tokens(&self) -> u32 {
        let most = self.max_completion_tokens.or(self.max_tokens);
        most.unwrap_or(16).clamp(1, 4096)
    }
}

/// Frames that are written one by one: between two the connection gets its turn to write.
#[derive(Debug)]
pub(crate) struct Frames {
    first: VecDeque<Bytes>,
    /// How many more of [`TOKEN`].
    tokens: u32,
    last: VecDeque<Bytes>,
    rested: bool,
}

impl hyper::body::Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if !self.rested {
            self.rested = true;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.rested = false;
        let next = self.first.pop_front().or_else(|| {
            if self.tokens > 0 {
                self.tokens -= 1;
                return Some(TOKEN.clone());
            }
            self.last.pop_front()
        });
        Poll::Ready(next.map(|bytes| Ok(Frame::data(bytes))))
    }
}

/// As vLLM's: an empty piece of text with the role first, then a frame for each token, the last with the reason.
fn chunk(delta: &Value, finish_reason: &Value) -> Bytes {
    let chunk = json!({
        "id": "chatcmpl-8f14e45fceea167a", "object": "chat.completion.chunk", "created": 1_795_959_233, "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason, "token_ids": null}],
    });
    format!("data: {chunk}\n\n").into()
}

static ROLE: LazyLock<Bytes> =
    LazyLock::new(|| chunk(&json!({"role": "assistant", "content": ""}), &Value::Null));
static TOKEN: LazyLock<Bytes> = LazyLock::new(|| chunk(&json!({"content": " word"}), &Value::Null));
static LAST: LazyLock<Bytes> =
    LazyLock::new(|| chunk(&json!({"content": " word"}), &json!("length")));

pub(crate) fn streamed(asked: &Asked) -> Response<Body> {
    let mut last = VecDeque::from([LAST.clone()]);
    if asked
        .stream_options
        .as_ref()
        .is_some_and(|options| options.include_usage)
    {
        let usage = json!({"id": "chatcmpl-8f14e45fceea167a", "object": "chat.completion.chunk", "created": 1_795_959_233,
            "model": MODEL, "choices": [], "usage": usage(asked)});
        last.push_back(format!("data: {usage}\n\n").into());
    }
    last.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
    let frames = Frames {
        first: VecDeque::from([ROLE.clone()]),
        tokens: asked.tokens() - 1,
        last,
        rested: false,
    };
    answers::events(frames)
}

fn usage(asked: &Asked) -> Value {
    // What no router reads is not counted.
    json!({"prompt_tokens": 1, "total_tokens": 1 + asked.tokens(), "completion_tokens": asked.tokens()})
}

pub(crate) fn whole(asked: &Asked, handed_over: Option<&Value>) -> Response<Body> {
    answers::json(&json!({
        "id": "chatcmpl-8f14e45fceea167a", "object": "chat.completion", "created": 1_795_959_582, "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": " word".repeat(asked.tokens() as usize)},
            "logprobs": null, "finish_reason": "length", "stop_reason": null}],
        "usage": usage(asked), "kv_transfer_params": handed_over,
    }))
}

/// Of the server that listens there.
pub(crate) fn engine_id(address: SocketAddr) -> String {
    format!("98d7c74a-2059-46d6-9ad6-{:012}", address.port())
}

/// Where nobody reads: these servers move no KV.
pub(crate) fn handed_over(address: SocketAddr, bytes: usize) -> Value {
    answers::handed_over(&engine_id(address), ("127.0.0.1", 5600), bytes)
}

pub(crate) fn version() -> Value {
    json!({"version": "0.32.0"})
}

/// Nothing runs when the daemon looks, as nothing takes time.
pub(crate) fn metrics(started: f64, counts: &Counts) -> String {
    answers::metrics(&Measured {
        model: MODEL,
        started,
        running: 0,
        answered: counts.whole + counts.prefills + counts.pulls + counts.rooms,
        block_size: BLOCK_SIZE,
        blocks: BLOCKS,
    })
}

/// Of SGLang's servers.
pub(crate) fn model_info() -> Value {
    json!({"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": true, "preferred_sampling_params": null})
}

/// Of SGLang's servers.
pub(crate) fn server_info() -> Value {
    json!({"model_path": MODEL, "tokenizer_path": MODEL, "model_id": MODEL, "served_model_name": MODEL, "tp_size": 1,
        "dp_size": 1, "max_total_num_tokens": BLOCKS * BLOCK_SIZE, "max_running_requests": 256, "version": "0.5.23"})
}

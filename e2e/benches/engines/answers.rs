//! What the stand-in answers: vLLM's shapes, made beforehand where they are the same each time.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::Frame;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::MODEL;
use crate::events::Events;
use crate::fake::{BLOCK_SIZE, BLOCKS, Counts};

pub(crate) type Body = Either<Full<Bytes>, Frames>;

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
    let mut response = Response::new(Either::Right(frames));
    content_type(&mut response, "text/event-stream; charset=utf-8");
    response
}

fn usage(asked: &Asked) -> Value {
    // What no router reads is not counted.
    json!({"prompt_tokens": 1, "total_tokens": 1 + asked.tokens(), "completion_tokens": asked.tokens()})
}

pub(crate) fn whole(asked: &Asked, handed_over: Option<&Value>) -> Response<Body> {
    json(&json!({
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

/// As vLLM's NixlConnector answers a prefill of a body of that many bytes, in blocks of some 64 bytes of text.
pub(crate) fn handed_over(address: SocketAddr, bytes: usize) -> Value {
    let blocks: Vec<usize> = (1..=bytes.div_ceil(64)).collect();
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [blocks],
        "remote_engine_id": engine_id(address),
        "remote_request_id": "chatcmpl-8f14e45fceea167a-bcfce026", "remote_host": "127.0.0.1", "remote_port": 5600,
        "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": bytes.div_ceil(4),
        "remote_blocks_expiry_time": null, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0,
    })
}

pub(crate) fn tokenized(tokens: &[u32], max_length: u32) -> Response<Body> {
    json(
        &json!({"count": tokens.len(), "max_model_len": max_length, "tokens": tokens, "token_strs": null}),
    )
}

pub(crate) fn version() -> Value {
    json!({"version": "0.32.0"})
}

pub(crate) fn models(max_length: u32) -> Value {
    json!({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1_795_959_232, "owned_by": "vllm",
        "root": MODEL, "parent": null, "max_model_len": max_length}]})
}

pub(crate) fn event_sources(events: Option<&Events>) -> Value {
    let Some(events) = events else {
        return json!({"0": {"enable_kv_cache_events": false}});
    };
    json!({"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": events.endpoint,
        "replay_endpoint": events.replay, "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": ""}})
}

/// Those that the daemon reads. Nothing runs when it looks, as nothing takes time.
pub(crate) fn metrics(started: f64, counts: &Counts) -> String {
    let labels = format!("engine=\"0\",model_name=\"{MODEL}\"");
    let requests = counts.whole + counts.prefills + counts.pulls + counts.rooms;
    format!(
        "process_start_time_seconds {started}\n\
         vllm:num_requests_running{{{labels}}} 0.0\n\
         vllm:num_requests_waiting{{{labels}}} 0.0\n\
         vllm:kv_cache_usage_perc{{{labels}}} 0.0\n\
         vllm:num_preemptions_total{{{labels}}} 0.0\n\
         vllm:cache_config_info{{block_size=\"{BLOCK_SIZE}\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",engine=\"0\",num_gpu_blocks=\"{BLOCKS}\"}} 1.0\n\
         vllm:request_success_total{{{labels},finished_reason=\"length\"}} {requests}\n"
    )
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

pub(crate) fn failed(status: StatusCode, message: &str) -> Response<Body> {
    let mut response = json(&json!({"error": {"message": message, "code": status.as_u16()}}));
    *response.status_mut() = status;
    response
}

pub(crate) fn json(value: &Value) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::from(value.to_string())));
    content_type(&mut response, "application/json");
    response
}

pub(crate) fn text(text: String) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::from(text)));
    content_type(&mut response, "text/plain; version=1.0.0; charset=utf-8");
    response
}

pub(crate) fn empty() -> Response<Body> {
    Response::new(Either::Left(Full::default()))
}

fn content_type(response: &mut Response<Body>, value: &'static str) {
    let headers = response.headers_mut();
    headers.insert(
        http::header::CONTENT_TYPE,
        http::HeaderValue::from_static(value),
    );
}

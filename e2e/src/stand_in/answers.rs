//! What vLLM answers to whoever asks what it is, and how a stand-in writes it.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode};
use http_body_util::{Either, Full};
use serde_json::{Value, json};

use super::events::Events;

/// A whole answer, or one that comes bit by bit.
pub type Body<S> = Either<Full<Bytes>, S>;

/// Of `GET /v1/models`.
pub fn models(model: &str, max_length: u32) -> Value {
    json!({"object": "list", "data": [{"id": model, "object": "model", "created": 1_795_959_232, "owned_by": "vllm",
        "root": model, "parent": null, "max_model_len": max_length}]})
}

/// Of `POST /tokenize`.
pub fn tokenized(tokens: &[u32], max_length: u32) -> Value {
    json!({"count": tokens.len(), "max_model_len": max_length, "tokens": tokens, "token_strs": null})
}

/// Of `GET /kv_event_sources`.
pub fn event_sources(events: Option<&Events>) -> Value {
    let Some(events) = events else {
        return json!({"0": {"enable_kv_cache_events": false}});
    };
    json!({"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": events.endpoint,
        "replay_endpoint": events.replay, "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": ""}})
}

/// What NixlConnector adds to the answer of a prefill of a body of that many bytes, in blocks of some 64 bytes of text. Whoever reads
/// asks at the side channel's host and port first.
pub fn handed_over(engine_id: &str, (host, port): (&str, u16), bytes: usize) -> Value {
    let blocks: Vec<usize> = (1..=bytes.div_ceil(64)).collect();
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [blocks],
        "remote_engine_id": engine_id,
        "remote_request_id": "chatcmpl-8f14e45fceea167a-bcfce026", "remote_host": host, "remote_port": port,
        "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": bytes.div_ceil(4),
        "remote_blocks_expiry_time": null, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0,
    })
}

/// What `GET /metrics` tells.
#[derive(Clone, Copy, Debug)]
pub struct Measured<'a> {
    pub model: &'a str,
    /// Of the process, seconds since the epoch.
    pub started: f64,
    pub running: u32,
    pub answered: u64,
    pub block_size: u32,
    pub blocks: u32,
}

/// Those that the daemon reads. No memory is in use: nothing is computed.
pub fn metrics(measured: &Measured<'_>) -> String {
    let Measured {
        model,
        started,
        running,
        answered,
        block_size,
        blocks,
    } = measured;
    let labels = format!("engine=\"0\",model_name=\"{model}\"");
    format!(
        "process_start_time_seconds {started}\n\
         vllm:num_requests_running{{{labels}}} {running}.0\n\
         vllm:num_requests_waiting{{{labels}}} 0.0\n\
         vllm:kv_cache_usage_perc{{{labels}}} 0.0\n\
         vllm:num_preemptions_total{{{labels}}} 0.0\n\
         vllm:cache_config_info{{block_size=\"{block_size}\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",engine=\"0\",num_gpu_blocks=\"{blocks}\"}} 1.0\n\
         vllm:request_success_total{{{labels},finished_reason=\"length\"}} {answered}\n"
    )
}

/// Now, as such metrics write it.
pub fn seconds_since_epoch() -> f64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0.0, |now| now.as_secs_f64())
}

pub fn failed<S>(status: StatusCode, message: &str) -> Response<Body<S>> {
    let mut response = json(&json!({"error": {"message": message, "code": status.as_u16()}}));
    *response.status_mut() = status;
    response
}

pub fn json<S>(value: &Value) -> Response<Body<S>> {
    typed(
        Either::Left(Full::from(value.to_string())),
        "application/json",
    )
}

pub fn text<S>(text: String) -> Response<Body<S>> {
    typed(
        Either::Left(Full::from(text)),
        "text/plain; version=1.0.0; charset=utf-8",
    )
}

pub fn empty<S>() -> Response<Body<S>> {
    Response::new(Either::Left(Full::default()))
}

/// Server-sent events.
pub fn events<S>(events: S) -> Response<Body<S>> {
    typed(Either::Right(events), "text/event-stream; charset=utf-8")
}

fn typed<S>(body: Body<S>, kind: &'static str) -> Response<Body<S>> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

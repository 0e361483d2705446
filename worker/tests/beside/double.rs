//! A server as vLLM or SGLang is one, seen from outside: HTTP, published events with replays, NIXL's handshakes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::{Json, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use baton_text::chat::{Chat, Message};
use baton_text::model::ModelText;
use baton_worker::model::artifacts::{
    BYTE_LEVEL_TEMPLATE, byte_level, chat_template_json, tokenizer_json,
};
use parking_lot::Mutex;
use rmpv::Value as Pack;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use zeromq::{PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

/// Tokens of a block.
pub(crate) const BLOCK: u32 = 4;
pub(crate) const BLOCKS: u32 = 100;

/// Batches that can be replayed, by number.
type Memory = Arc<Mutex<VecDeque<(u64, Vec<u8>)>>>;

/// What the server answers.
pub(crate) struct Says {
    pub(crate) healthy: bool,
    pub(crate) model: &'static str,
    pub(crate) process_start: f64,
    pub(crate) running: u32,
    pub(crate) waiting: u32,
    /// Of SGLang: computed, and not fetched yet.
    pub(crate) unsent: u32,
    pub(crate) late_reads: u32,
    /// Its tokenizer is not that of its files.
    pub(crate) other_tokens: bool,
    /// It is vLLM that runs for development, and says this of its weights.
    pub(crate) dtype: Option<&'static str>,
    /// The first time only after longer than anybody waits.
    pub(crate) slow: bool,
    /// It is SGLang, in this mode.
    pub(crate) sglang: Option<&'static str>,
    /// All ranks have registered with its bootstrap server, which is played at the same port.
    pub(crate) ranks_registered: bool,
    /// It has metrics: SGLang on demand only.
    pub(crate) measured: bool,
    events: Value,
}

/// One process of the server.
pub(crate) struct Engine {
    pub(crate) says: Arc<Mutex<Says>>,
    pub(crate) port: u16,
    published: mpsc::UnboundedSender<(u64, Vec<u8>)>,
    memory: Memory,
    sequence: u64,
    tasks: JoinSet<()>,
}

/// Who listens where events are published.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Publishes {
    /// The engine.
    Listening,
    /// The daemon: the engine connects to this address and port.
    To(&'static str, u16),
    Nothing,
}

fn now() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs_f64()
}

/// A port that is free, and stays so while nobody listens: below those that the kernel gives to whoever asks for any.
pub(crate) async fn free_port() -> u16 {
    static TRIED: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id();
    loop {
        let tried = TRIED.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (first.wrapping_add(tried) % 10_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).await.is_ok() {
            return port;
        }
    }
}

impl Engine {
    pub(crate) async fn start(port: u16, publishes: Publishes) -> Self {
        let mut tasks = JoinSet::new();
        let memory: Memory = Arc::default();
        let (published, receiver) = mpsc::unbounded_channel();
        let mut events = json!({});
        if publishes != Publishes::Nothing {
            let mut socket = PubSocket::new();
            let endpoint = match publishes {
                Publishes::To(address, port) => {
                    let endpoint = format!("tcp://{address}:{port}");
                    tasks.spawn(publish_to(endpoint.clone(), receiver));
                    endpoint
                }
                _ => {
                    let bound = socket.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
                    tasks.spawn(publish(socket, receiver));
                    let port = bound.rsplit_once(':').unwrap().1;
                    format!("tcp://*:{port}")
                }
            };
            let mut replays = RouterSocket::new();
            let replay = replays.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
            tasks.spawn(replay_to(replays, Arc::clone(&memory)));
            events = json!({"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": endpoint,
                "replay_endpoint": replay, "topic": "kv@x@m"}});
        }
        let says = Arc::new(Mutex::new(Says {
            healthy: true,
            model: "tiny",
            process_start: now(),
            running: 0,
            waiting: 0,
            unsent: 0,
            late_reads: 0,
            other_tokens: false,
            dtype: None,
            slow: false,
            sglang: None,
            ranks_registered: true,
            measured: true,
            events,
        }));
        let port = if port == 0 { free_port().await } else { port };
        let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let router = axum::Router::new()
            .route("/health", get(health))
            .route("/v1/models", get(models))
            .route(
                "/version",
                get(|| async { Json(json!({"version": "0.32.0"})) }),
            )
            .route("/metrics", get(metrics))
            .route("/kv_event_sources", get(sources))
            .route("/tokenize", post(tokenize))
            // SGLang's own.
            .route("/ready", get(health))
            .route("/server_info", get(server_info))
            .route("/route", get(bootstrap))
            .with_state(Arc::clone(&says));
        tasks.spawn(async move {
            axum::serve(listener, router).await.unwrap();
        });
        Self {
            says,
            port,
            published,
            memory,
            sequence: 0,
            tasks,
        }
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut Says)) {
        change(&mut self.says.lock());
    }

    /// Publishes a batch.
    pub(crate) fn publish(&mut self, events: Vec<Pack>) {
        let one = self.batch(events);
        self.published.send(one).unwrap();
    }

    /// Makes a batch that nobody hears: it can be replayed.
    pub(crate) fn lose(&mut self, events: Vec<Pack>) {
        self.batch(events);
    }

    /// Forgets all batches that it could replay.
    pub(crate) fn forget(&self) {
        self.memory.lock().clear();
    }

    fn batch(&mut self, events: Vec<Pack>) -> (u64, Vec<u8>) {
        let batch = Pack::Array(vec![now().into(), Pack::Array(events), 0.into()]);
        let mut bytes = Vec::new();
        rmpv::encode::write_value(&mut bytes, &batch).unwrap();
        let one = (self.sequence, bytes);
        self.sequence += 1;
        self.memory.lock().push_back(one.clone());
        one
    }

    /// The process is gone, with all its sockets.
    pub(crate) async fn end(mut self) {
        self.tasks.shutdown().await;
    }
}

/// A prompt's blocks, stored as vLLM says it.
pub(crate) fn stored(names: &[u64], parent: Option<u64>, tokens: &[u32]) -> Pack {
    let list = |values: Vec<Pack>| Pack::Array(values);
    Pack::Map(vec![
        ("type".into(), "BlockStored".into()),
        (
            "block_hashes".into(),
            list(names.iter().map(|name| (*name).into()).collect()),
        ),
        (
            "parent_block_hash".into(),
            parent.map_or(Pack::Nil, Pack::from),
        ),
        (
            "token_ids".into(),
            list(tokens.iter().map(|token| (*token).into()).collect()),
        ),
        ("block_size".into(), BLOCK.into()),
        ("medium".into(), "GPU".into()),
        ("group_idx".into(), 0.into()),
        ("kv_cache_spec_kind".into(), "full_attention".into()),
    ])
}

pub(crate) fn removed(name: u64) -> Pack {
    Pack::Map(vec![
        ("type".into(), "BlockRemoved".into()),
        ("block_hashes".into(), Pack::Array(vec![name.into()])),
        ("medium".into(), "GPU".into()),
        ("group_idx".into(), 0.into()),
    ])
}

fn message(frames: Vec<Vec<u8>>) -> ZmqMessage {
    let frames: Vec<bytes::Bytes> = frames.into_iter().map(bytes::Bytes::from).collect();
    ZmqMessage::try_from(frames).unwrap()
}

async fn publish(mut socket: PubSocket, mut batches: mpsc::UnboundedReceiver<(u64, Vec<u8>)>) {
    while let Some((sequence, batch)) = batches.recv().await {
        let frames = vec![b"kv@x@m".to_vec(), sequence.to_be_bytes().to_vec(), batch];
        let _ = socket.send(message(frames)).await;
    }
}

/// Connects as soon as the daemon listens.
async fn publish_to(endpoint: String, batches: mpsc::UnboundedReceiver<(u64, Vec<u8>)>) {
    let mut socket = PubSocket::new();
    while socket.connect(&endpoint).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    publish(socket, batches).await;
}

async fn replay_to(mut socket: RouterSocket, memory: Memory) {
    while let Ok(question) = socket.recv().await {
        let frames = question.into_vec();
        let [identity, _, from] = frames.as_slice() else {
            panic!("a replay is asked for in three frames");
        };
        let from = u64::from_be_bytes(from.as_ref().try_into().unwrap());
        let kept: Vec<_> = memory.lock().iter().cloned().collect();
        let answer = |topic: &[u8], sequence: u64, batch: Vec<u8>| {
            message(vec![
                identity.to_vec(),
                Vec::new(),
                topic.to_vec(),
                sequence.to_be_bytes().to_vec(),
                batch,
            ])
        };
        for (sequence, batch) in kept.into_iter().filter(|(sequence, _)| *sequence >= from) {
            let _ = socket.send(answer(b"kv@x@m", sequence, batch)).await;
        }
        let _ = socket.send(answer(b"", u64::MAX, Vec::new())).await;
    }
}

type Told = State<Arc<Mutex<Says>>>;

async fn health(State(says): Told) -> StatusCode {
    if says.lock().healthy {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    }
}

async fn models(State(says): Told) -> Json<Value> {
    let model = says.lock().model;
    Json(json!({"object": "list", "data": [
        {"id": model, "parent": null, "max_model_len": 4096},
        {"id": "tuned", "parent": model, "max_model_len": 4096},
    ]}))
}

async fn metrics(State(says): Told) -> (StatusCode, String) {
    let says = says.lock();
    if says.measured {
        (StatusCode::OK, exposition(&says))
    } else {
        (StatusCode::NOT_FOUND, "Not Found".to_owned())
    }
}

fn exposition(says: &Says) -> String {
    if says.sglang.is_some() {
        return format!(
            "sglang:num_running_reqs{{tp_rank=\"0\"}} {}\nsglang:num_queue_reqs{{tp_rank=\"0\"}} {}\n\
             sglang:num_prefill_inflight_queue_reqs{{tp_rank=\"0\"}} {}\nsglang:token_usage 0.25\n",
            says.running, says.waiting, says.unsent
        );
    }
    let labels = "engine=\"0\",model_name=\"tiny\"";
    format!(
        "process_start_time_seconds {}\nvllm:num_requests_running{{{labels}}} {}\nvllm:num_requests_waiting{{{labels}}} {}\n\
         vllm:kv_cache_usage_perc{{{labels}}} 0.25\n\
         vllm:nixl_num_notifications_after_expiry_total{{{labels}}} {}\n\
         vllm:cache_config_info{{block_size=\"{BLOCK}\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",num_gpu_blocks=\"{BLOCKS}\"}} 1.0\n",
        says.process_start, says.running, says.waiting, says.late_reads
    )
}

async fn server_info(State(says): Told) -> (StatusCode, Json<Value>) {
    if std::mem::take(&mut says.lock().slow) {
        tokio::time::sleep(Duration::from_secs(8)).await;
    }
    let says = says.lock();
    let Some(mode) = says.sglang else {
        let info = says
            .dtype
            .map(|dtype| json!({"vllm_config": {"model_config": {"dtype": dtype}}}));
        return info.map_or((StatusCode::NOT_FOUND, Json(Value::Null)), |info| {
            (StatusCode::OK, Json(info))
        });
    };
    let port = |name: &str| {
        let endpoint = says.events["0"][name].as_str().unwrap_or_default();
        let port = endpoint
            .rsplit_once(':')
            .map(|(_, port)| port.parse::<u16>());
        port.and_then(Result::ok)
    };
    let info = json!({"version": "0.5.23", "page_size": BLOCK, "max_total_num_tokens": BLOCK * BLOCKS, "tp_size": 1, "pp_size": 1,
        "kv_cache_dtype": "auto", "dtype": "bfloat16", "attention_backend": "torch_native", "disaggregation_mode": mode,
        "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port("endpoint"),
            "replay_endpoint_port_base": port("replay_endpoint"), "topic": "", "block_size": BLOCK, "dp_size": 1}});
    (StatusCode::OK, Json(info))
}

async fn bootstrap(State(says): Told) -> (StatusCode, Json<Value>) {
    if says.lock().ranks_registered {
        (StatusCode::OK, Json(json!({"page_size": BLOCK})))
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, Json(Value::Null))
    }
}

async fn sources(State(says): Told) -> Json<Value> {
    Json(says.lock().events.clone())
}

/// With the tokenizer of the folder that [`model_folder`] makes.
async fn tokenize(State(says): Told, Json(question): Json<Value>) -> Json<Value> {
    let model = ModelText::compile(&tokenizer(), &template()).unwrap();
    let text = match question["prompt"].as_str() {
        Some(prompt) => prompt.to_owned(),
        None => {
            let messages: Vec<Message> =
                serde_json::from_value(question["messages"].clone()).unwrap();
            let now = jiff::Timestamp::now();
            model.render(&Chat::of(messages), now).unwrap()
        }
    };
    let mut tokens = model.encode(&text, true, "").unwrap();
    if says.lock().other_tokens {
        tokens[1] += 1;
    }
    Json(
        json!({"count": tokens.len(), "max_model_len": 4096, "tokens": tokens, "token_strs": null}),
    )
}

fn tokenizer() -> Vec<u8> {
    tokenizer_json(&byte_level(0))
}

fn template() -> Vec<u8> {
    chat_template_json(BYTE_LEVEL_TEMPLATE, None, None, false)
}

/// A model's folder, as the server loads it.
pub(crate) fn model_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    write("model.safetensors", b"weights");
    write("tokenizer.json", &tokenizer());
    write("chat_template.jinja", BYTE_LEVEL_TEMPLATE.as_bytes());
    write(
        "config.json",
        br#"{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
            "rope_theta": 10000.0, "torch_dtype": "bfloat16"}"#,
    );
    folder
}

//! A server with Baton's connector: it is registered once its plug-in is served, and not when it has only called.

use std::io::{IoSlice, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_protocol::card::Role;
use baton_protocol::wire;
use baton_worker::beside::start::Running;
use baton_worker::transport::memory::Shape;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

use crate::double::{BLOCK, Engine, Publishes};
use crate::watcher::{PATIENCE, Router, client, config, daemon, get};

const BLOCK_BYTES: usize = 256;
const PIECES: u32 = 2;

/// One half of a plug-in says hello; what it is answered.
fn calls(path: &Path, hello: &Value, inbox: Option<&OwnedFd>) -> (UnixStream, Value) {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let body = hello.to_string();
    let mut frame = (body.len() as u32).to_le_bytes().to_vec();
    frame.extend_from_slice(body.as_bytes());
    if let Some(inbox) = inbox {
        let files = [inbox.as_fd()];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        assert!(beside.push(SendAncillaryMessage::ScmRights(&files)));
        let bytes = [IoSlice::new(&frame)];
        let sent = sendmsg(&stream, &bytes, &mut beside, SendFlags::empty()).unwrap();
        frame.drain(..sent);
    }
    stream.write_all(&frame).unwrap();
    let answer = hears(&mut stream);
    (stream, answer)
}

fn hears(stream: &mut UnixStream) -> Value {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut answer = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut answer).unwrap();
    serde_json::from_slice(&answer).unwrap()
}

fn scheduler(path: &Path) -> (UnixStream, Value) {
    let hello = json!({"type": "hello", "version": 1, "role": "scheduler", "engine": "e"});
    calls(path, &hello, None)
}

fn worker(path: &Path) -> (UnixStream, Value) {
    let shape = Shape::new(PIECES, BLOCK_BYTES).unwrap();
    let inbox = memfd_create("inbox", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&inbox, shape.total() as u64).unwrap();
    fcntl_add_seals(&inbox, SealFlags::SHRINK).unwrap();
    let hello = json!({"type": "hello", "version": 1, "role": "worker", "engine": "e", "inboxPieces": PIECES,
        "layout": {"blockSize": BLOCK, "blockBytes": BLOCK_BYTES, "digest": "d"}});
    calls(path, &hello, Some(&inbox))
}

/// Off the threads of the daemon: a plug-in waits for its answer.
async fn blocking<T: Send + 'static>(
    path: &Path,
    half: impl FnOnce(&Path) -> T + Send + 'static,
) -> T {
    let path: PathBuf = path.to_owned();
    tokio::task::spawn_blocking(move || half(&path))
        .await
        .unwrap()
}

/// A server with the plug-in, and the daemon beside it.
async fn started(folder: &Path, role: Role) -> (Engine, Running, PathBuf) {
    let engine = Engine::start(0, Publishes::Nothing).await;
    let path = folder.join("connector.sock");
    let mut config = config(engine.port, None);
    config.engine.connector = baton_worker::config::Connector::Baton;
    config.engine.connector_socket = Some(path.clone());
    config.kv_pool.blocks = Some(16);
    config.role = role;
    config.check().unwrap();
    (engine, daemon(config).await, path)
}

/// Asks the daemon until its answer has all of these.
async fn tells(daemon: &Running, path: &str, wanted: &[&str]) {
    let mut last = String::new();
    let asking = async {
        while !wanted.iter().all(|word| last.contains(word)) {
            tokio::time::sleep(Duration::from_millis(50)).await;
            last = get(daemon, path).await.1;
        }
    };
    let told = tokio::time::timeout(PATIENCE, asking).await;
    assert!(told.is_ok(), "{path} does not tell {wanted:?}: {last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_registered_once_its_plug_in_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let (engine, daemon, path) = started(folder.path(), Role::Decode).await;
    // Whoever asks why there is no worker learns what it waits for.
    tells(&daemon, "/readyz", &["BatonConnector has not called yet"]).await;

    // The first call tells what the blocks look like, and is to be made again.
    let (_, answer) = blocking(&path, worker).await;
    assert_eq!(answer["type"], "refused", "{answer}");
    // One half alone hands nothing over.
    let (_scheduler, answer) = blocking(&path, scheduler).await;
    assert_eq!(answer["type"], "welcome", "{answer}");
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (status, body) = get(&daemon, "/v1/card").await;
    assert_eq!(
        status, 503,
        "registered before its plug-in is served: {body}"
    );

    let (_worker, answer) = blocking(&path, worker).await;
    assert_eq!(answer["type"], "welcome", "{answer}");
    let card = Router::watch(&daemon).await.card;
    assert_eq!(card.layout.engine_hash.known().unwrap(), "d");
    let notices = card.notices.join("\n");
    assert!(
        notices.contains("kvPool.blocks: 16 blocks hold prompts of 64 tokens"),
        "{notices}"
    );
    daemon.stop().await;
    engine.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_hand_offs_hold_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let (engine, daemon, path) = started(folder.path(), Role::Decode).await;
    let _ = blocking(&path, worker).await;
    let (mut scheduler, answer) = blocking(&path, scheduler).await;
    assert_eq!(answer["type"], "welcome", "{answer}");
    let (_worker, answer) = blocking(&path, worker).await;
    assert_eq!(answer["type"], "welcome", "{answer}");
    tells(&daemon, "/readyz", &["ready"]).await;

    let tokens: Vec<u32> = (0..3 * BLOCK).collect();
    let open = json!({"type": "open", "request": "r", "tokens": tokens, "salt": ""}).to_string();
    let (scheduler, opened) = tokio::task::spawn_blocking(move || {
        let mut frame = (open.len() as u32).to_le_bytes().to_vec();
        frame.extend_from_slice(open.as_bytes());
        scheduler.write_all(&frame).unwrap();
        let answer = hears(&mut scheduler);
        (scheduler, answer)
    })
    .await
    .unwrap();
    assert_eq!(opened["type"], "opened", "{opened}");
    let blocks =
        |state, count| format!("baton_kv_blocks{{pool=\"decode\",state=\"{state}\"}} {count}\n");
    let leases =
        |state, count| format!("baton_leases{{pool=\"decode\",state=\"{state}\"}} {count}\n");
    let none_leaked = "baton_kv_leaked_blocks{pool=\"decode\"} 0\n";
    let held = [
        blocks("leased", 3),
        blocks("quarantined", 0),
        leases("open", 1),
        leases("sealed", 0),
    ];
    let held: Vec<&str> = held
        .iter()
        .map(String::as_str)
        .chain([none_leaked])
        .collect();
    tells(&daemon, "/metrics", &held).await;
    tells(&daemon, "/v1/load", &["\"leasesOpen\":1", "\"leased\":3"]).await;

    drop(scheduler);
    let free = [blocks("leased", 0), leases("open", 0)];
    let free: Vec<&str> = free
        .iter()
        .map(String::as_str)
        .chain([none_leaked])
        .collect();
    tells(&daemon, "/metrics", &free).await;
    tells(&daemon, "/v1/load", &["\"leasesOpen\":0", "\"leased\":0"]).await;
    daemon.stop().await;
    engine.end().await;
}

/// Both halves of a plug-in, once the daemon serves them.
async fn served(path: &Path) -> (UnixStream, UnixStream) {
    let (scheduler, answer) = blocking(path, scheduler).await;
    assert_eq!(answer["type"], "welcome", "{answer}");
    let (worker, answer) = blocking(path, worker).await;
    assert_eq!(answer["type"], "welcome", "{answer}");
    (scheduler, worker)
}

/// What it would compute for others was computed for nobody. One that decodes computes for itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_server_is_sent_nothing_while_its_plug_in_is_gone() {
    for role in [Role::Prefill, Role::Decode] {
        let folder = tempfile::tempdir().unwrap();
        let (engine, daemon, path) = started(folder.path(), role).await;
        let _ = blocking(&path, worker).await;
        let halves = served(&path).await;
        let mut router = Router::watch(&daemon).await;
        router
            .until("a report", |router| router.load.load_sequence > 0)
            .await;
        assert!(!router.load.draining, "{role:?}");

        drop(halves);
        tells(&daemon, "/readyz", &["ready"]).await;
        if role == Role::Prefill {
            router
                .until("its plug-in is gone", |router| router.load.draining)
                .await;
        } else {
            let last = router.load.load_sequence;
            router
                .until("two reports", |router| {
                    assert!(!router.load.draining, "it can decode");
                    router.load.load_sequence >= last + 3
                })
                .await;
        }
        let _halves = served(&path).await;
        router
            .until("another plug-in", |router| !router.load.draining)
            .await;
        daemon.stop().await;
        engine.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_ends_with_a_server_whose_plug_in_never_called() {
    let folder = tempfile::tempdir().unwrap();
    let (engine, daemon, path) = started(folder.path(), Role::Prefill).await;
    let _ = blocking(&path, worker).await;
    let halves = served(&path).await;
    let mut router = Router::watch(&daemon).await;
    // It is only away, and registered no more until its plug-in calls.
    engine.set(|says| says.healthy = false);
    router.ended().await;
    engine.set(|says| says.healthy = true);
    drop(halves);
    tells(&daemon, "/readyz", &["BatonConnector has not called yet"]).await;
    let (_, report) = get(&daemon, "/drain?waitSeconds=1").await;
    assert!(report.contains("\"drained\":false"), "{report}");
    let drained = get(&daemon, "/drain?waitSeconds=50");
    let ((_, report), ()) = tokio::join!(drained, engine.end());
    assert!(report.contains("\"drained\":true"), "{report}");
    daemon.stop().await;
}

fn says(stream: &mut UnixStream, message: &Value) {
    let body = message.to_string();
    stream
        .write_all(&(body.len() as u32).to_le_bytes())
        .unwrap();
    stream.write_all(body.as_bytes()).unwrap();
}

/// Asks as a router does, which has sent the prompt and has no answer yet.
fn asks(
    daemon: &Running,
    operation: &str,
) -> tokio::task::JoinHandle<Result<String, tonic::Status>> {
    let (mut client, operation) = (client(daemon), operation.to_owned());
    tokio::spawn(async move {
        let request = wire::ParametersRequest { operation };
        let reply = client.parameters(request).await?;
        Ok(reply.into_inner().json)
    })
}

async fn told(
    asked: tokio::task::JoinHandle<Result<String, tonic::Status>>,
) -> Result<String, tonic::Status> {
    let told = tokio::time::timeout(PATIENCE, asked).await;
    told.expect("whoever asks is told").unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_is_told_how_a_prompt_is_read_when_its_first_block_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let (engine, daemon, path) = started(folder.path(), Role::Prefill).await;
    let code = |told: Result<String, tonic::Status>| told.unwrap_err().code();
    assert_eq!(
        code(told(asks(&daemon, "o-01")).await),
        tonic::Code::Unavailable
    );
    let _ = blocking(&path, worker).await;
    let (mut scheduler, mut worker) = served(&path).await;
    Router::watch(&daemon).await;
    assert_eq!(
        code(told(asks(&daemon, "")).await),
        tonic::Code::InvalidArgument
    );

    let asked = asks(&daemon, "o-01");
    let tokens: Vec<u32> = (0..3 * BLOCK).collect();
    let open = |operation: &str| json!({"type": "open", "request": operation, "tokens": tokens, "salt": "", "operation": operation});
    says(&mut scheduler, &open("o-01"));
    let opened = hears(&mut scheduler);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!asked.is_finished(), "its turn has not come");
    let publish = json!({"type": "publish", "request": "o-01", "index": 0, "piece": 0});
    says(&mut worker, &publish);
    assert_eq!(hears(&mut worker)["type"], "taken");
    let json: Value = serde_json::from_str(&told(asked).await.unwrap()).unwrap();
    assert_eq!(json["baton"], opened["descriptor"]);
    assert_eq!(json["do_remote_prefill"], true);

    // Two that will not be answered any more: one is known, of one nothing has come.
    let (open_one, unknown) = (asks(&daemon, "o-02"), asks(&daemon, "o-03"));
    says(&mut scheduler, &open("o-02"));
    assert_eq!(hears(&mut scheduler)["type"], "opened");
    // Both are to have asked by then, over connections of their own: who comes later is told something else.
    tokio::time::sleep(Duration::from_secs(2)).await;
    drop((scheduler, worker));
    for asked in [open_one, unknown] {
        let status = told(asked).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::FailedPrecondition, "{status}");
        assert!(status.message().contains("gone"), "{status}");
    }
    let status = told(asks(&daemon, "o-04")).await.unwrap_err();
    assert!(
        status.message().contains("no BatonConnector is served"),
        "{status}"
    );
    daemon.stop().await;
    engine.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_without_the_connector_is_not_to_be_asked() {
    let engine = Engine::start(0, Publishes::Nothing).await;
    let daemon = daemon(config(engine.port, None)).await;
    Router::watch(&daemon).await;
    let status = told(asks(&daemon, "o-01")).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unimplemented, "{status}");
    let words = status.message();
    assert!(words.contains("hands no KV over"), "{words}");
    daemon.stop().await;
    engine.end().await;
}

//! A server with Baton's connector: it is registered once its plug-in is served, and not when it has only called.

use std::io::{IoSlice, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_worker::transport::memory::Shape;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

use crate::double::{BLOCK, Engine, Publishes};
use crate::watcher::{PATIENCE, Router, config, daemon, get};

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
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut answer = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut answer).unwrap();
    (stream, serde_json::from_slice(&answer).unwrap())
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

#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_registered_once_its_plug_in_is_served() {
    let engine = Engine::start(0, Publishes::Nothing).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("connector.sock");
    let mut config = config(engine.port, None);
    config.engine.connector = baton_worker::config::Connector::Baton;
    config.engine.connector_socket = Some(path.clone());
    config.kv_pool.blocks = Some(16);
    config.check().unwrap();
    let daemon = daemon(config).await;

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
    daemon.stop().await;
    engine.end().await;
}

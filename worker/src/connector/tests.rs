//! Two daemons and two engines' plug-ins, played by this test over real sockets: what arrives, what is never used, what is left behind.

mod asked;
mod lives;

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::card::TransportOffer;
use baton_protocol::failure::HandoffFailure;
use baton_protocol::hash::HashKey;
use baton_protocol::ids::{Incarnation, WorkerId};
use baton_system::entropy::MachineEntropy;
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio_util::sync::CancellationToken;

use super::{Layout, Listener, Operations, Registered, Service, Worker};
use crate::kv::clock::{Clock, MonotonicClock};
use crate::kv::intake::Received;
use crate::kv::intake::client::{CallFailed, LeaseClient};
use crate::kv::{Geometry, KvPool, PoolConfig};
use crate::transport::ancillary;
use crate::transport::choice::Left;
use crate::transport::fault::{Fault, FaultySource};
use crate::transport::memory::Shape;
use crate::transport::memory::view::View;
use crate::transport::tcp::TcpTransport;
use crate::transport::{BlockSource, Transport};

const BLOCK_SIZE: usize = 4;
const BLOCK_BYTES: usize = 256;
const PIECES: u32 = 2;
/// Milliseconds.
const LEASE: u64 = 60_000;
const PATIENCE: Duration = Duration::from_secs(20);

/// What a worker around an engine was told.
#[derive(Debug, Default)]
struct Told {
    owner: Option<KvPool>,
    taken: Mutex<Vec<Received>>,
    failed: Mutex<Vec<HandoffFailure>>,
    joined: Mutex<u32>,
    gone: Mutex<u32>,
}

impl Worker for Told {
    fn owner(&self, _: &str) -> Result<Arc<dyn LeaseClient>, CallFailed> {
        let owner = self.owner.clone().ok_or(CallFailed("nobody".to_owned()))?;
        Ok(Arc::new(owner))
    }

    fn taken(&self, received: &Received) {
        self.taken.lock().push(*received);
    }

    fn failed(&self, cause: HandoffFailure) {
        self.failed.lock().push(cause);
    }

    fn left(&self, _: &Left<'_>) {}

    fn changed(&self) {}

    fn engine_joined(&self) {
        *self.joined.lock() += 1;
    }

    fn engine_gone(&self) {
        *self.gone.lock() += 1;
    }
}

/// A daemon that serves engines.
struct Daemon {
    pool: KvPool,
    told: Arc<Told>,
    operations: Operations,
    path: PathBuf,
    stop: CancellationToken,
    _folder: tempfile::TempDir,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn daemon(owner: Option<&KvPool>, fault: Option<Fault>) -> Daemon {
    daemon_by(Arc::new(MonotonicClock::start()), owner, fault).await
}

async fn daemon_by(clock: Arc<dyn Clock>, owner: Option<&KvPool>, fault: Option<Fault>) -> Daemon {
    let config = PoolConfig {
        geometry: Geometry {
            block_size: BLOCK_SIZE,
            bytes_per_token: BLOCK_BYTES / BLOCK_SIZE,
        },
        blocks: 16,
        kv_identity: "tiny".to_owned(),
        layout: 7,
        hash_key: HashKey::from_bytes(&[1; 32]),
        event_capacity: 1024,
    };
    let pool = KvPool::new(config, u64::MAX, clock).expect("small");
    let stop = CancellationToken::new();
    let mut source: Arc<dyn BlockSource> = Arc::new(pool.clone());
    if let Some(fault) = fault {
        source = Arc::new(FaultySource::new(source, fault));
    }
    let tcp: Arc<dyn Transport> = Arc::new(TcpTransport::default());
    let listening = tcp
        .listen("127.0.0.1:0", source, stop.clone())
        .await
        .expect("a free port");
    let address = listening.address.clone();
    tokio::spawn(listening.run);
    let operations = Operations::default();
    let told = Arc::new(Told {
        owner: owner.cloned(),
        ..Told::default()
    });
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("connector.sock");
    let listener = Listener::bind(&path).expect("a new path");
    let service = Service {
        layout: Layout {
            block_size: BLOCK_SIZE,
            block_bytes: BLOCK_BYTES,
            digest: "d".to_owned(),
        },
        pool: pool.clone(),
        registered: Registered {
            worker: WorkerId::from("w"),
            incarnation: Incarnation(u64::from(owner.is_some()) + 1),
            kv_identity: "tiny".to_owned(),
            layout_digest: "of the card".to_owned(),
            control_address: "source".to_owned(),
            transports: vec![TransportOffer {
                kind: "Tcp".to_owned(),
                address,
            }],
        },
        transports: vec![tcp],
        operations: operations.clone(),
        lease_milliseconds: LEASE,
        entropy: Arc::new(MachineEntropy),
        worker: Arc::clone(&told) as Arc<dyn Worker>,
        stop: stop.clone(),
    };
    tokio::spawn(async move { listener.serve(service).await });
    Daemon {
        pool,
        told,
        operations,
        path,
        stop,
        _folder: folder,
    }
}

/// One half of a plug-in. Blocking calls: tests run on several threads.
struct Half(UnixStream);

impl Half {
    fn say(&mut self, message: &Value) {
        let body = message.to_string();
        let mut frame = (body.len() as u32).to_le_bytes().to_vec();
        frame.extend_from_slice(body.as_bytes());
        self.0.write_all(&frame).expect("the daemon reads");
    }

    fn hear(&mut self) -> Value {
        loop {
            let heard = self.hear_anything();
            if heard["type"] != "coming" {
                return heard;
            }
        }
    }

    fn hear_anything(&mut self) -> Value {
        let mut length = [0; 4];
        self.0
            .read_exact(&mut length)
            .expect("the daemon says something");
        let mut body = vec![0; u32::from_le_bytes(length) as usize];
        self.0.read_exact(&mut body).expect("all of it");
        serde_json::from_slice(&body).expect("JSON")
    }
}

/// An engine's plug-in.
struct Engine {
    scheduler: Half,
    worker: Half,
    inbox: OwnedFd,
    arena: View,
}

fn connected(path: &Path) -> Half {
    let stream = UnixStream::connect(path).expect("a daemon");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    Half(stream)
}

async fn engine(daemon: &Daemon, name: &str) -> Engine {
    let mut scheduler = connected(&daemon.path);
    scheduler.say(&json!({"type": "hello", "version": 1, "role": "scheduler", "engine": name}));
    assert_eq!(scheduler.hear()["type"], "welcome");
    let shape = Shape::new(PIECES, BLOCK_BYTES).expect("small");
    let inbox = memfd_create("inbox", MemfdFlags::ALLOW_SEALING).expect("memfd");
    ftruncate(&inbox, shape.total() as u64).expect("grows");
    fcntl_add_seals(&inbox, SealFlags::SHRINK).expect("seals");
    let (worker, arena) = hello_of_worker(&daemon.path, name, &inbox).await;
    Engine {
        scheduler,
        worker,
        inbox,
        arena: arena.expect("a welcome"),
    }
}

/// Says hello with an inbox; the arena, unless it is turned away.
async fn hello_of_worker(path: &Path, name: &str, inbox: &OwnedFd) -> (Half, Option<View>) {
    let hello = json!({"type": "hello", "version": 1, "role": "worker", "engine": name, "inboxPieces": PIECES,
        "layout": {"blockSize": BLOCK_SIZE, "blockBytes": BLOCK_BYTES, "digest": "d"}})
    .to_string();
    let mut frame = (hello.len() as u32).to_le_bytes().to_vec();
    frame.extend_from_slice(hello.as_bytes());
    let stream = tokio::net::UnixStream::connect(path)
        .await
        .expect("a daemon");
    let sent = ancillary::send(&stream, &frame, inbox.as_fd(), PATIENCE)
        .await
        .expect("sent");
    assert_eq!(sent, frame.len());
    let mut piece = [0; 4096];
    let (read, file) = loop {
        stream.readable().await.expect("an answer");
        match stream.try_io(tokio::io::Interest::READABLE, || {
            ancillary::receive(stream.as_fd(), &mut piece)
        }) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            came => break came.expect("an answer"),
        }
    };
    let answer: Value = serde_json::from_slice(&piece[4..read]).expect("one frame");
    let arena = file.map(|file| {
        let pieces = answer["arenaPieces"].as_u64().expect("a welcome") as u32;
        View::map(file, Shape::new(pieces, BLOCK_BYTES).expect("small")).expect("an arena")
    });
    let stream = stream.into_std().expect("a socket");
    stream.set_nonblocking(false).expect("a socket");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    (Half(stream), arena)
}

fn tokens(count: u32) -> Vec<u32> {
    (10..10 + count).collect()
}

fn content(index: u32) -> Vec<u8> {
    (0..BLOCK_BYTES)
        .map(|at| (at as u32 * 7 + index * 31) as u8)
        .collect()
}

impl Engine {
    fn open(&mut self, request: &str, tokens: &[u32]) -> Value {
        self.scheduler
            .say(&json!({"type": "open", "request": request, "tokens": tokens, "salt": ""}));
        self.scheduler.hear()
    }

    /// Publishes a block through a piece of the inbox.
    fn publish(&mut self, request: &str, index: u32) {
        let piece = index % PIECES;
        let at = 4096 + u64::from(piece) * BLOCK_BYTES as u64;
        let written = rustix::io::pwrite(&self.inbox, &content(index), at).expect("in the inbox");
        assert_eq!(written, BLOCK_BYTES);
        self.worker
            .say(&json!({"type": "publish", "request": request, "index": index, "piece": piece}));
        assert_eq!(self.worker.hear(), json!({"type": "taken", "piece": piece}));
    }

    /// Hands over a prompt of `count` tokens; its descriptor.
    fn hand_over(&mut self, request: &str, count: u32) -> Value {
        let opened = self.open(request, &tokens(count));
        assert_eq!(opened["type"], "opened", "{opened}");
        let first = opened["firstBlock"].as_u64().expect("a number") as u32;
        for index in first..count.div_ceil(BLOCK_SIZE as u32) {
            self.publish(request, index);
        }
        self.worker
            .say(&json!({"type": "seal", "request": request}));
        opened["descriptor"].clone()
    }

    fn take(&mut self, request: &str, count: u32, descriptor: &Value) -> Value {
        // Over two connections: which of them the daemon reads first is not known.
        self.scheduler.say(&json!({"type": "take", "request": request, "tokens": tokens(count), "salt": "", "descriptor": descriptor}));
        self.worker
            .say(&json!({"type": "collect", "request": request}));
        self.worker.hear()
    }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("{what}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_one_engine_reach_the_other_whole() {
    let source = daemon(None, None).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    let descriptor = prefill.hand_over("r", 10);
    let loaded = decode.take("r", 10, &descriptor);
    assert_eq!(loaded["type"], "loaded", "{loaded}");
    let pieces = loaded["pieces"].as_array().expect("pieces").clone();
    assert_eq!(pieces.len(), 3);
    for (index, piece) in pieces.iter().enumerate() {
        let mut found = vec![0; BLOCK_BYTES];
        decode
            .arena
            .copy(piece.as_u64().expect("a number") as u32, &mut found, false)
            .expect("a piece of the arena");
        assert_eq!(found, content(index as u32), "block {index}");
    }
    assert_eq!(target.told.taken.lock()[0].blocks, 3);
    until("the source has nothing left to hold", || {
        source.pool.counts().leased == 0
    })
    .await;
    // Told, and not copied: held. Copied: only what the cache keeps.
    assert_eq!(target.pool.counts().active, 3);
    decode
        .worker
        .say(&json!({"type": "copied", "request": "r"}));
    until("copied blocks are given back", || {
        target.pool.counts().active == 0
    })
    .await;
    // The second time both ends have the full blocks.
    let opened = prefill.open("again", &tokens(10));
    assert_eq!(opened["firstBlock"], 2, "{opened}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_byte_is_never_loaded() {
    let source = daemon(None, Some(Fault::FlipByte(2))).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    let descriptor = prefill.hand_over("r", 10);
    let failed = decode.take("r", 10, &descriptor);
    assert_eq!(failed["type"], "failed", "{failed}");
    let why = failed["why"].as_str().expect("words");
    assert!(why.contains("checksum-mismatch"), "{why}");
    assert_eq!(
        *target.told.failed.lock(),
        [HandoffFailure::ChecksumMismatch]
    );
    until("nothing is held for it", || {
        target.pool.counts().active == 0
    })
    .await;
    // The next one is whole.
    let descriptor = prefill.hand_over("r2", 10);
    assert_eq!(decode.take("r2", 10, &descriptor)["type"], "loaded");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_dies_leaves_nothing() {
    let source = daemon(None, None).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    until("both halves are served", || *source.told.joined.lock() == 1).await;
    let sealed = prefill.hand_over("sealed", 8);
    let opened = prefill.open("begun", &tokens(12))["descriptor"].clone();
    assert_eq!(decode.take("told", 8, &sealed)["type"], "loaded");
    let sealed = prefill.hand_over("sealed-2", 8);
    drop(prefill);
    until("the daemon hears of it", || *source.told.gone.lock() == 1).await;
    until("all blocks are free", || source.pool.counts().free == 16).await;
    for (name, descriptor) in [("late", &sealed), ("later", &opened)] {
        let failed = decode.take(name, 8, descriptor);
        let why = failed["why"].as_str().expect("words");
        assert!(!why.is_empty() && failed["type"] == "failed", "{failed}");
    }
    decode
        .worker
        .say(&json!({"type": "collect", "request": "nobody's"}));
    let failed = decode.worker.hear();
    assert_eq!(failed["request"], "nobody's", "{failed}");
    drop(decode);
    until("the reader's blocks are free too", || {
        target.pool.counts().free == 16
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_engine_was_told_of_stays_until_it_is_copied() {
    let source = daemon(None, None).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    let descriptor = prefill.hand_over("r", 10);
    assert_eq!(decode.take("r", 10, &descriptor)["type"], "loaded");
    decode
        .scheduler
        .say(&json!({"type": "cancel", "request": "r"}));
    // One half goes: the life is over, the other half may still be copying.
    decode
        .scheduler
        .0
        .shutdown(std::net::Shutdown::Both)
        .expect("open");
    until("the daemon hears of it", || *target.told.gone.lock() == 1).await;
    assert_eq!(target.pool.counts().active, 3);
    drop(decode);
    until("its connection has closed", || {
        target.pool.counts().free == 16
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_out_of_order_and_other_layouts_are_refused() {
    let source = daemon(None, None).await;
    let mut prefill = engine(&source, "p").await;
    assert_eq!(prefill.open("r", &tokens(10))["type"], "opened");
    prefill.publish("r", 1);
    until("it is not handed over", || source.pool.counts().active == 0).await;
    let many = prefill.open("long", &tokens(16 * BLOCK_SIZE as u32 + 1));
    assert_eq!(many["type"], "refused", "{many}");
    assert!(many["why"].as_str().expect("words").contains("17 blocks"));

    let mut other = connected(&source.path);
    other.say(&json!({"type": "hello", "version": 2, "role": "scheduler", "engine": "x"}));
    let refused = other.hear();
    assert!(
        refused["why"]
            .as_str()
            .expect("words")
            .contains("version 2"),
        "{refused}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_that_do_not_read_hold_nobody_up() {
    let source = daemon(None, None).await;
    let target = daemon(Some(&source.pool), None).await;
    let mut prefill = engine(&source, "p").await;
    let mut decode = engine(&target, "d").await;
    // Each is told at length what is wrong with its hello: more than lies between two ends that do not read.
    let digest = "x".repeat(1 << 20);
    let hello =
        json!({"type": "hello", "version": 1, "role": "worker", "engine": "x", "inboxPieces": 1,
        "layout": {"blockSize": 1, "blockBytes": 1, "digest": digest}})
        .to_string();
    let mut frame = (hello.len() as u32).to_le_bytes().to_vec();
    frame.extend_from_slice(hello.as_bytes());
    let inbox = memfd_create("inbox", MemfdFlags::ALLOW_SEALING).expect("memfd");
    let mut strangers = Vec::new();
    let all_answered = async {
        for _ in 0..8 {
            let stream = tokio::net::UnixStream::connect(&target.path).await;
            let mut stream = stream.expect("a daemon");
            let sent = ancillary::send(&stream, &frame, inbox.as_fd(), PATIENCE).await;
            let rest = &frame[sent.expect("sent")..];
            stream.write_all(rest).await.expect("the daemon reads");
            stream.readable().await.expect("an answer");
            strangers.push(stream);
        }
    };
    tokio::time::timeout(PATIENCE, all_answered)
        .await
        .expect("none waits until the one before it has been given up");
    let descriptor = prefill.hand_over("r", 10);
    assert_eq!(decode.take("r", 10, &descriptor)["type"], "loaded");
}

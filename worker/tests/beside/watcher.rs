//! A daemon under test, and what a router would know of it.

use std::collections::BTreeSet;
use std::time::Duration;

use baton_protocol::card::Card;
use baton_protocol::hash::{BlockHash, BlockHasher, HashKey};
use baton_protocol::wire::worker_client::WorkerClient;
use baton_protocol::wire::{self, WatchEvent, watch_event::Event};
use baton_worker::beside::start::{Running, start};
use baton_worker::config::WorkerConfig;
use baton_worker::serve::{Addresses, Start};
use serde_json::json;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use crate::double::BLOCK;

/// Whatever is waited for in a test takes a second or two; a test that waits this long has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn config(port: u16, folder: Option<&std::path::Path>) -> WorkerConfig {
    let mut config = json!({
        "name": "d0", "pool": "decode", "role": "Decode", "revision": "r",
        "model": {"name": "tiny", "revision": "m1"},
        "engine": {"type": "VLLM", "url": format!("http://127.0.0.1:{port}"), "blockSize": BLOCK, "startTimeoutSeconds": 60},
    });
    if let Some(folder) = folder {
        config["model"]["source"] = json!({"path": folder});
    }
    let config: WorkerConfig = serde_json::from_value(config).unwrap();
    config.check().unwrap();
    config
}

pub(crate) async fn daemon(config: WorkerConfig) -> Running {
    let key = HashKey::from_bytes(&[1; 32]);
    start(Start::new(config, Addresses::loopback(), key))
        .await
        .unwrap()
}

pub(crate) fn client(daemon: &Running) -> WorkerClient<Channel> {
    let url = format!("http://{}", daemon.control_address());
    WorkerClient::new(Endpoint::from_shared(url).unwrap().connect_lazy())
}

/// `GET` at the daemon's admin port: status and body.
pub(crate) async fn get(daemon: &Running, path: &str) -> (u16, String) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(daemon.admin_address())
        .await
        .unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: d0\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer))
        .await
        .unwrap()
        .unwrap();
    let status = answer[9..12].parse().unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap().1.to_owned();
    (status, body)
}

/// What a router holds of the worker.
pub(crate) struct Router {
    stream: Streaming<WatchEvent>,
    pub(crate) incarnation: u64,
    pub(crate) card: Card,
    pub(crate) blocks: BTreeSet<BlockHash>,
    pub(crate) load: wire::Load,
    pub(crate) draining: bool,
    complete: bool,
}

impl Router {
    /// Watches as soon as there is a card, and reads the first snapshot.
    pub(crate) async fn watch(daemon: &Running) -> Self {
        let mut client = client(daemon);
        let watch = async {
            loop {
                match client.watch(wire::WatchRequest::default()).await {
                    Ok(answer) => return answer.into_inner(),
                    Err(status) => {
                        assert_eq!(status.code(), tonic::Code::Unavailable, "{status}");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                }
            }
        };
        let mut stream = tokio::time::timeout(PATIENCE, watch).await.unwrap();
        let first = stream.message().await.unwrap().unwrap();
        let Some(Event::Card(card)) = first.event else {
            panic!("the card comes first");
        };
        let mut router = Self {
            stream,
            incarnation: first.incarnation,
            card: Card::from_json(&card.json).unwrap(),
            blocks: BTreeSet::new(),
            load: wire::Load::default(),
            draining: false,
            complete: false,
        };
        router
            .until("the snapshot is whole", |router| router.complete)
            .await;
        router
    }

    /// Reads on until something holds.
    pub(crate) async fn until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) {
        let reading = async {
            while !holds(self) {
                assert!(self.read().await, "the stream has ended before {what}");
            }
        };
        tokio::time::timeout(PATIENCE, reading)
            .await
            .unwrap_or_else(|_| panic!("waited for in vain: {what}"));
    }

    /// Reads on until the daemon ends the stream.
    pub(crate) async fn ended(&mut self) {
        let reading = async { while self.read().await {} };
        tokio::time::timeout(PATIENCE, reading)
            .await
            .expect("the stream ends with the server's life");
    }

    async fn read(&mut self) -> bool {
        let Ok(Some(message)) = self.stream.message().await else {
            return false;
        };
        assert_eq!(message.incarnation, self.incarnation);
        match message.event.unwrap() {
            Event::Card(_) => panic!("one card for one life"),
            Event::SnapshotBegin(_) => self.blocks.clear(),
            Event::SnapshotEnd(_) => self.complete = true,
            Event::Stored(stored) => self
                .blocks
                .extend(BlockHash::unpack(&stored.hashes).unwrap()),
            Event::Removed(removed) => {
                for hash in BlockHash::unpack(&removed.hashes).unwrap() {
                    assert!(self.blocks.remove(&hash), "removed what was not there");
                }
            }
            Event::Cleared(_) => self.blocks.clear(),
            Event::Load(load) => self.load = load,
            Event::Coefficients(_) => {}
            Event::Draining(draining) => self.draining = draining.draining,
        }
        true
    }

    /// Blocks of a prompt that it would credit.
    pub(crate) fn credit(&self, tokens: &[u32]) -> usize {
        let key = HashKey::from_bytes(&[1; 32]);
        let hashes =
            BlockHasher::new(&key, &self.card.kv_identity, "").chain(tokens, BLOCK as usize);
        hashes
            .iter()
            .take_while(|hash| self.blocks.contains(hash))
            .count()
    }
}

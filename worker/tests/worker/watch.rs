//! Watch: card, snapshot, changes without a hole, resuming, load that names the admissions it counts.

use std::collections::BTreeSet;

use baton_protocol::card::{Card, Role};
use baton_protocol::hash::{BlockHash, BlockHasher, HashKey};
use baton_protocol::wire::{self, WatchEvent, watch_event::Event};
use tonic::Streaming;

use crate::harness::{PATIENCE, Run, Worker, config, simulated, worker};

async fn watch(worker: &Worker, place: Option<(u64, u64)>) -> Streaming<WatchEvent> {
    let request = wire::WatchRequest {
        incarnation: place.map(|(incarnation, _)| incarnation),
        sequence: place.map(|(_, sequence)| sequence),
    };
    worker
        .client
        .clone()
        .watch(request)
        .await
        .unwrap()
        .into_inner()
}

/// What a router holds of one worker; panics where a router would see a hole.
#[derive(Debug, Default)]
struct Mirror {
    card: Option<Card>,
    incarnation: u64,
    sequence: Option<u64>,
    blocks: BTreeSet<BlockHash>,
    snapshots: u32,
    complete: bool,
    load: Option<wire::Load>,
    coefficients: u32,
    draining: bool,
}

impl Mirror {
    async fn read(&mut self, stream: &mut Streaming<WatchEvent>) {
        let message = tokio::time::timeout(PATIENCE, stream.message())
            .await
            .expect("an event comes")
            .unwrap()
            .expect("the stream goes on");
        self.incarnation = message.incarnation;
        let event = message.event.unwrap();
        let counts = matches!(
            event,
            Event::Stored(_) | Event::Removed(_) | Event::Cleared(_)
        );
        if let (Some(last), false) = (self.sequence, matches!(event, Event::SnapshotBegin(_))) {
            assert_eq!(message.sequence, last + u64::from(counts), "{event:?}");
        }
        if self.sequence.is_some() || matches!(event, Event::SnapshotBegin(_)) {
            self.sequence = Some(message.sequence);
        }
        match event {
            Event::Card(card) => self.card = Some(Card::from_json(&card.json).unwrap()),
            Event::SnapshotBegin(_) => {
                self.snapshots += 1;
                self.complete = false;
                self.blocks.clear();
            }
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
            Event::Load(load) => self.load = Some(load),
            Event::Coefficients(_) => self.coefficients += 1,
            Event::Draining(draining) => self.draining = draining.draining,
        }
    }

    async fn until(&mut self, stream: &mut Streaming<WatchEvent>, reached: impl Fn(&Self) -> bool) {
        while !reached(self) {
            self.read(stream).await;
        }
    }
}

fn hashes(worker: &Worker, tokens: &[u32]) -> Vec<BlockHash> {
    let key = HashKey::from_bytes(&[1; 32]);
    BlockHasher::new(&key, &worker.identity(), "").chain(tokens, 16)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_sees_the_card_the_cache_and_every_change() {
    let worker = worker(config("w")).await;
    let run = Run::new("r", 50, 20);
    let prompt = hashes(&worker, &run.tokens);
    let mut stream = watch(&worker, None).await;
    let mut mirror = Mirror::default();
    mirror.until(&mut stream, |mirror| mirror.complete).await;
    let card = mirror.card.clone().unwrap();
    assert_eq!(card.worker.as_str(), "w");
    assert!(card.can(Role::Prefill) && card.can(Role::Decode));
    assert_eq!(card.capacity.blocks, 256);
    assert!(mirror.blocks.is_empty());

    let tokens = worker.generate(&run).await;
    let whole = hashes(&worker, &[run.tokens.as_slice(), &tokens].concat());
    assert_eq!(whole[..3], prompt[..]);
    mirror
        .until(&mut stream, |mirror| mirror.blocks.contains(&whole[3]))
        .await;
    assert_eq!(mirror.blocks, whole.iter().copied().collect());
    assert_eq!(mirror.snapshots, 1);
    assert!(mirror.coefficients >= 1);

    // Resumed: only what came since. A place that is not there, or of another process: all of it again.
    let place = mirror.sequence.unwrap();
    drop(stream);
    worker.generate(&Run::new("other", 33, 2)).await;
    let mut stream = watch(&worker, Some((mirror.incarnation, place))).await;
    mirror
        .until(&mut stream, |mirror| mirror.blocks.len() == whole.len() + 2)
        .await;
    assert_eq!(mirror.snapshots, 1);
    for place in [
        (mirror.incarnation, place + 1000),
        (mirror.incarnation + 1, place),
    ] {
        let mut stream = watch(&worker, Some(place)).await;
        let mut anew = Mirror::default();
        anew.until(&mut stream, |mirror| mirror.complete).await;
        assert!(anew.card.is_some());
        assert_eq!(anew.blocks, mirror.blocks);
    }
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evictions_are_told() {
    let mut small = config("w");
    small.kv_pool.blocks = Some(12);
    let worker = worker(small).await;
    let mut stream = watch(&worker, None).await;
    let mut mirror = Mirror::default();
    let last = Run::new("r5", 90, 2);
    for number in 0..5 {
        worker
            .generate(&Run::new(&format!("r{number}"), 90, 2))
            .await;
    }
    worker.generate(&last).await;
    let expected = hashes(&worker, &last.tokens);
    mirror
        .until(&mut stream, |mirror| {
            expected.iter().all(|hash| mirror.blocks.contains(hash)) && mirror.blocks.len() <= 12
        })
        .await;
    let (_, cached) = worker.running.pool().snapshot();
    mirror
        .until(&mut stream, |mirror| {
            mirror.blocks == cached.iter().copied().collect()
        })
        .await;
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn load_says_what_runs_and_drain_is_told() {
    let worker = worker(simulated("w")).await;
    let mut stream = watch(&worker, None).await;
    let mut mirror = Mirror::default();
    let run = Run::new("r", 300, 3000);
    let mut decode = worker.decode(run.decode(&worker, false)).await;
    let admission = decode
        .until(|event| match event {
            wire::decode_event::Event::Reserved(admission) => Some(*admission),
            _ => None,
        })
        .await;
    let counted = |mirror: &Mirror| {
        mirror
            .load
            .filter(|load| load.load_sequence >= admission.load_sequence)
    };
    mirror
        .until(&mut stream, |mirror| counted(mirror).is_some())
        .await;
    let load = counted(&mirror).unwrap();
    assert!(
        load.queued_tokens > 0 || load.running_sequences == 1,
        "{load:?}"
    );
    assert_eq!(load.blocks.unwrap().total, 256);
    mirror
        .until(&mut stream, |mirror| {
            mirror
                .load
                .is_some_and(|load| load.running_sequences == 1 && load.context_tokens > 300)
        })
        .await;
    worker
        .client
        .clone()
        .drain(wire::DrainRequest { undo: false })
        .await
        .unwrap();
    mirror
        .until(&mut stream, |mirror| {
            mirror.draining && mirror.load.is_some_and(|load| load.draining)
        })
        .await;
    drop(decode);
    mirror
        .until(&mut stream, |mirror| {
            mirror
                .load
                .is_some_and(|load| load.running_sequences == 0 && load.blocks.unwrap().active == 0)
        })
        .await;
    worker.end().await;
}

#[tokio::test]
async fn artifacts_are_served_by_the_digest_in_the_card() {
    let worker = worker(config("w")).await;
    let filter = &worker.running.card().route_filter;
    for digest in [&filter.tokenizer, &filter.chat_template] {
        let digest = digest.known().unwrap();
        let request = wire::ArtifactRequest {
            digest: digest.clone(),
        };
        let mut stream = worker
            .client
            .clone()
            .artifact(request)
            .await
            .unwrap()
            .into_inner();
        let mut file = Vec::new();
        while let Some(chunk) = stream.message().await.unwrap() {
            file.extend_from_slice(&chunk.data);
        }
        assert_eq!(blake3::hash(&file).to_hex().to_string(), *digest);
    }
    let unknown = wire::ArtifactRequest {
        digest: "0".repeat(64),
    };
    let status = worker.client.clone().artifact(unknown).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::NotFound);
    worker.end().await;
}

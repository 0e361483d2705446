//! Hand-offs between two pools in one process: what arrives, what is never used, and what is left behind.

mod failures;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use baton_protocol::hash::HashKey;
use baton_protocol::ids::{Incarnation, RunId, TransferId, WorkerId};
use futures::future::BoxFuture;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::client::{Grant, LeaseClient};
use super::*;
use crate::kv::clock::{Clock, ManualClock, MonotonicClock};
use crate::kv::lease::LeaseOpen;
use crate::kv::{CacheScope, Geometry, KvPool, PoolConfig, Reserve};
use crate::transport::fault::{Fault, FaultySource};
use crate::transport::local::LocalTransport;
use crate::transport::{BlockSource, FetchRequest};

const BLOCK_SIZE: usize = 4;

fn pool(layout: u64, clock: Arc<dyn Clock>) -> KvPool {
    let config = PoolConfig {
        geometry: Geometry {
            block_size: BLOCK_SIZE,
            bytes_per_token: 64,
        },
        blocks: 16,
        kv_identity: "tiny".to_owned(),
        layout,
        hash_key: HashKey::from_bytes(&[1; 32]),
        event_capacity: 1024,
    };
    KvPool::new(config, u64::MAX, clock).expect("a small pool")
}

fn tokens(count: u32) -> Vec<u32> {
    (10..10 + count).collect()
}

fn content(token: u32, index: usize) -> Vec<u8> {
    (0..BLOCK_SIZE * 64)
        .map(|at| (at as u32 * 3 + token + 11 * index as u32) as u8)
        .collect()
}

/// Two workers: one that prefills, one that reads.
struct Pair {
    source: KvPool,
    reader: KvPool,
    clock: Arc<ManualClock>,
    transport: Arc<LocalTransport>,
    stop: CancellationToken,
    leases: AtomicU32,
}

/// A prefill under way at the source.
struct Prefill {
    reservation: Reservation,
    tokens: Vec<u32>,
    handoff: Handoff,
}

impl Pair {
    async fn new(layout: u64, reader_layout: u64, fault: Option<Fault>) -> Self {
        let clock = Arc::new(ManualClock::default());
        let source = pool(layout, clock.clone());
        Self::over(source, pool(reader_layout, clock.clone()), clock, fault).await
    }

    async fn over(
        source: KvPool,
        reader: KvPool,
        clock: Arc<ManualClock>,
        fault: Option<Fault>,
    ) -> Self {
        let transport = Arc::new(LocalTransport::new());
        let stop = CancellationToken::new();
        let mut served: Arc<dyn BlockSource> = Arc::new(source.clone());
        if let Some(fault) = fault {
            served = Arc::new(FaultySource::new(served, fault));
        }
        transport
            .listen("source", served, stop.clone())
            .await
            .expect("a new name");
        Self {
            source,
            reader,
            clock,
            transport,
            stop,
            leases: AtomicU32::new(0),
        }
    }

    async fn plain() -> Self {
        Self::new(1, 1, None).await
    }

    fn prefill(&self, count: u32, skip_blocks: u32) -> Prefill {
        self.prefill_for(count, skip_blocks, 1000)
    }

    fn prefill_for(&self, count: u32, skip_blocks: u32, duration: u64) -> Prefill {
        let tokens = tokens(count);
        let mut reservation = reserved(&self.source, &tokens);
        let open = LeaseOpen {
            // Ids are never used twice.
            id: LeaseId([self.leases.fetch_add(1, Ordering::SeqCst) as u8; 16]),
            run: RunId::from("run"),
            duration,
            skip_blocks,
        };
        let opened = self
            .source
            .open_lease(&mut reservation, &open)
            .expect("a new lease");
        Prefill {
            reservation,
            handoff: Handoff {
                lease: open.id,
                generation: opened.generation,
                skip_blocks,
                tokens: count,
                transport: self.transport.clone(),
                address: "source".to_owned(),
            },
            tokens,
        }
    }

    /// A prefill that is done.
    fn sealed(&self, count: u32, skip_blocks: u32) -> Handoff {
        let mut prefill = self.prefill(count, skip_blocks);
        prefill.compute(&self.source, count as usize / BLOCK_SIZE);
        prefill.seal(&self.source)
    }

    async fn taken(
        &self,
        handoff: &Handoff,
        count: u32,
    ) -> (Reservation, Result<Received, IntakeFailed>) {
        self.taken_by(handoff, &self.source, &tokens(count)).await
    }

    async fn taken_by(
        &self,
        handoff: &Handoff,
        client: &dyn LeaseClient,
        tokens: &[u32],
    ) -> (Reservation, Result<Received, IntakeFailed>) {
        let reservation = reserved(&self.reader, tokens);
        take(handoff, &options(), client, tokens, reservation, &mut || {}).await
    }

    /// Nothing of a hand-off that failed is used, and the source keeps nothing.
    fn assert_unused(&self, reservation: Reservation) {
        assert_eq!(reservation.completed_blocks(), reservation.cached_blocks());
        drop(reservation);
        assert_eq!(self.reader.counts().free, 16, "{:?}", self.reader.counts());
        assert_eq!(self.reader.snapshot().1, []);
        assert_eq!(self.source.lease_counts().total(), 0);
        assert_eq!(self.source.counts().leased, 0);
    }
}

impl Prefill {
    fn compute(&mut self, source: &KvPool, blocks: usize) {
        for index in self.reservation.completed_blocks()..blocks {
            self.write(source, index);
            let tokens = &self.tokens[index * BLOCK_SIZE..][..BLOCK_SIZE];
            source
                .complete_block(&mut self.reservation, index, tokens)
                .expect("in order");
        }
    }

    fn write(&self, source: &KvPool, index: usize) {
        let mut bytes = source.store().write(self.reservation.blocks()[index]);
        bytes.copy_from_slice(&content(self.tokens[0], index));
    }

    fn seal(self, source: &KvPool) -> Handoff {
        if !self.tokens.len().is_multiple_of(BLOCK_SIZE) {
            self.write(source, self.tokens.len() / BLOCK_SIZE);
        }
        source
            .seal(&self.reservation, self.tokens.len())
            .expect("complete");
        self.handoff
    }
}

fn reserved(pool: &KvPool, tokens: &[u32]) -> Reservation {
    pool.reserve(&Reserve {
        tokens,
        scope: &CacheScope::default(),
        room: 1,
        leave_last: false,
    })
    .expect("room")
}

fn options() -> IntakeOptions {
    IntakeOptions {
        reader: Reader {
            transfer: TransferId::from("t"),
            worker: WorkerId::from("d"),
            incarnation: Incarnation(1),
        },
        checksum: ChecksumMode::Always,
        timeout: Duration::from_secs(20),
        retries: 2,
    }
}

#[tokio::test]
async fn kv_arrives_and_can_be_used_and_found() {
    let pair = Pair::plain().await;
    let handoff = pair.sealed(10, 0);
    let (reservation, received) = pair.taken(&handoff, 10).await;
    let received = received.expect("verified");
    assert_eq!((received.blocks, received.bytes), (3, 3 * 256));
    assert_eq!((received.transport, received.retries), ("Local", 0));
    assert!(received.exposed_milliseconds <= received.total_milliseconds);
    assert_eq!(reservation.completed_blocks(), 2);
    for index in 0..3 {
        let block = reservation.blocks()[index];
        assert!(
            *pair.reader.store().read(block) == content(10, index)[..],
            "block {index}"
        );
    }
    assert_eq!(pair.reader.snapshot().1, pair.source.snapshot().1);
    assert_eq!(pair.source.counts().leased, 0, "the source is told");
    drop(reservation);
    assert_eq!(
        pair.reader
            .cached_tokens(&tokens(10), &CacheScope::default()),
        8
    );
}

#[tokio::test]
async fn nothing_that_an_earlier_owner_left_is_handed_over_behind_the_last_token() {
    let pair = Pair::plain().await;
    // Every block of the source has been somebody else's.
    let everything = reserved(&pair.source, &tokens(63));
    for block in everything.blocks() {
        pair.source.store().write(*block).fill(0xaa);
    }
    drop(everything);
    let mut prefill = pair.prefill(10, 0);
    prefill.compute(&pair.source, 2);
    let last = prefill.reservation.blocks()[2];
    pair.source.store().write(last)[..2 * 64].fill(7);
    pair.source
        .seal(&prefill.reservation, 10)
        .expect("complete");
    let (reservation, received) = pair.taken(&prefill.handoff, 10).await;
    received.expect("verified");
    let bytes = pair.reader.store().read(reservation.blocks()[2]);
    let (filled, rest) = bytes.split_at(2 * 64);
    assert!(filled.iter().all(|byte| *byte == 7));
    assert!(rest.iter().all(|byte| *byte == 0), "{rest:?}");
}

#[tokio::test]
async fn received_kv_can_be_handed_on() {
    let pair = Pair::plain().await;
    let (reservation, received) = pair.taken(&pair.sealed(8, 0), 8).await;
    received.expect("verified");
    drop(reservation);
    // Back to where it came from, whose cache has forgotten it: the checksum travels with the block.
    pair.source.clear_cache();
    let back = Pair::over(
        pair.reader.clone(),
        pair.source.clone(),
        pair.clock.clone(),
        None,
    )
    .await;
    let handoff = back.sealed(8, 0);
    let (reservation, received) = back.taken(&handoff, 8).await;
    assert_eq!(received.expect("verified").blocks, 2);
    assert_eq!(reservation.completed_blocks(), 2);
}

#[tokio::test]
async fn only_what_the_reader_lacks_is_moved() {
    let pair = Pair::plain().await;
    let (first, received) = pair.taken(&pair.sealed(8, 0), 8).await;
    received.expect("verified");
    drop(first);
    let mut prefill = pair.prefill(14, 2);
    prefill.compute(&pair.source, 3);
    let handoff = prefill.seal(&pair.source);
    let options = IntakeOptions {
        reader: Reader {
            transfer: TransferId::from("t2"),
            ..options().reader
        },
        ..options()
    };
    let reservation = reserved(&pair.reader, &tokens(14));
    assert_eq!(reservation.cached_blocks(), 2);
    let (reservation, received) = take(
        &handoff,
        &options,
        &pair.source,
        &tokens(14),
        reservation,
        &mut || {},
    )
    .await;
    assert_eq!(received.expect("verified").blocks, 2);
    assert_eq!(reservation.completed_blocks(), 3);
}

#[tokio::test]
async fn nothing_to_move_is_a_hand_off_as_well() {
    let pair = Pair::plain().await;
    let handoff = pair.sealed(8, 2);
    let cached = reserved(&pair.reader, &tokens(8));
    let (mut cached, pool) = (cached, pair.reader.clone());
    for index in 0..2 {
        let block = &tokens(8)[index * BLOCK_SIZE..][..BLOCK_SIZE];
        pool.complete_block(&mut cached, index, block)
            .expect("in order");
    }
    let (reservation, received) = pair.taken(&handoff, 8).await;
    let received = received.expect("nothing to doubt");
    assert_eq!((received.blocks, received.bytes), (0, 0));
    assert_eq!(received.exposed_milliseconds, 0.0);
    assert_eq!(reservation.completed_blocks(), 2);
}

#[tokio::test]
async fn moving_overlaps_with_computing() {
    let pair = Pair::plain().await;
    let mut prefill = pair.prefill(12, 0);
    let handoff = prefill.handoff.clone();
    let granted = Notify::new();
    let reservation = reserved(&pair.reader, &tokens(12));
    let table = reservation.blocks().to_vec();
    let (options, tokens) = (options(), tokens(12));
    let mut tell = || granted.notify_one();
    let take = take(
        &handoff,
        &options,
        &pair.source,
        &tokens,
        reservation,
        &mut tell,
    );
    let compute = async {
        granted.notified().await;
        prefill.compute(&pair.source, 1);
        // The first block is in its place before the second is computed.
        while *pair.reader.store().read(table[0]) != content(10, 0)[..] {
            tokio::task::yield_now().await;
        }
        assert_eq!(
            pair.reader.snapshot().1,
            [],
            "not usable before all of it is accepted"
        );
        prefill.compute(&pair.source, 3);
        prefill.seal(&pair.source);
    };
    let ((reservation, received), ()) = tokio::join!(take, compute);
    received.expect("verified");
    assert_eq!(reservation.completed_blocks(), 3);
}

#[tokio::test]
async fn a_reader_that_gives_up_leaves_nothing_behind() {
    let pair = Pair::plain().await;
    let mut prefill = pair.prefill(12, 0);
    let handoff = prefill.handoff.clone();
    let granted = Notify::new();
    let reservation = reserved(&pair.reader, &tokens(12));
    let (options, tokens) = (options(), tokens(12));
    {
        let mut tell = || granted.notify_one();
        let take = take(
            &handoff,
            &options,
            &pair.source,
            &tokens,
            reservation,
            &mut tell,
        );
        let compute = async {
            granted.notified().await;
            prefill.compute(&pair.source, 1);
        };
        tokio::select! {
            (_, ended) = take => panic!("not sealed yet: {ended:?}"),
            () = compute => {}
        }
    }
    assert_eq!(pair.reader.counts().free, 16);
    drop(prefill);
    assert_eq!(pair.source.counts().leased, 0);
}

/// Counts renewals and tells of them.
struct Counting {
    pool: KvPool,
    renewals: AtomicU32,
    renewed: Notify,
}

impl LeaseClient for Counting {
    fn claim<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        reader: &'a Reader,
    ) -> BoxFuture<'a, Result<Grant, CallFailed>> {
        LeaseClient::claim(&self.pool, lease, generation, reader)
    }

    fn renew<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        transfer: &'a TransferId,
    ) -> BoxFuture<'a, Result<Grant, CallFailed>> {
        self.renewals.fetch_add(1, Ordering::SeqCst);
        self.renewed.notify_one();
        LeaseClient::renew(&self.pool, lease, generation, transfer)
    }

    fn complete<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        transfer: &'a TransferId,
        verified: bool,
    ) -> BoxFuture<'a, Result<Completion, CallFailed>> {
        self.pool.complete(lease, generation, transfer, verified)
    }
}

#[tokio::test(start_paused = true)]
async fn a_prefill_longer_than_its_lease_is_kept_alive_by_its_reader() {
    let clock = Arc::new(MonotonicClock::start());
    let pair = Pair::over(
        pool(1, clock.clone()),
        pool(1, clock),
        Arc::new(ManualClock::default()),
        None,
    )
    .await;
    // Four renewals pass a third of the lease each: without them it would have ended.
    let mut prefill = pair.prefill_for(8, 0, 600);
    let handoff = prefill.handoff.clone();
    let client = Counting {
        pool: pair.source.clone(),
        renewals: AtomicU32::new(0),
        renewed: Notify::new(),
    };
    let tokens = tokens(8);
    let compute = async {
        while client.renewals.load(Ordering::SeqCst) < 4 {
            client.renewed.notified().await;
        }
        prefill.compute(&pair.source, 2);
        prefill.seal(&pair.source);
    };
    let ((_, received), ()) = tokio::join!(pair.taken_by(&handoff, &client, &tokens), compute);
    let received = received.expect("renewed in time");
    assert!(received.total_milliseconds > 600.0, "{received:?}");
    assert!(
        received.exposed_milliseconds < received.total_milliseconds / 2.0,
        "{received:?}"
    );
}

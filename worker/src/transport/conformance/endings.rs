//! Conformance: what is not served, and how a fetch ends early.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use baton_protocol::failure::HandoffFailure;
use baton_protocol::header::BlockHeader;
use baton_protocol::ids::{Generation, LeaseId, RunId, TransferId};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Collected, DURATION, Fixture, Leased, wrong};
use crate::kv::KvPool;
use crate::kv::lease::{Gone, Next};
use crate::kv::store::BlockId;
use crate::transport::memory::Arena;
use crate::transport::{BlockSource, FetchRequest, TransportError};

/// A free address of the same kind.
pub(super) fn another(address: &str) -> String {
    match address.rsplit_once(':') {
        Some((host, _)) => format!("{host}:0"),
        None => format!("{address}-another"),
    }
}

async fn refused(fixture: &Fixture, request: &FetchRequest) -> TransportError {
    let (mut sink, _arrivals) = Collected::new(request);
    let error = fixture
        .transport
        .fetch(request, &mut sink)
        .await
        .expect_err("not served");
    assert!(sink.blocks.is_empty(), "not a block came");
    error
}

fn reason(error: &TransportError) -> Gone {
    match error {
        TransportError::Gone(gone) => *gone,
        other => panic!("not about the lease: {other}"),
    }
}

fn sealed(fixture: &Fixture) -> Leased {
    let mut leased = fixture.leased(1, 8, 0, "t");
    fixture.seal(&mut leased);
    leased
}

pub(super) async fn nothing_without_a_claim(fixture: Fixture) {
    let mut leased = fixture.opened(1, 8, 0);
    fixture.seal(&mut leased);
    assert_eq!(
        reason(&refused(&fixture, &leased.request).await),
        Gone::NotClaimed
    );
    fixture.end().await;
}

pub(super) async fn nothing_for_another_transfer(fixture: Fixture) {
    let leased = sealed(&fixture);
    let mut request = leased.request.clone();
    request.transfer = TransferId::from("thief");
    assert_eq!(reason(&refused(&fixture, &request).await), Gone::Claimed);
    fixture.end().await;
}

pub(super) async fn nothing_for_another_generation_or_lease(fixture: Fixture) {
    let leased = sealed(&fixture);
    let mut request = leased.request.clone();
    request.generation = wrong(request.generation);
    assert_eq!(
        reason(&refused(&fixture, &request).await),
        Gone::WrongGeneration
    );
    let mut request = leased.request.clone();
    request.lease = LeaseId([99; 16]);
    assert_eq!(reason(&refused(&fixture, &request).await), Gone::Unknown);
    fixture.end().await;
}

pub(super) async fn nothing_before_the_first_published_block(fixture: Fixture) {
    let mut leased = fixture.leased(1, 8, 1, "t");
    fixture.seal(&mut leased);
    let mut request = leased.request.clone();
    request.first_block = 0;
    assert_eq!(reason(&refused(&fixture, &request).await), Gone::OutOfRange);
    fixture.end().await;
}

pub(super) async fn nothing_for_another_layout_or_size(fixture: Fixture) {
    let leased = sealed(&fixture);
    let mut request = leased.request.clone();
    request.layout += 1;
    let error = refused(&fixture, &request).await;
    assert_eq!(error.failure(), HandoffFailure::LayoutMismatch, "{error}");
    let mut request = leased.request.clone();
    request.block_bytes *= 2;
    let error = refused(&fixture, &request).await;
    assert_eq!(error.failure(), HandoffFailure::LayoutMismatch, "{error}");
    fixture.end().await;
}

pub(super) async fn nothing_after_a_release(fixture: Fixture) {
    let leased = sealed(&fixture);
    assert!(
        fixture
            .pool
            .release_lease(leased.request.lease, &RunId::from("run"))
    );
    assert_eq!(
        reason(&refused(&fixture, &leased.request).await),
        Gone::Released
    );
    fixture.end().await;
}

/// Fetches until the first block has come, then does `then`, and returns how the fetch ended.
async fn after_the_first_block(
    fixture: &Fixture,
    leased: &mut Leased,
    then: impl FnOnce(),
) -> TransportError {
    fixture.publish(leased, 0);
    let (mut sink, mut arrivals) = Collected::new(&leased.request);
    let fetch = fixture.transport.fetch(&leased.request, &mut sink);
    let event = async {
        assert_eq!(arrivals.recv().await, Some(0));
        then();
    };
    let (ended, ()) = tokio::join!(fetch, event);
    assert_eq!(sink.indices(), [0]);
    ended.expect_err("ended early")
}

pub(super) async fn a_release_ends_a_waiting_reader(fixture: Fixture) {
    let mut leased = fixture.leased(1, 12, 0, "t");
    let lease = leased.request.lease;
    let pool = fixture.pool.clone();
    let error = after_the_first_block(&fixture, &mut leased, || {
        pool.release_lease(lease, &RunId::from("run"));
    })
    .await;
    assert_eq!(reason(&error), Gone::Released);
    fixture.end().await;
}

pub(super) async fn an_expiry_in_the_middle_ends_the_reader(fixture: Fixture) {
    let mut leased = fixture.leased(1, 12, 0, "t");
    let (pool, clock) = (fixture.pool.clone(), fixture.clock.clone());
    let error = after_the_first_block(&fixture, &mut leased, || {
        clock.advance(DURATION);
        assert_eq!(pool.reap().leases, 1);
    })
    .await;
    assert_eq!(reason(&error), Gone::Expired);
    fixture.end().await;
}

pub(super) async fn an_expired_lease_is_not_served_before_the_reaper_came(fixture: Fixture) {
    let leased = sealed(&fixture);
    fixture.clock.advance(DURATION);
    assert_eq!(
        reason(&refused(&fixture, &leased.request).await),
        Gone::Expired
    );
    fixture.end().await;
}

pub(super) async fn a_prefill_that_fails_ends_a_waiting_reader(fixture: Fixture) {
    let leased = fixture.leased(1, 12, 0, "t");
    let request = leased.request.clone();
    let (mut sink, _arrivals) = Collected::new(&request);
    let fetch = fixture.transport.fetch(&request, &mut sink);
    let fail = async {
        tokio::task::yield_now().await;
        drop(leased.reservation);
    };
    let (ended, ()) = tokio::join!(fetch, fail);
    assert_eq!(reason(&ended.expect_err("never sealed")), Gone::Cancelled);
    fixture.end().await;
}

pub(super) async fn a_source_that_dies_ends_its_readers(fixture: Fixture) {
    let mut leased = fixture.leased(1, 12, 0, "t");
    let stop = fixture.stop.clone();
    let error = after_the_first_block(&fixture, &mut leased, || stop.cancel()).await;
    assert_eq!(error.failure(), HandoffFailure::SourceLost, "{error}");
    assert!(error.is_retryable());
    fixture.end().await;
}

pub(super) async fn a_reader_that_dies_leaves_nothing_beyond_the_lease(fixture: Fixture) {
    let mut leased = fixture.leased(1, 12, 0, "t");
    fixture.publish(&mut leased, 0);
    {
        let (mut sink, mut arrivals) = Collected::new(&leased.request);
        let mut fetch = fixture.transport.fetch(&leased.request, &mut sink);
        tokio::select! {
            ended = &mut fetch => panic!("not sealed yet: {ended:?}"),
            first = arrivals.recv() => assert_eq!(first, Some(0)),
        }
    }
    fixture.seal(&mut leased);
    drop(leased.reservation);
    let counts = fixture.pool.counts();
    assert_eq!(
        (counts.leased, counts.active),
        (3, 0),
        "held until the lease ends"
    );
    fixture.clock.advance(DURATION);
    fixture.until_free().await;
    fixture.end().await;
}

/// A source whose lease ends, and whose block is somebody else's, just before the bytes are read.
#[derive(Debug)]
struct EndsBetween {
    pool: KvPool,
    reused: AtomicBool,
}

impl BlockSource for EndsBetween {
    fn block_bytes(&self) -> usize {
        BlockSource::block_bytes(&self.pool)
    }

    fn layout(&self) -> u64 {
        BlockSource::layout(&self.pool)
    }

    fn watch(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
    ) -> Result<watch::Receiver<u64>, Gone> {
        self.pool.watch(lease, generation, transfer)
    }

    fn next(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        index: u32,
    ) -> Next {
        self.pool.next(lease, generation, transfer, index)
    }

    fn header_before(&self, block: BlockId) -> BlockHeader {
        let header = self.pool.header_before(block);
        self.pool.cancel_run(&RunId::from("run"));
        self.pool.store().write(block).fill(SECRET);
        self.reused.store(true, Ordering::SeqCst);
        header
    }

    fn header_after(&self, block: BlockId) -> BlockHeader {
        self.pool.header_after(block)
    }

    fn bytes(
        &self,
        block: BlockId,
        read: &mut dyn FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        self.pool.bytes(block, read)
    }

    fn arena(&self) -> Option<&Arena> {
        self.pool.arena()
    }
}

const SECRET: u8 = 0xee;

pub(super) async fn bytes_of_whoever_has_the_block_next_never_leave(fixture: Fixture) {
    let mut leased = fixture.leased(1, 8, 0, "t");
    fixture.seal(&mut leased);
    let stop = CancellationToken::new();
    let source = Arc::new(EndsBetween {
        pool: fixture.pool.clone(),
        reused: AtomicBool::new(false),
    });
    let listening = fixture
        .transport
        .listen(&another(&fixture.address), source.clone(), stop.clone())
        .await
        .expect("a free address");
    let serving = tokio::spawn(listening.run);
    leased.request.address = listening.address;
    let (mut sink, _arrivals) = Collected::new(&leased.request);
    fixture
        .transport
        .fetch(&leased.request, &mut sink)
        .await
        .expect_err("the lease has ended");
    assert!(source.reused.load(Ordering::SeqCst), "the case took place");
    assert!(sink.blocks.is_empty());
    assert!(!sink.buffer.contains(&SECRET), "not a byte of it left");
    stop.cancel();
    serving.await.expect("no panic");
    fixture.end().await;
}

pub(super) async fn a_sink_that_refuses_ends_the_fetch(fixture: Fixture) {
    let mut leased = fixture.leased(1, 12, 0, "t");
    fixture.seal(&mut leased);
    let (mut sink, _arrivals) = Collected::new(&leased.request);
    sink.refuse_at = Some(1);
    let error = fixture
        .transport
        .fetch(&leased.request, &mut sink)
        .await
        .expect_err("refused");
    assert_eq!(error.failure(), HandoffFailure::HashMismatch);
    assert_eq!(sink.indices(), [0]);
    fixture.end().await;
}

pub(super) async fn nobody_at_the_address_is_a_lost_source(fixture: Fixture) {
    let leased = sealed(&fixture);
    let transport = Arc::clone(&fixture.transport);
    fixture.end().await;
    let (mut sink, _arrivals) = Collected::new(&leased.request);
    let error = transport
        .fetch(&leased.request, &mut sink)
        .await
        .expect_err("nobody there");
    assert_eq!(error.failure(), HandoffFailure::SourceLost, "{error}");
    assert!(
        error.to_string().contains(&leased.request.address),
        "{error}"
    );
}

pub(super) async fn an_address_in_use_is_an_error(fixture: Fixture) {
    let second = fixture
        .transport
        .listen(
            &fixture.address,
            Arc::new(fixture.pool.clone()),
            CancellationToken::new(),
        )
        .await;
    assert_eq!(second.expect_err("in use").kind(), io::ErrorKind::AddrInUse);
    fixture.end().await;
}

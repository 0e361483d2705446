//! Hand-offs that must not be believed, each with its reason.

use std::io;
use std::sync::atomic::AtomicBool;

use baton_protocol::ids::WorkerId;
use parking_lot::Mutex;

use super::*;
use crate::transport::{BlockSink, Listening};

async fn cause(pair: &Pair, handoff: &Handoff, count: u32) -> IntakeFailed {
    let (reservation, result) = pair.taken(handoff, count).await;
    let failed = result.expect_err("not to be believed");
    pair.assert_unused(reservation);
    failed
}

#[tokio::test]
async fn a_flipped_byte_is_never_used() {
    let pair = Pair::new(1, 1, Some(Fault::FlipByte(2))).await;
    let handoff = pair.sealed(12, 0);
    let failed = cause(&pair, &handoff, 12).await;
    assert_eq!(failed.cause, HandoffFailure::ChecksumMismatch);
    assert_eq!(failed.verified_blocks, 1);
    assert_eq!(pair.source.lease_counters().unverified, 1);
}

#[tokio::test]
async fn a_flipped_byte_of_the_partly_filled_block_is_never_used() {
    let pair = Pair::new(1, 1, Some(Fault::FlipByte(3))).await;
    let handoff = pair.sealed(10, 0);
    let failed = cause(&pair, &handoff, 10).await;
    assert_eq!(failed.cause, HandoffFailure::ChecksumMismatch);
    assert_eq!(failed.verified_blocks, 2);
}

#[tokio::test]
async fn memory_that_changes_after_it_was_published_is_never_used() {
    let pair = Pair::plain().await;
    let mut prefill = pair.prefill(8, 0);
    prefill.compute(&pair.source, 2);
    let block = prefill.reservation.blocks()[1];
    pair.source.store().write(block)[100] ^= 0x40;
    let handoff = prefill.seal(&pair.source);
    let failed = cause(&pair, &handoff, 8).await;
    assert_eq!(failed.cause, HandoffFailure::ChecksumMismatch);
}

#[tokio::test]
async fn a_block_reused_under_the_reader_is_never_used() {
    let pair = Pair::new(1, 1, Some(Fault::Reuse(3))).await;
    let handoff = pair.sealed(12, 0);
    let failed = cause(&pair, &handoff, 12).await;
    assert_eq!(failed.cause, HandoffFailure::GenerationMismatch);
    assert_eq!(failed.verified_blocks, 2);
}

#[tokio::test]
async fn kv_of_other_tokens_is_never_used() {
    let pair = Pair::plain().await;
    let handoff = pair.sealed(8, 0);
    let mut others = tokens(8);
    others[5] = 9999;
    let (reservation, result) = pair.taken_by(&handoff, &pair.source, &others).await;
    let failed = result.expect_err("the second block is of other tokens");
    assert_eq!(failed.cause, HandoffFailure::HashMismatch);
    assert_eq!(failed.verified_blocks, 1);
    pair.assert_unused(reservation);
}

#[tokio::test]
async fn another_layout_is_never_used() {
    let pair = Pair::new(1, 2, None).await;
    let handoff = pair.sealed(8, 0);
    assert_eq!(
        cause(&pair, &handoff, 8).await.cause,
        HandoffFailure::LayoutMismatch
    );
}

#[tokio::test]
async fn a_source_that_ends_before_all_blocks_came_is_partial() {
    let pair = Pair::plain().await;
    let mut handoff = pair.sealed(8, 0);
    // It promises more than it seals.
    handoff.tokens = 12;
    let failed = cause(&pair, &handoff, 12).await;
    assert_eq!(failed.cause, HandoffFailure::Partial);
    assert_eq!(failed.verified_blocks, 2);
}

#[tokio::test]
async fn a_source_that_skips_what_the_reader_lacks_is_not_asked() {
    let pair = Pair::plain().await;
    let handoff = pair.sealed(12, 1);
    let (_, result) = pair.taken(&handoff, 12).await;
    assert_eq!(
        result.expect_err("the first block is missing").cause,
        HandoffFailure::Partial
    );
    assert_eq!(pair.source.lease_counts().claimed, 0);
}

#[tokio::test]
async fn a_reservation_without_room_is_refused() {
    let pair = Pair::plain().await;
    let handoff = pair.sealed(12, 0);
    let small = reserved(&pair.reader, &tokens(4));
    let (_, result) = take(
        &handoff,
        &options(),
        &pair.source,
        &tokens(12),
        small,
        &mut || {},
    )
    .await;
    assert!(result.expect_err("no room").message.contains("reserve"));
}

#[tokio::test]
async fn a_lease_that_is_gone_is_said_to_be() {
    let pair = Pair::plain().await;
    let handoff = pair.sealed(8, 0);
    pair.clock.advance(1000);
    pair.source.reap();
    let failed = cause(&pair, &handoff, 8).await;
    assert_eq!(failed.cause, HandoffFailure::LeaseGone);
    assert!(failed.message.contains("expired"), "{failed}");
}

#[tokio::test]
async fn a_second_reader_is_refused() {
    let pair = Pair::plain().await;
    let handoff = pair.sealed(8, 0);
    let other = Reader {
        transfer: TransferId::from("other"),
        worker: WorkerId::from("d1"),
        incarnation: Incarnation(4),
    };
    pair.source
        .claim(handoff.lease, handoff.generation, &other)
        .expect("the first");
    let (_, result) = pair.taken(&handoff, 8).await;
    let failed = result.expect_err("claimed");
    assert_eq!(failed.cause, HandoffFailure::LeaseGone);
    assert_eq!(
        pair.source.lease_counts().claimed,
        1,
        "the first one's claim stays"
    );
}

#[tokio::test]
async fn a_source_that_never_seals_runs_into_the_timeout() {
    let pair = Pair::plain().await;
    let mut prefill = pair.prefill(8, 0);
    prefill.compute(&pair.source, 1);
    let options = IntakeOptions {
        timeout: Duration::from_millis(50),
        ..options()
    };
    let reservation = reserved(&pair.reader, &tokens(8));
    let (reservation, result) = take(
        &prefill.handoff,
        &options,
        &pair.source,
        &tokens(8),
        reservation,
        &mut || {},
    )
    .await;
    let failed = result.expect_err("never sealed");
    assert_eq!(failed.cause, HandoffFailure::Timeout);
    assert_eq!(failed.verified_blocks, 1);
    drop(prefill);
    pair.assert_unused(reservation);
}

#[tokio::test]
async fn a_source_that_dies_is_lost_after_the_retries() {
    let pair = Pair::plain().await;
    let handoff = pair.sealed(8, 0);
    pair.stop.cancel();
    let (reservation, result) = pair.taken(&handoff, 8).await;
    let failed = result.expect_err("dead");
    assert_eq!(failed.cause, HandoffFailure::SourceLost);
    assert_eq!(reservation.completed_blocks(), 0);
}

/// An owner whose answers are what a test makes of them.
struct Owner {
    pool: KvPool,
    failing_claims: AtomicU32,
    /// Runs before each completion is handled.
    before_complete: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    refuse_renewals: bool,
    unreachable_for_renewals: bool,
    renewed: AtomicBool,
}

impl Owner {
    fn of(pool: &KvPool) -> Self {
        Self {
            pool: pool.clone(),
            failing_claims: AtomicU32::new(0),
            before_complete: Mutex::new(None),
            refuse_renewals: false,
            unreachable_for_renewals: false,
            renewed: AtomicBool::new(false),
        }
    }
}

impl LeaseClient for Owner {
    fn claim<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        reader: &'a Reader,
    ) -> BoxFuture<'a, Result<Grant, CallFailed>> {
        let left = self
            .failing_claims
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                left.checked_sub(1)
            });
        if left.is_ok() {
            return Box::pin(async { Err(CallFailed("connection refused".to_owned())) });
        }
        LeaseClient::claim(&self.pool, lease, generation, reader)
    }

    fn renew<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        transfer: &'a TransferId,
    ) -> BoxFuture<'a, Result<Grant, CallFailed>> {
        self.renewed.store(true, Ordering::SeqCst);
        if self.unreachable_for_renewals {
            return Box::pin(async { Err(CallFailed("no answer".to_owned())) });
        }
        if self.refuse_renewals {
            return Box::pin(async { Ok(Err(crate::kv::lease::Gone::Released)) });
        }
        LeaseClient::renew(&self.pool, lease, generation, transfer)
    }

    fn complete<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        transfer: &'a TransferId,
        verified: bool,
    ) -> BoxFuture<'a, Result<Completion, CallFailed>> {
        if let Some(before) = self.before_complete.lock().take() {
            before();
        }
        self.pool.complete(lease, generation, transfer, verified)
    }
}

#[tokio::test]
async fn a_read_that_ends_after_its_lease_is_discarded() {
    let pair = Pair::plain().await;
    let handoff = pair.sealed(8, 0);
    let owner = Owner::of(&pair.source);
    let (pool, clock) = (pair.source.clone(), pair.clock.clone());
    *owner.before_complete.lock() = Some(Box::new(move || {
        clock.advance(1000);
        pool.reap();
    }));
    let (reservation, result) = pair.taken_by(&handoff, &owner, &tokens(8)).await;
    let failed = result.expect_err("all blocks were right, and yet");
    assert_eq!(failed.cause, HandoffFailure::Stale);
    assert_eq!(failed.verified_blocks, 2);
    pair.assert_unused(reservation);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_is_refused_ends_the_read() {
    let pair = Pair::plain().await;
    let prefill = pair.prefill_for(8, 0, 60);
    let owner = Owner {
        refuse_renewals: true,
        ..Owner::of(&pair.source)
    };
    let (_, result) = pair.taken_by(&prefill.handoff, &owner, &tokens(8)).await;
    let failed = result.expect_err("not renewed");
    assert_eq!(failed.cause, HandoffFailure::LeaseGone);
    assert!(owner.renewed.load(Ordering::SeqCst));
}

#[tokio::test]
async fn a_claim_that_does_not_get_through_is_tried_again() {
    let pair = Pair::plain().await;
    let handoff = pair.sealed(8, 0);
    let owner = Owner::of(&pair.source);
    owner.failing_claims.store(2, Ordering::SeqCst);
    let (_, result) = pair.taken_by(&handoff, &owner, &tokens(8)).await;
    assert_eq!(result.expect("the third claim gets through").retries, 2);
}

#[tokio::test]
async fn an_owner_that_cannot_be_reached_is_a_lost_source() {
    let pair = Pair::plain().await;
    let handoff = pair.sealed(8, 0);
    let owner = Owner::of(&pair.source);
    owner.failing_claims.store(u32::MAX, Ordering::SeqCst);
    let (_, result) = pair.taken_by(&handoff, &owner, &tokens(8)).await;
    assert_eq!(
        result.expect_err("no owner").cause,
        HandoffFailure::SourceLost
    );
}

/// Breaks each connection after so many blocks.
#[derive(Debug)]
struct Breaking {
    inner: Arc<LocalTransport>,
    after: u32,
}

struct Cut<'a> {
    sink: &'a mut dyn BlockSink,
    left: u32,
}

impl BlockSink for Cut<'_> {
    fn place(
        &mut self,
        index: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<io::Result<usize>, HandoffFailure> {
        if self.left == 0 {
            return Ok(Err(io::ErrorKind::ConnectionReset.into()));
        }
        self.sink.place(index, fill)
    }

    fn arrived(&mut self, arrival: &crate::transport::Arrival) -> Result<(), HandoffFailure> {
        self.left -= 1;
        self.sink.arrived(arrival)
    }

    fn sealed(&mut self, end: u32) {
        self.sink.sealed(end);
    }
}

impl Transport for Breaking {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn listen<'a>(
        &'a self,
        address: &'a str,
        source: Arc<dyn BlockSource>,
        stop: CancellationToken,
    ) -> BoxFuture<'a, io::Result<Listening>> {
        self.inner.listen(address, source, stop)
    }

    fn fetch<'a>(
        &'a self,
        request: &'a FetchRequest,
        sink: &'a mut dyn BlockSink,
    ) -> BoxFuture<'a, Result<End, TransportError>> {
        Box::pin(async move {
            let mut sink = Cut {
                sink,
                left: self.after,
            };
            self.inner.fetch(request, &mut sink).await
        })
    }
}

#[tokio::test]
async fn a_broken_connection_is_made_again_and_goes_on() {
    let pair = Pair::plain().await;
    let mut handoff = pair.sealed(18, 0);
    handoff.transport = Arc::new(Breaking {
        inner: pair.transport.clone(),
        after: 2,
    });
    let (reservation, result) = pair.taken(&handoff, 18).await;
    let received = result.expect("five blocks in three connections");
    assert_eq!((received.blocks, received.retries), (5, 2));
    for index in 0..5 {
        let block = reservation.blocks()[index];
        assert!(
            *pair.reader.store().read(block) == content(10, index)[..],
            "block {index}"
        );
    }
}

#[tokio::test]
async fn without_checksums_only_headers_are_compared() {
    let pair = Pair::new(1, 1, Some(Fault::FlipByte(1))).await;
    let handoff = pair.sealed(8, 0);
    let options = IntakeOptions {
        checksum: ChecksumMode::Off,
        ..options()
    };
    let reservation = reserved(&pair.reader, &tokens(8));
    let (reservation, result) = take(
        &handoff,
        &options,
        &pair.source,
        &tokens(8),
        reservation,
        &mut || {},
    )
    .await;
    assert!(result.is_ok(), "the policy asked for it: {result:?}");
    assert_eq!(reservation.completed_blocks(), 2);
    drop(reservation);
    assert_eq!(
        pair.reader.snapshot().1,
        [],
        "what nobody checked is offered to nobody else"
    );
    assert_eq!(pair.reader.counts().free, 16);
}

#[tokio::test]
async fn of_a_sampled_transfer_only_the_checked_beginning_is_offered_to_others() {
    let first_unchecked = |seed| {
        let mode = ChecksumMode::Sampled { seed };
        (0..4).find(|index| !mode.covers(*index, *index == 3))
    };
    let seed_of = |wanted| (0..10_000).find(|seed| first_unchecked(*seed) == wanted);
    for wanted in [Some(0), Some(1), Some(2), None] {
        let seed = seed_of(wanted).expect("one in eight is drawn");
        let pair = Pair::plain().await;
        let handoff = pair.sealed(16, 0);
        let options = IntakeOptions {
            checksum: ChecksumMode::Sampled { seed },
            ..options()
        };
        let reservation = reserved(&pair.reader, &tokens(16));
        let (reservation, result) = take(
            &handoff,
            &options,
            &pair.source,
            &tokens(16),
            reservation,
            &mut || {},
        )
        .await;
        result.expect("all blocks are right");
        drop(reservation);
        let offered = pair
            .reader
            .cached_tokens(&tokens(16), &CacheScope::default());
        assert_eq!(offered, wanted.unwrap_or(4) as usize * BLOCK_SIZE);
    }
}

#[tokio::test]
async fn a_source_whose_data_port_is_closed_gets_its_lease_back_at_once() {
    let pair = Pair::plain().await;
    let mut handoff = pair.sealed(12, 0);
    handoff.transport = Arc::new(Breaking {
        inner: pair.transport.clone(),
        after: 0,
    });
    let failed = cause(&pair, &handoff, 12).await;
    assert_eq!(failed.cause, HandoffFailure::SourceLost);
}

#[tokio::test]
async fn a_reader_whose_clock_runs_ahead_stops_first_and_the_owner_frees_by_its_own() {
    let pair = Pair::plain().await;
    let prefill = pair.prefill_for(8, 0, 200);
    let owner = Owner {
        unreachable_for_renewals: true,
        ..Owner::of(&pair.source)
    };
    // The owner's clock stands still, the reader's runs.
    let (reservation, result) = pair.taken_by(&prefill.handoff, &owner, &tokens(8)).await;
    let failed = result.expect_err("not renewed");
    assert_eq!(failed.cause, HandoffFailure::LeaseGone);
    assert_eq!(
        pair.source.lease_counts().claimed,
        1,
        "for the owner it lives"
    );
    drop(prefill);
    pair.clock.advance(200);
    pair.source.reap();
    pair.assert_unused(reservation);
}

//! Conformance: what comes, and in which order.

use std::io;
use std::sync::Arc;

use baton_protocol::failure::HandoffFailure;
use baton_protocol::header::BlockHeader;
use baton_protocol::ids::{Generation, LeaseId, TransferId};
use futures::FutureExt;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::endings::another;
use super::{BLOCK_SIZE, Collected, Fixture};
use crate::kv::KvPool;
use crate::kv::lease::{Gone, Next};
use crate::kv::store::BlockId;
use crate::transport::memory::Arena;
use crate::transport::{Arrival, BlockSink, BlockSource, End};

pub(super) async fn a_whole_lease_comes_byte_for_byte(fixture: Fixture) {
    let mut leased = fixture.leased(1, 23, 0, "t");
    fixture.seal(&mut leased);
    let (mut sink, _arrivals) = Collected::new(&leased.request);
    let end = fixture
        .transport
        .fetch(&leased.request, &mut sink)
        .await
        .expect("served");
    assert_eq!(end, End { end: 6 });
    assert_eq!(sink.indices(), [0, 1, 2, 3, 4, 5]);
    sink.check_bytes(&leased);
    fixture.end().await;
}

pub(super) async fn a_block_comes_before_the_next_is_computed(fixture: Fixture) {
    let mut leased = fixture.leased(1, 12, 0, "t");
    let request = leased.request.clone();
    let (mut sink, mut arrivals) = Collected::new(&request);
    let fetch = fixture.transport.fetch(&request, &mut sink);
    let compute = async {
        for index in 0..3 {
            fixture.publish(&mut leased, index);
            assert_eq!(arrivals.recv().await, Some(index as u32));
        }
        fixture.seal(&mut leased);
    };
    let (end, ()) = tokio::join!(fetch, compute);
    assert_eq!(end.expect("served"), End { end: 3 });
    sink.check_bytes(&leased);
    assert_eq!(sink.sealed, [(3, 3)]);
    fixture.end().await;
}

pub(super) async fn skipped_blocks_are_not_sent(fixture: Fixture) {
    let mut leased = fixture.leased(1, 16, 2, "t");
    fixture.seal(&mut leased);
    for first in [2, 3, 4] {
        let mut request = leased.request.clone();
        request.first_block = first;
        let (mut sink, _arrivals) = Collected::new(&request);
        let end = fixture
            .transport
            .fetch(&request, &mut sink)
            .await
            .expect("served");
        assert_eq!(end, End { end: 4 });
        assert_eq!(sink.indices(), (first..4).collect::<Vec<_>>());
        sink.check_bytes(&leased);
    }
    fixture.end().await;
}

pub(super) async fn a_lease_without_blocks_ends_at_once(fixture: Fixture) {
    let mut leased = fixture.leased(1, 8, 2, "t");
    fixture.seal(&mut leased);
    let (mut sink, _arrivals) = Collected::new(&leased.request);
    let end = fixture
        .transport
        .fetch(&leased.request, &mut sink)
        .await
        .expect("served");
    assert_eq!(end, End { end: 2 });
    assert!(sink.blocks.is_empty());
    assert_eq!(sink.sealed, [(2, 0)]);
    fixture.end().await;
}

pub(super) async fn the_partly_filled_last_block_has_its_own_fill(fixture: Fixture) {
    for (lease, tokens, fill) in [(1, 8, 4), (2, 9, 1), (3, 3, 3)] {
        let mut leased = fixture.leased(lease, tokens, 0, "t");
        fixture.seal(&mut leased);
        let (mut sink, _arrivals) = Collected::new(&leased.request);
        fixture
            .transport
            .fetch(&leased.request, &mut sink)
            .await
            .expect("served");
        sink.check_bytes(&leased);
        let (last, _) = sink.blocks.last().expect("some block");
        assert_eq!(last.promised.fill, fill);
        assert_eq!(last.promised.hash.0 == 0, fill as usize != BLOCK_SIZE);
    }
    fixture.end().await;
}

pub(super) async fn the_seal_is_told_while_blocks_are_on_their_way(fixture: Fixture) {
    let mut leased = fixture.leased(1, 16, 0, "t");
    fixture.seal(&mut leased);
    let (mut sink, _arrivals) = Collected::new(&leased.request);
    fixture
        .transport
        .fetch(&leased.request, &mut sink)
        .await
        .expect("served");
    assert_eq!(
        sink.sealed,
        [(4, 0)],
        "sealed before the first block came, told once"
    );
    fixture.end().await;
}

pub(super) async fn a_reader_goes_on_where_its_connection_broke(fixture: Fixture) {
    let mut leased = fixture.leased(1, 16, 0, "t");
    fixture.publish(&mut leased, 0);
    fixture.publish(&mut leased, 1);
    let mut request = leased.request.clone();
    let (mut sink, mut arrivals) = Collected::new(&request);
    {
        let mut fetch = fixture.transport.fetch(&request, &mut sink);
        tokio::select! {
            ended = &mut fetch => panic!("not sealed yet: {ended:?}"),
            () = async { while arrivals.recv().await != Some(1) {} } => {}
        }
        // Dropping the fetch is how a connection ends on the reader's side.
    }
    fixture.seal(&mut leased);
    request.first_block = 2;
    fixture
        .transport
        .fetch(&request, &mut sink)
        .await
        .expect("the claim is still its own");
    assert_eq!(sink.indices(), [0, 1, 2, 3]);
    sink.check_bytes(&leased);
    fixture.end().await;
}

pub(super) async fn two_leases_do_not_mix(fixture: Fixture) {
    let mut first = fixture.leased(1, 40, 0, "t1");
    let mut second = fixture.leased(2, 40, 0, "t2");
    let (first_request, second_request) = (first.request.clone(), second.request.clone());
    let (mut first_sink, _first) = Collected::new(&first_request);
    let (mut second_sink, _second) = Collected::new(&second_request);
    let publish = async {
        for index in 0..10 {
            fixture.publish(&mut first, index);
            tokio::task::yield_now().await;
            fixture.publish(&mut second, index);
        }
        fixture.seal(&mut first);
        fixture.seal(&mut second);
    };
    let (one, two, ()) = tokio::join!(
        fixture.transport.fetch(&first_request, &mut first_sink),
        fixture.transport.fetch(&second_request, &mut second_sink),
        publish
    );
    one.expect("served");
    two.expect("served");
    first_sink.check_bytes(&first);
    second_sink.check_bytes(&second);
    fixture.end().await;
}

pub(super) async fn a_slow_reader_holds_up_nobody_else(fixture: Fixture) {
    // 48 blocks of 256 KiB: more than two socket buffers grow to.
    let mut slow = fixture.leased(1, 48 * BLOCK_SIZE as u32, 0, "slow");
    fixture.seal(&mut slow);
    let mut quick = fixture.leased(2, 3 * BLOCK_SIZE as u32, 0, "quick");
    fixture.seal(&mut quick);

    let (mut slow_sink, mut arrivals) = Collected::new(&slow.request);
    let mut slow_fetch = fixture.transport.fetch(&slow.request, &mut slow_sink);
    tokio::select! {
        ended = &mut slow_fetch => panic!("the first block ends nothing: {ended:?}"),
        first = arrivals.recv() => assert_eq!(first, Some(0)),
    }
    // The slow reader does not read now.
    let (mut quick_sink, _quick) = Collected::new(&quick.request);
    fixture
        .transport
        .fetch(&quick.request, &mut quick_sink)
        .await
        .expect("served meanwhile");
    quick_sink.check_bytes(&quick);
    assert!(
        (&mut slow_fetch).now_or_never().is_none(),
        "it still has blocks to read"
    );
    slow_fetch.await.expect("served in the end");
    assert_eq!(slow_sink.blocks.len(), 48);
    slow_sink.check_bytes(&slow);
    fixture.end().await;
}

pub(super) async fn one_hand_off_after_another_over_one_pair(fixture: Fixture) {
    for lease in 1..20 {
        let mut leased = fixture.leased(lease, 16, 0, "t");
        fixture.seal(&mut leased);
        let (mut sink, _arrivals) = Collected::new(&leased.request);
        let end = fixture
            .transport
            .fetch(&leased.request, &mut sink)
            .await
            .expect("served");
        assert_eq!(end, End { end: 4 });
        sink.check_bytes(&leased);
        let request = &leased.request;
        fixture
            .pool
            .complete_read(request.lease, request.generation, &request.transfer, true);
    }
    fixture.until_free().await;
    fixture.end().await;
}

/// A source whose blocks are written again as soon as their bytes have been read, and that says so as memory does.
#[derive(Debug)]
struct Torn(KvPool);

impl BlockSource for Torn {
    fn block_bytes(&self) -> usize {
        BlockSource::block_bytes(&self.0)
    }

    fn layout(&self) -> u64 {
        BlockSource::layout(&self.0)
    }

    fn watch(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
    ) -> Result<watch::Receiver<u64>, Gone> {
        self.0.watch(lease, generation, transfer)
    }

    fn next(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        index: u32,
    ) -> Next {
        self.0.next(lease, generation, transfer, index)
    }

    fn header_before(&self, block: BlockId) -> BlockHeader {
        self.0.header_before(block)
    }

    fn header_after(&self, block: BlockId) -> BlockHeader {
        let beside = self.0.store().arena().header(block.0).expect("its block");
        beside.read().map(|seen| seen.header).unwrap_or_default()
    }

    fn bytes(
        &self,
        block: BlockId,
        read: &mut dyn FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let read = self.0.bytes(block, read);
        self.0.store().write(block)[0] ^= 1;
        read
    }

    fn arena(&self) -> Option<&Arena> {
        self.0.arena()
    }
}

/// A sink that has a block of the source written again as soon as bytes came, where they come without asking the source.
struct Tearing {
    inner: Collected,
    pool: KvPool,
    blocks: Vec<BlockId>,
}

impl BlockSink for Tearing {
    fn place(
        &mut self,
        index: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<io::Result<usize>, HandoffFailure> {
        let placed = self.inner.place(index, fill);
        self.pool.store().write(self.blocks[index as usize])[0] ^= 1;
        placed
    }

    fn arrived(&mut self, arrival: &Arrival) -> Result<(), HandoffFailure> {
        self.inner.arrived(arrival)
    }

    fn sealed(&mut self, end: u32) {
        self.inner.sealed(end);
    }
}

pub(super) async fn a_block_that_is_written_while_it_is_copied_shows(fixture: Fixture) {
    let mut leased = fixture.leased(1, 4, 0, "t");
    fixture.seal(&mut leased);
    let stop = CancellationToken::new();
    let listening = fixture
        .transport
        .listen(
            &another(&fixture.address),
            Arc::new(Torn(fixture.pool.clone())),
            stop.clone(),
        )
        .await
        .expect("a free address");
    let serving = tokio::spawn(listening.run);
    leased.request.address = listening.address;
    let (inner, _arrivals) = Collected::new(&leased.request);
    let mut sink = Tearing {
        inner,
        pool: fixture.pool.clone(),
        blocks: leased.reservation.blocks().to_vec(),
    };
    fixture
        .transport
        .fetch(&leased.request, &mut sink)
        .await
        .expect("it moves bytes and judges nothing");
    let (arrival, _) = &sink.inner.blocks[0];
    assert_eq!(arrival.promised, arrival.before);
    assert_ne!(arrival.promised, arrival.after, "the reader can tell");
    stop.cancel();
    serving.await.expect("no panic");
    fixture.end().await;
}

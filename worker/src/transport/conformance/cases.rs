//! Conformance: what comes, and in which order.

use futures::FutureExt;

use super::{BLOCK_SIZE, Collected, Fixture};
use crate::transport::End;

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

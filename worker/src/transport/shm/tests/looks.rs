//! How often a source looks at a lease: once for many blocks.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_protocol::failure::HandoffFailure;
use baton_protocol::header::BlockHeader;
use baton_protocol::ids::{Generation, LeaseId, TransferId};
use tokio::sync::watch;

use super::{BLOCK, PATIENCE, Source, address, quick, request, transport};
use crate::kv::KvPool;
use crate::kv::lease::one_sided::OneSidedRead;
use crate::kv::lease::{Gone, ManifestEntry, Next, Unpromised};
use crate::kv::store::BlockId;
use crate::transport::memory::Arena;
use crate::transport::{Arrival, BlockSink, BlockSource, Transport};

/// A pool that counts how often it is asked what a lease has, and lies of one block if it is told to.
#[derive(Debug)]
struct Counting {
    pool: KvPool,
    looks: AtomicUsize,
    /// This one's header is another one when it is looked at.
    changed: Option<usize>,
}

impl Counting {
    fn of(pool: &KvPool, changed: Option<usize>) -> Arc<Self> {
        Arc::new(Self {
            pool: pool.clone(),
            looks: AtomicUsize::new(0),
            changed,
        })
    }
}

impl BlockSource for Counting {
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
        self.looks.fetch_add(1, Ordering::SeqCst);
        self.pool.next(lease, generation, transfer, index)
    }

    fn next_blocks(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        wanted: Range<u32>,
        found: &mut Vec<ManifestEntry>,
    ) -> Result<Next, Unpromised> {
        self.looks.fetch_add(1, Ordering::SeqCst);
        let then = BlockSource::next_blocks(&self.pool, lease, generation, transfer, wanted, found);
        match self.changed {
            Some(changed) if changed < found.len() => Err(Unpromised),
            _ => then,
        }
    }

    fn header_before(&self, block: BlockId) -> BlockHeader {
        self.looks.fetch_add(1, Ordering::SeqCst);
        self.pool.header_before(block)
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

    fn one_sided_begin(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
    ) -> Result<Option<OneSidedRead>, Gone> {
        BlockSource::one_sided_begin(&self.pool, lease, generation, transfer)
    }

    fn one_sided_end(&self, read: OneSidedRead) {
        BlockSource::one_sided_end(&self.pool, read);
    }
}

/// What came, by its first byte.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl BlockSink for Bytes {
    fn place(
        &mut self,
        _: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<io::Result<usize>, HandoffFailure> {
        let mut block = [0; BLOCK];
        let filled = fill(&mut block);
        self.0.push(block[0]);
        Ok(filled)
    }

    fn arrived(&mut self, arrival: &Arrival) -> Result<(), HandoffFailure> {
        let whole = arrival.promised == arrival.before && arrival.before == arrival.after;
        whole.then_some(()).ok_or(HandoffFailure::HashMismatch)
    }

    fn sealed(&mut self, _: u32) {}
}

#[tokio::test]
async fn a_thousand_blocks_come_in_order_after_a_few_looks() {
    let mut counting = None;
    let source = Source::of(1000, address(), quick(), |pool| {
        counting.insert(Counting::of(pool, None)).clone()
    })
    .await;
    let request = request(&source.address);
    let mut sink = Bytes::default();
    let reader = transport();
    let fetch = reader.fetch(&request, &mut sink);
    let end = tokio::time::timeout(PATIENCE, fetch).await;
    let end = end.expect("it ends by itself").expect("served");
    assert_eq!(end.end, 1000);
    let filled: Vec<u8> = (0..1000)
        .map(|index| (index as u8).wrapping_add(1))
        .collect();
    assert_eq!(sink.0, filled);
    let looks = counting.expect("served").looks.load(Ordering::SeqCst);
    assert!(looks <= 20, "{looks} looks for a lease that was sealed");
    source.end().await;
}

#[tokio::test]
async fn a_block_that_is_not_what_was_promised_is_not_told_of() {
    let source = Source::of(8, address(), quick(), |pool| Counting::of(pool, Some(3))).await;
    let request = request(&source.address);
    let mut sink = Bytes::default();
    let reader = transport();
    let fetch = reader.fetch(&request, &mut sink);
    let error = tokio::time::timeout(PATIENCE, fetch).await;
    error
        .expect("it ends by itself")
        .expect_err("a contradiction");
    assert!(sink.0.is_empty(), "{:?}", sink.0);
    source.end().await;
}

//! What only `Shm` can suffer: other users, readers that do not say when they are done, mappings that nobody uses.

mod fallback;
mod lies;
mod looks;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use baton_protocol::failure::HandoffFailure;
use baton_protocol::hash::HashKey;
use baton_protocol::header::BlockHeader;
use baton_protocol::ids::{Generation, Incarnation, LeaseId, RunId, TransferId, WorkerId};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::connection::Connection;
use super::{ShmOptions, ShmTransport};
use crate::kv::clock::ManualClock;
use crate::kv::lease::{Gone, LeaseOpen, Next, Reader};
use crate::kv::store::BlockId;
use crate::kv::{CacheScope, Geometry, KvPool, PoolConfig, Reserve};
use crate::transport::memory::{Arena, Shape};
use crate::transport::tcp::frame::{Frame, Open, Why};
use crate::transport::{
    Arrival, BlockSink, BlockSource, FetchRequest, Obstacle, Transport, TransportError,
};

const PATIENCE: Duration = Duration::from_secs(20);
const BLOCK: usize = 32;
const DURATION: u64 = 1000;

fn quick() -> ShmOptions {
    ShmOptions {
        handshake: Duration::from_millis(300),
        alive: Duration::from_millis(20),
        silence: Duration::from_millis(300),
        stalled: Duration::from_millis(300),
        idle: Duration::from_millis(50),
        readers: 1,
        ..ShmOptions::default()
    }
}

fn transport() -> ShmTransport {
    ShmTransport::new("host", quick())
}

fn address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("host/test-{}-{next}", std::process::id())
}

struct NoBlocks;

impl BlockSink for NoBlocks {
    fn place(
        &mut self,
        _: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<io::Result<usize>, HandoffFailure> {
        Ok(fill(&mut [0; BLOCK]))
    }

    fn arrived(&mut self, _: &Arrival) -> Result<(), HandoffFailure> {
        Ok(())
    }

    fn sealed(&mut self, _: u32) {}
}

fn request(address: &str) -> FetchRequest {
    FetchRequest {
        address: address.to_owned(),
        lease: LeaseId([1; 16]),
        generation: Generation(1),
        transfer: TransferId::from("t"),
        first_block: 0,
        layout: 1,
        block_bytes: BLOCK,
    }
}

/// A source that is a pool in all but its memory.
#[derive(Debug)]
struct Unshared(KvPool, Arena);

impl BlockSource for Unshared {
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
        self.0.header_after(block)
    }

    fn bytes(
        &self,
        block: BlockId,
        read: &mut dyn FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        self.0.bytes(block, read)
    }

    fn arena(&self) -> Option<&Arena> {
        Some(&self.1)
    }
}

/// A source with one sealed lease, claimed.
struct Source {
    pool: KvPool,
    clock: Arc<ManualClock>,
    address: String,
    stop: CancellationToken,
    serving: JoinHandle<()>,
}

impl Source {
    /// Of two blocks.
    async fn at(address: String, options: ShmOptions) -> Self {
        let pool = |pool: &KvPool| Arc::new(pool.clone()) as Arc<dyn BlockSource>;
        Self::of(2, address, options, pool).await
    }

    /// Of so many blocks, served by what `served` makes of the pool.
    async fn of(
        blocks: usize,
        address: String,
        options: ShmOptions,
        served: impl FnOnce(&KvPool) -> Arc<dyn BlockSource>,
    ) -> Self {
        let config = PoolConfig {
            geometry: Geometry {
                block_size: 4,
                bytes_per_token: BLOCK / 4,
            },
            blocks: blocks + 2,
            kv_identity: "tiny".to_owned(),
            layout: 1,
            hash_key: HashKey::from_bytes(&[1; 32]),
            event_capacity: 16,
        };
        let clock = Arc::new(ManualClock::default());
        let pool = KvPool::new(config, u64::MAX, clock.clone()).expect("small");
        let tokens: Vec<u32> = (0..).take(4 * blocks).collect();
        let mut reservation = pool
            .reserve(&Reserve {
                tokens: &tokens,
                scope: &CacheScope::default(),
                room: 0,
                leave_last: true,
            })
            .expect("room");
        let open = LeaseOpen {
            id: LeaseId([1; 16]),
            run: RunId::from("run"),
            duration: DURATION,
            skip_blocks: 0,
        };
        let opened = pool.open_lease(&mut reservation, &open).expect("new");
        for (index, block) in tokens.chunks(4).enumerate() {
            let at = reservation.blocks()[index];
            pool.store().write(at).fill((index as u8).wrapping_add(1));
            pool.complete_block(&mut reservation, index, block)
                .expect("in order");
        }
        pool.seal(&reservation, tokens.len()).expect("complete");
        let reader = Reader {
            transfer: TransferId::from("t"),
            worker: WorkerId::from("d"),
            incarnation: Incarnation(7),
        };
        pool.claim(open.id, opened.generation, &reader)
            .expect("granted");
        pool.clear_cache();
        let stop = CancellationToken::new();
        let listening = ShmTransport::new("host", options)
            .listen(&address, served(&pool), stop.clone())
            .await
            .expect("a free address");
        Self {
            pool,
            clock,
            address,
            stop,
            serving: tokio::spawn(listening.run),
        }
    }

    async fn end(self) {
        self.stop.cancel();
        self.serving.await.expect("no panic");
    }
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let wait = async {
        while !done() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect(what);
}

async fn fetched(transport: &ShmTransport, address: &str) -> Result<u32, TransportError> {
    let request = request(address);
    let mut sink = NoBlocks;
    let fetch = transport.fetch(&request, &mut sink);
    let ended = tokio::time::timeout(PATIENCE, fetch).await;
    ended.expect("it ends by itself").map(|end| end.end)
}

#[tokio::test]
async fn another_user_is_served_nothing_and_trusted_with_nothing() {
    let stranger = ShmOptions {
        user: quick().user + 1,
        ..quick()
    };
    let source = Source::at(address(), stranger).await;
    let error = fetched(&transport(), &source.address)
        .await
        .expect_err("another user's");
    let told = matches!(
        error,
        TransportError::Unusable {
            obstacle: Obstacle::Credentials,
            ..
        }
    );
    assert!(told, "{error}");
    source.end().await;

    let source = Source::at(address(), quick()).await;
    let reader = ShmTransport::new("host", stranger);
    let error = fetched(&reader, &source.address)
        .await
        .expect_err("another user's");
    let refused = matches!(
        error,
        TransportError::Unusable {
            obstacle: Obstacle::Credentials,
            ..
        }
    );
    assert!(refused, "{error}");
    source.end().await;
}

#[tokio::test]
async fn readers_beyond_the_limit_are_told_so() {
    // The first one says nothing for as long as this takes.
    let patient = ShmOptions {
        handshake: PATIENCE,
        ..quick()
    };
    let source = Source::at(address(), patient).await;
    let socket = transport().socket(&source.address).expect("of this host");
    let first = UnixStream::connect(socket).await.expect("it listens");
    let error = fetched(&transport(), &source.address)
        .await
        .expect_err("one too many");
    assert!(matches!(error, TransportError::Busy { .. }), "{error}");
    drop(first);
    source.end().await;
}

/// A reader that opens the lease and then neither reads nor says that it is done.
async fn lingering(source: &Source) -> Connection {
    let socket = transport().socket(&source.address).expect("of this host");
    let stream = UnixStream::connect(socket).await.expect("it listens");
    let mut connection = Connection::new(stream);
    let request = request(&source.address);
    connection.write(&Frame::Open(Open {
        lease: request.lease,
        generation: request.generation,
        transfer: request.transfer,
        first_block: 0,
        layout: 1,
        block_bytes: BLOCK as u64,
    }));
    connection.flush(PATIENCE).await.expect("it listens");
    let (first, file) = connection
        .frame_and_file()
        .await
        .expect("frames")
        .expect("not closed");
    assert!(matches!(first, Frame::Arena { .. }) && file.is_some());
    loop {
        match connection.frame().await.expect("frames") {
            Some(Frame::Sealed { end: 2 }) => return connection,
            Some(Frame::Accepted | Frame::Located { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn blocks_wait_for_a_reader_that_has_not_said_that_it_is_done() {
    let source = Source::at(address(), quick()).await;
    let connection = lingering(&source).await;
    assert_eq!(source.pool.counts().leased, 2);
    source.clock.advance(DURATION);
    assert_eq!(source.pool.reap().leases, 1);
    assert_eq!(
        source.pool.counts().quarantined,
        2,
        "the lease is over, the reader may not be"
    );
    source.clock.advance(100 * DURATION);
    source.pool.reap();
    assert_eq!(
        source.pool.counts().quarantined,
        2,
        "time alone frees nothing"
    );
    // As the kernel does for a process that was killed.
    drop(connection);
    until("the owner hears of it", || {
        source.pool.counts().quarantined == 0
    })
    .await;
    assert_eq!(source.pool.counts().free, 4);
    source.end().await;
}

#[tokio::test]
async fn a_reader_that_talks_nonsense_may_still_be_reading() {
    let source = Source::at(address(), quick()).await;
    let mut connection = lingering(&source).await;
    connection.write(&Frame::Alive);
    connection.flush(PATIENCE).await.expect("it listens");
    let heard = connection.frame().await.expect("no more frames");
    assert_eq!(heard, None, "it is served no more");
    source.clock.advance(DURATION);
    source.pool.reap();
    assert_eq!(source.pool.counts().quarantined, 2);
    drop(connection);
    until("the owner hears of it", || source.pool.counts().free == 4).await;
    source.end().await;
}

#[tokio::test]
async fn done_frees_and_the_connection_serves_on() {
    let source = Source::at(address(), quick()).await;
    let mut connection = lingering(&source).await;
    source.clock.advance(DURATION);
    source.pool.reap();
    assert_eq!(source.pool.counts().quarantined, 2);
    connection.write(&Frame::Done);
    connection.flush(PATIENCE).await.expect("it listens");
    until("the owner hears of it", || source.pool.counts().free == 4).await;
    connection.write(&Frame::Open(Open {
        lease: LeaseId([9; 16]),
        generation: Generation(1),
        transfer: TransferId::from("t"),
        first_block: 0,
        layout: 1,
        block_bytes: BLOCK as u64,
    }));
    connection.flush(PATIENCE).await.expect("it listens");
    let answer = connection.frame().await.expect("frames");
    assert!(
        matches!(answer, Some(Frame::Ended(Why::Gone(_)))),
        "{answer:?}"
    );
    source.end().await;
}

#[tokio::test]
async fn what_is_not_used_is_unmapped() {
    let source = Source::at(address(), quick()).await;
    // Whoever reads also serves: that is when it looks.
    let reader = transport();
    let stop = CancellationToken::new();
    let listening = reader
        .listen(&address(), Arc::new(source.pool.clone()), stop.clone())
        .await
        .expect("a free address");
    let serving = tokio::spawn(listening.run);
    assert_eq!(fetched(&reader, &source.address).await.expect("served"), 2);
    assert_eq!(reader.mapped(), 1);
    until("it is idle", || reader.mapped() == 0).await;
    stop.cancel();
    serving.await.expect("no panic");
    source.end().await;
}

#[tokio::test]
async fn a_source_that_starts_again_is_mapped_again() {
    let reader = transport();
    let source = Source::at(address(), quick()).await;
    let address = source.address.clone();
    assert_eq!(fetched(&reader, &address).await.expect("served"), 2);
    source.end().await;
    let source = Source::at(address.clone(), quick()).await;
    // The kept connection is dead, and so is the memory behind it.
    assert_eq!(fetched(&reader, &address).await.expect("served"), 2);
    assert_eq!(reader.mapped(), 1);
    source.end().await;
}

#[tokio::test]
async fn a_source_without_a_file_says_why_it_cannot_be_mapped() {
    let shape = Shape::new(2, BLOCK).expect("small");
    let (arena, _) = Arena::private(shape, "memfd_create: not permitted").expect("memory");
    let source = Source::at(address(), quick()).await;
    let unshared = Arc::new(Unshared(source.pool.clone(), arena));
    let error = transport()
        .listen(&address(), unshared, CancellationToken::new())
        .await
        .expect_err("nothing to map");
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    assert!(error.to_string().contains("not permitted"), "{error}");
    source.end().await;
}

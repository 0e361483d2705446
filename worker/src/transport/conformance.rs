//! What every transport must do, run against each of them. A case gets a fixture and knows nothing of the transport in it.

mod cases;
mod endings;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use baton_protocol::failure::HandoffFailure;
use baton_protocol::hash::HashKey;
use baton_protocol::ids::{Generation, Incarnation, LeaseId, RunId, TransferId, WorkerId};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::local::LocalTransport;
use super::shm::{ShmOptions, ShmTransport};
use super::tcp::{TcpOptions, TcpTransport};
use super::{Arrival, BlockSink, FetchRequest, Transport};
use crate::kv::clock::ManualClock;
use crate::kv::lease::{LeaseOpen, Reader};
use crate::kv::{CacheScope, Geometry, KvPool, PoolConfig, Reservation, Reserve};

const BLOCK_SIZE: usize = 4;
const DURATION: u64 = 1000;
const LAYOUT: u64 = 0xfeed;

/// A source that serves, and the transport to reach it.
struct Fixture {
    transport: Arc<dyn Transport>,
    pool: KvPool,
    clock: Arc<ManualClock>,
    address: String,
    stop: CancellationToken,
    serving: JoinHandle<()>,
    bytes_per_token: usize,
}

impl Fixture {
    async fn new(transport: Arc<dyn Transport>, listen: &str, block_bytes: usize) -> Self {
        let clock = Arc::new(ManualClock::default());
        let config = PoolConfig {
            geometry: Geometry {
                block_size: BLOCK_SIZE,
                bytes_per_token: block_bytes / BLOCK_SIZE,
            },
            blocks: 64,
            kv_identity: "tiny".to_owned(),
            layout: LAYOUT,
            hash_key: HashKey::from_bytes(&[1; 32]),
            event_capacity: 1024,
        };
        let pool = KvPool::new(config, u64::MAX, clock.clone()).expect("a small pool");
        let stop = CancellationToken::new();
        let listening = transport
            .listen(listen, Arc::new(pool.clone()), stop.clone())
            .await
            .expect("a free address");
        Self {
            transport,
            pool,
            clock,
            address: listening.address,
            stop,
            serving: tokio::spawn(listening.run),
            bytes_per_token: block_bytes / BLOCK_SIZE,
        }
    }

    /// Reserves `count` tokens and opens a lease on them that `transfer` claims.
    fn leased(&self, lease: u8, count: u32, skip_blocks: u32, transfer: &str) -> Leased {
        let mut leased = self.opened(lease, count, skip_blocks);
        leased.request.transfer = TransferId::from(transfer);
        self.claim(&leased, transfer);
        leased
    }

    fn opened(&self, lease: u8, count: u32, skip_blocks: u32) -> Leased {
        let tokens: Vec<u32> = (0..count)
            .map(|token| token + 1000 * u32::from(lease))
            .collect();
        let mut reservation = self
            .pool
            .reserve(&Reserve {
                tokens: &tokens,
                scope: &CacheScope::default(),
                room: 0,
                leave_last: true,
            })
            .expect("room");
        let open = LeaseOpen {
            id: LeaseId([lease; 16]),
            run: RunId::from("run"),
            duration: DURATION,
            skip_blocks,
        };
        let opened = self.pool.open_lease(&mut reservation, &open).expect("new");
        Leased {
            request: FetchRequest {
                address: self.address.clone(),
                lease: open.id,
                generation: opened.generation,
                transfer: TransferId::from("t"),
                first_block: skip_blocks,
                layout: LAYOUT,
                block_bytes: self.bytes_per_token * BLOCK_SIZE,
            },
            reservation,
            tokens,
        }
    }

    fn claim(&self, leased: &Leased, transfer: &str) {
        let reader = Reader {
            transfer: TransferId::from(transfer),
            worker: WorkerId::from("d"),
            incarnation: Incarnation(7),
        };
        self.pool
            .claim(leased.request.lease, leased.request.generation, &reader)
            .expect("granted");
    }

    /// Writes and completes block `index`.
    fn publish(&self, leased: &mut Leased, index: usize) {
        let tokens = leased.tokens[index * BLOCK_SIZE..][..BLOCK_SIZE].to_vec();
        self.write(leased, index);
        self.pool
            .complete_block(&mut leased.reservation, index, &tokens)
            .expect("in order");
    }

    fn write(&self, leased: &Leased, index: usize) {
        let block = leased.reservation.blocks()[index];
        let bytes = content(leased.tokens[0], index, leased.request.block_bytes);
        self.pool.store().write(block).copy_from_slice(&bytes);
    }

    /// Publishes all and seals.
    fn seal(&self, leased: &mut Leased) {
        let full = leased.tokens.len() / BLOCK_SIZE;
        for index in leased.reservation.completed_blocks()..full {
            self.publish(leased, index);
        }
        if !leased.tokens.len().is_multiple_of(BLOCK_SIZE) {
            self.write(leased, full);
        }
        self.pool
            .seal(&leased.reservation, leased.tokens.len())
            .expect("complete");
    }

    /// Reaps until nobody holds a block: a source may hear of its reader's end a moment later.
    async fn until_free(&self) {
        loop {
            self.pool.reap();
            let counts = self.pool.counts();
            assert_eq!(counts.leaked, 0);
            if (counts.leased, counts.quarantined, counts.active) == (0, 0, 0) {
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Stops the source; everything it did has ended after this.
    async fn end(self) {
        self.stop.cancel();
        self.serving.await.expect("no panic");
    }
}

struct Leased {
    request: FetchRequest,
    reservation: Reservation,
    tokens: Vec<u32>,
}

/// Bytes of a block: other ones for each block and request.
fn content(request: u32, index: usize, length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| {
            (at as u32)
                .wrapping_mul(31)
                .wrapping_add(request + 7 * index as u32) as u8
        })
        .collect()
}

/// Keeps what comes and tells of it.
struct Collected {
    blocks: Vec<(Arrival, Vec<u8>)>,
    buffer: Vec<u8>,
    /// Blocks that had come when the seal was told.
    sealed: Vec<(u32, usize)>,
    refuse_at: Option<u32>,
    came: mpsc::UnboundedSender<u32>,
}

impl Collected {
    fn new(request: &FetchRequest) -> (Self, mpsc::UnboundedReceiver<u32>) {
        let (came, arrivals) = mpsc::unbounded_channel();
        let sink = Self {
            blocks: Vec::new(),
            buffer: vec![0; request.block_bytes],
            sealed: Vec::new(),
            refuse_at: None,
            came,
        };
        (sink, arrivals)
    }

    fn indices(&self) -> Vec<u32> {
        self.blocks
            .iter()
            .map(|(arrival, _)| arrival.index)
            .collect()
    }

    fn check_bytes(&self, leased: &Leased) {
        for (arrival, bytes) in &self.blocks {
            let expected = content(leased.tokens[0], arrival.index as usize, bytes.len());
            assert!(*bytes == expected, "bytes of block {}", arrival.index);
            assert_eq!(arrival.promised, arrival.before);
            assert_eq!(arrival.promised, arrival.after);
            assert_eq!(
                arrival.promised.checksum,
                baton_protocol::checksum::checksum(bytes)
            );
        }
    }
}

impl BlockSink for Collected {
    fn place(
        &mut self,
        _: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<io::Result<usize>, HandoffFailure> {
        Ok(fill(&mut self.buffer))
    }

    fn arrived(&mut self, arrival: &Arrival) -> Result<(), HandoffFailure> {
        if self.refuse_at == Some(arrival.index) {
            return Err(HandoffFailure::HashMismatch);
        }
        self.blocks.push((*arrival, self.buffer.clone()));
        // Nobody may be listening.
        let _ = self.came.send(arrival.index);
        Ok(())
    }

    fn sealed(&mut self, end: u32) {
        self.sealed.push((end, self.blocks.len()));
    }
}

fn wrong(generation: Generation) -> Generation {
    Generation(generation.0 + 1)
}

/// Long enough for a busy machine; a case that needs it has failed.
const PATIENCE: Duration = Duration::from_secs(20);

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future)
        .await
        .expect("the case ends by itself")
}

async fn local(block_bytes: usize) -> Fixture {
    Fixture::new(Arc::new(LocalTransport::new()), "source", block_bytes).await
}

async fn tcp(block_bytes: usize) -> Fixture {
    let options = TcpOptions {
        alive: Duration::from_millis(20),
        ..TcpOptions::default()
    };
    Fixture::new(
        Arc::new(TcpTransport::new(options)),
        "127.0.0.1:0",
        block_bytes,
    )
    .await
}

async fn shm(block_bytes: usize) -> Fixture {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let options = ShmOptions {
        alive: Duration::from_millis(20),
        ..ShmOptions::default()
    };
    let transport = ShmTransport::new("host", options);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let address = transport.address(&format!("conformance-{}-{next}", std::process::id()));
    Fixture::new(Arc::new(transport), &address, block_bytes).await
}

macro_rules! conformance {
    ($($module:ident::$case:ident($bytes:ident),)+) => {
        mod over_local {
            $(#[tokio::test]
            async fn $case() {
                super::within(super::$module::$case(super::local(super::$bytes).await)).await;
            })+
        }
        mod over_shm {
            $(#[tokio::test]
            async fn $case() {
                super::within(super::$module::$case(super::shm(super::$bytes).await)).await;
            })+
        }
        mod over_tcp {
            $(#[tokio::test]
            async fn $case() {
                super::within(super::$module::$case(super::tcp(super::$bytes).await)).await;
            })+
        }
    };
}

/// Bytes of a block.
const SMALL: usize = 4096;
const LARGE: usize = 1 << 18;

conformance! {
    cases::a_whole_lease_comes_byte_for_byte(SMALL),
    cases::a_block_comes_before_the_next_is_computed(SMALL),
    cases::skipped_blocks_are_not_sent(SMALL),
    cases::a_lease_without_blocks_ends_at_once(SMALL),
    cases::the_partly_filled_last_block_has_its_own_fill(SMALL),
    cases::the_seal_is_told_while_blocks_are_on_their_way(SMALL),
    cases::a_reader_goes_on_where_its_connection_broke(SMALL),
    cases::two_leases_do_not_mix(SMALL),
    cases::one_hand_off_after_another_over_one_pair(SMALL),
    cases::a_block_that_is_written_while_it_is_copied_shows(SMALL),
    // Larger than socket buffers, so that the source has to wait.
    cases::a_slow_reader_holds_up_nobody_else(LARGE),
    endings::nothing_without_a_claim(SMALL),
    endings::nothing_for_another_transfer(SMALL),
    endings::nothing_for_another_generation_or_lease(SMALL),
    endings::nothing_before_the_first_published_block(SMALL),
    endings::nothing_for_another_layout_or_size(SMALL),
    endings::nothing_after_a_release(SMALL),
    endings::a_release_ends_a_waiting_reader(SMALL),
    endings::an_expiry_in_the_middle_ends_the_reader(SMALL),
    endings::an_expired_lease_is_not_served_before_the_reaper_came(SMALL),
    endings::a_prefill_that_fails_ends_a_waiting_reader(SMALL),
    endings::a_source_that_dies_ends_its_readers(SMALL),
    endings::a_reader_that_dies_leaves_nothing_beyond_the_lease(SMALL),
    endings::bytes_of_whoever_has_the_block_next_never_leave(SMALL),
    endings::a_sink_that_refuses_ends_the_fetch(SMALL),
    endings::nobody_at_the_address_is_a_lost_source(SMALL),
    endings::an_address_in_use_is_an_error(SMALL),
}

//! Two workers' pools on two threads, and one hand-off after another between them.

use std::io;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use baton_protocol::failure::HandoffFailure;
use baton_protocol::hash::HashKey;
use baton_protocol::ids::{Generation, Incarnation, LeaseId, RunId, TransferId, WorkerId};
use baton_worker::kv::clock::MonotonicClock;
use baton_worker::kv::intake::verify::ChecksumMode;
use baton_worker::kv::intake::{Handoff, IntakeOptions, take};
use baton_worker::kv::lease::{LeaseOpen, Reader};
use baton_worker::kv::{
    BlockId, BlockStore, CacheScope, Geometry, KvPool, PoolConfig, Reservation, Reserve,
};
use baton_worker::transport::shm::{ShmOptions, ShmTransport, host};
use baton_worker::transport::tcp::TcpTransport;
use baton_worker::transport::{Arrival, BlockSink, FetchRequest, Transport};
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

use crate::Transports;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Shm,
    Tcp,
}

/// A lease that is sealed.
struct Prepared {
    lease: LeaseId,
    generation: Generation,
    blocks: Vec<BlockId>,
}

/// The reader's side, on the calling thread, and the source's thread.
pub(crate) struct Pair {
    geometry: Geometry,
    tokens: Vec<u32>,
    source: KvPool,
    reader: KvPool,
    transports: Transports,
    addresses: [String; 2],
    runtime: Runtime,
    prepare: Option<tokio::sync::mpsc::UnboundedSender<LeaseId>>,
    prepared: mpsc::Receiver<anyhow::Result<Prepared>>,
    thread: JoinHandle<anyhow::Result<()>>,
    hand_offs: u128,
}

impl Pair {
    /// Pools that hold `blocks` blocks and little more, so that the same memory is used again and again.
    pub(crate) fn new(geometry: Geometry, blocks: usize) -> anyhow::Result<Self> {
        let tokens: Vec<u32> = (0..(blocks * geometry.block_size) as u32).collect();
        let (source, reader) = (pool(geometry, blocks)?, pool(geometry, blocks)?);
        let shm = ShmTransport::new(&host()?, ShmOptions::default());
        let name = format!("bench-{}-{blocks}", std::process::id());
        let asked = shm.address(&name);
        let transports = Transports {
            shm: Arc::new(shm),
            tcp: Arc::new(TcpTransport::default()),
        };
        let (told, addresses) = mpsc::channel();
        let (prepare, mut asked_for) = tokio::sync::mpsc::unbounded_channel();
        let (done, prepared) = mpsc::channel();
        let (pool, of_source) = (source.clone(), tokens.clone());
        let serve = move || -> anyhow::Result<()> {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let stop = CancellationToken::new();
                let shm = ShmTransport::new(&host()?, ShmOptions::default());
                let tcp = TcpTransport::default();
                let all = Arc::new(pool.clone());
                let shm = shm.listen(&asked, all.clone(), stop.clone()).await?;
                let tcp = tcp.listen("127.0.0.1:0", all, stop.clone()).await?;
                told.send([shm.address.clone(), tcp.address.clone()])?;
                let serving = [tokio::spawn(shm.run), tokio::spawn(tcp.run)];
                while let Some(lease) = asked_for.recv().await {
                    done.send(seal(&pool, lease, &of_source).await)?;
                }
                stop.cancel();
                for serving in serving {
                    serving.await?;
                }
                Ok(())
            })
        };
        let thread = std::thread::spawn(serve);
        let addresses = addresses.recv().context("the source did not start")?;
        Ok(Self {
            geometry,
            tokens,
            source,
            reader,
            transports,
            addresses,
            runtime: Builder::new_current_thread().enable_all().build()?,
            prepare: Some(prepare),
            prepared,
            thread,
            hand_offs: 0,
        })
    }

    /// Of one hand-off.
    pub(crate) fn bytes(&self) -> usize {
        self.tokens.len() * self.geometry.bytes_per_token
    }

    pub(crate) fn end(mut self) -> anyhow::Result<()> {
        self.prepare = None;
        match self.thread.join() {
            Ok(ended) => ended,
            Err(_) => anyhow::bail!("the source's thread has panicked"),
        }
    }

    /// The source writes all blocks and seals a lease of them; the reader has room for them.
    fn ready(&mut self) -> anyhow::Result<(Prepared, Reservation)> {
        self.hand_offs += 1;
        let lease = LeaseId(self.hand_offs.to_le_bytes());
        let prepare = self.prepare.as_ref().context("it has ended")?;
        prepare.send(lease)?;
        let prepared = self.prepared.recv()??;
        self.reader.clear_cache();
        let reservation = self.reader.reserve(&Reserve {
            tokens: &self.tokens,
            scope: &CacheScope::default(),
            room: 0,
            leave_last: false,
        })?;
        Ok((prepared, reservation))
    }

    /// Seconds of a copy of all blocks, one after the other.
    pub(crate) fn copied(&mut self) -> anyhow::Result<f64> {
        let (prepared, reservation) = self.ready()?;
        let (from, to) = (self.source.store(), self.reader.store());
        let begin = Instant::now();
        for (source, target) in prepared.blocks.iter().zip(reservation.blocks()) {
            to.write(*target).copy_from_slice(&from.read(*source));
        }
        let seconds = begin.elapsed().as_secs_f64();
        self.source
            .release_lease(prepared.lease, &RunId::from("run"));
        Ok(seconds)
    }

    /// Seconds of a whole hand-off: claim, transfer, verification, report.
    pub(crate) fn taken(&mut self, way: Way) -> anyhow::Result<f64> {
        let (prepared, reservation) = self.ready()?;
        let (transport, address) = self.way(way);
        let handoff = Handoff {
            lease: prepared.lease,
            generation: prepared.generation,
            skip_blocks: 0,
            tokens: self.tokens.len() as u32,
            transport,
            address,
        };
        let options = IntakeOptions {
            reader: self.identity(),
            checksum: ChecksumMode::Always,
            timeout: Duration::from_secs(60),
            retries: 0,
        };
        let mut granted = || {};
        let taking = take(
            &handoff,
            &options,
            &self.source,
            &self.tokens,
            reservation,
            &mut granted,
        );
        let begin = Instant::now();
        let (_reservation, received) = self.runtime.block_on(taking);
        let seconds = begin.elapsed().as_secs_f64();
        let received = received?;
        anyhow::ensure!(received.bytes == self.bytes() as u64, "{received:?}");
        Ok(seconds)
    }

    /// Seconds of the transfer alone; nothing is verified.
    pub(crate) fn fetched(&mut self, way: Way) -> anyhow::Result<f64> {
        let (prepared, reservation) = self.ready()?;
        let reader = self.identity();
        self.source
            .claim(prepared.lease, prepared.generation, &reader)?;
        let (transport, address) = self.way(way);
        let request = FetchRequest {
            address,
            lease: prepared.lease,
            generation: prepared.generation,
            transfer: reader.transfer.clone(),
            first_block: 0,
            layout: self.source.layout(),
            block_bytes: self.geometry.block_bytes(),
        };
        let mut sink = Bare {
            store: self.reader.store(),
            blocks: reservation.blocks(),
        };
        let begin = Instant::now();
        self.runtime
            .block_on(transport.fetch(&request, &mut sink))?;
        let seconds = begin.elapsed().as_secs_f64();
        self.source
            .complete_read(prepared.lease, prepared.generation, &reader.transfer, true);
        Ok(seconds)
    }

    fn identity(&self) -> Reader {
        Reader {
            transfer: TransferId(format!("transfer-{}", self.hand_offs)),
            worker: WorkerId::from("reader"),
            incarnation: Incarnation(1),
        }
    }

    fn way(&self, way: Way) -> (Arc<dyn Transport>, String) {
        let (transport, address) = match way {
            Way::Shm => (&self.transports.shm, &self.addresses[0]),
            Way::Tcp => (&self.transports.tcp, &self.addresses[1]),
        };
        (Arc::clone(transport), address.clone())
    }
}

fn pool(geometry: Geometry, blocks: usize) -> anyhow::Result<KvPool> {
    let config = PoolConfig {
        geometry,
        blocks: blocks + 1,
        kv_identity: "bench".to_owned(),
        layout: 1,
        hash_key: HashKey::from_bytes(&[1; 32]),
        event_capacity: 16,
    };
    let clock = Arc::new(MonotonicClock::start());
    Ok(KvPool::new(config, u64::MAX, clock)?)
}

/// What a prefill leaves behind: every block written, completed and published, the lease sealed.
async fn seal(pool: &KvPool, lease: LeaseId, tokens: &[u32]) -> anyhow::Result<Prepared> {
    pool.clear_cache();
    let reserve = Reserve {
        tokens,
        scope: &CacheScope::default(),
        room: 0,
        leave_last: false,
    };
    let mut reservation = loop {
        match pool.reserve(&reserve) {
            Ok(reservation) => break reservation,
            // A reader's word that it is done may not have been heard yet.
            Err(_) => tokio::task::yield_now().await,
        }
    };
    let open = LeaseOpen {
        id: lease,
        run: RunId::from("run"),
        duration: 60_000,
        skip_blocks: 0,
    };
    let opened = pool.open_lease(&mut reservation, &open)?;
    let block_size = pool.store().geometry().block_size;
    let number = u128::from_le_bytes(lease.0) as usize;
    for (index, tokens) in tokens.chunks(block_size).enumerate() {
        let block = reservation.blocks()[index];
        pool.store()
            .write(block)
            .fill((number.wrapping_mul(31) + index) as u8);
        pool.complete_block(&mut reservation, index, tokens)?;
    }
    pool.seal(&reservation, tokens.len())?;
    Ok(Prepared {
        lease,
        generation: opened.generation,
        blocks: reservation.blocks().to_vec(),
    })
}

/// Takes everything.
struct Bare<'a> {
    store: &'a BlockStore,
    blocks: &'a [BlockId],
}

impl BlockSink for Bare<'_> {
    fn place(
        &mut self,
        index: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<io::Result<usize>, HandoffFailure> {
        Ok(fill(&mut self.store.write(self.blocks[index as usize])))
    }

    fn wants_checksum(&self, _: u32) -> bool {
        false
    }

    fn arrived(&mut self, _: &Arrival) -> Result<(), HandoffFailure> {
        Ok(())
    }

    fn sealed(&mut self, _: u32) {}
}

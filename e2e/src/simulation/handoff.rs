//! Moving KV in simulated time: when the last block is there is the hidden link's affair, what is there is production's.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use baton_placement::rng::Rng;
use baton_protocol::ids::{Generation, Incarnation, LeaseId, OperationId, RunId, TransferId};
use baton_worker::kv::intake::verify::ChecksumMode;
use baton_worker::kv::intake::{Handoff, IntakeOptions, take};
use baton_worker::kv::lease::Reader;
use baton_worker::kv::{KvPool, Reservation};
use baton_worker::transport::Transport;
use baton_worker::transport::local::LocalTransport;
use tokio_util::sync::CancellationToken;

use super::worker::{BLOCK_SIZE, BYTES_PER_TOKEN, SimulatedWorker};

/// How long moving KV really takes, in milliseconds: `alpha + perByte·bytes + perDescriptor·blocks`, and the round trips of the lease
/// protocol. Every transfer is off by a normal factor of this deviation.
#[derive(Clone, Copy, Debug)]
pub struct HiddenLink {
    pub alpha: f64,
    pub per_byte: f64,
    pub per_descriptor: f64,
    pub synchronization: f64,
    pub noise: f64,
}

impl HiddenLink {
    /// One block, once the transfer runs.
    pub fn per_block(&self) -> f64 {
        self.per_byte * f64::from(BLOCK_SIZE) * BYTES_PER_TOKEN as f64 + self.per_descriptor
    }
}

/// One transfer under way.
#[derive(Clone, Copy, Debug)]
pub struct Moving {
    lease: LeaseId,
    generation: Generation,
    tokens: usize,
    /// Factor on everything that the link does for it.
    factor: f64,
    /// When the blocks published so far will all be there.
    ready: f64,
    blocks: u32,
    /// What moving alone has taken: without waiting for blocks to be computed, and without waiting for the link.
    pub busy: f64,
    pub synchronization: f64,
    /// From the seal of the source to the last block.
    pub exposed: f64,
}

impl Moving {
    pub fn bytes(&self) -> u64 {
        u64::from(self.blocks) * u64::from(BLOCK_SIZE) * BYTES_PER_TOKEN as u64
    }

    pub fn blocks(&self) -> u32 {
        self.blocks
    }
}

/// All transfers from the prefill worker. They share its link, one block after the other.
#[derive(Debug)]
pub(crate) struct Handoffs {
    link: HiddenLink,
    /// Until when the link is taken.
    taken: f64,
    transport: LocalTransport,
    source: KvPool,
    /// Ends the serving task when this is dropped.
    _stop: tokio_util::sync::DropGuard,
    rng: Rng,
}

const SOURCE: &str = "source";

impl Handoffs {
    pub(crate) async fn new(link: HiddenLink, source: &SimulatedWorker, seed: u64) -> Result<Self> {
        let transport = LocalTransport::new();
        let stop = CancellationToken::new();
        let source = source.pool().clone();
        let listening = transport
            .listen(SOURCE, Arc::new(source.clone()), stop.clone())
            .await?;
        // Ended by the guard.
        tokio::spawn(listening.run);
        Ok(Self {
            link,
            taken: 0.0,
            transport,
            source,
            _stop: stop.drop_guard(),
            rng: Rng::new(seed ^ 0x6c69_6e6b),
        })
    }

    pub(crate) fn begin(
        &mut self,
        lease: LeaseId,
        generation: Generation,
        tokens: usize,
        now: f64,
    ) -> Moving {
        let factor = (1.0 + self.link.noise * self.normal()).max(0.2);
        let synchronization = self.link.synchronization * factor;
        Moving {
            lease,
            generation,
            tokens,
            factor,
            ready: now + synchronization / 2.0,
            blocks: 0,
            busy: 0.0,
            synchronization,
            exposed: 0.0,
        }
    }

    pub(crate) fn published(&mut self, moving: &mut Moving, blocks: u32, now: f64) {
        let mut duration = f64::from(blocks - moving.blocks) * self.link.per_block();
        if moving.blocks == 0 {
            duration += self.link.alpha;
        }
        duration *= moving.factor;
        moving.blocks = blocks;
        moving.busy += duration;
        moving.ready = now.max(moving.ready).max(self.taken) + duration;
        self.taken = moving.ready;
    }

    /// When the hand-off is done.
    pub(crate) fn sealed(&mut self, moving: &mut Moving, blocks: u32, now: f64) -> f64 {
        if blocks > moving.blocks {
            self.published(moving, blocks, now);
        }
        moving.exposed = (moving.ready - now).max(0.0);
        moving.ready.max(now) + moving.synchronization / 2.0
    }

    /// Claims, copies, verifies and reports, all by the code that workers run.
    pub(crate) async fn take(
        &self,
        run: usize,
        moving: &Moving,
        tokens: &[u32],
        reservation: Reservation,
    ) -> Result<Reservation> {
        let operation = OperationId::new(&RunId(format!("r-{run}")), 1, "decode");
        let handoff = Handoff {
            lease: moving.lease,
            generation: moving.generation,
            skip_blocks: reservation.completed_blocks() as u32,
            tokens: moving.tokens as u32,
            transport: Arc::new(self.transport.clone()),
            address: SOURCE.to_owned(),
        };
        let options = IntakeOptions {
            reader: Reader {
                transfer: TransferId::new(Incarnation(1), Incarnation(2), &operation),
                worker: "reader".into(),
                incarnation: Incarnation(2),
            },
            checksum: ChecksumMode::Always,
            timeout: Duration::from_secs(60),
            retries: 0,
        };
        let (reservation, received) = take(
            &handoff,
            &options,
            &self.source,
            tokens,
            reservation,
            &mut || {},
        )
        .await;
        received.context("hand-off")?;
        Ok(reservation)
    }

    /// Standard normal, by the method of Box and Muller.
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.rng.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.rng.unit()).cos()
    }
}

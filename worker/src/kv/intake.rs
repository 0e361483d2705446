//! Taking a hand-off: claim, read, verify, report, and only then use.
//!
//! The reservation goes in and comes out. Whatever happens, nothing that was not proven and accepted by its owner becomes part of it:
//! after a failure its complete blocks are those it had before, and the engine computes the rest. Dropping the future ends all
//! writes and releases the reservation with it.

pub mod client;
pub mod descriptor;
mod renewal;
mod sink;
pub mod verify;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use baton_protocol::failure::HandoffFailure;
use baton_protocol::ids::{Generation, LeaseId};
use tokio::time::{Instant, timeout};

use self::client::{CallFailed, LeaseClient};
use self::renewal::Renewal;
use self::sink::ReservedSink;
use self::verify::ChecksumMode;
use super::Reservation;
use super::lease::{Completion, Reader};
use crate::transport::{End, FetchRequest, Transport, TransportError};

/// Pause before a call or connection is tried again: longer than a lost packet's retransmission in a rack, short beside a transfer.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// How long the owner is told that a read failed; it would find out by itself when the lease expires.
const FAREWELL: Duration = Duration::from_millis(500);

/// What is to be taken, from a descriptor.
#[derive(Clone, Debug)]
pub struct Handoff {
    /// The capability.
    pub lease: LeaseId,
    /// Of the lease.
    pub generation: Generation,
    /// Leading blocks that the source does not publish.
    pub skip_blocks: u32,
    /// Tokens whose KV will be there when sealed, skipped ones included.
    pub tokens: u32,
    /// The way chosen by [`crate::transport::choice::choose`].
    pub transport: Arc<dyn Transport>,
    /// The source's address on it.
    pub address: String,
}

/// How it is taken.
#[derive(Clone, Debug)]
pub struct IntakeOptions {
    /// Who reads. The transfer id is used for this intake and never again.
    pub reader: Reader,
    /// Which blocks are checksummed.
    pub checksum: ChecksumMode,
    /// From the claim to the owner's answer to the report.
    pub timeout: Duration,
    /// Times that a broken connection or a failed claim is tried again.
    pub retries: u32,
}

/// A transfer that came through: as `TransferCompleted` on the wire.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Received {
    /// Bytes of the blocks that came.
    pub bytes: u64,
    /// Blocks that came.
    pub blocks: u32,
    /// Those of them that came before their source had published the last one: mostly while the prompt was computed, and also in the moment
    /// that its last blocks take to be copied out.
    pub early_blocks: u32,
    /// Kind of transport.
    pub transport: &'static str,
    /// From the claim to the last verified block.
    pub total_milliseconds: f64,
    /// From the seal of the source (or the grant, if later) to the last verified block.
    pub exposed_milliseconds: f64,
    /// Round trips of claim and completion. Renewals run beside the read.
    pub synchronization_milliseconds: f64,
    /// Connections and calls tried again.
    pub retries: u32,
}

/// A transfer that did not. Nothing of it is used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("hand-off: {cause}: {message}")]
pub struct IntakeFailed {
    /// The word for the run's record.
    pub cause: HandoffFailure,
    /// For people.
    pub message: String,
    /// Blocks that had been verified until then.
    pub verified_blocks: u32,
}

/// Takes the KV of `tokens` into `reservation`, which has room for them. `granted` is called once when the owner has granted the
/// claim. On success all full blocks of `tokens` are complete in the reservation, and the partly filled last one is in its place;
/// other requests find them up to the first whose checksum was not compared.
pub async fn take(
    handoff: &Handoff,
    options: &IntakeOptions,
    client: &dyn LeaseClient,
    tokens: &[u32],
    mut reservation: Reservation,
    granted: &mut (dyn FnMut() + Send),
) -> (Reservation, Result<Received, IntakeFailed>) {
    let mut sink = ReservedSink::new(&reservation, tokens, options.checksum);
    let mut intake = Intake {
        handoff,
        options,
        client,
        started: Instant::now(),
        synchronization: Duration::ZERO,
        retries: 0,
        claimed: false,
    };
    let result = match timeout(options.timeout, intake.run(&mut sink, tokens, granted)).await {
        Ok(result) => result,
        Err(_) => Err(Doubt::new(
            HandoffFailure::Timeout,
            format!(
                "the hand-off was not done after {} ms",
                options.timeout.as_millis()
            ),
        )),
    };
    let result = result.and_then(|received| {
        let block_size = reservation.pool().store().geometry().block_size;
        let first = reservation.completed_blocks();
        let pool = reservation.pool().clone();
        let blocks = tokens.chunks_exact(block_size).enumerate().skip(first);
        for ((index, block), proof) in blocks.zip(sink.verified()) {
            pool.complete_received(&mut reservation, index, block, *proof)
                .map_err(|error| Doubt::new(HandoffFailure::ProtocolError, error.to_string()))?;
        }
        Ok(received)
    });
    if let Err(doubt) = &result {
        intake.farewell(doubt.cause).await;
    }
    let result = result.map_err(|Doubt { cause, message }| IntakeFailed {
        cause,
        message,
        verified_blocks: sink.verified().len() as u32,
    });
    (reservation, result)
}

/// Gives back a lease of which its reader will read nothing, or nothing more: its owner need not hold the blocks until it expires.
/// For an intake that was dropped, or never begun.
pub async fn give_back(
    client: &dyn LeaseClient,
    lease: LeaseId,
    generation: Generation,
    reader: &Reader,
) {
    // Whether this reader's claim was granted, or heard, is not known here: it may be asked again.
    tell(client, lease, generation, reader, false).await;
}

/// Tells an owner that nobody reads. Only its claimant ends a lease: one that is not known to be `claimed` is claimed first.
async fn tell(
    client: &dyn LeaseClient,
    lease: LeaseId,
    generation: Generation,
    reader: &Reader,
    claimed: bool,
) {
    let told = async {
        if claimed || matches!(client.claim(lease, generation, reader).await, Ok(Ok(_))) {
            let transfer = &reader.transfer;
            let _ = client.complete(lease, generation, transfer, false).await;
        }
    };
    // Without an answer the lease expires.
    let _ = timeout(FAREWELL, told).await;
}

struct Doubt {
    cause: HandoffFailure,
    message: String,
}

impl Doubt {
    fn new(cause: HandoffFailure, message: impl Into<String>) -> Self {
        Self {
            cause,
            message: message.into(),
        }
    }
}

struct Intake<'a> {
    handoff: &'a Handoff,
    options: &'a IntakeOptions,
    client: &'a dyn LeaseClient,
    started: Instant,
    synchronization: Duration,
    retries: u32,
    claimed: bool,
}

impl<'a> Intake<'a> {
    async fn run(
        &mut self,
        sink: &mut ReservedSink,
        tokens: &[u32],
        granted: &mut (dyn FnMut() + Send),
    ) -> Result<Received, Doubt> {
        self.check(sink, tokens)?;
        let renewal = self.claim().await?;
        let granted_at = Instant::now();
        granted();

        let End { end } = tokio::select! {
            biased;
            read = fetch(self.handoff, self.options, &mut self.retries, sink) => read?,
            ended = renewal.keep(self.client) => return Err(ended),
        };
        if end != sink.end() {
            return Err(Doubt::new(
                HandoffFailure::Partial,
                format!(
                    "the source has blocks up to {end}, {} are needed",
                    sink.end()
                ),
            ));
        }
        self.complete(&renewal).await?;

        let done = sink.last_verified.unwrap_or(granted_at);
        let sealed = sink.sealed.map_or(granted_at, |(_, at)| at);
        let blocks = sink.verified().len() as u32;
        Ok(Received {
            bytes: u64::from(blocks) * sink.block_bytes() as u64,
            blocks,
            early_blocks: sink.early,
            transport: self.handoff.transport.kind(),
            total_milliseconds: milliseconds(done.saturating_duration_since(self.started)),
            exposed_milliseconds: milliseconds(
                done.saturating_duration_since(sealed.max(granted_at)),
            ),
            synchronization_milliseconds: milliseconds(self.synchronization),
            retries: self.retries,
        })
    }

    /// What can be known to be wrong before anything is asked.
    fn check(&self, sink: &ReservedSink, tokens: &[u32]) -> Result<(), Doubt> {
        if self.handoff.tokens as usize != tokens.len() {
            return Err(Doubt::new(
                HandoffFailure::FillMismatch,
                format!(
                    "the descriptor names {} tokens, the reader has {}",
                    self.handoff.tokens,
                    tokens.len()
                ),
            ));
        }
        if self.handoff.skip_blocks > sink.due() {
            return Err(Doubt::new(
                HandoffFailure::Partial,
                format!(
                    "the source skips {} blocks, the reader has {}",
                    self.handoff.skip_blocks,
                    sink.due()
                ),
            ));
        }
        if !sink.fits() {
            return Err(Doubt::new(
                HandoffFailure::FillMismatch,
                "the reservation has no room for all blocks: reserve the whole prompt",
            ));
        }
        Ok(())
    }

    async fn claim(&mut self) -> Result<Renewal<'a>, Doubt> {
        let options = self.options;
        let Handoff {
            lease, generation, ..
        } = *self.handoff;
        loop {
            let asked = Instant::now();
            let answer = self.client.claim(lease, generation, &options.reader).await;
            self.synchronization += asked.elapsed();
            match answer {
                Ok(Ok(granted)) => {
                    self.claimed = true;
                    return Ok(Renewal::new(
                        lease,
                        generation,
                        &options.reader.transfer,
                        asked,
                        granted,
                    ));
                }
                Ok(Err(gone)) => {
                    return Err(Doubt::new(
                        HandoffFailure::LeaseGone,
                        format!("the owner refused the claim: {gone}"),
                    ));
                }
                Err(CallFailed(message)) => {
                    retry(options, &mut self.retries, message).await?;
                }
            }
        }
    }

    /// Reports the read. The owner's answer decides: no answer, no use.
    async fn complete(&mut self, renewal: &Renewal<'_>) -> Result<(), Doubt> {
        let Handoff {
            lease, generation, ..
        } = *self.handoff;
        loop {
            if !renewal.may_read() {
                return Err(Doubt::new(
                    HandoffFailure::Stale,
                    "the grant ran out before the read was reported",
                ));
            }
            let asked = Instant::now();
            let transfer = &self.options.reader.transfer;
            let answer = self
                .client
                .complete(lease, generation, transfer, true)
                .await;
            self.synchronization += asked.elapsed();
            match answer {
                Ok(Completion::Accepted) => return Ok(()),
                Ok(Completion::Stale) => {
                    return Err(Doubt::new(
                        HandoffFailure::Stale,
                        "the lease ended before the read did",
                    ));
                }
                Err(CallFailed(message)) => {
                    retry(self.options, &mut self.retries, message).await?;
                }
            }
        }
    }

    /// Tells the owner that nobody will read any more, when there is somebody to tell.
    async fn farewell(&self, cause: HandoffFailure) {
        // A source whose bytes cannot be had may still answer: its lease would hold the blocks until it expires.
        let nobody = matches!(cause, HandoffFailure::LeaseGone | HandoffFailure::Stale);
        if !self.claimed || nobody {
            return;
        }
        let Handoff {
            lease, generation, ..
        } = *self.handoff;
        tell(self.client, lease, generation, &self.options.reader, true).await;
    }
}

async fn retry(options: &IntakeOptions, retries: &mut u32, message: String) -> Result<(), Doubt> {
    if *retries >= options.retries {
        return Err(Doubt::new(HandoffFailure::SourceLost, message));
    }
    *retries += 1;
    tokio::time::sleep(RETRY_PAUSE).await;
    Ok(())
}

/// Reads all blocks, over several connections if one breaks: each goes on after the last verified block.
async fn fetch(
    handoff: &Handoff,
    options: &IntakeOptions,
    retries: &mut u32,
    sink: &mut ReservedSink,
) -> Result<End, Doubt> {
    loop {
        let request = FetchRequest {
            address: handoff.address.clone(),
            lease: handoff.lease,
            generation: handoff.generation,
            transfer: options.reader.transfer.clone(),
            first_block: sink.due(),
            layout: sink.layout(),
            block_bytes: sink.block_bytes(),
        };
        match handoff.transport.fetch(&request, sink).await {
            Ok(end) => return Ok(end),
            Err(error) if error.is_retryable() => {
                retry(options, retries, error.to_string()).await?;
            }
            Err(error) => return Err(doubt(&error)),
        }
    }
}

fn doubt(error: &TransportError) -> Doubt {
    Doubt::new(error.failure(), error.to_string())
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

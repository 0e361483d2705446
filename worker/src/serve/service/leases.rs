//! The lease protocol, spoken by workers that read from this one.

use baton_protocol::ids::{Generation, Incarnation, LeaseId, RunId, TransferId, WorkerId};
use baton_protocol::wire::{self, claim_reply, renew_reply};
use tonic::Status;

use crate::kv::KvPool;
use crate::kv::lease::{Completion, Gone, Granted, Reader};
use crate::serve::daemon::Daemon;

/// Who owns leases, and who hears of what is done to them.
pub(crate) trait Owner {
    fn pool(&self) -> &KvPool;

    /// A reader was granted a lease; `traceparent` is its place in a trace.
    fn claimed(&self, reader: &Reader, traceparent: &str, generation: u64) {
        let _ = (reader, traceparent, generation);
    }

    /// A read has ended.
    fn completed(&self, transfer: &TransferId, verified: bool, stale: bool) {
        let _ = (transfer, verified, stale);
    }

    /// Leases are others than before.
    fn changed(&self);
}

impl Owner for Daemon {
    fn pool(&self) -> &KvPool {
        &self.pool
    }

    fn claimed(&self, reader: &Reader, traceparent: &str, generation: u64) {
        self.traces
            .claimed(&reader.transfer, traceparent, generation, &reader.worker.0);
    }

    fn completed(&self, transfer: &TransferId, verified: bool, stale: bool) {
        self.traces.completed(transfer, verified, stale);
    }

    fn changed(&self) {
        self.changed.notify_one();
    }
}

/// Bytes of a worker's name: that of a pod (RFC 1123, 253) with room.
const LONGEST_READER: usize = 256;
/// Bytes of a transfer's id: two incarnations and an operation, whose run carries a router's name (253) and 32 digits.
const LONGEST_TRANSFER: usize = 512;

fn lease(bytes: &[u8]) -> Result<LeaseId, Status> {
    LeaseId::from_wire(bytes).map_err(|error| Status::invalid_argument(error.to_string()))
}

/// Checks a name that is kept: what a peer may make this worker remember is bounded.
fn name(field: &str, name: String, longest: usize) -> Result<String, Status> {
    if name.is_empty() || name.len() > longest {
        return Err(Status::invalid_argument(format!(
            "{field}: {} bytes, it must be between 1 and {longest}: send the name that is in the card",
            name.len()
        )));
    }
    Ok(name)
}

fn granted(granted: Granted) -> wire::Granted {
    wire::Granted {
        for_milliseconds: granted.for_milliseconds,
    }
}

fn gone(gone: Gone) -> wire::Gone {
    wire::Gone {
        reason: gone.to_string(),
    }
}

pub(crate) fn claim(
    owner: &impl Owner,
    request: wire::ClaimRequest,
) -> Result<wire::ClaimReply, Status> {
    let lease = lease(&request.lease)?;
    let reader = Reader {
        transfer: TransferId::from(name("transfer", request.transfer, LONGEST_TRANSFER)?),
        worker: WorkerId::from(name("reader", request.reader, LONGEST_READER)?),
        incarnation: Incarnation(request.reader_incarnation),
    };
    let answer = owner
        .pool()
        .claim(lease, Generation(request.generation), &reader);
    if answer.is_ok() {
        owner.claimed(&reader, &request.traceparent, request.generation);
    }
    if let Err(reason) = answer {
        tracing::info!(%lease, %reason, reader = %reader.worker, "claim refused");
    }
    owner.changed();
    Ok(wire::ClaimReply {
        outcome: Some(match answer {
            Ok(answer) => claim_reply::Outcome::Granted(granted(answer)),
            Err(reason) => claim_reply::Outcome::Gone(gone(reason)),
        }),
    })
}

pub(crate) fn renew(
    owner: &impl Owner,
    request: &wire::RenewRequest,
) -> Result<wire::RenewReply, Status> {
    let answer = owner.pool().renew(
        lease(&request.lease)?,
        Generation(request.generation),
        &TransferId::from(request.transfer.as_str()),
    );
    Ok(wire::RenewReply {
        outcome: Some(match answer {
            Ok(answer) => renew_reply::Outcome::Granted(granted(answer)),
            Err(reason) => renew_reply::Outcome::Gone(gone(reason)),
        }),
    })
}

pub(crate) fn complete(
    owner: &impl Owner,
    request: wire::CompleteRequest,
) -> Result<wire::CompleteReply, Status> {
    let lease = lease(&request.lease)?;
    let transfer = TransferId::from(request.transfer);
    let completion = owner.pool().complete_read(
        lease,
        Generation(request.generation),
        &transfer,
        request.verified,
    );
    let stale = completion == Completion::Stale;
    owner.completed(&transfer, request.verified, stale);
    if !request.verified {
        tracing::warn!(%lease, "its reader could not use what it read");
    }
    owner.changed();
    Ok(wire::CompleteReply { stale })
}

pub(crate) fn release(
    owner: &impl Owner,
    request: wire::ReleaseRequest,
) -> Result<wire::ReleaseReply, Status> {
    // One that is not there was released before: no error.
    owner
        .pool()
        .release_lease(lease(&request.lease)?, &RunId::from(request.run));
    owner.changed();
    Ok(wire::ReleaseReply {})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_kept_are_bounded() {
        let of = |length: usize| name("reader", "d".repeat(length), LONGEST_READER);
        assert!(of(1).is_ok() && of(LONGEST_READER).is_ok());
        for length in [0, LONGEST_READER + 1, 1 << 20] {
            let refused = of(length).expect_err("not kept");
            assert!(refused.message().contains("reader: "), "{refused}");
        }
    }
}

//! The lease protocol, spoken by workers that read from this one.

use baton_protocol::ids::{Generation, Incarnation, LeaseId, RunId, TransferId, WorkerId};
use baton_protocol::wire::{self, claim_reply, renew_reply};
use tonic::Status;

use crate::kv::lease::{Completion, Gone, Granted, Reader};
use crate::serve::daemon::Daemon;

fn lease(bytes: &[u8]) -> Result<LeaseId, Status> {
    LeaseId::from_wire(bytes).map_err(|error| Status::invalid_argument(error.to_string()))
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

pub(super) fn claim(
    daemon: &Daemon,
    request: wire::ClaimRequest,
) -> Result<wire::ClaimReply, Status> {
    let lease = lease(&request.lease)?;
    let reader = Reader {
        transfer: TransferId::from(request.transfer),
        worker: WorkerId::from(request.reader),
        incarnation: Incarnation(request.reader_incarnation),
    };
    let answer = daemon
        .pool
        .claim(lease, Generation(request.generation), &reader);
    if let Err(reason) = answer {
        tracing::info!(%lease, %reason, reader = %reader.worker, "claim refused");
    }
    daemon.changed.notify_one();
    Ok(wire::ClaimReply {
        outcome: Some(match answer {
            Ok(answer) => claim_reply::Outcome::Granted(granted(answer)),
            Err(reason) => claim_reply::Outcome::Gone(gone(reason)),
        }),
    })
}

pub(super) fn renew(
    daemon: &Daemon,
    request: &wire::RenewRequest,
) -> Result<wire::RenewReply, Status> {
    let answer = daemon.pool.renew(
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

pub(super) fn complete(
    daemon: &Daemon,
    request: wire::CompleteRequest,
) -> Result<wire::CompleteReply, Status> {
    let lease = lease(&request.lease)?;
    let completion = daemon.pool.complete_read(
        lease,
        Generation(request.generation),
        &TransferId::from(request.transfer),
        request.verified,
    );
    if !request.verified {
        tracing::warn!(%lease, "its reader could not use what it read");
    }
    daemon.changed.notify_one();
    Ok(wire::CompleteReply {
        stale: completion == Completion::Stale,
    })
}

pub(super) fn release(
    daemon: &Daemon,
    request: wire::ReleaseRequest,
) -> Result<wire::ReleaseReply, Status> {
    // One that is not there was released before: no error.
    daemon
        .pool
        .release_lease(lease(&request.lease)?, &RunId::from(request.run));
    daemon.changed.notify_one();
    Ok(wire::ReleaseReply {})
}

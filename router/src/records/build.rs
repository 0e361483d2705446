//! Making a decision record from what a run leaves behind. Pure.

use std::sync::Arc;

use baton_placement::fleet::Fleet;
use baton_placement::place::Decision;
use baton_placement::policy::Policy;
use baton_placement::record::{
    Actual, ActualTerms, DecisionRecord, Fallback, RecordHead, RunOutcome, StateEntry,
    TransportLeft,
};
use baton_protocol::ids::Generation;
use baton_protocol::wire;

use crate::clock::Moment;
use crate::dispatch::progress::Progress;

/// What a run leaves behind. Built into a record by the writer's thread, off the request path.
#[derive(Clone, Debug)]
pub struct Material {
    pub head: RecordHead,
    pub decision: Decision,
    /// The snapshot that was placed on.
    pub fleet: Arc<Fleet>,
    /// Decisions of later attempts, oldest first.
    pub later: Vec<LaterMaterial>,
    pub policy: Arc<Policy>,
    pub progress: Progress,
    pub outcome: RunOutcome,
}

/// A decision after the first, the attempt that it was made for, and the snapshot that it was made on.
#[derive(Clone, Debug)]
pub struct LaterMaterial {
    pub attempt: u32,
    pub decision: Decision,
    pub fleet: Arc<Fleet>,
}

/// The record. Its own candidates are those of the decision that was made first.
pub fn record(material: Material) -> DecisionRecord {
    let Material {
        head,
        decision,
        fleet,
        later,
        progress,
        outcome,
        ..
    } = material;
    let mut record = DecisionRecord::new(head, &decision, &fleet);
    for later in &later {
        record.decided_later(later.attempt, &later.decision, &later.fleet);
    }
    record.states = states(&progress);
    let dispatched = progress.attempt() > 0;
    let actual = &progress.actual;
    record.actual = dispatched.then(|| Actual {
        terms: ActualTerms {
            queue: actual.queue,
            prefill: actual.prefill,
            transfer: actual.transfer,
            synchronization: actual.synchronization,
            admission: actual.admission,
        },
        first_token_milliseconds: progress.dispatched_to_first_token(),
        bytes: actual.bytes,
        transport: actual.transport.clone(),
        planned_transport: actual.planned_transport.clone(),
        transports_left: actual.transports_left.iter().map(left).collect(),
        retries: progress.attempt().saturating_sub(1) + actual.transfer_retries,
        failed_transfers: actual.failed_transfers,
    });
    record.assurance = dispatched.then_some(progress.assurance);
    record.fallback = progress.fallback.as_ref().map(|fallback| Fallback {
        cause: fallback.cause.clone(),
        at: fallback.at.rfc3339(),
    });
    record.outcome = Some(outcome);
    record
}

fn left(left: &wire::TransportLeft) -> TransportLeft {
    TransportLeft {
        from: left.from.clone(),
        to: left.to.clone(),
        cause: left.cause.clone(),
    }
}

fn states(progress: &Progress) -> Vec<StateEntry> {
    progress
        .history()
        .iter()
        .map(|event| StateEntry {
            state: event.state.word().to_owned(),
            at: Moment(event.at).rfc3339(),
            attempt: event.attempt,
            operation: event.detail.operation.clone(),
            worker: event.detail.worker.clone(),
            incarnation: event.detail.incarnation,
            generation: event.detail.generation.map(Generation),
            domain: event.detail.domain.clone(),
            inferred: event.detail.inferred,
        })
        .collect()
}

#[cfg(test)]
pub(super) mod tests;

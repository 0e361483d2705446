//! What the tasks of one worker share.

use std::collections::HashMap;
use std::sync::Arc;

use baton_placement::coefficients::WorkerCoefficients;
use baton_protocol::card::{Card, Role};
use baton_protocol::failure::Refusal;
use baton_protocol::ids::LeaseId;
use baton_protocol::wire;
use baton_system::entropy::Entropy;
use bytes::Bytes;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::compute::Commands;
use super::messages;
use super::metrics::Metrics;
use super::operations::Operations;
use super::peers::Peers;
use super::results::Results;
use super::traces::Traces;
use crate::engine::{LoadBoard, Refused};
use crate::kv::KvPool;
use crate::transport::Transport;
use crate::transport::choice::Offer;

/// Shared by all tasks of a worker; nothing in it is changed without a lock or a channel of its own.
#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) card: Card,
    pub(crate) card_json: String,
    pub(crate) pool: KvPool,
    pub(crate) board: Arc<LoadBoard>,
    pub(crate) commands: Commands,
    /// In the worker's own order of preference.
    pub(crate) transports: Vec<Arc<dyn Transport>>,
    pub(crate) offers: Vec<Offer>,
    pub(crate) operations: Operations,
    pub(crate) results: Results,
    pub(crate) peers: Peers,
    pub(crate) entropy: Arc<dyn Entropy>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) traces: Traces,
    /// By digest.
    pub(crate) artifacts: HashMap<String, Bytes>,
    /// Milliseconds of a lease whose opener does not say.
    pub(crate) lease_duration: u64,
    pub(crate) draining: watch::Sender<bool>,
    /// The last load report.
    pub(crate) load: watch::Sender<wire::Load>,
    pub(crate) coefficients: watch::Sender<WorkerCoefficients>,
    /// A load report is due.
    pub(crate) changed: Arc<Notify>,
    /// Owns every task that an operation needs.
    pub(crate) tracker: TaskTracker,
    pub(crate) stop: CancellationToken,
    pub(crate) started: Instant,
}

impl Daemon {
    /// What refuses any operation before it is looked at closely.
    pub(crate) fn admit(&self, operation: &wire::Operation, role: Role) -> Result<(), Refused> {
        if !self.card.can(role) {
            return Err(messages::invalid(format!(
                "worker {}: its engine does no {role}: take the roles from its card",
                self.card.worker
            )));
        }
        if *self.draining.borrow() {
            return Err(Refused {
                reason: Refusal::Draining,
                message: format!(
                    "worker {} drains: send the request to another one",
                    self.card.worker
                ),
                retry_after: 0,
            });
        }
        if operation.kv_identity != self.card.kv_identity {
            return Err(Refused {
                reason: Refusal::IdentityMismatch,
                message: format!(
                    "operation.kvIdentity: {} was placed for, worker {} has {}: read its card again",
                    shown(&operation.kv_identity),
                    self.card.worker,
                    shown(&self.card.kv_identity)
                ),
                retry_after: 0,
            });
        }
        Ok(())
    }

    /// Makes the next load report.
    pub(crate) fn report(&self) -> wire::Load {
        let now = self.started.elapsed().as_secs_f64() * 1e3;
        self.board.report(now, &self.pool, *self.draining.borrow())
    }

    pub(crate) fn set_draining(&self, draining: bool) {
        let changed = self
            .draining
            .send_if_modified(|before| std::mem::replace(before, draining) != draining);
        if changed {
            tracing::info!(worker = %self.card.worker, draining, "drain");
            self.changed.notify_one();
        }
    }

    /// The descriptor of a lease that this worker has opened.
    pub(crate) fn descriptor(
        &self,
        lease: LeaseId,
        generation: u64,
        expires_in: u64,
        skip_blocks: u32,
        tokens: u32,
    ) -> wire::Descriptor {
        wire::Descriptor {
            worker: self.card.worker.0.clone(),
            incarnation: self.card.incarnation.0,
            lease: Bytes::copy_from_slice(&lease.0),
            generation,
            expires_in_milliseconds: expires_in,
            kv_identity: self.card.kv_identity.clone(),
            layout_digest: self.card.layout_digest.clone(),
            control_address: self.card.control_address.clone(),
            transports: self
                .offers
                .iter()
                .map(|offer| wire::TransportAddress {
                    kind: offer.kind.clone(),
                    address: offer.address.clone(),
                })
                .collect(),
            skip_blocks,
            tokens,
        }
    }
}

fn shown(identity: &str) -> &str {
    if identity.is_empty() {
        return "none";
    }
    identity.get(..12).unwrap_or(identity)
}

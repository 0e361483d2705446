//! What an attempt holds and has to give back however it ends: its place in estimates, promised bytes, the fallback budget.

use std::sync::Arc;

use baton_placement::fleet::OwnDispatches;
use baton_placement::policy::Policy;
use baton_protocol::ids::WorkerId;

use super::Shared;
use super::progress::Party;
use crate::fleet::PromiseTicket;
use crate::fleet::own::Ticket;
use crate::fleet::snapshot::Promise;

/// Gives everything back when dropped.
#[derive(Debug)]
pub(super) struct Held {
    shared: Arc<Shared>,
    policy: Arc<Policy>,
    tickets: Vec<(WorkerId, Ticket)>,
    promise: Option<PromiseTicket>,
    recompute: Option<WorkerId>,
    without_prefill: bool,
}

impl Held {
    pub(super) fn new(shared: Arc<Shared>, policy: Arc<Policy>) -> Self {
        Self {
            shared,
            policy,
            tickets: Vec::new(),
            promise: None,
            recompute: None,
            without_prefill: false,
        }
    }

    pub(super) fn dispatched(&mut self, party: &Party, dispatch: OwnDispatches) {
        let ticket = self
            .shared
            .workers
            .dispatched(&party.worker, party.incarnation, dispatch);
        self.tickets.push((party.worker.clone(), ticket));
    }

    /// The worker counts it from this load report on.
    pub(super) fn admitted(&self, worker: &WorkerId, load_sequence: u64) {
        for (_, ticket) in self.tickets.iter().filter(|(known, _)| known == worker) {
            self.shared.workers.admitted(*ticket, worker, load_sequence);
        }
    }

    pub(super) fn promise(&mut self, promise: Promise) {
        self.moved();
        self.promise = Some(self.shared.workers.promise(promise));
    }

    pub(super) fn moved(&mut self) {
        if let Some(ticket) = self.promise.take() {
            self.shared.workers.moved(ticket);
        }
    }

    /// The fallback budget was granted for this worker.
    pub(super) fn recomputes(&mut self, worker: WorkerId) {
        self.recompute = Some(worker);
    }

    /// The run is local only for lack of a prefill worker.
    pub(super) fn lacks_prefill(&mut self) {
        self.without_prefill = true;
        *self
            .shared
            .without_prefill
            .lock()
            .entry(self.policy.name.clone())
            .or_default() += 1;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for (_, ticket) in self.tickets.drain(..) {
            self.shared.workers.ended(ticket);
        }
        self.moved();
        if let Some(worker) = self.recompute.take() {
            self.shared.learning.recompute_ended(&worker, &self.policy);
        }
        if self.without_prefill
            && let Some(count) = self
                .shared
                .without_prefill
                .lock()
                .get_mut(&self.policy.name)
        {
            *count = count.saturating_sub(1);
        }
    }
}

//! What an attempt holds and has to give back however it ends: its place in estimates, promised bytes, the probe of a link, the
//! fallback budget.

use std::sync::Arc;

use baton_placement::breaker::Pass;
use baton_placement::fleet::OwnDispatches;
use baton_placement::policy::Policy;
use baton_protocol::ids::WorkerId;

use super::Shared;
use super::progress::Party;
use crate::fleet::PromiseTicket;
use crate::fleet::own::Ticket;
use crate::fleet::snapshot::Promise;
use crate::learning::LinkUse;

/// Gives everything back when dropped.
#[derive(Debug)]
pub(super) struct Held {
    shared: Arc<Shared>,
    policy: Arc<Policy>,
    tickets: Vec<(WorkerId, Ticket)>,
    promise: Option<PromiseTicket>,
    pass: Option<(LinkUse, Pass)>,
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
            pass: None,
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

    /// The attempt may use this link.
    pub(super) fn may_use(&mut self, link: LinkUse, pass: Pass) {
        self.give_back_pass();
        self.pass = Some((link, pass));
    }

    /// What is told with the result of a transfer over `link`. Where the worker took another link than the planned one, nobody has
    /// tried the planned one.
    pub(super) fn pass_for(&mut self, link: &LinkUse) -> Pass {
        match self.pass.take() {
            Some((planned, pass)) if planned == *link => pass,
            planned => {
                self.pass = planned;
                self.give_back_pass();
                Pass::Free
            }
        }
    }

    /// The attempt uses the link no more, and has found out nothing about it.
    pub(super) fn give_back_pass(&mut self) {
        if let Some((link, pass @ Pass::Probe(_))) = self.pass.take() {
            self.shared.learning.give_back(&link, pass);
            self.shared.workers.learnt_more();
        }
    }

    /// The worker refused the recompute that its budget was granted for. True: it was one.
    pub(super) fn recompute_refused(&mut self) -> bool {
        let granted = self.recompute.take();
        if let Some(worker) = &granted {
            self.shared.learning.recompute_refused(worker, &self.policy);
        }
        granted.is_some()
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
        self.give_back_pass();
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

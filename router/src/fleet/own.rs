//! Dead reckoning: what this router sent to workers and no load report counts yet.
//!
//! An admission says from which load report on it is counted. Until a report with that sequence has come, the router adds the
//! dispatch to its own estimate of the worker.

use std::collections::HashMap;

use baton_placement::fleet::OwnDispatches;
use baton_protocol::ids::{Incarnation, WorkerId};

/// One dispatch that may still have to be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

#[derive(Clone, Debug)]
struct Entry {
    worker: WorkerId,
    incarnation: Incarnation,
    dispatch: OwnDispatches,
    /// Load report from which on the worker counts it; unknown until it is admitted.
    counted_from: Option<u64>,
}

/// Dispatches under way. Bounded by the requests in flight, two workers each.
#[derive(Clone, Debug, Default)]
pub struct OwnLedger {
    next: u64,
    entries: HashMap<Ticket, Entry>,
    /// What each worker was sent: asked for all workers at each change of any.
    workers: HashMap<WorkerId, Sent>,
}

#[derive(Clone, Debug, Default)]
struct Sent {
    tickets: Vec<Ticket>,
    sum: OwnDispatches,
}

impl OwnLedger {
    pub fn dispatch(
        &mut self,
        worker: &WorkerId,
        incarnation: Incarnation,
        dispatch: OwnDispatches,
    ) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        let entry = Entry {
            worker: worker.clone(),
            incarnation,
            dispatch,
            counted_from: None,
        };
        self.entries.insert(ticket, entry);
        let sent = self.workers.entry(worker.clone()).or_default();
        sent.tickets.push(ticket);
        sent.sum = added(sent.sum, dispatch);
        ticket
    }

    /// The worker counts it from this report on.
    pub fn admitted(&mut self, ticket: Ticket, load_sequence: u64) {
        if let Some(entry) = self.entries.get_mut(&ticket) {
            entry.counted_from = Some(load_sequence);
        }
    }

    /// Over, whether it was counted or not.
    pub fn ended(&mut self, ticket: Ticket) {
        if let Some(entry) = self.entries.remove(&ticket) {
            self.keep(&entry.worker, |_| true);
        }
    }

    /// A report came: what it counts is dropped, and so is what was sent to an earlier incarnation.
    pub fn reported(&mut self, worker: &WorkerId, incarnation: Incarnation, load_sequence: u64) {
        self.keep(worker, |entry| {
            entry.incarnation == incarnation
                && entry
                    .counted_from
                    .is_none_or(|counted| counted > load_sequence)
        });
    }

    /// Keeps those of a worker's entries that are there and that `stays` holds for. Sums are made anew, so that one which has hit
    /// its bound comes back from it.
    fn keep(&mut self, worker: &WorkerId, stays: impl Fn(&Entry) -> bool) {
        let Some(sent) = self.workers.get_mut(worker) else {
            return;
        };
        let entries = &mut self.entries;
        let mut sum = OwnDispatches::default();
        sent.tickets.retain(|ticket| {
            let Some(entry) = entries.get(ticket) else {
                return false;
            };
            let stays = stays(entry);
            if stays {
                sum = added(sum, entry.dispatch);
            } else {
                entries.remove(ticket);
            }
            stays
        });
        sent.sum = sum;
        if sent.tickets.is_empty() {
            self.workers.remove(worker);
        }
    }

    /// What is to be added to the worker's last report.
    pub fn sum(&self, worker: &WorkerId) -> OwnDispatches {
        self.workers
            .get(worker)
            .map(|sent| sent.sum)
            .unwrap_or_default()
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

fn added(sum: OwnDispatches, more: OwnDispatches) -> OwnDispatches {
    OwnDispatches {
        queued_tokens: sum.queued_tokens.saturating_add(more.queued_tokens),
        queued_sequences: sum.queued_sequences.saturating_add(more.queued_sequences),
        sequences: sum.sequences.saturating_add(more.sequences),
        context_tokens: sum.context_tokens.saturating_add(more.context_tokens),
        blocks: sum.blocks.saturating_add(more.blocks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Incarnation = Incarnation(1);

    fn tokens(queued_tokens: u64) -> OwnDispatches {
        OwnDispatches {
            queued_tokens,
            queued_sequences: 1,
            ..OwnDispatches::default()
        }
    }

    #[test]
    fn a_dispatch_counts_until_a_report_counts_it() {
        let mut ledger = OwnLedger::default();
        let worker = WorkerId::from("d");
        let ticket = ledger.dispatch(&worker, FIRST, tokens(100));
        ledger.dispatch(&worker, FIRST, tokens(7));
        ledger.reported(&worker, FIRST, 5);
        assert_eq!(ledger.sum(&worker).queued_tokens, 107, "not admitted yet");
        ledger.admitted(ticket, 7);
        ledger.reported(&worker, FIRST, 6);
        assert_eq!(
            ledger.sum(&worker).queued_tokens,
            107,
            "the report is older"
        );
        ledger.reported(&worker, FIRST, 7);
        assert_eq!(ledger.sum(&worker).queued_tokens, 7);
    }

    #[test]
    fn what_a_dead_incarnation_was_sent_is_forgotten() {
        let mut ledger = OwnLedger::default();
        let worker = WorkerId::from("d");
        ledger.dispatch(&worker, FIRST, tokens(100));
        ledger.reported(&worker, Incarnation(2), 0);
        assert!(ledger.is_empty());
    }

    #[test]
    fn a_sum_at_its_bound_comes_back_from_it() {
        let mut ledger = OwnLedger::default();
        let worker = WorkerId::from("d");
        let blocks = |blocks| OwnDispatches {
            blocks,
            ..OwnDispatches::default()
        };
        let ticket = ledger.dispatch(&worker, FIRST, blocks(u32::MAX));
        ledger.dispatch(&worker, FIRST, blocks(3));
        assert_eq!(ledger.sum(&worker).blocks, u32::MAX);
        ledger.ended(ticket);
        assert_eq!(ledger.sum(&worker).blocks, 3);
    }

    #[test]
    fn workers_are_kept_apart_and_the_end_removes() {
        let mut ledger = OwnLedger::default();
        let (first, second) = (WorkerId::from("a"), WorkerId::from("b"));
        let ticket = ledger.dispatch(&first, FIRST, tokens(1));
        ledger.dispatch(&second, FIRST, tokens(2));
        ledger.ended(ticket);
        assert_eq!(ledger.sum(&first), OwnDispatches::default());
        assert_eq!(ledger.sum(&second).queued_tokens, 2);
        ledger.reported(&second, Incarnation(2), 0);
        assert!(ledger.is_empty() && ledger.workers.is_empty());
    }
}

//! Operations that this worker has taken and not ended, by run: so that a run can be cancelled and a drain can be waited for.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_protocol::ids::{OperationId, RunId};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The table. Cloning shares it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Operations(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    live: Mutex<HashMap<RunId, Vec<Live>>>,
    /// Operations registered so far.
    last: AtomicU64,
    /// How many; changes with each.
    count: watch::Sender<usize>,
    /// Ids of decodes that live or ended lately, and until when they are remembered: none runs twice.
    ended: Mutex<Ended>,
}

#[derive(Debug, Default)]
struct Ended {
    until: HashMap<OperationId, u64>,
    live: HashSet<OperationId>,
}

#[derive(Clone, Debug)]
struct Live {
    operation: OperationId,
    /// In this table; two operations of a run may bear the same id, as a prefill and a decode made by another hand.
    number: u64,
    cancel: CancellationToken,
    over: CancellationToken,
}

/// One live operation; leaves the table when it is dropped.
#[derive(Debug)]
pub(crate) struct Registered {
    run: RunId,
    live: Live,
    table: Operations,
}

impl Registered {
    /// Cancelled when the run is.
    pub(crate) fn cancelled(&self) -> &CancellationToken {
        &self.live.cancel
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut live = self.table.0.live.lock();
        if let Some(of_run) = live.get_mut(&self.run) {
            of_run.retain(|other| other.number != self.live.number);
            if of_run.is_empty() {
                live.remove(&self.run);
            }
        }
        let count = live.values().map(Vec::len).sum();
        drop(live);
        self.table.0.count.send_replace(count);
        self.live.over.cancel();
    }
}

impl Operations {
    pub(crate) fn register(&self, run: &RunId, operation: &OperationId) -> Registered {
        let entry = Live {
            operation: operation.clone(),
            number: self.0.last.fetch_add(1, Ordering::Relaxed),
            cancel: CancellationToken::new(),
            over: CancellationToken::new(),
        };
        let mut live = self.0.live.lock();
        live.entry(run.clone()).or_default().push(entry.clone());
        let count = live.values().map(Vec::len).sum();
        drop(live);
        self.0.count.send_replace(count);
        Registered {
            run: run.clone(),
            live: entry,
            table: self.clone(),
        }
    }

    /// Notes that an id is used now. False when it is, or was until lately.
    pub(crate) fn claim_id(&self, operation: &OperationId) -> bool {
        let mut ended = self.0.ended.lock();
        !ended.until.contains_key(operation) && ended.live.insert(operation.clone())
    }

    /// The id is no longer in use; it is remembered until `until` milliseconds.
    pub(crate) fn retire_id(&self, operation: &OperationId, until: u64) {
        let mut ended = self.0.ended.lock();
        ended.live.remove(operation);
        ended.until.insert(operation.clone(), until);
    }

    /// Nothing was begun with this id: it may be tried again.
    pub(crate) fn release_id(&self, operation: &OperationId) {
        self.0.ended.lock().live.remove(operation);
    }

    /// Forgets ids that are due.
    pub(crate) fn forget(&self, now: u64) {
        self.0.ended.lock().until.retain(|_, until| *until > now);
    }

    /// Cancels all operations of a run, or the one that is named, and returns what ends when they have.
    pub(crate) fn cancel(&self, run: &RunId, only: Option<&OperationId>) -> Vec<CancellationToken> {
        let mut live = self.0.live.lock().get(run).cloned().unwrap_or_default();
        live.retain(|operation| only.is_none_or(|only| operation.operation == *only));
        for operation in &live {
            operation.cancel.cancel();
        }
        live.into_iter().map(|operation| operation.over).collect()
    }

    /// Cancels everything.
    pub(crate) fn cancel_all(&self) {
        for operation in self.0.live.lock().values().flatten() {
            operation.cancel.cancel();
        }
    }

    pub(crate) fn count(&self) -> usize {
        *self.0.count.borrow()
    }

    pub(crate) fn watch_count(&self) -> watch::Receiver<usize> {
        self.0.count.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancelled_run_reaches_its_operations_only() {
        let table = Operations::default();
        let first = table.register(&"r".into(), &"r/1/prefill".into());
        let second = table.register(&"r".into(), &"r/1/decode".into());
        let other = table.register(&"s".into(), &"s/1/decode".into());
        let ends = table.cancel(&"r".into(), None);
        assert_eq!(ends.len(), 2);
        assert!(first.cancelled().is_cancelled() && second.cancelled().is_cancelled());
        assert!(!other.cancelled().is_cancelled());
        drop(first);
        assert!(ends[0].is_cancelled() && !ends[1].is_cancelled());
        assert_eq!(table.count(), 2);
        // The one that goes takes nobody with it: a later cancellation still reaches the other.
        assert_eq!(table.cancel(&"r".into(), None).len(), 1);
        assert!(table.cancel(&"unknown".into(), None).is_empty());
    }

    #[test]
    fn a_cancelled_operation_takes_no_later_attempt_with_it() {
        let table = Operations::default();
        let first = table.register(&"r".into(), &"r/1/decode".into());
        let second = table.register(&"r".into(), &"r/2/decode".into());
        let ends = table.cancel(&"r".into(), Some(&"r/1/decode".into()));
        assert_eq!(ends.len(), 1);
        assert!(first.cancelled().is_cancelled() && !second.cancelled().is_cancelled());
    }

    #[test]
    fn an_id_is_used_once_and_remembered_for_a_while() {
        let table = Operations::default();
        let id = OperationId::from("r/1/decode");
        assert!(table.claim_id(&id));
        assert!(!table.claim_id(&id));
        table.retire_id(&id, 100);
        assert!(!table.claim_id(&id));
        table.forget(100);
        assert!(table.claim_id(&id));
    }
}

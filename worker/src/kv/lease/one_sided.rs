//! One-sided reads of a lease's blocks: a peer reads memory without asking, so only its backend knows when it has stopped.

use std::sync::{Arc, Weak};

use baton_protocol::ids::LeaseId;

/// A one-sided read that may be under way.
///
/// The transport keeps it for exactly as long as the peer can still touch the blocks: until its backend reports a terminal state,
/// or until the connection (mapping, queue pair, key) is torn down. When the lease ends the transport is told by the closing of the
/// lease's watch; it then ends the read and gives this back to `KvPool::one_sided_end`. Dropped instead, as when a connection's task
/// is dropped with all it holds, it is found by the reaper. Time alone never ends it.
#[derive(Debug)]
#[must_use = "the blocks may be reused as soon as this is dropped"]
pub struct OneSidedRead {
    lease: LeaseId,
    // Its being there is all that it says.
    _going_on: Arc<()>,
}

impl OneSidedRead {
    /// The lease that is read.
    pub fn lease(&self) -> LeaseId {
        self.lease
    }
}

/// The reads of one lease.
#[derive(Debug, Default)]
pub(crate) struct Reads(Vec<Weak<()>>);

impl Reads {
    pub(crate) fn begin(&mut self, lease: LeaseId) -> OneSidedRead {
        self.forget_those_over();
        let going_on = Arc::new(());
        self.0.push(Arc::downgrade(&going_on));
        OneSidedRead {
            lease,
            _going_on: going_on,
        }
    }

    pub(crate) fn forget_those_over(&mut self) {
        self.0.retain(|read| read.strong_count() > 0);
    }

    /// Of those that were not over when they were last looked at.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

//! What the looks of both controllers share.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::caches::Caches;
use super::events::Events;
use super::key::{PolicyKey, PoolKey};
use super::reports::Reports;
use super::routers::Routers;
use super::writes::Writes;
use crate::metrics::Metrics;
use crate::pool::{CreationError, Pending, Settings};
use crate::worker::Workers;

/// Everything that a look reads, and its one way out.
#[derive(Debug)]
pub struct Context {
    pub caches: Caches,
    pub writes: Writes,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    pub settings: Settings,
    pub workers: Workers,
    pub reports: Reports,
    pub routers: Routers,
    /// What is remembered of each pool. It may be lost at any time: what it speeds up or keeps quiet is found out again.
    pub memory: Mutex<BTreeMap<PoolKey, Arc<Mutex<Memory>>>>,
    /// Policies that cannot be read, and what was said of them: generation and reason.
    pub unreadable_policies: Mutex<BTreeMap<PolicyKey, (Option<i64>, String)>>,
    pub start: Instant,
}

/// What is remembered of one pool. Only one look at a pool is under way at a time.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    pub pending: Pending,
    /// Pods of which it is not known whether a write to them has arrived: what became of them is asked before the next plan.
    pub uncertain: BTreeMap<String, Attempt>,
    /// Pods whose workers did not answer when they were last asked to drain.
    pub silent: BTreeSet<String>,
    /// Why the last pod that was to be created was refused.
    pub creation_error: Option<CreationError>,
    /// The last write of a status to an object that cannot be read, whose status is not known therefore: its generation and why.
    pub unreadable: Option<(Option<i64>, String)>,
}

/// A write whose answer has not come, or not yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attempt {
    Create,
    /// Of the pod of this uid.
    Delete(String),
}

impl Context {
    /// The memory of one pool.
    #[must_use]
    pub fn memory_of(&self, key: &PoolKey) -> Arc<Mutex<Memory>> {
        self.memory.lock().entry(key.clone()).or_default().clone()
    }

    /// Time of the process's own clock.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

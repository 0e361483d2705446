//! What placement knows of the workers: an immutable snapshot, made anew at each change and swapped as a whole.
//!
//! Who the workers are and what lies between them changes with cards, places and fits; what they do, with every request. The first
//! is shared by all snapshots between two such changes, so that a new one costs some numbers a worker and no names.
//!
//! `fleet::build` is how a router fills it, `fleet::renewal` how the next one follows from it, `fleet::links` what lies between
//! two domains.

mod build;
mod links;
mod renewal;

use std::sync::Arc;

use baton_protocol::card::Role;
use baton_protocol::ids::{Incarnation, WorkerId};
use serde::{Deserialize, Serialize};

pub use build::{FleetBuilder, FleetError, WorkerEntry};
pub use links::domain_key;
pub(crate) use links::{Links, NoRoute, Route};
pub use renewal::Renewal;

use crate::coefficients::CoefficientSet;
use crate::cost::ChunkRule;
use crate::policy::Assurance;

/// A worker's position in a [`Fleet`].
pub type WorkerIndex = usize;

/// The name of the level of two workers that share none.
pub const BEYOND: &str = "beyond";

/// An immutable picture of all workers and links. Cheap to share, never changed.
#[derive(Clone, Debug)]
pub struct Fleet {
    pub version: u64,
    /// Routers that place on these workers, this one included.
    pub routers: u32,
    /// Level names, nearest first; a pair that shares none has level `levels.len()`, named [`BEYOND`].
    pub levels: Arc<[String]>,
    pub coefficients: Arc<CoefficientSet>,
    /// Digest of `coefficients`.
    pub coefficients_digest: Arc<str>,
    /// Who they are.
    pub workers: Arc<Workers>,
    /// What they do, in the same order.
    pub loads: Vec<WorkerLoad>,
    pub(crate) links: Links,
}

/// What does not change from request to request: parallel arrays, one entry per worker.
#[derive(Clone, Debug, Default)]
pub struct Workers {
    pub id: Vec<WorkerId>,
    pub incarnation: Vec<Incarnation>,
    /// The worker's position in prefix hits.
    pub slot: Vec<u32>,
    pub pool: Vec<u32>,
    pub can_prefill: Vec<bool>,
    pub can_decode: Vec<bool>,
    /// Who vouches for KV that it hands over.
    pub hands_over: Vec<Assurance>,
    /// Milliseconds for which it keeps a prompt's blocks for another worker, where that cannot ask for longer.
    pub lease: Vec<Option<f64>>,
    pub kv_identity: Vec<String>,
    pub adapters: Vec<Vec<String>>,
    /// Position in `coefficients.workers`.
    pub class: Vec<u32>,
    pub chunks: Vec<ChunkRule>,
    pub block_size: Vec<u32>,
    pub bytes_per_token: Vec<u64>,
    pub max_sequences: Vec<u32>,
    pub(crate) domain: Vec<u32>,
    pub(crate) compatibility: Vec<u32>,
    pub(crate) transports: Vec<u32>,
    /// Pool names; `pool` names them by position.
    pub pools: Vec<String>,
    /// Of which kind each pool is, where that is known.
    pub pool_roles: Vec<Option<Role>>,
    /// One row of bits per compatibility class of a prefill worker.
    pub(crate) compatible: Vec<Vec<bool>>,
}

/// What a worker does, by its last report and by what this router has sent since.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkerLoad {
    pub state: WorkerState,
    pub reported: ReportedLoad,
    pub own: OwnDispatches,
    /// The time at which the prefix index was last known to be in step, on the clock of `now`.
    pub indexed_at: f64,
    pub total_blocks: u32,
}

/// The last load report.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReportedLoad {
    /// When it came, in milliseconds on the clock of `now`.
    pub at: f64,
    pub queued_tokens: u64,
    pub queued_sequences: u32,
    pub running_sequences: u32,
    pub context_tokens: u64,
    /// What was left of the running step, in milliseconds.
    pub step_remaining: f64,
    /// Free or evictable.
    pub free_blocks: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerState {
    #[default]
    Ready,
    /// Takes nothing new.
    Draining,
    /// Its stream is gone.
    Lost,
}

/// What this router sent to a worker and no load report counts yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnDispatches {
    /// Uncached prompt tokens to compute there, and the prompts they are in.
    pub queued_tokens: u64,
    pub queued_sequences: u32,
    /// Sequences that will decode there, and the context they bring.
    pub sequences: u32,
    pub context_tokens: u64,
    pub blocks: u32,
}

/// Whether a link may be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum BreakerState {
    #[default]
    Closed,
    /// No pair uses it.
    Open,
    /// One run at a time may try it. A snapshot says `HalfOpen` while that run may still be placed, and `Open` again
    /// while it is under way.
    HalfOpen,
}

impl Fleet {
    pub fn len(&self) -> usize {
        self.workers.id.len()
    }

    pub fn is_empty(&self) -> bool {
        self.workers.id.is_empty()
    }

    /// The worker of that name.
    pub fn find(&self, id: &WorkerId) -> Option<WorkerIndex> {
        self.workers.id.iter().position(|known| known == id)
    }

    /// The nearest level that two workers share; `levels.len()` for none.
    pub fn level(&self, first: WorkerIndex, second: WorkerIndex) -> usize {
        self.links
            .level(self.workers.domain[first], self.workers.domain[second])
    }

    /// A level's name.
    pub fn level_name(&self, level: usize) -> &str {
        self.levels.get(level).map_or(BEYOND, String::as_str)
    }

    /// Whether KV computed by the first may be used by the second.
    pub fn compatible(&self, prefill: WorkerIndex, decode: WorkerIndex) -> bool {
        let row = self.workers.compatibility[prefill] as usize;
        let column = self.workers.compatibility[decode] as usize;
        self.workers.compatible[row][column]
    }

    /// Whether pairs are searched level by level, the short way: every domain nests in the next, and no pair of domains has a transport
    /// that its level does not have.
    pub fn is_regular(&self) -> bool {
        self.links.is_regular()
    }

    /// The worst state among the links of all transports between two workers, for display.
    pub fn breaker(&self, prefill: WorkerIndex, decode: WorkerIndex) -> BreakerState {
        self.links
            .worst_breaker(self.workers.domain[prefill], self.workers.domain[decode])
    }
}

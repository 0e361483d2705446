//! Filling a fleet: workers one by one, then what is known between them, then one immutable snapshot.

use std::collections::HashMap;
use std::sync::Arc;

use baton_protocol::card::Role;
use baton_protocol::ids::{Incarnation, WorkerId};

use super::links::{Links, Topology, domain_key};
use super::{BreakerState, Fleet, OwnDispatches, ReportedLoad, WorkerLoad, WorkerState, Workers};
use crate::coefficients::CoefficientSet;
use crate::cost::ChunkRule;
use crate::policy::Assurance;

/// One worker as the router knows it.
#[derive(Clone, Debug)]
pub struct WorkerEntry {
    pub id: WorkerId,
    pub incarnation: Incarnation,
    /// Its position in prefix hits: given once by the router, never reused while the worker lives.
    pub slot: u32,
    pub pool: String,
    /// Of which kind its pool is: a prefill and a decode pool may have one name. None: by the name alone.
    pub pool_role: Option<Role>,
    pub state: WorkerState,
    pub can_prefill: bool,
    pub can_decode: bool,
    /// Who vouches for KV that it hands over.
    pub hands_over: Assurance,
    /// Milliseconds for which it keeps a prompt's blocks for another worker, from the end of the prefill on; `None` where the reader
    /// renews the lease from its admission on.
    pub lease: Option<f64>,
    pub kv_identity: String,
    /// Workers of one class pair alike: anything that `compatible` reads, as a key.
    pub compatibility: String,
    pub adapters: Vec<String>,
    /// Value per level, nearest first; `None` where unknown.
    pub domain: Vec<Option<String>>,
    /// Name of its class in the coefficient set.
    pub class: String,
    pub chunks: ChunkRule,
    /// Kinds of transport it offers.
    pub transports: Vec<String>,
    pub load: ReportedLoad,
    pub own: OwnDispatches,
    /// The time at which the prefix index was last known to be in step, on the clock of `now`.
    pub indexed_at: f64,
    pub total_blocks: u32,
    pub block_size: u32,
    /// Bytes of KV per token over all layers.
    pub bytes_per_token: u64,
    /// 0: no limit.
    pub max_sequences: u32,
}

/// A snapshot that would not hold together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    #[error(
        "worker {worker}: class {class:?} is not in the coefficient set: add its coefficients first"
    )]
    UnknownClass { worker: WorkerId, class: String },
    #[error(
        "link {link}: there is no such entry in the coefficient set: add its coefficients first"
    )]
    UnknownLink { link: u32 },
    #[error(
        "coefficient set: {name} has a value that is negative or no number: keep its last good coefficients, or its prior"
    )]
    Unsound { name: String },
    #[error("worker {worker}: block size is 0: read it from the card")]
    NoBlockSize { worker: WorkerId },
    #[error("there are {workers} workers and {loads} loads: give one for each")]
    Loads { workers: usize, loads: usize },
}

/// Collects a snapshot.
#[derive(Debug)]
pub struct FleetBuilder {
    version: u64,
    routers: u32,
    levels: Vec<String>,
    coefficients: Arc<CoefficientSet>,
    coefficients_digest: String,
    entries: Vec<WorkerEntry>,
    topology: Topology,
    pairs: Vec<(String, String)>,
    breakers: Vec<(Ends, String, BreakerState)>,
    promises: Vec<(Ends, u64)>,
}

/// Keys of two domains.
type Ends = (String, String);

impl FleetBuilder {
    /// `levels` are names, nearest first. `digest` is that of `coefficients`: made once per set, not once per snapshot.
    pub fn new(
        version: u64,
        levels: &[String],
        coefficients: Arc<CoefficientSet>,
        digest: &str,
    ) -> Self {
        Self {
            version,
            routers: 1,
            levels: levels.to_vec(),
            coefficients,
            coefficients_digest: digest.to_owned(),
            entries: Vec::new(),
            topology: Topology::of(levels),
            pairs: Vec::new(),
            breakers: Vec::new(),
            promises: Vec::new(),
        }
    }

    /// Routers that share the fleet, this one included; at least 1.
    pub fn routers(&mut self, routers: u32) -> &mut Self {
        self.routers = routers.max(1);
        self
    }

    pub fn worker(&mut self, entry: WorkerEntry) -> &mut Self {
        self.entries.push(entry);
        self
    }

    /// KV from the first class may be used by the second. Pairs not named are incompatible.
    pub fn compatible(&mut self, prefill: &str, decode: &str) -> &mut Self {
        self.pairs.push((prefill.to_owned(), decode.to_owned()));
        self
    }

    /// Coefficients between two domains, by position in the coefficient set.
    pub fn link(
        &mut self,
        source: &[Option<String>],
        target: &[Option<String>],
        transport: &str,
        link: u32,
    ) -> &mut Self {
        let topology = &mut self.topology;
        let key = (
            topology.add(source),
            topology.add(target),
            topology.transport(transport),
        );
        topology.exact.insert(key, link);
        self
    }

    /// Coefficients for every pair of domains that shares this level (`levels.len()`: none) and has none of its own.
    pub fn level_link(&mut self, level: usize, transport: &str, link: u32) -> &mut Self {
        let transport = self.topology.transport(transport);
        self.topology.by_level.insert((level, transport), link);
        self
    }

    /// As [`Renewal::breaker`](super::Renewal::breaker).
    pub fn breaker(
        &mut self,
        source: &[Option<String>],
        target: &[Option<String>],
        transport: &str,
        state: BreakerState,
    ) -> &mut Self {
        let ends = (domain_key(source), domain_key(target));
        self.breakers.push((ends, transport.to_owned(), state));
        self
    }

    /// As [`Renewal::promise`](super::Renewal::promise).
    pub fn promise(
        &mut self,
        source: &[Option<String>],
        target: &[Option<String>],
        bytes: u64,
    ) -> &mut Self {
        let ends = (domain_key(source), domain_key(target));
        self.promises.push((ends, bytes));
        self
    }

    /// The snapshot. Fails where a worker or link names coefficients that are not in the set.
    pub fn build(mut self) -> Result<Fleet, FleetError> {
        self.check()?;
        let mut loads = Vec::with_capacity(self.entries.len());
        let workers = self.workers(&mut loads)?;
        self.topology.judge(&self.coefficients);
        let standing = Fleet {
            version: self.version,
            routers: self.routers,
            levels: self.levels.into(),
            coefficients: self.coefficients,
            coefficients_digest: self.coefficients_digest.into(),
            workers: Arc::new(workers),
            loads: Vec::new(),
            links: Links::new(Arc::new(self.topology)),
        };
        let mut first = standing.renewal(self.version);
        for load in loads {
            first.load(load);
        }
        for ((source, target), transport, state) in &self.breakers {
            first.breaker(source, target, transport, *state);
        }
        for ((source, target), bytes) in &self.promises {
            first.promise(source, target, *bytes);
        }
        first.build()
    }

    /// Whether the set has all that links name, and nothing that is no cost.
    fn check(&self) -> Result<(), FleetError> {
        let known = self.coefficients.links.len();
        let topology = &self.topology;
        let mut used = topology.exact.values().chain(topology.by_level.values());
        if let Some(&link) = used.find(|&&link| link as usize >= known) {
            return Err(FleetError::UnknownLink { link });
        }
        let unsound = |name: String| Err(FleetError::Unsound { name });
        for class in &self.coefficients.workers {
            if !class.coefficients.is_sound() {
                return unsound(format!("class {}", class.name));
            }
        }
        for link in &self.coefficients.links {
            if !link.coefficients.is_sound() {
                let name = &link.name;
                return unsound(format!(
                    "link {} → {} ({})",
                    name.source, name.target, name.transport
                ));
            }
        }
        Ok(())
    }

    /// The entries as columns; what they do goes to `loads`.
    fn workers(&mut self, loads: &mut Vec<WorkerLoad>) -> Result<Workers, FleetError> {
        let set = Arc::clone(&self.coefficients);
        let classes: HashMap<&str, u32> = set
            .workers
            .iter()
            .zip(0..)
            .map(|(class, position)| (class.name.as_str(), position))
            .collect();
        let mut workers = Workers::default();
        let mut pools = Vec::new();
        let mut compatibility = Vec::new();
        for entry in std::mem::take(&mut self.entries) {
            let Some(&class) = classes.get(entry.class.as_str()) else {
                return Err(FleetError::UnknownClass {
                    worker: entry.id,
                    class: entry.class,
                });
            };
            if entry.block_size == 0 {
                return Err(FleetError::NoBlockSize { worker: entry.id });
            }
            loads.push(entry.load());
            workers.class.push(class);
            workers.domain.push(self.topology.add(&entry.domain));
            workers
                .transports
                .push(self.transport_set(&entry.transports));
            workers
                .pool
                .push(intern(&mut pools, (entry.pool, entry.pool_role)));
            workers
                .compatibility
                .push(intern(&mut compatibility, entry.compatibility));
            workers.id.push(entry.id);
            workers.incarnation.push(entry.incarnation);
            workers.slot.push(entry.slot);
            workers.can_prefill.push(entry.can_prefill);
            workers.can_decode.push(entry.can_decode);
            workers.hands_over.push(entry.hands_over);
            workers.lease.push(entry.lease);
            workers.kv_identity.push(entry.kv_identity);
            workers.adapters.push(entry.adapters);
            workers.chunks.push(entry.chunks);
            workers.block_size.push(entry.block_size);
            workers.bytes_per_token.push(entry.bytes_per_token);
            workers.max_sequences.push(match entry.max_sequences {
                0 => u32::MAX,
                limit => limit,
            });
        }
        workers.compatible = vec![vec![false; compatibility.len()]; compatibility.len()];
        for (prefill, decode) in &self.pairs {
            let row = compatibility.iter().position(|class| class == prefill);
            let column = compatibility.iter().position(|class| class == decode);
            if let (Some(row), Some(column)) = (row, column) {
                workers.compatible[row][column] = true;
            }
        }
        (workers.pools, workers.pool_roles) = pools.into_iter().unzip();
        Ok(workers)
    }

    fn transport_set(&mut self, names: &[String]) -> u32 {
        let topology = &mut self.topology;
        let set = names.iter().map(|name| topology.transport(name)).collect();
        intern(&mut topology.transport_sets, set)
    }
}

impl WorkerEntry {
    fn load(&self) -> WorkerLoad {
        WorkerLoad {
            state: self.state,
            reported: self.load,
            own: self.own,
            indexed_at: self.indexed_at,
            total_blocks: self.total_blocks,
        }
    }
}

/// The position of a value, added if it is new. Linear: there are few distinct ones.
fn intern<T: PartialEq>(known: &mut Vec<T>, value: T) -> u32 {
    let position = known
        .iter()
        .position(|seen| *seen == value)
        .unwrap_or_else(|| {
            known.push(value);
            known.len() - 1
        });
    position as u32
}

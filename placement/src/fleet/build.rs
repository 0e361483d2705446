//! Filling a fleet: workers one by one, then what is known between them, then one immutable snapshot.

use std::collections::HashMap;
use std::sync::Arc;

use baton_protocol::card::Role;
use baton_protocol::ids::{Incarnation, WorkerId};

use super::links::{Links, domain_key};
use super::{BreakerState, Fleet, OwnDispatches, WorkerState, Workers};
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
    links: Links,
    domains: HashMap<String, u32>,
    pairs: Vec<(String, String)>,
}

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
            links: Links::of(levels),
            domains: HashMap::new(),
            pairs: Vec::new(),
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
        let key = (
            self.domain(source),
            self.domain(target),
            self.transport(transport),
        );
        self.links.exact.insert(key, link);
        self
    }

    /// Coefficients for every pair of domains that shares this level (`levels.len()`: none) and has none of its own.
    pub fn level_link(&mut self, level: usize, transport: &str, link: u32) -> &mut Self {
        let transport = self.transport(transport);
        self.links.by_level.insert((level, transport), link);
        self
    }

    pub fn breaker(
        &mut self,
        source: &[Option<String>],
        target: &[Option<String>],
        transport: &str,
        state: BreakerState,
    ) -> &mut Self {
        let key = (
            self.domain(source),
            self.domain(target),
            self.transport(transport),
        );
        self.links.breakers.insert(key, state);
        self
    }

    /// Bytes that a run under way will still move. Adds up.
    pub fn promise(
        &mut self,
        source: &[Option<String>],
        target: &[Option<String>],
        bytes: u64,
    ) -> &mut Self {
        let (source, target) = (self.domain(source), self.domain(target));
        for promised in [
            self.links.promised_out.entry(source).or_default(),
            self.links.promised_in.entry(target).or_default(),
        ] {
            *promised = promised.saturating_add(bytes);
        }
        self
    }

    /// The snapshot. Fails where a worker or link names coefficients that are not in the set.
    pub fn build(mut self) -> Result<Fleet, FleetError> {
        let known = self.coefficients.links.len();
        let used = self
            .links
            .exact
            .values()
            .chain(self.links.by_level.values());
        if let Some(&link) = used
            .copied()
            .collect::<Vec<_>>()
            .iter()
            .find(|&&link| link as usize >= known)
        {
            return Err(FleetError::UnknownLink { link });
        }
        let unsound = |sound: bool, name: String| {
            if sound {
                Ok(())
            } else {
                Err(FleetError::Unsound { name })
            }
        };
        for class in &self.coefficients.workers {
            unsound(
                class.coefficients.is_sound(),
                format!("class {}", class.name),
            )?;
        }
        for link in &self.coefficients.links {
            let name = &link.name;
            let name = format!(
                "link {} → {} ({})",
                name.source, name.target, name.transport
            );
            unsound(link.coefficients.is_sound(), name)?;
        }
        let exact = self.links.exact.values();
        self.links.least_exact = exact
            .map(|&link| &self.coefficients.links[link as usize].coefficients)
            .map(|link| link.alpha + link.synchronization)
            .fold(f64::INFINITY, f64::min);
        let classes: HashMap<String, u32> = self
            .coefficients
            .workers
            .iter()
            .enumerate()
            .map(|(position, class)| (class.name.clone(), position as u32))
            .collect();
        let mut workers = Workers::default();
        let mut pools = Vec::new();
        let mut compatibility = Vec::new();
        for entry in std::mem::take(&mut self.entries) {
            let Some(&class) = classes.get(&entry.class) else {
                return Err(FleetError::UnknownClass {
                    worker: entry.id,
                    class: entry.class,
                });
            };
            if entry.block_size == 0 {
                return Err(FleetError::NoBlockSize { worker: entry.id });
            }
            workers.class.push(class);
            workers.domain.push(self.domain(&entry.domain));
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
            workers.state.push(entry.state);
            workers.can_prefill.push(entry.can_prefill);
            workers.can_decode.push(entry.can_decode);
            workers.hands_over.push(entry.hands_over);
            workers.lease.push(entry.lease);
            workers.kv_identity.push(entry.kv_identity);
            workers.adapters.push(entry.adapters);
            workers.chunks.push(entry.chunks);
            workers.queued_tokens.push(entry.load.queued_tokens);
            workers.queued_sequences.push(entry.load.queued_sequences);
            workers.running_sequences.push(entry.load.running_sequences);
            workers.context_tokens.push(entry.load.context_tokens);
            workers.own.push(entry.own);
            workers.step_remaining.push(entry.load.step_remaining);
            workers.reported_at.push(entry.load.at);
            workers.indexed_at.push(entry.indexed_at);
            workers.total_blocks.push(entry.total_blocks);
            workers.free_blocks.push(entry.load.free_blocks);
            workers.block_size.push(entry.block_size);
            workers.bytes_per_token.push(entry.bytes_per_token);
            workers.max_sequences.push(match entry.max_sequences {
                0 => u32::MAX,
                limit => limit,
            });
        }
        let mut compatible = vec![vec![false; compatibility.len()]; compatibility.len()];
        for (prefill, decode) in &self.pairs {
            let row = compatibility.iter().position(|class| class == prefill);
            let column = compatibility.iter().position(|class| class == decode);
            if let (Some(row), Some(column)) = (row, column) {
                compatible[row][column] = true;
            }
        }
        self.links.uniform = self.links.find_uniform();
        let (pools, pool_roles) = pools.into_iter().unzip();
        Ok(Fleet {
            version: self.version,
            routers: self.routers,
            levels: self.levels,
            coefficients: self.coefficients,
            coefficients_digest: self.coefficients_digest,
            workers,
            pools,
            pool_roles,
            links: self.links,
            compatible,
        })
    }

    fn domain(&mut self, path: &[Option<String>]) -> u32 {
        let key = domain_key(path);
        if let Some(&known) = self.domains.get(&key) {
            return known;
        }
        let next = self.domains.len() as u32;
        let numbers = self.links.number(path);
        self.links.paths.push(numbers);
        self.domains.insert(key, next);
        next
    }

    fn transport(&mut self, name: &str) -> u32 {
        self.links.transport(name)
    }

    fn transport_set(&mut self, names: &[String]) -> u32 {
        let set: Vec<u32> = names.iter().map(|name| self.transport(name)).collect();
        intern(&mut self.links.transport_sets, set)
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

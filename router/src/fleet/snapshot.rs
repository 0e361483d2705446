//! From what is known of each worker and link to the immutable snapshot that placement reads. Pure.
//!
//! In two steps, since a snapshot is made for nearly every request: the [`ground`], made when a card, a place, a verdict on a pair or a
//! constant has changed, and on it the [`next`] snapshot, of what goes on there now.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use baton_placement::calibration::shared;
use baton_placement::coefficients::{
    CoefficientSet, LinkClass, LinkCoefficients, LinkName, PathFactors, WorkerClass,
    WorkerCoefficients,
};
use baton_placement::cost::ChunkRule;
use baton_placement::fleet::{
    BEYOND, BreakerState, Fleet, FleetBuilder, FleetError, OwnDispatches, ReportedLoad,
    WorkerEntry, WorkerLoad, WorkerState, domain_key,
};
use baton_placement::policy::Assurance;
use baton_protocol::card::{Card, ChunkPolicy, Dispatch, Role};
use baton_protocol::wire;

use super::pairs::Pairs;
use super::state::Tracked;
use super::topology::{self, DomainPath};
use crate::clock::Moment;

/// Loads are clipped here, where a peer's numbers become ours: sums over them cannot overflow, and no report makes a decision
/// long. Far above what a worker holds.
const MOST_TOKENS: u64 = 1 << 26;
const MOST_SEQUENCES: u32 = 1 << 16;

/// One directed link between two domains.
#[derive(Clone, Debug)]
pub struct LinkFacts {
    pub source: DomainPath,
    pub target: DomainPath,
    pub transport: String,
    /// Fitted from transfers; `None` before the first, then the prior of the level serves.
    pub coefficients: Option<LinkCoefficients>,
}

/// Bytes that a run under way will still move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promise {
    source: String,
    target: String,
    bytes: u64,
}

impl Promise {
    pub fn new(source: &DomainPath, target: &DomainPath, bytes: u64) -> Self {
        Self {
            source: domain_key(source),
            target: domain_key(target),
            bytes,
        }
    }
}

/// What the router learnt besides what workers say.
#[derive(Clone, Debug, Default)]
pub struct Learnt {
    pub links: Vec<LinkFacts>,
    pub paths: PathFactors,
}

/// The learnt constants of this moment. Links without a fit are represented by one prior per level and transport.
pub fn coefficients(
    workers: &[(&Tracked, &Card)],
    levels: &[String],
    learnt: &Learnt,
    worker_prior: WorkerCoefficients,
    link_prior: impl Fn(&str, &str) -> LinkCoefficients,
) -> CoefficientSet {
    let published: Vec<_> = workers
        .iter()
        .map(|(tracked, _)| tracked.coefficients.unwrap_or(worker_prior))
        .collect();
    let mut set = CoefficientSet {
        workers: workers
            .iter()
            .zip(learnt_together(workers, &published))
            .map(|((tracked, _), coefficients)| WorkerClass {
                name: tracked.id.to_string(),
                coefficients,
            })
            .collect(),
        links: Vec::new(),
        paths: learnt.paths,
    };
    for link in &learnt.links {
        if let Some(coefficients) = link.coefficients {
            let name = link_name(&link.source, &link.target, &link.transport);
            set.links.push(LinkClass { name, coefficients });
        }
    }
    for transport in transports(workers) {
        for level in level_names(levels) {
            set.links.push(LinkClass {
                name: prior_name(level, &transport),
                coefficients: link_prior(level, &transport),
            });
        }
    }
    set
}

/// Constants of each worker, after workers of one kind have learnt from each other.
fn learnt_together(
    workers: &[(&Tracked, &Card)],
    published: &[WorkerCoefficients],
) -> Vec<WorkerCoefficients> {
    let mut result = published.to_vec();
    let mut classes: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for (index, (_, card)) in workers.iter().enumerate() {
        if !card.accelerator.is_empty() {
            let engine = &card.engine;
            let class = (
                &card.accelerator,
                &engine.kind,
                &engine.version,
                &card.kv_identity,
                &card.layout_digest,
            );
            classes.entry(class).or_default().push(index);
        }
    }
    for members in classes.values() {
        let own: Vec<_> = members.iter().map(|&index| published[index]).collect();
        for (&index, shared) in members.iter().zip(shared(&own)) {
            result[index] = shared;
        }
    }
    result
}

pub fn link_name(source: &DomainPath, target: &DomainPath, transport: &str) -> LinkName {
    LinkName {
        source: domain_key(source),
        target: domain_key(target),
        transport: transport.to_owned(),
    }
}

/// Priors have no domains: any pair whose nearest common level it is.
fn prior_name(level: &str, transport: &str) -> LinkName {
    LinkName {
        source: "*".to_owned(),
        target: format!("*@{level}"),
        transport: transport.to_owned(),
    }
}

fn level_names(levels: &[String]) -> impl Iterator<Item = &str> {
    levels.iter().map(String::as_str).chain([BEYOND])
}

fn transports(workers: &[(&Tracked, &Card)]) -> Vec<String> {
    let mut kinds: Vec<String> = workers
        .iter()
        .flat_map(|(_, card)| card.transports.iter().map(|offer| offer.kind.clone()))
        .collect();
    kinds.sort();
    kinds.dedup();
    kinds
}

/// What all snapshots are made from until a card, a place, a verdict on a pair or a constant changes.
#[derive(Debug)]
pub struct Ground<'a> {
    pub levels: &'a [String],
    /// Workers whose card is known, and that can be reached.
    pub workers: &'a [(&'a Tracked, &'a Card)],
    pub pairs: &'a Pairs,
    pub coefficients: &'a Arc<CoefficientSet>,
    pub digest: &'a str,
    pub links: &'a [LinkFacts],
}

/// A fleet of which nobody has reported anything. One that came since the set was made is not in it: it is placed on with the next set.
///
/// # Errors
/// What is given does not hold together.
pub fn ground(parts: &Ground<'_>) -> Result<Fleet, FleetError> {
    let set = parts.coefficients;
    let mut builder = FleetBuilder::new(0, parts.levels, set.clone(), parts.digest);
    let known: HashSet<&str> = set
        .workers
        .iter()
        .map(|class| class.name.as_str())
        .collect();
    for (tracked, card) in parts.workers {
        if known.contains(tracked.id.as_str()) {
            builder.worker(entry(tracked, card, parts.levels));
        }
    }
    for (prefill, decode) in parts.pairs.compatible() {
        builder.compatible(prefill, decode);
    }
    let positions: HashMap<&LinkName, u32> =
        set.links.iter().map(|link| &link.name).zip(0..).collect();
    let position = |name: &LinkName| positions.get(name).copied();
    // What was learnt of places where nobody is any more stays out, as do paths over other levels than today's and transports that
    // nobody offers: they would only keep the search from taking its short way.
    let offered = transports(parts.workers);
    let places = places(
        parts.workers.iter().map(|(tracked, _)| *tracked),
        parts.levels,
    );
    for link in parts.links {
        let name = link_name(&link.source, &link.target, &link.transport);
        if let Some(position) = position(&name)
            && offered.contains(&name.transport)
            && places.contains(&name.source)
            && places.contains(&name.target)
        {
            builder.link(&link.source, &link.target, &link.transport, position);
        }
    }
    for transport in &offered {
        for (level, name) in level_names(parts.levels).enumerate() {
            if let Some(position) = position(&prior_name(name, transport)) {
                builder.level_link(level, transport, position);
            }
        }
    }
    builder.build()
}

/// What changes with every request, beside what workers do.
#[derive(Clone, Copy, Debug)]
pub struct Moving<'a, P> {
    pub version: u64,
    pub routers: u32,
    /// Links whose breaker is not closed.
    pub shut: &'a [(LinkName, BreakerState)],
    pub promises: P,
}

/// The next snapshot on this ground. `loads` are those of its workers, in their order ([`load`]).
///
/// # Errors
/// There is not one load for each worker.
pub fn next<'a>(
    ground: &Fleet,
    loads: impl Iterator<Item = WorkerLoad>,
    moving: Moving<'a, impl Iterator<Item = &'a Promise>>,
) -> Result<Fleet, FleetError> {
    let mut next = ground.renewal(moving.version);
    next.routers(moving.routers);
    for load in loads {
        next.load(load);
    }
    for (link, state) in moving.shut {
        next.breaker(&link.source, &link.target, &link.transport, *state);
    }
    for promise in moving.promises {
        next.promise(&promise.source, &promise.target, promise.bytes);
    }
    next.build()
}

/// What a worker does now. `own`: what this router sent it and no report counts yet.
pub fn load(tracked: &Tracked, card: &Card, own: OwnDispatches, now: Moment) -> WorkerLoad {
    let report = tracked.load.unwrap_or_default();
    let blocks = report.blocks.unwrap_or(wire::BlockCounts {
        total: card.capacity.blocks,
        free: card.capacity.blocks,
        ..wire::BlockCounts::default()
    });
    WorkerLoad {
        // Before the first load report nothing is known of what it does.
        state: match tracked.load {
            Some(_) => tracked.state(now),
            None => WorkerState::Lost,
        },
        reported: ReportedLoad {
            at: tracked.load_at.milliseconds(),
            queued_tokens: report.queued_tokens.min(MOST_TOKENS),
            queued_sequences: report.queued_sequences.min(MOST_SEQUENCES),
            running_sequences: report.running_sequences.min(MOST_SEQUENCES),
            context_tokens: report.context_tokens.min(MOST_TOKENS),
            step_remaining: report.step_remaining_milliseconds,
            free_blocks: blocks.free.saturating_add(blocks.cached),
        },
        own,
        indexed_at: tracked.indexed_at.milliseconds(),
        total_blocks: blocks.total,
    }
}

/// The domain paths of these workers, as keys.
pub fn places<'a>(
    workers: impl Iterator<Item = &'a Tracked>,
    levels: &[String],
) -> HashSet<String> {
    workers
        .map(|tracked| domain_key(&topology::path(tracked.topology(), levels)))
        .collect()
}

/// Who vouches for KV that this worker hands over.
pub fn assurance(card: &Card) -> Assurance {
    match &card.dispatch {
        Dispatch::OpenAiHttp { split, .. } if !split.is_verified() => Assurance::EngineTrusted,
        Dispatch::Grpc | Dispatch::OpenAiHttp { .. } => Assurance::Verified,
    }
}

/// A worker of which nothing is known but its card: nothing is placed on it.
fn entry(tracked: &Tracked, card: &Card, levels: &[String]) -> WorkerEntry {
    let nothing = WorkerLoad {
        state: WorkerState::Lost,
        ..WorkerLoad::default()
    };
    WorkerEntry {
        id: tracked.id.clone(),
        incarnation: card.incarnation,
        slot: tracked.slot,
        pool: card.pool.clone(),
        pool_role: Some(card.pool_role),
        state: nothing.state,
        can_prefill: card.can(Role::Prefill),
        can_decode: card.can(Role::Decode),
        hands_over: assurance(card),
        lease: match &card.dispatch {
            Dispatch::Grpc => None,
            Dispatch::OpenAiHttp { split, .. } => {
                split.lease_milliseconds().map(|lease| lease as f64)
            }
        },
        kv_identity: card.kv_identity.clone(),
        compatibility: tracked.class.clone(),
        adapters: card
            .route_filter
            .adapters
            .iter()
            .map(|adapter| adapter.name.clone())
            .collect(),
        domain: topology::path(tracked.topology(), levels),
        class: tracked.id.to_string(),
        chunks: match card.chunk {
            ChunkPolicy::Bounded { .. } => ChunkRule::Bounded,
            ChunkPolicy::Fixed { tokens } => ChunkRule::Fixed(tokens),
        },
        transports: card
            .transports
            .iter()
            .map(|offer| offer.kind.clone())
            .collect(),
        load: nothing.reported,
        own: nothing.own,
        indexed_at: nothing.indexed_at,
        total_blocks: nothing.total_blocks,
        block_size: card.capacity.block_size,
        bytes_per_token: card.layout.bytes_per_token.known().copied().unwrap_or(0),
        max_sequences: card.capacity.max_sequences,
    }
}

#[cfg(test)]
pub(crate) mod tests;

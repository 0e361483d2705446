//! From what is known of each worker and link to the immutable snapshot that placement reads. Pure.

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
    WorkerEntry, WorkerState, domain_key,
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
    pub breaker: BreakerState,
}

/// Bytes that a run under way will still move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promise {
    pub source: DomainPath,
    pub target: DomainPath,
    pub bytes: u64,
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

/// What a snapshot is made from.
#[derive(Debug)]
pub struct Parts<'a> {
    pub version: u64,
    pub routers: u32,
    pub levels: &'a [String],
    /// Workers whose card is known, with what this router sent them and no report counts yet.
    pub workers: &'a [(&'a Tracked, &'a Card, OwnDispatches)],
    pub pairs: &'a Pairs,
    pub coefficients: &'a Arc<CoefficientSet>,
    pub digest: &'a str,
    pub learnt: &'a Learnt,
    pub promises: &'a [Promise],
}

/// The snapshot at `now`.
pub fn build(parts: &Parts<'_>, now: Moment) -> Result<Fleet, FleetError> {
    let mut builder = FleetBuilder::new(
        parts.version,
        parts.levels,
        parts.coefficients.clone(),
        parts.digest,
    );
    builder.routers(parts.routers);
    let set = parts.coefficients;
    let known: HashSet<&str> = set
        .workers
        .iter()
        .map(|class| class.name.as_str())
        .collect();
    for (tracked, card, own) in parts.workers {
        // One that came since the set was made is placed on with the next set.
        if known.contains(tracked.id.as_str()) {
            builder.worker(entry(tracked, card, *own, parts.levels, now));
        }
    }
    for (prefill, decode) in parts.pairs.compatible() {
        builder.compatible(prefill, decode);
    }
    let positions: HashMap<&LinkName, u32> =
        set.links.iter().map(|link| &link.name).zip(0..).collect();
    let position = |name: &LinkName| positions.get(name).copied();
    // What was learnt of places where nobody is any more stays out, as do paths over other levels than today's: they would only
    // keep the search from taking its short way.
    let places = places(
        parts.workers.iter().map(|(tracked, _, _)| *tracked),
        parts.levels,
    );
    let is_there = |path: &DomainPath| places.contains(&domain_key(path));
    for link in &parts.learnt.links {
        let name = link_name(&link.source, &link.target, &link.transport);
        if !(places.contains(&name.source) && places.contains(&name.target)) {
            continue;
        }
        if let Some(position) = position(&name) {
            builder.link(&link.source, &link.target, &link.transport, position);
        }
        if link.breaker != BreakerState::Closed {
            builder.breaker(&link.source, &link.target, &link.transport, link.breaker);
        }
    }
    let cards: Vec<_> = parts
        .workers
        .iter()
        .map(|(tracked, card, _)| (*tracked, *card))
        .collect();
    for transport in transports(&cards) {
        for (level, name) in level_names(parts.levels).enumerate() {
            if let Some(position) = position(&prior_name(name, &transport)) {
                builder.level_link(level, &transport, position);
            }
        }
    }
    let promises = parts.promises.iter();
    for promise in promises.filter(|promise| is_there(&promise.source) && is_there(&promise.target))
    {
        builder.promise(&promise.source, &promise.target, promise.bytes);
    }
    builder.build()
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

fn entry(
    tracked: &Tracked,
    card: &Card,
    own: OwnDispatches,
    levels: &[String],
    now: Moment,
) -> WorkerEntry {
    let counts = tracked
        .load
        .as_ref()
        .and_then(|load| load.blocks)
        .unwrap_or(wire::BlockCounts {
            total: card.capacity.blocks,
            free: card.capacity.blocks,
            ..wire::BlockCounts::default()
        });
    let load = tracked.load.unwrap_or_default();
    WorkerEntry {
        id: tracked.id.clone(),
        incarnation: card.incarnation,
        slot: tracked.slot,
        pool: card.pool.clone(),
        pool_role: Some(card.pool_role),
        // Before the first load report nothing is known of what it does.
        state: match tracked.load {
            Some(_) => tracked.state(now),
            None => WorkerState::Lost,
        },
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
        load: ReportedLoad {
            at: tracked.load_at.milliseconds(),
            queued_tokens: load.queued_tokens.min(MOST_TOKENS),
            queued_sequences: load.queued_sequences.min(MOST_SEQUENCES),
            running_sequences: load.running_sequences.min(MOST_SEQUENCES),
            context_tokens: load.context_tokens.min(MOST_TOKENS),
            step_remaining: load.step_remaining_milliseconds,
            free_blocks: counts.free.saturating_add(counts.cached),
        },
        own,
        indexed_at: tracked.indexed_at.milliseconds(),
        total_blocks: counts.total,
        block_size: card.capacity.block_size,
        bytes_per_token: card.layout.bytes_per_token.known().copied().unwrap_or(0),
        max_sequences: card.capacity.max_sequences,
    }
}

#[cfg(test)]
mod tests;

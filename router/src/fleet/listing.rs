//! `GET /v1/fleet`: workers and pairs as the router sees them now.

use baton_placement::fleet::{BreakerState, WorkerState};
use baton_protocol::card::Role;
use baton_protocol::identity::Difference;
use baton_protocol::wire;
use serde::Serialize;
use std::collections::BTreeMap;

use super::{View, Workers};

/// One worker.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedWorker {
    pub id: String,
    pub pool: String,
    pub role: &'static str,
    pub incarnation: Option<String>,
    pub revision: String,
    pub state: WorkerState,
    pub model: String,
    pub kv_identity: String,
    pub domains: BTreeMap<String, String>,
    pub blocks: ListedBlocks,
    pub running_sequences: u32,
    pub queued_tokens: u64,
    /// None before the first report.
    pub report_age_milliseconds: Option<f64>,
    pub notices: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedBlocks {
    pub total: u32,
    pub free: u32,
    pub cached: u32,
    pub active: u32,
    pub leased: u32,
    pub quarantined: u32,
    pub leaked: u32,
}

impl From<wire::BlockCounts> for ListedBlocks {
    fn from(counts: wire::BlockCounts) -> Self {
        Self {
            total: counts.total,
            free: counts.free,
            cached: counts.cached,
            active: counts.active,
            leased: counts.leased,
            quarantined: counts.quarantined,
            leaked: counts.leaked,
        }
    }
}

/// A prefill worker and a decode worker.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedPair {
    pub prefill: String,
    pub decode: String,
    pub compatible: bool,
    pub differences: Vec<Difference>,
    /// Nearest common level.
    pub level: String,
    pub breaker: BreakerState,
}

/// Every listed worker, those without a card included: they are lost.
pub fn workers(workers: &Workers) -> Vec<ListedWorker> {
    let now = workers.clock.now();
    workers.with_tracked(|tracked| {
        tracked
            .values()
            .map(|worker| {
                let card = worker.card.as_deref();
                let load = worker.load.as_ref();
                let text = |read: fn(&baton_protocol::card::Card) -> &str| {
                    card.map(|card| read(card).to_owned()).unwrap_or_default()
                };
                ListedWorker {
                    id: worker.id.to_string(),
                    pool: text(|card| &card.pool),
                    role: card.map_or("", |card| card.pool_role.lower_case()),
                    incarnation: card.map(|card| card.incarnation.to_string()),
                    revision: text(|card| &card.revision),
                    state: if card.is_some() && load.is_some() {
                        worker.state(now)
                    } else {
                        WorkerState::Lost
                    },
                    model: text(|card| &card.model.name),
                    kv_identity: text(|card| &card.kv_identity),
                    domains: worker
                        .topology()
                        .iter()
                        .filter_map(|(level, domain)| Some((level.clone(), domain.clone()?)))
                        .collect(),
                    blocks: load
                        .and_then(|load| load.blocks)
                        .map(ListedBlocks::from)
                        .unwrap_or_default(),
                    running_sequences: load.map_or(0, |load| load.running_sequences),
                    queued_tokens: load.map_or(0, |load| load.queued_tokens),
                    report_age_milliseconds: load.map(|_| now.milliseconds_since(worker.load_at)),
                    notices: card
                        .into_iter()
                        .flat_map(|card| &card.notices)
                        .chain(&worker.trouble)
                        .cloned()
                        .collect(),
                }
            })
            .collect()
    })
}

/// Every prefill worker with every decode worker.
pub fn pairs(view: &View) -> Vec<ListedPair> {
    let in_pool = |role: Role| {
        view.members
            .iter()
            .enumerate()
            .filter(move |(_, member)| member.card.pool_role == role)
    };
    let mut pairs = Vec::new();
    for (prefill, source) in in_pool(Role::Prefill) {
        for (decode, target) in in_pool(Role::Decode) {
            let differences = view
                .pairs
                .differences(&source.class, &target.class)
                .map(|verdict| verdict.as_ref().clone())
                .unwrap_or_default();
            pairs.push(ListedPair {
                prefill: source.id.to_string(),
                decode: target.id.to_string(),
                compatible: view.fleet.compatible(prefill, decode),
                differences,
                level: view
                    .fleet
                    .level_name(view.fleet.level(prefill, decode))
                    .to_owned(),
                breaker: view.fleet.breaker(prefill, decode),
            });
        }
    }
    pairs
}

//! The status of a pool: counts, revisions, domains, and the conditions that tell its author how it is.
//!
//! Nothing in it changes while the pool and its pods do not, so an idle pool writes nothing.

mod conditions;

use std::collections::{BTreeMap, BTreeSet};

use baton_crds::labels;
use baton_crds::status::{
    DomainStatus, LONGEST_IDENTITY, LONGEST_PATH, MOST_DOMAINS, MOST_REVISIONS, PoolStatus,
    RevisionStatus,
};
use k8s_openapi::api::core::v1::Pod;

use super::member::{Member, Stage, annotation, label, role};
use super::observed::{Level, Observed, PoolObject};
use super::refusal::Refusal;
use super::trouble::{self, Trouble};

/// What a status is made from, beside the pool.
pub(crate) struct Facts<'m, 'a> {
    pub(crate) members: &'m [Member<'a>],
    /// Pods with the pool's labels that are somebody else's.
    pub(crate) foreign: &'m [&'a Pod],
    /// Name of a PodDisruptionBudget of somebody else that stands where the pool's would.
    pub(crate) foreign_budget: Option<String>,
    /// The current revision, or why there is none.
    pub(crate) revision: Result<&'m str, &'m Refusal>,
}

/// What the conditions are about.
struct Summary {
    wanted: usize,
    serving: usize,
    ready: usize,
    updated: usize,
    updated_and_ready: usize,
    draining: usize,
    trouble: Option<Trouble>,
}

pub(crate) fn of(facts: &Facts<'_, '_>, observed: &Observed) -> PoolStatus {
    let pool = &observed.pool;
    let summary = summary(facts, observed);
    let count = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    PoolStatus {
        observed_generation: Some(pool.generation),
        replicas: count(summary.serving),
        ready_replicas: count(summary.ready),
        available_replicas: count(summary.ready),
        updated_replicas: count(summary.updated),
        draining_replicas: count(summary.draining),
        ready: Some(format!("{}/{}", summary.ready, summary.wanted)),
        selector: Some(selector(pool)),
        revisions: revisions(facts),
        domains: domains(facts, observed),
        conditions: conditions::of(facts, &summary, observed),
    }
}

fn summary(facts: &Facts<'_, '_>, observed: &Observed) -> Summary {
    let serving: Vec<&Member<'_>> = facts.members.iter().filter(|m| m.is_serving()).collect();
    let updated = |member: &&&Member<'_>| facts.revision == Ok(member.revision);
    let mut troubles: Vec<(&str, Trouble)> = serving
        .iter()
        .filter_map(|member| Some((member.name, trouble::of(member, observed)?)))
        .collect();
    troubles.sort_by_key(|(name, _)| *name);
    Summary {
        wanted: usize::try_from(observed.pool.spec.replicas).unwrap_or_default(),
        serving: serving.len(),
        ready: serving.iter().filter(|member| member.ready).count(),
        updated: serving.iter().filter(updated).count(),
        updated_and_ready: serving.iter().filter(updated).filter(|m| m.ready).count(),
        draining: facts.members.iter().filter(|m| is_draining(m)).count(),
        trouble: trouble::told(&troubles),
    }
}

fn is_draining(member: &Member<'_>) -> bool {
    matches!(member.stage, Stage::Draining { .. })
}

/// One pod a replica, without those that drain: an autoscaler must not average over pods that are leaving.
fn selector(pool: &PoolObject) -> String {
    // Not `!=true`: kubectl and autoscalers turn it into a LabelSelector, which has no such operator.
    format!(
        "{}={},{}={},!{}",
        labels::POOL,
        pool.name,
        labels::ROLE,
        role(pool.role),
        labels::DRAINING
    )
}

/// The KV identities of a revision's pods. More than one: they load different weights under one name.
fn identities<'a>(members: &[Member<'a>], revision: &str) -> BTreeSet<&'a str> {
    let live = members.iter().filter(|member| member.stage.is_live());
    live.filter(|member| member.revision == revision)
        .filter_map(|member| annotation(member.pod, labels::KV_IDENTITY_DIGEST))
        .collect()
}

fn revisions(facts: &Facts<'_, '_>) -> Vec<RevisionStatus> {
    let live = facts.members.iter().filter(|member| member.stage.is_live());
    let mut hashes: BTreeSet<&str> = live.map(|member| member.revision).collect();
    let current = facts.revision.ok();
    if let Some(current) = current {
        hashes.remove(current);
    }
    let ordered = current.into_iter().chain(hashes);
    ordered
        .take(MOST_REVISIONS)
        .map(|hash| {
            let of = facts.members.iter().filter(|m| m.revision == hash);
            let ready = of.clone().filter(|m| m.is_serving() && m.ready).count();
            let draining = of.filter(|member| is_draining(member)).count();
            let identity = identities(facts.members, hash)
                .first()
                .map(|text| text.chars().take(LONGEST_IDENTITY).collect());
            RevisionStatus {
                hash: hash.to_owned(),
                kv_identity: identity,
                ready: i32::try_from(ready).unwrap_or(i32::MAX),
                draining: i32::try_from(draining).unwrap_or(i32::MAX),
            }
        })
        .collect()
}

/// By the nearest level whose domains a status has room for: with hundreds of hosts, by their racks.
fn domains(facts: &Facts<'_, '_>, observed: &Observed) -> Vec<DomainStatus> {
    let levels = &observed.settings.levels;
    let by_level = (0..levels.len()).map(|nearest| domains_of(facts, &levels[nearest..]));
    let mut fitting = by_level.filter(|domains| {
        let fits = |domain: &DomainStatus| domain.path.chars().count() <= LONGEST_PATH;
        domains.len() <= MOST_DOMAINS && domains.iter().all(fits)
    });
    fitting.next().unwrap_or_default()
}

fn domains_of(facts: &Facts<'_, '_>, levels: &[Level]) -> Vec<DomainStatus> {
    let mut paths: BTreeMap<String, i32> = BTreeMap::new();
    for member in facts.members.iter().filter(|m| m.is_serving() && m.ready) {
        let path: Option<Vec<&str>> = levels
            .iter()
            .rev()
            .map(|level| label(member.pod, &labels::domain(&level.name)))
            .collect();
        if let Some(path) = path.filter(|path| !path.is_empty()) {
            *paths.entry(path.join("/")).or_default() += 1;
        }
    }
    let paths = paths.into_iter();
    paths
        .map(|(path, ready)| DomainStatus { path, ready })
        .collect()
}

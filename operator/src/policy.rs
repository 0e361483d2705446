//! What a `RoutePolicy` means for what exists: a pure planner of its status, and what policies mean for a pool.
//!
//! | module | subject |
//! |---|---|
//! | [`observed`] | what the planner is told |
//! | [`references`] | which pools a policy names |
//! | [`pairs`] | which revisions can hand KV to which |
//! | [`acceptance`] | whether a policy can be honoured at all |
//! | [`conditions`] | what its status says |
//! | [`facts`] | what the policies that name a pool mean for the pool |
//!
//! Nothing is applied but the status: routers follow policies by themselves and say which generation they serve by.

pub mod acceptance;
pub mod conditions;
pub mod facts;
pub mod observed;
pub mod pairs;
pub mod references;
#[cfg(test)]
mod tests;

use baton_crds::labels as names;
use baton_crds::status::{Condition, MOST_ROUTERS, RoutePolicyStatus, RouterStatus};

use crate::pool::{Note, NoteKind, Regarding};

pub use observed::{InForce, Observed, Other, PolicyObject, PoolView, Router};

/// The status to be written if it is not what the policy has, and events of what has changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub status: RoutePolicyStatus,
    pub notes: Vec<Note>,
}

/// What to say of a policy.
#[must_use]
pub fn plan(observed: &Observed) -> Plan {
    let policy = &observed.policy;
    let known = policy.status.clone().unwrap_or_default();
    if policy.deleting {
        return Plan {
            status: known,
            notes: Vec::new(),
        };
    }
    let sides = references::Sides::of(policy, &observed.pools);
    let pairs = pairs::Pairs::of(&sides, &observed.cards, &known.pairs);
    let acceptance = acceptance::of(observed, &sides);
    let mut routers = routers(observed, &known.routers);
    let conditions = conditions::of(observed, &sides, &pairs, &acceptance, &routers);
    let notes = notes(&conditions, &known.conditions);
    let last_good = if acceptance.is_true() {
        last_good(policy.generation, &routers, known.last_good_generation)
    } else {
        known.last_good_generation
    };
    routers.truncate(MOST_ROUTERS);
    Plan {
        status: RoutePolicyStatus {
            observed_generation: Some(policy.generation),
            last_good_generation: last_good,
            pairs: pairs.revisions,
            routers,
            conditions,
        },
        notes,
    }
}

/// The generation that all routers can serve by: of those that refuse the newest one, the oldest that one of them has in force. What
/// was good before stands where such a router has none.
fn last_good(newest: i64, routers: &[RouterStatus], known: Option<i64>) -> Option<i64> {
    let refusing = || routers.iter().filter(|router| router.refused.is_some());
    if refusing().next().is_none() {
        return Some(newest);
    }
    let served = refusing().filter_map(|router| router.generation).min();
    served.or(known)
}

/// What each router says. Of one that cannot be asked just now, what it said last counts.
fn routers(observed: &Observed, known: &[RouterStatus]) -> Vec<RouterStatus> {
    let name = &observed.policy.name;
    let mut routers: Vec<RouterStatus> = observed
        .routers
        .iter()
        .map(|router| match &router.answer {
            Ok(policies) => {
                let mine = policies.iter().find(|policy| policy.name == *name);
                RouterStatus {
                    pod: router.pod.clone(),
                    generation: mine.and_then(|mine| mine.generation),
                    refused: mine
                        .and_then(|mine| mine.refused.clone())
                        .map(crate::condition::bounded),
                }
            }
            Err(_) => known
                .iter()
                .find(|known| known.pod == router.pod)
                .cloned()
                .unwrap_or_else(|| RouterStatus {
                    pod: router.pod.clone(),
                    ..RouterStatus::default()
                }),
        })
        .collect();
    routers.sort_by(|one, other| one.pod.cmp(&other.pod));
    routers
}

/// An event for each condition that is about a refusal and has come or gone.
fn notes(now: &[Condition], before: &[Condition]) -> Vec<Note> {
    let told = [
        names::ACCEPTED,
        names::COMPATIBLE,
        names::DISAGGREGATING,
        names::STALLED,
    ];
    now.iter()
        .filter(|condition| told.contains(&condition.condition_type.as_str()))
        .filter_map(|condition| {
            let known = before
                .iter()
                .find(|known| known.condition_type == condition.condition_type);
            let bad = |condition: &Condition| {
                condition.status
                    == if condition.condition_type == names::STALLED {
                        "True"
                    } else {
                        "False"
                    }
            };
            let same = known.is_some_and(|known| {
                known.status == condition.status && known.reason == condition.reason
            });
            if same || (!bad(condition) && !known.is_some_and(bad)) {
                return None;
            }
            // Workers that are not ready yet are no news; that they were and are not is.
            let awaited = ["NoPrefillReady", "NoDecodeReady", "PoolMissing"];
            let was_good = known.is_some_and(|known| known.status == "True");
            if awaited.contains(&condition.reason.as_str()) && !was_good {
                return None;
            }
            let (kind, reason) = match (condition.condition_type.as_str(), bad(condition)) {
                (names::ACCEPTED, true) => (NoteKind::Warning, "NotAccepted"),
                (names::ACCEPTED, false) => (NoteKind::Normal, "Accepted"),
                (names::COMPATIBLE, true) => (NoteKind::Warning, "Incompatible"),
                (names::COMPATIBLE, false) => (NoteKind::Normal, "Compatible"),
                (names::DISAGGREGATING, true) => (NoteKind::Warning, "NotDisaggregating"),
                (names::DISAGGREGATING, false) => (NoteKind::Normal, "Disaggregating"),
                (_, true) => (NoteKind::Warning, "Stalled"),
                (_, false) => (NoteKind::Normal, "NotStalled"),
            };
            let message = format!("{}: {}", condition.reason, condition.message);
            Some(Note {
                kind,
                reason,
                message,
                regarding: Regarding::Pool,
            })
        })
        .collect()
}

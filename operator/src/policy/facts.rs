//! What the policies that name a pool mean for the pool.

use std::collections::BTreeSet;

use baton_crds::{PoolRole, RoutePolicySpec, differences};

use super::observed::PoolView;
use super::references::names;
use crate::pool::{Compatibility, PolicyFacts};

/// `policies`: name and spec of all policies of the pool's namespace; `pools`: all pools of it.
#[must_use]
pub fn of(
    pool: &PoolView,
    policies: &[(String, &RoutePolicySpec)],
    pools: &[PoolView],
) -> PolicyFacts {
    let mut named_by = Vec::new();
    let mut tightest: Option<i64> = None;
    let mut levels = BTreeSet::new();
    let mut partners: Vec<&PoolView> = Vec::new();
    for (name, policy) in policies {
        let (mine, theirs, role) = match pool.role {
            PoolRole::Prefill => (
                &policy.prefill_pools,
                &policy.decode_pools,
                PoolRole::Decode,
            ),
            PoolRole::Decode => (
                &policy.decode_pools,
                &policy.prefill_pools,
                PoolRole::Prefill,
            ),
        };
        if !mine.iter().any(|reference| names(reference, pool)) {
            continue;
        }
        named_by.push(name.clone());
        if let Some(objective) = policy.objective.tpot_milliseconds {
            tightest = Some(tightest.map_or(objective, |known| known.min(objective)));
        }
        levels.extend(policy.topology.farthest_level.clone());
        levels.extend(policy.cost.level_penalty_milliseconds.keys().cloned());
        let named = pools.iter().filter(|other| {
            other.role == role && theirs.iter().any(|reference| names(reference, other))
        });
        for other in named {
            if !partners.iter().any(|known| known.name == other.name) {
                partners.push(other);
            }
        }
    }
    named_by.sort();
    PolicyFacts {
        named_by,
        tpot_objective_milliseconds: tightest,
        levels,
        compatible: compatible(pool, &partners),
    }
}

fn compatible(pool: &PoolView, partners: &[&PoolView]) -> Option<Compatibility> {
    if partners.is_empty() {
        return None;
    }
    let mut good = Vec::new();
    let mut bad = Vec::new();
    for other in partners {
        let (prefill, decode) = match pool.role {
            PoolRole::Prefill => (pool, *other),
            PoolRole::Decode => (*other, pool),
        };
        let differences = differences::of(&prefill.spec, &decode.spec);
        if differences.is_empty() {
            good.push(other.title());
        } else {
            let differences = differences::sentence(&differences);
            bad.push(format!("not with {}: {differences}", other.title()));
        }
    }
    let holds = !good.is_empty();
    if holds {
        bad.insert(0, format!("can be paired with {}", good.join(", ")));
    }
    Some(Compatibility {
        holds,
        message: bad.join("; "),
    })
}

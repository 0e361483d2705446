//! The conditions of a policy.
//!
//! Tools read them in this order: `Reconciling` True means under way, then `Stalled` True means failed, else `Ready` counts.
//!
//! | type | True when |
//! |---|---|
//! | `Accepted` | the policy can be honoured |
//! | `Compatible` | some prefill workers and some decode workers have KV that means the same; Unknown until workers have said so |
//! | `Disaggregating` | requests can be prefilled remotely, as far as pools and cards say: what routers meet on the way is theirs to say |
//! | `Ready` | accepted, served by at least one ready decode worker, and in force on every router |
//! | `Reconciling` | it is not ready, and will be by itself |
//! | `Stalled` | it is not ready, and a human has to change something |

use baton_crds::policy::Mode;
use baton_crds::status::{Condition, RouterStatus};
use baton_crds::{differences, labels as names};

use super::observed::{Observed, PoolView};
use super::pairs::Pairs;
use super::references::Sides;
use crate::condition::{Verdict, condition};

/// Reasons for which a policy waits for pools, which come by themselves: resources are applied in any order.
const AWAITED: [&str; 1] = ["PoolMissing"];

pub(super) fn of(
    observed: &Observed,
    sides: &Sides<'_>,
    pairs: &Pairs<'_>,
    accepted: &Verdict,
    routers: &[RouterStatus],
) -> Vec<Condition> {
    let compatible = compatible(sides, pairs);
    let disaggregating = disaggregating(observed, sides, pairs, accepted);
    let stalled = stalled(sides, pairs, accepted, routers);
    let ready = ready(
        observed,
        sides,
        accepted,
        &disaggregating,
        stalled.as_ref(),
        routers,
    );
    let reconciling = match (&stalled, ready.is_true()) {
        (Some(_), _) => Verdict::fails("Stalled", "waits for a human, see condition Stalled"),
        (None, true) => Verdict::fails("AsDeclared", ""),
        (None, false) => Verdict::holds(ready.reason, ready.message.clone()),
    };
    let stalled = stalled.unwrap_or_else(|| Verdict::fails("Healthy", ""));
    let policy = &observed.policy;
    let known = policy
        .status
        .as_ref()
        .map_or(&[][..], |status| &status.conditions);
    [
        (names::READY, ready),
        (names::ACCEPTED, accepted.clone()),
        (names::COMPATIBLE, compatible),
        (names::DISAGGREGATING, disaggregating),
        (names::RECONCILING, reconciling),
        (names::STALLED, stalled),
    ]
    .into_iter()
    .map(|(name, verdict)| condition(name, verdict, known, policy.generation, observed.now))
    .collect()
}

fn compatible(sides: &Sides<'_>, pairs: &Pairs<'_>) -> Verdict {
    if sides.prefill.is_empty() || sides.decode.is_empty() {
        return Verdict::unknown("NothingToPair", "the policy has no pair of pools");
    }
    if !pairs.some_agree() {
        return Verdict::fails("DeclarationsDiffer", pairs.disagreements());
    }
    let except = pairs.disagreements();
    let except = if except.is_empty() {
        except
    } else {
        format!("; {except}")
    };
    if pairs.revisions.iter().any(|pair| pair.compatible) {
        let message = format!("KV of prefill and decode workers means the same{except}");
        return Verdict::holds("IdentitiesMatch", message);
    }
    let differing = pairs.revisions.iter().find(|pair| !pair.compatible);
    let observed = differing.filter(|pair| {
        let declared = pairs.pools.iter().find(|declared| {
            declared.prefill.name == pair.prefill_pool && declared.decode.name == pair.decode_pool
        });
        declared.is_some_and(|declared| declared.differences.is_empty())
    });
    match observed {
        Some(pair) => {
            let message = format!(
                "workers of PrefillPool {} (revision {}) and DecodePool {} (revision {}) differ: {}: load the same model in both, or wait for the rollout{except}",
                pair.prefill_pool,
                pair.prefill_revision,
                pair.decode_pool,
                pair.decode_revision,
                differences::sentence(&pair.differences)
            );
            Verdict::fails("IdentitiesDiffer", message)
        }
        None => {
            let message = format!(
                "declarations agree; KV identities are known once workers of both sides have registered{except}"
            );
            Verdict::unknown("DeclarationsAgree", message)
        }
    }
}

fn disaggregating(
    observed: &Observed,
    sides: &Sides<'_>,
    pairs: &Pairs<'_>,
    accepted: &Verdict,
) -> Verdict {
    let spec = &observed.policy.spec;
    if spec.mode == Mode::Aggregated {
        return Verdict::fails(
            "ModeAggregated",
            "spec.mode is Aggregated: no prefill is remote",
        );
    }
    if spec.prefill_pools.is_empty() {
        let message = "spec.prefillPools names no pool: no prefill is remote";
        return Verdict::fails("NoPrefillPool", message);
    }
    if !accepted.is_true() {
        return Verdict::fails(accepted.reason, accepted.message.clone());
    }
    if !pairs.some_agree() {
        return Verdict::fails("Incompatible", pairs.disagreements());
    }
    for (side, reason, kind) in [
        (&sides.prefill, "NoPrefillReady", "PrefillPool"),
        (&sides.decode, "NoDecodeReady", "DecodePool"),
    ] {
        if available(side) == 0 {
            return Verdict::fails(reason, none_ready(side, kind));
        }
    }
    let serving = |role: &[&PoolView], pool: &str, revision: &str| {
        role.iter()
            .filter(|view| view.name == pool)
            .flat_map(|view| &view.status.revisions)
            .any(|known| known.hash == revision && known.ready > 0)
    };
    let paired = pairs.revisions.iter().any(|pair| {
        pair.compatible
            && serving(&sides.prefill, &pair.prefill_pool, &pair.prefill_revision)
            && serving(&sides.decode, &pair.decode_pool, &pair.decode_revision)
    });
    if paired {
        Verdict::holds("Paired", "ready prefill and decode workers can be paired")
    } else {
        let message = "no ready prefill worker has KV that a ready decode worker can use, see status.pairs and condition Compatible";
        Verdict::fails("Incompatible", message)
    }
}

/// What a human has to change.
fn stalled(
    sides: &Sides<'_>,
    pairs: &Pairs<'_>,
    accepted: &Verdict,
    routers: &[RouterStatus],
) -> Option<Verdict> {
    if !accepted.is_true() {
        return (!AWAITED.contains(&accepted.reason))
            .then(|| Verdict::holds(accepted.reason, accepted.message.clone()));
    }
    if !sides.prefill.is_empty() && !sides.decode.is_empty() && !pairs.some_agree() {
        let message = format!("{}: declare the same in both pools", pairs.disagreements());
        return Some(Verdict::holds("DeclarationsDiffer", message));
    }
    routers.iter().find_map(|router| {
        let refused = router.refused.as_ref()?;
        let message = format!("router {} refuses it: {refused}", router.pod);
        Some(Verdict::holds("RouterRefuses", message))
    })
}

fn ready(
    observed: &Observed,
    sides: &Sides<'_>,
    accepted: &Verdict,
    disaggregating: &Verdict,
    stalled: Option<&Verdict>,
    routers: &[RouterStatus],
) -> Verdict {
    if let Some(stalled) = stalled {
        return Verdict::fails(stalled.reason, stalled.message.clone());
    }
    if !accepted.is_true() {
        return Verdict::fails(accepted.reason, accepted.message.clone());
    }
    if available(&sides.decode) == 0 {
        return Verdict::fails("NoDecodeReady", none_ready(&sides.decode, "DecodePool"));
    }
    let policy = &observed.policy;
    if policy.spec.mode == Mode::Disaggregated && !disaggregating.is_true() {
        return Verdict::fails(disaggregating.reason, disaggregating.message.clone());
    }
    if routers.is_empty() {
        let message = format!(
            "no router runs in namespace {}: install the chart baton there",
            policy.namespace
        );
        return Verdict::fails("NoRouter", message);
    }
    let behind = routers.iter().find(|router| {
        router
            .generation
            .is_none_or(|generation| generation < policy.generation)
    });
    if let Some(router) = behind {
        let why = observed
            .routers
            .iter()
            .find(|asked| asked.pod == router.pod)
            .and_then(|asked| asked.answer.as_ref().err())
            .map_or("it has not taken it yet".to_owned(), Clone::clone);
        let message = format!(
            "router {} does not serve by generation {}: {why}",
            router.pod, policy.generation
        );
        return Verdict::fails("RoutersBehind", message);
    }
    Verdict::holds("Serving", "every router serves by this policy")
}

fn available(pools: &[&PoolView]) -> i64 {
    pools
        .iter()
        .map(|pool| i64::from(pool.status.available_replicas))
        .sum()
}

fn none_ready(pools: &[&PoolView], kind: &str) -> String {
    let said: Vec<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
    let why = pools.iter().find_map(|pool| {
        let conditions = &pool.status.conditions;
        conditions
            .iter()
            .find(|known| known.condition_type == names::READY && known.status != "True")
            .filter(|known| !known.message.is_empty())
            .map(|known| format!(": {}", known.message))
    });
    format!(
        "no worker of {kind} {} is ready{}",
        said.join(", "),
        why.unwrap_or_default()
    )
}

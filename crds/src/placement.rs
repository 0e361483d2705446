//! `RoutePolicy` → the policy type of `placement`: the one edge where both are known.

use std::collections::BTreeMap;

use baton_placement::policy::{
    AdmissionPolicy, Assurance, BreakerPolicy, CachePolicy, CacheSource, Checksum, CostPolicy,
    Enforcement, FallbackPolicy, FirstToken, LocalRecompute, Mode, NoPrefillAction, Objective,
    OnNoPrefill, Overrides, Policy, Pooling, Preset, Timeouts, TopologyPolicy, VerifyPolicy,
    WeightPercents,
};

use crate::policy as from;
use crate::problem::Problem;
use crate::references;
use crate::resources::{Pool, PoolRole, RoutePolicy};

/// The policy as placement has it. Its pools are those of `pools` that the references name, and its order of transports is the first
/// decode pool's. A name that is not among `pools` (a policy read alone, or with some of its pools, or before its pools are there) is
/// taken as it is. Its generation is that of the object, 1 for one that was written in a file.
///
/// # Errors
/// Placement refuses the policy, or labels select none of `pools`; the problem names object and field, and the line where there is a
/// file.
pub fn to_policy<'a>(
    policy: &RoutePolicy,
    pools: impl IntoIterator<Item = &'a Pool>,
) -> Result<Policy, Problem> {
    let spec = &policy.spec;
    let pools: Vec<&Pool> = pools.into_iter().collect();
    let pools = pools.iter().copied();
    let transports = references::named(policy, PoolRole::Decode, &pools)
        .first()
        .map(|pool| {
            pool.spec
                .kv_pool
                .transports
                .iter()
                .map(|transport| format!("{transport:?}"))
                .collect()
        })
        .unwrap_or_default();
    let converted = Policy {
        name: policy.metadata.name.clone(),
        generation: u64::try_from(policy.metadata.generation).unwrap_or(1),
        model: spec.model.clone(),
        aliases: spec.aliases.clone(),
        prefill_pools: names(policy, PoolRole::Prefill, &pools)?,
        decode_pools: names(policy, PoolRole::Decode, &pools)?,
        mode: mode(spec),
        overrides: match spec.overrides {
            from::Overrides::Ignored => Overrides::Ignored,
            from::Overrides::Allowed => Overrides::Allowed,
        },
        objective: Objective {
            ttft_milliseconds: spec.objective.ttft_milliseconds.map(number),
            tpot_milliseconds: spec.objective.tpot_milliseconds.map(number),
            end_to_end_milliseconds: spec.objective.end_to_end_milliseconds.map(number),
            percentile: spec.objective.percentile.map(number),
        },
        pooling: match spec.pooling {
            from::Pooling::Pooled => Pooling::Pooled,
            from::Pooling::Strict => Pooling::Strict,
        },
        cost: cost(&spec.cost),
        topology: topology(&spec.topology),
        on_no_prefill: on_no_prefill(spec.on_no_prefill.as_ref()),
        fallback: fallback(&spec.fallback),
        first_token: match spec.first_token {
            from::FirstToken::Prefill => FirstToken::Prefill,
            from::FirstToken::Decode => FirstToken::Decode,
        },
        timeouts: timeouts(&spec.timeouts),
        admission: admission(&spec.admission),
        verify: VerifyPolicy {
            require: match spec.verify.require {
                from::Assurance::Verified => Assurance::Verified,
                from::Assurance::EngineTrusted => Assurance::EngineTrusted,
            },
            checksum: match spec.verify.checksum {
                from::Checksum::Always => Checksum::Always,
                from::Checksum::Sampled => Checksum::Sampled,
                from::Checksum::Off => Checksum::Off,
            },
        },
        cache: cache(&spec.cache),
        transports,
    };
    converted.check().map_err(|error| {
        policy
            .origin
            .problem(policy.title(), "spec", error.to_string())
    })?;
    Ok(converted)
}

fn names<'a>(
    policy: &RoutePolicy,
    role: PoolRole,
    pools: &(impl IntoIterator<Item = &'a Pool> + Clone),
) -> Result<Vec<String>, Problem> {
    let mut names: Vec<String> = Vec::new();
    for (index, (reference, pools)) in references::followed(policy, role, pools)
        .into_iter()
        .enumerate()
    {
        let mut found: Vec<String> = pools
            .iter()
            .map(|pool| pool.metadata.name.clone())
            .collect();
        if found.is_empty() {
            let Some(name) = &reference.name else {
                let path = format!("spec.{}[{index}]", role.references());
                let kind = role.kind();
                let message = if policy.origin.file.is_empty() {
                    let namespace = &policy.metadata.namespace;
                    format!(
                        "no {kind} of namespace {namespace} has these labels: label one so, or give its name"
                    )
                } else {
                    format!(
                        "no {kind} here has these labels: give the pools in the same file, or name them"
                    )
                };
                return Err(policy.origin.problem(policy.title(), &path, message));
            };
            found.push(name.clone());
        }
        found.retain(|name| !names.contains(name));
        names.append(&mut found);
    }
    Ok(names)
}

fn mode(spec: &from::RoutePolicySpec) -> Mode {
    match spec.mode {
        from::Mode::Conditional => Mode::Conditional,
        from::Mode::Aggregated => Mode::Aggregated,
        from::Mode::Disaggregated => Mode::Disaggregated,
        from::Mode::Threshold => Mode::Threshold {
            tokens: spec.threshold_tokens.map_or(0, count),
        },
    }
}

fn cost(cost: &from::Cost) -> CostPolicy {
    let weights = &cost.weights;
    CostPolicy {
        preset: match cost.preset {
            Some(from::Preset::Balanced) | None => Preset::Balanced,
            Some(from::Preset::Latency) => Preset::Latency,
        },
        weights: WeightPercents {
            wq: weights.wq.map(number),
            wt: weights.wt.map(number),
            wm: weights.wm.map(number),
            lambda: weights.lambda.map(number),
            wo: weights.wo.map(number),
            wd: weights.wd.map(number),
            v: weights.v.map(number),
            uq: weights.uq.map(number),
        },
        margin_percent: cost.margin_percent.map(number),
        margin_milliseconds: cost.margin_milliseconds.map(number),
        temperature_percent: cost.temperature_percent.map_or(0.0, number),
        level_penalty_milliseconds: cost
            .level_penalty_milliseconds
            .iter()
            .map(|(level, penalty)| (level.clone(), number(*penalty)))
            .collect::<BTreeMap<_, _>>(),
    }
}

fn topology(topology: &from::PolicyTopology) -> TopologyPolicy {
    let default = BreakerPolicy::default();
    let breaker = &topology.breaker;
    TopologyPolicy {
        enforcement: match topology.enforcement {
            from::Enforcement::Required => Enforcement::Required,
            from::Enforcement::Preferred => Enforcement::Preferred,
            from::Enforcement::Ignored => Enforcement::Ignored,
        },
        farthest_level: topology.farthest_level.clone(),
        breaker: BreakerPolicy {
            failures: breaker.failures.map_or(default.failures, count),
            window_seconds: breaker
                .window_seconds
                .map_or(default.window_seconds, number),
            open_seconds: breaker.open_seconds.map_or(default.open_seconds, number),
            slowdown_percent: breaker
                .slowdown_percent
                .map_or(default.slowdown_percent, number),
        },
    }
}

fn on_no_prefill(rule: Option<&from::OnNoPrefill>) -> OnNoPrefill {
    let default = OnNoPrefill::default();
    let Some(rule) = rule else { return default };
    OnNoPrefill {
        action: match rule.action {
            from::NoPrefillAction::Local => NoPrefillAction::Local,
            from::NoPrefillAction::Queue => NoPrefillAction::Queue,
            from::NoPrefillAction::Reject => NoPrefillAction::Reject,
        },
        max_concurrent_per_worker: rule
            .max_concurrent_per_worker
            .map_or(default.max_concurrent_per_worker, count),
        queue_milliseconds: rule
            .queue_milliseconds
            .map_or(default.queue_milliseconds, number),
    }
}

fn fallback(fallback: &from::Fallback) -> FallbackPolicy {
    let default = FallbackPolicy::default();
    let recompute = &fallback.local_recompute;
    FallbackPolicy {
        local_recompute: LocalRecompute {
            max_concurrent_per_worker: recompute
                .max_concurrent_per_worker
                .map_or(default.local_recompute.max_concurrent_per_worker, count),
            max_percent: recompute
                .max_percent
                .map_or(default.local_recompute.max_percent, number),
        },
        replans: fallback.replans.map_or(default.replans, count),
    }
}

fn timeouts(timeouts: &from::Timeouts) -> Timeouts {
    let default = Timeouts::default();
    Timeouts {
        reserve_seconds: timeouts
            .reserve_seconds
            .map_or(default.reserve_seconds, number),
        prefill_start_seconds: timeouts
            .prefill_start_seconds
            .map_or(default.prefill_start_seconds, number),
        prefill_seconds: timeouts
            .prefill_seconds
            .map_or(default.prefill_seconds, number),
        transfer_seconds: timeouts
            .transfer_seconds
            .map_or(default.transfer_seconds, number),
        decode_start_seconds: timeouts
            .decode_start_seconds
            .map_or(default.decode_start_seconds, number),
        token_seconds: timeouts.token_seconds.map_or(default.token_seconds, number),
        total_seconds: timeouts.total_seconds.map_or(default.total_seconds, number),
    }
}

fn admission(admission: &from::Admission) -> AdmissionPolicy {
    let default = AdmissionPolicy::default();
    AdmissionPolicy {
        max_queued_per_worker: admission
            .max_queued_per_worker
            .map_or(default.max_queued_per_worker, count),
        retry_after_seconds: admission
            .retry_after_seconds
            .map_or(default.retry_after_seconds, count),
    }
}

fn cache(cache: &from::Cache) -> CachePolicy {
    let default = CachePolicy::default();
    CachePolicy {
        source: match cache.source {
            from::CacheSource::Events => CacheSource::Events,
            from::CacheSource::None => CacheSource::None,
        },
        stale_after_milliseconds: cache
            .stale_after_milliseconds
            .map_or(default.stale_after_milliseconds, number),
    }
}

/// The schema bounds every integer far below 2^53, so this is exact.
fn number(value: i64) -> f64 {
    value as f64
}

/// The schema lets no count through that does not fit.
fn count(value: i64) -> u32 {
    u32::try_from(value.max(0)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read_documents;

    fn policy(spec: &str) -> Result<Policy, Problem> {
        let text = format!(
            "apiVersion: serving.baton.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {{name: p}}\nspec:\n  model: m\n  decodePools: [{{name: d}}]\n{spec}"
        );
        let resources = read_documents([("p.yaml", text.as_str())]).unwrap();
        to_policy(&resources.policies[0], &resources.pools)
    }

    #[test]
    fn what_is_left_out_is_placements_own_default() {
        assert_eq!(policy("").unwrap(), Policy::new("p", "m", &[], &["d"]));
    }

    #[test]
    fn a_pool_that_is_not_in_the_file_keeps_its_name_and_labels_need_the_pools() {
        let text = |second: &str| {
            format!(
                "apiVersion: serving.baton.dev/v1alpha1\nkind: DecodePool\nmetadata: {{name: here, labels: {{a: b}}}}\nspec: {{model: {{name: m, source: {{uri: \"builtin://tiny\"}}}}, engine: {{type: Builtin}}}}\n---\n\
                 apiVersion: serving.baton.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {{name: p}}\nspec: {{model: m, prefillPools: [{{name: far}}], decodePools: [{{name: away}}, {second}, {{name: here}}]}}\n"
            )
        };
        let read = |second: &str| {
            let text = text(second);
            let resources = read_documents([("p.yaml", text.as_str())]).unwrap();
            to_policy(&resources.policies[0], &resources.pools)
        };
        let policy = read("{selector: {matchLabels: {a: b}}}").unwrap();
        assert_eq!(policy.prefill_pools, ["far"]);
        assert_eq!(policy.decode_pools, ["away", "here"]);
        let error = read("{selector: {matchLabels: {a: c}}}").unwrap_err();
        assert_eq!(
            error.to_string(),
            "p.yaml:9: RoutePolicy p: spec.decodePools[1]: no DecodePool here has these labels: give the pools in the same file, or name them"
        );
    }

    #[test]
    fn each_field_arrives() {
        let policy = policy(
            "  prefillPools: [{name: a}]\n  mode: Threshold\n  thresholdTokens: 512\n  overrides: Allowed\n  pooling: Strict\n  \
             objective: {ttftMilliseconds: 500}\n  cost: {preset: Latency, weights: {wm: 50, lambda: 200}, marginPercent: 0, levelPenaltyMilliseconds: {rack: 3}}\n  \
             topology: {enforcement: Required, farthestLevel: rack, breaker: {failures: 9}}\n  onNoPrefill: {action: Queue, queueMilliseconds: 7}\n  \
             fallback: {localRecompute: {maxPercent: 33}, replans: 0}\n  firstToken: Decode\n  timeouts: {tokenSeconds: 5}\n  admission: {retryAfterSeconds: 4}\n  \
             verify: {require: Verified, checksum: Sampled}\n  cache: {source: None, staleAfterMilliseconds: 11}\n",
        )
        .unwrap();
        assert_eq!(policy.prefill_pools, ["a"]);
        assert_eq!(policy.mode, Mode::Threshold { tokens: 512 });
        assert_eq!(
            (policy.overrides, policy.pooling),
            (Overrides::Allowed, Pooling::Strict)
        );
        assert_eq!(policy.objective.ttft_milliseconds, Some(500.0));
        assert_eq!(policy.cost.preset, Preset::Latency);
        assert_eq!(
            (policy.cost.weights.wm, policy.cost.weights.lambda),
            (Some(50.0), Some(200.0))
        );
        assert_eq!(policy.cost.margin_percent, Some(0.0));
        assert_eq!(policy.cost.level_penalty_milliseconds["rack"], 3.0);
        assert_eq!(policy.topology.enforcement, Enforcement::Required);
        assert_eq!(policy.topology.farthest_level.as_deref(), Some("rack"));
        assert_eq!(policy.topology.breaker.failures, 9);
        assert_eq!(
            policy.topology.breaker.open_seconds,
            BreakerPolicy::default().open_seconds
        );
        assert_eq!(policy.on_no_prefill.action, NoPrefillAction::Queue);
        assert_eq!(policy.on_no_prefill.queue_milliseconds, 7.0);
        assert_eq!(policy.fallback.local_recompute.max_percent, 33.0);
        assert_eq!(policy.fallback.replans, 0);
        assert_eq!(policy.first_token, FirstToken::Decode);
        assert_eq!(policy.timeouts.token_seconds, 5.0);
        assert_eq!(policy.admission.retry_after_seconds, 4);
        assert_eq!(
            (policy.verify.require, policy.verify.checksum),
            (Assurance::Verified, Checksum::Sampled)
        );
        assert_eq!(policy.cache.source, CacheSource::None);
        assert_eq!(policy.cache.stale_after_milliseconds, 11.0);
    }
}

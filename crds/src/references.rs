//! What a resource may hold given the others: names that exist, models that agree, names used once.

use std::collections::BTreeMap;

use crate::differences;
use crate::nearest::nearest;
use crate::policy::PoolReference;
use crate::problem::Problem;
use crate::resources::{Pool, PoolRole, Resources, RoutePolicy};

/// The pools that a policy's references of `role` name, each once.
pub(crate) fn named<'a>(
    policy: &RoutePolicy,
    role: PoolRole,
    pools: &(impl IntoIterator<Item = &'a Pool> + Clone),
) -> Vec<&'a Pool> {
    let mut named: Vec<&Pool> = Vec::new();
    for (_, found) in followed(policy, role, pools) {
        for pool in found {
            if !named.iter().any(|known| std::ptr::eq(*known, pool)) {
                named.push(pool);
            }
        }
    }
    named
}

/// Each reference of `role` with the pools that it names.
pub(crate) fn followed<'p, 'a>(
    policy: &'p RoutePolicy,
    role: PoolRole,
    pools: &(impl IntoIterator<Item = &'a Pool> + Clone),
) -> Vec<(&'p PoolReference, Vec<&'a Pool>)> {
    references(policy, role)
        .iter()
        .map(|reference| {
            let pools = pools.clone().into_iter();
            (
                reference,
                pools
                    .filter(|pool| matches(reference, role, policy, pool))
                    .collect(),
            )
        })
        .collect()
}

fn references(policy: &RoutePolicy, role: PoolRole) -> &[PoolReference] {
    match role {
        PoolRole::Prefill => &policy.spec.prefill_pools,
        PoolRole::Decode => &policy.spec.decode_pools,
    }
}

fn matches(reference: &PoolReference, role: PoolRole, policy: &RoutePolicy, pool: &Pool) -> bool {
    let named = reference
        .name
        .as_ref()
        .is_some_and(|name| *name == pool.metadata.name);
    let selected = reference.selector.as_ref().is_some_and(|selector| {
        selector
            .match_labels
            .iter()
            .all(|(label, value)| pool.metadata.labels.get(label) == Some(value))
    });
    pool.role == role && pool.metadata.namespace == policy.metadata.namespace && (named || selected)
}

/// Objects of one kind and namespace with one name, and models that two policies claim.
pub(crate) fn duplicates(resources: &Resources) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut objects = BTreeMap::new();
    let all = resources
        .pools
        .iter()
        .map(|pool| (pool.title(), &pool.metadata, &pool.origin))
        .chain(
            resources
                .policies
                .iter()
                .map(|policy| (policy.title(), &policy.metadata, &policy.origin)),
        );
    for (title, metadata, origin) in all {
        let place = format!("{}:{}", origin.file, origin.line_of("metadata.name"));
        let key = (title.clone(), metadata.namespace.clone());
        if let Some(first) = objects.get(&key) {
            let message = format!("is there already at {first}: rename one of the two");
            problems.push(origin.problem(title, "metadata.name", message));
        } else {
            objects.insert(key, place);
        }
    }
    let mut models = BTreeMap::new();
    for policy in &resources.policies {
        let names = std::iter::once(("spec.model".to_owned(), &policy.spec.model)).chain(
            policy
                .spec
                .aliases
                .iter()
                .enumerate()
                .map(|(index, alias)| (format!("spec.aliases[{index}]"), alias)),
        );
        for (path, name) in names {
            let key = (policy.metadata.namespace.as_str(), name.as_str());
            if let Some(first) = models
                .insert(key, policy)
                .filter(|first| first.metadata.name != policy.metadata.name)
            {
                let message = format!(
                    "model {name} is served by {} already: one policy per model",
                    first.title()
                );
                problems.push(policy.origin.problem(policy.title(), &path, message));
            }
        }
    }
    problems
}

/// Follows every reference. `incomplete`: other problems were found, so that what is missing may only be broken.
pub(crate) fn check(resources: &mut Resources, incomplete: bool) -> Vec<Problem> {
    let mut problems = Vec::new();
    for policy in &resources.policies {
        for role in [PoolRole::Prefill, PoolRole::Decode] {
            for (index, reference) in references(policy, role).iter().enumerate() {
                follow(policy, role, index, reference, resources, &mut problems);
            }
        }
    }
    let mut warnings = pairs(resources);
    if !incomplete {
        if resources.policies.is_empty() {
            let first = resources.pools.first();
            problems.push(Problem {
                file: first.map_or("-".to_owned(), |pool| pool.origin.file.clone()),
                line: 0,
                object: String::new(),
                path: String::new(),
                message:
                    "no RoutePolicy given: nothing would be served; add one that names the pools"
                        .to_owned(),
            });
        } else {
            warnings.extend(unused(resources));
        }
    }
    resources.warnings.extend(warnings);
    problems
}

fn follow(
    policy: &RoutePolicy,
    role: PoolRole,
    index: usize,
    reference: &PoolReference,
    resources: &Resources,
    problems: &mut Vec<Problem>,
) {
    let path = format!("spec.{}[{index}]", role.references());
    let mut wrong = |path: &str, message: String| {
        problems.push(policy.origin.problem(policy.title(), path, message));
    };

    let found: Vec<&Pool> = resources
        .pools
        .iter()
        .filter(|pool| matches(reference, role, policy, pool))
        .collect();
    for pool in &found {
        if pool.spec.model.name != policy.spec.model {
            let message = format!(
                "{} serves model {}, this policy serves {}: they must be the same",
                pool.title(),
                pool.spec.model.name,
                policy.spec.model
            );
            wrong(&path, message);
        }
    }
    if !found.is_empty() {
        return;
    }
    let kind = role.kind();
    let Some(name) = &reference.name else {
        if resources.broken.is_empty() {
            wrong(
                &path,
                format!(
                    "no {kind} of namespace {} has these labels",
                    policy.metadata.namespace
                ),
            );
        }
        return;
    };
    if resources.broken.contains(&format!("{kind}/{name}")) {
        return;
    }
    let known: Vec<&str> = resources
        .pools
        .iter()
        .filter(|pool| pool.role == role && pool.metadata.namespace == policy.metadata.namespace)
        .map(|pool| pool.metadata.name.as_str())
        .collect();
    let other = resources
        .pools
        .iter()
        .find(|pool| pool.metadata.name == *name);
    let hint = match (nearest(name, known.iter().copied()), other) {
        (_, Some(other)) if other.role != role => {
            format!("; {} is one, but of the other kind", other.title())
        }
        (_, Some(other)) => format!("; there is one in namespace {}", other.metadata.namespace),
        (Some(near), None) => format!("; did you mean {near}?"),
        (None, None) if known.is_empty() => "; none is given".to_owned(),
        (None, None) => format!("; there are: {}", known.join(", ")),
    };
    wrong(
        &format!("{path}.name"),
        format!("no {kind} named {name}{hint}"),
    );
}

/// Pairs of pools whose declared fields already say that KV can never, or perhaps not, be handed over between them.
fn pairs(resources: &Resources) -> Vec<String> {
    let mut warnings = Vec::new();
    for policy in &resources.policies {
        for prefill in named(policy, PoolRole::Prefill, &&resources.pools) {
            for decode in named(policy, PoolRole::Decode, &&resources.pools) {
                let pair = format!(
                    "{}: {} and {}",
                    policy.title(),
                    prefill.title(),
                    decode.title()
                );
                let differences = differences::of(&prefill.spec, &decode.spec);
                if !differences.is_empty() {
                    warnings.push(format!(
                        "{pair} will not pair, no KV is handed over between them: {}",
                        differences::sentence(&differences)
                    ));
                } else if let Some(places) = sources(prefill, decode) {
                    warnings.push(format!(
                        "{pair} pair only where both sources hold the same weights: spec.model.source differs ({places})"
                    ));
                }
            }
        }
    }
    warnings
}

/// Where the sources of two pools stand, if they are not one: what they hold is known once it is loaded.
fn sources(prefill: &Pool, decode: &Pool) -> Option<String> {
    let is_one = differences::is_one_source(&prefill.spec.model.source, &decode.spec.model.source);
    let place = |pool: &Pool| {
        let line = pool.origin.line_of("spec.model.source");
        format!("{}:{line}", pool.origin.file)
    };
    (!is_one).then(|| format!("{}, {}", place(prefill), place(decode)))
}

/// Pools that no policy names.
fn unused(resources: &Resources) -> Vec<String> {
    resources
        .pools
        .iter()
        .filter(|pool| {
            !resources.policies.iter().any(|policy| {
                named(policy, pool.role, &&resources.pools)
                    .iter()
                    .any(|other| std::ptr::eq(*other, *pool))
            })
        })
        .map(|pool| {
            format!(
                "{} is named by no RoutePolicy: its workers will serve nothing",
                pool.title()
            )
        })
        .collect()
}

//! Whether a policy can be honoured at all.

use baton_crds::PoolRole;

use super::observed::{Observed, Other, PolicyObject};
use super::references::Sides;
use crate::condition::Verdict;

/// It breaks no rule, nobody has its model, and its pools are there and serve its model. The first that is not so decides.
#[must_use]
pub fn of(observed: &Observed, sides: &Sides<'_>) -> Verdict {
    if !observed.refusals.is_empty() {
        return Verdict::fails("InvalidSpec", observed.refusals.join("; "));
    }
    if let Some((model, holder)) = taken(&observed.policy, &observed.others) {
        let message = format!(
            "model {model} is served by RoutePolicy {holder}, which is older: one policy per model and namespace; delete one of the two, or give this one another model"
        );
        return Verdict::fails("ModelTaken", message);
    }
    let model = &observed.policy.spec.model;
    for (_, followed) in &sides.references {
        for pool in &followed.pools {
            if pool.spec.model.name != *model {
                let message = format!(
                    "{}: {} serves model {}, this policy serves {model}: they must be the same",
                    followed.path,
                    pool.title(),
                    pool.spec.model.name
                );
                return Verdict::fails("ModelMismatch", message);
            }
        }
    }
    for (role, followed) in &sides.references {
        if followed.pools.is_empty() {
            let kind = role.kind();
            let namespace = &observed.policy.namespace;
            let what = match &followed.reference.name {
                Some(name) => format!(
                    "there is no {kind} {name} in namespace {namespace}{}: create it or name another",
                    other_kind(*role, name, observed)
                ),
                None => format!(
                    "no {kind} of namespace {namespace} has these labels: create one or change the selector"
                ),
            };
            return Verdict::fails("PoolMissing", format!("{}: {what}", followed.path));
        }
    }
    Verdict::holds("Valid", "the policy can be honoured")
}

fn other_kind(role: PoolRole, name: &str, observed: &Observed) -> String {
    let other = observed
        .pools
        .iter()
        .find(|pool| pool.role != role && pool.name == name);
    other.map_or(String::new(), |pool| {
        format!(" ({} is there)", pool.title())
    })
}

/// The model that an older policy has, and its name. Of two of one age the name decides.
fn taken<'a>(policy: &'a PolicyObject, others: &'a [Other]) -> Option<(&'a str, &'a str)> {
    let mine: Vec<&String> = std::iter::once(&policy.spec.model)
        .chain(&policy.spec.aliases)
        .collect();
    others
        .iter()
        .filter(|other| (other.created, &other.name) < (policy.created, &policy.name))
        .find_map(|other| {
            let model = mine.iter().find(|model| other.models.contains(model))?;
            Some((model.as_str(), other.name.as_str()))
        })
}

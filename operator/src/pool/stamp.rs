//! Labels and annotations that a pod gets after its creation: its node's domains, its worker's KV identity, that it drains.

use std::collections::BTreeMap;

use baton_crds::labels;

use super::action::Action;
use super::member::{Member, annotation, label};
use super::observed::Observed;

/// A stamp for what of a pod's labels and annotations is not as it should be. `accepted` (its card) and `drains`: as they are after
/// this plan.
pub(crate) fn stamp(
    member: &Member<'_>,
    observed: &Observed,
    accepted: bool,
    drains: bool,
) -> Option<Action> {
    if !member.stage.is_live() {
        return None;
    }
    let mut labels = domains(member, observed);
    let mut annotations = BTreeMap::new();
    let card = member.report.and_then(|report| report.card.as_ref().ok());
    if let Some(card) = card.filter(|_| accepted) {
        let identity = card.kv_identity.as_str();
        let digits = identity.get(..labels::KV_IDENTITY_DIGITS);
        let short = digits.unwrap_or(identity);
        labels.insert(labels::KV_IDENTITY.to_owned(), Some(short.to_owned()));
        annotations.insert(
            labels::KV_IDENTITY_DIGEST.to_owned(),
            Some(identity.to_owned()),
        );
    }
    let draining = drains.then(|| "true".to_owned());
    labels.insert(labels::DRAINING.to_owned(), draining);

    labels.retain(|name, value| label(member.pod, name) != value.as_deref());
    annotations.retain(|name: &String, value: &mut Option<String>| {
        annotation(member.pod, name) != value.as_deref()
    });
    if labels.is_empty() && annotations.is_empty() {
        return None;
    }
    Some(Action::StampPod {
        pod: member.name.to_owned(),
        uid: member.uid.to_owned(),
        labels,
        annotations,
    })
}

/// Of the pod's node, once it has one that the cache knows.
fn domains(member: &Member<'_>, observed: &Observed) -> BTreeMap<String, Option<String>> {
    let spec = member.pod.spec.as_ref();
    let node = spec.and_then(|spec| spec.node_name.as_ref());
    let Some(node) = node.and_then(|node| observed.nodes.get(node)) else {
        return BTreeMap::new();
    };
    let levels = observed.settings.levels.iter();
    levels
        .map(|level| {
            let domain = node
                .get(&level.node_label)
                .filter(|domain| !domain.is_empty())
                .map_or(labels::UNKNOWN_DOMAIN, String::as_str);
            (labels::domain(&level.name), Some(domain.to_owned()))
        })
        .collect()
}

//! The readiness gate: a pod is a replica once its worker's card was read and does not contradict what the pod was made to be.
//!
//! The card is held against the configuration that the pod was started with, an annotation of the pod, and not against the pool's
//! spec: a pod of an old revision is right by the spec of its time.
//!
//! A worker that registered and cannot be reached later stays registered: whether it answers is the readiness probe's business, from
//! its own node. Otherwise an operator that is cut off from the pods' network would take every worker from the routers at once.

use baton_crds::{labels, pool};
use baton_protocol::card::{Card, TextCheck};
use baton_protocol::identity::{Fact, FactSource};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::Value;

use super::member::{Member, configuration};
use super::observed::Observed;
use super::trouble::sentence;

pub(crate) const CARD_READ: &str = "CardRead";
/// The card is accepted. What it says against its own tokenizer is kept on the pod, as the operator's memory is not.
pub(crate) const TOKENIZER_UNVERIFIED: &str = "TokenizerUnverified";
pub(crate) const CARD_MISMATCH: &str = "CardMismatch";
pub(crate) const CARD_UNAVAILABLE: &str = "CardUnavailable";

/// The gate's condition where it has to change, and whether the card is accepted after that.
pub(crate) fn gate(
    member: &Member<'_>,
    observed: &Observed,
    current: &str,
) -> (Option<PodCondition>, bool) {
    let change = change(member, observed, current);
    let gate = change.as_ref().or(member.registered());
    let accepted = gate.is_some_and(|gate| gate.status == "True");
    (change, accepted)
}

fn change(member: &Member<'_>, observed: &Observed, current: &str) -> Option<PodCondition> {
    let report = member.report.filter(|_| member.stage.is_live())?;
    let known = member.registered();
    let (status, reason, message) = match &report.card {
        Ok(card) => match contradictions(card, member, observed, current).as_slice() {
            [] => match &card.text {
                TextCheck::Verified => ("True", CARD_READ, String::new()),
                TextCheck::Unverified { reason } => {
                    ("True", TOKENIZER_UNVERIFIED, sentence(reason))
                }
            },
            found => {
                let message = format!(
                    "the worker's card contradicts its pool: {}",
                    found.join("; ")
                );
                ("False", CARD_MISMATCH, message)
            }
        },
        Err(_) if known.is_some_and(|known| known.status == "True") => return None,
        Err(why) => ("False", CARD_UNAVAILABLE, why.clone()),
    };
    condition(
        labels::REGISTERED,
        (status, reason, message),
        known,
        observed.now,
    )
}

/// A pod's condition, if it says something else than the known one. Its time is that of the last change of its status.
pub(crate) fn condition(
    name: &str,
    (status, reason, message): (&str, &str, String),
    known: Option<&PodCondition>,
    now: Timestamp,
) -> Option<PodCondition> {
    let told = |text: &Option<String>| text.clone().unwrap_or_default();
    if known.is_some_and(|known| {
        known.status == status && told(&known.reason) == reason && told(&known.message) == message
    }) {
        return None;
    }
    let same = known.filter(|known| known.status == status);
    let since = same.and_then(|known| known.last_transition_time.clone());
    Some(PodCondition {
        type_: name.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message).filter(|message| !message.is_empty()),
        last_transition_time: Some(since.unwrap_or(Time(now))),
        ..PodCondition::default()
    })
}

/// A field, what is declared of it, and what the card says.
type Compared = (&'static str, Option<String>, String);

/// What is declared of a server that runs by itself, where the daemon beside it has seen what is so: a fact that was copied from the
/// declaration proves nothing.
fn observed_facts(
    card: &Card,
    declared: impl Fn(&str) -> Option<String>,
) -> impl Iterator<Item = Compared> {
    let compared = [
        (
            "parallelism.tensor",
            declared("/parallelism/tensor"),
            seen(&card.layout.tensor),
        ),
        (
            "parallelism.pipeline",
            declared("/parallelism/pipeline"),
            seen(&card.layout.pipeline),
        ),
        (
            "engine.dtype",
            // A cache of type Auto has the type of the weights, unless these bring the scales of a narrow one with them.
            declared("/engine/dtype")
                .filter(|_| declared("/engine/kvCacheDtype").is_none_or(|kv| kv == "Auto")),
            seen(&card.identity.kv_dtype).filter(|dtype| !dtype.starts_with("F8")),
        ),
        (
            "engine.maxModelLength",
            declared("/engine/maxModelLength"),
            // A server says it itself. A worker of Baton's own shortens it to what its model and its KV memory hold.
            declared("/engine/url").map(|_| card.capacity.max_context.to_string()),
        ),
    ];
    compared
        .into_iter()
        .filter_map(|(field, declared, seen)| Some((field, declared, seen?)))
}

fn seen<T: ToString>(fact: &Fact<T>) -> Option<String> {
    let fact = (fact.source() == FactSource::Observed).then_some(fact)?;
    fact.known().map(T::to_string)
}

/// Fields in which a worker is not what its pod was made to be, each with both values.
fn contradictions(
    card: &Card,
    member: &Member<'_>,
    observed: &Observed,
    current: &str,
) -> Vec<String> {
    let configuration = configuration(member.pod);
    let declared = |pointer: &str| match configuration.pointer(pointer) {
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Number(number)) => Some(number.to_string()),
        _ => None,
    };
    let mut fields: Vec<Compared> = vec![
        (
            "worker",
            Some(member.name.to_owned()),
            card.worker.to_string(),
        ),
        ("pool", Some(observed.pool.name.clone()), card.pool.clone()),
        (
            "poolRole",
            declared("/role"),
            format!("{:?}", card.pool_role),
        ),
        (
            "revision",
            Some(member.revision.to_owned()),
            card.revision.clone(),
        ),
        (
            "model.name",
            declared("/model/name"),
            card.model.name.clone(),
        ),
        (
            "model.revision",
            declared("/model/revision"),
            card.model.revision.clone(),
        ),
        (
            "engine.type",
            declared("/engine/type"),
            card.engine.kind.clone(),
        ),
        (
            "engine.blockSize",
            declared("/engine/blockSize"),
            card.capacity.block_size.to_string(),
        ),
    ];
    fields.extend(observed_facts(card, declared));
    // What the configuration does not carry is known for the current spec alone.
    if member.revision == current {
        let engine = &observed.pool.spec.engine;
        fields.push((
            "engine.connector",
            // A server's is in its daemon's configuration, in the daemon's words.
            declared("/engine/connector").or_else(|| Some(format!("{:?}", engine.connector()))),
            card.engine.connector.clone(),
        ));
        let dtype = card.identity.kv_dtype.known().cloned();
        let declared =
            Some(engine.kv_cache_dtype).filter(|declared| *declared != pool::KvCacheDtype::Auto);
        let declared = declared.map(|declared| format!("{declared:?}"));
        // Resources write F16, cards and engines f16.
        if let (Some(declared), Some(dtype)) = (declared, dtype)
            && !declared.eq_ignore_ascii_case(&dtype)
        {
            fields.push(("engine.kvCacheDtype", Some(declared), dtype));
        }
    }
    fields
        .into_iter()
        .filter_map(|(field, declared, card)| {
            let declared = declared.filter(|declared| *declared != card)?;
            Some(format!(
                "{field} is {card:?} on the card, declared is {declared:?}"
            ))
        })
        .collect()
}

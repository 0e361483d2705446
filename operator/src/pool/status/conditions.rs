//! The conditions of a pool.
//!
//! Tools of the Kubernetes world read them in this order: `Reconciling` True means under way, then `Stalled` True means failed, else
//! `Ready` counts. So `Ready` is there from the first write on, a pool that waits for a human is not `Reconciling`, and pods that
//! only finish what they run leave `Ready` True.
//!
//! | type | True when |
//! |---|---|
//! | `Ready` | every wanted replica is of the current revision and ready, and no other serves |
//! | `Reconciling` | something is still to be done or awaited, and it goes on by itself |
//! | `Stalled` | it does not: a human has to change something |
//! | `Available` | enough replicas are ready to serve: `replicas - maxUnavailable`, and at least one |
//! | `Progressing` | replicas are being made, replaced or taken away |
//! | `Compatible` | the pool can be paired with the pools that its policies pair it with; Unknown without such policies |
//! | `TokenizerVerified` | routers make of a text the tokens that the pool's workers compute with; Unknown before one has registered |

use baton_crds::labels;
use baton_crds::status::Condition;

use super::{Facts, Summary, identities};
use crate::condition::{Verdict, condition};
use crate::pool::member::{CONTAINER, ENGINE, Member, created};
use crate::pool::observed::{Compatibility, CreationError, Level, Observed};
use crate::pool::registration::TOKENIZER_UNVERIFIED;
use crate::pool::trouble::others;

pub(super) fn of(facts: &Facts<'_, '_>, summary: &Summary, observed: &Observed) -> Vec<Condition> {
    let stalled = stalled(facts, summary, observed);
    let work = outstanding(facts, summary, observed);
    let ready = ready(facts, summary, observed, stalled.as_ref(), work.as_ref());
    let paused = observed.pool.spec.rollout.paused;
    let (under_way, moves) = match (&stalled, work) {
        (Some(_), _) => (
            Verdict::fails("Stalled", "waits for a human, see condition Stalled"),
            Verdict::fails("Stalled", ""),
        ),
        (None, Some((reason, message))) => {
            let verdict = Verdict::holds(reason, message);
            (verdict.clone(), verdict)
        }
        (None, None) if paused => (
            Verdict::fails("AsDeclared", ""),
            Verdict::fails("Paused", "spec.rollout.paused is true"),
        ),
        (None, None) => (
            Verdict::fails("AsDeclared", ""),
            Verdict::fails("AsDeclared", ""),
        ),
    };
    let stalled = stalled.map_or_else(
        || Verdict::fails("Healthy", ""),
        |(reason, message)| Verdict::holds(reason, message),
    );
    let known = observed.pool.status.as_ref();
    let known = known.map_or([].as_slice(), |status| status.conditions.as_slice());
    [
        (labels::READY, ready),
        (labels::RECONCILING, under_way),
        (labels::STALLED, stalled),
        (labels::AVAILABLE, available(summary, observed)),
        (labels::PROGRESSING, moves),
        (labels::COMPATIBLE, compatible(observed)),
        (labels::TOKENIZER_VERIFIED, tokenizer_verified(facts)),
    ]
    .into_iter()
    .map(|(name, verdict)| {
        let generation = observed.pool.generation;
        condition(name, verdict, known, generation, observed.now)
    })
    .collect()
}

/// What does not go away by waiting.
fn stalled(
    facts: &Facts<'_, '_>,
    summary: &Summary,
    observed: &Observed,
) -> Option<(&'static str, String)> {
    if let Err(refusal) = facts.revision {
        return Some((refusal.reason, refusal.message.clone()));
    }
    if let Some(trouble) = summary
        .trouble
        .as_ref()
        .filter(|trouble| trouble.needs_a_human)
    {
        return Some((trouble.reason, trouble.message.clone()));
    }
    if let Some(refused) = refused(summary, observed) {
        return Some(refused);
    }
    if let Some(name) = &facts.foreign_budget {
        let message = format!(
            "PodDisruptionBudget {name} is not this pool's and is left alone: delete or rename it, or leave out spec.disruption"
        );
        return Some(("NameTaken", message));
    }
    None
}

/// Why the last pod was not created, while one is missing: what was refused before is of no interest to a pool that wants no more.
fn creation_error<'a>(summary: &Summary, observed: &'a Observed) -> Option<&'a CreationError> {
    let there = if observed.pool.spec.rollout.paused {
        summary.serving
    } else {
        summary.updated
    };
    let error = observed.creation_error.as_ref();
    error.filter(|_| there < summary.wanted)
}

/// A refusal that each further try would meet too. A server that is out of order, or busy, answers with other codes.
fn refused(summary: &Summary, observed: &Observed) -> Option<(&'static str, String)> {
    let CreationError { code, message } = creation_error(summary, observed)?;
    let (reason, next_step) = match code {
        // Quotas and admission rules.
        Some(403) => (
            "PodsForbidden",
            "raise the quota, or change the pool or the rule",
        ),
        Some(400 | 422) => (
            "PodsInvalid",
            "correct the field, often one of spec.template",
        ),
        _ => return None,
    };
    let message = format!("a pod cannot be created: {message}: {next_step}");
    Some((reason, message))
}

/// What is still to be done, or awaited.
fn outstanding(
    facts: &Facts<'_, '_>,
    summary: &Summary,
    observed: &Observed,
) -> Option<(&'static str, String)> {
    let Summary {
        wanted,
        serving,
        ready,
        updated,
        draining,
        ..
    } = *summary;
    let paused = observed.pool.spec.rollout.paused;
    if facts.revision.is_err() {
        return None;
    }
    if updated < serving && !paused {
        let message = format!("{updated} of {wanted} replicas are of the current revision");
        let trouble = summary.trouble.as_ref();
        let trouble = trouble.map(|trouble| format!("; {}", trouble.message));
        return Some((
            "RollingOut",
            format!("{message}{}", trouble.unwrap_or_default()),
        ));
    }
    if serving < wanted {
        let error = creation_error(summary, observed);
        let error = error.map(|error| format!("; a pod could not be created: {}", error.message));
        let message = format!(
            "{serving} of {wanted} pods are there{}",
            error.unwrap_or_default()
        );
        return Some(("ScalingUp", message));
    }
    if serving > wanted {
        let message = format!("{serving} pods serve, {wanted} are wanted");
        return Some(("ScalingDown", message));
    }
    if ready < wanted {
        let message = format!("{ready} of {wanted} replicas are ready");
        return Some(match &summary.trouble {
            Some(trouble) => (trouble.reason, format!("{message}: {}", trouble.message)),
            None => ("AwaitingPods", message),
        });
    }
    if draining > 0 {
        let message = format!("{draining} pods finish what they run, and go then");
        return Some(("Draining", message));
    }
    None
}

fn ready(
    facts: &Facts<'_, '_>,
    summary: &Summary,
    observed: &Observed,
    stalled: Option<&(&'static str, String)>,
    work: Option<&(&'static str, String)>,
) -> Verdict {
    let Summary {
        wanted,
        serving,
        ready,
        updated_and_ready,
        ..
    } = *summary;
    let note = remarks(facts, observed);
    let is_rolled_out = updated_and_ready == wanted && serving == wanted && facts.revision.is_ok();
    if is_rolled_out {
        let (reason, message) = if wanted == 0 {
            ("ScaledToZero", "no replicas are wanted".to_owned())
        } else {
            (
                "RolledOut",
                format!("{ready} of {wanted} replicas are ready"),
            )
        };
        return Verdict::holds(reason, format!("{message}{note}"));
    }
    let counted = format!("{ready} of {wanted} replicas are ready");
    let (reason, why) = match (stalled, &summary.trouble, work) {
        (Some((reason, message)), _, _) => (*reason, message.clone()),
        (None, Some(trouble), _) => (trouble.reason, trouble.message.clone()),
        (None, None, Some((reason, message))) => (*reason, message.clone()),
        // Paused in the middle of a rollout.
        (None, None, None) => (
            "Paused",
            "not all replicas are of the current revision, and spec.rollout.paused is true"
                .to_owned(),
        ),
    };
    let message = if why == counted {
        counted
    } else {
        format!("{counted}: {why}")
    };
    Verdict::fails(reason, format!("{message}{note}"))
}

/// What is worth knowing and keeps nobody from serving.
fn remarks(facts: &Facts<'_, '_>, observed: &Observed) -> String {
    let mut remarks = String::new();
    if let Ok(revision) = facts.revision {
        let identities = identities(facts.members, revision);
        if identities.len() > 1 {
            remarks.push_str(&format!(
                "; pods of revision {revision} have {} different KV identities: their model's source does not name one state of the weights",
                identities.len()
            ));
        }
    }
    let unknown = facts.members.iter().filter(|member| member.is_serving());
    let unknown = unknown.filter_map(|member| Some((member.name, missed_level(member, observed)?)));
    if let Some((pod, level)) = unknown.min_by_key(|(pod, _)| *pod) {
        remarks.push_str(&format!(
            "; level {} is named by the pool or a policy, and the node of pod {pod} does not say its domain: give it the label {}",
            level.name, level.node_label
        ));
    }
    let mut severed = facts
        .members
        .iter()
        .filter(|member| has_lost_its_plug_in(member));
    if let Some(member) = severed.next() {
        remarks.push_str(&format!(
            "; no prompt is sent to pod {}{}: its daemon takes none while vLLM's BatonConnector does not call it: see the logs of its containers {ENGINE} and {CONTAINER}",
            member.name,
            others(1 + severed.count())
        ));
    }
    let foreign = facts
        .foreign
        .iter()
        .min_by_key(|pod| (created(pod), &pod.metadata.name));
    if let Some(pod) = foreign {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        remarks.push_str(&format!(
            "; pod {name} carries this pool's labels and is not the pool's: it is left alone, take its label {} away",
            labels::POOL
        ));
    }
    remarks
}

/// A daemon without its prefill server's plug-in lets nothing be sent there, lest a prompt be computed for nobody, and is ready all the
/// same.
fn has_lost_its_plug_in(member: &Member<'_>) -> bool {
    member.is_serving() && member.ready && member.load().is_some_and(|load| load.lacks_plug_in)
}

/// A level that somebody counts on and that the pod's node does not say. Of the others most clusters lack some.
fn missed_level<'a>(member: &Member<'_>, observed: &'a Observed) -> Option<&'a Level> {
    let topology = &observed.pool.spec.topology;
    let named = |level: &&Level| {
        let own = topology.spread.iter().chain(&topology.require_same);
        own.chain(&observed.policies.levels)
            .any(|name| *name == level.name)
    };
    let labels = member.pod.metadata.labels.as_ref()?;
    observed.settings.levels.iter().filter(named).find(|level| {
        let domain = labels.get(&labels::domain(&level.name));
        domain.is_some_and(|domain| domain == labels::UNKNOWN_DOMAIN)
    })
}

fn available(summary: &Summary, observed: &Observed) -> Verdict {
    let Summary { wanted, ready, .. } = *summary;
    let rollout = &observed.pool.spec.rollout;
    let missed = usize::try_from(rollout.max_unavailable).unwrap_or_default();
    let least = wanted.saturating_sub(missed).max(1);
    let message = format!("{ready} of {wanted} replicas are ready");
    if wanted == 0 && ready == 0 {
        return Verdict::fails("ScaledToZero", "no replicas are wanted");
    }
    if ready >= least {
        Verdict::holds("EnoughReady", message)
    } else {
        Verdict::fails("TooFewReady", format!("{message}, {least} are needed"))
    }
}

fn compatible(observed: &Observed) -> Verdict {
    match &observed.policies.compatible {
        Some(Compatibility {
            holds: true,
            message,
        }) => Verdict::holds("Pairs", message),
        Some(Compatibility { message, .. }) => Verdict::fails("FieldsDiffer", message),
        None => Verdict::unknown("NoPairs", "no RoutePolicy pairs this pool with another"),
    }
}

/// By what the gates of the pods say: it is there for an operator that has just started and reaches no worker.
fn tokenizer_verified(facts: &Facts<'_, '_>) -> Verdict {
    let serving = facts.members.iter().filter(|member| member.is_serving());
    let gates = serving.filter_map(|member| Some((member.name, member.registered()?)));
    let (unverified, verified): (Vec<_>, Vec<_>) = gates
        .filter(|(_, gate)| gate.status == "True")
        .partition(|(_, gate)| gate.reason.as_deref() == Some(TOKENIZER_UNVERIFIED));
    match unverified.first() {
        Some((pod, gate)) => {
            let others = others(unverified.len());
            let why = gate.message.as_deref().unwrap_or_default();
            let message = format!("no prefix is credited to pod {pod}{others}: {why}");
            Verdict::fails(TOKENIZER_UNVERIFIED, message)
        }
        None if verified.is_empty() => {
            Verdict::unknown("NoneRegistered", "no worker has registered")
        }
        None => Verdict::holds(
            "TokensMatch",
            "routers make the tokens that the workers compute with",
        ),
    }
}

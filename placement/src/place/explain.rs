//! A decision in one sentence, with the numbers that decided it, for the person on call.

use baton_protocol::ids::WorkerId;

use super::choose::{Choice, name};
use super::evaluate::{Rules, weighted};
use super::request::Facts;
use super::{Candidate, Filter, Filtered, Outcome, Reason};
use crate::policy::{Mode, Policy};

/// Milliseconds as a person reads them.
fn ms(value: f64) -> String {
    if value.abs() < 10.0 {
        format!("{value:.1} ms")
    } else {
        format!("{value:.0} ms")
    }
}

fn cheapest(candidates: &[Candidate], remote: bool) -> Option<&Candidate> {
    candidates
        .iter()
        .filter(|candidate| candidate.plan.is_remote() == remote)
        .min_by(|left, right| left.cost.total_cmp(&right.cost))
}

/// The weighted term in which two candidates differ most in favour of the first.
fn deciding(winner: &Candidate, loser: &Candidate, rules: &Rules) -> String {
    let of_winner = weighted(&winner.terms, &rules.weights);
    let of_loser = weighted(&loser.terms, &rules.weights);
    let most = of_winner
        .iter()
        .zip(&of_loser)
        .max_by(|left, right| (left.1.1 - left.0.1).total_cmp(&(right.1.1 - right.0.1)));
    match most {
        Some(((term, ours), (_, theirs))) if theirs > ours => {
            format!("mostly {term}, {} against {}", ms(*ours), ms(*theirs))
        }
        _ => "equal in every term, so the first is taken".to_owned(),
    }
}

fn filters(filtered: &Filtered) -> String {
    let quiet = [Filter::ProvedWorse, Filter::NotRecorded, Filter::NotSampled];
    let counted: Vec<String> = filtered
        .iter()
        .filter(|(why, _)| !quiet.contains(why))
        .map(|(why, by)| format!("{why:?} {by}"))
        .collect();
    if counted.is_empty() {
        "none is registered in the pools of this policy".to_owned()
    } else {
        format!("filtered: {}", counted.join(", "))
    }
}

#[allow(
    clippy::too_many_arguments,
    reason = "each is a different part of one decision, and nothing else has them all"
)]
pub(crate) fn sentence(
    choice: &Choice,
    candidates: &[Candidate],
    facts: &Facts,
    policy: &Policy,
    rules: &Rules,
    mode: Mode,
    filtered: &Filtered,
    ids: &[WorkerId],
) -> String {
    let Some(chosen) = choice.chosen.and_then(|index| candidates.get(index)) else {
        return refusal(choice, facts, policy, filtered);
    };
    let to = name(&chosen.plan, ids);
    let kind = if chosen.plan.is_remote() {
        "remote"
    } else {
        "local"
    };
    let uncached = facts
        .tokens
        .saturating_sub(chosen.inputs.decode.cached_tokens);
    let rival = |remote| cheapest(candidates, remote);
    match choice.reason {
        Reason::RemoteCheaper => match rival(false) {
            Some(local) => format!(
                "remote on {to} costs {} against {} locally on {}, and that is more than the margin of {} less: {}",
                ms(chosen.cost),
                ms(local.cost),
                name(&local.plan, ids),
                ms(rules.margin(local.cost)),
                deciding(chosen, local, rules)
            ),
            None => format!("remote on {to} costs {}", ms(chosen.cost)),
        },
        Reason::WithinMargin => match rival(true) {
            Some(remote) => format!(
                "local on {to} costs {}; remote on {} costs {}, which is less, but not by the margin of {}: {}",
                ms(chosen.cost),
                name(&remote.plan, ids),
                ms(remote.cost),
                ms(rules.margin(chosen.cost)),
                deciding(remote, chosen, rules)
            ),
            None => format!("local on {to} costs {}", ms(chosen.cost)),
        },
        Reason::LocalCheaper => match rival(true) {
            Some(remote) => format!(
                "local on {to} costs {} against {} for remote on {}: {}",
                ms(chosen.cost),
                ms(remote.cost),
                name(&remote.plan, ids),
                deciding(chosen, remote, rules)
            ),
            None => format!("local on {to} costs {}", ms(chosen.cost)),
        },
        Reason::SharedByChance => format!(
            "{kind} on {to} was drawn among candidates of similar cost (temperature {}): it costs {}",
            percent(rules.temperature),
            ms(chosen.cost)
        ),
        Reason::OnlyRemote => format!(
            "no worker can take the whole request; remote on {to} is the cheapest pair at {}",
            ms(chosen.cost)
        ),
        Reason::OneToken => format!(
            "one token is asked for, so nothing is handed over; {to} is the cheapest worker at {}",
            ms(chosen.cost)
        ),
        Reason::NotDisaggregatable => format!(
            "the request has to stay on one worker; {to} is the cheapest at {}",
            ms(chosen.cost)
        ),
        Reason::NoPrefillPool => format!(
            "the policy names no prefill pool; {to} is the cheapest worker at {}",
            ms(chosen.cost)
        ),
        Reason::ModeAggregated => format!(
            "mode Aggregated: {to} has the least queue and uncached prefill, {} + {}",
            ms(chosen.terms.queue),
            ms(chosen.terms.prefill)
        ),
        Reason::ModeDisaggregated => format!(
            "mode Disaggregated: {to} is the cheapest pair at {}",
            ms(chosen.cost)
        ),
        Reason::ThresholdBelow
        | Reason::ThresholdAbove
        | Reason::DynamoBypass
        | Reason::DynamoRemote => {
            format!(
                "{}: {uncached} of {} tokens are not cached on the decode worker picked first, so {kind} on {to}",
                rule(mode),
                facts.tokens
            )
        }
        Reason::DynamoBusy => format!(
            "{}: the prefill worker for it is busy, so local on {to}",
            rule(mode)
        ),
        Reason::NoPrefillWorker => format!(
            "no prefill worker can serve this ({}); onNoPrefill is Local, and {to} is the cheapest worker at {}",
            filters(filtered),
            ms(chosen.cost)
        ),
        Reason::NoPrefillBudget
        | Reason::NoEligibleWorker
        | Reason::QueueFull
        | Reason::KvFull
        | Reason::KvCapacity => {
            format!("{kind} on {to} costs {}", ms(chosen.cost))
        }
    }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn rule(mode: Mode) -> String {
    match mode {
        Mode::Threshold { tokens } => format!("threshold of {tokens} tokens"),
        Mode::DynamoIslBounding { tokens, ratio } => {
            format!(
                "local below {tokens} tokens and {} of the input",
                percent(ratio)
            )
        }
        Mode::DynamoIslOrLoad {
            tokens,
            ratio,
            busy_tokens,
        } => format!(
            "local below {tokens} tokens and {} of the input, or above {busy_tokens} queued tokens",
            percent(ratio)
        ),
        Mode::Conditional | Mode::Aggregated | Mode::Disaggregated => {
            format!("mode {}", mode.word())
        }
    }
}

fn refusal(choice: &Choice, facts: &Facts, policy: &Policy, filtered: &Filtered) -> String {
    let then = match choice.outcome {
        Outcome::Wait { milliseconds } => format!(
            "onNoPrefill is Queue, so the request waits ({} of {} so far)",
            ms(facts.waited_milliseconds),
            ms(milliseconds)
        ),
        Outcome::Reject {
            retry_after_seconds,
        } => {
            format!("refused, to be tried again after {retry_after_seconds} s")
        }
        Outcome::Run(_) => "refused".to_owned(),
    };
    let why = match choice.reason {
        Reason::QueueFull => format!(
            "every worker that could take it has {} requests waiting",
            policy.admission.max_queued_per_worker
        ),
        Reason::KvFull => format!(
            "every worker that could hold the KV of {} prompt tokens has its blocks in use",
            facts.tokens
        ),
        Reason::KvCapacity => format!(
            "no worker has KV blocks for {} prompt tokens and one more, even with nothing else on it",
            facts.tokens
        ),
        Reason::NoPrefillBudget => format!(
            "no prefill worker can serve this, and {} runs are local for that reason already (onNoPrefill allows {} per worker)",
            facts.local_without_prefill, policy.on_no_prefill.max_concurrent_per_worker
        ),
        Reason::NoPrefillWorker => "no prefill worker can serve this".to_owned(),
        _ => "no worker can serve this".to_owned(),
    };
    format!("{why} ({}); {then}", filters(filtered))
}

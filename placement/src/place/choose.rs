//! From candidates to a choice: mode, margin, chance, and what happens when there is nobody.
//!
//! Reads nothing but candidates, facts, policy and counts, all of which a record holds: replay calls the same function.

use super::evaluate::Rules;
use super::request::Facts;
use super::{Candidate, Filter, Filtered, Outcome, Plan, RECORD_ALL, RECORD_BEST, Reason};
use crate::policy::{Mode, NoPrefillAction, Policy};
use crate::rng::{Purpose, Rng};

/// What was chosen and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Choice {
    pub(crate) chosen: Option<usize>,
    pub(crate) runner_up: Option<usize>,
    pub(crate) outcome: Outcome,
    pub(crate) reason: Reason,
}

/// The first of the least, so that ties go to the first in fleet order.
fn least(
    candidates: &[Candidate],
    eligible: impl Fn(&Candidate) -> bool,
    value: impl Fn(&Candidate) -> f64,
) -> Option<usize> {
    let mut best: Option<(usize, f64)> = None;
    for (index, candidate) in candidates.iter().enumerate() {
        if eligible(candidate) {
            let value = value(candidate);
            if best.is_none_or(|(_, least)| value.total_cmp(&least).is_lt()) {
                best = Some((index, value));
            }
        }
    }
    best.map(|(index, _)| index)
}

/// Least queue and uncached prefill: what the baselines go by.
fn busy(candidate: &Candidate) -> f64 {
    candidate.terms.queue + candidate.terms.prefill
}

fn is_local(candidate: &Candidate) -> bool {
    !candidate.plan.is_remote()
}

/// The decode worker that baselines pick before they ask whether to go remote.
pub(super) fn picked_first(candidates: &[Candidate]) -> Option<usize> {
    least(
        candidates,
        |candidate| is_local(candidate) && !candidate.inputs.compute.pooled,
        busy,
    )
}

fn best_local(candidates: &[Candidate]) -> Option<usize> {
    least(candidates, is_local, |candidate| candidate.cost)
}

fn best_remote(candidates: &[Candidate]) -> Option<usize> {
    least(
        candidates,
        |candidate| candidate.plan.is_remote(),
        |candidate| candidate.cost,
    )
}

/// The best remote candidate that generates on the worker of `local`.
fn best_remote_for(candidates: &[Candidate], local: usize) -> Option<usize> {
    let worker = candidates[local].plan.decode();
    least(
        candidates,
        |candidate| candidate.plan.is_remote() && candidate.plan.decode() == worker,
        |candidate| candidate.cost,
    )
}

/// Cost with what remote has to be cheaper by.
fn handicapped(candidate: &Candidate, margin: f64) -> f64 {
    candidate.cost
        + if candidate.plan.is_remote() {
            margin
        } else {
            0.0
        }
}

fn margin(candidates: &[Candidate], rules: &Rules, mode: Mode) -> f64 {
    match (mode, best_local(candidates)) {
        (Mode::Conditional, Some(local)) => rules.margin(candidates[local].cost),
        _ => 0.0,
    }
}

/// Cuts more candidates than can be recorded down to the best, keeping every one that any rule would take, and counts the rest.
/// The choice is made among what is left, so that replay sees what it saw.
pub(super) fn reduce(
    candidates: Vec<Candidate>,
    rules: &Rules,
    mode: Mode,
    filtered: &mut Filtered,
) -> Vec<Candidate> {
    if candidates.len() <= RECORD_ALL {
        return candidates;
    }
    let margin = margin(&candidates, rules, mode);
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.sort_by(|&left, &right| {
        let by_cost = handicapped(&candidates[left], margin)
            .total_cmp(&handicapped(&candidates[right], margin));
        by_cost.then(left.cmp(&right))
    });
    let first = picked_first(&candidates);
    let decisive = [
        best_local(&candidates),
        best_remote(&candidates),
        least(&candidates, is_local, busy),
        first,
        first.and_then(|local| best_remote_for(&candidates, local)),
    ];
    let mut kept: Vec<usize> = Vec::with_capacity(RECORD_BEST);
    for index in decisive.into_iter().flatten().chain(order) {
        if kept.len() < RECORD_BEST && !kept.contains(&index) {
            kept.push(index);
        }
    }
    kept.sort_unstable();
    super::gather::count(
        filtered,
        Filter::NotRecorded,
        (candidates.len() - kept.len()) as u64,
    );
    kept.into_iter().map(|index| candidates[index]).collect()
}

pub(crate) fn choose(
    candidates: &[Candidate],
    facts: &Facts,
    policy: &Policy,
    rules: &Rules,
    mode: Mode,
    filtered: &Filtered,
    seed: u64,
) -> Choice {
    let picked = Chooser {
        candidates,
        facts,
        policy,
        rules,
        mode,
        seed,
    }
    .pick();
    let margin = margin(candidates, rules, mode);
    match picked {
        Picked::Run(chosen, reason) => Choice {
            chosen: Some(chosen),
            runner_up: runner_up(candidates, Some(chosen), margin),
            outcome: Outcome::Run(candidates[chosen].plan),
            reason,
        },
        Picked::Not(outcome, reason) => Choice {
            chosen: None,
            runner_up: runner_up(candidates, None, margin),
            outcome,
            reason: if reason == Reason::NoEligibleWorker {
                nobody(facts, filtered)
            } else {
                reason
            },
        },
    }
}

fn runner_up(candidates: &[Candidate], chosen: Option<usize>, margin: f64) -> Option<usize> {
    let chosen = chosen.map(|index| candidates[index].plan);
    least(
        candidates,
        |candidate| Some(candidate.plan) != chosen,
        |candidate| handicapped(candidate, margin),
    )
}

/// What stood most in the way when nobody is left.
fn nobody(facts: &Facts, filtered: &Filtered) -> Reason {
    let counted = |why: Filter| filtered.get(&why).copied().unwrap_or(0);
    if facts.too_large {
        // Nothing else that stands in the way would help by going.
        Reason::KvCapacity
    } else if counted(Filter::QueueFull) > 0 {
        Reason::QueueFull
    } else if counted(Filter::KvFull) > 0 {
        Reason::KvFull
    } else {
        Reason::NoEligibleWorker
    }
}

enum Picked {
    Run(usize, Reason),
    Not(Outcome, Reason),
}

struct Chooser<'a> {
    candidates: &'a [Candidate],
    facts: &'a Facts,
    policy: &'a Policy,
    rules: &'a Rules,
    mode: Mode,
    seed: u64,
}

impl Chooser<'_> {
    fn pick(&self) -> Picked {
        if self.candidates.is_empty() {
            return self.reject(Reason::NoEligibleWorker);
        }
        let whole = |reason| match best_local(self.candidates) {
            Some(local) => Picked::Run(local, reason),
            None => self.reject(Reason::NoEligibleWorker),
        };
        if self.facts.one_token()
            && let Some(local) = best_local(self.candidates)
        {
            return Picked::Run(local, Reason::OneToken);
        }
        if self.facts.whole {
            return whole(Reason::NotDisaggregatable);
        }
        if self.mode != Mode::Aggregated && !self.facts.prefill_pools {
            return whole(Reason::NoPrefillPool);
        }
        match self.mode {
            Mode::Conditional => self.conditional(),
            Mode::Aggregated => match least(self.candidates, is_local, busy) {
                Some(local) => Picked::Run(local, Reason::ModeAggregated),
                None => self.reject(Reason::NoEligibleWorker),
            },
            Mode::Disaggregated => match best_remote(self.candidates) {
                Some(remote) => Picked::Run(remote, Reason::ModeDisaggregated),
                None => self.no_prefill(),
            },
            Mode::Threshold { tokens } => self.decode_first(|_, uncached| {
                if uncached >= f64::from(tokens) {
                    Err(Reason::ThresholdAbove)
                } else {
                    Ok(Reason::ThresholdBelow)
                }
            }),
            Mode::DynamoIslBounding { tokens, ratio } => {
                self.decode_first(|_, uncached| self.bypasses(uncached, tokens, ratio))
            }
            Mode::DynamoIslOrLoad {
                tokens,
                ratio,
                busy_tokens,
            } => self.decode_first(|remote, uncached| {
                let queued = remote.map(|index| {
                    let compute = &self.candidates[index].inputs.compute;
                    compute.queued_tokens + compute.own_tokens
                });
                if queued.is_some_and(|queued| queued > busy_tokens) {
                    Ok(Reason::DynamoBusy)
                } else {
                    self.bypasses(uncached, tokens, ratio)
                }
            }),
        }
    }

    fn conditional(&self) -> Picked {
        let (Some(remote), local) = (best_remote(self.candidates), best_local(self.candidates))
        else {
            return self.no_prefill();
        };
        let Some(local) = local else {
            return Picked::Run(remote, Reason::OnlyRemote);
        };
        let (remote_cost, local_cost) = (self.candidates[remote].cost, self.candidates[local].cost);
        let margin = self.rules.margin(local_cost);
        if self.rules.temperature > 0.0 {
            return Picked::Run(self.draw(margin), Reason::SharedByChance);
        }
        if remote_cost + margin < local_cost {
            Picked::Run(remote, Reason::RemoteCheaper)
        } else if remote_cost < local_cost {
            Picked::Run(local, Reason::WithinMargin)
        } else {
            Picked::Run(local, Reason::LocalCheaper)
        }
    }

    /// Draws in proportion to exp(−(cost − least)/(temperature · least)).
    fn draw(&self, margin: f64) -> usize {
        let costs: Vec<f64> = self
            .candidates
            .iter()
            .map(|candidate| handicapped(candidate, margin))
            .collect();
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let width = self.rules.temperature * least.max(1.0);
        let weights: Vec<f64> = costs
            .iter()
            .map(|cost| (-(cost - least) / width).exp())
            .collect();
        let mut left =
            Rng::stream(self.seed, Purpose::Temperature).unit() * weights.iter().sum::<f64>();
        for (index, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return index;
            }
        }
        weights.len() - 1
    }

    /// Picks the decode worker, then asks `rule`, given the best pair with it and the tokens uncached there: `Ok` is local,
    /// `Err` remote, each with its reason.
    fn decode_first(&self, rule: impl Fn(Option<usize>, f64) -> Result<Reason, Reason>) -> Picked {
        let Some(local) = picked_first(self.candidates) else {
            return match best_remote(self.candidates) {
                Some(remote) => Picked::Run(remote, Reason::OnlyRemote),
                None => self.no_prefill(),
            };
        };
        let cached = self.candidates[local].inputs.decode.cached_tokens;
        let uncached = f64::from(self.facts.tokens.saturating_sub(cached));
        let remote = best_remote_for(self.candidates, local);
        match (rule(remote, uncached), remote) {
            (Ok(reason), _) => Picked::Run(local, reason),
            (Err(reason), Some(remote)) => Picked::Run(remote, reason),
            (Err(_), None) => self.no_prefill(),
        }
    }

    fn bypasses(&self, uncached: f64, tokens: u32, ratio: f64) -> Result<Reason, Reason> {
        let whole = f64::from(self.facts.tokens.max(1));
        if uncached < f64::from(tokens) && uncached / whole < ratio {
            Ok(Reason::DynamoBypass)
        } else {
            Err(Reason::DynamoRemote)
        }
    }

    /// There is no pair: what the policy says then.
    fn no_prefill(&self) -> Picked {
        let rule = &self.policy.on_no_prefill;
        match rule.action {
            NoPrefillAction::Local => {
                let budget = rule
                    .max_concurrent_per_worker
                    .saturating_mul(self.facts.local_workers.max(1));
                match best_local(self.candidates) {
                    None => self.reject(Reason::NoPrefillWorker),
                    Some(_) if self.facts.local_without_prefill >= budget => {
                        self.reject(Reason::NoPrefillBudget)
                    }
                    Some(local) => Picked::Run(local, Reason::NoPrefillWorker),
                }
            }
            NoPrefillAction::Queue if self.facts.waited_milliseconds < rule.queue_milliseconds => {
                Picked::Not(
                    Outcome::Wait {
                        milliseconds: rule.queue_milliseconds,
                    },
                    Reason::NoPrefillWorker,
                )
            }
            NoPrefillAction::Queue | NoPrefillAction::Reject => {
                self.reject(Reason::NoPrefillWorker)
            }
        }
    }

    fn reject(&self, reason: Reason) -> Picked {
        Picked::Not(
            Outcome::Reject {
                retry_after_seconds: self.policy.admission.retry_after_seconds,
            },
            reason,
        )
    }
}

/// Names a plan for people.
pub(crate) fn name(plan: &Plan, ids: &[baton_protocol::ids::WorkerId]) -> String {
    let id = |worker: usize| ids.get(worker).map_or("?", |id| id.as_str()).to_owned();
    match *plan {
        Plan::Local { worker } => id(worker),
        Plan::Remote { prefill, decode } => format!("{} → {}", id(prefill), id(decode)),
    }
}

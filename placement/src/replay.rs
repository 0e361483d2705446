//! Making recorded decisions again: to prove that they follow from what was recorded, and to ask what another policy would do.
//!
//! Equal means equal bits. The exponential function is the platform's, so records replay exactly where the same build runs.

use baton_protocol::ids::{RunId, WorkerId};
use serde::{Deserialize, Serialize};

use crate::coefficients::CoefficientSet;
use crate::place::choose::{self, Choice};
use crate::place::evaluate::{self, Rules};
use crate::place::{Candidate, Decision, Reason, explain};
use crate::policy::{Enforcement, Mode, Overrides, Policy, Pooling};
use crate::record::{DecisionRecord, Kind, RecordedCandidate, SCHEMA};

/// A record that cannot be replayed with what was given.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    #[error("run {run}: schema is {found:?}: only {SCHEMA:?} can be replayed")]
    Schema { run: RunId, found: String },
    #[error(
        "run {run}: coefficient set {given} was given, but the record used {recorded}: read coefficients/{recorded}.json"
    )]
    Coefficients {
        run: RunId,
        recorded: String,
        given: String,
    },
    #[error(
        "run {run}: policy {given} was given, but the record used {recorded}: read policies/{recorded}.json, or ask what-if"
    )]
    Policy {
        run: RunId,
        recorded: String,
        given: String,
    },
    #[error("run {run}: mode {mode:?} is none of this policy's")]
    Mode { run: RunId, mode: String },
    #[error(
        "run {run}: candidate {index} names a class or link that is not in the coefficient set"
    )]
    Candidate { run: RunId, index: usize },
}

/// One field in which a record and its replay differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplayDifference {
    /// `chosen`, `candidates[3].terms.queue`, ….
    pub field: String,
    pub recorded: String,
    pub replayed: String,
}

/// Makes the decision of a record again, from nothing but the record, its coefficients and its policy.
pub fn replay(
    record: &DecisionRecord,
    coefficients: &CoefficientSet,
    policy: &Policy,
) -> Result<Decision, ReplayError> {
    let given = policy.digest();
    if given != record.policy.digest {
        return Err(ReplayError::Policy {
            run: record.run.clone(),
            recorded: record.policy.digest.clone(),
            given,
        });
    }
    let mode = if record.mode == policy.mode.word() {
        policy.mode
    } else {
        Mode::from_header(&record.mode).ok_or_else(|| ReplayError::Mode {
            run: record.run.clone(),
            mode: record.mode.clone(),
        })?
    };
    Ok(decide(record, coefficients, policy, mode, |_| true)?.0)
}

/// Evaluates and chooses among the recorded candidates; also says at which position each stood in the record.
fn decide(
    record: &DecisionRecord,
    coefficients: &CoefficientSet,
    policy: &Policy,
    mode: Mode,
    allowed: impl Fn(&RecordedCandidate) -> bool,
) -> Result<(Decision, Vec<usize>, Vec<WorkerId>), ReplayError> {
    if record.schema != SCHEMA {
        return Err(ReplayError::Schema {
            run: record.run.clone(),
            found: record.schema.clone(),
        });
    }
    let given = coefficients.digest();
    if given != record.coefficients {
        return Err(ReplayError::Coefficients {
            run: record.run.clone(),
            recorded: record.coefficients.clone(),
            given,
        });
    }
    let rules = Rules::new(policy);
    let mut facts = record.facts();
    facts.prefill_pools = !policy.prefill_pools.is_empty();
    let mut names = Vec::new();
    let mut candidates = Vec::with_capacity(record.candidates.len());
    let mut positions = Vec::with_capacity(record.candidates.len());
    for (index, recorded) in record.candidates.iter().enumerate() {
        if !allowed(recorded) {
            continue;
        }
        let mut inputs = recorded.inputs();
        if let (Kind::Local, Some(pool)) = (recorded.kind, record.pools.get(&recorded.decode)) {
            inputs.compute.pooled = !policy.decode_pools.contains(pool);
        }
        if inputs.compute.pooled && policy.pooling == Pooling::Strict {
            continue;
        }
        let penalty = recorded
            .inputs
            .level
            .as_ref()
            .map_or(0.0, |level| evaluate::penalty(policy, level));
        let evaluated = evaluate::evaluate(coefficients, &inputs, penalty, &facts, &rules)
            .ok_or_else(|| ReplayError::Candidate {
                run: record.run.clone(),
                index,
            })?;
        candidates.push(Candidate {
            plan: recorded.plan(&mut names),
            inputs,
            terms: evaluated.terms,
            mean: evaluated.mean,
            upper: evaluated.upper,
            cost: evaluated.cost,
        });
        positions.push(index);
    }
    let filtered = record.filtered.clone();
    let choice: Choice = choose::choose(
        &candidates,
        &facts,
        policy,
        &rules,
        mode,
        &filtered,
        record.random_seed,
    );
    let explanation = explain::sentence(
        &choice,
        &candidates,
        &facts,
        policy,
        &rules,
        mode,
        &filtered,
        &names,
    );
    let decision = Decision {
        seed: record.random_seed,
        now: record.now,
        mode,
        asked: record.mode_asked.as_deref().and_then(Mode::from_header),
        facts,
        index_age: record.index_age_milliseconds,
        candidates,
        filtered,
        chosen: choice.chosen,
        runner_up: choice.runner_up,
        outcome: choice.outcome,
        reason: choice.reason,
        explanation,
    };
    Ok((decision, positions, names))
}

/// Where a record and the decision made again from it differ; empty when they are the same, bit for bit.
pub fn differences(record: &DecisionRecord, decision: &Decision) -> Vec<ReplayDifference> {
    let mut found = Vec::new();
    let mut differ = |field: String, recorded: String, replayed: String| {
        if recorded != replayed {
            found.push(ReplayDifference {
                field,
                recorded,
                replayed,
            });
        }
    };
    let text = |value: f64| format!("{value:?} ({:016x})", value.to_bits());
    differ(
        "chosen".into(),
        format!("{:?}", record.chosen),
        format!("{:?}", decision.chosen),
    );
    differ(
        "runnerUp".into(),
        format!("{:?}", record.runner_up),
        format!("{:?}", decision.runner_up),
    );
    differ(
        "reason".into(),
        record.reason.word(),
        decision.reason.word(),
    );
    differ(
        "explanation".into(),
        record.explanation.clone(),
        decision.explanation.clone(),
    );
    differ(
        "candidates".into(),
        record.candidates.len().to_string(),
        decision.candidates.len().to_string(),
    );
    for (index, (recorded, replayed)) in record
        .candidates
        .iter()
        .zip(&decision.candidates)
        .enumerate()
    {
        let numbers = [
            ("mean", recorded.mean, replayed.mean),
            ("upper", recorded.upper, replayed.upper),
            ("cost", recorded.cost, replayed.cost),
        ];
        for (name, before, after) in numbers {
            differ(
                format!("candidates[{index}].{name}"),
                text(before),
                text(after),
            );
        }
        for ((name, before), (_, after)) in recorded
            .terms
            .named()
            .into_iter()
            .zip(replayed.terms.named())
        {
            differ(
                format!("candidates[{index}].terms.{name}"),
                text(before),
                text(after),
            );
        }
    }
    found
}

/// A request that another policy would have sent elsewhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WhatIf {
    pub run: RunId,
    pub before: WhatIfSide,
    pub after: WhatIfSide,
}

/// One side of it. Costs are by the other policy's weights on both sides, so that they compare.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WhatIfSide {
    /// `p0 → d1`, `d1`, or `none`.
    pub plan: String,
    pub reason: Reason,
    /// Estimated time to the first token, milliseconds.
    pub mean: Option<f64>,
    pub cost: Option<f64>,
}

/// What a policy lets through of a record's candidates.
struct Filter<'a> {
    record: &'a DecisionRecord,
    policy: &'a Policy,
    /// Pairs beyond the farthest level are dropped.
    only_near: bool,
}

impl<'a> Filter<'a> {
    fn new(record: &'a DecisionRecord, policy: &'a Policy) -> Self {
        let mut filter = Self {
            record,
            policy,
            only_near: false,
        };
        let near = |candidate: &RecordedCandidate| {
            candidate.kind == Kind::Remote
                && filter.has_pools(candidate)
                && !filter.is_too_far(candidate)
        };
        let required = policy.topology.enforcement == Enforcement::Required;
        filter.only_near = required || record.candidates.iter().any(near);
        filter
    }

    fn allows(&self, candidate: &RecordedCandidate) -> bool {
        let far = self.only_near && candidate.kind == Kind::Remote && self.is_too_far(candidate);
        self.has_pools(candidate) && !far
    }

    fn has_pools(&self, candidate: &RecordedCandidate) -> bool {
        let named = |pools: &[String], worker: &WorkerId| {
            let pool = self.record.pools.get(worker);
            pool.is_none_or(|pool| pools.contains(pool))
        };
        let policy = self.policy;
        match &candidate.prefill {
            Some(prefill) => {
                named(&policy.prefill_pools, prefill)
                    && named(&policy.decode_pools, &candidate.decode)
            }
            // Whether a prefill worker may take it all is a matter of pooling.
            None => {
                named(&policy.decode_pools, &candidate.decode)
                    || named(&policy.prefill_pools, &candidate.decode)
            }
        }
    }

    fn is_too_far(&self, candidate: &RecordedCandidate) -> bool {
        let topology = &self.policy.topology;
        let Some(farthest) = &topology.farthest_level else {
            return false;
        };
        if topology.enforcement == Enforcement::Ignored || self.record.pools.is_empty() {
            return false;
        }
        let levels = &self.record.levels;
        let at = |name: &String| levels.iter().position(|level| level == name);
        // Beyond all levels, as the search has it; a limit that the fleet does not know is nearer than all.
        let level = candidate.inputs.level.as_ref().and_then(at);
        let level = level.unwrap_or(levels.len());
        at(farthest).is_none_or(|farthest| level > farthest)
    }
}

/// Which requests another policy would have sent elsewhere, and at what estimated cost.
///
/// Only recorded candidates can be taken: what the first policy filtered out (other pools, farther levels, open links), or cut
/// beyond 64, is not there to be chosen. What this policy filters out is not chosen either; a record of a release that did not
/// write down pools and levels is taken as it is. `Ok(None)`: it would do the same.
pub fn what_if(
    record: &DecisionRecord,
    coefficients: &CoefficientSet,
    policy: &Policy,
) -> Result<Option<WhatIf>, ReplayError> {
    let asked = record.mode_asked.as_deref().and_then(Mode::from_header);
    let mode = match (asked, policy.overrides) {
        (Some(asked), Overrides::Allowed) => asked,
        _ => policy.mode,
    };
    let filter = Filter::new(record, policy);
    let allowed = |candidate: &RecordedCandidate| filter.allows(candidate);
    let (decision, positions, names) = decide(record, coefficients, policy, mode, allowed)?;
    let after = decision.chosen.map(|index| positions[index]);
    if after == record.chosen {
        return Ok(None);
    }
    let before = record
        .chosen
        .and_then(|index| positions.iter().position(|&position| position == index))
        .map(|index| &decision.candidates[index]);
    let plan_before = record.chosen().map_or_else(
        || "none".to_owned(),
        |candidate| match &candidate.prefill {
            Some(prefill) => format!("{prefill} → {}", candidate.decode),
            None => candidate.decode.to_string(),
        },
    );
    Ok(Some(WhatIf {
        run: record.run.clone(),
        before: WhatIfSide {
            plan: plan_before,
            reason: record.reason,
            mean: before.map(|candidate| candidate.mean),
            cost: before.map(|candidate| candidate.cost),
        },
        after: WhatIfSide {
            plan: decision
                .chosen()
                .map_or_else(|| "none".to_owned(), |one| choose::name(&one.plan, &names)),
            reason: decision.reason,
            mean: decision.chosen().map(|candidate| candidate.mean),
            cost: decision.chosen().map(|candidate| candidate.cost),
        },
    }))
}

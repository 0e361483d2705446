//! The cheapest pairs without trying all: branch and bound over groups of workers that are alike to a link.
//!
//! A pair's cost is its prefill worker's part, its decode worker's part and the link's part; overlap of moving with computing
//! and the objective terms couple them, but only upwards. So the first two parts, with the least that the third can be, bound a
//! pair from below. Groups (`passages`) share one route; group pairs are visited by their bound, members by theirs, and each loop
//! ends at the first bound above what is already kept.

mod passages;

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::evaluate::{Rules, combine};
use super::gather::{ComputeSide, DecodeSide, Gathered, count};
use super::inputs::{Inputs, LinkInputs};
use super::{Candidate, Filter, Plan, RECORD_ALL, RECORD_BEST};
use crate::fleet::{Fleet, Route, WorkerIndex};
use crate::lease;
use crate::policy::{Mode, Policy};
use passages::{Passage, Passages};

/// Sums in another order may differ in the last bits: a bound has to be above by more than that to end a loop.
fn beyond(bound: f64, limit: f64) -> bool {
    bound > limit + 1e-9 * limit.abs() + 1e-9
}

/// All local candidates, and the remote ones: all of them if they can all be recorded, else the best, in fleet order.
pub(super) fn candidates(
    fleet: &Fleet,
    policy: &Policy,
    rules: &Rules,
    gathered: &mut Gathered,
) -> Vec<Candidate> {
    let mut found: Vec<Candidate> = gathered
        .locals
        .iter()
        .map(|(compute, decode)| {
            let evaluated = combine(
                &compute.cost,
                &decode.cost,
                None,
                &gathered.facts,
                rules,
                &fleet.coefficients.paths,
            );
            candidate(
                Plan::Local {
                    worker: compute.worker,
                },
                Inputs {
                    compute: compute.inputs,
                    decode: decode.inputs,
                    link: None,
                },
                evaluated,
            )
        })
        .collect();
    // Workers that can do one half only answer a request for one token as well, as a pair.
    if gathered.facts.whole || (gathered.facts.one_token() && !found.is_empty()) {
        return found;
    }
    let preference = fleet.links.preference(&policy.transports);
    let passages = Passages::new(fleet, policy, rules, gathered, &preference);
    let (pairs, filtered) = (passages.pairs, passages.filtered.clone());
    let search = Search {
        fleet,
        rules,
        gathered,
        preference,
        passages,
        late: RefCell::default(),
    };
    let locals = found.len();
    let remote = if locals as u64 + pairs <= RECORD_ALL as u64 {
        search.every()
    } else {
        let mut best = search.best();
        // The baselines take the decode worker first: its pairs are looked at, whatever they cost.
        if let Some(worker) = picked_first(policy.mode, &found) {
            let of_picked = search.best_for(worker);
            best.extend(
                of_picked
                    .into_iter()
                    .filter(|one| best.iter().all(|other| other.plan != one.plan))
                    .collect::<Vec<_>>(),
            );
        }
        best
    };
    found.extend(remote);
    found[locals..].sort_by_key(|candidate| candidate.plan);
    let evaluated = (found.len() - locals) as u64;
    let late = search.late.into_inner().len() as u64;
    for (why, by) in filtered {
        count(&mut gathered.filtered, why, by);
    }
    count(&mut gathered.filtered, Filter::LeaseTooShort, late);
    count(
        &mut gathered.filtered,
        Filter::ProvedWorse,
        pairs.saturating_sub(evaluated + late),
    );
    found
}

/// The decode worker that a baseline picks before it asks whether to go remote.
fn picked_first(mode: Mode, locals: &[Candidate]) -> Option<WorkerIndex> {
    match mode {
        Mode::Threshold { .. } | Mode::DynamoIslBounding { .. } | Mode::DynamoIslOrLoad { .. } => {
            super::choose::picked_first(locals).map(|index| locals[index].plan.decode())
        }
        Mode::Conditional | Mode::Aggregated | Mode::Disaggregated => None,
    }
}

fn candidate(plan: Plan, inputs: Inputs, evaluated: super::evaluate::Evaluated) -> Candidate {
    Candidate {
        plan,
        inputs,
        terms: evaluated.terms,
        mean: evaluated.mean,
        upper: evaluated.upper,
        cost: evaluated.cost,
    }
}

struct Search<'a> {
    fleet: &'a Fleet,
    rules: &'a Rules,
    gathered: &'a Gathered,
    preference: Vec<u32>,
    passages: Passages,
    /// Pairs that were met and whose KV would be fetched too late.
    late: RefCell<BTreeSet<Plan>>,
}

impl Search<'_> {
    fn every(&self) -> Vec<Candidate> {
        let mut found = Vec::new();
        for passage in &self.passages.open {
            for &prefill in &self.passages.prefills[passage.prefill].members {
                for &decode in &self.passages.decodes[passage.decode].members {
                    found.extend(self.evaluate(passage, prefill, decode));
                }
            }
        }
        found
    }

    /// The [`RECORD_BEST`] best pairs.
    fn best(&self) -> Vec<Candidate> {
        let passages = &self.passages.open;
        let mut kept: Vec<Candidate> = Vec::with_capacity(RECORD_BEST + 1);
        let bounds: Vec<f64> = passages
            .iter()
            .map(|passage| self.passages.least(passage))
            .collect();
        let by_bound = |&left: &usize, &right: &usize| bounds[left].total_cmp(&bounds[right]);
        // The most promising passage sets a limit that most others do not pass: only those that do are put in order.
        let Some(first) = (0..passages.len()).min_by(by_bound) else {
            return kept;
        };
        self.search(&passages[first], &mut kept);
        let mut order: Vec<usize> = (0..passages.len())
            .filter(|&index| index != first && !beyond(bounds[index], limit(&kept)))
            .collect();
        order.sort_unstable_by(by_bound);
        for index in order {
            if beyond(bounds[index], limit(&kept)) {
                break;
            }
            self.search(&passages[index], &mut kept);
        }
        kept
    }

    /// Looks through one passage for pairs that are not beyond the best so far.
    fn search(&self, passage: &Passage, kept: &mut Vec<Candidate>) {
        let decodes = &self.passages.decodes[passage.decode];
        for &prefill in &self.passages.prefills[passage.prefill].members {
            let part = self.gathered.prefills[prefill].cost.bound + passage.least;
            if beyond(part + decodes.least, limit(kept)) {
                break;
            }
            for &decode in &decodes.members {
                let bound = part + self.gathered.decodes[decode].cost.bound;
                if beyond(bound, limit(kept)) {
                    break;
                }
                if let Some(found) = self.evaluate(passage, prefill, decode) {
                    keep(kept, found);
                }
            }
        }
    }

    /// The best pair that generates on one worker.
    fn best_for(&self, worker: WorkerIndex) -> Option<Candidate> {
        let mut best: Vec<Candidate> = Vec::new();
        for passage in &self.passages.open {
            for &decode in &self.passages.decodes[passage.decode].members {
                if self.gathered.decodes[decode].worker != worker {
                    continue;
                }
                for &prefill in &self.passages.prefills[passage.prefill].members {
                    if let Some(found) = self.evaluate(passage, prefill, decode) {
                        keep(&mut best, found);
                        best.truncate(1);
                    }
                }
            }
        }
        best.pop()
    }

    fn evaluate(&self, passage: &Passage, prefill: usize, decode: usize) -> Option<Candidate> {
        let compute = &self.gathered.prefills[prefill];
        let target = &self.gathered.decodes[decode];
        if compute.worker == target.worker {
            return None;
        }
        let plan = Plan::Remote {
            prefill: compute.worker,
            decode: target.worker,
        };
        // The lease begins when the prompt is computed; by then a part of the wait is over.
        let computed = compute.cost.queue + compute.cost.prompt.wall;
        let wait = (target.cost.wait - computed).max(0.0);
        if self.fleet.workers.lease[compute.worker]
            .is_some_and(|length| !lease::outlasts(length, wait))
        {
            self.late.borrow_mut().insert(plan);
            return None;
        }
        let route = self.route(passage, compute.worker, target.worker)?;
        let link = self.link_inputs(&route, compute, target);
        let coefficients = &self.fleet.coefficients.links[route.link as usize].coefficients;
        let evaluated = combine(
            &compute.cost,
            &target.cost,
            Some((&link, coefficients, passage.penalty)),
            &self.gathered.facts,
            self.rules,
            &self.fleet.coefficients.paths,
        );
        let inputs = Inputs {
            compute: compute.inputs,
            decode: target.inputs,
            link: Some(link),
        };
        Some(candidate(plan, inputs, evaluated))
    }

    /// A passage's route, with what is known of the two domains by themselves.
    fn route(&self, passage: &Passage, prefill: WorkerIndex, decode: WorkerIndex) -> Option<Route> {
        if !passage.by_pair {
            return Some(passage.route);
        }
        let workers = &self.fleet.workers;
        let end = |worker: WorkerIndex| (workers.domain[worker], workers.transports[worker]);
        // It was seen to be open for all of them.
        let links = &self.fleet.links;
        links
            .route(end(prefill), end(decode), &self.preference)
            .ok()
    }

    fn link_inputs(&self, route: &Route, compute: &ComputeSide, target: &DecodeSide) -> LinkInputs {
        let workers = &self.fleet.workers;
        let block_size = workers.block_size[compute.worker];
        let there = target.inputs.cached_tokens / block_size;
        let missing_blocks = self
            .gathered
            .facts
            .tokens
            .div_ceil(block_size)
            .saturating_sub(there);
        // A peer's numbers: what does not fit says no more than that it is much.
        let bytes_per_block =
            workers.bytes_per_token[compute.worker].saturating_mul(u64::from(block_size));
        LinkInputs {
            level: route.level as u32,
            link: route.link,
            transport: route.transport,
            missing_bytes: bytes_per_block.saturating_mul(u64::from(missing_blocks)),
            missing_blocks,
            promised_bytes: route.promised_bytes,
            block_size,
            bytes_per_block,
        }
    }
}

/// What a pair has to stay below to be recorded.
fn limit(kept: &[Candidate]) -> f64 {
    kept.get(RECORD_BEST - 1)
        .map_or(f64::INFINITY, |one| one.cost)
}

/// Inserts by (cost, plan), so that ties go to the first in fleet order, and drops what would not be recorded.
fn keep(kept: &mut Vec<Candidate>, found: Candidate) {
    let position = kept.partition_point(|other| {
        other
            .cost
            .total_cmp(&found.cost)
            .then(other.plan.cmp(&found.plan))
            .is_lt()
    });
    kept.insert(position, found);
    kept.truncate(RECORD_BEST);
}

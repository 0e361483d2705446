//! The cheapest pairs without trying all: branch and bound over groups of workers that are alike to a link.
//!
//! A pair's cost is its prefill worker's part, its decode worker's part and the link's part; overlap of moving with computing
//! and the objective terms couple them, but only upwards. So the first two parts, with the least that the third can be, bound a
//! pair from below. Groups (same domain, compatibility and transports) share one route; group pairs are visited by their bound,
//! members by theirs, and each loop ends at the first bound above what is already kept.

use std::collections::HashMap;

use super::evaluate::{Rules, combine, penalty};
use super::gather::{ComputeSide, DecodeSide, Gathered, count};
use super::inputs::{Inputs, LinkInputs};
use super::{Candidate, Filter, Filtered, Plan, RECORD_ALL, RECORD_BEST};
use crate::fleet::{Fleet, NoRoute, Route, WorkerIndex};
use crate::policy::{Enforcement, Mode, Policy};

/// Workers that are alike to a link, by bound.
struct Group {
    key: GroupKey,
    members: Vec<usize>,
    least: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct GroupKey {
    domain: u32,
    compatibility: u32,
    transports: u32,
}

/// Two groups between which KV may move.
struct Passage {
    prefill: usize,
    decode: usize,
    route: Route,
    penalty: f64,
    /// The least that the link's part can be.
    least: f64,
}

/// What a level means to a policy.
struct LevelRule {
    penalty: f64,
    too_far: bool,
}

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
    if gathered.facts.stays_whole() {
        return found;
    }
    let prefills = gathered.prefills.iter();
    let decodes = gathered.decodes.iter();
    let search = Search {
        fleet,
        rules,
        gathered,
        prefills: groups(fleet, prefills.map(|side| (side.worker, side.cost.bound))),
        decodes: groups(fleet, decodes.map(|side| (side.worker, side.cost.bound))),
        overlap: overlap(gathered),
    };
    let (passages, pairs, filtered) = search.passages(policy);
    let locals = found.len();
    let remote = if locals as u64 + pairs <= RECORD_ALL as u64 {
        search.every(&passages)
    } else {
        // At a temperature all that could be recorded are drawn from; else the best and the next best are enough.
        let exact = if rules.temperature > 0.0 {
            RECORD_BEST
        } else {
            2
        };
        let mut best = search.best(&passages, exact);
        // The baselines take the decode worker first: its pairs are looked at, whatever they cost.
        if let Some(worker) = picked_first(policy.mode, &found) {
            let of_picked = search.best_for(&passages, worker);
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
    for (why, by) in filtered {
        count(&mut gathered.filtered, why, by);
    }
    count(
        &mut gathered.filtered,
        Filter::ProvedWorse,
        pairs.saturating_sub(evaluated),
    );
    found
}

fn overlap(gathered: &Gathered) -> bool {
    // Both are in fleet order.
    let mut decodes = gathered.decodes.iter().map(|side| side.worker).peekable();
    gathered.prefills.iter().any(|side| {
        while decodes.next_if(|&worker| worker < side.worker).is_some() {}
        decodes.peek() == Some(&side.worker)
    })
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

fn groups(fleet: &Fleet, sides: impl Iterator<Item = (WorkerIndex, f64)>) -> Vec<Group> {
    let mut positions: HashMap<GroupKey, usize> = HashMap::new();
    let mut groups: Vec<Group> = Vec::new();
    let mut bounds = Vec::new();
    for (member, (worker, bound)) in sides.enumerate() {
        let key = GroupKey {
            domain: fleet.workers.domain[worker],
            compatibility: fleet.workers.compatibility[worker],
            transports: fleet.workers.transports[worker],
        };
        let group = *positions.entry(key).or_insert_with(|| {
            groups.push(Group {
                key,
                members: Vec::new(),
                least: f64::INFINITY,
            });
            groups.len() - 1
        });
        groups[group].members.push(member);
        groups[group].least = groups[group].least.min(bound);
        bounds.push(bound);
    }
    for group in &mut groups {
        group
            .members
            .sort_by(|&left, &right| bounds[left].total_cmp(&bounds[right]));
    }
    groups
}

struct Search<'a> {
    fleet: &'a Fleet,
    rules: &'a Rules,
    gathered: &'a Gathered,
    prefills: Vec<Group>,
    decodes: Vec<Group>,
    /// Some worker may be either side.
    overlap: bool,
}

impl Search<'_> {
    /// Group pairs that may be used, how many pairs of workers they hold, and the others counted by reason.
    fn passages(&self, policy: &Policy) -> (Vec<Passage>, u64, Filtered) {
        let preference = self.fleet.links.preference(&policy.transports);
        let levels = self.levels(policy);
        let mut filtered = Filtered::new();
        let (mut near, mut far) = (Vec::new(), Vec::new());
        let (mut near_pairs, mut far_pairs) = (0, 0);
        for (prefill, source) in self.prefills.iter().enumerate() {
            let compatible = &self.fleet.compatible[source.key.compatibility as usize];
            for (decode, target) in self.decodes.iter().enumerate() {
                let pairs = self.pairs(source, target);
                if pairs == 0 {
                    continue;
                }
                if !compatible[target.key.compatibility as usize] {
                    count(&mut filtered, Filter::Incompatible, pairs);
                    continue;
                }
                let route = self.fleet.links.route(
                    (source.key.domain, source.key.transports),
                    (target.key.domain, target.key.transports),
                    &preference,
                );
                let route = match route {
                    Ok(route) => route,
                    Err(NoRoute::Missing) => {
                        count(&mut filtered, Filter::NoTransport, pairs);
                        continue;
                    }
                    Err(NoRoute::BreakerOpen) => {
                        count(&mut filtered, Filter::BreakerOpen, pairs);
                        continue;
                    }
                };
                let link = &self.fleet.coefficients.links[route.link as usize].coefficients;
                let level = &levels[route.level];
                let alone = self.rules.weights.wt * (link.alpha + link.synchronization);
                let passage = Passage {
                    prefill,
                    decode,
                    route,
                    penalty: level.penalty,
                    least: alone + level.penalty,
                };
                if level.too_far {
                    far.push(passage);
                    far_pairs += pairs;
                } else {
                    near.push(passage);
                    near_pairs += pairs;
                }
            }
        }
        let required = policy.topology.enforcement == Enforcement::Required;
        if near_pairs > 0 || required {
            count(&mut filtered, Filter::TooFar, far_pairs);
            (near, near_pairs, filtered)
        } else {
            (far, far_pairs, filtered)
        }
    }

    /// What each level means to the policy; the last is that of pairs that share none.
    fn levels(&self, policy: &Policy) -> Vec<LevelRule> {
        let limit = policy.topology.farthest_level.as_ref();
        let limited = policy.topology.enforcement != Enforcement::Ignored;
        let farthest = limit.and_then(|name| self.fleet.levels.iter().position(|one| one == name));
        (0..=self.fleet.levels.len())
            .map(|level| LevelRule {
                penalty: penalty(policy, self.fleet.level_name(level)),
                // A level that the fleet does not know is nearer than all: a misspelt limit must not lift it.
                too_far: limited
                    && limit.is_some()
                    && farthest.is_none_or(|farthest| level > farthest),
            })
            .collect()
    }

    /// Pairs of two different workers.
    fn pairs(&self, source: &Group, target: &Group) -> u64 {
        let mut pairs = (source.members.len() * target.members.len()) as u64;
        if !self.overlap {
            return pairs;
        }
        for &member in &source.members {
            let worker = self.gathered.prefills[member].worker;
            let same = |&other: &usize| self.gathered.decodes[other].worker == worker;
            pairs -= target.members.iter().filter(|&other| same(other)).count() as u64;
        }
        pairs
    }

    fn least(&self, passage: &Passage) -> f64 {
        self.prefills[passage.prefill].least + self.decodes[passage.decode].least + passage.least
    }

    fn every(&self, passages: &[Passage]) -> Vec<Candidate> {
        let mut found = Vec::new();
        for passage in passages {
            for &prefill in &self.prefills[passage.prefill].members {
                for &decode in &self.decodes[passage.decode].members {
                    found.extend(self.evaluate(passage, prefill, decode));
                }
            }
        }
        found
    }

    /// The best pairs, `exact` of them for certain, with what else was evaluated on the way; [`RECORD_BEST`] at most.
    fn best(&self, passages: &[Passage], exact: usize) -> Vec<Candidate> {
        let mut kept: Vec<Candidate> = Vec::new();
        let bounds: Vec<f64> = passages.iter().map(|passage| self.least(passage)).collect();
        let by_bound = |&left: &usize, &right: &usize| bounds[left].total_cmp(&bounds[right]);
        // The most promising passage sets a limit that most others do not pass: only those that do are put in order.
        let Some(first) = (0..passages.len()).min_by(by_bound) else {
            return kept;
        };
        self.search(&passages[first], exact, &mut kept);
        let mut order: Vec<usize> = (0..passages.len())
            .filter(|&index| index != first && !beyond(bounds[index], limit(&kept, exact)))
            .collect();
        order.sort_unstable_by(by_bound);
        for index in order {
            if beyond(bounds[index], limit(&kept, exact)) {
                break;
            }
            self.search(&passages[index], exact, &mut kept);
        }
        kept
    }

    /// Looks through one passage for pairs that are not beyond the `exact` best so far.
    fn search(&self, passage: &Passage, exact: usize, kept: &mut Vec<Candidate>) {
        let decodes = &self.decodes[passage.decode];
        for &prefill in &self.prefills[passage.prefill].members {
            let part = self.gathered.prefills[prefill].cost.bound + passage.least;
            if beyond(part + decodes.least, limit(kept, exact)) {
                break;
            }
            for &decode in &decodes.members {
                let bound = part + self.gathered.decodes[decode].cost.bound;
                if beyond(bound, limit(kept, exact)) {
                    break;
                }
                if let Some(found) = self.evaluate(passage, prefill, decode) {
                    keep(kept, found);
                }
            }
        }
    }

    /// The best pair that generates on one worker.
    fn best_for(&self, passages: &[Passage], worker: WorkerIndex) -> Option<Candidate> {
        let mut best: Vec<Candidate> = Vec::new();
        for passage in passages {
            for &decode in &self.decodes[passage.decode].members {
                if self.gathered.decodes[decode].worker != worker {
                    continue;
                }
                for &prefill in &self.prefills[passage.prefill].members {
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
        let link = self.link_inputs(&passage.route, compute, target);
        let coefficients = &self.fleet.coefficients.links[passage.route.link as usize].coefficients;
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
        let plan = Plan::Remote {
            prefill: compute.worker,
            decode: target.worker,
        };
        Some(candidate(plan, inputs, evaluated))
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
        let bytes_per_block = workers.bytes_per_token[compute.worker] * u64::from(block_size);
        LinkInputs {
            level: route.level as u32,
            link: route.link,
            transport: route.transport,
            missing_bytes: bytes_per_block * u64::from(missing_blocks),
            missing_blocks,
            promised_bytes: route.promised_bytes,
            block_size,
            bytes_per_block,
        }
    }
}

/// What a pair has to stay below to be among the `exact` best.
fn limit(kept: &[Candidate], exact: usize) -> f64 {
    kept.get(exact - 1).map_or(f64::INFINITY, |one| one.cost)
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

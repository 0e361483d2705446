//! Who may take a request: workers filtered by what they can, hold and have left, and what is known of the rest.

use baton_protocol::card;

use super::evaluate::{Computing, Decoding, Rules, computing, decoding};
use super::inputs::{ComputeInputs, DecodeInputs};
use super::request::{Facts, Request};
use super::{Filter, Filtered, SAMPLE_FROM_ROUTERS};
use crate::fleet::{Fleet, WorkerIndex, WorkerLoad, WorkerState};
use crate::policy::{Assurance, CacheSource, Policy, Pooling};
use crate::rng::{Purpose, Rng};

/// A worker that may compute a prompt, with its part of the cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct ComputeSide {
    pub(super) worker: WorkerIndex,
    pub(super) inputs: ComputeInputs,
    pub(super) cost: Computing,
}

/// A worker that may generate, with its part of the cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct DecodeSide {
    pub(super) worker: WorkerIndex,
    pub(super) inputs: DecodeInputs,
    pub(super) cost: Decoding,
}

/// Everything that the search needs.
#[derive(Debug)]
pub(super) struct Gathered {
    pub(super) facts: Facts,
    pub(super) filtered: Filtered,
    pub(super) index_age: f64,
    pub(super) locals: Vec<(ComputeSide, DecodeSide)>,
    pub(super) prefills: Vec<ComputeSide>,
    pub(super) decodes: Vec<DecodeSide>,
}

/// What a worker's pool is to the policy.
#[derive(Clone, Copy)]
struct Role {
    prefill: bool,
    decode: bool,
}

struct Gatherer<'a> {
    fleet: &'a Fleet,
    request: &'a Request,
    policy: &'a Policy,
    rules: &'a Rules,
    now: f64,
    facts: Facts,
}

pub(super) fn gather(
    fleet: &Fleet,
    request: &Request,
    policy: &Policy,
    rules: &Rules,
    now: f64,
    seed: u64,
) -> Gathered {
    let facts = Facts {
        tokens: request.tokens,
        max_output_tokens: request.max_output_tokens,
        expected_output_tokens: finite(request.expected_output_tokens)
            .min(f64::from(request.max_output_tokens))
            .max(1.0),
        local_without_prefill: request.local_without_prefill,
        waited_milliseconds: finite(request.waited_milliseconds),
        local_workers: 0,
        prefill_pools: !policy.prefill_pools.is_empty(),
        whole: request.whole,
        too_large: false,
    };
    let gatherer = Gatherer {
        fleet,
        request,
        policy,
        rules,
        now,
        facts,
    };
    let mut gathered = Gathered {
        facts,
        filtered: Filtered::new(),
        index_age: 0.0,
        locals: Vec::new(),
        prefills: Vec::new(),
        decodes: Vec::new(),
    };
    let pools = fleet.workers.pools.iter();
    let roles: Vec<Role> = pools
        .zip(&fleet.workers.pool_roles)
        .map(|(pool, kind)| Role {
            prefill: *kind != Some(card::Role::Decode) && policy.prefill_pools.contains(pool),
            decode: *kind != Some(card::Role::Prefill) && policy.decode_pools.contains(pool),
        })
        .collect();
    let mut eligible: Vec<(WorkerIndex, Role)> = Vec::with_capacity(fleet.len());
    let (mut computing, mut generating) = (Hold::default(), Hold::default());
    for worker in 0..fleet.len() {
        let role = roles[fleet.workers.pool[worker] as usize];
        if !role.prefill && !role.decode {
            continue;
        }
        let workers = &fleet.workers;
        if workers.can_prefill[worker] {
            computing.meet(gatherer.ever_holds(worker, 0));
        }
        if workers.can_decode[worker] && (role.decode || policy.pooling == Pooling::Pooled) {
            generating.meet(gatherer.ever_holds(worker, 1));
        }
        match gatherer.refuses(worker) {
            Some(why) => count(&mut gathered.filtered, why, 1),
            None => eligible.push((worker, role)),
        }
    }
    gathered.facts.too_large = computing.nobody() || generating.nobody();
    if fleet.routers >= SAMPLE_FROM_ROUTERS {
        let before = eligible.len();
        eligible = gatherer.sample(&eligible, seed);
        count(
            &mut gathered.filtered,
            Filter::NotSampled,
            (before - eligible.len()) as u64,
        );
    }
    for (worker, role) in eligible {
        gatherer.add(worker, role, &mut gathered);
    }
    gathered
}

/// Whether the KV of anybody who does one half of the work could hold the request, whatever their state.
#[derive(Clone, Copy, Default)]
struct Hold {
    some: bool,
    holds: bool,
}

impl Hold {
    fn meet(&mut self, holds: bool) {
        self.some = true;
        self.holds |= holds;
    }

    /// Workers are there, and none of them could.
    fn nobody(self) -> bool {
        self.some && !self.holds
    }
}

pub(super) fn count(filtered: &mut Filtered, why: Filter, by: u64) {
    if by > 0 {
        *filtered.entry(why).or_default() += by;
    }
}

/// What a peer sent is not trusted to be a number: a record could not hold anything else.
fn finite(value: f64) -> f64 {
    if value.is_finite() {
        value.max(0.0)
    } else {
        0.0
    }
}

impl Gatherer<'_> {
    /// Why a worker takes nothing at all now.
    fn refuses(&self, worker: WorkerIndex) -> Option<Filter> {
        let workers = &self.fleet.workers;
        let load = &self.fleet.loads[worker];
        match load.state {
            WorkerState::Ready => {}
            WorkerState::Draining => return Some(Filter::Draining),
            WorkerState::Lost => return Some(Filter::Lost),
        }
        if self.request.exclude.contains(&workers.id[worker]) {
            return Some(Filter::Excluded);
        }
        if let Some(adapter) = &self.request.adapter
            && !workers.adapters[worker].contains(adapter)
        {
            return Some(Filter::Adapter);
        }
        let reported = load.reported.queued_sequences;
        let waiting = reported.saturating_add(load.own.queued_sequences);
        (waiting >= self.policy.admission.max_queued_per_worker).then_some(Filter::QueueFull)
    }

    /// Per pool the worker with the longest prefix and two others by chance: routers that see only their own dispatches would
    /// otherwise all run after the same worker.
    fn sample(&self, eligible: &[(WorkerIndex, Role)], seed: u64) -> Vec<(WorkerIndex, Role)> {
        let mut rng = Rng::stream(seed, Purpose::SampleWorkers);
        let mut kept = Vec::new();
        for pool in 0..self.fleet.workers.pools.len() {
            let mut members: Vec<(WorkerIndex, Role)> = eligible
                .iter()
                .copied()
                .filter(|&(worker, _)| self.fleet.workers.pool[worker] as usize == pool)
                .collect();
            let longest = members.iter().map(|&(worker, _)| self.cached(worker)).max();
            for taken in 0..3.min(members.len()) {
                let next = if taken == 0 {
                    // Any of those with the longest prefix: often nobody has any of it, and then all do.
                    let holders: Vec<usize> = (0..members.len())
                        .filter(|&position| Some(self.cached(members[position].0)) == longest)
                        .collect();
                    holders[rng.below(holders.len())]
                } else {
                    rng.below(members.len())
                };
                kept.push(members.swap_remove(next));
            }
        }
        kept.sort_by_key(|&(worker, _)| worker);
        kept
    }

    fn add(&self, worker: WorkerIndex, role: Role, gathered: &mut Gathered) {
        let workers = &self.fleet.workers;
        let age = finite(self.now - self.fleet.loads[worker].indexed_at);
        gathered.index_age = gathered.index_age.max(age);
        let (can_prefill, can_decode) = (workers.can_prefill[worker], workers.can_decode[worker]);
        let pooled = !role.decode;
        let mut decode_side = None;
        if role.decode || self.policy.pooling == Pooling::Pooled {
            if can_decode {
                match self.decode_side(worker) {
                    Ok(side) => decode_side = Some(side),
                    Err(why) => count(&mut gathered.filtered, why, 1),
                }
            } else if role.decode {
                count(&mut gathered.filtered, Filter::CannotDecode, 1);
            }
        }
        // Its part of the cost is the same in both roles.
        let mut compute_side = None;
        if let Some(decode) = decode_side {
            if can_prefill {
                let compute = self.compute_side(worker, pooled);
                compute_side = Some(compute);
                gathered.locals.push((compute, decode));
                gathered.facts.local_workers += u32::from(!pooled);
            }
            if role.decode {
                gathered.decodes.push(decode);
            }
        }
        if role.prefill {
            if !can_prefill {
                count(&mut gathered.filtered, Filter::CannotPrefill, 1);
            } else if self.policy.verify.require == Assurance::Verified
                && workers.hands_over[worker] != Assurance::Verified
            {
                count(&mut gathered.filtered, Filter::NotVerified, 1);
            } else if let Some(why) = self.lacks_room(worker) {
                count(&mut gathered.filtered, why, 1);
            } else {
                let mut side = compute_side.unwrap_or_else(|| self.compute_side(worker, false));
                side.inputs.pooled = false;
                gathered.prefills.push(side);
            }
        }
    }

    /// Leading tokens of the prompt that are there; at least one is left to compute.
    fn cached(&self, worker: WorkerIndex) -> u32 {
        let workers = &self.fleet.workers;
        let cache = &self.policy.cache;
        if cache.source == CacheSource::None
            || self.now - self.fleet.loads[worker].indexed_at > cache.stale_after_milliseconds
        {
            return 0;
        }
        let blocks = self.request.hits.depth(workers.slot[worker]);
        let block_size = workers.block_size[worker];
        // The last token is computed wherever the prompt is, and with it its block: engines hit whole blocks only.
        let usable = self.request.tokens.saturating_sub(1) / block_size;
        blocks.min(usable).saturating_mul(block_size)
    }

    fn blocks_free(&self, worker: WorkerIndex) -> u32 {
        let load = &self.fleet.loads[worker];
        load.reported.free_blocks.saturating_sub(load.own.blocks)
    }

    /// Blocks for the prompt and so many tokens more.
    fn blocks(&self, worker: WorkerIndex, more: u32) -> u32 {
        let tokens = self.request.tokens.saturating_add(more);
        tokens.div_ceil(self.fleet.workers.block_size[worker])
    }

    /// Whether its whole KV holds the prompt and so many tokens more.
    fn ever_holds(&self, worker: WorkerIndex, more: u32) -> bool {
        self.blocks(worker, more) <= self.fleet.loads[worker].total_blocks
    }

    /// Why it cannot compute the prompt for another worker: it never can, or not now.
    fn lacks_room(&self, worker: WorkerIndex) -> Option<Filter> {
        if !self.ever_holds(worker, 0) {
            return Some(Filter::KvCapacity);
        }
        let cached = self.cached(worker) / self.fleet.workers.block_size[worker];
        let needed = self.blocks(worker, 0).saturating_sub(cached);
        (needed > self.blocks_free(worker)).then_some(Filter::KvFull)
    }

    fn compute_side(&self, worker: WorkerIndex, pooled: bool) -> ComputeSide {
        let workers = &self.fleet.workers;
        let WorkerLoad { reported, own, .. } = &self.fleet.loads[worker];
        let inputs = ComputeInputs {
            class: workers.class[worker],
            chunks: workers.chunks[worker],
            cached_tokens: self.cached(worker),
            queued_tokens: reported.queued_tokens,
            queued_sequences: reported.queued_sequences,
            own_tokens: own.queued_tokens,
            own_sequences: own.queued_sequences,
            running_sequences: reported.running_sequences.saturating_add(own.sequences),
            context_tokens: reported.context_tokens.saturating_add(own.context_tokens),
            step_remaining: finite(reported.step_remaining),
            report_age: finite(self.now - reported.at),
            pooled,
        };
        let class = &self.fleet.coefficients.workers[inputs.class as usize].coefficients;
        ComputeSide {
            worker,
            inputs,
            cost: computing(class, &inputs, &self.facts, self.rules),
        }
    }

    fn decode_side(&self, worker: WorkerIndex) -> Result<DecodeSide, Filter> {
        let workers = &self.fleet.workers;
        let load = &self.fleet.loads[worker];
        let WorkerLoad { reported, own, .. } = load;
        if !self.ever_holds(worker, 1) {
            return Err(Filter::KvCapacity);
        }
        let cached_tokens = self.cached(worker);
        // What it will come to. Workers take blocks as a sequence grows, and most end long before their maximum.
        let whole = self.blocks(worker, self.facts.expected_output_tokens.ceil() as u32);
        let inputs = DecodeInputs {
            class: workers.class[worker],
            cached_tokens,
            running_sequences: reported.running_sequences.saturating_add(own.sequences),
            context_tokens: reported.context_tokens.saturating_add(own.context_tokens),
            waiting_sequences: reported.queued_sequences,
            waiting_tokens: reported.queued_tokens,
            max_sequences: workers.max_sequences[worker],
            needed_blocks: whole.saturating_sub(cached_tokens / workers.block_size[worker]),
            free_blocks: self.blocks_free(worker),
            used_blocks: load.total_blocks.saturating_sub(reported.free_blocks),
            report_age: finite(self.now - reported.at),
        };
        let class = &self.fleet.coefficients.workers[inputs.class as usize].coefficients;
        Ok(DecodeSide {
            worker,
            inputs,
            cost: decoding(class, &inputs, &self.facts, self.rules),
        })
    }
}

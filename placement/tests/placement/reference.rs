//! The formula of the design, written a second time and as plainly as possible: every pair is tried.

use baton_placement::cost::ChunkRule;
use baton_placement::fleet::{BreakerState, WorkerEntry, WorkerState};
use baton_placement::place::Request;
use baton_placement::policy::{Enforcement, FirstToken, Policy, Pooling, Preset};

use crate::fleets::World;

pub(crate) const NOW: f64 = 1_000.0;

/// A plan by positions of entries, with its J.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Costed {
    pub(crate) prefill: Option<usize>,
    pub(crate) decode: usize,
    pub(crate) cost: f64,
}

struct Weights {
    wq: f64,
    wt: f64,
    wm: f64,
    lambda: f64,
    wo: f64,
    wd: f64,
    v: f64,
    uq: f64,
}

pub(crate) struct Reference<'a> {
    world: &'a World,
    request: &'a Request,
    policy: &'a Policy,
    weights: Weights,
    osl: f64,
}

fn miss(value: f64, limit: Option<f64>) -> f64 {
    limit.map_or(0.0, |s| 1.0 / (1.0 + (-(value - s) / (0.15 * s)).exp()))
}

impl<'a> Reference<'a> {
    pub(crate) fn new(world: &'a World, request: &'a Request, policy: &'a Policy) -> Self {
        let objective = &policy.objective;
        let has = objective.ttft_milliseconds.is_some()
            || objective.tpot_milliseconds.is_some()
            || objective.end_to_end_milliseconds.is_some();
        let rb = policy.cost.preset == Preset::Latency;
        let weights = Weights {
            wq: if !has || rb { 1.0 } else { 0.6 },
            wt: if !has || rb { 1.0 } else { 0.3 },
            wm: if rb { 1.0 } else { 3.0 },
            lambda: if !has {
                0.5
            } else if rb {
                0.6
            } else {
                1.0
            },
            wo: if rb { 1.0 } else { 0.3 },
            wd: if rb { 1.0 } else { 0.3 },
            v: if !has {
                0.0
            } else if rb {
                4_000.0
            } else {
                8_000.0
            },
            uq: 3.0,
        };
        let osl = request
            .expected_output_tokens
            .min(f64::from(request.max_output_tokens))
            .max(1.0);
        Self {
            world,
            request,
            policy,
            weights,
            osl,
        }
    }

    /// max(10 ms, 10 % or 5 %) of the local cost.
    pub(crate) fn margin(&self, local: f64) -> f64 {
        let share = if self.weights.v > 0.0 { 0.10 } else { 0.05 };
        (share * local).max(10.0)
    }

    fn class(&self, worker: &WorkerEntry) -> baton_placement::coefficients::WorkerCoefficients {
        let found = self
            .world
            .set
            .workers
            .iter()
            .find(|class| class.name == worker.class);
        found.unwrap().coefficients
    }

    fn cached(&self, worker: &WorkerEntry) -> f64 {
        if NOW - worker.indexed_at > self.policy.cache.stale_after_milliseconds {
            return 0.0;
        }
        let depth = f64::from(self.request.hits.depth(worker.slot));
        let block = f64::from(worker.block_size);
        depth.min((f64::from(self.request.tokens - 1) / block).floor()) * block
    }

    /// (wall, extra, first step, tokens of the last chunk) of a prompt.
    fn walk(&self, worker: &WorkerEntry, n: f64, c: f64) -> (f64, f64, f64, f64) {
        let w = self.class(worker);
        let b = f64::from(worker.load.running_sequences + worker.own.sequences);
        let s = (worker.load.context_tokens + worker.own.context_tokens) as f64;
        let (mut wall, mut extra, mut first, mut last, mut done) = (0.0, 0.0, 0.0, 0.0, 0.0);
        while done < n {
            let before = c + done;
            let prefill = |n: f64| {
                w.floor
                    .max(w.a + w.b * n + w.k * (n * before + n * n / 2.0))
            };
            let mut chunk = match worker.chunks {
                ChunkRule::Fixed(tokens) => f64::from(tokens),
                ChunkRule::Bounded if b == 0.0 => 2_048.0,
                ChunkRule::Bounded => match self.policy.objective.tpot_milliseconds {
                    None => 512.0,
                    // By counting: the design's words, not its solution.
                    Some(objective) => {
                        let fits = |n: u32| {
                            prefill(f64::from(n)) + w.d1 * b + w.d2 * s <= objective * 5.0 / 6.0
                        };
                        let mut low = 128;
                        let mut high = 2_049;
                        while low + 1 < high {
                            let middle = (low + high) / 2;
                            if fits(middle) {
                                low = middle;
                            } else {
                                high = middle;
                            }
                        }
                        f64::from(low)
                    }
                },
            };
            chunk = chunk.min(n - done);
            let step = prefill(chunk) + w.d1 * b + w.d2 * s;
            wall += step;
            if b > 0.0 {
                extra += (step - (w.d0 + w.d1 * b + w.d2 * s)).max(0.0);
            }
            if done == 0.0 {
                first = step;
            }
            last = chunk;
            done += chunk;
        }
        (wall, extra, first, last)
    }

    fn backlog(&self, worker: &WorkerEntry, tokens: u64, prompts: u32) -> f64 {
        if tokens == 0 {
            return 0.0;
        }
        let prompts = u64::from(prompts).clamp(1, tokens);
        let each = tokens.div_ceil(prompts) as f64;
        self.walk(worker, each, 0.0).0 * tokens as f64 / each
    }

    fn level(&self, left: &WorkerEntry, right: &WorkerEntry) -> usize {
        for level in 0..2 {
            if left.domain[level].is_some() && left.domain[level] == right.domain[level] {
                return level;
            }
        }
        2
    }

    fn takes(&self, worker: &WorkerEntry) -> bool {
        worker.pool != "other"
            && worker.state == WorkerState::Ready
            && !self.request.exclude.contains(&worker.id)
            && self
                .request
                .adapter
                .as_ref()
                .is_none_or(|name| worker.adapters.contains(name))
            && worker.load.queued_sequences + worker.own.queued_sequences
                < self.policy.admission.max_queued_per_worker
    }

    fn decodes(&self, worker: &WorkerEntry) -> bool {
        let least = (self.request.tokens + 1).div_ceil(worker.block_size);
        self.takes(worker) && worker.can_decode && least <= worker.total_blocks
    }

    /// (link position, promised bytes, level); none where the pair is not allowed. `far` ignores the farthest level.
    fn route(&self, source: usize, target: usize, far: bool) -> Option<(usize, f64, usize)> {
        let (p, d) = (&self.world.entries[source], &self.world.entries[target]);
        if source == target || !self.takes(p) || !p.can_prefill || p.pool != "prefill" {
            return None;
        }
        if !self.decodes(d) || d.pool != "decode" {
            return None;
        }
        let pair = (p.compatibility.clone(), d.compatibility.clone());
        if !self.world.compatible.contains(&pair) {
            return None;
        }
        let cached_blocks = (self.cached(p) / f64::from(p.block_size)).floor() as u32;
        let blocks = self.request.tokens.div_ceil(p.block_size);
        let needed = blocks - cached_blocks;
        if blocks > p.total_blocks || needed > p.load.free_blocks.saturating_sub(p.own.blocks) {
            return None;
        }
        let level = self.level(p, d);
        let farthest = self.policy.topology.farthest_level.as_ref();
        let too_far = farthest.is_some_and(|name| level > usize::from(name == "rack"))
            && self.policy.topology.enforcement != Enforcement::Ignored;
        if too_far && !far {
            return None;
        }
        let order: &[&str] = if self.policy.transports.is_empty() {
            // In the order in which the fleet met them: links were named after workers.
            &["tcp", "rdma"]
        } else {
            &["rdma", "tcp"]
        };
        let domain = |position: usize| &self.world.entries[position].domain;
        for &kind in order {
            if !p.transports.iter().any(|one| one == kind)
                || !d.transports.iter().any(|one| one == kind)
            {
                continue;
            }
            let open = self
                .world
                .breakers
                .iter()
                .rev()
                .find(|(from, to, transport, _)| {
                    domain(*from) == &p.domain && domain(*to) == &d.domain && *transport == kind
                });
            let of_level = self
                .world
                .level_links
                .iter()
                .find(|(at, transport, _)| *at == level && *transport == kind)
                .map(|(_, _, link)| *link);
            let of_pair = self
                .world
                .exact
                .iter()
                .rev()
                .find(|(from, to, transport, _)| {
                    domain(*from) == &p.domain && domain(*to) == &d.domain && *transport == kind
                })
                .map(|(_, _, _, link)| *link);
            if let Some(link) = of_pair.or(of_level) {
                if open.is_some_and(|(_, _, _, state)| *state == BreakerState::Open) {
                    continue;
                }
                let out: u64 = self
                    .world
                    .promises
                    .iter()
                    .filter(|(from, _, _)| domain(*from) == &p.domain)
                    .map(|(_, _, bytes)| bytes)
                    .sum();
                let into: u64 = self
                    .world
                    .promises
                    .iter()
                    .filter(|(_, to, _)| domain(*to) == &d.domain)
                    .map(|(_, _, bytes)| bytes)
                    .sum();
                return Some((link as usize, out.max(into) as f64, level));
            }
        }
        None
    }

    /// Until blocks for the prompt and what it is expected to come to, and a place, are free.
    fn kv_wait(&self, d: &WorkerEntry) -> f64 {
        let c = self.class(d);
        let beside =
            f64::from(d.load.running_sequences + d.own.sequences + d.load.queued_sequences);
        let s_d = (d.load.context_tokens + d.own.context_tokens + d.load.queued_tokens) as f64;
        let context = f64::from(self.request.tokens) + self.osl / 2.0;
        let tpot = c.d0 + c.d1 * (beside + 1.0) + c.d2 * (s_d + context);
        let block = f64::from(d.block_size);
        let whole = ((f64::from(self.request.tokens) + self.osl.ceil()) / block).ceil();
        let missing_blocks = whole
            - (self.cached(d) / block).floor()
            - f64::from(d.load.free_blocks.saturating_sub(d.own.blocks));
        let streams = beside.max(1.0);
        let each = (f64::from(d.total_blocks - d.load.free_blocks) / streams).max(1.0);
        let wait_for = (missing_blocks.max(0.0) / each)
            .ceil()
            .max(beside + 1.0 - f64::from(d.max_sequences));
        wait_for.min(streams).max(0.0) * self.osl * tpot / streams
    }

    /// Until the prompt is computed.
    fn computed(&self, p: &WorkerEntry) -> (f64, f64) {
        let reported =
            self.backlog(p, p.load.queued_tokens, p.load.queued_sequences) + p.load.step_remaining;
        let q = (reported - (NOW - p.load.at)).max(0.0)
            + self.backlog(p, p.own.queued_tokens, p.own.queued_sequences);
        let cached = self.cached(p);
        let n = (f64::from(self.request.tokens) - cached).max(1.0);
        (q, self.walk(p, n, cached).0)
    }

    /// The lease would end, but for its last sixth, before the KV is fetched.
    fn late(&self, source: usize, target: usize) -> bool {
        let (p, d) = (&self.world.entries[source], &self.world.entries[target]);
        let (q, wall) = self.computed(p);
        let wait = (self.kv_wait(d) - q - wall).max(0.0);
        p.lease.is_some_and(|lease| wait >= lease * 5.0 / 6.0)
    }

    fn cost(&self, compute: usize, decode: usize, route: Option<(usize, f64, usize)>) -> f64 {
        let (p, d) = (&self.world.entries[compute], &self.world.entries[decode]);
        let w = &self.weights;
        let objective = &self.policy.objective;
        let (q, wall) = self.computed(p);
        let cached_p = self.cached(p);
        let n = (f64::from(self.request.tokens) - cached_p).max(1.0);
        let (_, extra, first, last) = self.walk(p, n, cached_p);
        let b = f64::from(p.load.running_sequences + p.own.sequences);
        let m = if b > 0.0 { extra } else { wall };

        let c = self.class(d);
        let b_d = f64::from(d.load.running_sequences + d.own.sequences);
        let s_d = (d.load.context_tokens + d.own.context_tokens) as f64;
        let waiting = f64::from(d.load.queued_sequences);
        let beside = b_d + waiting;
        let context = f64::from(self.request.tokens) + self.osl / 2.0;
        let tpot =
            c.d0 + c.d1 * (beside + 1.0) + c.d2 * (s_d + d.load.queued_tokens as f64 + context);
        let first_step = c.d0 + c.d1 * (b_d + 1.0) + c.d2 * (s_d + f64::from(self.request.tokens));
        let residents = beside * self.osl * (c.d1 + c.d2 * context);
        let cached_d = self.cached(d);
        let kv_wait = self.kv_wait(d);

        let (mut x, mut sync, mut penalty, mut step) = (0.0, 0.0, 0.0, 0.0);
        if let Some((link, promised, level)) = route {
            let l = self.world.set.links[link].coefficients;
            let block = f64::from(p.block_size);
            let blocks =
                (f64::from(self.request.tokens) / block).ceil() - (cached_d / block).floor();
            let per_block = block * p.bytes_per_token as f64;
            let bytes = blocks * per_block;
            let whole = l.alpha + l.per_byte * (bytes + promised) + l.per_descriptor * blocks;
            let tail = (last / block).ceil().min(blocks);
            let tail =
                l.alpha + l.per_byte * (tail * per_block).min(bytes) + l.per_descriptor * tail;
            x = (whole - (wall - first)).max(tail);
            sync = l.synchronization;
            step = first_step;
            if self.policy.topology.enforcement != Enforcement::Ignored {
                let name = ["host", "rack", "beyond"][level];
                penalty = self
                    .policy
                    .cost
                    .level_penalty_milliseconds
                    .get(name)
                    .copied()
                    .unwrap_or(0.0);
            }
        }
        let moved = x + sync + step;
        let (early, gap) = match (route, self.policy.first_token) {
            (None, _) => (0.0, 0.0),
            (Some(_), FirstToken::Decode) => (moved, 0.0),
            (Some(_), FirstToken::Prefill) => (
                0.0,
                (x + step + kv_wait - tpot).max(0.0) / (self.osl - 1.0).max(1.0),
            ),
        };
        w.wq * q
            + w.wt * (wall + x + sync + step + kv_wait)
            + w.wm * m
            + w.lambda * b * extra
            + w.wo * self.osl * tpot
            + w.wd * residents
            + penalty
            + w.v
                * (miss(
                    w.uq * q + wall + kv_wait + early,
                    objective.ttft_milliseconds,
                ) + miss(tpot + gap, objective.tpot_milliseconds)
                    + miss(
                        q + wall + kv_wait + moved + self.osl * tpot,
                        objective.end_to_end_milliseconds,
                    ))
    }

    /// Every local plan.
    pub(crate) fn locals(&self) -> Vec<Costed> {
        let entries = &self.world.entries;
        (0..entries.len())
            .filter(|&index| {
                let worker = &entries[index];
                let pooled = self.policy.pooling == Pooling::Pooled || worker.pool == "decode";
                pooled && self.decodes(worker) && worker.can_prefill
            })
            .map(|index| Costed {
                prefill: None,
                decode: index,
                cost: self.cost(index, index, None),
            })
            .collect()
    }

    /// Every remote plan.
    pub(crate) fn remotes(&self) -> Vec<Costed> {
        let mut pairs = self.ways();
        pairs.retain(|pair| !self.late(pair.prefill.unwrap(), pair.decode));
        pairs
    }

    /// Pairs that are no plans because the KV would be fetched too late.
    pub(crate) fn late_pairs(&self) -> usize {
        self.ways().len() - self.remotes().len()
    }

    fn ways(&self) -> Vec<Costed> {
        if self.request.max_output_tokens <= 1 && !self.locals().is_empty() {
            return vec![];
        }
        let within = self.pairs(false);
        if within.is_empty() && self.policy.topology.enforcement == Enforcement::Preferred {
            return self.pairs(true);
        }
        within
    }

    fn pairs(&self, far: bool) -> Vec<Costed> {
        let count = self.world.entries.len();
        let mut found = vec![];
        for prefill in 0..count {
            for decode in 0..count {
                if let Some(route) = self.route(prefill, decode, far) {
                    found.push(Costed {
                        prefill: Some(prefill),
                        decode,
                        cost: self.cost(prefill, decode, Some(route)),
                    });
                }
            }
        }
        found
    }
}

//! From inputs to costs: the formula, term by term, in milliseconds.
//!
//! ```text
//! J = wq·q + wt·(wall + x + sync + first_step + kv_wait) + wm·m + λ·B·extra + wo·E[osl]·tpot_d
//!     + wd·B_d·E[osl]·(d1 + d2·context) + penalty(level)
//!     + V·( P(uq·q + wall + … > TTFT objective) + P(tpot_d > TPOT objective) )
//! P(y > s) = logistic((y − s)/(0.15·s))
//! ```
//!
//! A cost has three parts: what depends on the worker that computes, on the worker that generates, and on the link between
//! them. The search bounds the sum of the first two by themselves, so they are made once per worker.

use serde::{Deserialize, Serialize};

use super::inputs::{ComputeInputs, DecodeInputs, Inputs, LinkInputs};
use super::request::Facts;
use crate::coefficients::{
    CoefficientSet, LinkCoefficients, PathFactors, WorkerCoefficients, load_bucket,
};
use crate::cost;
use crate::policy::{Enforcement, FirstToken, Objective, Policy, Weights};

/// Milliseconds, not yet weighted, but for `objective`, which is what expected misses cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Terms {
    /// Until the prompt's first step.
    pub queue: f64,
    /// From its first step to its last.
    pub prefill: f64,
    /// What of moving KV does not hide behind computing.
    pub transfer: f64,
    /// Round trips of the lease protocol.
    pub synchronization: f64,
    /// Waiting for KV blocks or a place in the batch of the worker that generates.
    pub admission: f64,
    /// The decode step after the KV has come.
    pub first_step: f64,
    /// Machine time taken.
    pub machine: f64,
    /// By how much streams on the computing worker are held up, in sum.
    pub interference: f64,
    /// This request's own decode.
    pub decode: f64,
    /// By how much its decode holds up the streams beside it, in sum.
    pub residents: f64,
    pub objective: f64,
    /// Of the level between the two workers.
    pub penalty: f64,
}

impl Terms {
    /// Each with its name in records.
    pub fn named(&self) -> [(&'static str, f64); 12] {
        [
            ("queue", self.queue),
            ("prefill", self.prefill),
            ("transfer", self.transfer),
            ("synchronization", self.synchronization),
            ("admission", self.admission),
            ("firstStep", self.first_step),
            ("machine", self.machine),
            ("interference", self.interference),
            ("decode", self.decode),
            ("residents", self.residents),
            ("objective", self.objective),
            ("penalty", self.penalty),
        ]
    }
}

/// What of a policy shapes a cost, resolved once per decision.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) weights: Weights,
    pub(crate) objective: Objective,
    pub(crate) first_token: FirstToken,
    pub(crate) temperature: f64,
}

impl Rules {
    pub(crate) fn new(policy: &Policy) -> Self {
        Self {
            weights: policy.cost.resolve(!policy.objective.is_empty()),
            objective: policy.objective,
            first_token: policy.first_token,
            temperature: policy.cost.temperature_percent / 100.0,
        }
    }

    /// By how much remote has to be cheaper than this local cost.
    pub(crate) fn margin(&self, local: f64) -> f64 {
        self.weights
            .margin_milliseconds
            .max(self.weights.margin_share * local)
    }
}

/// What a pair of this level costs extra.
pub(crate) fn penalty(policy: &Policy, level: &str) -> f64 {
    if policy.topology.enforcement == Enforcement::Ignored {
        return 0.0;
    }
    policy
        .cost
        .level_penalty_milliseconds
        .get(level)
        .copied()
        .unwrap_or(0.0)
}

/// The part of a cost that the computing worker alone decides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Computing {
    pub(crate) queue: f64,
    pub(crate) prompt: cost::PromptCost,
    machine: f64,
    interference: f64,
    upper: f64,
    bucket: usize,
    /// Weighted, with the least that its objective term can be.
    pub(crate) bound: f64,
}

/// The part of a cost that the generating worker alone decides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoding {
    first_step: f64,
    pub(crate) wait: f64,
    tpot: f64,
    decode: f64,
    residents: f64,
    upper: f64,
    /// Weighted, of a remote plan, with the least that its objective term can be.
    pub(crate) bound: f64,
}

/// A chance of missing `limit`, 1/2 at the limit, steep within 15 % of it. None: no objective, no chance.
fn miss(value: f64, limit: Option<f64>) -> f64 {
    limit.map_or(0.0, |limit| {
        1.0 / (1.0 + (-(value - limit) / (0.15 * limit)).exp())
    })
}

pub(crate) fn computing(
    worker: &WorkerCoefficients,
    inputs: &ComputeInputs,
    facts: &Facts,
    rules: &Rules,
) -> Computing {
    let tpot = rules.objective.tpot_milliseconds;
    let sequences = f64::from(inputs.running_sequences);
    let context = inputs.context_tokens as f64;
    let backlog = |tokens: u64, prompts: u32| {
        cost::backlog(
            worker,
            inputs.chunks,
            tpot,
            tokens,
            prompts,
            sequences,
            context,
        )
    };
    // What was reported has been worked on since; what was sent after the report has not.
    let reported = backlog(inputs.queued_tokens, inputs.queued_sequences) + inputs.step_remaining;
    let queue =
        (reported - inputs.report_age).max(0.0) + backlog(inputs.own_tokens, inputs.own_sequences);
    let tokens = facts.tokens.saturating_sub(inputs.cached_tokens).max(1);
    let prompt = cost::prompt(
        worker,
        inputs.chunks,
        tpot,
        tokens,
        inputs.cached_tokens,
        sequences,
        context,
    );
    let machine = if inputs.running_sequences > 0 {
        prompt.extra
    } else {
        prompt.wall
    };
    let interference = sequences * prompt.extra;
    let weights = &rules.weights;
    let bucket = load_bucket(inputs.running_sequences);
    let bound = weights.wq * queue
        + weights.wt * prompt.wall
        + weights.wm * machine
        + weights.lambda * interference
        + weights.v
            * miss(
                weights.uq * queue + prompt.wall,
                rules.objective.ttft_milliseconds,
            );
    Computing {
        queue,
        prompt,
        machine,
        interference,
        upper: worker.upper.prefill[bucket],
        bucket,
        bound,
    }
}

pub(crate) fn decoding(
    worker: &WorkerCoefficients,
    inputs: &DecodeInputs,
    facts: &Facts,
    rules: &Rules,
) -> Decoding {
    let expected = facts.expected_output_tokens;
    let running = f64::from(inputs.running_sequences);
    // Those that wait will decode beside this request as well.
    let beside = running + f64::from(inputs.waiting_sequences);
    let context = inputs.context_tokens.saturating_add(inputs.waiting_tokens) as f64;
    let own_context = f64::from(facts.tokens) + expected / 2.0;
    let tpot = cost::decode_step(worker, beside + 1.0, context + own_context);
    let first_step = cost::decode_step(
        worker,
        running + 1.0,
        inputs.context_tokens as f64 + f64::from(facts.tokens),
    );
    let wait = admission_wait(inputs, expected * tpot);
    let decode = expected * tpot;
    let residents = beside * expected * (worker.d1 + worker.d2 * own_context);
    let weights = &rules.weights;
    let bound = weights.wt * (wait + first_step)
        + weights.wo * decode
        + weights.wd * residents
        + weights.v * miss(tpot, rules.objective.tpot_milliseconds);
    Decoding {
        first_step,
        wait,
        tpot,
        decode,
        residents,
        upper: worker.upper.decode[load_bucket(inputs.running_sequences)],
        bound,
    }
}

/// How long until blocks and a place in the batch are free: resident streams end one by one, spread evenly over the time
/// that one of them takes.
fn admission_wait(inputs: &DecodeInputs, stream: f64) -> f64 {
    let residents = inputs
        .running_sequences
        .saturating_add(inputs.waiting_sequences);
    let streams = f64::from(residents.max(1));
    let missing_blocks = f64::from(inputs.needed_blocks.saturating_sub(inputs.free_blocks));
    let blocks_each = (f64::from(inputs.used_blocks) / streams).max(1.0);
    let for_blocks = (missing_blocks / blocks_each).ceil();
    let for_places = f64::from(
        residents
            .saturating_add(1)
            .saturating_sub(inputs.max_sequences),
    );
    for_blocks.max(for_places).min(streams) * stream / streams
}

/// A candidate's cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Evaluated {
    pub(crate) terms: Terms,
    pub(crate) mean: f64,
    pub(crate) upper: f64,
    pub(crate) cost: f64,
}

/// The link's part, with what depends on all three.
pub(crate) fn combine(
    computing: &Computing,
    decoding: &Decoding,
    link: Option<(&LinkInputs, &LinkCoefficients, f64)>,
    facts: &Facts,
    rules: &Rules,
    paths: &PathFactors,
) -> Evaluated {
    let (transfer, synchronization, first_step, penalty, link_upper) = match link {
        None => (0.0, 0.0, 0.0, 0.0, 1.0),
        Some((inputs, coefficients, penalty)) => (
            cost::exposed_transfer(
                coefficients,
                &computing.prompt,
                inputs.missing_bytes as f64,
                inputs.promised_bytes as f64,
                inputs.missing_blocks,
                inputs.block_size,
                inputs.bytes_per_block as f64,
            ),
            coefficients.synchronization,
            decoding.first_step,
            penalty,
            coefficients.upper,
        ),
    };
    let (queue, wall, wait) = (computing.queue, computing.prompt.wall, decoding.wait);
    let moved = transfer + synchronization + first_step;
    // Sampled by the prefill worker, the first token does not wait for the transfer: the second one does.
    let (before_first, gap) = match (link, rules.first_token) {
        (Some(_), FirstToken::Decode) => (moved, 0.0),
        (Some(_), FirstToken::Prefill) => {
            let late = (transfer + first_step + wait - decoding.tpot).max(0.0);
            (0.0, late / (facts.expected_output_tokens - 1.0).max(1.0))
        }
        (None, _) => (0.0, 0.0),
    };
    let mean = queue + wall + wait + before_first;
    let weights = &rules.weights;
    let objective = &rules.objective;
    let misses = miss(
        weights.uq * queue + wall + wait + before_first,
        objective.ttft_milliseconds,
    ) + miss(decoding.tpot + gap, objective.tpot_milliseconds)
        + miss(
            queue + wall + wait + moved + decoding.decode,
            objective.end_to_end_milliseconds,
        );
    let terms = Terms {
        queue,
        prefill: wall,
        transfer,
        synchronization,
        admission: wait,
        first_step,
        machine: computing.machine,
        interference: computing.interference,
        decode: decoding.decode,
        residents: decoding.residents,
        objective: weights.v * misses,
        penalty,
    };
    let seen = match link {
        None => paths.local[computing.bucket],
        Some(_) => paths.remote[computing.bucket],
    };
    let upper = match seen {
        Some(factor) => mean * factor,
        None => {
            let moved = if before_first > 0.0 {
                link_upper * (transfer + synchronization) + decoding.upper * first_step
            } else {
                0.0
            };
            computing.upper * (queue + wall) + decoding.upper * wait + moved
        }
    };
    Evaluated {
        cost: weighted(&terms, weights)
            .iter()
            .map(|&(_, value)| value)
            .sum(),
        terms,
        mean,
        upper,
    }
}

/// What each term adds to the cost, by name.
pub(crate) fn weighted(terms: &Terms, weights: &Weights) -> [(&'static str, f64); 12] {
    [
        ("queue", weights.wq * terms.queue),
        ("prefill", weights.wt * terms.prefill),
        ("transfer", weights.wt * terms.transfer),
        ("synchronization", weights.wt * terms.synchronization),
        ("admission", weights.wt * terms.admission),
        ("first step", weights.wt * terms.first_step),
        ("machine time", weights.wm * terms.machine),
        ("interference", weights.lambda * terms.interference),
        ("decode", weights.wo * terms.decode),
        ("residents", weights.wd * terms.residents),
        ("objective", terms.objective),
        ("penalty", terms.penalty),
    ]
}

/// The whole cost of one candidate from its inputs: what replay calls.
///
/// `None` where the inputs name coefficients that the set does not have.
pub(crate) fn evaluate(
    set: &CoefficientSet,
    inputs: &Inputs,
    level_penalty: f64,
    facts: &Facts,
    rules: &Rules,
) -> Option<Evaluated> {
    let compute = &set.workers.get(inputs.compute.class as usize)?.coefficients;
    let decode = &set.workers.get(inputs.decode.class as usize)?.coefficients;
    let link = match &inputs.link {
        None => None,
        Some(link) => {
            let coefficients = &set.links.get(link.link as usize)?.coefficients;
            Some((link, coefficients, level_penalty))
        }
    };
    let computing = computing(compute, &inputs.compute, facts, rules);
    let decoding = decoding(decode, &inputs.decode, facts, rules);
    Some(combine(
        &computing, &decoding, link, facts, rules, &set.paths,
    ))
}

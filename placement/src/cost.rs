//! How long steps, prompts and transfers take: the formulas of the cost model, chunk by chunk, in milliseconds.
//!
//! Step formulas after the fits of published performance databases (reference cost model, section 2a): a prefill step is
//! affine in its tokens and in the attention it does; a mixed step is the prefill step plus what each decoding sequence adds.

use crate::coefficients::{LinkCoefficients, WorkerCoefficients};

/// Fewest tokens of a chunk beside decode.
pub const SMALLEST_CHUNK: u32 = 128;
/// Most tokens of a chunk.
pub const LARGEST_CHUNK: u32 = 2048;
/// The chunk beside decode where no objective for the time per output token is set (the best fixed one of the placement lab).
pub const CHUNK_WITHOUT_OBJECTIVE: u32 = 512;
/// The share of the objective for the time per output token that a mixed step may take.
const SHARE_OF_OBJECTIVE: f64 = 5.0 / 6.0;

/// One prefill step of `tokens` after `cached` ones, alone on the worker.
pub fn prefill_step(worker: &WorkerCoefficients, tokens: f64, cached: f64) -> f64 {
    let attention = tokens * cached + tokens * tokens / 2.0;
    worker
        .floor
        .max(worker.a + worker.b * tokens + worker.k * attention)
}

/// One decode step of `sequences` whose contexts sum to `context` tokens.
pub fn decode_step(worker: &WorkerCoefficients, sequences: f64, context: f64) -> f64 {
    worker.d0 + beside(worker, sequences, context)
}

/// One step that computes a chunk and lets the decoding sequences go on.
pub fn mixed_step(
    worker: &WorkerCoefficients,
    tokens: f64,
    cached: f64,
    sequences: f64,
    context: f64,
) -> f64 {
    prefill_step(worker, tokens, cached) + beside(worker, sequences, context)
}

/// What decoding sequences add to a step, whatever else it does.
fn beside(worker: &WorkerCoefficients, sequences: f64, context: f64) -> f64 {
    worker.d1 * sequences + worker.d2 * context
}

/// How large a worker's chunks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ChunkRule {
    /// Set anew for each step by [`chunk_bound`].
    Bounded,
    /// Set at the engine's start.
    Fixed(u32),
}

/// The largest chunk, in tokens, with which a mixed step stays within 5/6 of the objective for the time per output token:
/// 128 to 2048; 2048 where nothing decodes, 512 where there is no objective.
///
/// `cached` are the tokens of the prompt before the chunk. Used by the worker's scheduler and by the estimates alike.
pub fn chunk_bound(
    worker: &WorkerCoefficients,
    sequences: f64,
    context: f64,
    tpot_objective: Option<f64>,
    cached: f64,
) -> u32 {
    if sequences <= 0.0 {
        return LARGEST_CHUNK;
    }
    let Some(objective) = tpot_objective else {
        return CHUNK_WITHOUT_OBJECTIVE;
    };
    let budget = objective * SHARE_OF_OBJECTIVE - beside(worker, sequences, context);
    if budget < worker.floor {
        return SMALLEST_CHUNK;
    }
    // k/2·n² + (b + k·c)·n − (budget − a) ≤ 0, by the root that stays exact when k is nearly nothing.
    let room = budget - worker.a;
    let linear = worker.b + worker.k * cached;
    let discriminant = (linear * linear + 2.0 * worker.k * room.max(0.0)).sqrt();
    let largest = if linear + discriminant > 0.0 {
        2.0 * room / (linear + discriminant)
    } else {
        f64::from(LARGEST_CHUNK)
    };
    // A float-to-integer cast saturates, so no value is out of range before the clamp.
    (largest.floor() as u32).clamp(SMALLEST_CHUNK, LARGEST_CHUNK)
}

/// What computing one prompt on one worker costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PromptCost {
    /// From its first step to its last, beside what the worker decodes.
    pub wall: f64,
    /// By how much longer those steps are than decode steps: what each resident stream waits. Zero where nothing decodes.
    pub extra: f64,
    /// The first step: nothing can be moved before it has ended.
    pub first_step: f64,
    /// Tokens in the last step: they cannot be moved before the prompt is done.
    pub last_chunk: u32,
    pub steps: u32,
}

/// Equal chunks from this many on are summed up at once: a peer's report of an endless queue makes no endless decision.
const RUN: u64 = 8;

/// Walks a prompt of `tokens` after `cached` ones through the worker's chunks.
pub fn prompt(
    worker: &WorkerCoefficients,
    chunks: ChunkRule,
    tpot_objective: Option<f64>,
    tokens: u32,
    cached: u32,
    sequences: f64,
    context: f64,
) -> PromptCost {
    let size = (tokens, cached);
    let load = (sequences, context);
    walk(worker, chunks, tpot_objective, size, load, &mut 0)
}

/// The same, counting what it takes: single steps and sums.
fn walk(
    worker: &WorkerCoefficients,
    chunks: ChunkRule,
    tpot_objective: Option<f64>,
    (tokens, cached): (u32, u32),
    (sequences, context): (f64, f64),
    rounds: &mut u32,
) -> PromptCost {
    let mut cost = PromptCost::default();
    let decode = decode_step(worker, sequences, context);
    let mut done = 0u32;
    while done < tokens {
        *rounds += 1;
        let before = f64::from(cached) + f64::from(done);
        let chunk = match chunks {
            ChunkRule::Bounded => chunk_bound(worker, sequences, context, tpot_objective, before),
            ChunkRule::Fixed(fixed) => fixed.max(1),
        };
        let whole = u64::from((tokens - done) / chunk);
        let run = match (chunks, tpot_objective) {
            (ChunkRule::Bounded, Some(objective)) if sequences > 0.0 && chunk > SMALLEST_CHUNK => {
                let budget = objective * SHARE_OF_OBJECTIVE - beside(worker, sequences, context);
                unchanged(worker, budget - worker.a, f64::from(chunk), before).min(whole)
            }
            // One size for all, or the smallest, which later ones are no smaller than.
            _ => whole,
        };
        if run >= RUN {
            let steps = Steps::new(worker, f64::from(chunk), before, run);
            if done == 0 {
                cost.first_step = mixed_step(worker, f64::from(chunk), before, sequences, context);
            }
            cost.wall +=
                steps.at_least(worker.floor) + run as f64 * beside(worker, sequences, context);
            if sequences > 0.0 {
                let least = worker.floor.max(worker.d0);
                cost.extra += steps.at_least(least) - run as f64 * worker.d0;
            }
            cost.last_chunk = chunk;
            // Both fit: whole chunks of what is left of `tokens`.
            cost.steps += run as u32;
            done += run as u32 * chunk;
            continue;
        }
        let taken = chunk.min(tokens - done);
        let step = mixed_step(worker, f64::from(taken), before, sequences, context);
        cost.wall += step;
        if sequences > 0.0 {
            cost.extra += (step - decode).max(0.0);
        }
        if done == 0 {
            cost.first_step = step;
        }
        cost.last_chunk = taken;
        cost.steps += 1;
        done += taken;
    }
    cost
}

/// For how many steps [`chunk_bound`] gives this chunk for certain, the first of them after `before` tokens: it is one token
/// smaller once `k/2·n² + (b + k·c)·n` is above the room of the step.
fn unchanged(worker: &WorkerCoefficients, room: f64, chunk: f64, before: f64) -> u64 {
    if worker.k <= 0.0 {
        return u64::MAX;
    }
    if chunk >= f64::from(LARGEST_CHUNK) || room > 0.0 {
        let longest = (room / chunk - worker.b - worker.k * chunk / 2.0) / worker.k;
        // A cast saturates. One less than there may be, so that rounding cannot make it one too many.
        return ((longest - before) / chunk).floor() as u64;
    }
    0
}

/// Prefill steps of one size, one after the other: each has more before it than the last one, by the same.
struct Steps {
    /// Of the first, and by how much each is longer, milliseconds.
    first: f64,
    more: f64,
    count: u64,
}

impl Steps {
    fn new(worker: &WorkerCoefficients, tokens: f64, cached: f64, count: u64) -> Self {
        let attention = tokens * cached + tokens * tokens / 2.0;
        Self {
            first: worker.a + worker.b * tokens + worker.k * attention,
            more: worker.k * tokens * tokens,
            count,
        }
    }

    /// Their sum, where none is shorter than `least`.
    fn at_least(&self, least: f64) -> f64 {
        let short = if self.first > least {
            0.0
        } else if self.more > 0.0 {
            (((least - self.first) / self.more).floor() + 1.0).min(self.count as f64)
        } else {
            self.count as f64
        };
        let count = self.count as f64;
        let above = (count * (count - 1.0) - short * (short - 1.0)) / 2.0;
        short * least + (count - short) * self.first + self.more * above
    }
}

/// How long the prompt tokens already on a worker keep it busy: `tokens` in `prompts` equal prompts, nothing of them cached.
pub fn backlog(
    worker: &WorkerCoefficients,
    chunks: ChunkRule,
    tpot_objective: Option<f64>,
    tokens: u64,
    prompts: u32,
    sequences: f64,
    context: f64,
) -> f64 {
    if tokens == 0 {
        return 0.0;
    }
    let prompts = u64::from(prompts).clamp(1, tokens);
    let each = u32::try_from(tokens.div_ceil(prompts)).unwrap_or(u32::MAX);
    let one = prompt(worker, chunks, tpot_objective, each, 0, sequences, context).wall;
    // Equal prompts rounded up to whole tokens would count a few too many; scale back to what is there.
    one * tokens as f64 / f64::from(each)
}

/// One transfer, alone and from a standing start.
pub fn transfer(link: &LinkCoefficients, bytes: f64, descriptors: f64) -> f64 {
    link.alpha + link.per_byte * bytes + link.per_descriptor * descriptors
}

/// What of a transfer does not hide behind computing: all of it but what fits between the first published block and the
/// seal, and at least the last chunk's blocks. Bytes promised to the link before go first.
pub fn exposed_transfer(
    link: &LinkCoefficients,
    computing: &PromptCost,
    bytes: f64,
    promised_bytes: f64,
    blocks: u32,
    block_size: u32,
    bytes_per_block: f64,
) -> f64 {
    let whole = transfer(link, bytes + promised_bytes, f64::from(blocks));
    let hidden = (computing.wall - computing.first_step).max(0.0);
    let last_blocks = computing.last_chunk.div_ceil(block_size.max(1)).min(blocks);
    let last = transfer(
        link,
        (f64::from(last_blocks) * bytes_per_block).min(bytes),
        f64::from(last_blocks),
    );
    (whole - hidden).max(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coefficients::PhaseFactors;

    /// Of the size of a real one: many tokens cost what one does.
    fn gpu() -> WorkerCoefficients {
        WorkerCoefficients {
            a: 2.66,
            b: 0.01939,
            k: 8.07e-7,
            floor: 7.0,
            d0: 6.37,
            d1: 0.0119,
            d2: 4.17e-5,
            ..worker()
        }
    }

    fn worker() -> WorkerCoefficients {
        WorkerCoefficients {
            a: 5.0,
            b: 8.0,
            k: 0.002,
            floor: 6.0,
            d0: 20.0,
            d1: 1.5,
            d2: 0.003,
            upper: PhaseFactors::default(),
            samples: Default::default(),
        }
    }

    fn close(left: f64, right: f64) -> bool {
        (left - right).abs() <= 1e-9 * right.abs().max(1.0)
    }

    #[test]
    fn an_idle_worker_computes_a_prompt_in_one_step() {
        let cost = prompt(&worker(), ChunkRule::Bounded, Some(150.0), 600, 0, 0.0, 0.0);
        assert_eq!(cost.steps, 1);
        assert!(
            close(cost.wall, 5.0 + 4800.0 + 0.002 * 180_000.0),
            "{cost:?}"
        );
        assert_eq!(cost.extra, 0.0);
        assert_eq!(cost.last_chunk, 600);
    }

    #[test]
    fn beside_decode_the_chunks_shrink_and_attention_adds_up_to_the_same() {
        let cost = prompt(
            &worker(),
            ChunkRule::Bounded,
            Some(150.0),
            600,
            0,
            1.0,
            300.0,
        );
        assert_eq!(cost.steps, 5);
        assert_eq!(cost.last_chunk, 88);
        // Attention over the whole prompt does not depend on how it is cut.
        assert!(
            close(cost.wall, 5.0 * (5.0 + 2.4) + 4800.0 + 360.0),
            "{cost:?}"
        );
        assert!(
            close(cost.extra, 5.0 * (5.0 - 20.0) + 4800.0 + 360.0),
            "{cost:?}"
        );
    }

    /// One step after the other, however many there are.
    fn walked(
        worker: &WorkerCoefficients,
        chunks: ChunkRule,
        objective: Option<f64>,
        (tokens, cached): (u32, u32),
        (sequences, context): (f64, f64),
    ) -> PromptCost {
        let mut cost = PromptCost::default();
        let mut done = 0;
        while done < tokens {
            let before = f64::from(cached + done);
            let chunk = match chunks {
                ChunkRule::Bounded => chunk_bound(worker, sequences, context, objective, before),
                ChunkRule::Fixed(fixed) => fixed,
            };
            let taken = chunk.min(tokens - done);
            let step = mixed_step(worker, f64::from(taken), before, sequences, context);
            cost.wall += step;
            if sequences > 0.0 {
                cost.extra += (step - decode_step(worker, sequences, context)).max(0.0);
            }
            if done == 0 {
                cost.first_step = step;
            }
            cost.last_chunk = taken;
            cost.steps += 1;
            done += taken;
        }
        cost
    }

    #[test]
    fn many_equal_chunks_are_summed_up_as_they_would_be_walked() {
        let gpu = gpu();
        let floored = WorkerCoefficients { floor: 40.0, ..gpu };
        let flat = WorkerCoefficients { k: 0.0, ..gpu };
        let mut summed = 0;
        for worker in [worker(), gpu, floored, flat] {
            for chunks in [
                ChunkRule::Bounded,
                ChunkRule::Fixed(7),
                ChunkRule::Fixed(512),
            ] {
                for objective in [None, Some(10.0), Some(30.0), Some(400.0)] {
                    for tokens in [1, 500, 16_000, 128_000, 1_000_001] {
                        for load in [(0.0, 0.0), (1.0, 300.0), (40.0, 120_000.0)] {
                            let size = (tokens, 1_000);
                            let walked = walked(&worker, chunks, objective, size, load);
                            let cost =
                                prompt(&worker, chunks, objective, tokens, 1_000, load.0, load.1);
                            let near = |left: f64, right: f64| {
                                (left - right).abs() <= 1e-9 * walked.wall.max(1.0)
                            };
                            assert!(
                                near(cost.wall, walked.wall)
                                    && near(cost.extra, walked.extra)
                                    && near(cost.first_step, walked.first_step)
                                    && (cost.steps, cost.last_chunk)
                                        == (walked.steps, walked.last_chunk),
                                "{chunks:?} {objective:?} {tokens} {load:?}: {cost:?} {walked:?}"
                            );
                            summed += u32::from(walked.steps > 100);
                        }
                    }
                }
            }
        }
        assert!(summed > 50, "{summed}");
    }

    /// Far fewer rounds than steps, so that a peer's report of an endless queue makes no endless decision.
    #[test]
    fn an_endless_queue_takes_few_rounds() {
        for chunks in [ChunkRule::Bounded, ChunkRule::Fixed(1)] {
            let mut rounds = 0;
            let (size, load) = ((u32::MAX, 0), (3.0, 900.0));
            let cost = walk(&worker(), chunks, Some(150.0), size, load, &mut rounds);
            assert!(cost.wall.is_finite() && cost.steps > 1_000_000);
            assert!(rounds < 50_000, "{rounds}");
        }
    }

    #[test]
    fn the_chunk_is_the_largest_that_keeps_the_step_in_its_budget() {
        let gpu = gpu();
        for cached in [0.0, 8_192.0, 100_000.0] {
            let chunk = chunk_bound(&gpu, 32.0, 65_536.0, Some(30.0), cached);
            assert!(chunk > SMALLEST_CHUNK && chunk < LARGEST_CHUNK);
            let step = |tokens: u32| mixed_step(&gpu, f64::from(tokens), cached, 32.0, 65_536.0);
            assert!(
                step(chunk) <= 25.0 + 1e-9 && step(chunk + 1) > 25.0,
                "{chunk}"
            );
        }
        assert_eq!(
            chunk_bound(&gpu, 256.0, 1e6, Some(30.0), 0.0),
            SMALLEST_CHUNK
        );
        assert_eq!(chunk_bound(&gpu, 0.0, 0.0, Some(30.0), 0.0), LARGEST_CHUNK);
        assert_eq!(
            chunk_bound(&gpu, 1.0, 10.0, None, 0.0),
            CHUNK_WITHOUT_OBJECTIVE
        );
    }

    #[test]
    fn a_backlog_of_many_prompts_is_cheaper_than_one_long_prompt() {
        let rule = ChunkRule::Bounded;
        let long = backlog(&worker(), rule, None, 8_000, 1, 0.0, 0.0);
        let many = backlog(&worker(), rule, None, 8_000, 20, 0.0, 0.0);
        assert!(many < long, "{many} {long}");
        assert_eq!(backlog(&worker(), rule, None, 0, 3, 0.0, 0.0), 0.0);
        assert!(backlog(&worker(), rule, None, 2, 900, 0.0, 0.0) > 0.0);
    }

    #[test]
    fn only_what_does_not_overlap_is_exposed() {
        let link = LinkCoefficients {
            alpha: 1.0,
            per_byte: 1e-6,
            per_descriptor: 0.01,
            synchronization: 2.0,
            upper: 1.25,
            samples: 0,
        };
        let block = 16.0 * 23_000.0;
        let one_step = prompt(&worker(), ChunkRule::Bounded, None, 600, 0, 0.0, 0.0);
        let whole = transfer(&link, 38.0 * block, 38.0);
        assert!(close(
            exposed_transfer(&link, &one_step, 38.0 * block, 0.0, 38, 16, block),
            whole
        ));
        let chunked = prompt(&worker(), ChunkRule::Fixed(128), None, 600, 0, 0.0, 0.0);
        let exposed = exposed_transfer(&link, &chunked, 38.0 * block, 0.0, 38, 16, block);
        assert!(
            close(exposed, transfer(&link, 6.0 * block, 6.0)),
            "{exposed}"
        );
        let behind = exposed_transfer(&link, &chunked, 38.0 * block, 1e10, 38, 16, block);
        assert!(behind > 5_000.0, "{behind}");
    }
}

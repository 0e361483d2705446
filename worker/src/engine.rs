//! The engine: scheduler, model and KV pool as one state machine that is driven by [`Engine::step`] from outside.
//!
//! In production a compute thread drives it with the machine's clock; in simulation the simulated clock does. It never blocks
//! but to compute, and knows no channel, no socket and no other worker. Its answers come out of `step` as events, in order.
//!
//! - [`scheduler`]: which tokens of which sequences a step computes. [`request`]: what is asked and what is answered.
//! - `admission`: which requests are taken. `begin`: choosing a step. `sequence`: what is remembered of an operation.
//! - `outcome`: what a computed step means for each. [`load`]: load reports.
//! - [`measure`]: a first guess of the engine's cost coefficients; `placement` fits them to every step afterwards.
//!
//! Invariants: what a sequence generates depends on its tokens, sampling and seed alone, never on the batch, the chunks or
//! preemption. No error comes of memory once a request is admitted. An operation ends with exactly one last event.

mod admission;
mod begin;
pub mod load;
pub mod measure;
mod outcome;
pub mod request;
pub mod scheduler;
mod sequence;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use baton_placement::calibration::{WorkerCalibrator, WorkerCoefficients};
use baton_protocol::failure::FailureClass;
use baton_protocol::ids::RunId;

pub use self::load::LoadBoard;
pub use self::outcome::Forwarded;
pub use self::request::{
    Admission, Admitted, EngineEvent, EngineRequest, PrefillTerms, Refused, RequestKind,
};
use self::scheduler::{Limits, Scheduler, StepPlan};
use self::sequence::Sequences;
use crate::kv::{KvPool, Reservation};
use crate::model::{Model, SequenceKey};
use crate::sampling::Finish;

/// What an engine is given besides model and memory.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    pub limits: Limits,
    /// Tokens of one sequence, prompt and output; the model's context and the pool's size bound it further.
    pub max_context: usize,
    /// Milliseconds between two tokens that mixed steps must keep; none: a fixed chunk.
    pub tpot_objective: Option<f64>,
    /// Cost coefficients to begin with.
    pub prior: WorkerCoefficients,
}

/// Measures the duration of work that is real, in milliseconds of any zero. Simulated models say their durations themselves.
pub type Stopwatch = Box<dyn Fn() -> f64 + Send>;

/// What one step came to.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutcome {
    /// In order; those of one operation belong together.
    pub events: Vec<(SequenceKey, EngineEvent)>,
    /// Milliseconds that the step took, or takes in modelled time: its events are true after them.
    pub duration: f64,
    pub next: Next,
}

/// When to call again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// There is more to compute.
    Again,
    /// Something waits for memory, a hand-off or its deadline: after the next command, or within 50 ms.
    Wait,
    /// Nothing to do before the next command.
    Idle,
}

/// What a step consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StepKind {
    Prefill,
    Decode,
    Mixed,
}

/// Counts since the engine was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineCounters {
    pub steps: u64,
    pub preemptions: u64,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
}

/// See the module's text.
pub struct Engine {
    model: Box<dyn Model>,
    config: EngineConfig,
    scheduler: Scheduler,
    sequences: Sequences,
    fit: WorkerCalibrator,
    board: Arc<LoadBoard>,
    stopwatch: Stopwatch,
    eos: Vec<u32>,
    max_context: usize,
    next_key: u64,
    /// Chosen by `begin`, computed by `forward`.
    plan: StepPlan,
    /// Events of calls between steps.
    early: Vec<(SequenceKey, EngineEvent)>,
    counters: EngineCounters,
}

impl fmt::Debug for Engine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Engine")
            .field("config", &self.config)
            .field("scheduler", &self.scheduler)
            .finish_non_exhaustive()
    }
}

impl Engine {
    pub fn new(
        model: Box<dyn Model>,
        pool: KvPool,
        config: EngineConfig,
        stopwatch: Stopwatch,
    ) -> Self {
        let pool_tokens = pool.store().len() * pool.store().geometry().block_size;
        Self {
            eos: model.facts().eos_token_ids.clone(),
            max_context: config
                .max_context
                .min(model.facts().shape.max_context)
                .min(pool_tokens),
            scheduler: Scheduler::new(config.limits),
            sequences: Sequences {
                pool,
                all: HashMap::new(),
            },
            fit: WorkerCalibrator::new(config.prior),
            board: Arc::new(LoadBoard::new()),
            stopwatch,
            next_key: 0,
            plan: StepPlan::default(),
            early: Vec::new(),
            counters: EngineCounters::default(),
            config,
            model,
        }
    }

    pub fn pool(&self) -> &KvPool {
        &self.sequences.pool
    }

    /// Tokens that one sequence may have, prompt and output.
    pub fn max_context(&self) -> usize {
        self.max_context
    }

    /// Where load reports are made from, by any thread.
    pub fn board(&self) -> &Arc<LoadBoard> {
        &self.board
    }

    /// The cost coefficients as fitted so far.
    pub fn coefficients(&self) -> WorkerCoefficients {
        self.fit.coefficients()
    }

    pub fn counters(&self) -> EngineCounters {
        self.counters
    }

    /// Operations that have not ended.
    pub fn operations(&self) -> usize {
        self.sequences.all.len()
    }

    /// The KV of a [`RequestKind::Receive`] is there: of all its tokens, or of all but the last where that is computed here.
    /// It decodes from the next step on. False when it has ended meanwhile; the blocks are given back then.
    pub fn attach(
        &mut self,
        key: SequenceKey,
        reservation: Reservation,
        first_token: Option<u32>,
        now: f64,
    ) -> bool {
        let Some(sequence) = self.sequences.all.get_mut(&key) else {
            return false;
        };
        let mut present = sequence.history.len();
        if first_token.is_none() {
            present = present.saturating_sub(1);
        }
        // Preempted later, it computes its prompt here, but the run's prefill is not begun a second time.
        sequence.progress.prefill_started = true;
        sequence.progress.prefill_completed = true;
        self.resume(key, Some(reservation), present, first_token, now);
        true
    }

    /// The hand-off of a [`RequestKind::Receive`] has failed: what is not in complete blocks is computed here. `first_token` if
    /// the prefill worker had sampled it. Without its reservation it waits for memory like any other request. False when the
    /// operation has ended meanwhile.
    pub fn recompute(
        &mut self,
        key: SequenceKey,
        reservation: Option<Reservation>,
        first_token: Option<u32>,
        now: f64,
    ) -> bool {
        let Some(sequence) = self.sequences.all.get_mut(&key) else {
            return false;
        };
        let block_size = self.sequences.pool.store().geometry().block_size;
        let total = sequence.history.len() + usize::from(first_token.is_some());
        let complete = |held: &Reservation| held.completed_blocks() * block_size;
        // Where everything is there but the outcome of the last token, its block is shared and must not be written again: the
        // memory is taken anew, with a block of its own for that token.
        let reservation = reservation.filter(|held| complete(held) < total);
        let present = reservation.as_ref().map_or(0, complete);
        sequence.cached_tokens = present;
        if present + 1 == total {
            // Nothing of the prompt is left to compute: its prefill is over as it begins.
            let (cached_tokens, progress) = (present, &mut sequence.progress);
            progress.prefill_started = true;
            progress.prefill_completed = true;
            self.early.extend([
                (key, EngineEvent::PrefillStarted { queue: 0.0 }),
                (
                    key,
                    EngineEvent::PrefillCompleted {
                        queue: 0.0,
                        compute: 0.0,
                        cached_tokens,
                    },
                ),
            ]);
        }
        self.resume(key, reservation, present, first_token, now);
        true
    }

    /// Ends an operation without an event. Blocks under a sealed lease stay there. False when it had ended already.
    pub fn cancel(&mut self, key: SequenceKey) -> bool {
        self.scheduler.remove(key);
        self.board.write(self.scheduler.load());
        self.early.retain(|(of, _)| *of != key);
        // Between `begin` and `forward`: outputs are matched to the plan's slices one by one.
        self.plan.slices.retain(|slice| slice.key != key);
        self.sequences.all.remove(&key).is_some()
    }

    /// The operations of a run.
    pub fn of_run(&self, run: &RunId) -> Vec<SequenceKey> {
        let mut keys: Vec<_> = self
            .sequences
            .all
            .iter()
            .filter(|(_, sequence)| sequence.request.run == *run)
            .map(|(key, _)| *key)
            .collect();
        keys.sort_unstable();
        keys
    }

    /// One step: [`Self::begin`], [`Self::forward`] and [`Self::conclude`]. What simulations call that let its time pass
    /// afterwards.
    pub fn step(&mut self, now: f64) -> StepOutcome {
        let mut begun = self.begin(now);
        if begun.next == Next::Again {
            let forwarded = self.forward();
            let computed = self.conclude(forwarded, now);
            self.step_over();
            begun.events.extend(computed.events);
            begun.duration = computed.duration;
            begun.next = computed.next;
        }
        begun
    }

    /// The duration of the last step has passed: load reports say what it came to.
    pub fn step_over(&self) {
        self.board.step_ended();
        self.board.write(self.scheduler.load());
    }

    /// What the step that [`Self::begin`] chose consists of.
    pub fn planned(&self) -> StepKind {
        match (self.plan.decoding, self.plan.prompt_tokens()) {
            (0, _) => StepKind::Prefill,
            (_, 0) => StepKind::Decode,
            _ => StepKind::Mixed,
        }
    }

    fn next(&self) -> Next {
        if self.scheduler.has_work() {
            Next::Again
        } else if self.sequences.all.is_empty() {
            Next::Idle
        } else {
            Next::Wait
        }
    }

    fn resume(
        &mut self,
        key: SequenceKey,
        reservation: Option<Reservation>,
        present: usize,
        first_token: Option<u32>,
        now: f64,
    ) {
        let vocabulary = self.model.facts().shape.vocabulary;
        if let Some(token) = first_token.filter(|token| *token as usize >= vocabulary) {
            // Its blocks go with the reservation. Computing on with it would fail the whole batch.
            self.forget(key);
            let message = format!(
                "firstToken: id {token} is beyond the vocabulary of {vocabulary}: pair workers of one tokenizer"
            );
            self.early.push((
                key,
                EngineEvent::Failed {
                    class: FailureClass::Bug,
                    message,
                },
            ));
            self.board.write(self.scheduler.load());
            return;
        }
        let Some(sequence) = self.sequences.all.get_mut(&key) else {
            return;
        };
        let holds_memory = reservation.is_some();
        sequence.reservation = reservation;
        sequence.waits_since = now;
        if let Some(token) = first_token {
            sequence.history.push(token);
            sequence.generated += 1;
        }
        let total = sequence.history.len();
        let finish = first_token.and_then(|token| {
            sequence
                .request
                .stopping
                .finish(token, sequence.generated, &self.eos)
                .or((total >= self.max_context).then_some(Finish::Length))
        });
        if let Some(finish) = finish {
            let output_tokens = sequence.generated;
            self.early.push((
                key,
                EngineEvent::Finished {
                    finish,
                    output_tokens,
                    decode: 0.0,
                },
            ));
            self.forget(key);
        } else if holds_memory {
            self.scheduler.join(key, total, present);
        } else {
            self.scheduler.queue_held(key, total);
        }
        self.board.write(self.scheduler.load());
    }

    fn forget(&mut self, key: SequenceKey) {
        self.scheduler.remove(key);
        self.sequences.all.remove(&key);
    }

    fn fail(
        &mut self,
        key: SequenceKey,
        class: FailureClass,
        message: String,
        events: &mut Vec<(SequenceKey, EngineEvent)>,
    ) {
        self.forget(key);
        events.push((key, EngineEvent::Failed { class, message }));
    }
}

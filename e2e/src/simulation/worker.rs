//! One simulated worker: the production engine, its pool and its load reports, moved by a clock of the test's.
//!
//! As in production, commands are taken between steps, and what a step brings is true at its end.

use std::collections::VecDeque;
use std::sync::Arc;

use anyhow::{Context, Result};
use baton_placement::coefficients::WorkerCoefficients;
use baton_protocol::hash::HashKey;
use baton_protocol::wire;
use baton_worker::engine::scheduler::Limits;
use baton_worker::engine::{Admitted, Engine, EngineConfig, EngineEvent, EngineRequest, Next};
use baton_worker::kv::clock::ManualClock;
use baton_worker::kv::{Geometry, KvPool, PoolConfig, Reservation};
use baton_worker::model::simulated::{Settings, Simulated};
use baton_worker::model::{Model, SequenceKey};

/// Tokens of a block.
pub const BLOCK_SIZE: u32 = 16;
/// KV of one token; small, so that a pool of many blocks fits into a test.
pub const BYTES_PER_TOKEN: usize = 64;
/// Blocks of a pool: more than any run of the test uses at once.
pub const BLOCKS: usize = 16_384;
pub const MAX_SEQUENCES: u32 = 64;
/// Anything long beside a scenario.
const MEMORY: u64 = 1 << 30;

/// Something that a worker is told. It listens between two steps.
#[derive(Debug)]
pub enum Command {
    /// An operation of the run with this number.
    Submit {
        run: usize,
        request: Box<EngineRequest>,
    },
    /// KV of an operation is there.
    Attach {
        key: SequenceKey,
        reservation: Reservation,
        first_token: Option<u32>,
    },
}

/// Something that a worker says.
#[derive(Debug)]
pub enum Said {
    Admitted {
        run: usize,
        admitted: Admitted,
    },
    Event {
        key: SequenceKey,
        event: EngineEvent,
    },
}

/// One worker.
#[derive(Debug)]
pub struct SimulatedWorker {
    engine: Engine,
    clock: Arc<ManualClock>,
    inbox: VecDeque<Command>,
    step: Option<Step>,
}

/// The step under way.
#[derive(Debug)]
struct Step {
    begun: f64,
    ends: f64,
    events: Vec<(SequenceKey, EngineEvent)>,
    /// As it was when the step began; nothing changes before its end.
    report: wire::Load,
}

impl SimulatedWorker {
    /// `hidden` is how long its steps really take, give or take the model's noise. It begins with the guess `prior`.
    ///
    /// # Errors
    /// The model or the pool cannot be made.
    pub fn new(
        hidden: WorkerCoefficients,
        prior: WorkerCoefficients,
        seed: u64,
        tpot_objective: Option<f64>,
    ) -> Result<Self> {
        let mut settings = Settings::new(hidden, seed);
        settings.kv_bytes_per_token = BYTES_PER_TOKEN;
        let model = Simulated::new(settings)?;
        let identity = model.facts().identity(BLOCK_SIZE as usize);
        let config = PoolConfig {
            geometry: Geometry {
                block_size: BLOCK_SIZE as usize,
                bytes_per_token: BYTES_PER_TOKEN,
            },
            blocks: BLOCKS,
            kv_identity: identity.digest(),
            layout: model.facts().layout().tag(),
            hash_key: HashKey::from_bytes(&[7; 32]),
            event_capacity: PoolConfig::EVENT_CAPACITY,
        };
        let clock = Arc::new(ManualClock::default());
        let pool = KvPool::new(config, MEMORY, clock.clone())?;
        let engine = Engine::new(
            Box::new(model),
            pool,
            EngineConfig {
                limits: Limits {
                    max_sequences: MAX_SEQUENCES as usize,
                    max_batched_tokens: 2048,
                    max_waiting: 1024,
                },
                max_context: 131_072,
                tpot_objective,
                prior,
            },
            // Never asked: a simulated model says how long its steps take.
            Box::new(|| 0.0),
        );
        Ok(Self {
            engine,
            clock,
            inbox: VecDeque::new(),
            step: None,
        })
    }

    pub fn pool(&self) -> &KvPool {
        self.engine.pool()
    }

    /// What it has learnt of itself, as it publishes it.
    pub fn coefficients(&self) -> WorkerCoefficients {
        self.engine.coefficients()
    }

    pub fn tell(&mut self, command: Command) {
        self.inbox.push_back(command);
    }

    /// When its step ends; nothing while it idles.
    pub fn wakes(&self) -> Option<f64> {
        self.step.as_ref().map(|step| step.ends)
    }

    /// Its load report.
    pub fn report(&self, now: f64) -> wire::Load {
        match &self.step {
            None => self.engine.board().report(now, self.engine.pool(), false),
            Some(step) => {
                let mut report = step.report;
                let passed = now - step.begun;
                report.step_remaining_milliseconds =
                    (report.step_remaining_milliseconds - passed).max(0.0);
                report
            }
        }
    }

    /// Ends the step that is due, listens, and begins the next one.
    ///
    /// # Errors
    /// The engine refuses an operation: no scenario asks for more than there is.
    pub fn advance(&mut self, now: f64) -> Result<Vec<Said>> {
        let mut said = Vec::new();
        if let Some(step) = self.step.take_if(|step| step.ends <= now) {
            said.extend(step.events.into_iter().map(event));
        }
        if self.step.is_some() {
            return Ok(said);
        }
        // Whole milliseconds are enough for leases that last minutes.
        let passed = (now as u64).saturating_sub(self.pool().now());
        self.clock.advance(passed);
        while let Some(command) = self.inbox.pop_front() {
            match command {
                Command::Submit { run, request } => {
                    let admitted = self.engine.submit(*request, now).context("refused")?;
                    said.push(Said::Admitted { run, admitted });
                }
                Command::Attach {
                    key,
                    reservation,
                    first_token,
                } => {
                    self.engine.attach(key, reservation, first_token, now);
                }
            }
        }
        let begun = self.engine.begin(now);
        said.extend(begun.events.into_iter().map(event));
        if begun.next == Next::Again {
            let report = self.engine.board().report(now, self.engine.pool(), false);
            let forwarded = self.engine.forward();
            let computed = self.engine.conclude(forwarded, now);
            self.step = Some(Step {
                begun: now,
                ends: now + computed.duration,
                events: computed.events,
                report,
            });
        }
        Ok(said)
    }
}

fn event((key, event): (SequenceKey, EngineEvent)) -> Said {
    Said::Event { key, event }
}

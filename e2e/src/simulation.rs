//! Router and workers in simulated time: production engines, pools, hand-offs, placement and calibration, moved by events.
//!
//! What is not production is time itself: how long steps take (the Simulated model's constants), how long a link takes
//! ([`HiddenLink`]) and when requests come. The router's side is told none of these constants.
//!
//! - [`worker`]: one worker. [`router`]: what a router knows and learns. [`handoff`]: moving KV over the hidden link.

pub mod handoff;
pub mod router;
pub mod worker;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use anyhow::{Context, Result, bail};
use baton_placement::coefficients::WorkerCoefficients;
use baton_placement::estimate::Path;
use baton_placement::place::Plan;
use baton_placement::policy::{FirstToken, Mode};
use baton_placement::rng::Rng;
use baton_protocol::ids::{LeaseId, OperationId, RunId};
use baton_worker::engine::{EngineEvent, EngineRequest, PrefillTerms, RequestKind};
use baton_worker::kv::{CacheScope, Reservation};
use baton_worker::model::SequenceKey;
use baton_worker::sampling::{Sampling, Stopping};

pub use handoff::HiddenLink;
use handoff::{Handoffs, Moving};
use router::Router;
use worker::{BLOCK_SIZE, Command, Said, SimulatedWorker};

/// Workers report this often under load.
const REPORT_EVERY: f64 = 50.0;
/// Longer than any run: no lease ends by itself in these scenarios.
const LEASE_MILLISECONDS: u64 = 600_000;

/// One request to come.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Milliseconds.
    pub at: f64,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// `None`: as the policy says.
    pub mode: Option<Mode>,
}

/// What was estimated when a request was placed, and what came of it.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    pub path: Path,
    pub prompt_tokens: u32,
    /// Sequences that decoded where the prompt was computed, as the router knew.
    pub running: u32,
    /// Milliseconds to the first token: estimated, its upper bound, and in fact.
    pub mean: f64,
    pub upper: f64,
    pub actual: f64,
}

/// One run under way.
#[derive(Debug)]
pub(crate) struct Run {
    arrival: Arrival,
    came: f64,
    tokens: Vec<u32>,
    plan: Plan,
    mean: f64,
    upper: f64,
    running: u32,
    /// The first one that was sampled, wherever.
    first_token: Option<u32>,
    /// Of a remote run: the operation on the worker that decodes, and the blocks reserved there.
    receiving: Option<(SequenceKey, Reservation)>,
    moving: Option<Moving>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Step(usize),
    Moved(usize),
    Report,
    Arrive(usize),
}

/// Event times are compared as microseconds, so that they have an order.
type Due = Reverse<(u64, u64, What)>;

/// A fleet of one prefill worker and some decode workers.
#[derive(Debug)]
pub struct Simulation {
    now: f64,
    due: BinaryHeap<Due>,
    scheduled: u64,
    /// The first is the prefill worker.
    workers: Vec<SimulatedWorker>,
    /// Operations on workers, by worker and key.
    operations: HashMap<(usize, SequenceKey), usize>,
    runs: Vec<Option<Run>>,
    arrivals: Vec<Arrival>,
    outcomes: Vec<Option<Outcome>>,
    router: Router,
    handoffs: Handoffs,
    first_token: FirstToken,
    rng: Rng,
    open: usize,
}

/// What a fleet is like, and what it is believed to be like.
#[derive(Clone, Debug)]
pub struct Setting {
    pub hidden: WorkerCoefficients,
    pub believed: WorkerCoefficients,
    pub link: HiddenLink,
    pub decode_workers: usize,
    pub first_token: FirstToken,
    pub seed: u64,
}

impl Simulation {
    /// # Errors
    /// A worker cannot be made.
    pub async fn new(setting: &Setting) -> Result<Self> {
        let workers = (0..=setting.decode_workers as u64)
            .map(|index| {
                let seed = setting.seed * 100 + index;
                SimulatedWorker::new(setting.hidden, setting.believed, seed, None)
            })
            .collect::<Result<Vec<_>>>()?;
        let handoffs = Handoffs::new(setting.link, &workers[0], setting.seed).await?;
        Ok(Self {
            now: 0.0,
            due: BinaryHeap::new(),
            scheduled: 0,
            router: Router::new(workers.len(), setting.believed, setting.first_token),
            workers,
            operations: HashMap::new(),
            runs: Vec::new(),
            arrivals: Vec::new(),
            outcomes: Vec::new(),
            handoffs,
            first_token: setting.first_token,
            rng: Rng::new(setting.seed),
            open: 0,
        })
    }

    /// Runs until every request has been answered in whole; their outcomes, in the order of the arrivals.
    ///
    /// # Errors
    /// Something is refused or cannot be placed: no scenario asks for more than there is.
    pub async fn run(&mut self, arrivals: &[Arrival]) -> Result<Vec<Outcome>> {
        let first = self.arrivals.len();
        for arrival in arrivals {
            let run = self.arrivals.len();
            self.arrivals.push(*arrival);
            self.runs.push(None);
            self.outcomes.push(None);
            self.schedule(self.now + arrival.at, What::Arrive(run));
        }
        self.open = arrivals.len();
        self.schedule(self.now, What::Report);
        while let Some(Reverse((at, _, what))) = self.due.pop() {
            self.now = self.now.max(at as f64 / 1e3);
            match what {
                What::Arrive(run) => self.arrive(run)?,
                What::Step(worker) => self.advance(worker)?,
                What::Moved(run) => self.moved(run).await?,
                What::Report => self.report(),
            }
            if self.open == 0 {
                break;
            }
        }
        self.due.clear();
        self.outcomes[first..]
            .iter()
            .map(|outcome| outcome.context("a run has no first token"))
            .collect()
    }

    /// What the router's side believes of the link now.
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// Every worker's pool holds nothing but its cache.
    ///
    /// # Errors
    /// Something is left.
    pub fn check_empty(&self) -> Result<()> {
        for (index, worker) in self.workers.iter().enumerate() {
            let counts = worker.pool().counts();
            if counts.active + counts.leased + counts.quarantined + counts.leaked > 0 {
                bail!("worker {index} still holds {counts:?}");
            }
        }
        Ok(())
    }

    fn schedule(&mut self, at: f64, what: What) {
        self.scheduled += 1;
        // Rounded up: an event never comes before what it waits for.
        let micros = (at * 1e3).ceil() as u64;
        self.due.push(Reverse((micros, self.scheduled, what)));
    }

    fn report(&mut self) {
        for (index, worker) in self.workers.iter().enumerate() {
            self.router.reported(
                index,
                &worker.report(self.now),
                worker.coefficients(),
                self.now,
            );
        }
        self.schedule(self.now + REPORT_EVERY, What::Report);
    }

    fn arrive(&mut self, number: usize) -> Result<()> {
        let arrival = self.arrivals[number];
        let tokens: Vec<u32> = (0..arrival.prompt_tokens)
            .map(|_| self.rng.below(256) as u32)
            .collect();
        let decision = self.router.place(&arrival, self.now, &mut self.rng)?;
        let chosen = *decision.chosen().context("nothing was chosen")?;
        let run = Run {
            arrival,
            came: self.now,
            tokens,
            plan: chosen.plan,
            mean: chosen.mean,
            upper: chosen.upper,
            running: chosen.inputs.compute.running_sequences,
            first_token: None,
            receiving: None,
            moving: None,
        };
        let kind = match run.plan {
            Plan::Local { .. } => RequestKind::Generate,
            Plan::Remote { .. } => RequestKind::Receive,
        };
        self.router.dispatched(number, &run.plan, &arrival);
        self.submit(number, run.plan.decode(), &run, "decode", kind);
        let worker = run.plan.decode();
        self.runs[number] = Some(run);
        self.schedule(self.now, What::Step(worker));
        Ok(())
    }

    fn submit(&mut self, number: usize, worker: usize, run: &Run, step: &str, kind: RequestKind) {
        let id = RunId(format!("r-{number}"));
        let request = EngineRequest {
            operation: OperationId::new(&id, 1, step),
            run: id,
            priority: 0,
            deadline: None,
            scope: CacheScope::default(),
            tokens: run.tokens.clone(),
            generated: 0,
            sampling: Sampling::greedy(),
            stopping: Stopping {
                max_tokens: run.arrival.output_tokens,
                min_tokens: 0,
                ignore_eos: true,
                stop_token_ids: Vec::new(),
            },
            kind,
        };
        self.workers[worker].tell(Command::Submit {
            run: number,
            request: Box::new(request),
        });
    }

    fn advance(&mut self, worker: usize) -> Result<()> {
        for said in self.workers[worker].advance(self.now)? {
            match said {
                Said::Admitted { run, admitted } => {
                    self.operations.insert((worker, admitted.key), run);
                    self.router
                        .admitted(run, worker, admitted.admission.load_sequence);
                    if let Some(reservation) = admitted.reservation {
                        self.reserved(run, admitted.key, reservation)?;
                    }
                }
                Said::Event { key, event } => {
                    let run = *self
                        .operations
                        .get(&(worker, key))
                        .context("an event of nobody")?;
                    if event.is_last() {
                        self.operations.remove(&(worker, key));
                    }
                    self.happened(worker, run, event)?;
                }
            }
        }
        if let Some(at) = self.workers[worker].wakes() {
            self.schedule(at, What::Step(worker));
        }
        Ok(())
    }

    /// The decode worker has made room: the prefill worker may begin.
    fn reserved(
        &mut self,
        number: usize,
        key: SequenceKey,
        reservation: Reservation,
    ) -> Result<()> {
        let mut run = self.runs[number].take().context("no such run")?;
        let Plan::Remote { prefill, .. } = run.plan else {
            bail!("a local run waits for a hand-off");
        };
        let mut lease = [0; 16];
        lease[..8].copy_from_slice(&(number as u64).to_le_bytes());
        let terms = PrefillTerms {
            lease: LeaseId(lease),
            lease_duration: LEASE_MILLISECONDS,
            skip_blocks: reservation.completed_blocks() as u32,
            sample_first: self.first_token == FirstToken::Prefill,
        };
        run.receiving = Some((key, reservation));
        self.submit(
            number,
            prefill,
            &run,
            "prefill",
            RequestKind::Prefill(terms),
        );
        self.runs[number] = Some(run);
        self.schedule(self.now, What::Step(prefill));
        Ok(())
    }

    fn happened(&mut self, worker: usize, number: usize, event: EngineEvent) -> Result<()> {
        let now = self.now;
        let run = self.runs[number]
            .as_mut()
            .context("an event after the end")?;
        match event {
            EngineEvent::Token { id, .. } if run.first_token.is_none() => {
                run.first_token = Some(id);
                let actual = now - run.came;
                self.answered(number, actual)?;
            }
            EngineEvent::LeaseOpened {
                lease,
                opened,
                tokens,
                ..
            } => {
                run.moving = Some(self.handoffs.begin(lease, opened.generation, tokens, now));
            }
            EngineEvent::BlocksPublished { blocks } => {
                if let Some(moving) = &mut run.moving {
                    self.handoffs.published(moving, blocks, now);
                }
            }
            EngineEvent::Sealed { blocks, .. } => {
                if let Some(moving) = &mut run.moving {
                    let ends = self.handoffs.sealed(moving, blocks, now);
                    self.schedule(ends, What::Moved(number));
                }
                self.router.prefilled(number, worker);
            }
            EngineEvent::Finished { .. } => {
                self.router.ended(number);
                self.runs[number] = None;
                self.open -= 1;
            }
            EngineEvent::Failed { message, .. } => bail!("run {number} failed: {message}"),
            _ => {}
        }
        Ok(())
    }

    fn answered(&mut self, number: usize, actual: f64) -> Result<()> {
        let run = self.runs[number].as_ref().context("no such run")?;
        let path = if run.plan.is_remote() {
            Path::Remote
        } else {
            Path::Local
        };
        let outcome = Outcome {
            path,
            prompt_tokens: run.arrival.prompt_tokens,
            running: run.running,
            mean: run.mean,
            upper: run.upper,
            actual,
        };
        self.router.answered(&outcome);
        self.outcomes[number] = Some(outcome);
        Ok(())
    }

    /// The last block is there: it is verified by the production code and decoding begins.
    async fn moved(&mut self, number: usize) -> Result<()> {
        let mut run = self.runs[number].take().context("moved after the end")?;
        let (key, reservation) = run.receiving.take().context("nothing was reserved")?;
        let moving = run.moving.take().context("nothing was moved")?;
        let kept = match self.first_token {
            FirstToken::Prefill => run.tokens.len(),
            FirstToken::Decode => run.tokens.len() - 1,
        };
        let reservation = self
            .handoffs
            .take(number, &moving, &run.tokens[..kept], reservation)
            .await?;
        self.router.moved(&moving);
        let worker = run.plan.decode();
        let first_token = match self.first_token {
            FirstToken::Prefill => run.first_token,
            FirstToken::Decode => None,
        };
        self.workers[worker].tell(Command::Attach {
            key,
            reservation,
            first_token,
        });
        self.runs[number] = Some(run);
        self.schedule(self.now, What::Step(worker));
        Ok(())
    }
}

/// Blocks that hold so many tokens.
pub(crate) fn blocks_for(tokens: u32) -> u32 {
    tokens.div_ceil(BLOCK_SIZE)
}

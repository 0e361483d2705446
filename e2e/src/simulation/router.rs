//! What a router knows of its fleet and learns about it, in simulated time: production placement, calibration and reckoning.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::Result;
use baton_placement::calibration::{LinkCalibrator, link_prior};
use baton_placement::coefficients::{
    CoefficientSet, LinkClass, LinkName, WorkerClass, WorkerCoefficients,
};
use baton_placement::cost::ChunkRule;
use baton_placement::estimate::{EstimateTracker, Path};
use baton_placement::fleet::{
    Fleet, FleetBuilder, OwnDispatches, ReportedLoad, WorkerEntry, WorkerState, domain_key,
};
use baton_placement::place::{Decision, Plan, Request, place};
use baton_placement::policy::{Assurance, FirstToken, Overrides, Policy, Pooling};
use baton_placement::rng::Rng;
use baton_protocol::ids::{Incarnation, WorkerId};
use baton_protocol::wire;
use baton_router::fleet::own::{OwnLedger, Ticket};

use super::handoff::Moving;
use super::worker::{BLOCK_SIZE, BYTES_PER_TOKEN, MAX_SEQUENCES};
use super::{Arrival, Outcome, blocks_for};

const TRANSPORT: &str = "Tcp";
/// No worker restarts in simulated time.
const INCARNATION: Incarnation = Incarnation(1);

fn name(worker: usize) -> WorkerId {
    worker.to_string().into()
}

/// What is known of one worker.
#[derive(Clone, Copy, Debug)]
struct Known {
    coefficients: WorkerCoefficients,
    load: wire::Load,
    at: f64,
}

/// The router's side.
#[derive(Debug)]
pub struct Router {
    policy: Policy,
    workers: Vec<Known>,
    own: OwnLedger,
    /// By run: what each of its workers was sent.
    tickets: HashMap<usize, Vec<(usize, Ticket)>>,
    link: LinkCalibrator,
    tracker: EstimateTracker,
    version: u64,
}

impl Router {
    pub(crate) fn new(
        workers: usize,
        believed: WorkerCoefficients,
        first_token: FirstToken,
    ) -> Self {
        let mut policy = Policy::new("simulated", "simulated", &["prefill"], &["decode"]);
        policy.pooling = Pooling::Strict;
        policy.overrides = Overrides::Allowed;
        policy.first_token = first_token;
        let known = Known {
            coefficients: believed,
            load: wire::Load::default(),
            at: 0.0,
        };
        Self {
            policy,
            workers: vec![known; workers],
            own: OwnLedger::default(),
            tickets: HashMap::new(),
            link: LinkCalibrator::new(link_prior(TRANSPORT)),
            tracker: EstimateTracker::new(),
            version: 0,
        }
    }

    /// Share of recent runs within their upper bound.
    pub fn coverage(&self, path: Path) -> Option<f64> {
        self.tracker.coverage(path)
    }

    pub(crate) fn reported(
        &mut self,
        worker: usize,
        load: &wire::Load,
        coefficients: WorkerCoefficients,
        now: f64,
    ) {
        self.workers[worker] = Known {
            coefficients,
            load: *load,
            at: now,
        };
        self.own
            .reported(&name(worker), INCARNATION, load.load_sequence);
    }

    pub(crate) fn place(&mut self, arrival: &Arrival, now: f64, rng: &mut Rng) -> Result<Decision> {
        let fleet = self.snapshot()?;
        let request = Request {
            tokens: arrival.prompt_tokens,
            max_output_tokens: arrival.output_tokens,
            expected_output_tokens: f64::from(arrival.output_tokens),
            mode: arrival.mode,
            ..Request::default()
        };
        Ok(place(&fleet, &request, &self.policy, now, rng))
    }

    fn snapshot(&mut self) -> Result<Fleet> {
        self.version += 1;
        let host = vec![Some("here".to_owned())];
        let set = Arc::new(CoefficientSet {
            workers: (self.workers.iter().enumerate())
                .map(|(index, known)| WorkerClass {
                    name: index.to_string(),
                    coefficients: known.coefficients,
                })
                .collect(),
            links: vec![LinkClass {
                name: LinkName {
                    source: domain_key(&host),
                    target: domain_key(&host),
                    transport: TRANSPORT.to_owned(),
                },
                coefficients: self.link.coefficients(),
            }],
            paths: self.tracker.factors(),
        });
        let digest = set.digest();
        let mut builder = FleetBuilder::new(self.version, &["host".to_owned()], set, &digest);
        for (index, known) in self.workers.iter().enumerate() {
            let blocks = known.load.blocks.unwrap_or_default();
            builder.worker(WorkerEntry {
                id: name(index),
                incarnation: INCARNATION,
                slot: index as u32,
                pool: if index == 0 { "prefill" } else { "decode" }.to_owned(),
                pool_role: None,
                state: WorkerState::Ready,
                can_prefill: true,
                can_decode: true,
                hands_over: Assurance::Verified,
                lease: None,
                kv_identity: "one".to_owned(),
                compatibility: "one".to_owned(),
                adapters: Vec::new(),
                domain: host.clone(),
                class: index.to_string(),
                chunks: ChunkRule::Bounded,
                transports: vec![TRANSPORT.to_owned()],
                load: ReportedLoad {
                    at: known.at,
                    queued_tokens: known.load.queued_tokens,
                    queued_sequences: known.load.queued_sequences,
                    running_sequences: known.load.running_sequences,
                    context_tokens: known.load.context_tokens,
                    step_remaining: known.load.step_remaining_milliseconds,
                    free_blocks: blocks.free + blocks.cached,
                },
                own: self.own.sum(&name(index)),
                indexed_at: known.at,
                total_blocks: blocks.total,
                block_size: BLOCK_SIZE,
                bytes_per_token: BYTES_PER_TOKEN as u64,
                max_sequences: MAX_SEQUENCES,
            });
        }
        builder.compatible("one", "one");
        builder.link(&host, &host, TRANSPORT, 0);
        Ok(builder.build()?)
    }

    /// As the router's dispatch counts what it sends.
    pub(crate) fn dispatched(&mut self, run: usize, plan: &Plan, arrival: &Arrival) {
        let compute = OwnDispatches {
            queued_tokens: u64::from(arrival.prompt_tokens),
            queued_sequences: 1,
            ..OwnDispatches::default()
        };
        let generate = OwnDispatches {
            sequences: 1,
            context_tokens: u64::from(arrival.prompt_tokens),
            blocks: blocks_for(arrival.prompt_tokens),
            ..OwnDispatches::default()
        };
        let list = match *plan {
            Plan::Local { worker } => {
                let whole = OwnDispatches {
                    queued_tokens: compute.queued_tokens,
                    queued_sequences: 1,
                    ..generate
                };
                vec![(worker, whole)]
            }
            Plan::Remote { prefill, decode } => vec![(prefill, compute), (decode, generate)],
        };
        let tickets = list
            .into_iter()
            .map(|(worker, dispatch)| {
                (
                    worker,
                    self.own.dispatch(&name(worker), INCARNATION, dispatch),
                )
            })
            .collect();
        self.tickets.insert(run, tickets);
    }

    pub(crate) fn admitted(&mut self, run: usize, worker: usize, load_sequence: u64) {
        for (at, ticket) in self.tickets.get(&run).into_iter().flatten() {
            if *at == worker {
                self.own.admitted(*ticket, load_sequence);
            }
        }
    }

    /// A worker's part of a run is over.
    pub(crate) fn prefilled(&mut self, run: usize, worker: usize) {
        if let Some(tickets) = self.tickets.get_mut(&run) {
            for (_, ticket) in tickets.extract_if(.., |(at, _)| *at == worker) {
                self.own.ended(ticket);
            }
        }
    }

    pub(crate) fn ended(&mut self, run: usize) {
        for (_, ticket) in self.tickets.remove(&run).unwrap_or_default() {
            self.own.ended(ticket);
        }
    }

    pub(crate) fn moved(&mut self, moving: &Moving) {
        self.link
            .observe(moving.bytes(), moving.blocks(), moving.busy);
        self.link.observe_synchronization(moving.synchronization);
    }

    pub(crate) fn answered(&mut self, outcome: &Outcome) {
        self.tracker.observe(
            outcome.path,
            outcome.running,
            outcome.mean,
            outcome.upper,
            outcome.actual,
        );
    }
}

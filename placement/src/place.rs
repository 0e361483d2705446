//! The decision: where one request's prefill and decode run. Pure: fleet, request, policy, time and chance in, decision out.
//!
//! In the order in which it happens: `place::gather` filters workers and reads what is known of them, `place::evaluate` turns
//! that into costs, `place::search` finds the cheapest pairs without trying all, `place::choose` applies the mode and the
//! margin, `place::explain` says it in a sentence. Replay enters at `evaluate` with the inputs of a record.

pub(crate) mod choose;
pub(crate) mod evaluate;
pub(crate) mod explain;
mod gather;
pub(crate) mod inputs;
mod request;
mod search;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use evaluate::Terms;
pub use inputs::{ComputeInputs, DecodeInputs, Inputs, LinkInputs};
pub use request::{Facts, Request};

use crate::fleet::{Fleet, WorkerIndex};
use crate::policy::{Mode, Overrides, Policy};
use crate::rng::Rng;
use evaluate::Rules;

/// Up to so many candidates are all recorded.
pub const RECORD_ALL: usize = 64;
/// Of more than [`RECORD_ALL`], the best so many are recorded.
pub const RECORD_BEST: usize = 32;
/// From so many routers on, a decision looks at a sample of the workers.
pub const SAMPLE_FROM_ROUTERS: u32 = 4;

/// What a request would use. Workers by position in the fleet that was placed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Plan {
    /// The whole request on one worker.
    Local { worker: WorkerIndex },
    /// Prefill on one, the KV handed to the other.
    Remote {
        prefill: WorkerIndex,
        decode: WorkerIndex,
    },
}

impl Plan {
    /// The worker that generates.
    pub fn decode(&self) -> WorkerIndex {
        match *self {
            Plan::Local { worker } => worker,
            Plan::Remote { decode, .. } => decode,
        }
    }

    pub fn is_remote(&self) -> bool {
        matches!(self, Plan::Remote { .. })
    }
}

/// A plan with what was read about it and what it would cost, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    pub plan: Plan,
    pub inputs: Inputs,
    pub terms: Terms,
    /// Estimated time to the first token, and the bound that 95 of 100 stay below.
    pub mean: f64,
    pub upper: f64,
    /// The weighted sum that is minimised (J).
    pub cost: f64,
}

/// What is to be done now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    Run(Plan),
    /// Place again later; the request may wait so long in all.
    Wait {
        milliseconds: f64,
    },
    /// 503, with this `Retry-After`.
    Reject {
        retry_after_seconds: u32,
    },
}

/// Why, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// Conditional: no remote plan is cheaper.
    LocalCheaper,
    /// Conditional: remote is cheaper by more than the margin.
    RemoteCheaper,
    /// Conditional: remote is cheaper, but by less than the margin.
    WithinMargin,
    /// Conditional, temperature above zero: drawn among candidates of similar cost.
    SharedByChance,
    /// No worker can take the whole request; a pair can.
    OnlyRemote,
    /// One token is asked for: there would be nothing to hand over for.
    OneToken,
    /// It has to stay on one worker: several choices of one prompt, or a remote plan that was given up.
    NotDisaggregatable,
    /// The policy names no prefill pool.
    NoPrefillPool,
    ModeAggregated,
    ModeDisaggregated,
    ThresholdBelow,
    ThresholdAbove,
    /// Dynamo's rule: short and mostly cached, so local.
    DynamoBypass,
    /// Dynamo's rule: prefill workers are busy, so local.
    DynamoBusy,
    /// Dynamo's rule: otherwise remote.
    DynamoRemote,
    /// Remote was wanted or possible, and there was no pair for it; `onNoPrefill` says what then.
    NoPrefillWorker,
    /// The same, and too many run locally for that reason already.
    NoPrefillBudget,
    NoEligibleWorker,
    /// Workers are there, and every one has its fill of waiting requests.
    QueueFull,
    /// Workers are there that could hold it, and every one has its KV blocks in use now.
    KvFull,
    /// No worker of the policy, whatever its state, has KV blocks for the prompt: no other moment makes it smaller.
    KvCapacity,
}

impl Reason {
    /// As it stands in records and metric labels.
    pub fn word(&self) -> String {
        format!("{self:?}")
    }
}

/// Why a worker or a pair was not a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Filter {
    /// Workers.
    Draining,
    Lost,
    /// Failed this run before.
    Excluded,
    QueueFull,
    Adapter,
    /// Its KV never holds the prompt and a token.
    KvCapacity,
    /// Its KV does not hold the prompt now.
    KvFull,
    CannotPrefill,
    CannotDecode,
    /// Not in the sample that one of several routers looks at.
    NotSampled,
    /// Pairs.
    Incompatible,
    TooFar,
    BreakerOpen,
    NoTransport,
    /// The worker that generates is expected to fetch the KV when its lease is over.
    LeaseTooShort,
    /// Its KV is moved by its engine's own connector, and the policy requires that Baton checks every block.
    NotVerified,
    /// Pairs worse than the best that can be recorded: by a bound, or evaluated on the way.
    ProvedWorse,
    /// Candidates beyond what is recorded, local ones included.
    NotRecorded,
}

/// Counts by reason.
pub type Filtered = BTreeMap<Filter, u64>;

/// A decision with all that explains it.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    pub seed: u64,
    pub now: f64,
    pub mode: Mode,
    /// What the request asked for, whether the policy allows it or not.
    pub asked: Option<Mode>,
    pub facts: Facts,
    /// Age of the oldest prefix index that was read, in milliseconds.
    pub index_age: f64,
    /// In fleet order, local ones first. Ties go to the first.
    pub candidates: Vec<Candidate>,
    pub filtered: Filtered,
    pub chosen: Option<usize>,
    /// The next best.
    pub runner_up: Option<usize>,
    pub outcome: Outcome,
    pub reason: Reason,
    /// One sentence with the numbers that decided it.
    pub explanation: String,
}

impl Decision {
    pub fn chosen(&self) -> Option<&Candidate> {
        self.chosen.and_then(|index| self.candidates.get(index))
    }

    /// The kind of transport that the chosen remote plan was costed with.
    pub fn transport<'a>(&self, fleet: &'a Fleet) -> Option<&'a str> {
        let link = self.chosen()?.inputs.link?;
        Some(fleet.links.transport_name(link.transport))
    }
}

/// Places one request. Deterministic at temperature 0 with fewer than four routers; otherwise given `rng`.
pub fn place(
    fleet: &Fleet,
    request: &Request,
    policy: &Policy,
    now: f64,
    rng: &mut Rng,
) -> Decision {
    let mode = match (request.mode, policy.overrides) {
        (Some(asked), Overrides::Allowed) => asked,
        _ => policy.mode,
    };
    place_in_mode(fleet, request, policy, mode, now, rng.next_seed())
}

fn place_in_mode(
    fleet: &Fleet,
    request: &Request,
    policy: &Policy,
    mode: Mode,
    now: f64,
    seed: u64,
) -> Decision {
    let rules = Rules::new(policy);
    let mut gathered = gather::gather(fleet, request, policy, &rules, now, seed);
    let candidates = search::candidates(fleet, policy, &rules, &mut gathered);
    let facts = gathered.facts;
    let mut filtered = gathered.filtered;
    let candidates = choose::reduce(candidates, &rules, mode, &mut filtered);
    let choice = choose::choose(&candidates, &facts, policy, &rules, mode, &filtered, seed);
    let explanation = explain::sentence(
        &choice,
        &candidates,
        &facts,
        policy,
        &rules,
        mode,
        &filtered,
        &fleet.workers.id,
    );
    Decision {
        seed,
        now,
        mode,
        asked: request.mode,
        facts,
        index_age: gathered.index_age,
        candidates,
        filtered,
        chosen: choice.chosen,
        runner_up: choice.runner_up,
        outcome: choice.outcome,
        reason: choice.reason,
        explanation,
    }
}

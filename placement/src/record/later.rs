//! Decisions of a run after its first: each attempt was placed by itself, on the fleet of its own moment.

use baton_protocol::ids::RunId;
use serde::{Deserialize, Serialize};

use super::{DecisionRecord, PolicyName, RecordHead, RecordedCandidate, RecordedInput};
use crate::fleet::Fleet;
use crate::place::{Decision, Filtered, Reason};

/// One of them, with all that a replay needs besides what the record says of the run. Fields mean what they mean in the record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LaterDecision {
    /// The attempt that it was made for, counted from one as in `states`. Where no plan was chosen the attempt never began.
    pub attempt: u32,
    pub now: f64,
    pub random_seed: u64,
    pub coefficients: String,
    pub fleet_version: u64,
    pub index_age_milliseconds: f64,
    pub kv_identity: String,
    pub mode: String,
    /// Tokens that were sent by then count as the prompt's.
    pub input: RecordedInput,
    pub candidates: Vec<RecordedCandidate>,
    pub filtered: Filtered,
    pub chosen: Option<usize>,
    pub runner_up: Option<usize>,
    pub reason: Reason,
    pub explanation: String,
}

impl LaterDecision {
    /// The candidate that was taken.
    pub fn chosen(&self) -> Option<&RecordedCandidate> {
        self.chosen.and_then(|index| self.candidates.get(index))
    }
}

impl DecisionRecord {
    /// Adds the decision of a later attempt, made on this fleet.
    pub fn decided_later(&mut self, attempt: u32, decision: &Decision, fleet: &Fleet) {
        // What a record says of its run is the same for all of its decisions.
        let head = RecordHead {
            run: RunId::from(""),
            request_id: String::new(),
            time: String::new(),
            policy: PolicyName {
                name: String::new(),
                generation: 0,
                digest: String::new(),
            },
            model: String::new(),
            prefix_fingerprint: self.input.prefix_fingerprint.clone(),
            credit: self.input.credit,
            unsplittable: self.input.unsplittable.clone(),
        };
        let mut made = Self::new(head, decision, fleet);
        self.pools.append(&mut made.pools);
        self.later_decisions.push(LaterDecision {
            attempt,
            now: made.now,
            random_seed: made.random_seed,
            coefficients: made.coefficients,
            fleet_version: made.fleet_version,
            index_age_milliseconds: made.index_age_milliseconds,
            kv_identity: made.kv_identity,
            mode: made.mode,
            input: made.input,
            candidates: made.candidates,
            filtered: made.filtered,
            chosen: made.chosen,
            runner_up: made.runner_up,
            reason: made.reason,
            explanation: made.explanation,
        });
    }

    /// A record for each later decision, as if it had been the run's only one: what replay and what-if take.
    pub fn later_records(&self) -> impl Iterator<Item = Self> + '_ {
        self.later_decisions.iter().map(|later| Self {
            now: later.now,
            random_seed: later.random_seed,
            coefficients: later.coefficients.clone(),
            fleet_version: later.fleet_version,
            index_age_milliseconds: later.index_age_milliseconds,
            kv_identity: later.kv_identity.clone(),
            mode: later.mode.clone(),
            input: later.input.clone(),
            candidates: later.candidates.clone(),
            filtered: later.filtered.clone(),
            chosen: later.chosen,
            runner_up: later.runner_up,
            reason: later.reason,
            explanation: later.explanation.clone(),
            shadow: None,
            later_decisions: Vec::new(),
            ..self.clone()
        })
    }
}

//! Making a record from a decision, and a decision's candidates from a record.

use std::collections::BTreeMap;

use baton_protocol::ids::{RunId, WorkerId};

use super::{
    CachedTokens, Credit, DecisionRecord, Kind, PolicyName, RecordedCandidate, RecordedInput,
    RecordedInputs, SCHEMA,
};
use crate::fleet::Fleet;
use crate::place::{Candidate, Decision, Facts, Inputs, LinkInputs, Plan};

/// What a record says that a decision does not know.
#[derive(Clone, Debug)]
pub struct RecordHead {
    pub run: RunId,
    pub request_id: String,
    /// RFC 3339 with microseconds.
    pub time: String,
    pub policy: PolicyName,
    pub model: String,
    /// The first block hash of the prompt, or empty.
    pub prefix_fingerprint: String,
    /// Of a request that an engine tokenises.
    pub credit: Option<Credit>,
    /// The field for which the request stays on one worker.
    pub unsplittable: Option<String>,
}

impl DecisionRecord {
    /// The record of a decision that was made on this fleet. States, actual and outcome are filled later.
    pub fn new(head: RecordHead, decision: &Decision, fleet: &Fleet) -> Self {
        let kv_identity = decision
            .chosen()
            .map(|chosen| fleet.workers.kv_identity[chosen.plan.decode()].clone())
            .unwrap_or_default();
        let facts = &decision.facts;
        Self {
            schema: SCHEMA.to_owned(),
            run: head.run,
            request_id: head.request_id,
            time: head.time,
            now: decision.now,
            random_seed: decision.seed,
            coefficients: fleet.coefficients_digest.to_string(),
            policy: head.policy,
            fleet_version: fleet.version,
            index_age_milliseconds: decision.index_age,
            model: head.model,
            kv_identity,
            mode: decision.mode.word().to_owned(),
            mode_asked: decision.asked.map(|mode| mode.word().to_owned()),
            levels: fleet.levels.to_vec(),
            pools: pools(decision, fleet),
            input: RecordedInput {
                tokens: facts.tokens,
                prefix_fingerprint: head.prefix_fingerprint,
                max_output_tokens: facts.max_output_tokens,
                expected_output_tokens: facts.expected_output_tokens,
                local_without_prefill: facts.local_without_prefill,
                waited_milliseconds: facts.waited_milliseconds,
                local_workers: facts.local_workers,
                prefill_pools: facts.prefill_pools,
                whole: facts.whole,
                too_large: facts.too_large,
                credit: head.credit,
                unsplittable: head.unsplittable,
            },
            candidates: decision
                .candidates
                .iter()
                .map(|candidate| recorded(candidate, fleet))
                .collect(),
            filtered: decision.filtered.clone(),
            chosen: decision.chosen,
            runner_up: decision.runner_up,
            reason: decision.reason,
            explanation: decision.explanation.clone(),
            shadow: None,
            states: Vec::new(),
            actual: None,
            assurance: None,
            fallback: None,
            outcome: None,
            later_decisions: Vec::new(),
            more: BTreeMap::new(),
        }
    }

    /// The candidate that was taken.
    pub fn chosen(&self) -> Option<&RecordedCandidate> {
        self.chosen.and_then(|index| self.candidates.get(index))
    }

    pub(crate) fn facts(&self) -> Facts {
        Facts {
            tokens: self.input.tokens,
            max_output_tokens: self.input.max_output_tokens,
            expected_output_tokens: self.input.expected_output_tokens,
            local_without_prefill: self.input.local_without_prefill,
            waited_milliseconds: self.input.waited_milliseconds,
            local_workers: self.input.local_workers,
            prefill_pools: self.input.prefill_pools,
            whole: self.input.whole,
            too_large: self.input.too_large,
        }
    }
}

fn pools(decision: &Decision, fleet: &Fleet) -> BTreeMap<WorkerId, String> {
    let mut pools = BTreeMap::new();
    for candidate in &decision.candidates {
        let prefill = match candidate.plan {
            Plan::Local { .. } => None,
            Plan::Remote { prefill, .. } => Some(prefill),
        };
        for worker in prefill.into_iter().chain([candidate.plan.decode()]) {
            let pool = &fleet.workers.pools[fleet.workers.pool[worker] as usize];
            pools.insert(fleet.workers.id[worker].clone(), pool.clone());
        }
    }
    pools
}

fn recorded(candidate: &Candidate, fleet: &Fleet) -> RecordedCandidate {
    let id = |worker: usize| fleet.workers.id[worker].clone();
    let (kind, prefill, decode) = match candidate.plan {
        Plan::Local { worker } => (Kind::Local, None, id(worker)),
        Plan::Remote { prefill, decode } => (Kind::Remote, Some(id(prefill)), id(decode)),
    };
    let inputs = &candidate.inputs;
    let link = inputs.link.as_ref();
    RecordedCandidate {
        kind,
        prefill,
        decode,
        cached_tokens: CachedTokens {
            prefill: inputs.compute.cached_tokens,
            decode: inputs.decode.cached_tokens,
        },
        inputs: RecordedInputs {
            compute: inputs.compute,
            decode: inputs.decode,
            missing_bytes: link.map_or(0, |link| link.missing_bytes),
            missing_blocks: link.map_or(0, |link| link.missing_blocks),
            promised_bytes: link.map_or(0, |link| link.promised_bytes),
            level: link.map(|link| fleet.level_name(link.level as usize).to_owned()),
            link: link.map(|link| link.link),
            transport: link.map(|link| fleet.links.transport_name(link.transport).to_owned()),
            block_size: link.map_or(0, |link| link.block_size),
            bytes_per_block: link.map_or(0, |link| link.bytes_per_block),
        },
        terms: candidate.terms,
        mean: candidate.mean,
        upper: candidate.upper,
        cost: candidate.cost,
    }
}

impl RecordedCandidate {
    /// The inputs as `place` had them. Levels and transports stay names here: no cost depends on their positions.
    pub(crate) fn inputs(&self) -> Inputs {
        let mut compute = self.inputs.compute;
        compute.cached_tokens = self.cached_tokens.prefill;
        let mut decode = self.inputs.decode;
        decode.cached_tokens = self.cached_tokens.decode;
        let link = self.inputs.link.map(|link| LinkInputs {
            level: 0,
            link,
            transport: 0,
            missing_bytes: self.inputs.missing_bytes,
            missing_blocks: self.inputs.missing_blocks,
            promised_bytes: self.inputs.promised_bytes,
            block_size: self.inputs.block_size,
            bytes_per_block: self.inputs.bytes_per_block,
        });
        Inputs {
            compute,
            decode,
            link,
        }
    }

    /// The plan over a table of worker names that grows as it meets new ones.
    pub(crate) fn plan(&self, names: &mut Vec<WorkerId>) -> Plan {
        let mut position = |id: &WorkerId| {
            names
                .iter()
                .position(|known| known == id)
                .unwrap_or_else(|| {
                    names.push(id.clone());
                    names.len() - 1
                })
        };
        match &self.prefill {
            Some(prefill) if self.kind == Kind::Remote => Plan::Remote {
                prefill: position(prefill),
                decode: position(&self.decode),
            },
            _ => Plan::Local {
                worker: position(&self.decode),
            },
        }
    }
}

//! What a seed means: the fleet, what is asked of it and when, and what goes wrong. Pure.

mod faults;

use baton_placement::policy::{FirstToken, LocalRecompute, Mode, Overrides, Policy};
use baton_placement::rng::Rng;

use serde::{Deserialize, Serialize};

pub use faults::{Action, Fault};

use super::bank::REQUESTS;
use super::machine::Skew;

/// Requests begin within this, milliseconds from when all workers are ready.
const ASKING: usize = 4_000;
/// The longest that a run may take: `timeouts.total` of the policy.
pub const TOTAL: u64 = 12_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineKind {
    /// No weights; tokens are hashes of what came before, KV is checked.
    Simulated,
    /// A Llama of two layers that computes.
    Tiny,
}

/// One seed.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub engine: EngineKind,
    pub workers: Vec<WorkerPlan>,
    pub lease_seconds: u64,
    /// Of each pool.
    pub blocks: u64,
    pub policy: Policy,
    /// Milliseconds that a message takes at most; each takes a time of its own.
    pub latency: u64,
    pub requests: Vec<RequestPlan>,
    pub faults: Vec<Fault>,
}

#[derive(Clone, Debug)]
pub struct WorkerPlan {
    /// Also of its host.
    pub name: String,
    pub prefill: bool,
    pub skew: Skew,
}

/// One request.
#[derive(Clone, Debug)]
pub struct RequestPlan {
    /// Milliseconds from when all workers are ready.
    pub at: u64,
    /// Index in the bank.
    pub asks: usize,
    /// `x-baton-mode`.
    pub mode: Option<&'static str>,
    pub stream: bool,
    /// The client leaves after so many milliseconds.
    pub leaves_after: Option<u64>,
}

impl Plan {
    /// What the seed means.
    pub fn of(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        // Real arithmetic costs real time.
        let engine = if rng.below(4) == 0 {
            EngineKind::Tiny
        } else {
            EngineKind::Simulated
        };
        let mut workers = Vec::new();
        for (count, prefill) in [(1 + rng.below(2), true), (2, false)] {
            let word = if prefill { "prefill" } else { "decode" };
            workers.extend((0..count).map(|index| WorkerPlan {
                name: format!("{word}-{index}"),
                prefill,
                skew: Skew {
                    offset: rng.next_u64() >> 24,
                    per_mille: 980 + rng.below(41) as u64,
                },
            }));
        }
        let requests = 6 + rng.below(10);
        let requests = (0..requests)
            .map(|_| RequestPlan {
                at: rng.below(ASKING) as u64,
                asks: rng.below(REQUESTS),
                mode: [
                    Some("Disaggregated"),
                    Some("Disaggregated"),
                    Some("Conditional"),
                    Some("Aggregated"),
                    None,
                ][rng.below(5)],
                stream: rng.below(4) > 0,
                leaves_after: (rng.below(6) == 0).then(|| rng.below(800) as u64),
            })
            .collect();
        let lease_seconds = 1 + rng.below(3) as u64;
        let names: Vec<String> = workers.iter().map(|worker| worker.name.clone()).collect();
        Self {
            seed,
            engine,
            lease_seconds,
            blocks: [48, 96, 256][rng.below(3)],
            policy: policy(&mut rng),
            latency: [1, 5, 20, 60][rng.below(4)],
            requests,
            faults: faults::draw(&mut rng, &names),
            workers,
        }
    }

    /// One worker, nothing goes wrong, one request after the other.
    pub fn quiet(engine: EngineKind, requests: usize) -> Self {
        let mut policy = Policy::new("p", "m", &[], &["decode"]);
        policy.generation = 1;
        Self {
            seed: 0,
            engine,
            workers: vec![WorkerPlan {
                name: "decode-0".to_owned(),
                prefill: false,
                skew: Skew {
                    offset: 0,
                    per_mille: 1000,
                },
            }],
            lease_seconds: 1,
            blocks: 256,
            policy,
            latency: 1,
            requests: (0..requests)
                .map(|asks| RequestPlan {
                    at: asks as u64 * 1_500,
                    asks,
                    mode: None,
                    stream: true,
                    leaves_after: None,
                })
                .collect(),
            faults: Vec::new(),
        }
    }

    /// Milliseconds until which something may be wrong.
    pub fn healed(&self) -> u64 {
        let ends = self.faults.iter().map(|fault| fault.at + fault.lasts);
        ends.max().unwrap_or(0)
    }
}

fn policy(rng: &mut Rng) -> Policy {
    let mut policy = Policy::new("p", "m", &["prefill"], &["decode"]);
    policy.overrides = Overrides::Allowed;
    policy.mode = [Mode::Conditional, Mode::Disaggregated][rng.below(2)];
    policy.first_token = [FirstToken::Prefill, FirstToken::Decode][rng.below(2)];
    policy.fallback.replans = rng.below(3) as u32;
    policy.fallback.local_recompute = LocalRecompute {
        max_concurrent_per_worker: rng.below(4) as u32,
        max_percent: [0.0, 10.0, 100.0][rng.below(3)],
    };
    policy.topology.breaker.open_seconds = 1.0;
    let waits = &mut policy.timeouts;
    waits.reserve_seconds = 3.0;
    waits.prefill_start_seconds = 3.0;
    waits.prefill_seconds = 5.0;
    waits.transfer_seconds = 3.0;
    waits.decode_start_seconds = 3.0;
    waits.token_seconds = 2.0;
    waits.total_seconds = TOTAL as f64 / 1e3;
    policy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_always_means_the_same() {
        for seed in 0..50 {
            let (one, again) = (Plan::of(seed), Plan::of(seed));
            assert_eq!(format!("{one:?}"), format!("{again:?}"));
        }
        assert_ne!(format!("{:?}", Plan::of(1)), format!("{:?}", Plan::of(2)));
    }

    #[test]
    fn every_kind_of_fault_is_drawn() {
        let mut drawn: Vec<String> = (0..300)
            .flat_map(|seed| Plan::of(seed).faults)
            .map(|fault| fault.action.word().to_owned())
            .collect();
        drawn.sort();
        drawn.dedup();
        assert_eq!(drawn.len(), Action::WORDS.len(), "{drawn:?}");
    }
}

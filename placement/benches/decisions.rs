//! Decisions per second on fleets of several sizes: `cargo bench -p baton-placement`.

#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

use std::sync::Arc;
use std::time::Instant;

use baton_placement::calibration::{built_in, link_prior};
use baton_placement::coefficients::{
    CoefficientSet, LinkClass, LinkName, PathFactors, WorkerClass,
};
use baton_placement::cost::ChunkRule;
use baton_placement::fleet::{
    BreakerState, Fleet, FleetBuilder, FleetError, OwnDispatches, ReportedLoad, WorkerEntry,
    WorkerState,
};
use baton_placement::index::PrefixHits;
use baton_placement::place::{Request, place};
use baton_placement::policy::{Assurance, Policy};
use baton_placement::rng::Rng;

/// Where a worker is.
fn place_of(index: u32) -> Vec<Option<String>> {
    vec![
        Some(format!("h{}", index / 4)),
        Some(format!("r{}", index / 16)),
    ]
}

/// `pairs` prefill and as many decode workers, four to a host, four hosts to a rack, under random load. `shut`: from the first host to
/// the last the breaker is open.
fn fleet(pairs: u32, shut: bool, rng: &mut Rng) -> Result<Fleet, FleetError> {
    let set = CoefficientSet {
        workers: built_in("h100-8b-tp1")
            .into_iter()
            .map(|coefficients| WorkerClass {
                name: "h100".into(),
                coefficients,
            })
            .collect(),
        links: ["cuda-ipc", "rdma", "tcp"]
            .map(|transport| LinkClass {
                name: LinkName {
                    source: "*".into(),
                    target: "*".into(),
                    transport: transport.into(),
                },
                coefficients: link_prior(transport),
            })
            .to_vec(),
        paths: PathFactors::default(),
    };
    let levels = ["host".to_owned(), "rack".to_owned()];
    let digest = set.digest();
    let mut builder = FleetBuilder::new(1, &levels, Arc::new(set), &digest);
    builder.compatible("one", "one");
    for level in 0..3 {
        builder.level_link(level as usize, "kv", level);
    }
    for index in 0..2 * pairs {
        let running = rng.below(40) as u32;
        builder.worker(WorkerEntry {
            id: format!("w{index}").into(),
            incarnation: Default::default(),
            slot: index,
            pool: if index % 2 == 0 { "prefill" } else { "decode" }.into(),
            pool_role: None,
            state: WorkerState::Ready,
            can_prefill: true,
            can_decode: true,
            hands_over: Assurance::Verified,
            lease: None,
            kv_identity: "kv".into(),
            compatibility: "one".into(),
            adapters: vec![],
            domain: place_of(index),
            class: "h100".into(),
            chunks: ChunkRule::Bounded,
            transports: vec!["kv".into()],
            load: ReportedLoad {
                queued_tokens: rng.below(9_000) as u64,
                queued_sequences: rng.below(4) as u32,
                running_sequences: running,
                context_tokens: u64::from(running) * 3_000,
                free_blocks: 20_000,
                ..ReportedLoad::default()
            },
            own: OwnDispatches::default(),
            indexed_at: 0.0,
            total_blocks: 26_000,
            block_size: 16,
            bytes_per_token: 131_072,
            max_sequences: 256,
        });
    }
    if shut {
        let last = place_of(2 * pairs - 1);
        builder.breaker(&place_of(0), &last, "kv", BreakerState::Open);
    }
    builder.build()
}

/// Seconds that a decision takes.
fn measured(fleet: &Fleet, request: &Request, policy: &Policy, rng: &mut Rng) -> f64 {
    let began = Instant::now();
    let mut made = 0u32;
    while began.elapsed().as_millis() < 300 {
        let decision = place(fleet, request, policy, 0.0, rng);
        made += u32::from(decision.chosen.is_some());
    }
    began.elapsed().as_secs_f64() / f64::from(made)
}

fn main() -> Result<(), FleetError> {
    let mut policy = Policy::new("bench", "m", &["prefill"], &["decode"]);
    policy.objective.ttft_milliseconds = Some(500.0);
    policy.objective.tpot_milliseconds = Some(30.0);
    println!(
        "{:>8} {:>8} {:>14} {:>12} {:>16}",
        "workers", "tokens", "decisions/s", "µs each", "a link is shut"
    );
    for pairs in [2, 8, 64, 256] {
        let mut rng = Rng::new(1);
        let open = fleet(pairs, false, &mut rng)?;
        let shut = fleet(pairs, true, &mut Rng::new(1))?;
        for tokens in [200, 2_000, 16_000] {
            let mut hits = PrefixHits::default();
            for slot in 0..2 * pairs {
                hits.set(slot, rng.below(tokens as usize / 16) as u32);
            }
            let request = Request {
                tokens,
                max_output_tokens: 512,
                expected_output_tokens: 256.0,
                hits,
                ..Request::default()
            };
            let each = measured(&open, &request, &policy, &mut rng);
            let one_shut = measured(&shut, &request, &policy, &mut rng);
            println!(
                "{:>8} {tokens:>8} {:>14.0} {:>12.1} {:>16.1}",
                2 * pairs,
                1.0 / each,
                each * 1e6,
                one_shut * 1e6
            );
        }
    }
    Ok(())
}

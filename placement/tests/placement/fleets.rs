//! Fleets to place on: small ones written down, random ones by seed.

use std::sync::Arc;

use baton_placement::coefficients::{
    CoefficientSet, LinkClass, LinkCoefficients, LinkName, PathFactors, PhaseFactors, WorkerClass,
    WorkerCoefficients,
};
use baton_placement::cost::ChunkRule;
use baton_placement::fleet::{
    BreakerState, Fleet, FleetBuilder, OwnDispatches, ReportedLoad, WorkerEntry, WorkerState,
};
use baton_placement::index::PrefixHits;
use baton_placement::place::Request;
use baton_placement::policy::{
    Assurance, Enforcement, FirstToken, Mode, NoPrefillAction, Policy, Pooling, Preset,
};
use baton_placement::rng::Rng;

pub(crate) fn levels() -> Vec<String> {
    vec!["host".into(), "rack".into()]
}

pub(crate) fn coefficients(values: [f64; 7]) -> WorkerCoefficients {
    let [a, b, k, floor, d0, d1, d2] = values;
    WorkerCoefficients {
        a,
        b,
        k,
        floor,
        d0,
        d1,
        d2,
        upper: PhaseFactors::default(),
        samples: Default::default(),
    }
}

pub(crate) fn link(alpha: f64, per_byte: f64, per_descriptor: f64) -> LinkCoefficients {
    LinkCoefficients {
        alpha,
        per_byte,
        per_descriptor,
        synchronization: 2.0,
        upper: 1.25,
        samples: 0,
    }
}

pub(crate) fn entry(id: &str, pool: &str, slot: u32) -> WorkerEntry {
    WorkerEntry {
        id: id.into(),
        incarnation: Default::default(),
        slot,
        pool: pool.into(),
        pool_role: None,
        state: WorkerState::Ready,
        can_prefill: true,
        can_decode: true,
        hands_over: Assurance::Verified,
        lease: None,
        kv_identity: "kv".into(),
        compatibility: "one".into(),
        adapters: vec![],
        domain: vec![Some("h0".into()), Some("r0".into())],
        class: "cpu".into(),
        chunks: ChunkRule::Bounded,
        transports: vec!["tcp".into()],
        load: ReportedLoad {
            free_blocks: 1_000,
            ..ReportedLoad::default()
        },
        own: OwnDispatches::default(),
        indexed_at: 0.0,
        total_blocks: 1_000,
        block_size: 16,
        bytes_per_token: 23_040,
        max_sequences: 64,
    }
}

/// A set with one class `cpu` and one link between all.
pub(crate) fn cpu_set() -> CoefficientSet {
    CoefficientSet {
        workers: vec![WorkerClass {
            name: "cpu".into(),
            coefficients: coefficients([5.0, 8.0, 0.002, 5.0, 20.0, 1.5, 0.003]),
        }],
        links: vec![LinkClass {
            name: LinkName {
                source: "*".into(),
                target: "*".into(),
                transport: "tcp".into(),
            },
            coefficients: link(1.0, 1e-6, 0.0),
        }],
        paths: PathFactors::default(),
    }
}

/// The fleet of these workers over `cpu_set`, all compatible, one link.
pub(crate) fn simple(workers: Vec<WorkerEntry>) -> Fleet {
    let set = cpu_set();
    let digest = set.digest();
    let mut builder = FleetBuilder::new(1, &levels(), Arc::new(set), &digest);
    for worker in workers {
        builder.worker(worker);
    }
    builder.compatible("one", "one");
    for level in 0..=2 {
        builder.level_link(level, "tcp", 0);
    }
    builder.build().unwrap()
}

/// The same entries that a fleet was built from, and what is between them: the reference computes from these.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) set: CoefficientSet,
    pub(crate) entries: Vec<WorkerEntry>,
    pub(crate) compatible: Vec<(String, String)>,
    /// (level, transport) → position in the set.
    pub(crate) level_links: Vec<(usize, &'static str, u32)>,
    pub(crate) breakers: Vec<(usize, usize, &'static str, BreakerState)>,
    pub(crate) promises: Vec<(usize, usize, u64)>,
    /// Coefficients of one pair of domains.
    pub(crate) exact: Vec<(usize, usize, &'static str, u32)>,
    pub(crate) fleet: Fleet,
}

fn pick<T: Clone>(rng: &mut Rng, values: &[T]) -> T {
    values[rng.below(values.len())].clone()
}

fn random_entry(rng: &mut Rng, index: usize, pool: &str) -> WorkerEntry {
    let running = rng.below(6) as u32 * rng.below(2) as u32;
    let queued = rng.below(4) as u32 * rng.below(2) as u32;
    let rack = rng.below(2);
    let total_blocks = pick(rng, &[1_000, 1_000, 1_000, 200]);
    WorkerEntry {
        slot: index as u32,
        state: pick(
            rng,
            &[
                WorkerState::Ready,
                WorkerState::Ready,
                WorkerState::Ready,
                WorkerState::Ready,
                WorkerState::Ready,
                WorkerState::Draining,
                WorkerState::Lost,
            ],
        ),
        can_decode: pool == "decode" || rng.below(4) > 0,
        can_prefill: pool == "prefill" || rng.below(4) > 0,
        compatibility: pick(rng, &["one".to_owned(), "one".to_owned(), "two".to_owned()]),
        adapters: if rng.below(2) == 0 {
            vec!["lora".into()]
        } else {
            vec![]
        },
        domain: vec![
            (rng.below(5) > 0).then(|| format!("h{rack}{}", rng.below(3))),
            (rng.below(8) > 0).then(|| format!("r{rack}")),
        ],
        class: pick(rng, &["cpu".to_owned(), "h100".to_owned()]),
        chunks: pick(rng, &[ChunkRule::Bounded, ChunkRule::Fixed(512)]),
        transports: pick(
            rng,
            &[
                vec!["tcp".to_owned()],
                vec!["rdma".to_owned(), "tcp".to_owned()],
            ],
        ),
        load: ReportedLoad {
            at: 1_000.0 - 200.0 * rng.unit(),
            queued_tokens: u64::from(queued) * (1 + rng.below(3_000) as u64),
            queued_sequences: queued,
            running_sequences: running,
            context_tokens: u64::from(running) * rng.below(4_000) as u64,
            step_remaining: 30.0 * rng.unit(),
            free_blocks: (400 + rng.below(600) as u32).min(total_blocks),
        },
        own: OwnDispatches {
            queued_tokens: rng.below(2) as u64 * rng.below(900) as u64,
            queued_sequences: 1,
            sequences: rng.below(2) as u32,
            context_tokens: rng.below(500) as u64,
            blocks: rng.below(20) as u32,
        },
        lease: pick(rng, &[None, None, Some(600.0)]),
        indexed_at: 1_000.0
            - rng.below(2) as f64 * 300.0
            - rng.below(6).saturating_sub(4) as f64 * 20_000.0,
        total_blocks,
        max_sequences: 3 + rng.below(20) as u32,
        ..entry(&format!("{pool}-{index}"), pool, index as u32)
    }
}

pub(crate) fn random_world(rng: &mut Rng, most: usize) -> World {
    let mut set = cpu_set();
    set.workers.push(WorkerClass {
        name: "h100".into(),
        coefficients: coefficients([2.66, 0.01939, 8.07e-7, 7.0, 6.37, 0.0119, 4.17e-5]),
    });
    let name = |transport: &str| LinkName {
        source: "*".into(),
        target: "*".into(),
        transport: transport.into(),
    };
    set.links.push(LinkClass {
        name: name("rdma"),
        coefficients: link(0.4, 2.5e-8, 0.001),
    });
    set.links.push(LinkClass {
        name: name("tcp-far"),
        coefficients: link(3.0, 1e-5, 0.01),
    });
    let mut level_links = vec![
        (0, "tcp", 0),
        (0, "rdma", 1),
        (1, "tcp", 0),
        (1, "rdma", 1),
        (2, "tcp", 2),
    ];
    let (prefills, decodes) = (rng.below(most) + 1, rng.below(most) + 1);
    let mut entries = Vec::new();
    for index in 0..prefills + decodes {
        let pool = if index < prefills {
            "prefill"
        } else {
            "decode"
        };
        entries.push(random_entry(rng, index, pool));
    }
    // A pool of neither: never a candidate.
    entries.push(random_entry(rng, prefills + decodes, "other"));
    let compatible = vec![
        ("one".to_owned(), "one".to_owned()),
        ("two".to_owned(), "one".to_owned()),
    ];
    let mut breakers = Vec::new();
    let mut promises = Vec::new();
    for _ in 0..rng.below(4) {
        let (source, target) = (rng.below(entries.len()), rng.below(entries.len()));
        let state = pick(rng, &[BreakerState::Open, BreakerState::HalfOpen]);
        breakers.push((source, target, pick(rng, &["tcp", "rdma"]), state));
        promises.push((source, target, 50_000_000 * rng.below(5) as u64));
    }
    // Domains that nest, as those of a real place do, take the shorter way through the search.
    let mut exact = Vec::new();
    if rng.below(2) == 0 {
        for worker in &mut entries {
            let rack = rng.below(2);
            worker.domain = vec![
                Some(format!("h{rack}{}", rng.below(3))),
                Some(format!("r{rack}")),
            ];
        }
        if rng.below(2) == 0 {
            for breaker in &mut breakers {
                breaker.3 = BreakerState::HalfOpen;
            }
        }
        if rng.below(2) == 0 {
            level_links.push((2, "rdma", 1));
            for _ in 0..rng.below(6) {
                let (source, target) = (rng.below(entries.len()), rng.below(entries.len()));
                let link = rng.below(set.links.len()) as u32;
                exact.push((source, target, pick(rng, &["tcp", "rdma"]), link));
            }
        }
    }
    let mut world = World {
        fleet: build(
            &set,
            &entries,
            &compatible,
            &level_links,
            &breakers,
            &promises,
            1,
        ),
        set,
        entries,
        compatible,
        level_links,
        breakers,
        promises,
        exact,
    };
    if !world.exact.is_empty() {
        world.fleet = builder(&world, 1).build().unwrap();
    }
    world
}

/// With links of their own between some domains.
fn builder(world: &World, routers: u32) -> FleetBuilder {
    let mut builder = parts(
        &world.set,
        &world.entries,
        &world.compatible,
        &world.level_links,
        &world.breakers,
        &world.promises,
        routers,
    );
    for &(source, target, transport, link) in &world.exact {
        let domain = |entry: usize| &world.entries[entry].domain;
        builder.link(domain(source), domain(target), transport, link);
    }
    builder
}

pub(crate) fn build(
    set: &CoefficientSet,
    entries: &[WorkerEntry],
    compatible: &[(String, String)],
    level_links: &[(usize, &'static str, u32)],
    breakers: &[(usize, usize, &'static str, BreakerState)],
    promises: &[(usize, usize, u64)],
    routers: u32,
) -> Fleet {
    parts(
        set,
        entries,
        compatible,
        level_links,
        breakers,
        promises,
        routers,
    )
    .build()
    .unwrap()
}

fn parts(
    set: &CoefficientSet,
    entries: &[WorkerEntry],
    compatible: &[(String, String)],
    level_links: &[(usize, &'static str, u32)],
    breakers: &[(usize, usize, &'static str, BreakerState)],
    promises: &[(usize, usize, u64)],
    routers: u32,
) -> FleetBuilder {
    let mut builder = FleetBuilder::new(7, &levels(), Arc::new(set.clone()), &set.digest());
    builder.routers(routers);
    for worker in entries {
        builder.worker(worker.clone());
    }
    for (prefill, decode) in compatible {
        builder.compatible(prefill, decode);
    }
    for &(level, transport, position) in level_links {
        builder.level_link(level, transport, position);
    }
    for &(source, target, transport, state) in breakers {
        builder.breaker(
            &entries[source].domain,
            &entries[target].domain,
            transport,
            state,
        );
    }
    for &(source, target, bytes) in promises {
        builder.promise(&entries[source].domain, &entries[target].domain, bytes);
    }
    builder
}

pub(crate) fn random_request(rng: &mut Rng, world: &World) -> Request {
    let longest = pick(rng, &[40, 900, 6_000]);
    let tokens = 1 + rng.below(longest);
    let mut hits = PrefixHits::default();
    for worker in &world.entries {
        if rng.below(3) == 0 {
            hits.set(worker.slot, rng.below(tokens / 16 + 1) as u32);
        }
    }
    Request {
        tokens: tokens as u32,
        max_output_tokens: pick(rng, &[1, 16, 256, 256, 1_024]),
        expected_output_tokens: 300.0 * rng.unit(),
        hits,
        adapter: (rng.below(4) == 0).then(|| "lora".into()),
        mode: None,
        whole: false,
        exclude: if rng.below(5) == 0 {
            vec![world.entries[rng.below(world.entries.len())].id.clone()]
        } else {
            vec![]
        },
        local_without_prefill: rng.below(40) as u32,
        waited_milliseconds: rng.below(8_000) as f64,
    }
}

pub(crate) fn random_policy(rng: &mut Rng) -> Policy {
    let mut policy = Policy::new("chat", "m", &["prefill"], &["decode"]);
    policy.pooling = pick(rng, &[Pooling::Pooled, Pooling::Strict]);
    policy.first_token = pick(rng, &[FirstToken::Prefill, FirstToken::Decode]);
    policy.cost.preset = pick(rng, &[Preset::Balanced, Preset::Latency]);
    if rng.below(3) > 0 {
        policy.objective.ttft_milliseconds = Some(50.0 + 3_000.0 * rng.unit());
        policy.objective.tpot_milliseconds = Some(10.0 + 150.0 * rng.unit());
    }
    if rng.below(3) == 0 {
        policy.objective.end_to_end_milliseconds = Some(500.0 + 9_000.0 * rng.unit());
    }
    if rng.below(2) == 0 {
        policy
            .cost
            .level_penalty_milliseconds
            .insert("rack".into(), 40.0);
        policy
            .cost
            .level_penalty_milliseconds
            .insert("beyond".into(), 400.0 * rng.unit());
    }
    if rng.below(2) == 0 {
        policy.topology.farthest_level = Some(pick(rng, &["host".to_owned(), "rack".to_owned()]));
    }
    policy.topology.enforcement = pick(
        rng,
        &[
            Enforcement::Required,
            Enforcement::Preferred,
            Enforcement::Ignored,
        ],
    );
    policy.on_no_prefill.action = pick(
        rng,
        &[
            NoPrefillAction::Local,
            NoPrefillAction::Queue,
            NoPrefillAction::Reject,
        ],
    );
    if rng.below(2) == 0 {
        policy.transports = vec!["rdma".into(), "tcp".into()];
    }
    policy.admission.max_queued_per_worker = 2 + rng.below(6) as u32;
    policy
}

pub(crate) fn random_mode(rng: &mut Rng) -> Mode {
    pick(
        rng,
        &[
            Mode::Conditional,
            Mode::Conditional,
            Mode::Aggregated,
            Mode::Disaggregated,
            Mode::Threshold { tokens: 512 },
            Mode::DynamoIslBounding {
                tokens: 2_048,
                ratio: 0.7,
            },
            Mode::DynamoIslOrLoad {
                tokens: 2_048,
                ratio: 0.7,
                busy_tokens: 1_000,
            },
        ],
    )
}

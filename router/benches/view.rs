//! Making the picture of a fleet, beside the decision that is made on it: `cargo bench -p baton-router --bench view`.
//!
//! `ground` is made when a card, a place or a constant has changed, `view` on it for nearly every request; looking whether the ground still
//! holds is not in either.

#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

use std::sync::Arc;
use std::time::Instant;

use baton_placement::breaker::Pass;
use baton_placement::fleet::OwnDispatches;
use baton_placement::place::{Request, place};
use baton_placement::policy::Policy;
use baton_placement::rng::Rng;
use baton_protocol::card::{Card, TopologyDomain};
use baton_protocol::ids::{Incarnation, WorkerId};
use baton_protocol::samples;
use baton_protocol::wire;
use baton_router::clock::Moment;
use baton_router::fleet::own::OwnLedger;
use baton_router::fleet::pairs::{Pairs, compatibility_key};
use baton_router::fleet::snapshot::{self, Ground, Moving};
use baton_router::fleet::state::Tracked;
use baton_router::fleet::topology;
use baton_router::learning::{Learning, LinkUse, Moved, link_prior, worker_prior};

const NOW: Moment = Moment(1_764_438_300_000_000);

/// Half of them prefill workers; four to a host, four hosts to a rack.
fn workers(count: u32) -> Vec<Tracked> {
    (0..count)
        .map(|index| {
            let name = format!("w{index}");
            let mut card = if index % 2 == 0 {
                samples::prefill_card(&name)
            } else {
                samples::card(&name)
            };
            let level = |level: &str, size: u32| TopologyDomain {
                level: level.to_owned(),
                domain: format!("{level}-{}", index / size),
            };
            card.topology = vec![level("host", 4), level("rack", 16)];
            let mut worker = Tracked::new(card.worker.clone(), index);
            worker.connected(NOW);
            worker.class = compatibility_key(&card);
            worker.card = Some(Arc::new(card));
            worker.listed(Vec::new(), false);
            worker.load = Some(wire::Load {
                running_sequences: index % 40,
                context_tokens: u64::from(index % 40) * 3_000,
                ..wire::Load::default()
            });
            worker.load_at = NOW;
            worker.indexed_at = NOW;
            worker
        })
        .collect()
}

fn levels(workers: &[Tracked]) -> Vec<String> {
    topology::levels(workers.iter().map(|worker| &**worker.topology()))
}

/// As many links as asked have moved KV, between hosts of workers.
fn learning(workers: &[Tracked], links: usize, policy: &Policy) -> Learning {
    let levels = levels(workers);
    let learning = Learning::default();
    for index in 0..links {
        let path = |position: usize| {
            let worker = &workers[position % workers.len()];
            topology::path(worker.topology(), &levels)
        };
        let used = LinkUse {
            source: path(4 * index),
            target: path(4 * (index + 1 + 4 * index / workers.len())),
            transport: "Tcp".to_owned(),
        };
        let moved = Moved {
            bytes: 1 << 20,
            blocks: 4,
            last_blocks: 4,
            exposed_milliseconds: 1.0,
            synchronization_milliseconds: 0.5,
        };
        learning.moved(&used, moved, Pass::Free, policy, NOW);
    }
    learning
}

/// Microseconds of one call.
fn each(mut call: impl FnMut()) -> f64 {
    let began = Instant::now();
    let mut calls = 0_u32;
    while began.elapsed().as_millis() < 300 {
        call();
        calls += 1;
    }
    began.elapsed().as_secs_f64() / f64::from(calls) * 1e6
}

fn main() {
    let mut policy = Policy::new("bench", "m", &["p"], &["d"]);
    policy.objective.ttft_milliseconds = Some(500.0);
    policy.objective.tpot_milliseconds = Some(30.0);
    println!(
        "{:>8} {:>8} {:>10} {:>12} {:>12} {:>12}",
        "workers", "links", "in flight", "ground µs", "view µs", "place µs"
    );
    for (count, links) in [
        (16, 12),
        (128, 128),
        (512, 512),
        (1_024, 512),
        (1_024, 4_096),
    ] {
        let workers = workers(count);
        let cards: Vec<Arc<Card>> = workers.iter().filter_map(|one| one.card.clone()).collect();
        let known: Vec<(&Tracked, &Card)> = workers
            .iter()
            .zip(&cards)
            .map(|(tracked, card)| (tracked, card.as_ref()))
            .collect();
        let learning = learning(&workers, links, &policy);
        let levels = levels(&workers);
        let set = snapshot::coefficients(
            &known,
            &levels,
            &learning.learnt(),
            worker_prior(),
            link_prior,
        );
        let (set, digest) = (Arc::new(set.clone()), set.digest());
        let classes = known
            .iter()
            .map(|(tracked, card)| (tracked.class.as_str(), *card));
        let pairs = Pairs::of(classes);
        let mut own = OwnLedger::default();
        for index in 0..2 * count {
            let worker: &WorkerId = &workers[(index % count) as usize].id;
            let dispatch = OwnDispatches {
                sequences: 1,
                ..OwnDispatches::default()
            };
            own.dispatch(worker, Incarnation(1), dispatch);
        }
        let ground = || {
            snapshot::ground(&Ground {
                levels: &levels,
                workers: &known,
                pairs: &pairs,
                coefficients: &set,
                digest: &digest,
                links: &learning.learnt().links,
            })
        };
        let Ok(standing) = ground() else {
            println!("{count} workers make no fleet");
            continue;
        };
        let view = || {
            let links = learning.links(NOW);
            let loads = known
                .iter()
                .map(|(tracked, card)| snapshot::load(tracked, card, own.sum(&tracked.id), NOW));
            let moving = Moving {
                version: 1,
                routers: 1,
                shut: &links.shut,
                promises: [].iter(),
            };
            snapshot::next(&standing, loads, moving)
        };
        let Ok(fleet) = view() else {
            println!("{count} workers make no fleet");
            continue;
        };
        let request = Request {
            tokens: 700,
            max_output_tokens: 200,
            expected_output_tokens: 100.0,
            ..Request::default()
        };
        let mut rng = Rng::new(1);
        let grounded = each(|| {
            let _ = std::hint::black_box(ground());
        });
        let viewed = each(|| {
            let _ = std::hint::black_box(view());
        });
        let placed = each(|| {
            let now = NOW.milliseconds();
            let decision = place(&fleet, &request, &policy, now, &mut rng);
            std::hint::black_box(&decision);
        });
        println!(
            "{count:>8} {links:>8} {:>10} {grounded:>12.0} {viewed:>12.1} {placed:>12.1}",
            own.len()
        );
    }
}

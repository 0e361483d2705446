//! Snapshots of fleets whose links and reports are not what one would wish for.

use baton_protocol::card::TopologyDomain;

use super::*;
use crate::fleet::pairs::compatibility_key;
use crate::fleet::samples;
use crate::learning::{link_prior, worker_prior};

const NOW: Moment = Moment(2);

fn tracked(slot: u32, card: Card, load: wire::Load) -> Tracked {
    let mut worker = Tracked::new(card.worker.clone(), slot);
    worker.connected(Moment(1));
    worker.class = compatibility_key(&card);
    worker.card = Some(Arc::new(card));
    worker.listed(Vec::new(), false);
    worker.load = Some(load);
    worker
}

fn on(mut card: Card, host: &str) -> Card {
    card.topology = vec![TopologyDomain {
        level: "host".into(),
        domain: host.into(),
    }];
    card
}

/// The fleet of these workers, of which this router has sent nothing to anybody.
pub(crate) fn fleet(
    tracked: &[Tracked],
    learnt: &Learnt,
    shut: &[(LinkName, BreakerState)],
    promises: &[Promise],
) -> Fleet {
    let cards: Vec<Arc<Card>> = tracked.iter().filter_map(|one| one.card.clone()).collect();
    let workers: Vec<(&Tracked, &Card)> = tracked
        .iter()
        .zip(&cards)
        .map(|(tracked, card)| (tracked, card.as_ref()))
        .collect();
    let levels = topology::levels(tracked.iter().map(|one| &**one.topology()));
    let classes = workers
        .iter()
        .map(|(tracked, card)| (tracked.class.as_str(), *card));
    let set = coefficients(&workers, &levels, learnt, worker_prior(), link_prior);
    let ground = ground(&Ground {
        levels: &levels,
        workers: &workers,
        pairs: &Pairs::of(classes),
        digest: &set.digest(),
        coefficients: &Arc::new(set),
        links: &learnt.links,
    });
    let loads = workers
        .iter()
        .map(|(tracked, card)| load(tracked, card, OwnDispatches::default(), NOW));
    let moving = Moving {
        version: 1,
        routers: 1,
        shut,
        promises: promises.iter(),
    };
    next(&ground.unwrap(), loads, moving).unwrap()
}

fn link(source: &[&str], target: &[&str]) -> LinkFacts {
    let path = |values: &[&str]| values.iter().map(|one| Some((*one).to_owned())).collect();
    LinkFacts {
        source: path(source),
        target: path(target),
        transport: "Tcp".into(),
        coefficients: Some(link_prior("host", "Tcp")),
    }
}

#[test]
fn links_of_places_that_are_no_more_change_nothing() {
    let workers = [
        tracked(
            0,
            on(samples::prefill_card("p"), "h1"),
            wire::Load::default(),
        ),
        tracked(1, on(samples::card("d"), "h2"), wire::Load::default()),
    ];
    let learnt = Learnt {
        links: vec![
            link(&["h1"], &["h2"]),
            // Learnt when workers named a clique too, and of hosts that have gone.
            link(&["c", "h1"], &["c", "h2"]),
            link(&["h1"], &["gone"]),
            // And over what nobody offers any more.
            LinkFacts {
                transport: "Rdma".into(),
                ..link(&["h1"], &["h2"])
            },
        ],
        ..Learnt::default()
    };
    let shut = |link: &LinkFacts| {
        let name = link_name(&link.source, &link.target, &link.transport);
        (name, BreakerState::Open)
    };
    let clique_and_host = vec![Some("c".into()), Some("h1".into())];
    let promise = Promise::new(&clique_and_host, &vec![Some("h2".into())], 1);
    let elsewhere: Vec<_> = learnt.links[1..].iter().map(shut).collect();
    let open = fleet(&workers, &learnt, &elsewhere, &[promise]);
    assert!(open.is_regular());
    assert_eq!(open.breaker(0, 1), BreakerState::Closed);
    let shut = fleet(&workers, &learnt, &[shut(&learnt.links[0])], &[]);
    assert_eq!(shut.breaker(0, 1), BreakerState::Open);
}

#[test]
fn a_report_that_cannot_be_is_taken_for_a_large_one() {
    let load = wire::Load {
        blocks: Some(wire::BlockCounts {
            total: u32::MAX,
            free: u32::MAX,
            cached: 1,
            ..wire::BlockCounts::default()
        }),
        ..wire::Load::default()
    };
    let workers = [tracked(0, samples::card("d"), load)];
    let fleet = fleet(&workers, &Learnt::default(), &[], &[]);
    assert_eq!(fleet.loads[0].reported.free_blocks, u32::MAX);
}

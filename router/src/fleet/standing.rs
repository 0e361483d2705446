//! What views share: made anew when a card, a place, a verdict on a pair or a constant has changed, and not for each request.
//!
//! It finds that out by itself, by looking whether it was made from what is known now. What it was made from it keeps: another card or
//! place never lies at the address of one that it has. Two things it does not look at follow from what it does: a worker's client is another one
//! only where the worker is, and with it its place; a link that gets a fit, or loses it, makes another coefficient set.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use baton_placement::coefficients::CoefficientSet;
use baton_placement::fleet::{Fleet, FleetError};
use baton_protocol::card::Card;
use baton_protocol::ids::WorkerId;
use baton_protocol::wire::worker_client::WorkerClient;
use tonic::transport::Channel;

use super::discovery::Domain;
use super::own::OwnLedger;
use super::pairs::Pairs;
use super::snapshot::{self, Ground, LinkFacts, Moving, Promise};
use super::state::Tracked;
use super::topology;
use super::view::Member;
use crate::clock::Moment;

/// Workers whose card is known.
pub(super) fn carded(
    tracked: &BTreeMap<WorkerId, Tracked>,
) -> impl Iterator<Item = (&Tracked, &Arc<Card>)> {
    let workers = tracked.values();
    workers.filter_map(|tracked| Some((tracked, tracked.card.as_ref()?)))
}

/// What it is made from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Material<'a> {
    pub(super) tracked: &'a BTreeMap<WorkerId, Tracked>,
    pub(super) clients: &'a HashMap<WorkerId, WorkerClient<Channel>>,
    pub(super) pairs: &'a Arc<Pairs>,
    pub(super) coefficients: &'a Arc<CoefficientSet>,
    pub(super) digest: &'a str,
}

#[derive(Debug)]
pub(super) struct Standing {
    ground: Fleet,
    pub(super) members: Arc<[Member]>,
    /// Each worker whose card is known.
    sources: Vec<Source>,
    pairs: Arc<Pairs>,
    coefficients: Arc<CoefficientSet>,
}

#[derive(Debug)]
struct Source {
    card: Arc<Card>,
    place: Arc<[Domain]>,
    /// It is in the fleet.
    placed: bool,
}

impl Standing {
    /// # Errors
    /// The set does not have what the workers and links name.
    pub(super) fn of(material: Material<'_>, links: &[LinkFacts]) -> Result<Self, FleetError> {
        let known = || carded(material.tracked);
        let levels = topology::levels(known().map(|(tracked, _)| &**tracked.topology()));
        let reached = known().filter(|(tracked, _)| material.clients.contains_key(&tracked.id));
        let workers: Vec<(&Tracked, &Card)> = reached
            .map(|(tracked, card)| (tracked, card.as_ref()))
            .collect();
        let ground = snapshot::ground(&Ground {
            levels: &levels,
            workers: &workers,
            pairs: material.pairs,
            coefficients: material.coefficients,
            digest: material.digest,
            links,
        })?;
        let mut placed = ground.workers.id.iter().peekable();
        let mut members = Vec::with_capacity(ground.len());
        let mut sources = Vec::new();
        for (tracked, card) in known() {
            let client = material.clients.get(&tracked.id);
            let client = client.filter(|_| placed.next_if_eq(&&tracked.id).is_some());
            sources.push(Source {
                card: Arc::clone(card),
                place: Arc::clone(tracked.topology()),
                placed: client.is_some(),
            });
            members.extend(client.map(|client| Member {
                id: tracked.id.clone(),
                card: Arc::clone(card),
                client: client.clone(),
                class: tracked.class.clone(),
                path: topology::path(tracked.topology(), &levels),
            }));
        }
        Ok(Self {
            members: members.into(),
            sources,
            pairs: Arc::clone(material.pairs),
            coefficients: Arc::clone(material.coefficients),
            ground,
        })
    }

    /// Whether another one made now would be the same.
    pub(super) fn holds(&self, material: Material<'_>) -> bool {
        let same = |((tracked, card), source): ((&Tracked, &Arc<Card>), &Source)| {
            Arc::ptr_eq(card, &source.card) && Arc::ptr_eq(tracked.topology(), &source.place)
        };
        Arc::ptr_eq(&self.pairs, material.pairs)
            && Arc::ptr_eq(&self.coefficients, material.coefficients)
            && carded(material.tracked).count() == self.sources.len()
            && carded(material.tracked).zip(&self.sources).all(same)
    }

    /// The next snapshot; only while it [holds](Self::holds).
    ///
    /// # Errors
    /// It does not hold.
    pub(super) fn next<'a>(
        &self,
        tracked: &BTreeMap<WorkerId, Tracked>,
        own: &OwnLedger,
        moving: Moving<'a, impl Iterator<Item = &'a Promise>>,
        now: Moment,
    ) -> Result<Fleet, FleetError> {
        let workers = carded(tracked).zip(&self.sources);
        let placed = workers.filter(|(_, source)| source.placed);
        let loads = placed
            .map(|((tracked, card), _)| snapshot::load(tracked, card, own.sum(&tracked.id), now));
        snapshot::next(&self.ground, loads, moving)
    }
}

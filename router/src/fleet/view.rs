//! The picture of the fleet that placement reads, made anew when something has changed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use baton_placement::coefficients::CoefficientSet;
use baton_placement::fleet::{BreakerState, Fleet, OwnDispatches};
use baton_protocol::card::Card;
use baton_protocol::ids::WorkerId;
use baton_protocol::wire::worker_client::WorkerClient;
use tonic::transport::Channel;

use super::pairs::Pairs;
use super::snapshot::{self, Parts, Promise};
use super::state::Tracked;
use super::topology::{self, DomainPath};
use super::{Inner, Workers};
use crate::clock::Moment;
use crate::learning::{link_prior, worker_prior};

/// A new coefficient set at most so often: each one that a decision used is a file.
const NEW_COEFFICIENTS_EVERY: Duration = Duration::from_secs(1);
/// With a breaker that is not closed, the view is made anew so often: an open link becomes half-open by time alone.
const BREAKER_LOOK: Duration = Duration::from_millis(250);

/// A worker of a view.
#[derive(Clone, Debug)]
pub struct Member {
    pub id: WorkerId,
    pub card: Arc<Card>,
    pub client: WorkerClient<Channel>,
    /// What pairing reads of its card, as a key.
    pub class: String,
    pub path: DomainPath,
}

impl Member {
    /// Name of its nearest known domain.
    pub fn domain(&self) -> String {
        self.path
            .iter()
            .flatten()
            .next()
            .cloned()
            .unwrap_or_default()
    }
}

/// An immutable picture: what placement reads, and how to reach whom it names.
#[derive(Debug)]
pub struct View {
    pub fleet: Arc<Fleet>,
    /// By the position that placement names.
    pub members: Vec<Member>,
    pub pairs: Arc<Pairs>,
    /// How many changes it shows.
    changes: u64,
    expires: Option<Moment>,
}

impl View {
    /// Before any worker is known.
    pub(super) fn empty(inner: &Inner) -> Self {
        Self {
            fleet: Arc::new(empty_fleet(inner)),
            members: Vec::new(),
            pairs: inner.pairs.clone(),
            changes: 0,
            expires: None,
        }
    }
}

impl Workers {
    /// The picture of now: made anew if something has changed since the last one.
    pub fn view(&self) -> Arc<View> {
        let now = self.clock.now();
        let current = self.view.load();
        if self.is_current(&current, now) {
            return current.clone();
        }
        self.make_view(now)
    }

    fn is_current(&self, view: &View, now: Moment) -> bool {
        view.changes == self.changes.load(Ordering::Acquire)
            && view.expires.is_none_or(|expires| now < expires)
    }

    fn make_view(&self, now: Moment) -> Arc<View> {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        // Before anything is read: what changes from here on is shown by the next one.
        let changes = self.changes.load(Ordering::Acquire);
        let current = self.view.load();
        if self.is_current(&current, now) {
            // Somebody else made it while this one waited for the lock.
            return current.clone();
        }
        inner.version += 1;
        let known: Vec<(&Tracked, &Arc<Card>)> = inner
            .tracked
            .values()
            .filter_map(|tracked| Some((tracked, tracked.card.as_ref()?)))
            .collect();
        let cards: Vec<(&Tracked, &Card)> = known
            .iter()
            .map(|(tracked, card)| (*tracked, card.as_ref()))
            .collect();
        let levels = topology::levels(cards.iter().map(|(tracked, _)| tracked.topology()));
        let due = now >= inner.coefficients_made.plus(NEW_COEFFICIENTS_EVERY);
        if due {
            let known = cards.iter().map(|(tracked, _)| *tracked);
            self.learning
                .workers_at(&snapshot::places(known, &levels), now);
        }
        // Under the lock too, so that an older reading never replaces a newer one.
        let learnt = self.learning.learnt(now);
        let links = learnt
            .links
            .iter()
            .filter(|link| link.coefficients.is_some());
        let names = (cards.len(), links.count());
        let renamed = std::mem::take(&mut inner.renamed) || names != inner.named;
        if renamed || due {
            let set = snapshot::coefficients(&cards, &levels, &learnt, worker_prior(), link_prior);
            if set != *inner.coefficients {
                inner.digest = set.digest();
                inner.coefficients = Arc::new(set);
            }
            inner.coefficients_made = now;
            inner.named = names;
        }
        let workers: Vec<(&Tracked, &Card, OwnDispatches)> = cards
            .iter()
            .map(|(tracked, card)| (*tracked, *card, inner.own.sum(&tracked.id)))
            .collect();
        let promises: Vec<Promise> = inner.promises.values().cloned().collect();
        let parts = Parts {
            version: inner.version,
            routers: self.routers.load(Ordering::Relaxed),
            levels: &levels,
            workers: &workers,
            pairs: &inner.pairs,
            coefficients: &inner.coefficients,
            digest: &inner.digest,
            learnt: &learnt,
            promises: &promises,
        };
        let fleet = snapshot::build(&parts, now).unwrap_or_else(|error| {
            // Cannot happen: every class and link named is in the set. An empty fleet refuses, it never misleads.
            tracing::error!(%error, "the fleet snapshot does not hold together");
            empty_fleet(inner)
        });
        let members = fleet
            .workers
            .id
            .iter()
            .filter_map(|id| {
                let tracked = inner.tracked.get(id)?;
                let card = tracked.card.clone()?;
                Some(Member {
                    id: id.clone(),
                    client: inner.clients.get(id)?.clone(),
                    class: tracked.class.clone(),
                    path: topology::path(tracked.topology(), &levels),
                    card,
                })
            })
            .collect();
        let silent = inner.tracked.values().filter_map(Tracked::silent_at);
        let breaker = learnt
            .links
            .iter()
            .any(|link| link.breaker != BreakerState::Closed)
            .then(|| now.plus(BREAKER_LOOK));
        let view = Arc::new(View {
            fleet: Arc::new(fleet),
            members,
            pairs: inner.pairs.clone(),
            changes,
            expires: silent.filter(|at| *at > now).chain(breaker).min(),
        });
        // Under the lock, so that an older picture never replaces a newer one.
        self.view.store(view.clone());
        view
    }
}

fn empty_fleet(inner: &Inner) -> Fleet {
    let nothing = Arc::new(CoefficientSet::default());
    let parts = Parts {
        version: inner.version,
        routers: 1,
        levels: &[],
        workers: &[],
        pairs: &Pairs::default(),
        coefficients: &nothing,
        digest: &nothing.digest(),
        learnt: &snapshot::Learnt::default(),
        promises: &[],
    };
    snapshot::build(&parts, Moment::default()).unwrap_or_else(|_| unreachable!("nothing is named"))
}

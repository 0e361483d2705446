//! The picture of the fleet that placement reads, made anew when something has changed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use baton_placement::coefficients::CoefficientSet;
use baton_placement::fleet::{Fleet, FleetBuilder, FleetError};
use baton_protocol::card::Card;
use baton_protocol::ids::WorkerId;
use baton_protocol::wire::worker_client::WorkerClient;
use tonic::transport::Channel;

use super::pairs::Pairs;
use super::snapshot::{self, Moving};
use super::standing::{Material, Standing, carded};
use super::state::Tracked;
use super::topology::{self, DomainPath};
use super::{Inner, Workers};
use crate::clock::Moment;
use crate::learning::{Learning, LinkStates, link_prior, worker_prior};

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
    pub members: Arc<[Member]>,
    pub pairs: Arc<Pairs>,
    /// How many changes it shows.
    changes: u64,
    expires: Option<Moment>,
}

impl View {
    /// Before any worker is known.
    pub(super) fn empty(inner: &Inner) -> Self {
        Self {
            fleet: Arc::new(empty_fleet(inner.version)),
            members: Arc::default(),
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
        // Under the lock too, so that an older reading never replaces a newer one.
        let links = inner.renew_coefficients(&self.learning, now);
        let picture = inner.standing(&self.learning).and_then(|standing| {
            let moving = Moving {
                version: inner.version,
                routers: self.routers.load(Ordering::Relaxed),
                shut: &links.shut,
                promises: inner.promises.values(),
            };
            let fleet = standing.next(&inner.tracked, &inner.own, moving, now)?;
            Ok((fleet, Arc::clone(&standing.members)))
        });
        let (fleet, members) = picture.unwrap_or_else(|error| {
            // Cannot happen: every class and link named is in the set, and each worker has a load. An empty fleet refuses, it never misleads.
            tracing::error!(%error, "the fleet snapshot does not hold together");
            (empty_fleet(inner.version), Arc::default())
        });
        let silent = inner.tracked.values().filter_map(Tracked::silent_at);
        let breaker = (!links.shut.is_empty()).then(|| now.plus(BREAKER_LOOK));
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

impl Inner {
    /// Makes the coefficient set anew where it has to name others, and once a second. What is known of the links.
    fn renew_coefficients(&mut self, learning: &Learning, now: Moment) -> LinkStates {
        let due = now >= self.coefficients_made.plus(NEW_COEFFICIENTS_EVERY);
        let known: Vec<(&Tracked, &Card)> = carded(&self.tracked)
            .map(|(tracked, card)| (tracked, card.as_ref()))
            .collect();
        let levels = || topology::levels(known.iter().map(|(tracked, _)| &**tracked.topology()));
        if due {
            let workers = known.iter().map(|(tracked, _)| *tracked);
            learning.workers_at(&snapshot::places(workers, &levels()), now);
        }
        let links = learning.links(now);
        let named = (known.len(), links.fits);
        if std::mem::take(&mut self.renamed) || named != self.named || due {
            let learnt = learning.learnt();
            let set =
                snapshot::coefficients(&known, &levels(), &learnt, worker_prior(), link_prior);
            if set != *self.coefficients {
                self.digest = set.digest();
                self.coefficients = Arc::new(set);
            }
            self.coefficients_made = now;
            self.named = named;
        }
        links
    }

    /// What views share now.
    fn standing(&mut self, learning: &Learning) -> Result<Arc<Standing>, FleetError> {
        let material = Material {
            tracked: &self.tracked,
            clients: &self.clients,
            pairs: &self.pairs,
            coefficients: &self.coefficients,
            digest: &self.digest,
        };
        if let Some(standing) = &self.standing
            && standing.holds(material)
        {
            return Ok(Arc::clone(standing));
        }
        let made = Arc::new(Standing::of(material, &learning.learnt().links)?);
        self.standing = Some(Arc::clone(&made));
        Ok(made)
    }
}

fn empty_fleet(version: u64) -> Fleet {
    let nothing = Arc::new(CoefficientSet::default());
    let digest = nothing.digest();
    FleetBuilder::new(version, &[], nothing, &digest)
        .build()
        .unwrap_or_else(|_| unreachable!("nothing is named"))
}

#[cfg(test)]
mod tests;

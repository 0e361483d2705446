//! The next snapshot of the same workers: what they do now, which links are shut, what runs under way will still move.

use std::sync::Arc;

use super::links::Links;
use super::{BreakerState, Fleet, FleetError, WorkerLoad};

/// Collects a snapshot that shares with another one all but what changes from request to request.
#[derive(Debug)]
pub struct Renewal<'a> {
    standing: &'a Fleet,
    version: u64,
    routers: u32,
    loads: Vec<WorkerLoad>,
    links: Links,
}

impl Fleet {
    /// Begins the next snapshot of the same workers, links and constants.
    pub fn renewal(&self, version: u64) -> Renewal<'_> {
        Renewal {
            standing: self,
            version,
            routers: self.routers,
            loads: Vec::with_capacity(self.len()),
            links: self.links.renewed(),
        }
    }
}

impl Renewal<'_> {
    /// Routers that share the fleet, this one included; at least 1.
    pub fn routers(&mut self, routers: u32) -> &mut Self {
        self.routers = routers.max(1);
        self
    }

    /// What the next worker does, in the order of the fleet's.
    pub fn load(&mut self, load: WorkerLoad) -> &mut Self {
        self.loads.push(load);
        self
    }

    /// The state of a link between two domains, by their keys ([`domain_key`](super::domain_key)). One between domains, or over a
    /// transport, that the fleet does not know says nothing of it.
    pub fn breaker(
        &mut self,
        source: &str,
        target: &str,
        transport: &str,
        state: BreakerState,
    ) -> &mut Self {
        self.links.breaker(source, target, transport, state);
        self
    }

    /// Bytes that a run under way will still move between two domains, by their keys; nothing where the fleet does not know one of them. Adds up.
    pub fn promise(&mut self, source: &str, target: &str, bytes: u64) -> &mut Self {
        self.links.promise(source, target, bytes);
        self
    }

    /// The snapshot. Fails where there is not one load for each worker.
    pub fn build(self) -> Result<Fleet, FleetError> {
        let standing = self.standing;
        if self.loads.len() != standing.len() {
            return Err(FleetError::Loads {
                workers: standing.len(),
                loads: self.loads.len(),
            });
        }
        Ok(Fleet {
            version: self.version,
            routers: self.routers,
            levels: Arc::clone(&standing.levels),
            coefficients: Arc::clone(&standing.coefficients),
            coefficients_digest: Arc::clone(&standing.coefficients_digest),
            workers: Arc::clone(&standing.workers),
            loads: self.loads,
            links: self.links,
        })
    }
}

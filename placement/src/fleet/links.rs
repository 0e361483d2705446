//! What lies between two domains: the nearest level they share, transports, coefficients, breakers, promised bytes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::BreakerState;
use crate::coefficients::CoefficientSet;

/// One name for a domain path, nearest level first; unknown levels are empty.
pub fn domain_key(path: &[Option<String>]) -> String {
    let mut key = String::new();
    for (position, value) in path.iter().enumerate() {
        if position > 0 {
            key.push('/');
        }
        key.push_str(value.as_deref().unwrap_or(""));
    }
    key
}

/// What lies between the domains of the workers, and what goes on there now.
#[derive(Clone, Debug, Default)]
pub(crate) struct Links {
    topology: Arc<Topology>,
    breakers: HashMap<(u32, u32, u32), BreakerState>,
    /// Bytes that runs under way will still send out of, or into, a domain.
    promised_out: HashMap<u32, u64>,
    promised_in: HashMap<u32, u64>,
    /// Of the domains between which a breaker is open, their values at each level; and (0, 0), for all that there is.
    shut: HashSet<(u32, u32)>,
}

/// Interned domains and transports, and what is known between them.
#[derive(Clone, Debug, Default)]
pub(super) struct Topology {
    /// Positions in `paths`, by key.
    domains: HashMap<String, u32>,
    /// Per domain, the value at each level by number (0: unknown), nearest first.
    paths: Vec<Vec<u32>>,
    /// Values by number, from 1 on, each with its level: comparing numbers is what makes large fleets cheap.
    values: HashMap<(usize, String), u32>,
    transports: Vec<Transport>,
    /// Sets of transports that workers offer, in the worker's order.
    pub(super) transport_sets: Vec<Vec<u32>>,
    /// Position in the coefficient set, by (source domain, target domain, transport).
    pub(super) exact: HashMap<(u32, u32, u32), u32>,
    /// The same by (level, transport), where nothing is known of the pair of domains.
    pub(super) by_level: HashMap<(usize, u32), u32>,
    levels: usize,
    /// Least `alpha + synchronization` of those in `exact`.
    least_exact: f64,
    /// Domains nest, and no pair has a transport that its level does not have.
    regular: bool,
    /// The level called [`HOST_LEVEL`].
    host_level: Option<usize>,
}

/// What is asked of a transport in every decision, found once.
#[derive(Clone, Debug)]
struct Transport {
    name: String,
    /// It ends at the host.
    within_host: bool,
}

/// Level within which processes see the same memory and devices.
const HOST_LEVEL: &str = "host";
/// Transports that end at it.
const WITHIN_HOST: [&str; 2] = ["Shm", "CudaIpc"];

/// How KV gets from one domain to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Route {
    pub(crate) level: usize,
    /// Position in `coefficients.links`.
    pub(crate) link: u32,
    pub(crate) transport: u32,
    pub(crate) promised_bytes: u64,
}

/// Why there is no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoute {
    /// No transport that both have and that has coefficients.
    Missing,
    /// All of them are open.
    BreakerOpen,
}

impl Topology {
    pub(super) fn of(levels: &[String]) -> Self {
        Self {
            levels: levels.len(),
            host_level: levels.iter().position(|level| level == HOST_LEVEL),
            ..Self::default()
        }
    }

    /// The position of a domain, added if it is new.
    pub(super) fn add(&mut self, path: &[Option<String>]) -> u32 {
        let key = domain_key(path);
        if let Some(&known) = self.domains.get(&key) {
            return known;
        }
        let next = self.paths.len() as u32;
        let numbers = self.number(path);
        self.paths.push(numbers);
        self.domains.insert(key, next);
        next
    }

    /// A domain path with its values as numbers.
    fn number(&mut self, path: &[Option<String>]) -> Vec<u32> {
        let mut numbers = Vec::with_capacity(path.len());
        for (level, value) in path.iter().enumerate() {
            let next = self.values.len() as u32 + 1;
            numbers.push(match value {
                Some(value) => *self.values.entry((level, value.clone())).or_insert(next),
                None => 0,
            });
        }
        numbers
    }

    /// The number of a transport, which it gets if it has none.
    pub(super) fn transport(&mut self, name: &str) -> u32 {
        self.known_transport(name).unwrap_or_else(|| {
            self.transports.push(Transport {
                name: name.to_owned(),
                within_host: WITHIN_HOST.contains(&name),
            });
            self.transports.len() as u32 - 1
        })
    }

    /// Linear: there are few.
    fn known_transport(&self, name: &str) -> Option<u32> {
        let mut transports = self.transports.iter();
        transports
            .position(|known| known.name == name)
            .map(|position| position as u32)
    }

    /// Finds what follows from everything that was added. `exact` names links of `coefficients`.
    pub(super) fn judge(&mut self, coefficients: &CoefficientSet) {
        let exact = self.exact.values();
        self.least_exact = exact
            .map(|&link| &coefficients.links[link as usize].coefficients)
            .map(|link| link.alpha + link.synchronization)
            .fold(f64::INFINITY, f64::min);
        self.regular = self.nest() && (self.exact.is_empty() || self.is_complete());
    }

    /// Every level has every transport.
    fn is_complete(&self) -> bool {
        (0..self.transports.len() as u32).all(|transport| {
            (0..=self.levels).all(|level| self.by_level.contains_key(&(level, transport)))
        })
    }

    /// Every level of every domain is known, and each value lies in one value of the next level.
    fn nest(&self) -> bool {
        let mut within = vec![0; self.values.len() + 1];
        self.paths.iter().all(|path| {
            path.len() == self.levels
                && path.iter().enumerate().all(|(level, &value)| {
                    let outer = path.get(level + 1).copied().unwrap_or(u32::MAX);
                    let known = &mut within[value as usize];
                    let first = *known == 0;
                    if first {
                        *known = outer;
                    }
                    value != 0 && *known == outer
                })
        })
    }

    /// Whether a transport gets from one domain to the other at all. Where no host is known it is taken for another one.
    fn reaches(&self, transport: u32, source: u32, target: u32) -> bool {
        !self.transports[transport as usize].within_host
            || self.host_level.is_some_and(|level| {
                let value = |domain: u32| self.paths[domain as usize].get(level).copied();
                value(source).is_some_and(|host| host != 0) && value(source) == value(target)
            })
    }

    fn level(&self, first: u32, second: u32) -> usize {
        let first = &self.paths[first as usize];
        let second = &self.paths[second as usize];
        (0..self.levels)
            .find(|&level| {
                let value = first.get(level).copied().unwrap_or(0);
                value != 0 && second.get(level) == Some(&value)
            })
            .unwrap_or(self.levels)
    }

    /// Position of the coefficients: those of the two domains, else those of their level.
    fn link(&self, key: (u32, u32, u32), level: usize) -> Option<u32> {
        let exact = if self.exact.is_empty() {
            None
        } else {
            self.exact.get(&key)
        };
        let of_level = || self.by_level.get(&(level, key.2));
        exact.or_else(of_level).copied()
    }
}

impl Links {
    /// Where nothing is shut and nothing promised.
    pub(super) fn new(topology: Arc<Topology>) -> Self {
        Self {
            topology,
            ..Self::default()
        }
    }

    /// The same place, where nothing is known yet of what goes on there.
    pub(super) fn renewed(&self) -> Self {
        Self::new(Arc::clone(&self.topology))
    }

    pub(super) fn breaker(
        &mut self,
        source: &str,
        target: &str,
        transport: &str,
        state: BreakerState,
    ) {
        let topology = &self.topology;
        let domain = |key| topology.domains.get(key).copied();
        if let (Some(source), Some(target), Some(transport)) = (
            domain(source),
            domain(target),
            topology.known_transport(transport),
        ) {
            self.breakers.insert((source, target, transport), state);
            if state == BreakerState::Open {
                let path = |domain: u32| topology.paths[domain as usize].iter().copied();
                let values = std::iter::zip(path(source), path(target));
                self.shut.extend(values.chain([(0, 0)]));
            }
        }
    }

    pub(super) fn promise(&mut self, source: &str, target: &str, bytes: u64) {
        let domain = |key| self.topology.domains.get(key).copied();
        if let (Some(source), Some(target)) = (domain(source), domain(target)) {
            for promised in [
                self.promised_out.entry(source).or_default(),
                self.promised_in.entry(target).or_default(),
            ] {
                *promised = promised.saturating_add(bytes);
            }
        }
    }

    /// Whether the way between two domains follows from their nearest common level, but for open breakers, coefficients and promised
    /// bytes of their own: domains nest, and no pair has a transport that its level does not have.
    pub(crate) fn is_regular(&self) -> bool {
        self.topology.regular
    }

    /// Whether a breaker is open from a domain within the first place to one within the second: values of one level, or 0 for all
    /// that there is.
    pub(crate) fn is_shut(&self, source: u32, target: u32) -> bool {
        !self.shut.is_empty() && self.shut.contains(&(source, target))
    }

    /// The values of a domain at each level, by number, nearest first.
    pub(crate) fn path(&self, domain: u32) -> &[u32] {
        &self.topology.paths[domain as usize]
    }

    /// The largest number of a value.
    pub(crate) fn values(&self) -> usize {
        self.topology.values.len()
    }

    /// Whether some pair of domains has coefficients or promised bytes of its own.
    pub(crate) fn differ_by_pair(&self) -> bool {
        !(self.topology.exact.is_empty()
            && self.promised_out.is_empty()
            && self.promised_in.is_empty())
    }

    /// The least that a transfer of nothing takes over a link with coefficients of its own, milliseconds.
    pub(crate) fn least_exact(&self) -> f64 {
        self.topology.least_exact
    }

    pub(super) fn level(&self, first: u32, second: u32) -> usize {
        self.topology.level(first, second)
    }

    /// Positions of the transports in a policy's order of preference; names that no worker has are skipped.
    pub(crate) fn preference(&self, names: &[String]) -> Vec<u32> {
        let topology = &self.topology;
        let mut order: Vec<u32> = names
            .iter()
            .filter_map(|name| topology.known_transport(name))
            .collect();
        for position in 0..topology.transports.len() as u32 {
            if !order.contains(&position) {
                order.push(position);
            }
        }
        order
    }

    pub(crate) fn transport_name(&self, transport: u32) -> &str {
        &self.topology.transports[transport as usize].name
    }

    /// The first transport of `preference` that both sides offer, whose breaker lets it pass and that has coefficients.
    pub(crate) fn route(
        &self,
        (source, source_set): (u32, u32),
        (target, target_set): (u32, u32),
        preference: &[u32],
    ) -> Result<Route, NoRoute> {
        let topology = &self.topology;
        let offered = &topology.transport_sets[source_set as usize];
        let accepted = &topology.transport_sets[target_set as usize];
        let level = topology.level(source, target);
        let mut why = NoRoute::Missing;
        for &transport in preference {
            if !offered.contains(&transport)
                || !accepted.contains(&transport)
                || !topology.reaches(transport, source, target)
            {
                continue;
            }
            let key = (source, target, transport);
            let Some(link) = topology.link(key, level) else {
                continue;
            };
            if !self.breakers.is_empty() && self.breakers.get(&key) == Some(&BreakerState::Open) {
                why = NoRoute::BreakerOpen;
                continue;
            }
            let out = Self::promised(&self.promised_out, source);
            let into = Self::promised(&self.promised_in, target);
            return Ok(Route {
                level,
                link,
                transport,
                promised_bytes: out.max(into),
            });
        }
        Err(why)
    }

    /// The route of all pairs of a level where [`Self::is_regular`], without what a pair has of its own.
    pub(crate) fn route_at(
        &self,
        level: usize,
        source_set: u32,
        target_set: u32,
        preference: &[u32],
    ) -> Result<Route, NoRoute> {
        let topology = &self.topology;
        let offered = &topology.transport_sets[source_set as usize];
        let accepted = &topology.transport_sets[target_set as usize];
        let one_host = topology.host_level.is_some_and(|host| level <= host);
        let within_reach =
            |transport: u32| one_host || !topology.transports[transport as usize].within_host;
        preference
            .iter()
            .copied()
            .filter(|transport| offered.contains(transport) && accepted.contains(transport))
            .filter(|transport| within_reach(*transport))
            .find_map(|transport| {
                Some(Route {
                    level,
                    link: *topology.by_level.get(&(level, transport))?,
                    transport,
                    promised_bytes: 0,
                })
            })
            .ok_or(NoRoute::Missing)
    }

    fn promised(bytes: &HashMap<u32, u64>, domain: u32) -> u64 {
        if bytes.is_empty() {
            return 0;
        }
        bytes.get(&domain).copied().unwrap_or(0)
    }

    pub(super) fn worst_breaker(&self, source: u32, target: u32) -> BreakerState {
        let mut worst = BreakerState::Closed;
        for transport in 0..self.topology.transports.len() as u32 {
            match self.breakers.get(&(source, target, transport)) {
                Some(BreakerState::Open) => return BreakerState::Open,
                Some(BreakerState::HalfOpen) => worst = BreakerState::HalfOpen,
                Some(BreakerState::Closed) | None => {}
            }
        }
        worst
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two hosts of one clique and a domain of which nothing is known, joined by shared memory and TCP.
    fn links(levels: &[&str]) -> Links {
        let levels: Vec<String> = levels.iter().map(|level| (*level).to_owned()).collect();
        let mut topology = Topology::of(&levels);
        for host in ["h0", "h1", ""] {
            let path: Vec<_> = levels
                .iter()
                .map(|level| match level.as_str() {
                    _ if host.is_empty() => None,
                    "host" => Some(host.to_owned()),
                    shared => Some(shared.to_owned()),
                })
                .collect();
            topology.add(&path);
        }
        topology.transport_sets = vec![vec![topology.transport("Shm"), topology.transport("Tcp")]];
        for level in 0..=levels.len() {
            topology.by_level.insert((level, 0), 0);
            topology.by_level.insert((level, 1), 1);
        }
        Links::new(Arc::new(topology))
    }

    fn taken(links: &Links, source: u32, target: u32) -> &str {
        let route = links.route((source, 0), (target, 0), &[0, 1]);
        links.transport_name(route.expect("TCP at least").transport)
    }

    #[test]
    fn shared_memory_ends_at_the_host() {
        let three = links(&["clique", "host", "rack"]);
        assert_eq!(taken(&three, 0, 0), "Shm");
        assert_eq!(taken(&three, 0, 1), "Tcp", "one clique, two hosts");
        assert_eq!(
            taken(&three, 2, 2),
            "Tcp",
            "nobody says that it is one host"
        );
        assert_eq!(taken(&links(&["rack"]), 0, 0), "Tcp");
    }
}

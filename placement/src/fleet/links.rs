//! What lies between two domains: the nearest level they share, transports, coefficients, breakers, promised bytes.

use std::collections::HashMap;

use super::BreakerState;

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

/// Interned domains and transports, and what is known between them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Links {
    /// Per domain, the value at each level by number (0: unknown), nearest first.
    pub(super) paths: Vec<Vec<u32>>,
    /// Values by number, from 1 on, each with its level: comparing numbers is what makes large fleets cheap.
    pub(super) values: HashMap<(usize, String), u32>,
    transports: Vec<Transport>,
    /// Sets of transports that workers offer, in the worker's order.
    pub(super) transport_sets: Vec<Vec<u32>>,
    /// Position in the coefficient set, by (source domain, target domain, transport).
    pub(super) exact: HashMap<(u32, u32, u32), u32>,
    /// The same by (level, transport), where nothing is known of the pair of domains.
    pub(super) by_level: HashMap<(usize, u32), u32>,
    pub(super) breakers: HashMap<(u32, u32, u32), BreakerState>,
    /// Bytes that runs under way will still send out of, or into, a domain.
    pub(super) promised_out: HashMap<u32, u64>,
    pub(super) promised_in: HashMap<u32, u64>,
    pub(super) levels: usize,
    /// Least `alpha + synchronization` of those in `exact`.
    pub(super) least_exact: f64,
    /// Found once, when the fleet is built.
    pub(super) uniform: bool,
    /// The level called [`HOST_LEVEL`].
    pub(super) host_level: Option<usize>,
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

impl Links {
    pub(super) fn of(levels: &[String]) -> Self {
        Self {
            levels: levels.len(),
            host_level: levels.iter().position(|level| level == HOST_LEVEL),
            ..Self::default()
        }
    }

    /// Whether a transport gets from one domain to the other at all. Where no host is known it is taken for another one.
    fn reaches(&self, transport: u32, source: u32, target: u32) -> bool {
        !self.transports[transport as usize].within_host
            || self.host_level.is_some_and(|level| {
                let value = |domain: u32| self.paths[domain as usize].get(level).copied();
                value(source).is_some_and(|host| host != 0) && value(source) == value(target)
            })
    }

    /// Whether the way between two domains follows from their nearest common level, but for coefficients and promised bytes of
    /// their own: domains nest, no breaker is open, and no pair has a transport that its level does not have.
    pub(crate) fn is_uniform(&self) -> bool {
        self.uniform
    }

    /// Whether [`Self::is_uniform`], from everything else.
    pub(super) fn find_uniform(&self) -> bool {
        let open = |state: &BreakerState| *state == BreakerState::Open;
        let complete = || {
            (0..self.transports.len() as u32).all(|transport| {
                (0..=self.levels).all(|level| self.by_level.contains_key(&(level, transport)))
            })
        };
        self.nest() && !self.breakers.values().any(open) && (self.exact.is_empty() || complete())
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

    /// The values of a domain at each level, by number, nearest first.
    pub(crate) fn path(&self, domain: u32) -> &[u32] {
        &self.paths[domain as usize]
    }

    /// The largest number of a value.
    pub(crate) fn values(&self) -> usize {
        self.values.len()
    }

    /// Whether some pair of domains has coefficients or promised bytes of its own.
    pub(crate) fn differ_by_pair(&self) -> bool {
        !(self.exact.is_empty() && self.promised_out.is_empty() && self.promised_in.is_empty())
    }

    /// The least that a transfer of nothing takes over a link with coefficients of its own, milliseconds.
    pub(crate) fn least_exact(&self) -> f64 {
        self.least_exact
    }

    pub(super) fn level(&self, first: u32, second: u32) -> usize {
        let first = &self.paths[first as usize];
        let second = &self.paths[second as usize];
        (0..self.levels)
            .find(|&level| {
                let value = first.get(level).copied().unwrap_or(0);
                value != 0 && second.get(level) == Some(&value)
            })
            .unwrap_or(self.levels)
    }

    /// Positions of the transports in a policy's order of preference; names that no worker has are skipped.
    pub(crate) fn preference(&self, names: &[String]) -> Vec<u32> {
        let mut order: Vec<u32> = names
            .iter()
            .filter_map(|name| self.transports.iter().position(|known| known.name == *name))
            .map(|position| position as u32)
            .collect();
        for position in 0..self.transports.len() as u32 {
            if !order.contains(&position) {
                order.push(position);
            }
        }
        order
    }

    /// The number of a transport, which it gets if it has none. Linear: there are few.
    pub(super) fn transport(&mut self, name: &str) -> u32 {
        let known = self.transports.iter().position(|known| known.name == name);
        let number = known.unwrap_or_else(|| {
            self.transports.push(Transport {
                name: name.to_owned(),
                within_host: WITHIN_HOST.contains(&name),
            });
            self.transports.len() - 1
        });
        number as u32
    }

    pub(crate) fn transport_name(&self, transport: u32) -> &str {
        &self.transports[transport as usize].name
    }

    /// The first transport of `preference` that both sides offer, whose breaker lets it pass and that has coefficients.
    pub(crate) fn route(
        &self,
        (source, source_set): (u32, u32),
        (target, target_set): (u32, u32),
        preference: &[u32],
    ) -> Result<Route, NoRoute> {
        let offered = &self.transport_sets[source_set as usize];
        let accepted = &self.transport_sets[target_set as usize];
        let level = self.level(source, target);
        let mut why = NoRoute::Missing;
        for &transport in preference {
            if !offered.contains(&transport)
                || !accepted.contains(&transport)
                || !self.reaches(transport, source, target)
            {
                continue;
            }
            let key = (source, target, transport);
            let Some(link) = self.link(key, level) else {
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

    /// The route of all pairs of a level where [`Self::is_uniform`], without what a pair has of its own.
    pub(crate) fn route_at(
        &self,
        level: usize,
        source_set: u32,
        target_set: u32,
        preference: &[u32],
    ) -> Result<Route, NoRoute> {
        let offered = &self.transport_sets[source_set as usize];
        let accepted = &self.transport_sets[target_set as usize];
        let one_host = self.host_level.is_some_and(|host| level <= host);
        let within_reach =
            |transport: u32| one_host || !self.transports[transport as usize].within_host;
        preference
            .iter()
            .copied()
            .filter(|transport| offered.contains(transport) && accepted.contains(transport))
            .filter(|transport| within_reach(*transport))
            .find_map(|transport| {
                Some(Route {
                    level,
                    link: *self.by_level.get(&(level, transport))?,
                    transport,
                    promised_bytes: 0,
                })
            })
            .ok_or(NoRoute::Missing)
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

    fn promised(bytes: &HashMap<u32, u64>, domain: u32) -> u64 {
        if bytes.is_empty() {
            return 0;
        }
        bytes.get(&domain).copied().unwrap_or(0)
    }

    /// A domain path with its values as numbers.
    pub(super) fn number(&mut self, path: &[Option<String>]) -> Vec<u32> {
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

    pub(super) fn worst_breaker(&self, source: u32, target: u32) -> BreakerState {
        let mut worst = BreakerState::Closed;
        for transport in 0..self.transports.len() as u32 {
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
        let mut links = Links::of(&levels);
        for host in ["h0", "h1", ""] {
            let path: Vec<_> = levels
                .iter()
                .map(|level| match level.as_str() {
                    _ if host.is_empty() => None,
                    "host" => Some(host.to_owned()),
                    shared => Some(shared.to_owned()),
                })
                .collect();
            let numbers = links.number(&path);
            links.paths.push(numbers);
        }
        links.transport_sets = vec![vec![links.transport("Shm"), links.transport("Tcp")]];
        for level in 0..=levels.len() {
            links.by_level.insert((level, 0), 0);
            links.by_level.insert((level, 1), 1);
        }
        links
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

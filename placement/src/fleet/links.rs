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
    pub(super) paths: Vec<Vec<Option<String>>>,
    pub(super) transport_names: Vec<String>,
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
}

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
    pub(super) fn level(&self, first: u32, second: u32) -> usize {
        let first = &self.paths[first as usize];
        let second = &self.paths[second as usize];
        (0..self.levels)
            .find(|&level| {
                let value = first.get(level).and_then(Option::as_ref);
                value.is_some() && value == second.get(level).and_then(Option::as_ref)
            })
            .unwrap_or(self.levels)
    }

    /// Positions of the transports in a policy's order of preference; names that no worker has are skipped.
    pub(crate) fn preference(&self, names: &[String]) -> Vec<u32> {
        let mut order: Vec<u32> = names
            .iter()
            .filter_map(|name| self.transport_names.iter().position(|known| known == name))
            .map(|position| position as u32)
            .collect();
        for position in 0..self.transport_names.len() as u32 {
            if !order.contains(&position) {
                order.push(position);
            }
        }
        order
    }

    pub(crate) fn transport_name(&self, transport: u32) -> &str {
        &self.transport_names[transport as usize]
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
            if !offered.contains(&transport) || !accepted.contains(&transport) {
                continue;
            }
            let key = (source, target, transport);
            let Some(&link) = self
                .exact
                .get(&key)
                .or_else(|| self.by_level.get(&(level, transport)))
            else {
                continue;
            };
            if self.breakers.get(&key) == Some(&BreakerState::Open) {
                why = NoRoute::BreakerOpen;
                continue;
            }
            let out = self.promised_out.get(&source).copied().unwrap_or(0);
            let into = self.promised_in.get(&target).copied().unwrap_or(0);
            return Ok(Route {
                level,
                link,
                transport,
                promised_bytes: out.max(into),
            });
        }
        Err(why)
    }

    pub(super) fn worst_breaker(&self, source: u32, target: u32) -> BreakerState {
        let mut worst = BreakerState::Closed;
        for transport in 0..self.transport_names.len() as u32 {
            match self.breakers.get(&(source, target, transport)) {
                Some(BreakerState::Open) => return BreakerState::Open,
                Some(BreakerState::HalfOpen) => worst = BreakerState::HalfOpen,
                Some(BreakerState::Closed) | None => {}
            }
        }
        worst
    }
}

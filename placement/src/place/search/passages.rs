//! Groups of workers that are alike to a link, and the ways between them.
//!
//! Where domains nest (a host in one rack, a rack in one zone), the pairs whose nearest common level is, say, the rack are those of
//! two hosts of a rack: whole hosts, racks and zones are paired with their neighbours, and only few of those pairs are far from
//! empty. Two places between which a breaker is open are taken apart, down to the domains that it is between. Where domains do not
//! nest each is paired with each.

use std::collections::HashMap;

use super::super::evaluate::{Rules, penalty};
use super::super::gather::{Gathered, count};
use super::super::{Filter, Filtered};
use crate::fleet::{Fleet, NoRoute, Route, WorkerIndex};
use crate::policy::{Enforcement, Policy};

/// Workers that are alike to a link, by bound.
#[derive(Debug)]
pub(super) struct Group {
    kind: Kind,
    /// The value of its level, 0 for all; where domains do not nest, its domain.
    place: u32,
    /// Of its first member, and of all of them where it has no children.
    domain: u32,
    pub(super) members: Vec<usize>,
    pub(super) least: f64,
    children: Vec<usize>,
}

/// What of a worker a link depends on besides its domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    compatibility: u32,
    transports: u32,
}

/// Two groups between which KV may move.
#[derive(Debug)]
pub(super) struct Passage {
    pub(super) prefill: usize,
    pub(super) decode: usize,
    pub(super) route: Route,
    /// Pairs of it may have coefficients or promised bytes of their own.
    pub(super) by_pair: bool,
    pub(super) penalty: f64,
    /// The least that the link's part can be.
    pub(super) least: f64,
}

/// All ways of one decision.
#[derive(Debug)]
pub(super) struct Passages {
    pub(super) open: Vec<Passage>,
    /// Pairs of workers in them.
    pub(super) pairs: u64,
    /// The other pairs, by reason.
    pub(super) filtered: Filtered,
    pub(super) prefills: Vec<Group>,
    pub(super) decodes: Vec<Group>,
}

/// What a level means to a policy.
struct LevelRule {
    penalty: f64,
    too_far: bool,
}

/// The workers of one side in their groups.
struct Side {
    groups: Vec<Group>,
    /// Of each kind the group of all: the root of its tree.
    roots: Vec<usize>,
    /// The smallest group of each worker.
    homes: Vec<usize>,
}

impl Passages {
    pub(super) fn new(
        fleet: &Fleet,
        policy: &Policy,
        rules: &Rules,
        gathered: &Gathered,
        preference: &[u32],
    ) -> Self {
        let prefills: Vec<(WorkerIndex, f64)> = gathered
            .prefills
            .iter()
            .map(|side| (side.worker, side.cost.bound))
            .collect();
        let decodes: Vec<(WorkerIndex, f64)> = gathered
            .decodes
            .iter()
            .map(|side| (side.worker, side.cost.bound))
            .collect();
        let nested = fleet.links.is_regular();
        let side = |workers: &[(WorkerIndex, f64)]| {
            if nested {
                Side::tree(fleet, workers)
            } else {
                Side::flat(fleet, workers)
            }
        };
        let (sources, targets) = (side(&prefills), side(&decodes));
        let mut finder = Finder {
            fleet,
            rules,
            levels: levels(fleet, policy),
            preference,
            twins: twins(fleet, &prefills, &decodes),
            sources: &sources,
            targets: &targets,
            near: Found::default(),
            far: Found::default(),
            filtered: Filtered::new(),
        };
        if nested {
            finder.trees();
        } else {
            finder.each_with_each();
        }
        let Finder {
            near,
            far,
            mut filtered,
            ..
        } = finder;
        let required = policy.topology.enforcement == Enforcement::Required;
        let found = if near.pairs > 0 || required {
            count(&mut filtered, Filter::TooFar, far.pairs);
            near
        } else {
            far
        };
        Self {
            open: found.passages,
            pairs: found.pairs,
            filtered,
            prefills: sources.groups,
            decodes: targets.groups,
        }
    }

    pub(super) fn least(&self, passage: &Passage) -> f64 {
        self.prefills[passage.prefill].least + self.decodes[passage.decode].least + passage.least
    }
}

/// What each level means to the policy; the last is that of pairs that share none.
fn levels(fleet: &Fleet, policy: &Policy) -> Vec<LevelRule> {
    let limit = policy.topology.farthest_level.as_ref();
    let limited = policy.topology.enforcement != Enforcement::Ignored;
    let farthest = limit.and_then(|name| fleet.levels.iter().position(|one| one == name));
    (0..=fleet.levels.len())
        .map(|level| LevelRule {
            penalty: penalty(policy, fleet.level_name(level)),
            // A level that the fleet does not know is nearer than all: a misspelt limit must not lift it.
            too_far: limited && limit.is_some() && farthest.is_none_or(|farthest| level > farthest),
        })
        .collect()
}

/// For each prefill worker its position among the decode workers, if it is one. Empty where none is.
fn twins(
    fleet: &Fleet,
    prefills: &[(WorkerIndex, f64)],
    decodes: &[(WorkerIndex, f64)],
) -> Vec<Option<usize>> {
    let mut positions = vec![None; fleet.len()];
    for (position, &(worker, _)) in decodes.iter().enumerate() {
        positions[worker] = Some(position);
    }
    let twins: Vec<_> = prefills
        .iter()
        .map(|&(worker, _)| positions[worker])
        .collect();
    if twins.iter().all(Option::is_none) {
        return Vec::new();
    }
    twins
}

impl Side {
    fn empty(workers: usize) -> Self {
        Self {
            groups: Vec::new(),
            roots: Vec::new(),
            homes: vec![0; workers],
        }
    }

    fn add(&mut self, kind: Kind, place: u32, domain: u32) -> usize {
        self.groups.push(Group {
            kind,
            place,
            domain,
            members: Vec::new(),
            least: f64::INFINITY,
            children: Vec::new(),
        });
        self.groups.len() - 1
    }

    /// Members come in the order of their bounds.
    fn join(&mut self, group: usize, member: usize, bound: f64) {
        let group = &mut self.groups[group];
        group.least = group.least.min(bound);
        group.members.push(member);
    }

    /// One tree for each kind: all of it, then the farthest level's domains, down to the nearest.
    fn tree(fleet: &Fleet, workers: &[(WorkerIndex, f64)]) -> Self {
        let mut side = Self::empty(workers.len());
        let values = fleet.links.values() + 1;
        let mut kinds: Vec<Kind> = Vec::new();
        let mut known: Vec<Option<usize>> = Vec::new();
        for member in by_bound(workers) {
            let (worker, bound) = workers[member];
            let (domain, kind) = (fleet.workers.domain[worker], kind(fleet, worker));
            let position = kinds.iter().position(|one| *one == kind);
            let position = position.unwrap_or_else(|| {
                kinds.push(kind);
                known.resize(kinds.len() * values, None);
                let root = side.add(kind, 0, domain);
                side.roots.push(root);
                kinds.len() - 1
            });
            let mut group = side.roots[position];
            side.join(group, member, bound);
            for &value in fleet.links.path(domain).iter().rev() {
                let slot = position * values + value as usize;
                group = match known[slot] {
                    Some(child) => child,
                    None => {
                        let child = side.add(kind, value, domain);
                        side.groups[group].children.push(child);
                        known[slot] = Some(child);
                        child
                    }
                };
                side.join(group, member, bound);
            }
            side.homes[member] = group;
        }
        side
    }

    /// One group for each domain and kind.
    fn flat(fleet: &Fleet, workers: &[(WorkerIndex, f64)]) -> Self {
        let mut side = Self::empty(workers.len());
        let mut known: HashMap<(u32, Kind), usize> = HashMap::new();
        for member in by_bound(workers) {
            let (worker, bound) = workers[member];
            let (domain, kind) = (fleet.workers.domain[worker], kind(fleet, worker));
            let group = *known
                .entry((domain, kind))
                .or_insert_with(|| side.add(kind, domain, domain));
            side.join(group, member, bound);
            side.homes[member] = group;
        }
        side
    }
}

fn kind(fleet: &Fleet, worker: WorkerIndex) -> Kind {
    Kind {
        compatibility: fleet.workers.compatibility[worker],
        transports: fleet.workers.transports[worker],
    }
}

/// Positions by bound; those of one bound in fleet order.
fn by_bound(workers: &[(WorkerIndex, f64)]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..workers.len()).collect();
    order.sort_by(|&left, &right| workers[left].1.total_cmp(&workers[right].1));
    order
}

#[derive(Default)]
struct Found {
    passages: Vec<Passage>,
    pairs: u64,
}

struct Finder<'a> {
    fleet: &'a Fleet,
    rules: &'a Rules,
    levels: Vec<LevelRule>,
    preference: &'a [u32],
    twins: Vec<Option<usize>>,
    sources: &'a Side,
    targets: &'a Side,
    near: Found,
    far: Found,
    filtered: Filtered,
}

impl Finder<'_> {
    fn trees(&mut self) {
        let outermost = self.fleet.levels.len();
        for &source in &self.sources.roots {
            for &target in &self.targets.roots {
                let kinds = (
                    self.sources.groups[source].kind,
                    self.targets.groups[target].kind,
                );
                let links = &self.fleet.links;
                let routes: Vec<_> = (0..=outermost)
                    .map(|level| {
                        let (source, target) = (kinds.0.transports, kinds.1.transports);
                        links.route_at(level, source, target, self.preference)
                    })
                    .collect();
                self.descend(source, target, outermost, &routes);
            }
        }
    }

    /// Two groups of one place, in which the farthest of the nearest common levels is `level`.
    fn descend(
        &mut self,
        source: usize,
        target: usize,
        level: usize,
        routes: &[Result<Route, NoRoute>],
    ) {
        if level == 0 {
            let route = if self.is_shut(source, target) {
                self.between(source, target)
            } else {
                routes[0]
            };
            return self.pair(source, target, true, route);
        }
        let (sources, targets) = (self.sources, self.targets);
        for &from in &sources.groups[source].children {
            for &to in &targets.groups[target].children {
                if sources.groups[from].place == targets.groups[to].place {
                    self.descend(from, to, level - 1, routes);
                } else {
                    self.apart(from, to, routes[level]);
                }
            }
        }
    }

    /// Two groups of two places, between whose domains `route` leads where no breaker is open.
    fn apart(&mut self, source: usize, target: usize, route: Result<Route, NoRoute>) {
        if !self.is_shut(source, target) {
            return self.pair(source, target, false, route);
        }
        let (sources, targets) = (self.sources, self.targets);
        let within = (
            &sources.groups[source].children,
            &targets.groups[target].children,
        );
        if within.0.is_empty() {
            return self.pair(source, target, false, self.between(source, target));
        }
        for &from in within.0 {
            for &to in within.1 {
                self.apart(from, to, route);
            }
        }
    }

    /// Whether a breaker is open between two domains of theirs.
    fn is_shut(&self, source: usize, target: usize) -> bool {
        let places = (
            self.sources.groups[source].place,
            self.targets.groups[target].place,
        );
        self.fleet.links.is_shut(places.0, places.1)
    }

    /// The route between two groups of one domain each.
    fn between(&self, source: usize, target: usize) -> Result<Route, NoRoute> {
        let end = |group: &Group| (group.domain, group.kind.transports);
        let (source, target) = (&self.sources.groups[source], &self.targets.groups[target]);
        let links = &self.fleet.links;
        links.route(end(source), end(target), self.preference)
    }

    fn each_with_each(&mut self) {
        let (sources, targets) = (self.sources, self.targets);
        for (source, from) in sources.groups.iter().enumerate() {
            for (target, to) in targets.groups.iter().enumerate() {
                let route = self.between(source, target);
                self.pair(source, target, from.place == to.place, route);
            }
        }
    }

    fn pair(
        &mut self,
        source: usize,
        target: usize,
        same_place: bool,
        route: Result<Route, NoRoute>,
    ) {
        let pairs = self.pairs(source, target, same_place);
        if pairs == 0 {
            return;
        }
        let row = self.sources.groups[source].kind.compatibility;
        let column = self.targets.groups[target].kind.compatibility;
        if !self.fleet.workers.compatible[row as usize][column as usize] {
            return count(&mut self.filtered, Filter::Incompatible, pairs);
        }
        let route = match route {
            Ok(route) => route,
            Err(NoRoute::Missing) => {
                return count(&mut self.filtered, Filter::NoTransport, pairs);
            }
            Err(NoRoute::BreakerOpen) => {
                return count(&mut self.filtered, Filter::BreakerOpen, pairs);
            }
        };
        let links = &self.fleet.links;
        let by_pair = !self.sources.roots.is_empty() && links.differ_by_pair();
        let link = &self.fleet.coefficients.links[route.link as usize].coefficients;
        let mut alone = link.alpha + link.synchronization;
        if by_pair {
            alone = alone.min(links.least_exact());
        }
        let level = &self.levels[route.level];
        let passage = Passage {
            prefill: source,
            decode: target,
            route,
            by_pair,
            penalty: level.penalty,
            least: self.rules.weights.wt * alone + level.penalty,
        };
        let found = if level.too_far {
            &mut self.far
        } else {
            &mut self.near
        };
        found.passages.push(passage);
        found.pairs += pairs;
    }

    /// Pairs of two different workers. A worker is in one place: only there it meets itself.
    fn pairs(&self, source: usize, target: usize, same_place: bool) -> u64 {
        let members = &self.sources.groups[source].members;
        let mut pairs = (members.len() * self.targets.groups[target].members.len()) as u64;
        if same_place && !self.twins.is_empty() {
            let twins = members.iter().filter_map(|&member| self.twins[member]);
            let itself = |twin: &usize| self.targets.homes[*twin] == target;
            pairs -= twins.filter(itself).count() as u64;
        }
        pairs
    }
}

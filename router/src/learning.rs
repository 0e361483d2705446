//! What the router learns from the runs it dispatched: links, breakers, output lengths, estimate errors, the fallback budget.
//!
//! Soft, like everything a router holds: it starts from priors and is right again after some runs.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use baton_placement::breaker::{Breaker, Pass, TransferResult};
use baton_placement::budget::{BudgetRefusal, FallbackBudget};
use baton_placement::calibration::{self, LinkCalibrator};
use baton_placement::coefficients::{LinkCoefficients, LinkName, WorkerCoefficients};
use baton_placement::estimate::{ErrorRatio, EstimateTracker, OutputLengths, Path};
use baton_placement::fleet::BreakerState;
use baton_placement::policy::{BreakerPolicy, Policy};
use baton_placement::record::DecisionRecord;
use baton_protocol::ids::WorkerId;
use parking_lot::Mutex;

use crate::clock::Moment;
use crate::fleet::snapshot::{Learnt, LinkFacts, link_name};
use crate::fleet::topology::DomainPath;

/// Until a worker publishes what it measured at its start.
pub fn worker_prior() -> WorkerCoefficients {
    // The first entry of placement's table: it is there by construction, and any is better than none.
    calibration::built_in_names()
        .next()
        .and_then(calibration::built_in)
        .unwrap_or(WorkerCoefficients {
            a: 1.0,
            b: 0.02,
            k: 0.0,
            floor: 1.0,
            d0: 5.0,
            d1: 0.01,
            d2: 0.0,
            upper: calibration::PhaseFactors::default(),
            samples: Default::default(),
        })
}

/// Until transfers over the level were seen. What lies between is not in the prior: the first transfers show it.
pub fn link_prior(_level: &str, transport: &str) -> LinkCoefficients {
    calibration::link_prior(transport)
}

/// Milliseconds. A transfer that is expected to be shorter is slow only against this: what a busy host's scheduler adds to it says
/// nothing about the link, and the fitted cost follows it anyway. A silent fallback to a slower transport shows in long ones.
const SHORTEST_SLOW: f64 = 100.0;

/// What was learnt of a link between two places is forgotten when one of them has had no worker for so long: longer than a rollout
/// or a node's restart.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(30 * 60);

/// A directed link, as a run used it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkUse {
    pub source: DomainPath,
    pub target: DomainPath,
    pub transport: String,
}

impl LinkUse {
    fn name(&self) -> LinkName {
        link_name(&self.source, &self.target, &self.transport)
    }
}

/// A transfer that was made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moved {
    pub bytes: u64,
    pub blocks: u32,
    /// Blocks that were published last, in one step: the others moved while it computed.
    pub last_blocks: u32,
    /// From the seal to the last verified block, milliseconds.
    pub exposed_milliseconds: f64,
    pub synchronization_milliseconds: f64,
}

#[derive(Debug)]
struct Link {
    used: LinkUse,
    calibrator: LinkCalibrator,
    breaker: Breaker,
    fitted: bool,
    /// When it was last used, or had workers at both ends.
    needed: Moment,
}

impl Link {
    fn new(used: LinkUse, policy: BreakerPolicy, now: Moment) -> Self {
        Self {
            calibrator: LinkCalibrator::new(calibration::link_prior(&used.transport)),
            breaker: Breaker::new(policy),
            used,
            fitted: false,
            needed: now,
        }
    }
}

#[derive(Debug, Default)]
struct Inner {
    /// Ordered, so that equal knowledge gives equal coefficient sets.
    links: BTreeMap<LinkName, Link>,
    /// Rises when a link gets its first fit, and when one that had a fit is forgotten.
    fits: u64,
    outputs: OutputLengths,
    estimates: EstimateTracker,
    budgets: HashMap<String, FallbackBudget>,
}

/// Shared by all runs.
#[derive(Debug, Default)]
pub struct Learning {
    inner: Mutex<Inner>,
}

/// Links by the state of their breaker, for `baton_links{state}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounts {
    pub closed: u32,
    pub open: u32,
    pub half_open: u32,
}

/// What every view needs to know of the links.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkStates {
    /// Another number whenever a link has got its first fit, or one that had a fit is forgotten.
    pub fits: u64,
    /// Those whose breaker is not closed.
    pub shut: Vec<(LinkName, BreakerState)>,
}

impl Learning {
    /// What coefficient sets, and the ground of snapshots, are made with.
    pub fn learnt(&self) -> Learnt {
        let inner = self.inner.lock();
        Learnt {
            links: inner
                .links
                .values()
                .map(|link| LinkFacts {
                    source: link.used.source.clone(),
                    target: link.used.target.clone(),
                    transport: link.used.transport.clone(),
                    coefficients: link.fitted.then(|| link.calibrator.coefficients()),
                })
                .collect(),
            paths: inner.estimates.factors(),
        }
    }

    /// What every view needs to know of the links.
    pub fn links(&self, now: Moment) -> LinkStates {
        let inner = self.inner.lock();
        let states = inner.links.iter().filter_map(|(name, link)| {
            let state = link.breaker.state(now.milliseconds());
            (state != BreakerState::Closed).then(|| (name.clone(), state))
        });
        LinkStates {
            fits: inner.fits,
            shut: states.collect(),
        }
    }

    /// `places` are the keys of the domain paths of all workers: links between others are forgotten after a while.
    pub fn workers_at(&self, places: &HashSet<String>, now: Moment) {
        let mut inner = self.inner.lock();
        let Inner { links, fits, .. } = &mut *inner;
        links.retain(|name, link| {
            if places.contains(&name.source) && places.contains(&name.target) {
                link.needed = now;
            }
            let stays = now.since(link.needed) < FORGOTTEN_AFTER;
            *fits += u64::from(link.fitted && !stays);
            stays
        });
    }

    /// A run is about to use the link: takes the probe of one that is half-open. `None`: another run probes it already. What is
    /// given comes back with [`Self::moved`], [`Self::transfer_failed`] or [`Self::give_back`].
    pub fn try_use(&self, used: &LinkUse, policy: &Policy, now: Moment) -> Option<Pass> {
        let mut inner = self.inner.lock();
        let breaker = &mut inner.link(used, policy, now).breaker;
        breaker.set_policy(policy.topology.breaker);
        breaker.try_use(now.milliseconds())
    }

    /// A run has ended that found out nothing about the link.
    pub fn give_back(&self, used: &LinkUse, pass: Pass) {
        if let Some(link) = self.inner.lock().links.get_mut(&used.name()) {
            link.breaker.give_back(pass);
        }
    }

    /// A transfer was made. `pass` is what [`Self::try_use`] gave for this link; for one that no run asked for, `Free`.
    pub fn moved(&self, used: &LinkUse, moved: Moved, pass: Pass, policy: &Policy, now: Moment) {
        let mut inner = self.inner.lock();
        let link = inner.link(used, policy, now);
        if moved.blocks == 0 {
            // Nothing was missing: the link works, and that is all it says.
            let done = TransferResult::Done {
                actual: 0.0,
                expected: 0.0,
            };
            return link.breaker.observe(done, pass, now.milliseconds());
        }
        let last = moved.last_blocks.clamp(1, moved.blocks);
        let bytes = moved.bytes / u64::from(moved.blocks) * u64::from(last);
        let done = TransferResult::Done {
            actual: moved.exposed_milliseconds,
            // The whole transfer, so that one which could not hide does not count as slow.
            expected: link
                .calibrator
                .usual(moved.bytes, moved.blocks)
                .max(SHORTEST_SLOW),
        };
        link.breaker.observe(done, pass, now.milliseconds());
        link.calibrator
            .observe(bytes, last, moved.exposed_milliseconds);
        link.calibrator
            .observe_synchronization(moved.synchronization_milliseconds);
        let first = !std::mem::replace(&mut link.fitted, true);
        inner.fits += u64::from(first);
    }

    /// A transfer failed for a reason that speaks against the link.
    pub fn transfer_failed(&self, used: &LinkUse, pass: Pass, policy: &Policy, now: Moment) {
        let mut inner = self.inner.lock();
        inner.link(used, policy, now).breaker.observe(
            TransferResult::Failed,
            pass,
            now.milliseconds(),
        );
    }

    /// Somebody has read KV from here too late, over one of these links: all are shut until a probe shows that they work.
    pub fn distrust_from(&self, source: &DomainPath, now: Moment) {
        let mut inner = self.inner.lock();
        for link in inner.links.values_mut() {
            if link.used.source == *source {
                link.breaker.distrust(now.milliseconds());
            }
        }
    }

    /// So many transfers to here were given up by an engine that said nothing of it in its answers, and nobody knows from where.
    pub fn failed_to(&self, target: &DomainPath, times: u64, now: Moment) {
        self.given_up(times, now, |used| used.target == *target);
    }

    /// The same, of transfers over one of these links.
    pub fn failed_over(&self, links: &[LinkUse], times: u64, now: Moment) {
        self.given_up(times, now, |used| links.contains(used));
    }

    fn given_up(&self, times: u64, now: Moment, may_be: impl Fn(&LinkUse) -> bool) {
        // More than open any breaker say no more.
        let times = times.min(1_000);
        let mut inner = self.inner.lock();
        let links = inner.links.values_mut();
        for link in links.filter(|link| may_be(&link.used)) {
            for _ in 0..times {
                let failed = TransferResult::Failed;
                link.breaker.observe(failed, Pass::Free, now.milliseconds());
            }
        }
    }

    /// E[osl] of a policy's model, not yet bounded by the request.
    pub fn expected_output(&self, policy: &Policy) -> f64 {
        self.inner
            .lock()
            .outputs
            .expected(&policy.model, &policy.name)
    }

    /// A run ended by itself.
    pub fn output(&self, policy: &Policy, tokens: u32) {
        self.inner
            .lock()
            .outputs
            .observe(&policy.model, &policy.name, tokens);
    }

    /// A finished record: how far off its estimate was.
    pub fn record(&self, record: &DecisionRecord) -> Vec<ErrorRatio> {
        self.inner.lock().estimates.observe_record(record)
    }

    pub fn coverage(&self, path: Path) -> Option<f64> {
        self.inner.lock().estimates.coverage(path)
    }

    /// A run began: it saves up for the fallback of others.
    pub fn run_began(&self, policy: &Policy, now: Moment) {
        self.inner
            .lock()
            .budget(policy, now)
            .run(now.milliseconds());
    }

    /// Asks for one local recompute on a worker; what is granted is given back with [`Self::recompute_ended`].
    pub fn recompute(
        &self,
        worker: &WorkerId,
        policy: &Policy,
        now: Moment,
    ) -> Result<(), BudgetRefusal> {
        self.inner
            .lock()
            .budget(policy, now)
            .begin(worker, now.milliseconds())
    }

    /// Recomputes under way, of all policies.
    pub fn recomputes(&self) -> u32 {
        let inner = self.inner.lock();
        inner.budgets.values().map(FallbackBudget::running).sum()
    }

    pub fn recompute_ended(&self, worker: &WorkerId, policy: &Policy) {
        if let Some(budget) = self.inner.lock().budgets.get_mut(&policy.name) {
            budget.end(worker);
        }
    }

    /// Its worker refused the recompute: it was not begun and costs nothing.
    pub fn recompute_refused(&self, worker: &WorkerId, policy: &Policy) {
        if let Some(budget) = self.inner.lock().budgets.get_mut(&policy.name) {
            budget.refund(worker);
        }
    }

    pub fn link_counts(&self, now: Moment) -> LinkCounts {
        let mut counts = LinkCounts::default();
        for link in self.inner.lock().links.values() {
            match link.breaker.state(now.milliseconds()) {
                BreakerState::Closed => counts.closed += 1,
                BreakerState::Open => counts.open += 1,
                BreakerState::HalfOpen => counts.half_open += 1,
            }
        }
        counts
    }
}

impl Inner {
    fn link(&mut self, used: &LinkUse, policy: &Policy, now: Moment) -> &mut Link {
        let link = self
            .links
            .entry(used.name())
            .or_insert_with(|| Link::new(used.clone(), policy.topology.breaker, now));
        link.needed = now;
        link
    }

    fn budget(&mut self, policy: &Policy, now: Moment) -> &mut FallbackBudget {
        let limits = policy.fallback.local_recompute;
        let budget = self
            .budgets
            .entry(policy.name.clone())
            .or_insert_with(|| FallbackBudget::new(limits, now.milliseconds()));
        budget.set_policy(limits);
        budget
    }
}

#[cfg(test)]
pub(crate) mod tests;

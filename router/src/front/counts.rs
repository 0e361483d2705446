//! What the front tells of its line and its connections, for scrapers. Every label is one word of a fixed few.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use super::gate::NoPlace;

/// How a wait in line ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WaitLabels {
    /// `served`, `full` (a more urgent request took its place in line), `late`, `closed` (the router ends), `left` (the client did).
    pub outcome: &'static str,
}

/// Why a request got no place.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RefusalLabels {
    /// `full`, `late`, `closed`.
    pub cause: &'static str,
}

/// What a connection does.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ConnectionLabels {
    /// `busy` (a request is being answered), `idle`.
    pub state: &'static str,
}

/// What happened to a connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct EventLabels {
    /// `accepted`, `refused` (none was idle), `displaced` (idle, closed for another), `stalled` (its client did not read).
    pub event: &'static str,
}

/// Counts of one front. Cloning shares them; those of [`Counts::default`] are seen by nobody until they are registered.
#[derive(Clone, Debug)]
pub struct Counts {
    waiting: Gauge,
    waits: Family<WaitLabels, Histogram, fn() -> Histogram>,
    refusals: Family<RefusalLabels, Counter>,
    busy: Gauge,
    idle: Gauge,
    connections: Family<ConnectionLabels, Gauge>,
    events: Family<EventLabels, Counter>,
}

/// 1 ms to 33 s: beyond the longest wait that is usual.
fn wait_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 16))
}

impl Default for Counts {
    fn default() -> Self {
        let connections = Family::<ConnectionLabels, Gauge>::default();
        let in_state = |state| {
            connections
                .get_or_create(&ConnectionLabels { state })
                .clone()
        };
        Self {
            waiting: Gauge::default(),
            waits: Family::new_with_constructor(wait_seconds),
            refusals: Family::default(),
            busy: in_state("busy"),
            idle: in_state("idle"),
            connections,
            events: Family::default(),
        }
    }
}

impl Counts {
    /// Makes them part of what scrapers see.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "waiting_requests",
            "Requests in line for a place",
            self.waiting.clone(),
        );
        registry.register_with_unit(
            "waiting_duration",
            "Time in line of requests that did not get a place at once",
            Unit::Seconds,
            self.waits.clone(),
        );
        registry.register(
            "waiting_refusals",
            "Requests that got no place, by cause",
            self.refusals.clone(),
        );
        registry.register(
            "connections",
            "Connections of the public port",
            self.connections.clone(),
        );
        registry.register(
            "connection_events",
            "What happened to connections of the public port",
            self.events.clone(),
        );
    }

    pub(super) fn in_line(&self, requests: usize) {
        self.waiting
            .set(i64::try_from(requests).unwrap_or(i64::MAX));
    }

    pub(super) fn waited(&self, outcome: &'static str, time: Duration) {
        self.waits
            .get_or_create(&WaitLabels { outcome })
            .observe(time.as_secs_f64());
    }

    pub(super) fn no_place(&self, reason: NoPlace) {
        let cause = reason.word();
        self.refusals.get_or_create(&RefusalLabels { cause }).inc();
    }

    pub(super) fn connections(&self, taken: usize, idle: usize) {
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.busy.set(count(taken.saturating_sub(idle)));
        self.idle.set(count(idle));
    }

    pub(super) fn connection(&self, event: &'static str) {
        self.events.get_or_create(&EventLabels { event }).inc();
    }
}

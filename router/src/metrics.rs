//! The router's metrics. Names, units and labels are a contract (design, interface); no label ever holds a client's string.

use std::fmt;
use std::sync::atomic::AtomicU64;

use baton_telemetry::tracer::Counts;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::front;

/// Labels of what a run came to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RunLabels {
    pub model: String,
    /// `local`, `remote`, `none`.
    pub plan: &'static str,
    /// `completed`, `failed`, `cancelled`, `rejected`.
    pub outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PlanLabels {
    pub model: String,
    pub plan: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DecisionLabels {
    pub policy: String,
    pub plan: &'static str,
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct EstimateLabels {
    pub path: &'static str,
    pub term: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PathLabels {
    pub path: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CauseLabels {
    pub cause: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct TransferLabels {
    pub transport: String,
    pub level: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StateLabels {
    pub state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ModelLabels {
    pub model: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct KindLabels {
    pub kind: &'static str,
}

type Ratio = Gauge<f64, AtomicU64>;
type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

/// Everything that is counted.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    pub requests: Family<RunLabels, Counter>,
    pub time_to_first_token: Histograms<PlanLabels>,
    pub time_per_output_token: Histograms<PlanLabels>,
    pub request_duration: Histograms<PlanLabels>,
    pub decisions: Family<DecisionLabels, Counter>,
    pub decision_duration: Histogram,
    pub estimate_error: Histograms<EstimateLabels>,
    pub estimate_coverage: Family<PathLabels, Ratio>,
    pub fallbacks: Family<CauseLabels, Counter>,
    pub transfer_bytes: Family<TransferLabels, Counter>,
    pub transfer_duration: Histograms<TransferLabels>,
    pub links: Family<StateLabels, Gauge>,
    pub inflight: Family<ModelLabels, Gauge>,
    pub run_states: Family<StateLabels, Counter>,
    pub index_blocks: Gauge,
    pub index_gaps: Counter,
    /// Reads after their lease, as engines count them.
    pub late_reads: Counter,
    pub engine_failed_transfers: Counter,
    pub record_overflow: Counter,
    pub illegal_events: Counter,
    pub watch_errors: Family<KindLabels, Counter>,
    pub spans: Counts,
    /// The line before the router and its public connections.
    pub front: front::counts::Counts,
}

/// 1 ms to 131 s: from a cached prompt on a GPU to a long one on a CPU.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 18))
}

/// 0.1 ms to 3.2 s.
fn token_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.0001, 2.0, 16))
}

/// 1 µs to 33 ms.
fn decision_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.000_001, 2.0, 16))
}

/// actual / estimated, around one.
fn ratios() -> Histogram {
    Histogram::new([
        0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0, 4.0, 10.0,
    ])
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// A run that counts as in flight until this is dropped, should it end in a panic.
#[derive(Debug)]
pub struct InFlight(Gauge);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Metrics {
    /// Counts a run as in flight.
    pub fn in_flight(&self, labels: &ModelLabels) -> InFlight {
        let gauge = self.inflight.get_or_create(labels).clone();
        gauge.inc();
        InFlight(gauge)
    }

    pub fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("baton"),
            requests: Family::default(),
            time_to_first_token: Family::new_with_constructor(seconds),
            time_per_output_token: Family::new_with_constructor(token_seconds),
            request_duration: Family::new_with_constructor(seconds),
            decisions: Family::default(),
            decision_duration: decision_seconds(),
            estimate_error: Family::new_with_constructor(ratios),
            estimate_coverage: Family::default(),
            fallbacks: Family::default(),
            transfer_bytes: Family::default(),
            transfer_duration: Family::new_with_constructor(token_seconds),
            links: Family::default(),
            inflight: Family::default(),
            run_states: Family::default(),
            index_blocks: Gauge::default(),
            index_gaps: Counter::default(),
            late_reads: Counter::default(),
            engine_failed_transfers: Counter::default(),
            record_overflow: Counter::default(),
            illegal_events: Counter::default(),
            watch_errors: Family::default(),
            spans: Counts::default(),
            front: front::counts::Counts::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register(
            "requests",
            "Requests by what became of them",
            self.requests.clone(),
        );
        registry.register_with_unit(
            "time_to_first_token",
            "From receipt to the first token",
            Unit::Seconds,
            self.time_to_first_token.clone(),
        );
        registry.register_with_unit(
            "time_per_output_token",
            "Mean between two tokens of a request",
            Unit::Seconds,
            self.time_per_output_token.clone(),
        );
        registry.register_with_unit(
            "request_duration",
            "From receipt to the end",
            Unit::Seconds,
            self.request_duration.clone(),
        );
        registry.register(
            "decisions",
            "Placement decisions by plan and reason",
            self.decisions.clone(),
        );
        registry.register_with_unit(
            "decision_duration",
            "Time that placing one request takes",
            Unit::Seconds,
            self.decision_duration.clone(),
        );
        registry.register_with_unit(
            "estimate_error",
            "Actual over estimated",
            Unit::Other("ratio".to_owned()),
            self.estimate_error.clone(),
        );
        registry.register_with_unit(
            "estimate_coverage",
            "Share of recent runs within their upper bound",
            Unit::Other("ratio".to_owned()),
            self.estimate_coverage.clone(),
        );
        registry.register(
            "fallbacks",
            "Remote plans given up, by cause",
            self.fallbacks.clone(),
        );
        registry.register_with_unit(
            "transfer",
            "KV moved between workers",
            Unit::Bytes,
            self.transfer_bytes.clone(),
        );
        registry.register_with_unit(
            "transfer_duration",
            "From the claim to the last verified block",
            Unit::Seconds,
            self.transfer_duration.clone(),
        );
        registry.register(
            "links",
            "Links by the state of their breaker",
            self.links.clone(),
        );
        registry.register(
            "inflight_requests",
            "Requests under way",
            self.inflight.clone(),
        );
        registry.register(
            "run_states",
            "States that runs have entered",
            self.run_states.clone(),
        );
        registry.register(
            "index_blocks",
            "Distinct blocks in the prefix index",
            self.index_blocks.clone(),
        );
        registry.register(
            "index_gaps",
            "Holes in workers' cache events",
            self.index_gaps.clone(),
        );
        registry.register(
            "engine_late_reads",
            "Reads of KV after its lease, as engines count them: an answer may have been made from another request's KV",
            self.late_reads.clone(),
        );
        registry.register(
            "engine_failed_transfers",
            "Transfers that engines' own connectors gave up",
            self.engine_failed_transfers.clone(),
        );
        registry.register(
            "record_overflow",
            "Decision records lost: the writer was behind, or the disk full",
            self.record_overflow.clone(),
        );
        registry.register(
            "illegal_events",
            "Reports of workers that no run could have made",
            self.illegal_events.clone(),
        );
        registry.register(
            "cluster_watch_errors",
            "Tries to list or watch the API server that failed, by what was to be seen",
            self.watch_errors.clone(),
        );
        registry.register(
            "spans",
            "Spans by what became of them: exported, failed, dropped",
            self.spans.clone(),
        );
        self.front.register(registry);
    }

    /// The text format, for scrapers.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_contract() {
        let metrics = Metrics::new();
        let plan = PlanLabels {
            model: "m".into(),
            plan: "local",
        };
        metrics
            .time_to_first_token
            .get_or_create(&plan)
            .observe(0.1);
        metrics
            .time_per_output_token
            .get_or_create(&plan)
            .observe(0.1);
        metrics.request_duration.get_or_create(&plan).observe(0.1);
        metrics
            .requests
            .get_or_create(&RunLabels {
                model: "m".into(),
                plan: "local",
                outcome: "completed",
            })
            .inc();
        metrics
            .decisions
            .get_or_create(&DecisionLabels {
                policy: "p".into(),
                plan: "local",
                reason: "LocalCheaper".into(),
            })
            .inc();
        metrics.decision_duration.observe(1e-5);
        let estimate = EstimateLabels {
            path: "local",
            term: "queue",
        };
        metrics.estimate_error.get_or_create(&estimate).observe(1.0);
        metrics
            .estimate_coverage
            .get_or_create(&PathLabels { path: "local" })
            .set(0.95);
        metrics
            .fallbacks
            .get_or_create(&CauseLabels {
                cause: "timeout".into(),
            })
            .inc();
        let transfer = TransferLabels {
            transport: "Tcp".into(),
            level: "host".into(),
        };
        metrics.transfer_bytes.get_or_create(&transfer).inc_by(7);
        metrics
            .transfer_duration
            .get_or_create(&transfer)
            .observe(0.1);
        metrics
            .links
            .get_or_create(&StateLabels { state: "Open" })
            .set(1);
        let labels = ModelLabels { model: "m".into() };
        let _one = metrics.in_flight(&labels);
        let broken = std::panic::AssertUnwindSafe(|| {
            let _other = metrics.in_flight(&labels);
            panic!("a run of which something was not thought");
        });
        assert!(std::panic::catch_unwind(broken).is_err());
        let text = metrics.text().unwrap();
        for line in [
            "baton_requests_total{model=\"m\",plan=\"local\",outcome=\"completed\"} 1",
            "baton_time_to_first_token_seconds_count{model=\"m\",plan=\"local\"} 1",
            "baton_time_per_output_token_seconds_count",
            "baton_request_duration_seconds_count",
            "baton_decisions_total{policy=\"p\",plan=\"local\",reason=\"LocalCheaper\"} 1",
            "baton_decision_duration_seconds_count",
            "baton_estimate_error_ratio_count{path=\"local\",term=\"queue\"} 1",
            "baton_estimate_coverage_ratio{path=\"local\"} 0.95",
            "baton_fallbacks_total{cause=\"timeout\"} 1",
            "baton_transfer_bytes_total{transport=\"Tcp\",level=\"host\"} 7",
            "baton_transfer_duration_seconds_count",
            "baton_links{state=\"Open\"} 1",
            "baton_inflight_requests{model=\"m\"} 1",
            "baton_index_blocks 0",
            "baton_index_gaps_total 0",
            "baton_waiting_requests 0",
            "baton_connections{state=\"busy\"} 0",
            "baton_connections{state=\"idle\"} 0",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }
}

//! The operator's metrics. Names are those that dashboards for controllers know where they fit.

use std::fmt;
use std::sync::atomic::AtomicI64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// `pool` or `routepolicy`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ControllerLabels {
    pub controller: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ResultLabels {
    pub controller: &'static str,
    /// `success`, `requeue`, `error`.
    pub result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct QueueLabels {
    pub name: &'static str,
}

/// One per pool and state: bounded by the number of pools.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PoolLabels {
    pub namespace: String,
    pub role: &'static str,
    pub pool: String,
    /// `desired`, `current`, `ready`, `available`, `updated`, `draining`.
    pub state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct KindLabels {
    pub kind: &'static str,
}

/// What was written to the API server.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WriteLabels {
    pub verb: &'static str,
    pub resource: &'static str,
}

/// Everything that is counted.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    pub reconciles: Family<ResultLabels, Counter>,
    pub reconcile_errors: Family<ControllerLabels, Counter>,
    pub reconcile_time: Family<ControllerLabels, Histogram, fn() -> Histogram>,
    pub queue_depth: Family<QueueLabels, Gauge>,
    pub pool_replicas: Family<PoolLabels, Gauge>,
    pub watch_errors: Family<KindLabels, Counter>,
    pub writes: Family<WriteLabels, Counter>,
    pub leading: Gauge<i64, AtomicI64>,
}

/// 5 ms to 82 s: the deadline of a reconcile is 60 s.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.005, 2.0, 15))
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            reconciles: Family::default(),
            reconcile_errors: Family::default(),
            reconcile_time: Family::new_with_constructor(seconds),
            queue_depth: Family::default(),
            pool_replicas: Family::default(),
            watch_errors: Family::default(),
            writes: Family::default(),
            leading: Gauge::default(),
        };
        let registry = &mut metrics.registry;
        registry.register(
            "controller_runtime_reconcile",
            "Reconciles by controller and result",
            metrics.reconciles.clone(),
        );
        registry.register(
            "controller_runtime_reconcile_errors",
            "Reconciles that failed",
            metrics.reconcile_errors.clone(),
        );
        registry.register(
            "controller_runtime_reconcile_time_seconds",
            "Time of one reconcile",
            metrics.reconcile_time.clone(),
        );
        registry.register(
            "workqueue_depth",
            "Objects that are due and wait",
            metrics.queue_depth.clone(),
        );
        registry.register(
            "baton_pool_replicas",
            "Replicas of a pool by state",
            metrics.pool_replicas.clone(),
        );
        registry.register(
            "baton_operator_watch_errors",
            "Watches that were cut or refused",
            metrics.watch_errors.clone(),
        );
        registry.register(
            "baton_operator_writes",
            "Writes to the API server, those of the lease left out",
            metrics.writes.clone(),
        );
        registry.register(
            "baton_operator_leading",
            "1 while this process leads",
            metrics.leading.clone(),
        );
        metrics
    }
}

impl Metrics {
    /// One write was made.
    pub fn wrote(&self, verb: &'static str, resource: &'static str) {
        self.writes
            .get_or_create(&WriteLabels { verb, resource })
            .inc();
    }

    /// In OpenMetrics' text format.
    ///
    /// # Errors
    /// A metric cannot be written as text.
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
        let metrics = Metrics::default();
        let controller = "pool";
        let result = "success";
        metrics
            .reconciles
            .get_or_create(&ResultLabels { controller, result })
            .inc();
        metrics
            .reconcile_errors
            .get_or_create(&ControllerLabels { controller })
            .inc();
        metrics
            .reconcile_time
            .get_or_create(&ControllerLabels { controller })
            .observe(0.1);
        metrics
            .queue_depth
            .get_or_create(&QueueLabels { name: "pool" })
            .set(2);
        let labels = PoolLabels {
            namespace: "n".into(),
            role: "decode",
            pool: "d".into(),
            state: "ready",
        };
        metrics.pool_replicas.get_or_create(&labels).set(3);
        metrics.wrote("patch", "pods");
        let text = metrics.text().unwrap();
        for line in [
            "controller_runtime_reconcile_total{controller=\"pool\",result=\"success\"} 1",
            "controller_runtime_reconcile_errors_total{controller=\"pool\"} 1",
            "controller_runtime_reconcile_time_seconds_count{controller=\"pool\"} 1",
            "workqueue_depth{name=\"pool\"} 2",
            "baton_pool_replicas{namespace=\"n\",role=\"decode\",pool=\"d\",state=\"ready\"} 3",
            "baton_operator_writes_total{verb=\"patch\",resource=\"pods\"} 1",
            "baton_operator_leading 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }
}

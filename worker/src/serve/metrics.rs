//! Metrics of a worker, named as design/05 says. Numbers that the pool keeps anyway are read when they are scraped.

use std::fmt;

use baton_protocol::failure::HandoffFailure;
use baton_telemetry::tracer::Counts;
use parking_lot::Mutex;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::engine::{LoadBoard, StepKind};
use crate::kv::KvPool;
use crate::transport::Obstacle;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CauseLabels {
    cause: Cause,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LeftLabels {
    from: &'static str,
    cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Cause(HandoffFailure);

impl EncodeLabelValue for Cause {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        self.0.word().encode(encoder)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabels {
    phase: &'static str,
}

/// All metrics of one worker.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    blocks: Family<StateLabels, Gauge>,
    leases: Family<StateLabels, Gauge>,
    leases_expired: Counter,
    orphans_reaped: Counter,
    quarantined_reaped: Counter,
    leaked: Gauge,
    verification_failures: Family<CauseLabels, Counter>,
    transports_left: Family<LeftLabels, Counter>,
    spans: Counts,
    queued_tokens: Gauge,
    running: Gauge,
    steps: Family<PhaseLabels, Histogram, fn() -> Histogram>,
    // One scrape at a time: counters are moved by differences.
    scraping: Mutex<()>,
}

impl Metrics {
    /// `pool` is the one bounded label that all of them carry.
    pub(crate) fn new(pool: &str) -> Self {
        let mut root = Registry::default();
        let registry = root
            .sub_registry_with_prefix("baton")
            .sub_registry_with_label(("pool".into(), pool.to_owned().into()));
        let blocks = Family::default();
        let leases = Family::default();
        let leases_expired = Counter::default();
        let orphans_reaped = Counter::default();
        let quarantined_reaped = Counter::default();
        let leaked = Gauge::default();
        let verification_failures = Family::default();
        let transports_left = Family::default();
        let spans = Counts::default();
        let queued_tokens = Gauge::default();
        let running = Gauge::default();
        let steps: Family<PhaseLabels, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(step_histogram);
        registry.register("kv_blocks", "KV blocks by owner", blocks.clone());
        registry.register("leases", "Live leases by state", leases.clone());
        registry.register(
            "leases_expired",
            "Leases that ended because nobody renewed them",
            leases_expired.clone(),
        );
        registry.register(
            "orphan_blocks_reaped",
            "Blocks that nobody but the reaper would have freed",
            orphans_reaped.clone(),
        );
        registry.register(
            "quarantined_blocks_reaped",
            "Quarantined blocks that the reaper freed: their reader was gone without a word",
            quarantined_reaped.clone(),
        );
        registry.register(
            "kv_leaked_blocks",
            "KV blocks owned by nobody and not free; anything but zero is a bug",
            leaked.clone(),
        );
        registry.register(
            "verification_failures",
            "Hand-offs given up by this worker as their reader",
            verification_failures.clone(),
        );
        registry.register(
            "transport_fallbacks",
            "Hand-offs read over another transport than the first that both have, by what was in its way",
            transports_left.clone(),
        );
        registry.register(
            "spans",
            "Spans by what became of them: exported, failed, dropped",
            spans.clone(),
        );
        registry.register(
            "queued_tokens",
            "Prompt tokens admitted and not yet computed",
            queued_tokens.clone(),
        );
        registry.register(
            "running_sequences",
            "Sequences that decode",
            running.clone(),
        );
        registry.register(
            "engine_step_duration_seconds",
            "Duration of engine steps by what they compute",
            steps.clone(),
        );
        Self {
            registry: root,
            blocks,
            leases,
            leases_expired,
            orphans_reaped,
            quarantined_reaped,
            leaked,
            verification_failures,
            transports_left,
            spans,
            queued_tokens,
            running,
            steps,
            scraping: Mutex::new(()),
        }
    }

    pub(crate) fn step(&self, kind: StepKind, seconds: f64) {
        let phase = match kind {
            StepKind::Prefill => "prefill",
            StepKind::Decode => "decode",
            StepKind::Mixed => "mixed",
        };
        self.steps
            .get_or_create(&PhaseLabels { phase })
            .observe(seconds);
    }

    pub(crate) fn spans(&self) -> &Counts {
        &self.spans
    }

    pub(crate) fn handoff_failed(&self, cause: HandoffFailure) {
        self.verification_failures
            .get_or_create(&CauseLabels {
                cause: Cause(cause),
            })
            .inc();
    }

    pub(crate) fn transport_left(&self, from: &'static str, obstacle: Obstacle) {
        let cause = obstacle.word();
        self.transports_left
            .get_or_create(&LeftLabels { from, cause })
            .inc();
    }

    /// The text of a scrape.
    pub(crate) fn scrape(&self, pool: &KvPool, board: &LoadBoard) -> Result<String, fmt::Error> {
        let _one = self.scraping.lock();
        let counts = pool.counts();
        for (state, count) in [
            ("free", counts.free),
            ("cached", counts.cached),
            ("active", counts.active),
            ("leased", counts.leased),
            ("quarantined", counts.quarantined),
        ] {
            self.blocks
                .get_or_create(&StateLabels { state })
                .set(i64::from(count));
        }
        self.leaked.set(i64::from(counts.leaked));
        let leases = pool.lease_counts();
        for (state, count) in [
            ("open", leases.open),
            ("sealed", leases.sealed),
            ("claimed", leases.claimed),
        ] {
            self.leases
                .get_or_create(&StateLabels { state })
                .set(i64::from(count));
        }
        let counters = pool.lease_counters();
        raise(&self.leases_expired, counters.expired);
        raise(&self.orphans_reaped, counters.orphan_blocks_reaped);
        raise(&self.quarantined_reaped, counters.quarantined_blocks_reaped);
        let load = board.current();
        self.queued_tokens.set(count(load.queued_tokens));
        self.running.set(count(load.decoding + load.held));
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// From one millisecond to half a minute: a decode step of a GPU to a long prompt on a CPU.
fn step_histogram() -> Histogram {
    Histogram::new([
        0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
    ])
}

fn raise(counter: &Counter, to: u64) {
    counter.inc_by(to.saturating_sub(counter.get()));
}

fn count(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

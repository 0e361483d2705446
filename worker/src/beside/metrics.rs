//! Metrics of a daemon beside a server, named as docs/metrics.md says. Counters go on over the server's lives.

use std::fmt;
use std::sync::atomic::Ordering;

use baton_protocol::failure::HandoffFailure;
use baton_protocol::wire;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::index::{Cause, Counts};
use super::life::Life;
use crate::kv::BlockCounts;
use crate::kv::intake::Received;
use crate::kv::lease::table::{LeaseCounters, LeaseCounts};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CauseLabels {
    cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LeftLabels {
    from: &'static str,
    cause: &'static str,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    up: Gauge,
    lives: Counter,
    blocks: Family<StateLabels, Gauge>,
    leases: Family<StateLabels, Gauge>,
    leaked: Gauge,
    leases_expired: Counter,
    orphans_reaped: Counter,
    quarantined_reaped: Counter,
    orphans: Gauge,
    queued_tokens: Gauge,
    running: Gauge,
    late_reads: Counter,
    expired: Counter,
    failed_transfers: Counter,
    preemptions: Counter,
    handoffs: Counter,
    handoff_bytes: Counter,
    early_blocks: Counter,
    verification_failures: Family<CauseLabels, Counter>,
    transports_left: Family<LeftLabels, Counter>,
    applied: Counter,
    skipped: Family<CauseLabels, Counter>,
    gaps: Counter,
    replays: Counter,
    seen: Mutex<Seen>,
}

/// What the running life has brought so far.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    load: wire::Load,
    counts: Counts,
    replays: u64,
    /// Of Baton's connector, where the server has it.
    leases: Option<LeaseCounters>,
}

impl Metrics {
    /// `pool` is the one bounded label that all of them carry.
    pub(crate) fn new(pool: &str) -> Self {
        let mut root = Registry::default();
        let registry = root
            .sub_registry_with_prefix("baton")
            .sub_registry_with_label(("pool".into(), pool.to_owned().into()));
        let metrics = Self {
            registry: Registry::default(),
            up: Gauge::default(),
            lives: Counter::default(),
            blocks: Family::default(),
            leases: Family::default(),
            leaked: Gauge::default(),
            leases_expired: Counter::default(),
            orphans_reaped: Counter::default(),
            quarantined_reaped: Counter::default(),
            orphans: Gauge::default(),
            queued_tokens: Gauge::default(),
            running: Gauge::default(),
            late_reads: Counter::default(),
            expired: Counter::default(),
            failed_transfers: Counter::default(),
            preemptions: Counter::default(),
            handoffs: Counter::default(),
            handoff_bytes: Counter::default(),
            early_blocks: Counter::default(),
            verification_failures: Family::default(),
            transports_left: Family::default(),
            applied: Counter::default(),
            skipped: Family::default(),
            gaps: Counter::default(),
            replays: Counter::default(),
            seen: Mutex::default(),
        };
        let mut gauge =
            |name: &str, help: &str, gauge: &Gauge| registry.register(name, help, gauge.clone());
        gauge("engine_up", "1 while the server is registered", &metrics.up);
        gauge(
            "engine_orphan_blocks",
            "Blocks of the server's cache whose parent it never told",
            &metrics.orphans,
        );
        gauge(
            "queued_tokens",
            "Prompt tokens that wait, as estimated",
            &metrics.queued_tokens,
        );
        gauge("running_sequences", "Sequences that run", &metrics.running);
        gauge(
            "kv_leaked_blocks",
            "Blocks of Baton's connector owned by nobody and not free; anything but zero is a bug",
            &metrics.leaked,
        );
        let mut counter = |name: &str, help: &str, counter: &Counter| {
            registry.register(name, help, counter.clone());
        };
        counter(
            "engine_lives",
            "Times that the server was registered: once for each of its processes",
            &metrics.lives,
        );
        counter(
            "engine_late_reads",
            "Reads of KV that ended after its lease had: some answer may be wrong",
            &metrics.late_reads,
        );
        counter(
            "engine_kv_expired",
            "Leases of the server that ended because nobody came",
            &metrics.expired,
        );
        counter(
            "engine_failed_transfers",
            "Transfers that the server's connector gave up",
            &metrics.failed_transfers,
        );
        counter(
            "engine_preemptions",
            "Sequences that lost their memory",
            &metrics.preemptions,
        );
        counter(
            "engine_events_applied",
            "Blocks of cache events that were indexed",
            &metrics.applied,
        );
        counter(
            "engine_event_gaps",
            "Times that cache events were lost and the index was given up",
            &metrics.gaps,
        );
        counter(
            "engine_event_replays",
            "Times that cache events were asked for again",
            &metrics.replays,
        );
        counter(
            "handoffs_taken",
            "Hand-offs that Baton's connector has brought, proven, to this server",
            &metrics.handoffs,
        );
        counter(
            "handoff_bytes",
            "Bytes of their blocks",
            &metrics.handoff_bytes,
        );
        counter(
            "handoff_early_blocks",
            "Their blocks that came while the prompt was still computed",
            &metrics.early_blocks,
        );
        counter(
            "leases_expired",
            "Leases of Baton's connector that ended because nobody renewed them",
            &metrics.leases_expired,
        );
        counter(
            "orphan_blocks_reaped",
            "Blocks of Baton's connector that nobody but the reaper would have freed",
            &metrics.orphans_reaped,
        );
        counter(
            "quarantined_blocks_reaped",
            "Those of them that were quarantined: their reader was gone without a word",
            &metrics.quarantined_reaped,
        );
        registry.register(
            "verification_failures",
            "Hand-offs given up by this worker as their reader",
            metrics.verification_failures.clone(),
        );
        registry.register(
            "transport_fallbacks",
            "Hand-offs read over another transport than the first that both have, by what was in its way",
            metrics.transports_left.clone(),
        );
        registry.register("kv_blocks", "KV blocks by owner", metrics.blocks.clone());
        registry.register(
            "leases",
            "Live leases of Baton's connector by state",
            metrics.leases.clone(),
        );
        registry.register(
            "engine_events_skipped",
            "Blocks of cache events that were not indexed, by cause",
            metrics.skipped.clone(),
        );
        Self {
            registry: root,
            ..metrics
        }
    }

    /// A life begins, or none is there any more.
    pub(crate) fn registered(&self, up: bool) {
        self.up.set(i64::from(up));
        if up {
            self.lives.inc();
            *self.seen.lock() = Seen::default();
        } else if self.seen.lock().leases.is_some() {
            // Memory of a life goes with it. What it had leaked stays to be seen.
            self.hold(&BlockCounts::default(), LeaseCounts::default());
        }
    }

    /// A hand-off came through.
    pub(crate) fn handoff_taken(&self, received: &Received) {
        self.handoffs.inc();
        self.handoff_bytes.inc_by(received.bytes);
        self.early_blocks.inc_by(u64::from(received.early_blocks));
    }

    /// A hand-off was given up.
    pub(crate) fn handoff_failed(&self, cause: HandoffFailure) {
        let cause = cause.word();
        self.verification_failures
            .get_or_create(&CauseLabels { cause })
            .inc();
    }

    /// A hand-off went another way.
    pub(crate) fn transport_left(&self, from: &'static str, cause: &'static str) {
        self.transports_left
            .get_or_create(&LeftLabels { from, cause })
            .inc();
    }

    /// Takes in how a life stands.
    pub(crate) fn take(&self, life: &Life) {
        let mut seen = self.seen.lock();
        let load = *life.load.borrow();
        let (_, waiting, counts) = life.cache();
        let replays = life.replays.load(Ordering::Relaxed);
        let raise = |counter: &Counter, now: u64, before: u64| {
            counter.inc_by(now.saturating_sub(before));
        };
        raise(&self.late_reads, load.late_reads, seen.load.late_reads);
        raise(&self.expired, load.expired_leases, seen.load.expired_leases);
        raise(
            &self.failed_transfers,
            load.failed_transfers + load.ended_transfers,
            seen.load.failed_transfers + seen.load.ended_transfers,
        );
        raise(&self.preemptions, load.preemptions, seen.load.preemptions);
        raise(&self.gaps, load.event_gaps, seen.load.event_gaps);
        raise(&self.replays, replays, seen.replays);
        raise(&self.applied, counts.applied, seen.counts.applied);
        for cause in Cause::ALL {
            let labels = CauseLabels {
                cause: cause.word(),
            };
            let counter = self.skipped.get_or_create(&labels);
            counter.inc_by(
                counts
                    .skipped(cause)
                    .saturating_sub(seen.counts.skipped(cause)),
            );
        }
        self.orphans.set(i64::try_from(waiting).unwrap_or(i64::MAX));
        self.queued_tokens
            .set(i64::try_from(load.queued_tokens).unwrap_or(i64::MAX));
        self.running.set(i64::from(load.running_sequences));
        let blocks = load.blocks.unwrap_or_default();
        for (state, count) in [
            ("free", blocks.free),
            ("cached", blocks.cached),
            ("active", blocks.active),
        ] {
            self.blocks
                .get_or_create(&StateLabels { state })
                .set(i64::from(count));
        }
        let mut leases = None;
        if let Some(staging) = &life.staging {
            let (live, counters) = staging.lease_counts();
            let (blocks, before) = (staging.counts(), seen.leases.unwrap_or_default());
            self.hold(&blocks, live);
            self.leaked.set(i64::from(blocks.leaked));
            raise(&self.leases_expired, counters.expired, before.expired);
            raise(
                &self.orphans_reaped,
                counters.orphan_blocks_reaped,
                before.orphan_blocks_reaped,
            );
            raise(
                &self.quarantined_reaped,
                counters.quarantined_blocks_reaped,
                before.quarantined_blocks_reaped,
            );
            leases = Some(counters);
        }
        *seen = Seen {
            load,
            counts,
            replays,
            leases,
        };
    }

    /// What hand-offs of Baton's connector hold.
    fn hold(&self, blocks: &BlockCounts, leases: LeaseCounts) {
        for (family, state, count) in [
            (&self.blocks, "leased", blocks.active + blocks.leased),
            (&self.blocks, "quarantined", blocks.quarantined),
            (&self.leases, "open", leases.open),
            (&self.leases, "sealed", leases.sealed),
            (&self.leases, "claimed", leases.claimed),
        ] {
            family
                .get_or_create(&StateLabels { state })
                .set(i64::from(count));
        }
    }

    /// The text of a scrape.
    pub(crate) fn scrape(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

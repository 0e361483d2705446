//! What must be zero where nothing runs: as a router sees its workers, and as each process says of itself in `/metrics`.

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::metrics::Metrics;

/// Name and labels of a metric.
type Wanted = (&'static str, &'static [(&'static str, &'static str)]);

/// Of every worker.
const OF_ALL: [Wanted; 3] = [
    ("baton_kv_blocks", &[("state", "active")]),
    ("baton_queued_tokens", &[]),
    ("baton_running_sequences", &[]),
];
/// Of a worker with an engine of its own, which leases its blocks itself.
const OF_OWN_ENGINES: [Wanted; 4] = [
    ("baton_kv_blocks", &[("state", "leased")]),
    ("baton_kv_blocks", &[("state", "quarantined")]),
    ("baton_kv_leaked_blocks", &[]),
    ("baton_leases", &[]),
];
/// Only a daemon beside a server has it.
const DAEMON: &str = "baton_engine_up";

/// Has a label, so that it is there from the first request of a model on.
const IN_FLIGHT: &str = "baton_inflight_requests";
/// There from the first run on, of whatever model.
const RUNS: &str = "baton_run_states_total";
/// Always there.
const OVERFLOW: &str = "baton_record_overflow_total";

/// What a worker of `/v1/fleet` still holds, or nothing.
pub fn occupied(worker: &Value) -> Option<String> {
    let count = |value: &Value| value.as_u64();
    let blocks = &worker["blocks"];
    let held = [
        ("runningSequences", count(&worker["runningSequences"])),
        ("queuedTokens", count(&worker["queuedTokens"])),
        ("active", count(&blocks["active"])),
        ("leased", count(&blocks["leased"])),
        ("quarantined", count(&blocks["quarantined"])),
        ("leaked", count(&blocks["leaked"])),
    ];
    let what: Vec<String> = held
        .iter()
        .filter(|(_, value)| *value != Some(0))
        .map(|(name, value)| format!("{name} {value:?}"))
        .collect();
    (!what.is_empty()).then(|| format!("{}: {}", worker["id"], what.join(", ")))
}

/// That a worker, by its own metrics, holds nothing.
///
/// # Errors
/// It holds something, or does not say.
pub fn worker(metrics: &Metrics) -> Result<()> {
    for (name, labels) in OF_ALL {
        metrics.zero(name, labels)?;
    }
    let beside = metrics.has(DAEMON);
    for (name, labels) in OF_OWN_ENGINES {
        // A daemon says only what it knows of its server.
        if !beside || metrics.sum(name, labels).is_some() {
            metrics.zero(name, labels)?;
        }
    }
    Ok(())
}

/// That a router, by its own metrics, serves nobody.
///
/// # Errors
/// It serves somebody, or does not say.
pub fn router(metrics: &Metrics) -> Result<()> {
    if metrics.has(RUNS) || metrics.has(IN_FLIGHT) {
        return metrics.zero(IN_FLIGHT, &[]);
    }
    ensure!(metrics.has(OVERFLOW), "these are no router's metrics");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: &str = "baton_kv_blocks{pool=\"p\",state=\"active\"} 0
baton_kv_blocks{pool=\"p\",state=\"cached\"} 7
baton_kv_blocks{pool=\"p\",state=\"leased\"} 0
baton_kv_blocks{pool=\"p\",state=\"quarantined\"} 0
baton_kv_leaked_blocks{pool=\"p\"} 0
baton_leases{pool=\"p\",state=\"open\"} 0
baton_leases{pool=\"p\",state=\"claimed\"} 0
baton_queued_tokens{pool=\"p\"} 0
baton_running_sequences{pool=\"p\"} 0
";

    fn problem(judge: impl Fn(&Metrics) -> Result<()>, text: &str) -> String {
        let judged = judge(&Metrics::parse(text).unwrap());
        judged.map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn a_worker_without_its_counts_is_not_idle() {
        let idle = serde_json::json!({"id": "w", "runningSequences": 0, "queuedTokens": 0,
            "blocks": {"active": 0, "leased": 0, "quarantined": 0, "leaked": 0}});
        assert_eq!(occupied(&idle), None);
        let mut leased = idle;
        leased["blocks"]["leased"] = 3.into();
        assert!(occupied(&leased).unwrap().contains("leased Some(3)"));
        assert!(occupied(&serde_json::json!({"id": "w"})).is_some());
    }

    #[test]
    fn every_line_that_a_worker_says_must_be_there_and_zero() {
        assert_eq!(problem(worker, WORKER), "");
        for line in WORKER.lines().filter(|line| line.ends_with(" 0")) {
            let held = format!("{} 2", line.trim_end_matches(" 0"));
            let name = line.split('{').next().unwrap();
            let told = problem(worker, &WORKER.replace(line, &held));
            assert!(told.starts_with(name) && told.ends_with("is 2"), "{told}");
        }
        for (name, labels) in OF_ALL.iter().chain(&OF_OWN_ENGINES) {
            let of_it = |line: &&str| {
                line.starts_with(name) && labels.iter().all(|(_, value)| line.contains(value))
            };
            let rest: Vec<&str> = WORKER.lines().filter(|line| !of_it(line)).collect();
            let told = problem(worker, &rest.join("\n"));
            assert!(
                told.starts_with(name) && told.ends_with("is absent"),
                "{told}"
            );
        }
    }

    #[test]
    fn a_daemon_is_asked_for_what_it_has() {
        let daemon = "baton_engine_up{pool=\"p\"} 1
baton_kv_blocks{pool=\"p\",state=\"active\"} 0
baton_queued_tokens{pool=\"p\"} 0
baton_running_sequences{pool=\"p\"} 0
";
        assert_eq!(problem(worker, daemon), "");
        let leased = format!("{daemon}baton_kv_blocks{{pool=\"p\",state=\"leased\"}} 2\n");
        assert!(problem(worker, &leased).ends_with("is 2"));
        assert!(problem(worker, "baton_engine_up{pool=\"p\"} 1\n").ends_with("is absent"));
    }

    #[test]
    fn a_router_that_has_served_says_how_many_it_serves() {
        let fresh = "baton_record_overflow_total 0\n";
        assert_eq!(problem(router, fresh), "");
        let served = format!("{fresh}baton_run_states_total{{state=\"accepted\"}} 1\n");
        assert!(problem(router, &served).ends_with("is absent"));
        let idle = format!("{served}baton_inflight_requests{{model=\"m\"}} 0\n");
        assert_eq!(problem(router, &idle), "");
        assert!(problem(router, &idle.replace("} 0", "} 1")).ends_with("is 1"));
        assert!(problem(router, "other 0\n").contains("no router"));
    }
}

//! What must hold, whatever went wrong: right answers or clear errors, nothing left behind, and service again afterwards.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::bank::Bank;
use super::client::{self, Ended, Outcome};
use super::hosts::Stage;
use super::plan::RequestPlan;
use super::{ROUTER, ports};
use crate::idle;
use crate::metrics::Metrics;

/// Until all workers are known again: back-offs, silences and pings together take some seconds.
const KNOWN: Duration = Duration::from_secs(20);
/// Beyond the leases, until what they held is free: an intake may wait for its calls, a run for its cancellation.
const BEYOND_LEASES: Duration = Duration::from_secs(12);
const AGAIN: Duration = Duration::from_millis(200);

/// An answer is the right one, or the beginning of it followed by an error that says so.
///
/// # Errors
/// It is not.
pub fn answer(outcome: &Outcome, bank: &Bank) -> Result<()> {
    let right = &bank.answers[outcome.asks];
    ensure!(
        right.text.starts_with(outcome.text()),
        "wrong tokens: {:?} is no beginning of {:?}",
        outcome.text(),
        right.text
    );
    match &outcome.ended {
        Ended::Complete(answer) => {
            ensure!(
                answer == right,
                "wrong answer {answer:?}, right is {right:?}"
            );
        }
        Ended::Refused { status, error } => ensure!(
            matches!(status, 429 | 502 | 503 | 504),
            "refused with {status}: {error}"
        ),
        Ended::Failed { error, .. } => {
            let error: Value = serde_json::from_str(error)?;
            ensure!(
                error["error"]["message"].is_string(),
                "an error event without a message: {error}"
            );
        }
        Ended::Stuck { .. } => bail!("it came to no end"),
        // Whether it may be is said by the records' check, which knows when the router was killed.
        Ended::Broken { .. } | Ended::Left { .. } => {}
    }
    Ok(())
}

/// Waits until the router takes every worker for ready.
///
/// # Errors
/// It does not in time.
pub async fn ready(stage: &Stage) -> Result<()> {
    until(KNOWN, async || {
        for worker in fleet(stage).await? {
            ensure!(
                worker["state"] == "Ready",
                "{} is {}",
                worker["id"],
                worker["state"]
            );
        }
        page(stage, ROUTER, "/readyz").await.map(drop)
    })
    .await
}

/// Waits until the router, too, knows that no worker holds anything.
///
/// # Errors
/// It says that one does.
pub async fn nothing_known(stage: &Stage) -> Result<()> {
    until(KNOWN, async || {
        let busy: Vec<String> = fleet(stage)
            .await?
            .iter()
            .filter_map(idle::occupied)
            .collect();
        ensure!(busy.is_empty(), "the router says: {}", busy.join("; "));
        Ok(())
    })
    .await
}

/// Waits until leases have passed and nothing of any run is left, in any worker and in the router.
///
/// # Errors
/// Something is.
pub async fn nothing_left(stage: &Stage) -> Result<()> {
    let leases = Duration::from_secs(2 * stage.plan.lease_seconds);
    until(leases + BEYOND_LEASES, async || {
        for (name, looked) in stage.workers() {
            let counts = looked.pool.counts();
            let held = counts.active + counts.leased + counts.quarantined;
            ensure!(held == 0, "{name} holds blocks: {counts:?}");
            ensure!(
                looked.operations == 0,
                "{name} has {} operations",
                looked.operations
            );
            let metrics = Metrics::parse(&page(stage, &name, "/metrics").await?)?;
            idle::worker(&metrics).with_context(|| format!("{name} says"))?;
        }
        let metrics = Metrics::parse(&page(stage, ROUTER, "/metrics").await?)?;
        idle::router(&metrics).context("the router says")
    })
    .await?;
    for (name, looked) in stage.workers() {
        let counts = looked.pool.counts();
        ensure!(counts.leaked == 0, "{name} has lost blocks: {counts:?}");
        ensure!(
            counts.free + counts.cached == counts.total,
            "{name}: {counts:?}"
        );
    }
    let metrics = Metrics::parse(&page(stage, ROUTER, "/metrics").await?)?;
    for name in ["baton_illegal_events_total", "baton_record_overflow_total"] {
        metrics.zero(name, &[])?;
    }
    Ok(())
}

/// New requests are served, by either plan.
///
/// # Errors
/// They are not.
pub async fn serves(stage: &Stage, bank: &Bank) -> Result<()> {
    for (asks, mode) in [(0, "Aggregated"), (1, "Disaggregated"), (2, "Conditional")] {
        let request = RequestPlan {
            at: 0,
            asks,
            mode: Some(mode),
            stream: true,
            leaves_after: None,
        };
        // A connection that hangs is noticed by the first who uses it.
        let deadline = Instant::now() + KNOWN;
        loop {
            let outcome =
                client::ask(&stage.network, usize::MAX, &request, &bank.bodies[asks]).await;
            answer(&outcome, bank)?;
            match &outcome.ended {
                Ended::Complete(_) => break,
                ended => ensure!(
                    Instant::now() < deadline,
                    "{mode} is not served after all was mended: {ended:?}"
                ),
            }
            sleep(AGAIN).await;
        }
    }
    Ok(())
}

/// All workers, as the router sees them.
async fn fleet(stage: &Stage) -> Result<Vec<Value>> {
    let view = page(stage, ROUTER, "/v1/fleet").await?;
    let mut view: Value = serde_json::from_str(&view)?;
    let Value::Array(workers) = view["workers"].take() else {
        bail!("no workers in {view}");
    };
    ensure!(
        workers.len() == stage.plan.workers.len(),
        "{} workers",
        workers.len()
    );
    Ok(workers)
}

async fn page(stage: &Stage, host: &str, path: &str) -> Result<String> {
    let port = if host == ROUTER {
        ports::ROUTER_ADMIN
    } else {
        ports::WORKER_ADMIN
    };
    client::get(&stage.network, host, port, path).await
}

async fn until(patience: Duration, holds: impl AsyncFn() -> Result<()>) -> Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        let Err(error) = holds().await else {
            return Ok(());
        };
        if Instant::now() > deadline {
            return Err(anyhow!("not within {patience:?}: {error:#}"));
        }
        sleep(AGAIN).await;
    }
}

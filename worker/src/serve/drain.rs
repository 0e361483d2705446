//! Draining: no new operations, and the wait until those that run and all leases have ended.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};

use super::daemon::Daemon;

/// Between two looks at the leases; operations are told of as they end.
const LOOK: Duration = Duration::from_millis(50);
/// A day: longer than any pod is given to end.
const LONGEST_WAIT: u64 = 86_400;

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// Nothing runs and no lease is open.
    Empty,
    TimeIsUp,
    /// The worker was told to take operations again.
    Undone,
    /// The worker ends.
    Stopping,
}

impl Daemon {
    /// Takes no more operations, and waits until those that run and all leases have ended, at most so long.
    pub(super) async fn drain(&self, at_most: Duration) -> Ended {
        self.set_draining(true);
        let mut operations = self.operations.watch_count();
        let mut draining = self.draining.subscribe();
        let empty = async {
            // An error says that the table is gone, and all operations with it.
            let _ = operations.wait_for(|count| *count == 0).await;
            while self.pool.lease_counts().total() > 0 {
                tokio::time::sleep(LOOK).await;
            }
        };
        // Emptiness is looked at first: an idle worker is drained even where nothing is waited for.
        tokio::select! {
            biased;
            () = empty => Ended::Empty,
            () = self.stop.cancelled() => Ended::Stopping,
            _ = draining.wait_for(|draining| !draining) => Ended::Undone,
            () = tokio::time::sleep(at_most) => Ended::TimeIsUp,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Wait {
    #[serde(default)]
    wait_seconds: u64,
}

impl Wait {
    /// What was asked for, or what to say to whoever asked.
    pub(crate) fn within_bounds(
        asked: &Result<Query<Self>, QueryRejection>,
    ) -> Result<Duration, String> {
        match asked {
            Ok(Query(Self { wait_seconds })) if *wait_seconds <= LONGEST_WAIT => {
                Ok(Duration::from_secs(*wait_seconds))
            }
            _ => Err(format!(
                "use /drain?waitSeconds=N with whole seconds from 0 to {LONGEST_WAIT}\n"
            )),
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    /// Nothing was left when the wait ended.
    drained: bool,
    /// Operations that still run.
    operations: usize,
    leases_open: u32,
    /// Whether it still refuses new operations.
    draining: bool,
}

/// `GET /drain?waitSeconds=N`: starts the drain, answers when nothing is left or after N seconds. It is a GET because that is all
/// that a container's `preStop.httpGet` can send.
pub(super) async fn drain(
    State(daemon): State<Arc<Daemon>>,
    wait: Result<Query<Wait>, QueryRejection>,
) -> Response {
    let wait = match Wait::within_bounds(&wait) {
        Ok(wait) => wait,
        Err(message) => return (StatusCode::BAD_REQUEST, message).into_response(),
    };
    let ended = daemon.drain(wait).await;
    let report = Report {
        drained: ended == Ended::Empty,
        operations: daemon.operations.count(),
        leases_open: daemon.pool.lease_counts().total(),
        draining: *daemon.draining.borrow(),
    };
    if !report.drained {
        tracing::warn!(
            ?ended,
            operations = report.operations,
            leases = report.leases_open,
            waited_seconds = wait.as_secs(),
            "the drain has not emptied this worker"
        );
    }
    axum::Json(report).into_response()
}

//! Admin HTTP: card, load and metrics for people, the operator and scrapers; health for probes; the drain for `preStop`.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use baton_protocol::wire;
use baton_system::scrape;
use serde_json::{Value, json};

use super::daemon::Daemon;
use super::drain;

pub(crate) fn router(daemon: Arc<Daemon>) -> Router {
    Router::new()
        .route("/v1/card", get(card))
        .route("/v1/load", get(load))
        .route("/metrics", get(metrics))
        .route("/drain", get(drain::drain))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .with_state(daemon)
}

async fn card(State(daemon): State<Arc<Daemon>>) -> Response {
    (
        [(header::CONTENT_TYPE, "application/json")],
        daemon.card_json.clone(),
    )
        .into_response()
}

/// The last report, not a new one: reading it over HTTP must not renumber what routers count by.
async fn load(State(daemon): State<Arc<Daemon>>) -> axum::Json<Value> {
    axum::Json(load_json(&daemon.load.borrow()))
}

/// A report as people read it.
pub(crate) fn load_json(load: &wire::Load) -> Value {
    let blocks = load.blocks.unwrap_or_default();
    json!({
        "loadSequence": load.load_sequence,
        "queuedTokens": load.queued_tokens,
        "queuedSequences": load.queued_sequences,
        "runningSequences": load.running_sequences,
        "contextTokens": load.context_tokens,
        "stepRemainingMilliseconds": load.step_remaining_milliseconds,
        "leasesOpen": load.leases_open,
        "draining": load.draining,
        "lateReads": load.late_reads,
        "failedTransfers": load.failed_transfers,
        "endedTransfers": load.ended_transfers,
        "expiredLeases": load.expired_leases,
        "eventsSkipped": load.events_skipped,
        "eventGaps": load.event_gaps,
        "preemptions": load.preemptions,
        "blocks": {
            "total": blocks.total,
            "free": blocks.free,
            "cached": blocks.cached,
            "active": blocks.active,
            "leased": blocks.leased,
            "quarantined": blocks.quarantined,
            "leaked": blocks.leaked,
        },
    })
}

async fn metrics(State(daemon): State<Arc<Daemon>>) -> Response {
    scrape::answer(daemon.metrics.scrape(&daemon.pool, &daemon.board))
}

async fn healthz(State(daemon): State<Arc<Daemon>>) -> Response {
    if daemon.stop.is_cancelled() {
        (StatusCode::SERVICE_UNAVAILABLE, "stopping\n").into_response()
    } else {
        "ok\n".into_response()
    }
}

async fn readyz(State(daemon): State<Arc<Daemon>>) -> Response {
    if daemon.stop.is_cancelled() || *daemon.draining.borrow() {
        (StatusCode::SERVICE_UNAVAILABLE, "draining\n").into_response()
    } else {
        "ready\n".into_response()
    }
}

//! Admin HTTP of a daemon beside a server, as a worker with its own engine has it.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use baton_system::scrape;
use serde_json::{Value, json};

use super::shared::Shared;
use crate::serve::admin::load_json;
use crate::serve::drain::Wait;

pub(crate) fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/v1/card", get(card))
        .route("/v1/load", get(load))
        .route("/metrics", get(metrics))
        .route("/drain", get(drain))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .with_state(shared)
}

fn unavailable(why: &str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response()
}

async fn card(State(shared): State<Arc<Shared>>) -> Response {
    match shared.living() {
        Ok(life) => (
            [(header::CONTENT_TYPE, "application/json")],
            life.card_json.clone(),
        )
            .into_response(),
        Err(why) => unavailable(&why),
    }
}

async fn load(State(shared): State<Arc<Shared>>) -> Response {
    match shared.living() {
        Ok(life) => {
            let load = *life.load.borrow();
            let (blocks, orphans, counts) = life.cache();
            let mut json = load_json(&load);
            json["lacksPlugIn"] = json!(life.lacks_plug_in());
            json["index"] = json!({
                "blocks": blocks,
                "orphans": orphans,
                "applied": counts.applied,
                "skipped": skipped(&counts),
            });
            Json(json).into_response()
        }
        Err(why) => unavailable(&why),
    }
}

fn skipped(counts: &super::index::Counts) -> Value {
    super::index::Cause::ALL
        .iter()
        .map(|cause| (cause.word().to_owned(), json!(counts.skipped(*cause))))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    if let Some(life) = shared.current() {
        shared.metrics.take(&life);
    }
    scrape::answer(shared.metrics.scrape())
}

/// `GET /drain?waitSeconds=N`, for a `preStop` hook: routers send no more, and the answer comes when the server runs nothing
/// and no peer has KV of it to read.
async fn drain(
    State(shared): State<Arc<Shared>>,
    wait: Result<Query<Wait>, QueryRejection>,
) -> Response {
    let wait = match Wait::within_bounds(&wait) {
        Ok(wait) => wait,
        Err(message) => return (StatusCode::BAD_REQUEST, message).into_response(),
    };
    let drained = shared.drain(wait).await;
    let (operations, leases) = (shared.operations(), shared.leases());
    if !drained {
        tracing::warn!(
            operations,
            leases,
            waited_seconds = wait.as_secs(),
            "the drain has not emptied the server"
        );
    }
    Json(json!({
        "drained": drained,
        "operations": operations,
        "leasesOpen": leases,
        "draining": *shared.draining.borrow(),
    }))
    .into_response()
}

/// Of the daemon: it is well while its server starts, too.
async fn healthz(State(shared): State<Arc<Shared>>) -> Response {
    if shared.stop.is_cancelled() {
        unavailable("stopping")
    } else {
        "ok\n".into_response()
    }
}

async fn readyz(State(shared): State<Arc<Shared>>) -> Response {
    if shared.stop.is_cancelled() || *shared.draining.borrow() {
        return unavailable("draining");
    }
    match shared.living() {
        Ok(_) => "ready\n".into_response(),
        Err(why) => unavailable(&why),
    }
}

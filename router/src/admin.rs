//! The admin port: health and metrics for probes and scrapers, and which policies are in force for the operator; fleet, decisions and
//! policies for people, behind a token where one is set. Never on the public port.
//!
//! - [`token`]: the bearer token. [`readiness`]: when the router is ready.

pub mod readiness;
#[cfg(test)]
mod tests;
pub mod token;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use baton_placement::estimate::Path as PlanPath;
use baton_placement::record::Kind;
use baton_system::scrape;
use baton_system::threads::Threads;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::fleet::{Workers, listing};
use crate::learning::Learning;
use crate::metrics::{Metrics, PathLabels, StateLabels};
use crate::openai::error;
use crate::policy::{ListedPolicy, Policies, Refusal};
use crate::records::{Named, Records};
use crate::run::Dispatch;
use readiness::Readiness;
use token::Token;

/// A run that has just ended may not be recorded yet: its record is waited for, which for reports of a worker waits three seconds at most.
const RECORD_WITHIN: Duration = Duration::from_secs(4);
/// Records of one answer, unless asked otherwise.
const LAST: usize = 20;

/// What the handlers read.
#[derive(Debug)]
pub struct Admin {
    pub dispatch: Arc<dyn Dispatch>,
    pub workers: Arc<Workers>,
    pub policies: Arc<Policies>,
    pub readiness: Readiness,
    pub learning: Arc<Learning>,
    pub records: Arc<Records>,
    pub metrics: Arc<Metrics>,
    pub clock: Clock,
    /// Where the disk is waited for.
    pub threads: Threads,
    /// The router takes no more requests.
    pub draining: CancellationToken,
}

/// The admin port's routes.
pub fn routes(admin: Arc<Admin>, token: Option<Arc<Token>>) -> Router {
    let guarded = Router::new()
        .route("/v1/fleet", get(fleet))
        .route("/v1/decisions", get(decisions))
        .route("/v1/decisions/{run}", get(decision))
        .route("/v1/policies", get(policies))
        .route("/v1/policies/{digest}", get(policy_of))
        .route("/v1/coefficients/{digest}", get(coefficients_of))
        .layer(middleware::from_fn_with_state(token, token::require));
    Router::new()
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route("/policyz", get(generations))
        .merge(guarded)
        .fallback(async || {
            problem(
                StatusCode::NOT_FOUND,
                "there is no such endpoint on the admin port",
            )
        })
        .method_not_allowed_fallback(async || {
            problem(
                StatusCode::METHOD_NOT_ALLOWED,
                "the endpoint does not take this method: the allow header says what it takes",
            )
        })
        .with_state(admin)
}

/// A part of the path, if it is text.
type PathText = Result<Path<String>, PathRejection>;

fn no_text() -> Response {
    problem(StatusCode::BAD_REQUEST, "the path is not UTF-8")
}

/// An error of the admin port, in the form that the public one uses.
fn problem(status: StatusCode, message: &str) -> Response {
    let kind = error::kind(status.as_u16());
    let body = json!({"error": {"message": message, "type": kind, "param": null, "code": null}});
    (status, axum::Json(body)).into_response()
}

async fn ready(State(admin): State<Arc<Admin>>) -> Response {
    if admin.draining.is_cancelled() {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining").into_response();
    }
    match admin.readiness.look(&*admin.dispatch, admin.clock.now()) {
        Ok(()) => "ready".into_response(),
        Err(missing) => (StatusCode::SERVICE_UNAVAILABLE, missing).into_response(),
    }
}

async fn metrics(State(admin): State<Arc<Admin>>) -> Response {
    let metrics = &admin.metrics;
    let count = i64::try_from(admin.workers.index_blocks()).unwrap_or(i64::MAX);
    metrics.index_blocks.set(count);
    let links = admin.learning.link_counts(admin.clock.now());
    for (state, count) in [
        ("Closed", links.closed),
        ("Open", links.open),
        ("HalfOpen", links.half_open),
    ] {
        let labels = StateLabels { state };
        metrics.links.get_or_create(&labels).set(count.into());
    }
    for path in [PlanPath::Local, PlanPath::Remote] {
        if let Some(share) = admin.learning.coverage(path) {
            let labels = PathLabels { path: path.word() };
            metrics.estimate_coverage.get_or_create(&labels).set(share);
        }
    }
    scrape::answer(metrics.text())
}

async fn fleet(State(admin): State<Arc<Admin>>) -> Response {
    let in_force = admin.policies.in_force();
    let view = admin.workers.view();
    let policies: Vec<_> = in_force
        .set
        .policies
        .iter()
        .map(|handle| {
            json!({
                "name": handle.name,
                "model": handle.model,
                "aliases": handle.aliases,
                "mode": handle.policy.mode.word(),
                "generation": handle.generation,
                "digest": handle.digest,
            })
        })
        .collect();
    axum::Json(json!({
        "policies": policies,
        "workers": listing::workers(&admin.workers),
        "pairs": listing::pairs(&view),
    }))
    .into_response()
}

/// `GET /v1/policies`: what is in force, and why something else is not.
#[derive(Debug, Serialize)]
struct PolicyListing {
    policies: Vec<ListedPolicy>,
    refused: Vec<Refusal>,
}

/// `GET /v1/policies/{digest}`: a policy that a record names, whether it is in force or not.
async fn policy_of(state: State<Arc<Admin>>, digest: PathText) -> Response {
    named(state, Named::Policy, digest).await
}

/// `GET /v1/coefficients/{digest}`: the constants that a record names.
async fn coefficients_of(state: State<Arc<Admin>>, digest: PathText) -> Response {
    named(state, Named::Coefficients, digest).await
}

async fn named(State(admin): State<Arc<Admin>>, kind: Named, digest: PathText) -> Response {
    let Ok(Path(digest)) = digest else {
        return no_text();
    };
    let reader = Arc::clone(&admin);
    let read = admin
        .threads
        .run(move || reader.records.named(kind, &digest))
        .await;
    match read {
        Ok(Ok(Some(json))) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        Ok(Ok(None)) => problem(
            StatusCode::NOT_FOUND,
            "no record that is kept names this digest",
        ),
        Ok(Err(error)) => problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            &format!("the state folder cannot be read: {error}"),
        ),
        Err(_) => problem(StatusCode::INTERNAL_SERVER_ERROR, "the read was cut short"),
    }
}

async fn policies(State(admin): State<Arc<Admin>>) -> Response {
    let in_force = admin.policies.in_force();
    let policies = in_force
        .set
        .policies
        .iter()
        .map(|handle| ListedPolicy::from(handle.as_ref()))
        .collect();
    axum::Json(PolicyListing {
        policies,
        refused: in_force.refused.clone(),
    })
    .into_response()
}

/// `GET /policyz`: names and generations only, and why one is refused. It is open, so that whoever looks after policies needs no
/// token, and has none to lose to a stranger.
async fn generations(State(admin): State<Arc<Admin>>) -> Response {
    let in_force = admin.policies.in_force();
    let served = in_force.set.policies.iter();
    let served = served.map(|policy| json!({"name": policy.name, "generation": policy.generation}));
    let refused = in_force.refused.iter();
    let refused = refused.filter(|refusal| refusal.name.is_some());
    let refused = refused.map(|refusal| {
        json!({"name": refusal.name, "generation": refusal.generation, "reason": refusal.reason})
    });
    axum::Json(json!({
        "policies": served.collect::<Vec<_>>(),
        "refused": refused.collect::<Vec<_>>(),
    }))
    .into_response()
}

async fn decision(State(admin): State<Arc<Admin>>, run: PathText) -> Response {
    let Ok(Path(run)) = run else {
        return no_text();
    };
    match admin.records.recent.find_within(&run, RECORD_WITHIN).await {
        Some(record) => json_text(record.to_string()),
        None => problem(
            StatusCode::NOT_FOUND,
            "no record of this run here: it has not ended, was taken by another router, or is older than what is kept in memory (see the record files)",
        ),
    }
}

#[derive(Debug, Deserialize)]
struct DecisionQuery {
    last: Option<usize>,
    plan: Option<Kind>,
    reason: Option<String>,
}

async fn decisions(
    State(admin): State<Arc<Admin>>,
    query: Result<Query<DecisionQuery>, axum::extract::rejection::QueryRejection>,
) -> Response {
    let query = match query {
        Ok(Query(query)) => query,
        Err(error) => {
            let message = format!("{error}: use ?last=N&plan=Local|Remote&reason=WORD");
            return problem(StatusCode::BAD_REQUEST, &message);
        }
    };
    let found = admin.records.recent.last(
        query.last.unwrap_or(LAST),
        query.plan,
        query.reason.as_deref(),
    );
    json_text(format!("[{}]", found.join(",")))
}

fn json_text(text: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}

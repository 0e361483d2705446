//! The HTTP front: OpenAI's endpoints over a [`Dispatch`].
//!
//! - [`generate`]: a chat or completion request, from its body to a run.
//! - [`stream`], [`whole`]: the two forms of an answer.
//! - [`prompt`]: a request into tokens.
//! - [`headers`]: request ids, `x-baton-mode`, trace context.
//! - [`body`]: reads a body within its limits.
//! - [`reply`]: answers and errors as HTTP responses.
//! - [`draws`]: random numbers for ids and seeds.
//! - [`serve`]: connections. [`flags`]: limits on the command line.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Router, middleware};
use baton_system::threads::Threads;
use tokio::sync::Semaphore;

use crate::clock::Clock;
use crate::openai::answer::Kind;
use crate::openai::error::ApiError;
use crate::openai::listing::{Model, list};
use crate::run::Dispatch;
use crate::text::library::Library;

pub mod body;
pub mod draws;
pub mod flags;
pub mod generate;
pub mod headers;
pub mod prompt;
pub mod reply;
pub mod serve;
pub mod stream;
pub mod whole;

#[cfg(test)]
mod tests;

/// Limits of the front.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontConfig {
    /// Largest request body, bytes. A token is about four bytes, so the default holds contexts of a million tokens.
    pub max_body_bytes: usize,
    /// A body must arrive within this.
    pub body_timeout: Duration,
    /// Heads must arrive within this; also how long an idle connection is kept.
    pub head_timeout: Duration,
    /// Requests served at a time; more get 429. Each holds its body, its prompt and up to 256 events: about 10 MiB at worst, so
    /// the default keeps the front within 10 GiB even if every body is as large as may be.
    pub max_in_flight: usize,
    /// Connections at a time; more wait in the listener's backlog.
    pub max_connections: usize,
    /// How long runs in flight may go on after the shutdown has begun.
    pub drain_timeout: Duration,
    /// Where long prompts are tokenised.
    pub threads: Threads,
}

impl Default for FrontConfig {
    fn default() -> Self {
        Self {
            max_body_bytes: 4 << 20,
            body_timeout: Duration::from_secs(30),
            head_timeout: Duration::from_secs(60),
            max_in_flight: 1024,
            max_connections: 4096,
            drain_timeout: Duration::from_secs(30),
            threads: Threads::Machine,
        }
    }
}

/// What the handlers share.
pub struct Front {
    dispatch: Arc<dyn Dispatch>,
    library: Library,
    config: FrontConfig,
    clock: Clock,
    in_flight: Arc<Semaphore>,
    /// Long prompts that are tokenised at a time: half of the cores.
    tokenising: Arc<Semaphore>,
    draws: draws::Draws,
}

impl fmt::Debug for Front {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Front")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Front {
    /// `random`: 32 random bytes, from which ids and seeds are drawn.
    pub fn new(
        dispatch: Arc<dyn Dispatch>,
        config: FrontConfig,
        clock: Clock,
        random: [u8; 32],
    ) -> Arc<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new(Self {
            dispatch,
            tokenising: Arc::new(Semaphore::new((cores / 2).max(1))),
            library: Library::default(),
            in_flight: Arc::new(Semaphore::new(config.max_in_flight)),
            config,
            clock,
            draws: draws::Draws::new(random),
        })
    }

    /// The public port's routes.
    pub fn routes(self: &Arc<Self>) -> Router {
        Router::new()
            .route("/v1/chat/completions", post(chat))
            .route("/v1/completions", post(completions))
            .route("/v1/models", get(models))
            .route("/v1/models/{*id}", get(model))
            .route("/healthz", get(healthz))
            .fallback(unknown_route)
            .method_not_allowed_fallback(method_not_allowed)
            .layer(middleware::from_fn_with_state(
                self.clone(),
                headers::with_request_id,
            ))
            .with_state(self.clone())
    }
}

async fn chat(State(front): State<Arc<Front>>, request: Request) -> Response {
    generate::generate(front, Kind::Chat, request).await
}

async fn completions(State(front): State<Arc<Front>>, request: Request) -> Response {
    generate::generate(front, Kind::Completion, request).await
}

async fn models(State(front): State<Arc<Front>>) -> Response {
    reply::json(&list(front.dispatch.models()))
}

async fn model(State(front): State<Arc<Front>>, Path(id): Path<String>) -> Response {
    let models = front.dispatch.models();
    match models.iter().find(|model| model.id == id) {
        Some(listing) => reply::json(&Model::from(listing.clone())),
        None => reply::error(&model_not_found(&front, &id)),
    }
}

/// The process serves. Whether it has workers is `/readyz` on the admin port.
async fn healthz() -> &'static str {
    "ok\n"
}

async fn unknown_route(request: Request) -> Response {
    reply::error(&ApiError::unknown_route(
        request.method().as_str(),
        request.uri().path(),
    ))
}

async fn method_not_allowed(request: Request) -> Response {
    reply::error(&ApiError::method_not_allowed(
        request.method().as_str(),
        request.uri().path(),
    ))
}

fn model_not_found(front: &Front, model: &str) -> ApiError {
    let served: Vec<String> = front
        .dispatch
        .models()
        .into_iter()
        .map(|model| model.id)
        .collect();
    ApiError::model_not_found(model, &served)
}

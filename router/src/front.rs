//! The HTTP front: OpenAI's endpoints over a [`Dispatch`].
//!
//! In the order in which a request passes them:
//! - [`serve`]: a port. [`seats`]: connections at a time. `connection`: one of them; [`patience`]: with a client that does not read.
//! - [`tls`], [`access`], [`keys`]: who may come in.
//! - [`headers`]: request ids, `x-baton-mode`, trace context.
//! - [`generate`]: a chat or completion request, from its body to a run.
//! - [`body`], [`reading`], [`prompt`]: a body, a request, its tokens.
//! - `passing`: a request that is passed on to an engine as it came, and the engine's answer.
//! - [`gate`]: who is served now and who waits.
//! - [`stream`], [`whole`]: the two forms of an answer. [`reply`]: answers and errors as HTTP responses.
//!
//! Besides: [`counts`]: what scrapers see of the line and of connections; [`limits`], and [`flags`] for them; [`memory`]: what clients can make the router hold; [`descriptors`]: and open;
//! [`draws`]: random numbers for ids and seeds.

use std::fmt;
use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Router, middleware};
use baton_system::network::Listener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::forward::asked::Endpoint;
use crate::openai::error::ApiError;
use crate::openai::listing::{Model, list};
use crate::run::Dispatch;
use crate::text::library::Library;
use access::Access;
use counts::Counts;
use gate::Gate;
use memory::Memory;
use passing::Route;

pub mod access;
pub mod body;
mod connection;
pub mod counts;
pub mod descriptors;
pub mod draws;
pub mod flags;
pub mod gate;
pub mod generate;
pub mod headers;
pub mod keys;
pub mod limits;
pub mod memory;
mod passing;
pub mod patience;
pub mod prompt;
pub mod reading;
pub mod reply;
pub mod seats;
pub mod serve;
pub mod stream;
pub mod tls;
pub mod whole;

pub use limits::FrontConfig;

#[cfg(test)]
mod tests;

/// The endpoint that asks for nothing.
const HEALTH: &str = "/healthz";

/// What the handlers share.
pub struct Front {
    dispatch: Arc<dyn Dispatch>,
    library: Library,
    config: FrontConfig,
    access: Access,
    clock: Clock,
    gate: Arc<Gate>,
    counts: Counts,
    memory: Memory,
    /// No more requests are taken; those in flight may end.
    shutdown: CancellationToken,
    /// Nor may those go on.
    cut: CancellationToken,
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
        access: Access,
        clock: Clock,
        random: [u8; 32],
        counts: Counts,
    ) -> Arc<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new(Self {
            dispatch,
            tokenising: Arc::new(Semaphore::new((cores / 2).max(1))),
            library: Library::default(),
            gate: Gate::new(
                config.max_in_flight,
                config.max_waiting,
                config.waiting_timeout,
                counts.clone(),
            ),
            counts,
            memory: Memory::new(config.max_body_bytes),
            config,
            access,
            shutdown: CancellationToken::new(),
            cut: CancellationToken::new(),
            clock,
            draws: draws::Draws::new(random),
        })
    }

    /// Cancelling it ends the front: no more requests are taken, those in flight have the drain time to end.
    pub fn shutdown(&self) -> &CancellationToken {
        &self.shutdown
    }

    /// Serves the public port until [`Self::shutdown`] and the end of what is in flight.
    pub async fn serve(self: &Arc<Self>, listener: Listener) {
        let port = connection::Port {
            routes: self.routes(),
            config: self.config.clone(),
            identity: self.access.identity.clone(),
            counts: self.counts.clone(),
            shutdown: self.shutdown.clone(),
        };
        let closing = async {
            self.shutdown.cancelled().await;
            self.gate.close();
        };
        tokio::join!(serve::serve_port(listener, port, &self.cut), closing);
    }

    /// The public port's routes.
    pub fn routes(self: &Arc<Self>) -> Router {
        let others = passing::OTHERS
            .into_iter()
            .fold(Router::new(), |routes, path| {
                let route = Route {
                    path,
                    endpoint: Endpoint::Other,
                };
                let serve = move |State(front): State<Arc<Self>>, request: Request| {
                    generate::generate(front, route, request)
                };
                routes.route(path, post(serve))
            });
        others
            .route("/v1/chat/completions", post(chat))
            .route("/v1/completions", post(completions))
            .route("/v1/models", get(models))
            .route("/v1/models/{*id}", get(model))
            .route(HEALTH, get(healthz))
            .fallback(unknown_route)
            .method_not_allowed_fallback(method_not_allowed)
            .layer(middleware::from_fn_with_state(self.clone(), access::admit))
            .layer(middleware::from_fn_with_state(
                self.clone(),
                headers::with_request_id,
            ))
            .with_state(self.clone())
    }
}

async fn chat(State(front): State<Arc<Front>>, request: Request) -> Response {
    let route = Route {
        path: "/v1/chat/completions",
        endpoint: Endpoint::Chat,
    };
    generate::generate(front, route, request).await
}

async fn completions(State(front): State<Arc<Front>>, request: Request) -> Response {
    let route = Route {
        path: "/v1/completions",
        endpoint: Endpoint::Completions,
    };
    generate::generate(front, route, request).await
}

async fn models(State(front): State<Arc<Front>>) -> Response {
    reply::json(&list(front.dispatch.models()))
}

async fn model(
    State(front): State<Arc<Front>>,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let Ok(Path(id)) = id else {
        let message = "the model's name in the path is not UTF-8";
        return reply::error(&ApiError::field("model", message));
    };
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

/// Nothing serves a model: nobody meant to, or whose policy cannot be honoured.
fn model_not_found(front: &Front, model: &str) -> ApiError {
    if let Some(policy) = front.dispatch.refused(model) {
        return ApiError::policy_refused(model, &policy);
    }
    let served: Vec<String> = front
        .dispatch
        .models()
        .into_iter()
        .map(|model| model.id)
        .collect();
    ApiError::model_not_found(model, &served)
}

//! A chat or completion request, from its body to a run and its answer.

use std::sync::Arc;

use axum::extract::Request;
use axum::response::Response;
use futures::FutureExt as _;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use super::access::Client;
use super::gate::{NoPlace, Place};
use super::headers::{RequestId, mode, traceparent};
use super::keys::usage::Using;
use super::memory::Holding;
use super::passing::{self, Incoming, Look, Relayed, Route};
use super::{Front, body, reading, reply, stream, whole};
use crate::forward::asked::Endpoint;
use crate::openai::answer::{Answer, Kind};
use crate::openai::error::ApiError;
use crate::run::{RunEvent, RunHandle, RunRequest};
use crate::text::model::ModelText;
use crate::text::output::Output;

/// A run that has begun, with all that its answer needs.
#[derive(Debug)]
pub struct Begun {
    pub handle: RunHandle,
    pub answer: Answer,
    pub output: Output,
    pub model: Arc<ModelText>,
    pub with_logprobs: bool,
    /// Cancelled when the router ends without waiting any longer.
    cut: CancellationToken,
    /// Held until the answer has ended.
    pub taken: Taken,
}

/// What a request in flight has taken and gives back.
#[derive(Debug)]
pub struct Taken {
    pub(super) holding: Holding,
    _place: Place,
    _using: Option<Using>,
}

impl Begun {
    /// The next event of the run.
    ///
    /// # Errors
    /// The router ends.
    pub(super) async fn next(&mut self) -> Result<Option<RunEvent>, ApiError> {
        // Several tokens are there at a time: only what is waited for needs a watch on the shutdown.
        if !self.cut.is_cancelled()
            && let Some(event) = self.handle.next().now_or_never()
        {
            return Ok(event);
        }
        tokio::select! {
            biased;
            () = self.cut.cancelled() => Err(ApiError::shutting_down()),
            event = self.handle.next() => Ok(event),
        }
    }
}

/// Serves a request that generates.
pub(super) async fn generate(front: Arc<Front>, route: Route, request: Request) -> Response {
    let id = request.extensions().get::<RequestId>().cloned();
    let id = id.map_or_else(|| front.draws.request_id().into(), |RequestId(id)| id);
    let key = request.extensions().get::<Client>();
    let key = key.map(|Client(key)| tracing::field::display(key.name.clone()));
    let span = tracing::info_span!("accept", request_id = %id, key, run = tracing::field::Empty);
    let serve = async move {
        match begin(&front, route, request, &id).await {
            Ok(Course::Ours(begun, streamed)) => {
                tracing::Span::current().record("run", begun.handle.run.to_string());
                let run = begun.handle.run.to_string();
                let response = if streamed {
                    stream::answer(*begun).await
                } else {
                    whole::answer(*begun).await
                };
                reply::with_run(response, &run)
            }
            Ok(Course::Relayed(relayed)) => {
                let run = relayed.handle.run.to_string();
                tracing::Span::current().record("run", &run);
                reply::with_run(passing::answer(*relayed).await, &run)
            }
            Err(error) => {
                tracing::debug!(status = error.status, "refused: {error}");
                reply::error(&error)
            }
        }
    };
    serve.instrument(span).await
}

/// Whose answer a client gets.
enum Course {
    /// Made here from tokens; streamed or not.
    Ours(Box<Begun>, bool),
    /// The engine's.
    Relayed(Box<Relayed>),
}

/// Reads a request and begins its run.
async fn begin(
    front: &Arc<Front>,
    route: Route,
    request: Request,
    id: &str,
) -> Result<Course, ApiError> {
    let received = Instant::now();
    let (head, body) = request.into_parts();
    let key = head.extensions.get::<Client>().map(|Client(key)| key);
    let using = key.map(|key| key.begin(received)).transpose()?;
    let mode = mode(&head.headers)?;
    let body = body::read(&head.headers, body, &front.config, &front.memory).await?;
    let passes_on = front.dispatch.passes_on();
    let body = if passes_on {
        match passing::look(front, route, key, body).await? {
            Look::Ours(body) => body,
            Look::Engines(request, body) => {
                let incoming = Incoming {
                    route,
                    id,
                    using,
                    headers: &head.headers,
                    received,
                };
                let relayed = passing::begin(front, incoming, *request, body).await?;
                return Ok(Course::Relayed(Box::new(relayed)));
            }
        }
    } else {
        body
    };
    let kind = match route.endpoint {
        Endpoint::Chat => Kind::Chat,
        Endpoint::Completions => Kind::Completion,
        Endpoint::Other => return Err(ApiError::unknown_route("POST", route.path)),
    };
    let reading::Request {
        cache_salt,
        parameters,
        prompt,
        policy,
        model,
    } = reading::read(front, kind, key, body).await?;
    let priority = parameters.priority;
    let priority = key.map_or(priority, |key| key.priority(priority));

    let holding = front
        .memory
        .run(prompt.tokens.len(), prompt.max_tokens, &parameters)?;
    let place = front.gate.enter(priority).await.map_err(no_place)?;
    let handle = front.dispatch.start(RunRequest {
        request_id: id.to_owned(),
        mode: mode.filter(|_| policy.allows_overrides),
        policy,
        tokens: prompt.tokens,
        forward: None,
        sampling: parameters.sampling(front.draws.u64()),
        stopping: parameters.stopping(prompt.max_tokens),
        cache_salt,
        priority,
        splittable: true,
        operation: match kind {
            Kind::Chat => "chat",
            Kind::Completion => "text_completion",
        },
        traceparent: traceparent(&head.headers),
        received,
    });
    let begun = Begun {
        answer: Answer::new(
            kind,
            &handle.run.to_string(),
            front.clock.now().seconds(),
            parameters.model.clone(),
            parameters.include_usage,
        ),
        output: Output::new(
            &parameters.stop,
            parameters.stop_token_ids.clone(),
            parameters.min_tokens,
            parameters.logprobs.is_some(),
        ),
        with_logprobs: parameters.logprobs.is_some(),
        handle,
        model,
        cut: front.cut.clone(),
        taken: Taken {
            holding,
            _place: place,
            _using: using,
        },
    };
    Ok(Course::Ours(Box::new(begun), parameters.stream))
}

pub(super) fn no_place(reason: NoPlace) -> ApiError {
    match reason {
        NoPlace::Closed => ApiError::shutting_down(),
        NoPlace::Full { .. } | NoPlace::Late(_) => {
            ApiError::overloaded(format!("{reason}: try again"))
        }
    }
}

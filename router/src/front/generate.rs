//! A chat or completion request, from its body to a run and its answer.

use std::sync::Arc;

use axum::extract::Request;
use axum::response::Response;
use tokio::time::Instant;
use tracing::Instrument;

use super::headers::{RequestId, mode, traceparent};
use super::prompt::{Asked, Prepared};
use super::{Front, body, model_not_found, reply, stream, whole};
use crate::openai::answer::{Answer, Kind};
use crate::openai::chat::ChatRequest;
use crate::openai::completion::CompletionRequest;
use crate::openai::error::ApiError;
use crate::run::{RunHandle, RunRequest, TextArtifacts};
use crate::text::model::ModelText;
use crate::text::output::Output;

/// Bodies longer than this are tokenised off the threads that serve: a tokenizer does some 5 MB/s, so what stays takes 3 ms.
const LONG_BODY: usize = 16 << 10;

/// A run that has begun, with all that its answer needs.
#[derive(Debug)]
pub struct Begun {
    pub handle: RunHandle,
    pub answer: Answer,
    pub output: Output,
    pub model: Arc<ModelText>,
    pub with_logprobs: bool,
    /// Held until the answer has ended: it counts the requests in flight.
    pub permit: tokio::sync::OwnedSemaphorePermit,
}

/// Serves a request of either kind.
pub(super) async fn generate(front: Arc<Front>, kind: Kind, request: Request) -> Response {
    let id = request.extensions().get::<RequestId>().cloned();
    let id = id.map_or_else(|| front.draws.request_id().into(), |RequestId(id)| id);
    let span = tracing::info_span!("accept", request_id = %id, run = tracing::field::Empty);
    let serve = async move {
        match begin(&front, kind, request, &id).await {
            Ok((begun, streamed)) => {
                tracing::Span::current().record("run", begun.handle.run.to_string());
                let run = begun.handle.run.to_string();
                let response = if streamed {
                    stream::answer(begun).await
                } else {
                    whole::answer(begun).await
                };
                reply::with_run(response, &run)
            }
            Err(error) => {
                tracing::debug!(status = error.status, "refused: {error}");
                reply::error(&error)
            }
        }
    };
    serve.instrument(span).await
}

/// The run, and whether its answer is streamed.
async fn begin(
    front: &Front,
    kind: Kind,
    request: Request,
    id: &str,
) -> Result<(Begun, bool), ApiError> {
    let received = Instant::now();
    // Taken before the body is read: bodies are what holds memory.
    let permit = front
        .in_flight
        .clone()
        .try_acquire_owned()
        .map_err(|_| ApiError::too_many_requests(front.config.max_in_flight))?;
    let (head, body) = request.into_parts();
    let mode = mode(&head.headers)?;
    let body = body::read(&head.headers, body, &front.config).await?;
    let asked = match kind {
        Kind::Chat => Asked::Chat(ChatRequest::parse(&body)?),
        Kind::Completion => Asked::Completion(CompletionRequest::parse(&body)?),
    };
    let name = &asked.parameters().model;
    let policy = front
        .dispatch
        .policy(name)
        .ok_or_else(|| model_not_found(front, name))?;
    let artifacts = front
        .dispatch
        .artifacts(&policy)
        .ok_or_else(|| not_ready(name))?;
    let model = front
        .library
        .get(artifacts.clone(), front.config.threads)
        .await
        .map_err(|unusable| {
            ApiError::internal(format!("the model {name:?} cannot be served: {unusable}"))
                .with_code("model_unusable")
        })?;
    let (asked, prepared) = prepare(front, asked, &model, &artifacts, body.len()).await?;

    let parameters = asked.parameters();
    let mode = mode.filter(|_| policy.allows_overrides);
    let handle = front.dispatch.start(RunRequest {
        request_id: id.to_owned(),
        policy,
        tokens: prepared.tokens,
        sampling: parameters.sampling(front.draws.u64()),
        stopping: parameters.stopping(prepared.max_tokens),
        cache_salt: parameters.cache_salt.clone(),
        priority: parameters.priority,
        mode,
        splittable: true,
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
        permit,
    };
    Ok((begun, parameters.stream))
}

async fn prepare(
    front: &Front,
    asked: Asked,
    model: &Arc<ModelText>,
    artifacts: &TextArtifacts,
    body_bytes: usize,
) -> Result<(Asked, Prepared), ApiError> {
    let max_context = artifacts.max_context;
    let now = front.clock.now().timestamp();
    if body_bytes <= LONG_BODY {
        let prepared = asked.prepare(model, max_context, now)?;
        return Ok((asked, prepared));
    }
    // As many at a time as leave threads to those who read their tokens. The semaphore is never closed.
    let turn = front.tokenising.clone().acquire_owned().await.ok();
    let model = model.clone();
    let prepare = move || {
        // Held to the end, even if the client has left meanwhile.
        let _turn = turn;
        asked
            .prepare(&model, max_context, now)
            .map(|prepared| (asked, prepared))
    };
    front
        .config
        .threads
        .run(prepare)
        .await
        .map_err(|error| ApiError::internal(format!("tokenising ended early: {error}")))?
}

fn not_ready(model: &str) -> ApiError {
    ApiError::unavailable(
        format!("no worker of the model {model:?} has registered yet: try again"),
        "model_not_ready",
    )
}

//! Requests of models whose workers are engines: read leniently, passed on as they came, answered with the engine's own bytes.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use baton_placement::record::Credit;
use baton_protocol::wire;
use bytes::Bytes;
use futures::stream::unfold;
use http::HeaderMap;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::body::Read;
use super::gate::Place;
use super::headers::{mode, traceparent};
use super::keys::ApiKey;
use super::keys::usage::Using;
use super::memory::Share;
use super::stream::ended_early;
use super::{Front, model_not_found, reply};
use crate::forward::asked::{self, Asked, Endpoint, Priority, Prompt};
use crate::forward::prompt;
use crate::forward::{Forward, Keyed};
use crate::openai::answer::error_event;
use crate::openai::error::{ApiError, RETRY_AFTER_SECONDS};
use crate::policy::PolicyHandle;
use crate::run::{
    EngineHead, PassedOn, RunEvent, RunFailure, RunHandle, RunRequest, TextArtifacts,
};

/// Bodies longer than this are read off the threads that serve.
const LONG_BODY: usize = 16 << 10;

/// Where a request was sent to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    pub(super) path: &'static str,
    pub(super) endpoint: Endpoint,
}

/// Endpoints of engines that are passed on to them, besides those that Baton serves itself.
pub(super) const OTHERS: [&str; 4] = ["/v1/responses", "/v1/messages", "/tokenize", "/detokenize"];

/// A request that is passed on.
#[derive(Debug)]
pub(super) struct Passing {
    model: String,
    policy: Arc<PolicyHandle>,
    /// In dispatch's order, larger first.
    priority: i32,
    stream: bool,
    max_output: u32,
    /// As the client's key has it.
    cache_salt: String,
    keyed: Option<Keyed>,
    whole: Option<&'static str>,
    tokens: Result<Vec<u32>, Credit>,
    about_tokens: u32,
}

/// Whose a request is.
pub(super) enum Look {
    /// Of a model that is tokenised here for good, or of none.
    Ours(Read),
    Engines(Box<Passing>, Read),
}

enum Outcome {
    Look(Look),
    /// The model's tokenizer has not been compiled yet.
    Uncompiled(Arc<TextArtifacts>, Read),
}

/// Finds out whether a request is to be passed on, and reads what matters of it.
pub(super) async fn look(
    front: &Arc<Front>,
    route: Route,
    key: Option<&Arc<ApiKey>>,
    mut body: Read,
) -> Result<Look, ApiError> {
    let mut compiled = true;
    loop {
        match work(front, route, key, compiled, body).await? {
            Outcome::Look(look) => return Ok(look),
            Outcome::Uncompiled(artifacts, read) => {
                body = read;
                let text = front.library.get(artifacts, front.config.threads).await;
                // The engine has its own: only prefixes are not credited.
                compiled = text.is_ok();
            }
        }
    }
}

async fn work(
    front: &Arc<Front>,
    route: Route,
    key: Option<&Arc<ApiKey>>,
    compiled: bool,
    body: Read,
) -> Result<Outcome, ApiError> {
    let key = key.cloned();
    if body.bytes.len() <= LONG_BODY {
        return read(front, route, key.as_deref(), compiled, body);
    }
    let turn = front.tokenising.clone().acquire_owned().await.ok();
    let memory = front.memory.work(body.bytes.len()).await;
    let front_of_work = front.clone();
    let work = move || {
        let _held = (turn, memory);
        read(&front_of_work, route, key.as_deref(), compiled, body)
    };
    front
        .config
        .threads
        .run(work)
        .await
        .map_err(|error| ApiError::internal(format!("reading ended early: {error}")))?
}

fn read(
    front: &Front,
    route: Route,
    key: Option<&ApiKey>,
    compiled: bool,
    body: Read,
) -> Result<Outcome, ApiError> {
    let ours = |body| Ok(Outcome::Look(Look::Ours(body)));
    let Some(model) = asked::model(&body.bytes) else {
        return ours(body);
    };
    let policy = front.dispatch.policy(&model);
    let policy = policy.ok_or_else(|| model_not_found(front, &model))?;
    let Some(PassedOn { max_context, text }) = front.dispatch.passed_on(&policy) else {
        return ours(body);
    };
    let text = match text {
        Ok(artifacts) => match front.library.compiled(&artifacts) {
            Some(text) => Ok(text),
            None if compiled => return Ok(Outcome::Uncompiled(artifacts, body)),
            None => Err(Credit::NoTokenizer),
        },
        Err(why) => Err(why),
    };
    let Asked {
        model,
        stream,
        cache_salt,
        priority,
        max_output,
        whole,
        prompt,
        about_tokens,
    } = asked::read(route.endpoint, &body.bytes)?;
    let sent = cache_salt.unwrap_or_default();
    let cache_salt = key.map_or_else(|| sent.clone(), |key| key.cache_salt(&sent));
    let bounded = key.map(|key| bounded(key, priority)).transpose()?.flatten();
    let keyed = key.map(|_| Keyed {
        cache_salt: (cache_salt != sent).then(|| cache_salt.clone()),
        priority: bounded,
    });
    let priority = match (bounded, priority) {
        (Some(priority), _) | (None, Priority::Number(priority)) => in_line(priority),
        (None, Priority::Absent | Priority::Unread) => 0,
    };
    let tokens = match (route.endpoint, prompt) {
        (Endpoint::Other, _) => Err(Credit::Unread),
        // The engine's own tokens, whatever makes them.
        (_, Prompt::Tokens(tokens)) => Ok(tokens),
        (_, prompt) => text.and_then(|text| {
            let now = front.clock.now().timestamp();
            prompt::tokens(&text, prompt, max_context, now, &cache_salt)
        }),
    };
    let count = tokens.as_ref().map_or(about_tokens, |tokens| {
        u32::try_from(tokens.len()).unwrap_or(u32::MAX)
    });
    // What is too long is the engine's to refuse: for placement it fits just so, with room for two tokens.
    let count = count.clamp(1, max_context.saturating_sub(2).max(1));
    let room = max_context.saturating_sub(count).max(2);
    let passing = Passing {
        model,
        policy,
        priority,
        stream,
        max_output: max_output.unwrap_or(u32::MAX).clamp(1, room),
        cache_salt,
        keyed,
        whole,
        about_tokens: count,
        tokens,
    };
    Ok(Outcome::Look(Look::Engines(Box::new(passing), body)))
}

/// The priority that an engine is told under a key with a bound; smaller is more urgent.
fn bounded(key: &ApiKey, asked: Priority) -> Result<Option<i64>, ApiError> {
    let Some(most) = key.most_urgent_priority.map(i64::from) else {
        return Ok(None);
    };
    match asked {
        Priority::Absent => Ok(Some(most.max(0))),
        Priority::Number(asked) => Ok(Some(most.max(asked))),
        // An engine may read a number out of it that the key does not allow.
        Priority::Unread => Err(ApiError::field(
            "priority",
            "priority must be a whole number",
        )),
    }
}

/// As dispatch counts: larger is more urgent.
fn in_line(priority: i64) -> i32 {
    let limits = (i64::from(i32::MIN), i64::from(i32::MAX));
    i32::try_from(priority.saturating_neg().clamp(limits.0, limits.1)).unwrap_or(0)
}

/// What is known of a request besides its body.
#[derive(Debug)]
pub(super) struct Incoming<'a> {
    pub(super) route: Route,
    pub(super) id: &'a str,
    pub(super) using: Option<Using>,
    pub(super) headers: &'a HeaderMap,
    pub(super) received: Instant,
}

/// A run whose answer is the engine's.
#[derive(Debug)]
pub(super) struct Relayed {
    pub(super) handle: RunHandle,
    cut: CancellationToken,
    _taken: (Share, Place, Option<Using>),
}

/// Begins the run.
pub(super) async fn begin(
    front: &Arc<Front>,
    incoming: Incoming<'_>,
    passing: Passing,
    body: Read,
) -> Result<Relayed, ApiError> {
    let Passing {
        model,
        policy,
        priority,
        stream,
        max_output,
        cache_salt,
        keyed,
        whole,
        tokens,
        about_tokens,
    } = passing;
    let mode = mode(incoming.headers)?;
    let credit = tokens.as_ref().err().copied().unwrap_or(Credit::Tokens);
    let tokens = tokens.unwrap_or_default();
    let Read { bytes, share } = body;
    let held = front.memory.passed_on(bytes.len(), tokens.len())?;
    drop(share);
    let place = front.gate.enter(priority).await;
    let place = place.map_err(super::generate::no_place)?;
    let forward = Forward {
        path: incoming.route.path,
        body: Bytes::from(bytes),
        model,
        stream,
        keyed,
        prompt_tokens: about_tokens,
        credit,
        whole,
    };
    let handle = front.dispatch.start(RunRequest {
        request_id: incoming.id.to_owned(),
        mode: mode.filter(|_| policy.allows_overrides),
        policy,
        tokens,
        splittable: whole.is_none(),
        forward: Some(Arc::new(forward)),
        sampling: wire::Sampling::default(),
        stopping: wire::Stopping {
            max_tokens: max_output,
            ..wire::Stopping::default()
        },
        cache_salt,
        priority,
        operation: match incoming.route.endpoint {
            Endpoint::Chat => "chat",
            Endpoint::Completions => "text_completion",
            Endpoint::Other => "generate_content",
        },
        traceparent: traceparent(incoming.headers),
        received: incoming.received,
    });
    Ok(Relayed {
        handle,
        cut: front.cut.clone(),
        _taken: (held, place, incoming.using),
    })
}

impl Relayed {
    async fn next(&mut self) -> Result<Option<RunEvent>, ApiError> {
        tokio::select! {
            biased;
            () = self.cut.cancelled() => Err(ApiError::shutting_down()),
            event = self.handle.next() => Ok(event),
        }
    }
}

/// The engine's answer, from its head on.
pub(super) async fn answer(mut relayed: Relayed) -> Response {
    match relayed.next().await {
        Ok(Some(RunEvent::Answer(head))) => relay(&head, relayed),
        Ok(Some(RunEvent::Failed(failure))) => refusal(failure),
        Ok(_) => reply::error(&ended_early()),
        Err(error) => reply::error(&error),
    }
}

/// What a client is told that gets no answer: the engine's words where there are any.
fn refusal(failure: RunFailure) -> Response {
    match failure.engine {
        None => reply::error(&failure.into()),
        Some(refusal) => {
            let mut response = Response::new(Body::from(refusal.body));
            *response.status_mut() = refusal.head.status;
            *response.headers_mut() = refusal.head.headers;
            let seconds = response.headers().get(RETRY_AFTER);
            let seconds = seconds.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
            // Engines mostly say no time with these.
            if matches!(response.status().as_u16(), 429 | 503) && seconds.is_none() {
                let seconds = failure.retry_after_seconds.unwrap_or(RETRY_AFTER_SECONDS);
                response.headers_mut().insert(RETRY_AFTER, seconds.into());
            }
            response
        }
    }
}

fn relay(head: &EngineHead, relayed: Relayed) -> Response {
    let streams = head.streams();
    let relay = Relay {
        relayed,
        streams,
        done: false,
    };
    // The run ends with the stream: hyper drops the body when the client is gone, and the handle with it.
    let frames = unfold(relay, |mut relay| async move {
        let bytes = relay.next().await?;
        Some((bytes, relay))
    });
    let mut response = if streams {
        reply::events(Body::from_stream(frames))
    } else {
        Response::new(Body::from_stream(frames))
    };
    *response.status_mut() = head.status;
    for (name, value) in &head.headers {
        if name == CONTENT_TYPE || !response.headers().contains_key(name) {
            response.headers_mut().insert(name, value.clone());
        }
    }
    response
}

/// The answer cannot be completed, and what was sent of it does not say so.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Broken(ApiError);

struct Relay {
    relayed: Relayed,
    streams: bool,
    done: bool,
}

impl Relay {
    async fn next(&mut self) -> Option<Result<Bytes, Broken>> {
        if self.done {
            return None;
        }
        let error = match self.relayed.next().await {
            Ok(Some(RunEvent::Bytes(bytes))) => return Some(Ok(bytes)),
            Ok(Some(RunEvent::Finished { .. })) => return None,
            Ok(Some(RunEvent::Failed(failure))) if failure.told => return None,
            Ok(Some(RunEvent::Failed(failure))) => failure.into(),
            Ok(Some(RunEvent::Answer(_) | RunEvent::Token { .. }) | None) => ended_early(),
            Err(error) => error,
        };
        self.done = true;
        let mut out = Vec::new();
        if self.streams && error_event(&mut out, &error).is_ok() {
            return Some(Ok(out.into()));
        }
        // The connection is closed before the body is whole: that is how HTTP says it.
        Some(Err(Broken(error)))
    }
}

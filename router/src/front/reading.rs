//! A body into a request that can be run: parsed, checked against its model, tokenised; all of it at once, so that what JSON and
//! tokenizers need in between is held by few requests at a time.

use std::sync::Arc;

use super::body::Read;
use super::keys::ApiKey;
use super::prompt::{Asked, Prepared};
use super::{Front, model_not_found};
use crate::openai::answer::Kind;
use crate::openai::error::{ApiError, echo};
use crate::openai::parameters::Parameters;
use crate::policy::PolicyHandle;
use crate::run::TextArtifacts;
use crate::text::model::ModelText;

/// Bodies longer than this are read off the threads that serve: a tokenizer does some 5 MB/s, so what stays takes 3 ms.
const LONG_BODY: usize = 16 << 10;

/// A request whose prompt is tokens.
#[derive(Debug)]
pub struct Request {
    /// The client's, within its key's.
    pub cache_salt: String,
    pub parameters: Parameters,
    pub prompt: Prepared,
    pub policy: Arc<PolicyHandle>,
    pub model: Arc<ModelText>,
}

/// What came of a body.
enum Outcome {
    Ready(Box<Request>),
    /// Its model has not been compiled yet. What was parsed is dropped meanwhile: it is larger than the body.
    Uncompiled(String, Arc<TextArtifacts>),
}

/// Reads a request of either kind.
pub(super) async fn read(
    front: &Arc<Front>,
    kind: Kind,
    key: Option<&Arc<ApiKey>>,
    mut body: Read,
) -> Result<Request, ApiError> {
    loop {
        let outcome;
        (outcome, body) = work(front, kind, key, body).await?;
        match outcome {
            Outcome::Ready(request) => return Ok(*request),
            Outcome::Uncompiled(name, artifacts) => {
                let compiled = front.library.get(artifacts, front.config.threads).await;
                compiled.map_err(|unusable| {
                    let name = echo(&name);
                    let message = format!("the model {name:?} cannot be served: {unusable}");
                    ApiError::internal(message).with_code("model_unusable")
                })?;
            }
        }
    }
}

/// Does what takes time and memory by the size of the body.
async fn work(
    front: &Arc<Front>,
    kind: Kind,
    key: Option<&Arc<ApiKey>>,
    body: Read,
) -> Result<(Outcome, Read), ApiError> {
    let key = key.cloned();
    if body.bytes.len() <= LONG_BODY {
        return Ok((tokenise(front, kind, key.as_deref(), &body.bytes)?, body));
    }
    // As many at a time as leave threads to those who read their tokens. The semaphore is never closed.
    let turn = front.tokenising.clone().acquire_owned().await.ok();
    let memory = front.memory.work(body.bytes.len()).await;
    let work = {
        let front = front.clone();
        move || {
            // Held to the end, even if the client has left meanwhile.
            let _held = (turn, memory);
            tokenise(&front, kind, key.as_deref(), &body.bytes).map(|outcome| (outcome, body))
        }
    };
    front
        .config
        .threads
        .run(work)
        .await
        .map_err(|error| ApiError::internal(format!("tokenising ended early: {error}")))?
}

fn tokenise(
    front: &Front,
    kind: Kind,
    key: Option<&ApiKey>,
    body: &[u8],
) -> Result<Outcome, ApiError> {
    let asked = Asked::parse(kind, body)?;
    let name = &asked.parameters().model;
    let policy = front.dispatch.policy(name);
    let policy = policy.ok_or_else(|| model_not_found(front, name))?;
    let artifacts = front.dispatch.artifacts(&policy);
    let artifacts = artifacts.ok_or_else(|| not_ready(name))?;
    let Some(model) = front.library.compiled(&artifacts) else {
        return Ok(Outcome::Uncompiled(name.clone(), artifacts));
    };
    let now = front.clock.now().timestamp();
    let sent = &asked.parameters().cache_salt;
    let cache_salt = key.map_or_else(|| sent.clone(), |key| key.cache_salt(sent));
    let prompt = asked.prepare(&model, artifacts.max_context, now, &cache_salt)?;
    Ok(Outcome::Ready(Box::new(Request {
        cache_salt,
        parameters: asked.into_parameters(),
        prompt,
        policy,
        model,
    })))
}

fn not_ready(model: &str) -> ApiError {
    ApiError::unavailable(
        format!(
            "no worker of the model {:?} has registered yet: try again",
            echo(model)
        ),
        "model_not_ready",
    )
}

//! A body into a request that can be run: parsed, checked against its model, tokenised; all of it at once, so that what JSON and
//! tokenizers need in between is held by few requests at a time.

use std::fmt;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::body::Read;
use super::prompt::{Asked, Prepared};
use super::{Front, model_not_found};
use crate::openai::answer::Kind;
use crate::openai::error::{ApiError, echo};
use crate::openai::parameters::Parameters;
use crate::policy::PolicyHandle;
use crate::text::model::ModelText;

/// Bodies longer than this are read off the threads that serve: a tokenizer does some 5 MB/s, so what stays takes 3 ms.
const LONG_BODY: usize = 16 << 10;

/// A request whose prompt is tokens.
#[derive(Debug)]
pub struct Request {
    pub parameters: Parameters,
    pub prompt: Prepared,
    pub policy: Arc<PolicyHandle>,
    pub model: Arc<ModelText>,
}

/// Reads a request of either kind.
pub(super) async fn read(front: &Arc<Front>, kind: Kind, body: Read) -> Result<Request, ApiError> {
    let Some(name) = model_name(&body.bytes) else {
        // What is wrong with it, in detail; or an unusual way to write it.
        let parse = move |bytes: &[u8]| Ok(Asked::parse(kind, bytes)?.into_parameters().model);
        let (name, body) = work(front, body, parse).await?;
        return read_for(front, kind, name, body).await;
    };
    read_for(front, kind, name, body).await
}

async fn read_for(
    front: &Arc<Front>,
    kind: Kind,
    name: String,
    body: Read,
) -> Result<Request, ApiError> {
    let policy = front
        .dispatch
        .policy(&name)
        .ok_or_else(|| model_not_found(front, &name))?;
    let artifacts = front
        .dispatch
        .artifacts(&policy)
        .ok_or_else(|| not_ready(&name))?;
    let max_context = artifacts.max_context;
    let model = front
        .library
        .get(artifacts, front.config.threads)
        .await
        .map_err(|unusable| {
            let name = echo(&name);
            ApiError::internal(format!("the model {name:?} cannot be served: {unusable}"))
                .with_code("model_unusable")
        })?;
    let now = front.clock.now().timestamp();
    let text = model.clone();
    let prepare = move |bytes: &[u8]| {
        let asked = Asked::parse(kind, bytes)?;
        let prompt = asked.prepare(&text, max_context, now)?;
        Ok((asked.into_parameters(), prompt))
    };
    let ((parameters, prompt), _) = work(front, body, prepare).await?;
    Ok(Request {
        parameters,
        prompt,
        policy,
        model,
    })
}

/// Does what takes time and memory by the size of the body.
async fn work<T: Send + 'static>(
    front: &Arc<Front>,
    body: Read,
    read: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, Read), ApiError> {
    if body.bytes.len() <= LONG_BODY {
        return Ok((read(&body.bytes)?, body));
    }
    // As many at a time as leave threads to those who read their tokens. The semaphore is never closed.
    let turn = front.tokenising.clone().acquire_owned().await.ok();
    let memory = front.memory.work(body.bytes.len()).await;
    let work = move || {
        // Held to the end, even if the client has left meanwhile.
        let _held = (turn, memory);
        read(&body.bytes).map(|result| (result, body))
    };
    front
        .config
        .threads
        .run(work)
        .await
        .map_err(|error| ApiError::internal(format!("tokenising ended early: {error}")))?
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

/// The model that a body names, found without keeping anything else of it. `None`: it is no such body, or a strange one.
fn model_name(body: &[u8]) -> Option<String> {
    struct Outline(Option<String>);
    struct Members;

    impl<'de> Visitor<'de> for Members {
        type Value = Outline;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Outline, A::Error> {
            let mut model = None;
            while let Some(name) = members.next_key::<String>()? {
                if name == "model" {
                    // The last one counts, as for every field.
                    model = Some(members.next_value()?);
                } else {
                    members.next_value::<IgnoredAny>()?;
                }
            }
            Ok(Outline(model))
        }
    }

    impl<'de> Deserialize<'de> for Outline {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            deserializer.deserialize_map(Members)
        }
    }

    let Outline(name) = serde_json::from_slice(body).ok()?;
    name.filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_found_wherever_it_is_and_only_if_it_is_text() {
        for (body, name) in [
            (r#"{"messages": [{"model": "x"}], "model": "m"}"#, Some("m")),
            (r#"{"model": "a", "model": "m"}"#, Some("m")),
            (r#"{"mod\u0065l": "\u006d"}"#, Some("m")),
            (r#"{"model": 5}"#, None),
            (r#"{"model": null}"#, None),
            (r#"{"model": ""}"#, None),
            (r#"{"model": "m""#, None),
            ("[]", None),
            ("", None),
        ] {
            assert_eq!(model_name(body.as_bytes()).as_deref(), name, "{body}");
        }
    }
}

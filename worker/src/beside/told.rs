//! What a server says of itself, whichever it is.

use serde_json::Value;

use super::exposition::Reading;
use super::http::Unanswered;
use crate::config::WorkerConfig;

/// What the server says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    pub(crate) version: String,
    /// Tokens of one sequence.
    pub(crate) max_length: u32,
    /// Names of adapters that it serves.
    pub(crate) adapters: Vec<String>,
    pub(crate) metrics: Reading,
    /// By data-parallel rank, where it publishes events.
    pub(crate) events: Vec<EventSource>,
    /// Format of the weights.
    pub(crate) dtype: Option<String>,
    pub(crate) max_sequences: Option<u32>,
    pub(crate) max_batched_tokens: Option<u32>,
    pub(crate) tensor: Option<u32>,
    pub(crate) pipeline: Option<u32>,
    /// How KV lies in memory, where the server itself says it.
    pub(crate) layout: Option<String>,
}

/// Where a rank publishes the events of its cache, and where it replays them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EventSource {
    pub(crate) endpoint: String,
    pub(crate) replay: Option<String>,
}

/// Why there is no answer yet, or will never be one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Untold {
    /// It starts, or is away.
    NotYet(String),
    /// The same, and nothing listens at its port: whichever process did is no more.
    Absent(String),
    /// It is not the server that was declared.
    Wrong(String),
}

impl From<Unanswered> for Untold {
    fn from(why: Unanswered) -> Self {
        match why {
            Unanswered::Absent(..) => Self::Absent(why.to_string()),
            _ => Self::NotYet(why.to_string()),
        }
    }
}

/// From `GET /v1/models`: the declared model's longest sequence, and the adapters beside it.
///
/// # Errors
/// The server serves another model.
pub(crate) fn serving(models: &Value, config: &WorkerConfig) -> Result<(u32, Vec<String>), Untold> {
    let list = models["data"].as_array().map_or(&[][..], Vec::as_slice);
    let name = |model: &Value| model["id"].as_str().unwrap_or_default().to_owned();
    let (base, adapted): (Vec<_>, Vec<_>) =
        list.iter().partition(|model| model["parent"].is_null());
    let url = config.engine.url.as_deref().unwrap_or_default();
    let Some(model) = base.iter().find(|model| name(model) == config.model.name) else {
        let names: Vec<_> = base.iter().map(|model| name(model)).collect();
        return Err(Untold::Wrong(format!(
            "model.name: the server at {url} serves {}, not {}: start it with --served-model-name {} or correct the name",
            if names.is_empty() {
                "no model".to_owned()
            } else {
                names.join(", ")
            },
            config.model.name,
            config.model.name,
        )));
    };
    let length = model["max_model_len"].as_u64().unwrap_or_default();
    Ok((
        u32::try_from(length).unwrap_or(u32::MAX),
        adapted.into_iter().map(name).collect(),
    ))
}

/// A number of a card's width.
pub(crate) fn number(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|value| u32::try_from(value).ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(model: &str) -> WorkerConfig {
        serde_json::from_value(json!({
            "name": "d0", "pool": "decode", "role": "Decode", "model": {"name": model},
            "engine": {"type": "VLLM", "url": "http://127.0.0.1:8200"},
        }))
        .unwrap()
    }

    #[test]
    fn a_server_of_another_model_is_refused_with_what_to_do() {
        let models = json!({"object": "list", "data": [
            {"id": "tiny", "parent": null, "max_model_len": 4096},
            {"id": "tuned", "parent": "tiny", "max_model_len": 4096},
        ]});
        let served = serving(&models, &config("tiny")).unwrap();
        assert_eq!(served, (4096, vec!["tuned".to_owned()]));
        let Err(Untold::Wrong(sentence)) = serving(&models, &config("tuned")) else {
            panic!("an adapter is no model of its own");
        };
        assert!(
            sentence.starts_with(
                "model.name: the server at http://127.0.0.1:8200 serves tiny, not tuned: start it with"
            ),
            "{sentence}"
        );
    }
}

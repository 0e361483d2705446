//! What a vLLM server says of itself over HTTP, and what of it contradicts what it was declared to be.

use serde_json::Value;

use super::exposition::Reading;
use super::http::{Answer, Server, Unanswered};
use crate::config::WorkerConfig;

/// What the server says.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    pub(crate) version: String,
    /// Tokens of one sequence.
    pub(crate) max_length: u32,
    /// Names of adapters that it serves.
    pub(crate) adapters: Vec<String>,
    pub(crate) metrics: Reading,
    /// By data-parallel rank, where it publishes events: where it publishes, and where it replays.
    pub(crate) events: Vec<EventSource>,
    /// Where its development mode is on: format of the weights and sequences at once.
    pub(crate) dtype: Option<String>,
    pub(crate) max_sequences: Option<u32>,
    pub(crate) max_batched_tokens: Option<u32>,
}

/// Where a rank publishes the events of its cache.
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
    /// It is not the server that was declared.
    Wrong(String),
}

impl From<Unanswered> for Untold {
    fn from(why: Unanswered) -> Self {
        Self::NotYet(why.to_string())
    }
}

/// Whether the server's engine is alive. Generates no token.
///
/// # Errors
/// In words.
pub(crate) async fn health(server: &Server) -> Result<(), Unanswered> {
    let answer = server.get("/health").await?;
    if answer.is_ok() {
        return Ok(());
    }
    let said = format!("status {}", answer.status);
    Err(Unanswered::Broken("GET /health".to_owned(), said))
}

/// Asks for all that a card needs.
///
/// # Errors
/// [`Untold`] says whether to ask again.
pub(crate) async fn ask(server: &Server, config: &WorkerConfig) -> Result<Told, Untold> {
    health(server).await?;
    let models = server.get("/v1/models").await?;
    if !models.is_ok() {
        let said = format!("GET /v1/models: status {}", models.status);
        return Err(Untold::NotYet(said));
    }
    let models = models.json();
    let (max_length, adapters) = serving(&models, config)?;
    let metrics = server.get("/metrics").await?;
    let version = server.get("/version").await?.json();
    let events = server.get("/kv_event_sources").await?;
    // Closed unless the server runs for development, and slow when it is asked for the first time.
    let info = server.get("/server_info?config_format=json").await;
    let info = info.ok().filter(Answer::is_ok);
    let info = info.map_or(Value::Null, |info| info.json());
    let info = &info["vllm_config"];
    let number = |value: &Value| value.as_u64().and_then(|value| u32::try_from(value).ok());
    Ok(Told {
        version: version["version"].as_str().unwrap_or("unknown").to_owned(),
        max_length,
        adapters,
        metrics: Reading::vllm(&metrics.text()),
        events: if events.is_ok() {
            sources(&events.json())
        } else {
            Vec::new()
        },
        dtype: info["model_config"]["dtype"].as_str().map(str::to_owned),
        max_sequences: number(&info["scheduler_config"]["max_num_seqs"]),
        max_batched_tokens: number(&info["scheduler_config"]["max_num_batched_tokens"]),
    })
}

/// The declared model's longest sequence, and the adapters beside it.
fn serving(models: &Value, config: &WorkerConfig) -> Result<(u32, Vec<String>), Untold> {
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

/// Ranks in order. One that publishes over something else than ZeroMQ publishes nothing for us.
fn sources(answer: &Value) -> Vec<EventSource> {
    let mut ranks: Vec<_> = answer
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(rank, source)| {
            let open = source["enable_kv_cache_events"].as_bool() == Some(true)
                && source["publisher"].as_str() == Some("zmq");
            let endpoint = source["endpoint"].as_str().filter(|_| open)?;
            let replay = source["replay_endpoint"].as_str().map(str::to_owned);
            let source = EventSource {
                endpoint: endpoint.to_owned(),
                replay,
            };
            Some((rank.parse::<u32>().ok()?, source))
        })
        .collect();
    ranks.sort_by_key(|(rank, _)| *rank);
    ranks.into_iter().map(|(_, source)| source).collect()
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

    fn models() -> Value {
        json!({"object": "list", "data": [
            {"id": "tiny", "parent": null, "max_model_len": 4096},
            {"id": "tuned", "parent": "tiny", "max_model_len": 4096},
        ]})
    }

    #[test]
    fn a_server_of_another_model_is_refused_with_what_to_do() {
        let served = serving(&models(), &config("tiny")).unwrap();
        assert_eq!(served, (4096, vec!["tuned".to_owned()]));
        let Err(Untold::Wrong(sentence)) = serving(&models(), &config("tuned")) else {
            panic!("an adapter is no model of its own");
        };
        assert!(
            sentence.starts_with("model.name: the server at http://127.0.0.1:8200 serves tiny, not tuned: start it with"),
            "{sentence}"
        );
    }

    #[test]
    fn event_sources_are_read_by_rank() {
        let source = |port: u16, open: bool| {
            json!({"enable_kv_cache_events": open, "publisher": "zmq", "endpoint": format!("tcp://*:{port}"),
                "replay_endpoint": null})
        };
        let answer = json!({"1": source(2, true), "0": source(1, true), "2": source(3, false)});
        let found: Vec<_> = sources(&answer)
            .into_iter()
            .map(|source| source.endpoint)
            .collect();
        assert_eq!(found, ["tcp://*:1", "tcp://*:2"]);
        assert!(sources(&json!({"detail": "Not Found"})).is_empty());
    }
}

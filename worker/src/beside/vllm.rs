//! What a vLLM server says of itself over HTTP, and what of it contradicts what it was declared to be.

use serde_json::Value;

use super::exposition::Reading;
use super::http::{Answer, Server, Unanswered};
use super::told::{EventSource, Told, Untold, number, serving};
use crate::config::WorkerConfig;

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
    // Closed unless the server runs for development, and slow when it is asked for the first time: without an answer all is asked again,
    // so that a card does not depend on how busy the machine was.
    let info = server.get("/server_info?config_format=json").await?;
    let info = Some(info).filter(Answer::is_ok);
    let info = info.map_or(Value::Null, |info| info.json());
    let info = &info["vllm_config"];
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
        tensor: number(&info["parallel_config"]["tensor_parallel_size"]),
        pipeline: number(&info["parallel_config"]["pipeline_parallel_size"]),
        layout: None,
    })
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

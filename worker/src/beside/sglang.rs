//! What an SGLang server says of itself over HTTP.

use serde_json::Value;

use super::exposition::Reading;
use super::http::{Server, Unanswered};
use super::told::{EventSource, Told, Untold, number, serving};
use crate::config::{Connector, Dtype, WorkerConfig};

/// Whether the server takes requests. Unlike its `/health` it generates no token, however the server was started.
///
/// # Errors
/// In words.
pub(crate) async fn health(server: &Server) -> Result<(), Unanswered> {
    let answer = server.get("/ready").await?;
    if answer.is_ok() {
        return Ok(());
    }
    let said = format!("status {}", answer.status);
    Err(Unanswered::Broken("GET /ready".to_owned(), said))
}

/// Asks for all that a card needs. `bootstrap` is the prefill worker's bootstrap server.
///
/// # Errors
/// [`Untold`] says whether to ask again.
pub(crate) async fn ask(
    server: &Server,
    bootstrap: Option<&Server>,
    config: &WorkerConfig,
) -> Result<Told, Untold> {
    health(server).await?;
    let models = server.get("/v1/models").await?;
    let info = server.get("/server_info").await?;
    for (path, answer) in [("/v1/models", &models), ("/server_info", &info)] {
        if !answer.is_ok() {
            let said = format!("GET {path}: status {}", answer.status);
            return Err(Untold::NotYet(said));
        }
    }
    let (max_length, adapters) = serving(&models.json(), config)?;
    let told = told(&info.json(), max_length, adapters);
    split_as_declared(&info.json(), config)?;
    if let Some(bootstrap) = bootstrap {
        let ranks =
            "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
        let route = bootstrap.get(ranks).await?;
        if !route.is_ok() {
            return Err(Untold::NotYet(format!(
                "engine.bootstrapPort: its bootstrap server has not heard of all ranks: status {}",
                route.status
            )));
        }
    }
    let metrics = server.get("/metrics").await?;
    if !metrics.is_ok() {
        // Without them it would look idle for ever.
        return Err(Untold::NotYet(format!(
            "GET /metrics: status {}: start the server with --enable-metrics",
            metrics.status
        )));
    }
    let told = with_metrics(told, &metrics.text());
    Ok(told)
}

/// The server's metrics now, beside what does not change.
pub(crate) fn with_metrics(mut told: Told, text: &str) -> Told {
    let fixed = told.metrics;
    told.metrics = Reading {
        block_size: fixed.block_size,
        blocks: fixed.blocks,
        cache_dtype: fixed.cache_dtype,
        prefix_caching: fixed.prefix_caching,
        ..Reading::sglang(text)
    };
    told
}

fn split_as_declared(info: &Value, config: &WorkerConfig) -> Result<(), Untold> {
    let mode = info["disaggregation_mode"].as_str().unwrap_or("null");
    let wanted = match config.engine.connector {
        Connector::Sglang => match config.role {
            baton_protocol::card::Role::Prefill => "prefill",
            baton_protocol::card::Role::Decode => "decode",
        },
        _ => "null",
    };
    if mode == wanted {
        return Ok(());
    }
    Err(Untold::Wrong(format!(
        "engine.connector: declared is {}, which needs --disaggregation-mode {wanted}, the server runs with {mode}: correct either",
        config.engine.connector.word()
    )))
}

fn told(info: &Value, max_length: u32, adapters: Vec<String>) -> Told {
    let text = |name: &str| info[name].as_str().map(str::to_owned);
    let version = text("version").unwrap_or_else(|| "unknown".to_owned());
    let page = number(&info["page_size"]);
    let tokens = number(&info["max_total_num_tokens"]);
    let blocks = tokens.and_then(|tokens| tokens.checked_div(page?));
    let backend = text("attention_backend").unwrap_or_else(|| "its own choice".to_owned());
    Told {
        max_length,
        adapters,
        metrics: Reading {
            block_size: page,
            blocks,
            cache_dtype: text("kv_cache_dtype"),
            prefix_caching: info["disable_radix_cache"].as_bool().map(|off| !off),
            ..Reading::default()
        },
        events: sources(&info["kv_events"]),
        dtype: text("dtype").filter(|dtype| Dtype(dtype.clone()).stated().is_some()),
        max_sequences: number(&info["max_running_requests"]),
        max_batched_tokens: number(&info["chunked_prefill_size"]),
        tensor: number(&info["tp_size"]),
        pipeline: number(&info["pp_size"]),
        // It has no name for it. Two servers of one version and kernel lay it out alike.
        layout: Some(format!("SGLang {version}, attention backend {backend}")),
        version,
    }
}

/// One publisher for each data-parallel rank, on ports that follow each other.
fn sources(events: &Value) -> Vec<EventSource> {
    let (Some(host), Some(port)) = (
        events["endpoint_host"].as_str(),
        number(&events["endpoint_port_base"]),
    ) else {
        return Vec::new();
    };
    let replay = number(&events["replay_endpoint_port_base"]);
    let ranks = number(&events["dp_size"]).unwrap_or(1).min(1024);
    let address = |base: u32, rank: u32| format!("tcp://{host}:{}", base.saturating_add(rank));
    (0..ranks)
        .map(|rank| EventSource {
            endpoint: address(port, rank),
            replay: replay.map(|base| address(base, rank)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(role: &str, connector: &str) -> WorkerConfig {
        serde_json::from_value(json!({
            "name": "p0", "pool": "p", "role": role, "model": {"name": "tiny"},
            "engine": {"type": "SGLang", "url": "http://127.0.0.1:30000", "connector": connector},
        }))
        .unwrap()
    }

    #[test]
    fn what_the_server_resolved_is_taken() {
        let info = json!({"version": "0.5.23", "page_size": 16, "max_total_num_tokens": 1600, "kv_cache_dtype": "auto",
            "dtype": "bfloat16", "tp_size": 2, "pp_size": 1, "max_running_requests": 48, "chunked_prefill_size": 8192,
            "attention_backend": "fa3", "disable_radix_cache": false,
            "kv_events": {"publisher": "zmq", "endpoint_host": "0.0.0.0", "endpoint_port_base": 5557, "topic": "",
                "block_size": 16, "dp_size": 2, "replay_endpoint_port_base": 5600}});
        let told = told(&info, 4096, Vec::new());
        assert_eq!(
            (told.metrics.blocks, told.metrics.block_size),
            (Some(100), Some(16))
        );
        assert_eq!(
            (told.max_sequences, told.max_batched_tokens, told.tensor),
            (Some(48), Some(8192), Some(2))
        );
        assert_eq!(
            told.layout.as_deref(),
            Some("SGLang 0.5.23, attention backend fa3")
        );
        assert_eq!(told.events.len(), 2);
        assert_eq!(told.events[1].endpoint, "tcp://0.0.0.0:5558");
        assert_eq!(told.events[1].replay.as_deref(), Some("tcp://0.0.0.0:5601"));
        assert!(sources(&json!(null)).is_empty());
        let told = with_metrics(
            told,
            "sglang:num_running_reqs{a=\"b\"} 3\nsglang:token_usage 0.5\n",
        );
        assert_eq!((told.metrics.running, told.metrics.kv_usage), (3.0, 0.5));
        assert_eq!(told.metrics.blocks, Some(100));
    }

    #[test]
    fn a_server_in_another_mode_is_refused_with_both_words() {
        let info = |mode: &str| json!({"disaggregation_mode": mode});
        assert_eq!(
            split_as_declared(&info("prefill"), &config("Prefill", "Sglang")),
            Ok(())
        );
        assert_eq!(
            split_as_declared(&info("null"), &config("Decode", "None")),
            Ok(())
        );
        let Err(Untold::Wrong(why)) = split_as_declared(&info("null"), &config("Decode", "Sglang"))
        else {
            panic!("it cannot hand over");
        };
        assert!(
            why.contains("declared is Sglang, which needs --disaggregation-mode decode, the server runs with null"),
            "{why}"
        );
    }
}

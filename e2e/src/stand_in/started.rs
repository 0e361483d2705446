//! The command line and the environment of `vllm serve`, as the stand-in takes them. What vLLM does not know is refused, as it is there.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

/// Flags of vLLM that take a value: those that Baton gives, and one for the tests of what an author adds.
const VALUED: [&str; 14] = [
    "--revision",
    "--host",
    "--port",
    "--served-model-name",
    "--block-size",
    "--max-model-len",
    "--dtype",
    "--kv-cache-dtype",
    "--quantization",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--kv-transfer-config",
    "--kv-events-config",
    "--max-num-seqs",
];
const SWITCHES: [&str; 2] = ["--enable-expert-parallel", "--enable-prompt-tokens-details"];
const SIDE_CHANNEL_PORT: &str = "VLLM_NIXL_SIDE_CHANNEL_PORT";
/// Of the stand-in alone: between two tokens of an answer.
pub const PACE: &str = "STAND_IN_TOKEN_MILLISECONDS";

/// What a server was started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Started {
    pub model: PathBuf,
    /// `host:port` of its API.
    pub listen: String,
    pub name: String,
    pub block_size: u32,
    pub max_length: u32,
    /// Endpoints of its events and of their replay.
    pub events: Option<(String, String)>,
    /// Host and port of NIXL's side channel.
    pub side_channel: Option<(String, u16)>,
    pub pace: Duration,
}

impl Started {
    /// Of arguments without the program's name.
    ///
    /// # Errors
    /// vLLM would not start so, or the stand-in cannot play it.
    pub fn of(arguments: &[String], environment: &BTreeMap<String, String>) -> Result<Self> {
        let [command, model, flags @ ..] = arguments else {
            bail!("give `serve`, a model's folder, and flags");
        };
        ensure!(command == "serve", "{command}: must be serve");
        let flags = read(flags)?;
        let flag = |name: &str| flags.get(name).map(String::as_str);
        let number = |name: &str, otherwise: u32| match flag(name) {
            Some(text) => text.parse().with_context(|| format!("{name} {text}")),
            None => Ok(otherwise),
        };
        let config = |name: &str| -> Result<Value> {
            let text = flag(name).unwrap_or("null");
            serde_json::from_str(text).with_context(|| format!("{name} {text}"))
        };
        let events = config("--kv-events-config")?;
        let endpoint = |name: &str| {
            let text = events[name].as_str().map(str::to_owned);
            text.with_context(|| format!("--kv-events-config {events}: no {name}"))
        };
        let publishes = events["enable_kv_cache_events"] == true;
        let events = if publishes {
            Some((endpoint("endpoint")?, endpoint("replay_endpoint")?))
        } else {
            None
        };
        let nixl = config("--kv-transfer-config")?["kv_connector"] == "NixlConnector";
        let variable = |name: &str| {
            let text = environment.get(name);
            text.with_context(|| format!("{name} is not set"))
        };
        let side_channel = if nixl {
            let host = variable("VLLM_NIXL_SIDE_CHANNEL_HOST")?.clone();
            let port = variable(SIDE_CHANNEL_PORT)?;
            let port = port
                .parse()
                .with_context(|| format!("{SIDE_CHANNEL_PORT} {port}"))?;
            Some((host, port))
        } else {
            None
        };
        let pace = environment.get(PACE).map_or(Ok(0), |text| text.parse());
        Ok(Self {
            model: model.into(),
            listen: format!(
                "{}:{}",
                flag("--host").unwrap_or("0.0.0.0"),
                number("--port", 8000)?
            ),
            name: flag("--served-model-name").unwrap_or(model).to_owned(),
            block_size: number("--block-size", 16)?,
            max_length: number("--max-model-len", 4096)?,
            events,
            side_channel,
            pace: Duration::from_millis(pace.context(PACE)?),
        })
    }
}

/// By name; the last one of a name counts.
fn read(arguments: &[String]) -> Result<BTreeMap<&str, String>> {
    let mut flags = BTreeMap::new();
    let mut arguments = arguments.iter().map(String::as_str);
    while let Some(name) = arguments.next() {
        let value = if SWITCHES.contains(&name) {
            ""
        } else if VALUED.contains(&name) {
            arguments
                .next()
                .with_context(|| format!("{name} has no value"))?
        } else {
            bail!("unrecognized argument: {name}");
        };
        flags.insert(name, value.to_owned());
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use baton_crds::engine::{ConnectorFiles, EnginePorts, EventSockets};
    use baton_crds::worker_configuration::Weights;
    use baton_crds::{EngineStart, PoolRole, PoolSpec};
    use serde_json::json;

    use super::*;

    fn started(engine: &Value) -> Result<Started> {
        let spec: PoolSpec = serde_json::from_value(json!({
            "model": {"name": "words"}, "engine": engine,
        }))?;
        let command = EngineStart {
            spec: &spec,
            role: PoolRole::Prefill,
            weights: &Weights::Path("/model/words".into()),
            listen: "0.0.0.0",
            reached: "10.0.0.7",
            ports: EnginePorts {
                http: 8000,
                events: 5557,
                replay: 5558,
                connector: 5600,
            },
            events: EventSockets::EngineListens,
            connector: ConnectorFiles::default(),
        };
        let command = command.command().context("no server")?;
        let environment = command.environment.into_iter();
        let environment = environment.map(|(name, value)| (name.to_owned(), value));
        Started::of(&command.arguments, &environment.collect())
    }

    #[test]
    fn the_command_line_of_a_pool_is_understood_and_what_vllm_does_not_know_is_refused() {
        let read = started(&json!({"type": "VLLM", "maxModelLength": 2048, "blockSize": 32}));
        let read = read.unwrap();
        assert_eq!(read.model, Path::new("/model/words"));
        assert_eq!(
            (read.listen.as_str(), read.name.as_str()),
            ("0.0.0.0:8000", "words")
        );
        assert_eq!((read.block_size, read.max_length), (32, 2048));
        let (endpoint, replay) = read.events.unwrap();
        assert_eq!(
            (endpoint.as_str(), replay.as_str()),
            ("tcp://*:5557", "tcp://*:5558")
        );
        assert_eq!(read.side_channel, Some(("10.0.0.7".to_owned(), 5600)));

        let author = json!({"type": "VLLM", "connector": "None", "args": ["--block-size", "64"]});
        let read = started(&author).unwrap();
        assert_eq!((read.block_size, read.side_channel), (64, None));
        let unknown = json!({"type": "VLLM", "args": ["--page-size", "64"]});
        let refused = started(&unknown).unwrap_err().to_string();
        assert!(refused.contains("--page-size"), "{refused}");
    }
}

//! How the server of a pool is started: its arguments and its environment, made from the pool. Pure.
//!
//! `baton up` starts it as a process, the operator as a container: both make the command line here. What is given on it is what Baton
//! needs to know or to be told; all else is the engine's own default. The pool's `engine.args` stand last, so that the author's word wins.

mod sglang;
mod vllm;

use crate::pool::{EngineType, PoolSpec};
use crate::resources::PoolRole;
use crate::worker_configuration::Weights;

/// One server of a pool, and where it is.
#[derive(Debug, Clone)]
pub struct EngineStart<'a> {
    pub spec: &'a PoolSpec,
    pub role: PoolRole,
    /// As the engine sees them.
    pub weights: &'a Weights,
    /// The address that it listens on for HTTP, without a port.
    pub listen: &'a str,
    /// Its address for other machines: what it tells its peers.
    pub reached: &'a str,
    pub ports: EnginePorts,
    pub events: EventSockets,
    /// Only used with connector Baton.
    pub connector: ConnectorFiles<'a>,
}

/// Ports of one server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EnginePorts {
    /// OpenAI's API, health and metrics.
    pub http: u16,
    /// KV events.
    pub events: u16,
    /// KV events once more, for who missed some.
    pub replay: u16,
    /// What the peers of its connector ask first: NIXL's side channel, SGLang's bootstrap server.
    pub connector: u16,
}

/// Who of engine and daemon listens for the other's events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventSockets {
    /// The engine, on every address of its network: a pod's own, where other readers of events are welcome.
    EngineListens,
    /// The daemon, on loopback: on a machine, where an engine that listens would listen for its whole network.
    DaemonListens,
}

/// What Baton's connector inside vLLM needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConnectorFiles<'a> {
    /// The daemon's socket.
    pub socket: &'a str,
    /// The folder from which Python imports `baton_vllm`.
    pub package: &'a str,
}

/// A command line without its program: `vllm` for VLLM, a Python that has `sglang` for SGLang.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineCommand {
    pub arguments: Vec<String>,
    /// Without the author's.
    pub environment: Vec<(&'static str, String)>,
}

impl EngineCommand {
    fn flag(&mut self, name: &str, value: &impl ToString) {
        self.arguments.push(name.to_owned());
        self.arguments.push(value.to_string());
    }

    fn switch(&mut self, name: &str) {
        self.arguments.push(name.to_owned());
    }
}

impl EngineStart<'_> {
    /// `None` for engines that are no servers: they are in the worker.
    #[must_use]
    pub fn command(&self) -> Option<EngineCommand> {
        let mut command = match self.spec.engine.engine_type {
            EngineType::Builtin | EngineType::Simulated => return None,
            EngineType::Vllm => vllm::command(self),
            EngineType::SgLang => sglang::command(self),
        };
        command
            .arguments
            .extend(self.spec.engine.args.iter().cloned());
        Some(command)
    }

    /// The model as an engine's first argument: a folder, or a name that it fetches.
    fn model(&self) -> (String, Option<&str>) {
        match self.weights {
            Weights::Path(path) => (path.to_string_lossy().into_owned(), None),
            Weights::Hub { name, revision } => (name.clone(), revision.as_deref()),
            // Refused where pools are read; an engine that cannot find it says so by this name.
            Weights::Tiny { seed } => (format!("builtin://tiny?seed={seed}"), None),
        }
    }

    /// Where events are published: an address with `*` is listened on, any other connected to.
    fn events_endpoint(&self) -> String {
        let host = match self.events {
            EventSockets::EngineListens => "*",
            EventSockets::DaemonListens => "127.0.0.1",
        };
        format!("tcp://{host}:{}", self.ports.events)
    }

    /// Where missed events are asked for: always listened on.
    fn replay_endpoint(&self) -> String {
        let host = match self.events {
            EventSockets::EngineListens => "*",
            EventSockets::DaemonListens => "127.0.0.1",
        };
        format!("tcp://{host}:{}", self.ports.replay)
    }

    /// As other readers of these events name a server: llm-d's find its model and its pod in it.
    fn topic(&self) -> String {
        format!(
            "kv@{}:{}@{}",
            self.reached, self.ports.http, self.spec.model.name
        )
    }
}

#[cfg(test)]
mod tests;

//! The other routers, as `bench/engine-peers` has installed them: each with two servers (whole requests), or two for prefill and two
//! for decode.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use baton_e2e::http::Client;
use baton_e2e::process::{Process, tail};
use baton_e2e::wait;
use serde_json::json;

use crate::MODEL;
use crate::client::Target;
use crate::fake::Listening;

/// Python imports a lot.
const SOON: Duration = Duration::from_secs(60);

/// Which of them, and what it is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    program: Program,
    policy: &'static str,
    pub(crate) split: bool,
    /// With `TCP_NODELAY` set on what it accepts, by a library that is loaded before its own.
    nodelay: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    VllmRouter,
    SglangRouter,
}

const fn peer(
    name: &'static str,
    program: Program,
    policy: &'static str,
    split: bool,
    nodelay: bool,
) -> Peer {
    Peer {
        name,
        program,
        policy,
        split,
        nodelay,
    }
}

pub(crate) const PEERS: [Peer; 8] = [
    peer(
        "vllm-router round_robin",
        Program::VllmRouter,
        "round_robin",
        false,
        false,
    ),
    peer(
        "vllm-router cache_aware",
        Program::VllmRouter,
        "cache_aware",
        false,
        false,
    ),
    peer(
        "sglang-router round_robin",
        Program::SglangRouter,
        "round_robin",
        false,
        false,
    ),
    peer(
        "sglang-router cache_aware",
        Program::SglangRouter,
        "cache_aware",
        false,
        false,
    ),
    peer(
        "sglang-router cache_aware, nodelay",
        Program::SglangRouter,
        "cache_aware",
        false,
        true,
    ),
    peer(
        "vllm-router P/D nixl",
        Program::VllmRouter,
        "cache_aware",
        true,
        false,
    ),
    peer(
        "sglang-router P/D",
        Program::SglangRouter,
        "cache_aware",
        true,
        false,
    ),
    peer(
        "sglang-router P/D, nodelay",
        Program::SglangRouter,
        "cache_aware",
        true,
        true,
    ),
];

/// The servers that every router is given.
#[derive(Clone, Debug)]
pub(crate) struct Servers {
    pub(crate) prefill: Vec<Listening>,
    pub(crate) decode: Vec<Listening>,
}

/// One that runs.
#[derive(Debug)]
pub(crate) struct Running {
    process: Process,
    pub(crate) target: Target,
}

impl Running {
    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }
}

impl Peer {
    /// Starts it and waits until it answers.
    ///
    /// # Errors
    /// It is not installed, ends, or does not answer in time.
    pub(crate) async fn start(
        &self,
        installed: &Path,
        servers: &Servers,
        folder: &Path,
    ) -> Result<Running> {
        let (port, metrics) = (free_port()?, free_port()?);
        let mut command = self.command(installed, servers, port, metrics)?;
        if self.nodelay {
            let library = installed.join("nodelay.so");
            if !library.is_file() {
                bail!("{} is not there", library.display());
            }
            command.env("LD_PRELOAD", library);
        }
        let home = folder.join(self.name.replace(|one: char| !one.is_alphanumeric(), "-"));
        std::fs::create_dir(&home)?;
        let mut process = Process::start_command("router", &home, command)?;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let client = Client::new(address);
        let ready = wait::until("it answers", SOON, async || {
            if let Some(status) = process.ended() {
                return Ok(Err(status));
            }
            // Its health says nothing of whether it knows its servers.
            let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2});
            let answer = client
                .post("/v1/chat/completions", &[], &body)
                .await
                .map_err(|error| error.to_string())?;
            if answer.status == 200 {
                Ok(Ok(()))
            } else {
                Err(format!("status {}: {}", answer.status, answer.text()))
            }
        })
        .await;
        let said = || tail(&format!("{}{}", process.output(), process.errors()), 5);
        match ready {
            Ok(Ok(())) => {}
            Ok(Err(status)) => bail!("it ended with {status}: {}", said()),
            Err(error) => return Err(error.context(said())),
        }
        Ok(Running {
            process,
            target: Target {
                addresses: vec![address],
                headers: Vec::new(),
            },
        })
    }

    fn command(
        &self,
        installed: &Path,
        servers: &Servers,
        port: u16,
        metrics: u16,
    ) -> Result<Command> {
        let (program, first, quiet) = match self.program {
            Program::VllmRouter => ("vllm-router", None, "warning"),
            Program::SglangRouter => ("sglang-router", Some("launch"), "warn"),
        };
        let program = installed.join("bin").join(program);
        if !program.is_file() {
            bail!(
                "{} is not there: run `make engine-peers`",
                program.display()
            );
        }
        let mut command = Command::new(program);
        command.args(first).args(["--host", "127.0.0.1"]);
        command.args(["--port", &port.to_string()]);
        command.args(["--prometheus-host", "127.0.0.1"]);
        command.args(["--prometheus-port", &metrics.to_string()]);
        command.args(["--policy", self.policy, "--log-level", quiet]);
        let url = |server: &Listening| format!("http://{}", server.http);
        if !self.split {
            command.arg("--worker-urls");
            command.args(servers.decode.iter().map(url));
            return Ok(command);
        }
        let (mode, bootstrap) = match self.program {
            Program::VllmRouter => ("--vllm-pd-disaggregation", None),
            // Nobody calls it: the routers only pass it on.
            Program::SglangRouter => ("--pd-disaggregation", Some("8998")),
        };
        command.arg(mode);
        if self.program == Program::VllmRouter {
            command.args(["--kv-connector", "nixl"]);
        }
        for server in &servers.prefill {
            command.args(["--prefill", &url(server)]).args(bootstrap);
        }
        for server in &servers.decode {
            command.args(["--decode", &url(server)]);
        }
        Ok(command)
    }
}

/// Free a moment ago: these programs take a number and nothing else.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port")?;
    Ok(listener.local_addr()?.port())
}

/// Where `bench/engine-peers` installs: `BATON_ENGINE_PEERS`, if it names a folder that is there.
pub(crate) fn installed() -> Option<PathBuf> {
    let folder = std::env::var_os("BATON_ENGINE_PEERS").map(PathBuf::from)?;
    folder.join("bin").is_dir().then_some(folder)
}

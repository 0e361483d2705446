//! The command line of `baton-worker`.

use std::fs;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use baton_protocol::hash::HashKey;
use baton_system::ending::{Signal, Signals, parent_gone};
use baton_system::network::listening;
use baton_system::process::WrongInput;
use baton_telemetry::settings::{Settings, TraceFlags};
use clap::{Args, Parser, Subcommand};

use super::StartError;
use super::start::{Addresses, Running, Start, start};
use crate::beside::start as beside;
use crate::config::WorkerConfig;
use crate::transport::fault::Fault;
use crate::transport::shm;

/// The daemon of a GPU pod.
#[derive(Debug, Parser)]
#[command(name = "baton-worker", version, about)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serves one worker until it is told to stop.
    Serve(Serve),
}

#[derive(Debug, Args)]
struct Serve {
    /// The worker's configuration, JSON.
    #[arg(long, env = "BATON_CONFIG")]
    config: PathBuf,
    /// Where routers and other workers call it (gRPC); port 0 takes a free one.
    #[arg(long, env = "BATON_CONTROL", default_value = "127.0.0.1:7000")]
    control: SocketAddr,
    /// Where other workers read KV.
    #[arg(long, env = "BATON_TRANSFER", default_value = "127.0.0.1:7001")]
    transfer: SocketAddr,
    /// HTTP: card, load, metrics, health.
    #[arg(long, env = "BATON_ADMIN", default_value = "127.0.0.1:7002", value_parser = listening)]
    admin: SocketAddr,
    /// Host that others reach this worker by, where it is not the one it listens on (a pod's address).
    #[arg(long, env = "BATON_ADVERTISE")]
    advertise: Option<String>,
    /// 64 hexadecimal digits: the deployment's secret, shared with its routers.
    #[arg(long, env = "BATON_HASH_KEY_FILE")]
    hash_key_file: Option<PathBuf>,
    /// End when standard input ends: for a parent that may die without saying so.
    #[arg(long, env = "BATON_EXIT_ON_STDIN_EOF")]
    exit_on_stdin_eof: bool,
    #[command(flatten)]
    traces: TraceFlags,
}

/// Runs the command until the worker is told to end.
///
/// # Errors
/// [`WrongInput`], or the worker cannot start or has stopped by itself.
pub async fn run(cli: Cli) -> anyhow::Result<()> {
    let Command::Serve(serve) = cli.command;
    let config = WorkerConfig::read(&serve.config).map_err(wrong)?;
    let hash_key = hash_key(serve.hash_key_file.as_deref())?;
    let mut what = Start::new(
        config,
        Addresses {
            control: serve.control,
            transfer: serve.transfer,
            admin: serve.admin,
            advertise: serve.advertise,
        },
        hash_key,
    );
    if let Ok(fault) = std::env::var("BATON_FAULT") {
        what.fault = Fault::of_variable(&fault).map_err(wrong)?;
    }
    what.host = shm::host()
        .inspect_err(|error| tracing::warn!(%error, "this host has no id, so Shm is not offered"))
        .ok();
    what.tracing = Settings::read(&serve.traces, |name| std::env::var(name).ok()).map_err(wrong)?;
    what.card_change = std::env::var("BATON_FAULT_CARD").ok();
    let running = Served::start(what).await?;
    // Before anybody is told that it serves: whoever is told may stop it at once.
    let signals = Signals::listen().context("signals cannot be waited for")?;
    announce(&running)?;
    until_stopped(running, signals, serve.exit_on_stdin_eof).await
}

/// What serves: a worker with its own engine, or a daemon beside a server.
enum Served {
    Own(Running),
    Beside(beside::Running),
}

impl Served {
    async fn start(what: Start) -> Result<Self, StartError> {
        Ok(if what.config.engine.kind.is_beside() {
            Self::Beside(beside::start(what).await?)
        } else {
            Self::Own(start(what).await?)
        })
    }

    fn addresses(&self) -> (SocketAddr, &str, SocketAddr) {
        match self {
            Self::Own(running) => (
                running.control_address(),
                running.transfer_address().unwrap_or("-"),
                running.admin_address(),
            ),
            Self::Beside(running) => (running.control_address(), "-", running.admin_address()),
        }
    }

    /// Ends when it has stopped by itself; why.
    async fn failed(&self) -> String {
        let why = match self {
            Self::Own(running) => {
                running.failed().await;
                None
            }
            Self::Beside(running) => running.failed().await,
        };
        why.unwrap_or_else(|| "the worker has stopped by itself: its log says why".to_owned())
    }

    async fn drain(&self) -> bool {
        match self {
            Self::Own(running) => running.drain().await,
            Self::Beside(running) => running.drain().await,
        }
    }

    async fn stop(self) {
        match self {
            Self::Own(running) => running.stop().await,
            Self::Beside(running) => running.stop().await,
        }
    }
}

fn wrong(error: impl std::fmt::Display) -> WrongInput {
    WrongInput(error.to_string())
}

fn hash_key(file: Option<&Path>) -> anyhow::Result<HashKey> {
    let Some(file) = file else {
        tracing::warn!(
            "no --hash-key-file: block hashes use a key that everybody knows; give a file with 64 hexadecimal digits"
        );
        return Ok(HashKey::from_bytes(&[0; 32]));
    };
    let text = fs::read_to_string(file).map_err(|error| {
        wrong(format!(
            "--hash-key-file {}: {error}: give a readable file",
            file.display()
        ))
    })?;
    Ok(HashKey::from_hex(&text)
        .map_err(|error| wrong(format!("--hash-key-file {}: {error}", file.display())))?)
}

/// One line for whoever started the process: the ports that were free are known only now.
fn announce(running: &Served) -> anyhow::Result<()> {
    let (control, transfer, admin) = running.addresses();
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "listening control {control} transfer {transfer} admin {admin}"
    )
    .and_then(|()| out.flush())
    .context("standard output: the addresses cannot be written")
}

async fn until_stopped(
    running: Served,
    mut signals: Signals,
    exit_on_stdin_eof: bool,
) -> anyhow::Result<()> {
    let parent = parent_gone(exit_on_stdin_eof);
    tokio::pin!(parent);
    tokio::select! {
        why = running.failed() => {
            running.stop().await;
            anyhow::bail!(why);
        }
        () = &mut parent => {
            tracing::info!("standard input has ended: stopping at once");
        }
        signal = signals.next() => match signal {
            Signal::Terminate => {
                tracing::info!("SIGTERM: draining");
                tokio::select! {
                    done = running.drain() => {
                        if !done {
                            tracing::warn!("some operations or leases have outlived the drain: they are ended");
                        }
                    }
                    // Told twice, or left alone: at once.
                    _ = signals.next() => {}
                    () = &mut parent => {}
                }
            }
            Signal::Interrupt => tracing::info!("SIGINT: stopping at once"),
        }
    }
    running.stop().await;
    Ok(())
}

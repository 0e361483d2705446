//! One router process: everything built from its flags, and ended in order.
//!
//! - [`flags`]: the command line. `sources`: where workers and policies come from.

pub mod flags;
mod sources;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use baton_protocol::hash::HashKey;
use baton_system::System;
use baton_system::ending::{Signals, parent_gone};
use baton_system::entropy;
use baton_system::network::Listener;
use baton_system::process::WrongInput;
use baton_telemetry::export::Exporter;
use baton_telemetry::settings::Settings;
use baton_telemetry::tracer::Tracer;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::admin::token::Token;
use crate::admin::{self, Admin};
use crate::clock::Clock;
use crate::dispatch::{Dispatcher, Parts};
use crate::fleet::artifacts::Artifacts;
use crate::fleet::{Workers, watch as follow};
use crate::front::access::Open;
use crate::front::{Front, FrontConfig, serve};
use crate::learning::Learning;
use crate::metrics::Metrics;
use crate::records::Records;
use flags::Flags;
use sources::{Found, Sources};

/// After the front has ended, runs are already cancelled or done: this bounds their last cancellations.
const LAST_CANCELLATIONS: Duration = Duration::from_secs(3);

/// Probes, scrapers and people.
const ADMIN_CONNECTIONS: usize = 256;

fn wrong(error: impl std::fmt::Display) -> WrongInput {
    WrongInput(error.to_string())
}

/// Runs a router on this machine until it is told to end by a signal, or by the end of standard input.
pub async fn run(mut flags: Flags) -> Result<()> {
    flags.tracing =
        Settings::read(&flags.traces, |name| std::env::var(name).ok()).map_err(wrong)?;
    flags
        .complete(|name| std::env::var(name).ok())
        .map_err(wrong)?;
    let signals = Signals::listen().context("signals cannot be waited for")?;
    let told = until_told(signals, flags.exit_on_stdin_eof);
    serve_until(flags, System::machine(), Clock::start(), told).await
}

/// Runs a router on `system` until `told` resolves with the reason to end.
pub async fn serve_until(
    flags: Flags,
    system: System,
    clock: Clock,
    told: impl Future<Output = &'static str> + Send + 'static,
) -> Result<()> {
    let stop = CancellationToken::new();
    let tasks = TaskTracker::new();

    let key = hash_key(flags.hash_key_file.as_deref())?;
    let token = flags
        .admin_token_file
        .as_deref()
        .map(Token::read)
        .transpose()
        .map_err(wrong)?
        .map(Arc::new);
    let sources = Sources::open(&flags, clock).await?;
    let policies = Arc::new(sources.policies());
    let readiness = sources.readiness();
    let access = flags.front.access(&key).map_err(wrong)?;

    let metrics = Arc::new(Metrics::new());
    let learning = Arc::new(Learning::default());
    let records = Arc::new(Records::start(
        &flags.state_dir,
        clock,
        metrics.clone(),
        learning.clone(),
        system.threads,
    )?);
    let artifacts = flags.state_dir.join("artifacts");
    std::fs::create_dir_all(&artifacts).with_context(|| {
        format!(
            "state folder {} cannot be written",
            flags.state_dir.display()
        )
    })?;

    let public = bind(&system, flags.listen, "--listen").await?;
    let private = bind(&system, flags.admin, "--admin").await?;

    let workers = Arc::new(Workers::new(
        clock,
        flags.routers,
        key,
        Artifacts::new(artifacts),
        learning.clone(),
        metrics.clone(),
    ));
    let (lists, listed) = watch::channel(sources.workers());
    tasks.spawn(follow::supervise(
        workers.clone(),
        listed,
        system.network.clone(),
        stop.clone(),
    ));
    let found = Found {
        lists,
        workers: workers.clone(),
        policies: policies.clone(),
        metrics: metrics.clone(),
        clock,
    };
    sources.follow(found, &tasks, &stop);

    let tracer = match flags.tracing.clone() {
        None => Tracer::off(),
        Some(settings) => {
            let identity = [
                ("service.name", "baton-router".to_owned()),
                ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
                ("service.instance.id", flags.router_id().to_owned()),
            ];
            let (tracer, exporter) = Exporter::new(settings, identity, &metrics.spans);
            // Ends after `stop`, with what the last runs have left.
            tasks.spawn(exporter.run(stop.clone()));
            tracer
        }
    };
    let dispatcher = Dispatcher::new(Parts {
        router: flags.router_id().to_owned(),
        clock,
        workers: workers.clone(),
        policies: policies.clone(),
        learning: learning.clone(),
        records: records.clone(),
        metrics: metrics.clone(),
        tracer,
        network: system.network.clone(),
        seed: u64::from_le_bytes(entropy::bytes(&*system.entropy)?),
        entropy: system.entropy.clone(),
    });
    let config = FrontConfig {
        threads: system.threads,
        ..flags.front.config(Duration::from_secs(flags.drain_seconds))
    };
    for file in access.keys.iter().cloned() {
        tasks.spawn(file.follow(stop.clone()));
    }
    for files in access.identity.iter().cloned() {
        tasks.spawn(files.follow(stop.clone()));
    }
    let open = Open::of(&access);
    let memory_bound_mib = config.memory_bound() >> 20;
    let front = Front::new(
        Arc::new(dispatcher.clone()),
        config,
        access,
        clock,
        entropy::bytes(&*system.entropy)?,
        metrics.front.clone(),
    );
    let admin = Arc::new(Admin {
        dispatch: Arc::new(dispatcher.clone()),
        workers,
        policies,
        readiness,
        learning,
        records: records.clone(),
        metrics,
        clock,
        threads: system.threads,
        draining: front.shutdown().clone(),
    });
    info!(
        listen = %public.local_addr()?, admin = %private.local_addr()?, router = flags.router_id(), requests = %open,
        admin_requests = if token.is_some() { "with the admin token" } else { "open to all" }, memory_bound_mib,
        "router started"
    );

    // Probes and scrapers see the drain: the admin port ends last.
    let admin_stop = stop.clone();
    tasks.spawn(async move {
        let config = FrontConfig {
            drain_timeout: Duration::from_millis(200),
            max_connections: ADMIN_CONNECTIONS,
            ..FrontConfig::default()
        };
        serve::serve(private, admin::routes(admin, token), &config, admin_stop).await;
    });
    let drained = front.shutdown().clone();
    let told = tokio::spawn(async move {
        let reason = told.await;
        info!(reason, "draining: no new requests, runs under way may end");
        drained.cancel();
    });
    front.serve(public).await;
    told.await.context("waiting for signals failed")?;

    if tokio::time::timeout(LAST_CANCELLATIONS, dispatcher.finished())
        .await
        .is_err()
    {
        warn!("some runs did not end in time");
    }
    stop.cancel();
    tasks.close();
    tasks.wait().await;
    system
        .threads
        .run(move || records.finish())
        .await
        .context("the last decision records may not be written")?;
    info!("router ended");
    Ok(())
}

async fn bind(system: &System, address: std::net::SocketAddr, flag: &str) -> Result<Listener> {
    system
        .network
        .listen(&address.to_string())
        .await
        .with_context(|| format!("cannot listen on {address} ({flag}): choose a free port"))
}

fn hash_key(path: Option<&Path>) -> Result<HashKey> {
    let Some(path) = path else {
        warn!(
            "no --hash-key-file: block hashes and salts of API keys are keyed by zeros; whoever can send prompts may craft collisions, and work out the salt of a tenant whose name is known"
        );
        return Ok(HashKey::from_bytes(&[0; 32]));
    };
    let text = std::fs::read_to_string(path).map_err(|error| {
        wrong(format!(
            "hash key file {} is not readable: {error}",
            path.display()
        ))
    })?;
    HashKey::from_hex(&text)
        .map_err(|error| wrong(format!("hash key file {}: {error}", path.display())).into())
}

/// Resolves with the reason to end.
async fn until_told(mut signals: Signals, exit_on_stdin_eof: bool) -> &'static str {
    tokio::select! {
        signal = signals.next() => signal.word(),
        () = parent_gone(exit_on_stdin_eof) => "end of standard input",
    }
}

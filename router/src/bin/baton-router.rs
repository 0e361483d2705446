//! The router process.

use std::io::Write as _;
use std::process::ExitCode;

use baton_router::app::{self, WrongInput, flags::Flags};
use baton_router::front::descriptors;
use clap::Parser;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let flags = Flags::parse();
    let filter = filter(std::env::var("RUST_LOG").ok());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    descriptors::raise();
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            return end(
                &format!("async runtime: {error}: check the limit on threads"),
                1,
            );
        }
    };
    match runtime.block_on(app::run(flags)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<WrongInput>() => end(&format!("{error:#}"), 2),
        Err(error) => end(&format!("{error:#}"), 1),
    }
}

/// What the Kubernetes client cannot do is said once, by whoever handles it; unless its own lines are asked for.
fn filter(asked: Option<String>) -> EnvFilter {
    let quiet = ",kube_client=off,kube_runtime=off";
    let asked = asked.unwrap_or_else(|| "info".to_owned());
    let quiet = if asked.contains("kube") { "" } else { quiet };
    EnvFilter::try_new(format!("{asked}{quiet}"))
        .unwrap_or_else(|_| EnvFilter::new(format!("info{quiet}")))
}

fn end(message: &str, status: u8) -> ExitCode {
    // Without standard error there is nobody to tell.
    let _ = writeln!(std::io::stderr(), "baton-router: {message}");
    ExitCode::from(status)
}

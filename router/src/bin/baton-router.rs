//! The router process.

use std::io::Write as _;
use std::process::ExitCode;

use baton_router::app::{self, WrongInput, flags::Flags};
use baton_router::front::descriptors;
use clap::Parser;
use tracing_subscriber::EnvFilter;

/// What the Kubernetes client cannot do is said once, by whoever handles it.
const DEFAULT_FILTER: &str = "info,kube_client=error,kube_runtime=error";

fn main() -> ExitCode {
    let flags = Flags::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
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

fn end(message: &str, status: u8) -> ExitCode {
    // Without standard error there is nobody to tell.
    let _ = writeln!(std::io::stderr(), "baton-router: {message}");
    ExitCode::from(status)
}

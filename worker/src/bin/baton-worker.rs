//! The process `baton-worker`: logging, the runtime, and the exit status.

use std::io::Write as _;
use std::process::ExitCode;

use baton_worker::serve::command::{Cli, Stopped, run};
use clap::Parser as _;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        // The compute thread has a core of its own; what is left is I/O.
        .worker_threads(2)
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
    let result = runtime.block_on(run(cli));
    // Standard input is read on a thread that nothing can wake: do not wait for it.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Stopped::Usage(error)) => end(&format!("{error:#}"), 2),
        Err(Stopped::Failed(error)) => end(&format!("{error:#}"), 1),
    }
}

/// One line on standard error.
fn end(message: &str, status: u8) -> ExitCode {
    // Without standard error there is nobody to tell.
    let _ = writeln!(std::io::stderr(), "baton-worker: {message}");
    ExitCode::from(status)
}

//! The worker process.

use std::process::ExitCode;
use std::time::Duration;

use baton_system::process::Process;
use baton_worker::serve::command::{Cli, run};
use clap::Parser as _;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let process = Process {
        name: "baton-worker",
        // The compute thread has a core of its own; what is left is I/O.
        threads: Some(2),
        // A step of the engine that nobody will see the end of.
        blocked: Duration::ZERO,
    };
    process.run(run(cli))
}

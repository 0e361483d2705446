//! The router process.

use std::process::ExitCode;
use std::time::Duration;

use baton_router::app::{self, flags::Flags};
use baton_router::front::descriptors;
use baton_system::process::Process;
use clap::Parser;

/// Records are on disk before the work ends: what still blocks a thread is of no use to anybody.
const BLOCKED: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let flags = Flags::parse();
    let process = Process {
        name: "baton-router",
        threads: None,
        blocked: BLOCKED,
    };
    process.run(async {
        descriptors::raise();
        app::run(flags).await
    })
}

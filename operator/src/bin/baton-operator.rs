//! The operator process.

use std::process::ExitCode;
use std::time::Duration;

use baton_operator::app::{self, flags::Flags};
use baton_system::process::Process;

fn main() -> ExitCode {
    let flags = Flags::parse_process();
    let process = Process {
        name: "baton-operator",
        threads: None,
        // Name lookups, which block a thread each.
        blocked: Duration::from_secs(1),
    };
    process.run(app::run(flags))
}

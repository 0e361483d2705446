//! `baton`: serve resources on this machine, ask, explain and replay. Also `kubectl baton`, by its own name.
//!
//! | module | subject |
//! |---|---|
//! | [`arguments`], [`failure`], [`terminal`], [`table`] | the command line, how it ends, what it prints |
//! | [`up`] | `baton up` |
//! | [`ask`], [`explain`], [`replay`] | the other commands |
//! | [`manifests`] | files of resources, and their policies as placement has them |
//! | [`model`] | models fetched once and kept |
//! | [`client`], [`records`] | a router over HTTP; decision records from it or from files |
//!
//! What is absent: logic of its own. It places nothing, computes nothing and speaks to no worker; it starts programs, asks
//! routers, reads records, and prints.

mod arguments;
mod ask;
mod client;
mod explain;
mod failure;
mod manifests;
mod model;
mod records;
mod replay;
mod table;
mod terminal;
mod up;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use arguments::{Arguments, Command};
use failure::Verdict;

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let matches = command(words.first()).get_matches_from(words);
    let arguments = match Arguments::from_arg_matches(&matches) {
        Ok(arguments) => arguments,
        Err(error) => error.exit(),
    };
    let (status, lines) = failure::status(&run(arguments));
    for line in lines {
        terminal::note(&format!("error: {line}"));
    }
    ExitCode::from(status)
}

/// The command line, under the name by which it was called.
fn command(called: Option<&OsString>) -> clap::Command {
    let plugin = called
        .and_then(|path| Path::new(path).file_name())
        .is_some_and(|name| name == "kubectl-baton");
    let command = Arguments::command();
    if plugin {
        command.bin_name("kubectl baton")
    } else {
        command
    }
}

fn run(arguments: Arguments) -> anyhow::Result<Verdict> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        match arguments.command {
            Command::Up(arguments) => Box::pin(up::up(arguments)).await,
            Command::Ask(arguments) => ask::ask(arguments).await,
            Command::Explain(arguments) => explain::explain(arguments).await,
            Command::Replay(arguments) => replay::replay(arguments).await,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubectl_finds_the_same_program_under_its_name() {
        let usage = |called: &str| {
            let mut command = command(Some(&OsString::from(called)));
            command.render_usage().to_string()
        };
        assert!(usage("/usr/bin/kubectl-baton").contains("kubectl baton"));
        assert!(usage("/usr/bin/baton").contains("baton <COMMAND>"));
    }
}

//! `baton`: serve resources on this machine, ask, explain, replay and watch. Also `kubectl baton`, by its own name.
//!
//! | module | subject |
//! |---|---|
//! | [`arguments`], [`failure`], [`terminal`], [`table`] | the command line, how it ends, what it prints |
//! | [`up`] | `baton up` |
//! | [`ask`], [`explain`], [`replay`], [`top`] | the other commands |
//! | [`manifests`] | files of resources, and their policies as placement has them |
//! | [`model`] | models fetched once and kept |
//! | [`client`], [`records`] | a router over HTTP; decision records from it or from files |
//! | [`cluster`] | the routers of a cluster, through `kubectl` |
//!
//! What is absent: logic of its own. It places nothing, computes nothing and speaks to no worker; it starts programs, asks
//! routers, reads records, and prints.

mod arguments;
mod ask;
mod client;
mod cluster;
mod explain;
mod failure;
mod manifests;
mod model;
mod records;
mod replay;
mod table;
mod terminal;
mod top;
mod up;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches};

use arguments::{Arguments, Command};
use failure::Verdict;

/// The variable of every `--admin`.
const ADMIN: &str = "BATON_ADMIN";

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let plugin = is_plugin(words.first());
    let admin = std::env::var_os(ADMIN);
    let matches = listening(command(plugin), admin.as_deref()).get_matches_from(words);
    let mut arguments = match Arguments::from_arg_matches(&matches) {
        Ok(arguments) => arguments,
        Err(error) => error.exit(),
    };
    if let Err(error) = choose_place(&mut arguments, &matches, plugin) {
        error.exit();
    }
    let (status, lines) = failure::status(&run(arguments));
    for line in lines {
        terminal::note(&format!("error: {line}"));
    }
    ExitCode::from(status)
}

/// Called by `kubectl`, which finds programs of such a name.
fn is_plugin(called: Option<&OsString>) -> bool {
    called
        .and_then(|path| Path::new(path).file_name())
        .is_some_and(|name| name == "kubectl-baton")
}

/// `kubectl baton` means the cluster where no other place is given on the command line. An environment that was made for `baton`
/// names no place here.
fn choose_place(
    arguments: &mut Arguments,
    matches: &ArgMatches,
    plugin: bool,
) -> Result<(), clap::Error> {
    let (cluster, matches) = match (&mut arguments.command, matches.subcommand()) {
        (Command::Explain(explain), Some((_, matches))) => (&mut explain.cluster, matches),
        (Command::Top(top), Some((_, matches))) => (&mut top.cluster, matches),
        _ => return Ok(()),
    };
    // Of the two, only `explain` reads a state directory.
    let said = |id: &str| {
        let known = matches.try_contains_id(id).is_ok();
        known && matches.value_source(id) == Some(ValueSource::CommandLine)
    };
    let other = [("admin", "--admin"), ("state_dir", "--state-dir")]
        .into_iter()
        .find(|(id, _)| said(id));
    match other {
        Some((_, flag)) if said("kubernetes") => {
            let message =
                format!("--kubernetes and {flag} name two places: leave one of the two out");
            Err(command(plugin).error(ErrorKind::ArgumentConflict, message))
        }
        Some(_) => {
            cluster.kubernetes = false;
            Ok(())
        }
        None => {
            cluster.kubernetes |= plugin;
            Ok(())
        }
    }
}

/// The command line, under the name by which it was called.
fn command(plugin: bool) -> clap::Command {
    let command = Arguments::command();
    if plugin {
        command.bin_name("kubectl baton")
    } else {
        command
    }
}

/// For most commands `BATON_ADMIN` names a router to ask, for `up` an address to listen on. A URL can only be the first, as in a shell
/// that `make cluster-env` has told where a cluster is: `up` does not read it then.
fn listening(command: clap::Command, admin: Option<&OsStr>) -> clap::Command {
    let is_url = admin
        .and_then(OsStr::to_str)
        .is_some_and(|admin| admin.contains("://"));
    if !is_url {
        return command;
    }
    command.mut_subcommand("up", |up| {
        up.mut_arg("admin", |admin| admin.env(None::<&'static str>))
    })
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
            Command::EndGroup { leader } => up::group::watch(leader),
            Command::Top(arguments) => top::top(arguments).await,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubectl_finds_the_same_program_under_its_name() {
        let usage = |called: &str| {
            let mut command = command(is_plugin(Some(&OsString::from(called))));
            command.render_usage().to_string()
        };
        assert!(usage("/usr/bin/kubectl-baton").contains("kubectl baton"));
        assert!(usage("/usr/bin/baton").contains("baton <COMMAND>"));
    }

    /// Whether a cluster is asked.
    fn in_cluster(line: &str) -> Result<bool, String> {
        let words: Vec<&str> = line.split(' ').collect();
        let plugin = is_plugin(Some(&OsString::from(words[0])));
        let matches = command(plugin).try_get_matches_from(words);
        let matches = matches.map_err(|error| error.to_string())?;
        let mut arguments = Arguments::from_arg_matches(&matches).unwrap();
        choose_place(&mut arguments, &matches, plugin).map_err(|error| error.to_string())?;
        match arguments.command {
            Command::Explain(explain) => Ok(explain.cluster.kubernetes),
            Command::Top(top) => Ok(top.cluster.kubernetes),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn kubectl_baton_asks_the_cluster_unless_another_place_is_given() {
        assert_eq!(in_cluster("kubectl-baton explain r"), Ok(true));
        assert_eq!(in_cluster("kubectl-baton explain r -n serving"), Ok(true));
        assert_eq!(in_cluster("baton explain r --kubernetes"), Ok(true));
        assert_eq!(in_cluster("baton explain r"), Ok(false));
        assert_eq!(in_cluster("kubectl-baton explain r --admin h:1"), Ok(false));
        assert_eq!(in_cluster("kubectl-baton top"), Ok(true));
        assert_eq!(in_cluster("kubectl-baton top --admin h:1"), Ok(false));
        assert_eq!(in_cluster("baton top"), Ok(false));
        assert_eq!(
            in_cluster("kubectl-baton explain r --state-dir d"),
            Ok(false)
        );
        let both = in_cluster("baton explain r --kubernetes --admin h:1").unwrap_err();
        assert!(
            both.contains("--kubernetes and --admin name two places"),
            "{both}"
        );
    }
}

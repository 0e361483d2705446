//! What the command line takes.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::up::attach::Attachment;

/// Serves language models with prefill and decode in separate workers, and says for every request why it went where.
#[derive(Debug, Parser)]
#[command(
    name = "baton",
    version,
    arg_required_else_help = true,
    propagate_version = true
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve the resources of some files on this machine: a router, and a worker per replica.
    Up(UpArguments),
    /// Ask a model that is up, and see why the request went where it went.
    Ask(AskArguments),
    /// Why one request went where it went: candidates, costs, what happened, estimate beside actual.
    Explain(ExplainArguments),
    /// Decide recorded requests anew: with their own policy all must come out as recorded, with another one see what changes.
    Replay(ReplayArguments),
    /// Ends the process group of this leader when standard input ends without a word.
    #[command(name = crate::up::group::COMMAND, hide = true)]
    EndGroup { leader: u32 },
    /// Workers, their blocks and work, and pairs with their breakers, as routers see them now.
    Top(TopArguments),
}

#[derive(Debug, Args)]
pub(crate) struct UpArguments {
    /// YAML with PrefillPool, DecodePool and RoutePolicy documents; may be given several times.
    #[arg(
        short,
        long = "file",
        value_name = "FILE",
        required = true,
        env = "BATON_FILE",
        value_delimiter = ','
    )]
    pub(crate) files: Vec<PathBuf>,
    /// Where the OpenAI API listens; port 0 takes a free one.
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1:8000",
        env = "BATON_LISTEN"
    )]
    pub(crate) listen: SocketAddr,
    /// Where health, metrics, fleet and decisions are served; port 0 takes a free one.
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1:8001",
        env = "BATON_ADMIN"
    )]
    pub(crate) admin: SocketAddr,
    /// Where logs, decision records and processes.json are kept.
    #[arg(
        long,
        value_name = "DIR",
        default_value = ".baton",
        env = "BATON_STATE_DIR"
    )]
    pub(crate) state_dir: PathBuf,
    /// A token that the admin address shall ask for.
    #[arg(long, value_name = "FILE", env = "BATON_ADMIN_TOKEN_FILE")]
    pub(crate) admin_token_file: Option<PathBuf>,
    /// When ready, send short and long requests in each mode, compare the tokens, print the decisions, end, and exit by the result.
    #[arg(long, env = "BATON_CHECK", conflicts_with = "tour")]
    pub(crate) check: bool,
    /// When ready, send a short and a long request to idle workers and the long one again while every decode worker is
    /// generating, print why each went where it went, and go on serving.
    #[arg(long, env = "BATON_TOUR")]
    pub(crate) tour: bool,
    /// Give up when not all is ready after this many seconds.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 600,
        env = "BATON_READY_SECONDS"
    )]
    pub(crate) ready_seconds: u64,
    /// The vLLM that pools of engine VLLM start: its path, or a name to find in PATH.
    #[arg(
        long,
        value_name = "PROGRAM",
        default_value = "vllm",
        env = "BATON_VLLM"
    )]
    pub(crate) vllm: PathBuf,
    /// The Python, with sglang installed, that pools of engine SGLang start: its path, or a name to find in PATH.
    #[arg(
        long,
        value_name = "PYTHON",
        default_value = "python3",
        env = "BATON_SGLANG"
    )]
    pub(crate) sglang: PathBuf,
    /// Folder of the Python package baton_vllm, for pools of engine VLLM with connector Baton [default: the one that belongs to this program].
    #[arg(long, value_name = "DIR", env = "BATON_VLLM_CONNECTOR")]
    pub(crate) vllm_connector: Option<PathBuf>,
    /// A server of a pool of engine VLLM or SGLang that runs already, of which only the daemon is started; +PORT: of its NIXL side channel or
    /// bootstrap server. Given once for each replica, in order.
    #[arg(
        long,
        value_name = "POOL=ADDRESS[+PORT]",
        env = "BATON_ATTACH",
        value_delimiter = ','
    )]
    pub(crate) attach: Vec<Attachment>,
    /// Where fetched models are kept [default: $XDG_CACHE_HOME/baton or ~/.cache/baton].
    #[arg(long, value_name = "DIR", env = "BATON_CACHE")]
    pub(crate) cache: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputArguments,
}

#[derive(Debug, Args)]
pub(crate) struct AskArguments {
    /// The user's message.
    pub(crate) text: String,
    /// Which model; may be left out where one is served.
    #[arg(long, env = "BATON_MODEL")]
    pub(crate) model: Option<String>,
    /// The router [default: the one of the state directory, else http://127.0.0.1:8000].
    #[arg(long, value_name = "URL", env = "BATON_ROUTER")]
    pub(crate) router: Option<String>,
    /// Mode for this request, where the policy allows overrides: Aggregated, Disaggregated, Conditional.
    #[arg(long, env = "BATON_MODE")]
    pub(crate) mode: Option<String>,
    /// At most so many tokens in the answer.
    #[arg(long, default_value_t = 128, env = "BATON_MAX_TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// From 0, which takes the likeliest token each time, to 2.
    #[arg(long, default_value_t = 0.0, env = "BATON_TEMPERATURE", value_parser = temperature)]
    pub(crate) temperature: f64,
    #[command(flatten)]
    pub(crate) records: RecordArguments,
    #[command(flatten)]
    pub(crate) output: OutputArguments,
}

fn temperature(text: &str) -> Result<f64, String> {
    // What is no number is in no range.
    text.parse()
        .ok()
        .filter(|number| (0.0..=2.0).contains(number))
        .ok_or_else(|| "must be a number from 0 to 2".to_owned())
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArguments {
    /// A run id, as a response has it in `x-baton-run`; `last` is the newest record.
    pub(crate) run: String,
    #[command(flatten)]
    pub(crate) records: RecordArguments,
    #[command(flatten)]
    pub(crate) cluster: ClusterArguments,
    #[command(flatten)]
    pub(crate) output: OutputArguments,
}

/// Which routers of which cluster are asked.
#[derive(Debug, Clone, Args)]
pub(crate) struct ClusterArguments {
    /// Ask router pods through kubectl: the default of `kubectl baton`, unless another source is named.
    #[arg(long, env = "BATON_KUBERNETES")]
    pub(crate) kubernetes: bool,
    /// The routers' namespace [default: the current one of kubectl].
    #[arg(short, long, env = "BATON_NAMESPACE")]
    pub(crate) namespace: Option<String>,
    /// The context of kubectl [default: the current one].
    #[arg(long, env = "BATON_CONTEXT")]
    pub(crate) context: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct TopArguments {
    /// A router's admin address, HOST:PORT or URL [default: 127.0.0.1:8001].
    #[arg(long, value_name = "ADDRESS", env = "BATON_ADMIN")]
    pub(crate) admin: Option<String>,
    /// The token that the router's admin port asks for.
    #[arg(long, value_name = "FILE", env = "BATON_ADMIN_TOKEN_FILE")]
    pub(crate) admin_token_file: Option<PathBuf>,
    /// Look once, as where nobody watches: the output is no terminal, or for programs.
    #[arg(long, env = "BATON_ONCE")]
    pub(crate) once: bool,
    /// Between two looks.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, env = "BATON_SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) seconds: u64,
    #[command(flatten)]
    pub(crate) cluster: ClusterArguments,
    #[command(flatten)]
    pub(crate) output: OutputArguments,
}

#[derive(Debug, Args)]
pub(crate) struct ReplayArguments {
    /// Files of decision records [default: those of the state directory or of the router].
    #[arg(value_name = "FILES")]
    pub(crate) files: Vec<PathBuf>,
    /// Decide by the RoutePolicy of this file instead of the recorded one.
    #[arg(long, value_name = "FILE", env = "BATON_POLICY")]
    pub(crate) policy: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) records: RecordArguments,
    #[command(flatten)]
    pub(crate) output: OutputArguments,
}

/// Where decision records are read from.
#[derive(Debug, Clone, Args)]
pub(crate) struct RecordArguments {
    /// A state directory.
    #[arg(
        long,
        value_name = "DIR",
        default_value = ".baton",
        env = "BATON_STATE_DIR"
    )]
    pub(crate) state_dir: PathBuf,
    /// A router's admin address, HOST:PORT or URL; used instead of the state directory.
    #[arg(long, value_name = "ADDRESS", env = "BATON_ADMIN")]
    pub(crate) admin: Option<String>,
    /// The token that the router's admin port asks for.
    #[arg(long, value_name = "FILE", env = "BATON_ADMIN_TOKEN_FILE")]
    pub(crate) admin_token_file: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct OutputArguments {
    /// For people or for programs.
    #[arg(short, long, value_enum, default_value_t = Output::Table, env = "BATON_OUTPUT")]
    pub(crate) output: Output,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    Table,
    Json,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn what_no_router_would_take_is_not_sent() {
        for word in ["nan", "inf", "-0.1", "2.1", "warm", ""] {
            assert!(temperature(word).is_err(), "{word}");
        }
        assert_eq!(temperature("0.7"), Ok(0.7));
        assert!(Arguments::try_parse_from(["baton", "ask", "x", "--max-tokens", "0"]).is_err());
    }

    #[test]
    fn up_takes_several_files() {
        let arguments =
            Arguments::try_parse_from(["baton", "up", "-f", "a.yaml", "-f", "b.yaml", "--check"]);
        let Ok(Arguments {
            command: Command::Up(up),
        }) = arguments
        else {
            panic!("{arguments:?}")
        };
        assert_eq!(up.files.len(), 2);
        assert!(up.check && !up.tour);
    }
}

//! The command line of `baton-router`. Every flag has an environment variable; the flag wins.

use std::net::SocketAddr;
use std::path::PathBuf;

use baton_telemetry::settings::{Settings, TraceFlags};
use clap::Parser;

use crate::front::flags::FrontFlags;

/// Serves an OpenAI-compatible endpoint and places each request on prefill and decode workers.
#[derive(Clone, Debug, Parser)]
#[command(name = "baton-router", version)]
pub struct Flags {
    /// Address of the OpenAI API.
    #[arg(long, env = "BATON_LISTEN", default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,

    /// Address of health, metrics, fleet and decisions; not for clients.
    #[arg(long, env = "BATON_ADMIN", default_value = "127.0.0.1:8001")]
    pub admin: SocketAddr,

    /// JSON list of policies; read again when it changes.
    #[arg(long, env = "BATON_POLICY_FILE")]
    pub policy_file: PathBuf,

    /// JSON list of workers, `[{"name","control"}]`; read again when it changes.
    #[arg(long, env = "BATON_WORKERS_FILE")]
    pub workers_file: PathBuf,

    /// Folder of decision records and artifacts.
    #[arg(long, env = "BATON_STATE_DIR", default_value = ".baton")]
    pub state_dir: PathBuf,

    /// 64 hexadecimal digits, the same for routers and workers.
    #[arg(long, env = "BATON_HASH_KEY_FILE")]
    pub hash_key_file: Option<PathBuf>,

    /// Secret that `/v1/*` of the admin port asks for.
    #[arg(long, env = "BATON_ADMIN_TOKEN_FILE")]
    pub admin_token_file: Option<PathBuf>,

    /// Name of this replica; the first part of its run ids.
    #[arg(long, env = "BATON_ROUTER_ID", default_value = "r0", value_parser = router_id)]
    pub router_id: String,

    /// Routers that share the workers, this one included.
    #[arg(long, env = "BATON_ROUTERS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub routers: u32,

    /// How long runs under way may go on after SIGTERM.
    #[arg(long, env = "BATON_DRAIN_SECONDS", default_value_t = 30)]
    pub drain_seconds: u64,

    #[command(flatten)]
    pub front: FrontFlags,

    #[command(flatten)]
    pub traces: TraceFlags,

    /// Where spans go, from the flag above and the environment.
    #[arg(skip)]
    pub tracing: Option<Settings>,

    /// End, as by SIGTERM, when standard input ends: for a parent that must not leave orphans.
    #[arg(long, env = "BATON_EXIT_ON_STDIN_EOF")]
    pub exit_on_stdin_eof: bool,
}

/// It becomes part of run ids, record fields and a header.
fn router_id(text: &str) -> Result<String, String> {
    let usable = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.');
    if (1..=64).contains(&text.len()) && text.chars().all(usable) {
        Ok(text.to_owned())
    } else {
        Err("use 1 to 64 letters, digits, '-', '_' or '.'".to_owned())
    }
}

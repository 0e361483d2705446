//! The command line of `baton-router`. Every flag has an environment variable; the flag wins.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use baton_system::network::listening;
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
    #[arg(long, env = "BATON_ADMIN", default_value = "127.0.0.1:8001", value_parser = listening)]
    pub admin: SocketAddr,

    /// JSON list of policies; read again when it changes.
    #[arg(long, env = "BATON_POLICY_FILE")]
    pub policy_file: Option<PathBuf>,

    /// JSON list of workers, `[{"name","control"}]`; read again when it changes.
    #[arg(long, env = "BATON_WORKERS_FILE")]
    pub workers_file: Option<PathBuf>,

    /// Take policies and workers from the Kubernetes API server instead of files: the cluster this runs in, else that of KUBECONFIG.
    #[arg(long, env = "BATON_KUBERNETES")]
    pub kubernetes: bool,

    /// With --kubernetes: the namespace to serve [default: POD_NAMESPACE, else the service account's].
    #[arg(long, env = "BATON_NAMESPACE")]
    pub namespace: Option<String>,

    /// With --kubernetes: the levels of topology, nearest first, as the operator has them; `name` or `name=nodeLabel` each.
    #[arg(
        long,
        env = "BATON_TOPOLOGY_LEVELS",
        default_value = "nvlink,host,rack,zone"
    )]
    pub topology_levels: String,

    /// Folder of decision records and artifacts.
    #[arg(long, env = "BATON_STATE_DIR", default_value = ".baton")]
    pub state_dir: PathBuf,

    /// 64 hexadecimal digits, the same for routers and workers.
    #[arg(long, env = "BATON_HASH_KEY_FILE")]
    pub hash_key_file: Option<PathBuf>,

    /// Secret that `/v1/*` of the admin port asks for.
    #[arg(long, env = "BATON_ADMIN_TOKEN_FILE")]
    pub admin_token_file: Option<PathBuf>,

    /// Name of this replica; the first part of its run ids [default: with --kubernetes POD_NAME, else r0].
    #[arg(long, env = "BATON_ROUTER_ID", value_parser = router_id)]
    pub router_id: Option<String>,

    /// Routers that share the workers, this one included; with --kubernetes they are counted.
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

/// Where policies and workers come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin<'a> {
    Files {
        policies: &'a Path,
        workers: &'a Path,
    },
    Kubernetes {
        /// None: the one of the service account.
        namespace: Option<&'a str>,
        /// Nearest first.
        levels: Vec<String>,
    },
}

impl Flags {
    /// Fills what was not said from what Kubernetes tells a pod of itself.
    ///
    /// # Errors
    /// The pod's name cannot be this router's.
    pub fn complete(&mut self, variable: impl Fn(&str) -> Option<String>) -> Result<(), String> {
        if !self.kubernetes {
            return Ok(());
        }
        let told = |name: &str| variable(name).filter(|value| !value.is_empty());
        if self.router_id.is_none()
            && let Some(pod) = told("POD_NAME")
        {
            let named = router_id(&pod);
            self.router_id = Some(
                named.map_err(|error| format!("POD_NAME {pod:?} is no --router-id: {error}"))?,
            );
        }
        self.namespace = self.namespace.take().or_else(|| told("POD_NAMESPACE"));
        Ok(())
    }

    pub fn router_id(&self) -> &str {
        self.router_id.as_deref().unwrap_or("r0")
    }

    /// # Errors
    /// Both were given, or neither, or a level without a name.
    pub fn origin(&self) -> Result<Origin<'_>, String> {
        match (self.kubernetes, &self.policy_file, &self.workers_file) {
            (true, None, None) => Ok(Origin::Kubernetes {
                namespace: self.namespace.as_deref(),
                levels: levels(&self.topology_levels)?,
            }),
            (true, ..) => Err(
                "--kubernetes takes policies and workers from the API server: leave --policy-file and --workers-file out"
                    .to_owned(),
            ),
            (false, ..) if self.namespace.is_some() => Err(
                "--namespace is of a cluster: give --kubernetes too, or leave it out".to_owned(),
            ),
            (false, Some(policies), Some(workers)) => Ok(Origin::Files { policies, workers }),
            (false, ..) => Err(
                "policies and workers come from nowhere: give --policy-file and --workers-file, or --kubernetes in a cluster"
                    .to_owned(),
            ),
        }
    }
}

/// The names in `name=nodeLabel,…`, the form that the operator takes, in their order.
fn levels(text: &str) -> Result<Vec<String>, String> {
    if text.trim().is_empty() {
        // As the operator has it: no level at all.
        return Ok(Vec::new());
    }
    text.split(',')
        .map(|level| {
            let name = level.split('=').next().unwrap_or_default().trim();
            if name.is_empty() {
                return Err(format!(
                    "--topology-levels {text:?}: a level has no name; give name or name=nodeLabel, separated by commas"
                ));
            }
            Ok(name.to_owned())
        })
        .collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(words: &str) -> Flags {
        let words = words.split_whitespace();
        Flags::try_parse_from(std::iter::once("baton-router").chain(words)).unwrap()
    }

    #[test]
    fn files_or_a_cluster_and_whoever_gives_both_or_neither_is_told_what_to_do() {
        let files = flags("--policy-file p --workers-file w");
        let (policies, workers) = (Path::new("p"), Path::new("w"));
        assert_eq!(files.origin(), Ok(Origin::Files { policies, workers }));
        for (words, says) in [
            ("", "or --kubernetes in a cluster"),
            ("--policy-file p", "give --policy-file and --workers-file"),
            (
                "--kubernetes --policy-file p",
                "leave --policy-file and --workers-file out",
            ),
            (
                "--kubernetes --policy-file p --workers-file w",
                "leave --policy-file and --workers-file out",
            ),
            (
                "--namespace n --policy-file p --workers-file w",
                "give --kubernetes too",
            ),
            ("--kubernetes --topology-levels a,=x", "a level has no name"),
        ] {
            let error = flags(words).origin().unwrap_err();
            assert!(error.contains(says), "{words}: {error}");
        }
    }

    #[test]
    fn a_router_does_not_listen_at_the_url_of_another() {
        let words = ["baton-router", "--admin", "http://127.0.0.1:8001"];
        let error = Flags::try_parse_from(words).unwrap_err().to_string();
        for says in ["--admin", "http://127.0.0.1:8001", "give ADDRESS:PORT"] {
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_pod_is_told_its_name_and_namespace_and_flags_win() {
        let pod = |name: &str| match name {
            "POD_NAME" => Some("baton-router-7c9-x".to_owned()),
            "POD_NAMESPACE" => Some("serving".to_owned()),
            _ => None,
        };
        let mut told = flags("--kubernetes");
        assert_eq!(told.router_id(), "r0");
        told.complete(pod).unwrap();
        assert_eq!(told.router_id(), "baton-router-7c9-x");
        let levels = ["nvlink", "host", "rack", "zone"]
            .map(str::to_owned)
            .to_vec();
        let namespace = Some("serving");
        assert_eq!(told.origin(), Ok(Origin::Kubernetes { namespace, levels }));

        let mut said =
            flags("--kubernetes --namespace n --router-id r9 --topology-levels near=a/b,far=c");
        said.complete(pod).unwrap();
        assert_eq!(said.router_id(), "r9");
        let levels = ["near", "far"].map(str::to_owned).to_vec();
        let namespace = Some("n");
        assert_eq!(said.origin(), Ok(Origin::Kubernetes { namespace, levels }));

        // The chart gives an empty list so.
        let arguments = ["baton-router", "--kubernetes", "--topology-levels", ""];
        let none = Flags::try_parse_from(arguments).unwrap();
        let levels = Vec::new();
        let namespace = None;
        assert_eq!(none.origin(), Ok(Origin::Kubernetes { namespace, levels }));

        let mut alone = flags("--policy-file p --workers-file w");
        alone.complete(pod).unwrap();
        assert_eq!(
            (alone.router_id(), alone.namespace.as_deref()),
            ("r0", None)
        );
        let error = flags("--kubernetes").complete(|_| Some("a/b".to_owned()));
        assert!(error.unwrap_err().starts_with("POD_NAME \"a/b\""));
    }
}

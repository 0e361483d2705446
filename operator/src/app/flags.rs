//! The operator's command line. Each flag has an environment variable; the flag wins.

use std::net::SocketAddr;

use clap::Parser;

use crate::pool::{Level, Settings};

/// Nearest level first.
const LEVELS: &str = "nvlink=nvidia.com/gpu.clique,host=kubernetes.io/hostname,rack=topology.kubernetes.io/rack,zone=topology.kubernetes.io/zone";

/// Reconciles PrefillPool, DecodePool and RoutePolicy into pods and status.
#[derive(Clone, Debug, Parser)]
#[command(name = "baton-operator", version)]
pub struct Flags {
    /// The one namespace to look at; empty: all.
    #[arg(long, env = "BATON_NAMESPACE", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub namespace: Option<String>,

    /// Image of the workers of pools that name none in spec.engine.image.
    #[arg(long, env = "BATON_WORKER_IMAGE")]
    pub worker_image: Option<String>,

    /// Levels of topology with the label of nodes that says in which domain a node lies, nearest level first.
    #[arg(long, env = "BATON_TOPOLOGY_LEVELS", default_value = LEVELS, value_name = "NAME=NODE_LABEL,…")]
    pub topology_levels: String,

    /// Address of /metrics, /healthz and /readyz.
    #[arg(long, env = "BATON_LISTEN", default_value = "0.0.0.0:8080")]
    pub listen: SocketAddr,

    /// Namespace of the lease; default: that of this pod, or of the kubeconfig's context.
    #[arg(long, env = "BATON_LEASE_NAMESPACE")]
    pub lease_namespace: Option<String>,

    /// Name of the lease that one of several operators holds.
    #[arg(long, env = "BATON_LEASE_NAME", default_value = "baton-operator")]
    pub lease_name: String,

    /// Name of this process in the lease and in events; default: POD_NAME, or the process id.
    #[arg(long, env = "BATON_IDENTITY")]
    pub identity: Option<String>,
}

impl Flags {
    /// An empty variable is as good as none: charts set what they have no value for to nothing.
    pub fn parse_process() -> Self {
        let empty = |name: &str| std::env::var(name).is_ok_and(|value| value.is_empty());
        let arguments = std::env::args_os();
        let mut command = <Self as clap::CommandFactory>::command();
        for name in ["namespace", "worker_image", "lease_namespace", "identity"] {
            let variable = format!("BATON_{}", name.to_uppercase());
            if empty(&variable) {
                command = command.mut_arg(name, |argument| argument.env(None::<&'static str>));
            }
        }
        let matches = command.get_matches_from(arguments);
        match <Self as clap::FromArgMatches>::from_arg_matches(&matches) {
            Ok(flags) => flags,
            Err(error) => error.exit(),
        }
    }

    /// What planners are told.
    ///
    /// # Errors
    /// A level has no label, or two have one name.
    pub fn settings(&self) -> Result<Settings, String> {
        Ok(Settings {
            worker_image: self.worker_image.clone().filter(|image| !image.is_empty()),
            levels: levels(&self.topology_levels)?,
        })
    }

    /// `own`: the namespace of this pod's service account, or of the kubeconfig's context.
    #[must_use]
    pub fn lease_namespace(&self, own: &str) -> String {
        self.lease_namespace
            .clone()
            .filter(|namespace| !namespace.is_empty())
            .or_else(|| std::env::var("POD_NAMESPACE").ok())
            .filter(|namespace| !namespace.is_empty())
            .unwrap_or_else(|| own.to_owned())
    }

    #[must_use]
    pub fn identity(&self) -> String {
        self.identity
            .clone()
            .or_else(|| std::env::var("POD_NAME").ok())
            .filter(|identity| !identity.is_empty())
            .unwrap_or_else(|| format!("process-{}", std::process::id()))
    }
}

fn levels(text: &str) -> Result<Vec<Level>, String> {
    let mut levels: Vec<Level> = Vec::new();
    for part in text
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        let wrong = |why: &str| {
            format!(
                "--topology-levels: {part:?} {why}: give NAME=NODE_LABEL,…, nearest level first"
            )
        };
        let (name, label) = part.split_once('=').ok_or_else(|| wrong("has no ="))?;
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || name.len() > 40 || !name.chars().all(fits) {
            return Err(wrong(
                "has a name that is not 1 to 40 lower-case letters, digits and dashes",
            ));
        }
        if label.is_empty() {
            return Err(wrong("has no label"));
        }
        if levels.iter().any(|level| level.name == name) {
            return Err(wrong("is there twice"));
        }
        levels.push(Level {
            name: name.to_owned(),
            node_label: label.to_owned(),
        });
    }
    Ok(levels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_levels_are_those_of_the_design() {
        let flags = Flags::parse_from(["baton-operator"]);
        let settings = flags.settings().unwrap();
        let names: Vec<&str> = settings
            .levels
            .iter()
            .map(|level| level.name.as_str())
            .collect();
        assert_eq!(names, ["nvlink", "host", "rack", "zone"]);
        assert_eq!(settings.levels[1].node_label, "kubernetes.io/hostname");
        assert_eq!(settings.worker_image, None);
        assert_eq!(flags.lease_name, "baton-operator");
    }

    #[test]
    fn levels_that_cannot_be_meant_are_refused_in_words() {
        for (text, part) in [
            ("host", "has no ="),
            ("host=", "has no label"),
            ("Host=x", "lower-case"),
            ("a=x,a=y", "is there twice"),
        ] {
            let error = levels(text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(levels("").unwrap(), []);
    }
}

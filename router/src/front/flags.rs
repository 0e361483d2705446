//! The front's part of the router's command line.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::hash::HashKey;
use clap::Args;

use super::access::Access;
use super::keys::SaltKey;
use super::{FrontConfig, descriptors, keys, tls};
use crate::followed::Unusable;

/// Limits on clients.
#[derive(Clone, Debug, Args)]
pub struct FrontFlags {
    /// Largest request body, bytes; a larger one gets 413.
    #[arg(long, env = "BATON_MAX_BODY_BYTES", default_value_t = FrontConfig::default().max_body_bytes as u64, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub max_body_bytes: u64,

    /// A request body must arrive within this, or gets 408.
    #[arg(long, env = "BATON_BODY_TIMEOUT_SECONDS", default_value_t = FrontConfig::default().body_timeout.as_secs(), value_parser = clap::value_parser!(u64).range(1..))]
    pub body_timeout_seconds: u64,

    /// How long a connection may be idle, or take to send the head of a request.
    #[arg(long, env = "BATON_IDLE_TIMEOUT_SECONDS", default_value_t = FrontConfig::default().head_timeout.as_secs(), value_parser = clap::value_parser!(u64).range(1..))]
    pub idle_timeout_seconds: u64,

    /// A client that reads nothing of its answer for this long is given up, and its run ended.
    #[arg(long, env = "BATON_WRITE_TIMEOUT_SECONDS", default_value_t = FrontConfig::default().write_timeout.as_secs(), value_parser = clap::value_parser!(u64).range(1..))]
    pub write_timeout_seconds: u64,

    /// Connections at a time; for one more the idlest is closed, and without an idle one it gets 503.
    #[arg(long, env = "BATON_MAX_CONNECTIONS", default_value_t = FrontConfig::default().max_connections as u64, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub max_connections: u64,

    /// Requests that wait while as many as may are served, the more urgent first; more get 503.
    #[arg(long, env = "BATON_MAX_WAITING", default_value_t = FrontConfig::default().max_waiting as u64, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    pub max_waiting: u64,

    /// How long a request waits at most before it gets 503.
    #[arg(long, env = "BATON_WAITING_TIMEOUT_SECONDS", default_value_t = FrontConfig::default().waiting_timeout.as_secs(), value_parser = clap::value_parser!(u64).range(1..))]
    pub waiting_timeout_seconds: u64,

    /// JSON list of API keys, by their hashes; read again when it changes. Without it everybody may ask.
    #[arg(long, env = "BATON_API_KEYS_FILE")]
    pub api_keys_file: Option<PathBuf>,

    /// Certificate chain of the public port, PEM; read again when it changes. Without it the port is plain HTTP.
    #[arg(long, env = "BATON_TLS_CERTIFICATE_FILE", requires = "tls_key_file")]
    pub tls_certificate_file: Option<PathBuf>,

    /// Private key of the certificate, PEM.
    #[arg(long, env = "BATON_TLS_KEY_FILE", requires = "tls_certificate_file")]
    pub tls_key_file: Option<PathBuf>,

    /// Requests served at a time; more wait.
    #[arg(long, env = "BATON_MAX_IN_FLIGHT", default_value_t = FrontConfig::default().max_in_flight as u64, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub max_in_flight: u64,
}

impl FrontFlags {
    /// The front's limits. `drain_timeout` is the whole process's.
    pub fn config(&self, drain_timeout: Duration) -> FrontConfig {
        FrontConfig {
            max_body_bytes: count(self.max_body_bytes),
            body_timeout: Duration::from_secs(self.body_timeout_seconds),
            head_timeout: Duration::from_secs(self.idle_timeout_seconds),
            write_timeout: Duration::from_secs(self.write_timeout_seconds),
            max_in_flight: count(self.max_in_flight),
            max_waiting: count(self.max_waiting),
            waiting_timeout: Duration::from_secs(self.waiting_timeout_seconds),
            max_connections: descriptors::affordable(count(self.max_connections)),
            drain_timeout,
            ..FrontConfig::default()
        }
    }

    /// What guards the public port, read from its files. Salts of API keys are made with the deployment's key.
    ///
    /// # Errors
    /// A file cannot be used.
    pub fn access(&self, deployment: &HashKey) -> Result<Access, Unusable> {
        let salts = SaltKey::new(deployment);
        let identity = self
            .tls_certificate_file
            .clone()
            .zip(self.tls_key_file.clone());
        Ok(Access {
            keys: self
                .api_keys_file
                .clone()
                .map(|path| keys::open(path, salts))
                .transpose()?
                .map(Arc::new),
            identity: identity
                .map(|(certificate, key)| tls::open(certificate, key))
                .transpose()?
                .map(Arc::new),
        })
    }
}

fn count(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        front: FrontFlags,
    }

    fn key() -> HashKey {
        HashKey::from_bytes(&[1; 32])
    }

    fn flags(line: &[&str]) -> Result<FrontFlags, String> {
        let line = [&["router"], line].concat();
        let parsed = Line::try_parse_from(line).map_err(|error| error.to_string())?;
        Ok(parsed.front)
    }

    #[test]
    fn without_flags_the_limits_are_the_defaults_and_nothing_is_guarded() {
        let flags = flags(&[]).unwrap();
        let default = FrontConfig::default();
        let config = flags.config(default.drain_timeout);
        let expected = FrontConfig {
            max_connections: config.max_connections,
            ..default
        };
        assert_eq!(config, expected);
        assert!(config.max_connections <= FrontConfig::default().max_connections);
        let access = flags.access(&key()).unwrap();
        assert!(access.keys.is_none() && access.identity.is_none());
    }

    #[test]
    fn a_certificate_needs_its_key_and_files_have_to_be_there() {
        let error = flags(&["--tls-certificate-file", "x"]).unwrap_err();
        assert!(error.contains("--tls-key-file"), "{error}");
        let missing = ["--tls-certificate-file", "/none", "--tls-key-file", "/none"];
        let error = flags(&missing).unwrap().access(&key()).unwrap_err();
        assert!(error.to_string().contains("/none"), "{error}");
        let error = flags(&["--api-keys-file", "/none"]).unwrap().access(&key());
        assert!(error.unwrap_err().to_string().contains("API keys"));
    }
}

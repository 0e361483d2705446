//! The front's part of the router's command line.

use std::time::Duration;

use clap::Args;

use super::FrontConfig;

/// Limits on clients.
#[derive(Clone, Debug, Args)]
pub struct FrontFlags {
    /// Largest request body, bytes; a larger one gets 413.
    #[arg(long, env = "BATON_MAX_BODY_BYTES", default_value_t = FrontConfig::default().max_body_bytes)]
    pub max_body_bytes: usize,

    /// A request body must arrive within this, or gets 408.
    #[arg(long, env = "BATON_BODY_TIMEOUT_SECONDS", default_value_t = FrontConfig::default().body_timeout.as_secs(), value_parser = clap::value_parser!(u64).range(1..))]
    pub body_timeout_seconds: u64,

    /// How long a connection may be idle, or take to send the head of a request.
    #[arg(long, env = "BATON_IDLE_TIMEOUT_SECONDS", default_value_t = FrontConfig::default().head_timeout.as_secs(), value_parser = clap::value_parser!(u64).range(1..))]
    pub idle_timeout_seconds: u64,

    /// Requests served at a time; more get 429.
    #[arg(long, env = "BATON_MAX_IN_FLIGHT", default_value_t = FrontConfig::default().max_in_flight as u64, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub max_in_flight: u64,
}

impl FrontFlags {
    /// The front's limits. `drain_timeout` is the whole process's.
    pub fn config(&self, drain_timeout: Duration) -> FrontConfig {
        FrontConfig {
            max_body_bytes: self.max_body_bytes,
            body_timeout: Duration::from_secs(self.body_timeout_seconds),
            head_timeout: Duration::from_secs(self.idle_timeout_seconds),
            max_in_flight: usize::try_from(self.max_in_flight).unwrap_or(usize::MAX),
            drain_timeout,
            ..FrontConfig::default()
        }
    }
}

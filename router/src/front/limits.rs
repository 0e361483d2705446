//! What the front allows its clients: sizes, counts and times.

use std::time::Duration;

use baton_system::threads::Threads;

/// Limits of the front. [`super::memory`] derives from them how much memory clients can take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontConfig {
    /// Largest request body, bytes. A token is about four bytes, so the default holds contexts of a million tokens.
    pub max_body_bytes: usize,
    /// A body must arrive within this.
    pub body_timeout: Duration,
    /// Heads must arrive within this; also how long an idle connection is kept, and how long a TLS handshake may take.
    pub head_timeout: Duration,
    /// A client that reads must take something within this, and 1 KiB/s from then on, or its connection is closed and its run
    /// ended. Also how long a client may be silent on the network while there is something to send it.
    pub write_timeout: Duration,
    /// Requests served at a time.
    pub max_in_flight: usize,
    /// Requests that wait for one of those places; more get 503.
    pub max_waiting: usize,
    /// How long a request waits for a place before it gets 503.
    pub waiting_timeout: Duration,
    /// Connections at a time. For one more, the connection that has been idle longest is closed; when none is idle, the new one gets
    /// 503.
    pub max_connections: usize,
    /// How long runs in flight may go on after the shutdown has begun.
    pub drain_timeout: Duration,
    /// Where long prompts are tokenised.
    pub threads: Threads,
}

impl Default for FrontConfig {
    fn default() -> Self {
        Self {
            max_body_bytes: 4 << 20,
            body_timeout: Duration::from_secs(30),
            head_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(30),
            max_in_flight: 1024,
            max_waiting: 1024,
            waiting_timeout: Duration::from_secs(10),
            max_connections: 16_384,
            drain_timeout: Duration::from_secs(30),
            threads: Threads::Machine,
        }
    }
}

//! Whether a NIXL prefill server holds KV that peers have still to read. It does not count its leases; what it says is how much of its
//! memory is in use. Pure.

use std::time::Duration;

use baton_protocol::card::Role;
use tokio::time::Instant;

use super::exposition::Reading;
use crate::config::{Connector, WorkerConfig};

/// One life's.
#[derive(Debug)]
pub(crate) struct Unread {
    lease: Duration,
    /// When a request last ran, as far as was seen.
    busy: Instant,
    /// Requests that had ended then.
    ended: f64,
}

impl Unread {
    /// None where nobody reads this server's KV by NIXL.
    pub(crate) fn of(config: &WorkerConfig, now: Instant) -> Option<Self> {
        let reads = config.engine.connector == Connector::Nixl && config.role == Role::Prefill;
        reads.then(|| Self {
            lease: Duration::from_secs(config.kv_pool.lease_seconds),
            busy: now,
            ended: 0.0,
        })
    }

    /// 1 while memory is held for a reader: it is in use, and the lease of the last request may still live. Nobody reads after that.
    pub(crate) fn after(&mut self, reading: &Reading, now: Instant) -> u32 {
        // A short request runs and ends between two readings.
        let ended = reading.prompts.count;
        if reading.running + reading.waiting > 0.0 || ended != self.ended {
            self.busy = now;
            self.ended = ended;
        }
        u32::from(reading.kv_usage > 0.0 && now.duration_since(self.busy) <= self.lease)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::beside::exposition::Sum;

    fn unread(role: &str, connector: &str, now: Instant) -> Option<Unread> {
        let config = json!({
            "name": "p0", "pool": "prefill", "role": role, "model": {"name": "tiny"}, "kvPool": {"leaseSeconds": 10},
            "engine": {"type": "VLLM", "url": "http://127.0.0.1:8200", "connector": connector},
        });
        Unread::of(&serde_json::from_value(config).unwrap(), now)
    }

    #[test]
    fn memory_in_use_is_held_for_a_reader_until_the_last_requests_lease_has_ended() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut unread = unread("Prefill", "Nixl", start).unwrap();
        let mut reading = Reading {
            running: 1.0,
            kv_usage: 0.2,
            ..Reading::default()
        };
        assert_eq!(unread.after(&reading, at(60)), 1);
        reading.running = 0.0;
        assert_eq!(unread.after(&reading, at(70)), 1);
        assert_eq!(unread.after(&reading, at(71)), 0, "its lease has ended");
        // One that no reading saw run.
        reading.prompts = Sum {
            sum: 9.0,
            count: 1.0,
        };
        assert_eq!(unread.after(&reading, at(80)), 1);
        reading.kv_usage = 0.0;
        assert_eq!(unread.after(&reading, at(81)), 0, "it was read");
    }

    #[test]
    fn only_prefill_servers_of_nixl_are_read() {
        let now = Instant::now();
        assert!(unread("Decode", "Nixl", now).is_none());
        assert!(unread("Prefill", "Baton", now).is_none());
    }
}

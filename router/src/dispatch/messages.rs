//! The messages that begin an attempt's legs, made from the client's request and what was sent already.

use std::time::Duration;

use baton_placement::policy::{Checksum, Policy};
use baton_protocol::ids::RunId;
use baton_protocol::wire::{self, decode_request};

use super::progress::Party;
use crate::run::RunRequest;
use crate::trace::{Leg, RunTrace};

/// One attempt of one request.
#[derive(Clone, Copy, Debug)]
pub struct Legs<'a> {
    pub run: &'a RunId,
    pub attempt: u32,
    pub request: &'a RunRequest,
    pub trace: &'a RunTrace,
    pub policy: &'a Policy,
    /// Generated tokens that the client has.
    pub sent: &'a [u32],
    pub kv_identity: &'a str,
    /// Until the run's total deadline.
    pub remaining: Duration,
}

impl Legs<'_> {
    /// Prompt and what was sent.
    pub fn tokens(&self) -> Vec<u32> {
        [self.request.tokens.as_slice(), self.sent].concat()
    }

    fn generated(&self) -> u32 {
        u32::try_from(self.sent.len()).unwrap_or(u32::MAX)
    }

    fn operation(&self, party: &Party, leg: Leg) -> wire::Operation {
        wire::Operation {
            run: self.run.to_string(),
            attempt: self.attempt,
            id: party.operation.to_string(),
            traceparent: self.trace.traceparent(self.attempt, leg),
            priority: self.request.priority,
            deadline_milliseconds: milliseconds(self.remaining),
            cache_salt: self.request.cache_salt.clone(),
            kv_identity: self.kv_identity.to_owned(),
        }
    }

    /// Whole request on one worker.
    pub fn decode_whole(&self, worker: &Party) -> wire::DecodeRequest {
        self.decode(worker, false, false, Vec::new())
    }

    /// Reserve, then wait for KV.
    pub fn decode_handed(
        &self,
        worker: &Party,
        first_token_by_prefill: bool,
        transports: Vec<String>,
    ) -> wire::DecodeRequest {
        self.decode(worker, true, first_token_by_prefill, transports)
    }

    fn decode(
        &self,
        worker: &Party,
        handoff: bool,
        first_token_by_prefill: bool,
        transports: Vec<String>,
    ) -> wire::DecodeRequest {
        let checksum = match self.policy.verify.checksum {
            Checksum::Always => wire::ChecksumMode::Always,
            Checksum::Sampled => wire::ChecksumMode::Sampled,
            Checksum::Off => wire::ChecksumMode::Off,
        };
        // The reader waits from the lease on, and that opens before the source computes. From the seal on this router watches.
        let timeouts = &self.policy.timeouts;
        let transfer_timeout = Duration::try_from_secs_f64(
            timeouts.prefill_start_seconds + timeouts.prefill_seconds + timeouts.transfer_seconds,
        )
        .unwrap_or(self.remaining);
        wire::DecodeRequest {
            message: Some(decode_request::Message::Start(wire::DecodeStart {
                operation: Some(self.operation(worker, Leg::Decode)),
                tokens: self.tokens(),
                generated: self.generated(),
                sampling: Some(self.request.sampling),
                stopping: Some(self.request.stopping.clone()),
                handoff,
                first_token_by_prefill,
                transports,
                checksum: checksum.into(),
                transfer_timeout_milliseconds: milliseconds(transfer_timeout),
            })),
        }
    }

    pub fn prefill(
        &self,
        worker: &Party,
        skip_blocks: u32,
        sample_first: bool,
    ) -> wire::PrefillRequest {
        wire::PrefillRequest {
            operation: Some(self.operation(worker, Leg::Prefill)),
            tokens: self.tokens(),
            sampling: Some(self.request.sampling),
            stopping: Some(self.request.stopping.clone()),
            skip_blocks,
            sample_first,
            // As long as the pool's `leaseSeconds` say: who holds the memory decides what a lost reader may cost.
            lease_milliseconds: 0,
            generated: self.generated(),
        }
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

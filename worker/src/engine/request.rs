//! What is asked of the engine, and what it answers.

use baton_protocol::failure::{FailureClass, Refusal};
use baton_protocol::ids::{LeaseId, OperationId, RunId};

use crate::kv::lease::LeaseOpened;
use crate::kv::{CacheScope, Reservation};
use crate::model::SequenceKey;
use crate::sampling::{Finish, Logprobs, Sampling, Stopping};

/// One operation, from the wire or from a simulation.
#[derive(Clone, Debug)]
pub struct EngineRequest {
    pub run: RunId,
    pub operation: OperationId,
    /// Larger is more urgent.
    pub priority: i32,
    /// On the engine's clock, milliseconds: the operation fails then.
    pub deadline: Option<f64>,
    /// Whose cache may be hit.
    pub scope: CacheScope,
    /// Prompt, and what was generated already.
    pub tokens: Vec<u32>,
    /// How many of `tokens` were generated.
    pub generated: u32,
    pub sampling: Sampling,
    pub stopping: Stopping,
    pub kind: RequestKind,
}

/// Which part of a run is computed here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// Prefill and decode.
    Generate,
    /// Prefill, held under a lease for a reader.
    Prefill(PrefillTerms),
    /// Decode, after KV from elsewhere. Memory is reserved at once or the request is refused.
    Receive,
}

/// Terms of a prefill for somebody else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefillTerms {
    /// 128 random bits.
    pub lease: LeaseId,
    /// Milliseconds from each renewal to the end.
    pub lease_duration: u64,
    /// Leading blocks that the reader has.
    pub skip_blocks: u32,
    /// Sample the first token here. Otherwise the last prompt token is left to the reader.
    pub sample_first: bool,
}

/// An operation that was taken.
#[derive(Debug)]
pub struct Admitted {
    pub key: SequenceKey,
    pub admission: Admission,
    /// Of a [`RequestKind::Receive`]: the blocks to fill. They come back with `Engine::attach` or `Engine::recompute`.
    pub reservation: Option<Reservation>,
}

/// What an admission took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// Load reports from this one on count it in.
    pub load_sequence: u64,
    /// Leading tokens in the cache. A hint for what waits, exact for what is reserved.
    pub cached_tokens: usize,
    /// Blocks that its tokens need.
    pub blocks: usize,
}

/// An operation that was not taken; nothing is held.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refused {
    pub reason: Refusal,
    pub message: String,
    /// Milliseconds after which a repetition may succeed; 0 where it cannot.
    pub retry_after: u64,
}

/// What happened to an operation. Times are milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    /// Its KV can be claimed from now on.
    LeaseOpened {
        lease: LeaseId,
        opened: LeaseOpened,
        /// Tokens whose KV will be there when sealed.
        tokens: usize,
        admission: Admission,
    },
    /// Prefill for somebody else that needs no hand-off: it ends with its first token.
    NoLease { admission: Admission },
    /// The first step that computes its prompt begins.
    PrefillStarted { queue: f64 },
    /// Blocks of the manifest that can be read, in all.
    BlocksPublished { blocks: u32 },
    PrefillCompleted {
        queue: f64,
        compute: f64,
        cached_tokens: usize,
    },
    /// A prefill for somebody else is complete; the operation has ended.
    Sealed {
        blocks: u32,
        queue: f64,
        compute: f64,
        cached_tokens: usize,
    },
    /// The first step in which it decodes begins, `queue` after it could have.
    DecodeStarted { queue: f64 },
    Token {
        id: u32,
        /// In the whole sequence, counted from zero.
        position: u32,
        logprobs: Option<Logprobs>,
        /// Where the run ends with it, also where another worker is the one to say so.
        finish: Option<Finish>,
    },
    Finished {
        finish: Finish,
        output_tokens: u32,
        /// Of all steps in which it decoded.
        decode: f64,
    },
    Failed {
        class: FailureClass,
        message: String,
    },
}

impl EngineEvent {
    /// No event follows it.
    pub fn is_last(&self) -> bool {
        matches!(
            self,
            Self::Sealed { .. } | Self::Finished { .. } | Self::Failed { .. }
        )
    }
}

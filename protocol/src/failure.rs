//! What can go wrong with a run, and the one table of what is done about it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $word)] $variant,)+
        }

        impl $name {
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The word on the wire, in records and as a metric label.
            pub fn word(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(self.word())
            }
        }

        impl FromStr for $name {
            type Err = UnknownWord;

            fn from_str(word: &str) -> Result<Self, UnknownWord> {
                Self::ALL
                    .iter()
                    .copied()
                    .find(|candidate| candidate.word() == word)
                    .ok_or_else(|| UnknownWord { kind: stringify!($name), word: word.to_owned() })
            }
        }
    };
}

/// A word of another version of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {kind} {word:?}")]
pub struct UnknownWord {
    pub kind: &'static str,
    pub word: String,
}

words! {
    /// Why a worker did not begin an operation. Nothing is held.
    Refusal {
        /// No blocks: the KV pool is in use.
        PoolFull = "pool-full",
        QueueFull = "queue-full",
        Draining = "draining",
        /// The router placed for another KV identity.
        IdentityMismatch = "identity-mismatch",
        /// Longer than the worker's context, or than its whole pool.
        TooLong = "too-long",
        InvalidRequest = "invalid-request",
        /// An operation of this id ended before and its result is no longer kept.
        OperationEnded = "operation-ended",
    }
}

words! {
    /// Why a hand-off was given up by its reader. What was read is not used.
    HandoffFailure {
        LeaseGone = "lease-gone",
        /// The read ended after the lease did.
        Stale = "stale",
        GenerationMismatch = "generation-mismatch",
        LayoutMismatch = "layout-mismatch",
        HashMismatch = "hash-mismatch",
        FillMismatch = "fill-mismatch",
        ChecksumMismatch = "checksum-mismatch",
        IdentityMismatch = "identity-mismatch",
        /// The source ended the transfer before all blocks were there.
        Partial = "partial",
        Timeout = "timeout",
        /// The connection broke or was refused.
        SourceLost = "source-lost",
        /// No transport that both have.
        NoTransport = "no-transport",
        /// Bytes that are no frame of the transport protocol.
        ProtocolError = "protocol-error",
        /// An engine's own connector gave it up, and does not say why.
        EngineFailed = "engine-failed",
    }
}

words! {
    /// Classes of failure, each with one action.
    FailureClass {
        NoWorker = "no-worker",
        PrefillLost = "prefill-lost",
        HandoffFailed = "handoff-failed",
        DecodeLost = "decode-lost",
        ClientGone = "client-gone",
        Incompatible = "incompatible",
        BadRequest = "bad-request",
        DeadlineExceeded = "deadline-exceeded",
        Bug = "bug",
    }
}

/// What is done about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Back off and try again inside the deadline, then 503 with `Retry-After`.
    BackOff,
    /// Plan again, once, on other workers: the next attempt of the same run.
    Replan,
    /// Discard what was read and compute it on the decode worker, if the fallback budget allows; else plan again.
    RecomputeLocally,
    /// Plan again from prompt and tokens already sent. What was sent is never taken back.
    Resume,
    /// Cancel router, transfer and both workers.
    CancelEverywhere,
    /// End the run with the client's error.
    Refuse,
    /// End the run and count it; keep serving.
    FailRun,
}

impl FailureClass {
    /// The one table of failures and actions.
    pub fn action(self) -> Action {
        match self {
            // A pair that does not fit is filtered before placement. A worker that says so has changed since: another one takes the run.
            Self::NoWorker | Self::Incompatible => Action::BackOff,
            Self::PrefillLost => Action::Replan,
            Self::HandoffFailed => Action::RecomputeLocally,
            Self::DecodeLost => Action::Resume,
            Self::ClientGone => Action::CancelEverywhere,
            Self::BadRequest => Action::Refuse,
            Self::DeadlineExceeded | Self::Bug => Action::FailRun,
        }
    }

    /// HTTP status of a run that ends by this before its first byte.
    pub fn status(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            // The client is not there to see it; 499 is what logs of proxies show.
            Self::ClientGone => 499,
            Self::NoWorker
            | Self::PrefillLost
            | Self::HandoffFailed
            | Self::DecodeLost
            | Self::Incompatible => 503,
            Self::DeadlineExceeded => 504,
            Self::Bug => 500,
        }
    }
}

impl Refusal {
    pub fn class(self) -> FailureClass {
        match self {
            Self::PoolFull | Self::QueueFull | Self::Draining => FailureClass::NoWorker,
            Self::IdentityMismatch => FailureClass::Incompatible,
            Self::TooLong | Self::InvalidRequest => FailureClass::BadRequest,
            Self::OperationEnded => FailureClass::Bug,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_reads_back() {
        for failure in HandoffFailure::ALL {
            assert_eq!(failure.word().parse(), Ok(*failure));
        }
        for refusal in Refusal::ALL {
            assert_eq!(refusal.word().parse(), Ok(*refusal));
        }
        for class in FailureClass::ALL {
            assert_eq!(class.word().parse(), Ok(*class));
        }
        assert!("nonsense".parse::<Refusal>().is_err());
    }

    #[test]
    fn only_a_client_error_is_the_clients_fault() {
        for class in FailureClass::ALL {
            let client = matches!(class, FailureClass::BadRequest | FailureClass::ClientGone);
            assert_eq!((400..500).contains(&class.status()), client, "{class}");
        }
    }
}

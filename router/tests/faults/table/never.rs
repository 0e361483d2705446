//! What cannot be: pairs of a failure and a state, each with its reason.

use baton_protocol::failure::FailureClass as C;

use super::{
    Accepted, DISPATCHED, DecodeStarted, LOCAL, Phase, PrefillCompleted, PrefillStarted, Published,
    REMOTE, Reserved, RouteSelected, Streaming, TransferCompleted, WAYS, Way,
};

pub(super) struct Never {
    pub(super) class: C,
    pub(super) ways: &'static [Way],
    pub(super) phases: &'static [Phase],
    #[allow(dead_code, reason = "for who reads the table")]
    because: &'static str,
}

const fn never(
    class: C,
    ways: &'static [Way],
    phases: &'static [Phase],
    because: &'static str,
) -> Never {
    Never {
        class,
        ways,
        phases,
        because,
    }
}

/// From the reservation on.
const RESERVED: &[Phase] = DISPATCHED.split_at(1).1;
/// From the first answer of a prefill on.
const STARTED: &[Phase] = RESERVED.split_at(1).1;
const NOT_REFUSED: &str =
    "a refusal is the first answer of a stream: whoever has reserved or started has not refused";

pub(super) const NEVER: &[Never] = &[
    never(C::NoWorker, LOCAL, RESERVED, NOT_REFUSED),
    never(C::NoWorker, REMOTE, STARTED, NOT_REFUSED),
    never(
        C::PrefillLost,
        LOCAL,
        &[
            Accepted,
            RouteSelected,
            Reserved,
            PrefillStarted,
            PrefillCompleted,
            DecodeStarted,
            Streaming,
        ],
        "the worker that computes the prompt is the one that decodes: losing it is losing decode",
    ),
    never(
        C::PrefillLost,
        REMOTE,
        &[Accepted, RouteSelected],
        "the prefill leg is opened by the reservation",
    ),
    never(
        C::PrefillLost,
        REMOTE,
        &[Published, TransferCompleted, DecodeStarted, Streaming],
        "after the seal its stream ends anyway; that the KV cannot be read shows as a failed hand-off",
    ),
    never(
        C::HandoffFailed,
        LOCAL,
        &[
            Accepted,
            RouteSelected,
            Reserved,
            PrefillStarted,
            PrefillCompleted,
            DecodeStarted,
            Streaming,
        ],
        "nothing is handed over",
    ),
    never(
        C::HandoffFailed,
        REMOTE,
        &[Accepted, RouteSelected, Reserved],
        "no lease is open that could be read",
    ),
    never(
        C::HandoffFailed,
        REMOTE,
        &[TransferCompleted, DecodeStarted, Streaming],
        "every block was proven",
    ),
    never(C::DecodeLost, WAYS, &[Accepted], "no worker has been asked"),
    never(
        C::Incompatible,
        LOCAL,
        &[Accepted],
        "a plan on one worker pairs with nobody",
    ),
    never(C::Incompatible, LOCAL, RESERVED, NOT_REFUSED),
    never(C::Incompatible, REMOTE, STARTED, NOT_REFUSED),
    never(C::BadRequest, LOCAL, RESERVED, NOT_REFUSED),
    never(C::BadRequest, REMOTE, STARTED, NOT_REFUSED),
    never(
        C::DeadlineExceeded,
        LOCAL,
        &[Accepted],
        "a search for a worker ends before the deadline, with its own answer; only a wait for prefill workers lasts as long",
    ),
    never(C::Bug, WAYS, &[Accepted], "no worker has said anything"),
];

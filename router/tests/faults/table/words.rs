//! The words that cases are made of: how a run is served, how far it comes, what goes wrong, and what has to come of it.

/// How an attempt serves a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// On one worker.
    Local,
    /// Handed over; the prefill worker samples the first token.
    FirstByPrefill,
    /// Handed over; the decode worker samples the first token.
    FirstByDecode,
    /// By the worker that was to read, over its open stream. No run begins so.
    Recompute,
}

pub(super) const WAYS: &[Way] = &[Way::Local, Way::FirstByPrefill, Way::FirstByDecode];
pub(super) const REMOTE: &[Way] = &[Way::FirstByPrefill, Way::FirstByDecode];
pub(super) const LOCAL: &[Way] = &[Way::Local];

/// How far an attempt has come when it fails: the last state that it has entered, and between `route_selected` and
/// `prefill_started` also the reservation, which is between the two legs, and the lease, which is open before anything is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Accepted,
    RouteSelected,
    Reserved,
    Leased,
    PrefillStarted,
    TransferStarted,
    PrefillCompleted,
    Published,
    TransferCompleted,
    DecodeStarted,
    /// With tokens from the worker that decodes.
    Streaming,
}

use Phase::{
    Accepted, DecodeStarted, Leased, PrefillCompleted, PrefillStarted, Published, Reserved,
    RouteSelected, Streaming, TransferCompleted, TransferStarted,
};

/// From the first message to a worker on.
pub(super) const DISPATCHED: &[Phase] = &[
    RouteSelected,
    Reserved,
    Leased,
    PrefillStarted,
    TransferStarted,
    PrefillCompleted,
    Published,
    TransferCompleted,
    DecodeStarted,
    Streaming,
];

impl Way {
    /// The phases that there are, in order.
    pub(super) fn phases(self) -> &'static [Phase] {
        match self {
            Self::Local => &[
                Accepted,
                RouteSelected,
                Reserved,
                PrefillStarted,
                PrefillCompleted,
                DecodeStarted,
                Streaming,
            ],
            Self::FirstByPrefill => &[
                Accepted,
                RouteSelected,
                Reserved,
                Leased,
                PrefillStarted,
                TransferStarted,
                PrefillCompleted,
                Published,
                TransferCompleted,
                DecodeStarted,
                Streaming,
            ],
            // With no first token to report, the seal says that the prefill is complete.
            Self::FirstByDecode => &[
                Accepted,
                RouteSelected,
                Reserved,
                Leased,
                PrefillStarted,
                TransferStarted,
                Published,
                TransferCompleted,
                DecodeStarted,
                Streaming,
            ],
            // Its blocks are reserved since the attempt before.
            Self::Recompute => &[
                RouteSelected,
                PrefillStarted,
                PrefillCompleted,
                DecodeStarted,
                Streaming,
            ],
        }
    }

    pub(super) fn is_remote(self) -> bool {
        REMOTE.contains(&self)
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// Every worker has its fill of waiting requests: for a moment, or for good.
    QueuesFull {
        for_good: bool,
    },
    /// No pair may exchange KV.
    NoPair,
    /// No worker is large enough.
    TooLarge,
    /// Told to wait for a prefill worker, there is none in time.
    WaitsForPrefill,
    DecodeRefuses(&'static str),
    PrefillRefuses(&'static str),
    DecodeBreaks,
    DecodeCloses,
    DecodeFails,
    DecodeStops,
    DecodeSilent,
    PrefillBreaks,
    PrefillCloses,
    PrefillFails,
    PrefillSilent,
    TransferFails(&'static str),
    TransferSlow,
    ClientLeaves,
    RunOverdue,
    TokenOutOfPlace,
    /// The last report, once more.
    Repeats,
}

/// What has to come of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// The whole answer, each token once, in so many attempts; the last one on another worker, or on the same one over again.
    Served { attempts: u32 },
    /// The whole answer, computed by the worker that was to read it; the record says that the run fell back, and why.
    Recomputed,
    /// The whole answer, computed on one worker after the remote plans have failed; the record says so.
    ComputedWhole,
    /// An error; what was sent stays sent.
    Told {
        status: u16,
        code: &'static str,
        retry_after: bool,
        /// Part of the message: what is at fault, or what to do.
        says: &'static str,
    },
    /// Nobody is there to be told; every worker is.
    Cancelled,
}

pub(super) const BUG: Then = Then::Told {
    status: 500,
    code: "internal_error",
    retry_after: false,
    says: "worker ",
};
pub(super) const OVERDUE: Then = Then::Told {
    status: 504,
    code: "deadline_exceeded",
    retry_after: false,
    says: "timeouts.totalSeconds",
};
pub(super) const REFUSED: Then = Then::Told {
    status: 400,
    code: "bad_request",
    retry_after: false,
    says: "worker ",
};
pub(super) const NOBODY: Then = Then::Told {
    status: 503,
    code: "no_worker",
    retry_after: true,
    says: "within timeouts.reserveSeconds and timeouts.totalSeconds: send the request again",
};

/// One attempt that fails.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attempt {
    pub(super) way: Way,
    pub(super) phase: Phase,
    pub(super) how: How,
}

/// What is played.
#[derive(Clone, Copy, Debug)]
pub(super) struct Played {
    /// How the run is served at first, and in every attempt but the last.
    pub(super) first: Way,
    /// How attempts before the last fail, oldest first.
    pub(super) before: &'static [(Phase, How)],
    /// Of the last attempt that the case is about.
    pub(super) way: Way,
    pub(super) phase: Phase,
    pub(super) how: How,
    pub(super) then: Then,
    /// Whether anybody may compute what was to be handed over.
    pub(super) budget: bool,
}

impl Played {
    /// The attempts that fail, oldest first.
    pub(super) fn attempts(&self) -> Vec<Attempt> {
        let earlier = self.before.iter().map(|&(phase, how)| Attempt {
            way: self.first,
            phase,
            how,
        });
        let last = Attempt {
            way: self.way,
            phase: self.phase,
            how: self.how,
        };
        let all: Vec<Attempt> = earlier.chain([last]).collect();
        for attempt in &all {
            let phases = attempt.way.phases();
            assert!(
                phases.contains(&attempt.phase),
                "{attempt:?} has no such phase"
            );
        }
        all
    }
}

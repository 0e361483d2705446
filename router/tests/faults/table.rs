//! Every class of failure in every state of a run: what is done, what the client gets, what the record says, what is left behind.
//!
//! [`CASES`] and [`NEVER`] together are the whole of (class, way, phase): a pair that is in neither, or in both, fails a test.
//! [`scene`] plays a case on a real dispatcher with scripted workers: two that prefill and two that decode, so that there is
//! another one to go to.

mod never;
mod scene;

use baton_protocol::failure::FailureClass;
use futures::{StreamExt, stream};

use never::NEVER;

/// How a run is served at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// On one worker.
    Local,
    /// Handed over; the prefill worker samples the first token.
    FirstByPrefill,
    /// Handed over; the decode worker samples the first token.
    FirstByDecode,
}

const WAYS: &[Way] = &[Way::Local, Way::FirstByPrefill, Way::FirstByDecode];
const REMOTE: &[Way] = &[Way::FirstByPrefill, Way::FirstByDecode];

/// How far a run has come when it fails: the last state that it has entered, and between `route_selected` and `prefill_started`
/// also the reservation, which is between the two legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Accepted,
    RouteSelected,
    Reserved,
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
    Accepted, DecodeStarted, PrefillCompleted, PrefillStarted, Published, Reserved, RouteSelected,
    Streaming, TransferCompleted, TransferStarted,
};

impl Way {
    /// The phases that there are, in order.
    fn phases(self) -> &'static [Phase] {
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
                PrefillStarted,
                TransferStarted,
                Published,
                TransferCompleted,
                DecodeStarted,
                Streaming,
            ],
        }
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
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

use How::{
    ClientLeaves, DecodeBreaks, DecodeCloses, DecodeFails, DecodeRefuses, DecodeSilent,
    DecodeStops, NoPair, PrefillBreaks, PrefillCloses, PrefillFails, PrefillRefuses, PrefillSilent,
    QueuesFull, Repeats, RunOverdue, TokenOutOfPlace, TooLarge, TransferFails, TransferSlow,
    WaitsForPrefill,
};

/// What has to come of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// The whole answer, each token once, in so many attempts; the last one on another worker, or on the same one over again.
    Served { attempts: u32 },
    /// The whole answer, computed by the worker that was to read it; the record says that the run fell back, and why.
    Recomputed,
    /// An error; what was sent stays sent.
    Told {
        status: u16,
        code: &'static str,
        retry_after: bool,
    },
    /// Nobody is there to be told; every worker is.
    Cancelled,
}

const BUG: Then = Then::Told {
    status: 500,
    code: "internal_error",
    retry_after: false,
};
const OVERDUE: Then = Then::Told {
    status: 504,
    code: "deadline_exceeded",
    retry_after: false,
};
const REFUSED: Then = Then::Told {
    status: 400,
    code: "bad_request",
    retry_after: false,
};
const NOBODY: Then = Then::Told {
    status: 503,
    code: "no_worker",
    retry_after: true,
};

struct Case {
    class: FailureClass,
    ways: &'static [Way],
    phases: &'static [Phase],
    how: &'static [How],
    then: Then,
}

const fn case(
    class: FailureClass,
    ways: &'static [Way],
    phases: &'static [Phase],
    how: &'static [How],
    then: Then,
) -> Case {
    Case {
        class,
        ways,
        phases,
        how,
        then,
    }
}

/// From the first message to a worker on.
const DISPATCHED: &[Phase] = &[
    RouteSelected,
    Reserved,
    PrefillStarted,
    TransferStarted,
    PrefillCompleted,
    Published,
    TransferCompleted,
    DecodeStarted,
    Streaming,
];
const LOCAL: &[Way] = &[Way::Local];

/// Phases that a way does not have are passed over.
const CASES: &[Case] = &{
    use FailureClass as C;
    [
        // Back off inside the deadline, then 503. A refusal sends the run to another worker at once.
        case(
            C::NoWorker,
            WAYS,
            &[Accepted],
            &[QueuesFull { for_good: false }],
            Then::Served { attempts: 1 },
        ),
        case(
            C::NoWorker,
            WAYS,
            &[Accepted],
            &[QueuesFull { for_good: true }],
            NOBODY,
        ),
        case(
            C::NoWorker,
            WAYS,
            &[RouteSelected],
            &[
                DecodeRefuses("pool-full"),
                DecodeRefuses("queue-full"),
                DecodeRefuses("draining"),
                DecodeRefuses("a-word-of-tomorrow"),
            ],
            Then::Served { attempts: 2 },
        ),
        case(
            C::NoWorker,
            REMOTE,
            &[Reserved],
            &[
                PrefillRefuses("pool-full"),
                PrefillRefuses("queue-full"),
                PrefillRefuses("draining"),
            ],
            Then::Served { attempts: 2 },
        ),
        // Plan again, once.
        case(
            C::PrefillLost,
            REMOTE,
            &[Reserved, PrefillStarted, TransferStarted, PrefillCompleted],
            &[PrefillBreaks, PrefillCloses, PrefillFails, PrefillSilent],
            Then::Served { attempts: 2 },
        ),
        // Discard and recompute where it was to be read.
        case(
            C::HandoffFailed,
            REMOTE,
            &[PrefillStarted, TransferStarted, PrefillCompleted, Published],
            &[
                TransferFails("lease-gone"),
                TransferFails("stale"),
                TransferFails("generation-mismatch"),
                TransferFails("layout-mismatch"),
                TransferFails("hash-mismatch"),
                TransferFails("fill-mismatch"),
                TransferFails("checksum-mismatch"),
                TransferFails("identity-mismatch"),
                TransferFails("partial"),
                TransferFails("timeout"),
                TransferFails("source-lost"),
                TransferFails("no-transport"),
                TransferFails("protocol-error"),
                TransferFails("a-word-of-tomorrow"),
            ],
            Then::Recomputed,
        ),
        case(
            C::HandoffFailed,
            REMOTE,
            &[Published],
            &[TransferSlow],
            Then::Recomputed,
        ),
        // Go on from what was sent.
        case(
            C::DecodeLost,
            WAYS,
            DISPATCHED,
            &[DecodeBreaks, DecodeCloses, DecodeFails, DecodeStops],
            Then::Served { attempts: 2 },
        ),
        case(
            C::DecodeLost,
            WAYS,
            &[RouteSelected, TransferCompleted, DecodeStarted, Streaming],
            &[DecodeSilent],
            Then::Served { attempts: 2 },
        ),
        case(
            C::DecodeLost,
            LOCAL,
            &[Reserved, PrefillStarted, PrefillCompleted],
            &[DecodeSilent],
            Then::Served { attempts: 2 },
        ),
        // Cancel everywhere.
        case(
            C::ClientGone,
            WAYS,
            &[Accepted],
            &[ClientLeaves],
            Then::Cancelled,
        ),
        case(
            C::ClientGone,
            WAYS,
            DISPATCHED,
            &[ClientLeaves],
            Then::Cancelled,
        ),
        // Filtered. A worker that has changed meanwhile says so, and another one takes the run.
        case(
            C::Incompatible,
            REMOTE,
            &[Accepted],
            &[NoPair],
            Then::Served { attempts: 1 },
        ),
        case(
            C::Incompatible,
            WAYS,
            &[RouteSelected],
            &[DecodeRefuses("identity-mismatch")],
            Then::Served { attempts: 2 },
        ),
        case(
            C::Incompatible,
            REMOTE,
            &[Reserved],
            &[PrefillRefuses("identity-mismatch")],
            Then::Served { attempts: 2 },
        ),
        case(C::BadRequest, WAYS, &[Accepted], &[TooLarge], REFUSED),
        case(
            C::BadRequest,
            WAYS,
            &[RouteSelected],
            &[DecodeRefuses("too-long"), DecodeRefuses("invalid-request")],
            REFUSED,
        ),
        case(
            C::BadRequest,
            REMOTE,
            &[Reserved],
            &[
                PrefillRefuses("too-long"),
                PrefillRefuses("invalid-request"),
            ],
            REFUSED,
        ),
        case(
            C::DeadlineExceeded,
            REMOTE,
            &[Accepted],
            &[WaitsForPrefill],
            OVERDUE,
        ),
        case(
            C::DeadlineExceeded,
            WAYS,
            DISPATCHED,
            &[RunOverdue],
            OVERDUE,
        ),
        // The run fails, is counted, and the others go on.
        case(C::Bug, WAYS, DISPATCHED, &[TokenOutOfPlace], BUG),
        case(
            C::Bug,
            WAYS,
            &[RouteSelected],
            &[DecodeRefuses("operation-ended")],
            BUG,
        ),
        case(
            C::Bug,
            LOCAL,
            &[PrefillStarted, PrefillCompleted, DecodeStarted],
            &[Repeats],
            BUG,
        ),
        case(
            C::Bug,
            REMOTE,
            &[Published, TransferCompleted, DecodeStarted],
            &[Repeats],
            BUG,
        ),
    ]
};

/// A cell of the table.
#[derive(Clone, Copy, Debug)]
struct Played {
    way: Way,
    phase: Phase,
    how: How,
    then: Then,
}

fn played(class: FailureClass) -> Vec<Played> {
    let mut all = Vec::new();
    for case in CASES.iter().filter(|case| case.class == class) {
        for &way in case.ways {
            for &phase in case
                .phases
                .iter()
                .filter(|phase| way.phases().contains(phase))
            {
                for &how in case.how {
                    all.push(Played {
                        way,
                        phase,
                        how,
                        then: case.then,
                    });
                }
            }
        }
    }
    all
}

/// Plays a class's cases, some at a time: most of them wait for a deadline.
async fn play(class: FailureClass) {
    let all = played(class);
    assert!(!all.is_empty());
    let mut scenes = stream::iter(all.into_iter().map(scene::play)).buffer_unordered(6);
    while scenes.next().await.is_some() {}
}

#[test]
fn every_class_in_every_state_is_a_case_or_cannot_be() {
    for &class in FailureClass::ALL {
        for &way in WAYS {
            for &phase in way.phases() {
                let cases = CASES.iter().filter(|case| {
                    case.class == class && case.ways.contains(&way) && case.phases.contains(&phase)
                });
                let never = NEVER.iter().filter(|never| {
                    never.class == class
                        && never.ways.contains(&way)
                        && never.phases.contains(&phase)
                });
                let (cases, never) = (cases.count(), never.count());
                assert!(
                    (cases > 0) != (never == 1) && never < 2,
                    "{class}, {way:?}, {phase:?}: {cases} cases, and {never} reasons why it cannot be"
                );
            }
        }
    }
}

macro_rules! classes {
    ($($name:ident => $class:ident,)+) => {
        $(
            #[tokio::test]
            async fn $name() {
                play(FailureClass::$class).await;
            }
        )+

        #[test]
        fn every_class_is_played() {
            assert_eq!([$(FailureClass::$class),+], FailureClass::ALL);
        }
    };
}

classes! {
    no_worker_is_backed_off_from_and_then_said => NoWorker,
    a_lost_prefill_is_planned_again => PrefillLost,
    a_failed_hand_off_is_recomputed => HandoffFailed,
    a_lost_decode_is_resumed => DecodeLost,
    a_client_that_leaves_leaves_nothing => ClientGone,
    a_worker_that_has_changed_is_passed_over => Incompatible,
    a_bad_request_is_refused => BadRequest,
    a_deadline_is_kept => DeadlineExceeded,
    a_bug_ends_its_run_and_no_other => Bug,
}

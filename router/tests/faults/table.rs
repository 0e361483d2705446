//! Every class of failure in every state of a run: what is done, what the client gets, what the record says, what is left behind.
//!
//! [`CASES`] and [`NEVER`] together are the whole of (class, way, phase): a pair that is in neither, or in both, fails a test.
//! [`scene`] plays a case on a real dispatcher with scripted workers: two that prefill and two that decode, so that there is
//! another one to go to. [`twice`] has the cases whose first failure is not the last.

mod never;
mod scene;
mod twice;
mod words;

use baton_protocol::failure::{FailureClass, HandoffFailure, Refusal};
use futures::{StreamExt, stream};

use How::{
    ClientLeaves, DecodeBreaks, DecodeCloses, DecodeFails, DecodeRefuses, DecodeSilent,
    DecodeStops, NoPair, PrefillBreaks, PrefillCloses, PrefillFails, PrefillRefuses, PrefillSilent,
    QueuesFull, Repeats, RunOverdue, TokenOutOfPlace, TooLarge, TransferFails, TransferSlow,
    WaitsForPrefill,
};
use Phase::{
    Accepted, DecodeStarted, Leased, PrefillCompleted, PrefillStarted, Published, Reserved,
    RouteSelected, Streaming, TransferCompleted, TransferStarted,
};
use never::NEVER;
use words::{
    Attempt, BUG, DISPATCHED, How, LOCAL, NOBODY, OVERDUE, Phase, Played, REFUSED, REMOTE, Then,
    WAYS, Way,
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
            &[
                Reserved,
                Leased,
                PrefillStarted,
                TransferStarted,
                PrefillCompleted,
            ],
            &[PrefillBreaks, PrefillCloses, PrefillFails, PrefillSilent],
            Then::Served { attempts: 2 },
        ),
        // Discard and recompute where it was to be read.
        case(
            C::HandoffFailed,
            REMOTE,
            &[
                Leased,
                PrefillStarted,
                TransferStarted,
                PrefillCompleted,
                Published,
            ],
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
            &[
                Reserved,
                PrefillStarted,
                PrefillCompleted,
                DecodeStarted,
                Streaming,
            ],
            &[Repeats],
            BUG,
        ),
        // A transfer that begins again goes on over another transport: `transport` plays that.
        case(
            C::Bug,
            REMOTE,
            &[
                Reserved,
                Leased,
                PrefillStarted,
                PrefillCompleted,
                Published,
                TransferCompleted,
                DecodeStarted,
                Streaming,
            ],
            &[Repeats],
            BUG,
        ),
    ]
};

fn played(class: FailureClass) -> Vec<Played> {
    let mut all = Vec::new();
    for case in CASES.iter().filter(|case| case.class == class) {
        for &way in case.ways {
            let phases = case.phases.iter();
            for &phase in phases.filter(|phase| way.phases().contains(phase)) {
                all.extend(case.how.iter().map(|&how| Played {
                    first: way,
                    before: &[],
                    way,
                    phase,
                    how,
                    then: case.then,
                    budget: true,
                }));
            }
        }
    }
    all
}

/// Plays cases, some at a time: most of them wait for a deadline.
async fn play(all: Vec<Played>) {
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

/// How the cases of all classes go wrong.
fn hows() -> impl Iterator<Item = How> {
    CASES.iter().flat_map(|case| case.how.iter().copied())
}

#[test]
fn every_cause_of_a_failed_hand_off_is_played() {
    let played: Vec<&str> = hows()
        .filter_map(|how| match how {
            TransferFails(cause) => Some(cause),
            _ => None,
        })
        .collect();
    // Engines' own connectors say it, and the tests of engines play it. A router takes what it does not know for another word.
    let others = [HandoffFailure::EngineFailed];
    for cause in HandoffFailure::ALL {
        let elsewhere = others.contains(cause);
        assert_ne!(played.contains(&cause.word()), elsewhere, "{cause}");
    }
    let unknown = played
        .iter()
        .filter(|cause| cause.parse::<HandoffFailure>().is_err());
    assert_eq!(unknown.count(), 1);
}

#[test]
fn every_reason_for_a_refusal_is_played() {
    for reason in Refusal::ALL {
        let played = hows().any(|how| how == DecodeRefuses(reason.word()));
        assert!(played, "{reason}");
    }
}

macro_rules! classes {
    ($($name:ident => $class:ident,)+) => {
        $(
            #[tokio::test]
            async fn $name() {
                play(played(FailureClass::$class)).await;
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

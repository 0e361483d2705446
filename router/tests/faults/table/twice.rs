//! Failures after failures: the next attempt is lost as well, or its client leaves, its deadline passes, its worker says what no
//! worker could. What was sent stays sent and is not repeated, and nothing of any attempt is left behind.

use baton_router::dispatch::decide::RESUMES;

use super::words::{
    BUG, DISPATCHED, How, LOCAL, OVERDUE, Phase, Played, REFUSED, REMOTE, Then, WAYS, Way,
};
use super::{
    ClientLeaves, DecodeBreaks, DecodeFails, DecodeRefuses, DecodeSilent, DecodeStarted,
    DecodeStops, Leased, PrefillBreaks, PrefillCompleted, PrefillFails, PrefillRefuses,
    PrefillStarted, Published, Repeats, Reserved, RouteSelected, RunOverdue, Streaming,
    TokenOutOfPlace, TransferCompleted, TransferFails, TransferSlow, TransferStarted, play,
};

/// How the attempts before the last fail.
type Before = &'static [(Phase, How)];

const PREFILL_LOST: Before = &[(PrefillStarted, PrefillBreaks)];
const PREFILL_LOST_TWICE: Before = &[
    (PrefillStarted, PrefillBreaks),
    (TransferStarted, PrefillBreaks),
];
const DECODE_LOST: Before = &[(Streaming, DecodeBreaks)];
const DECODE_LOST_TWICE: Before = &[(Streaming, DecodeBreaks), (Streaming, DecodeBreaks)];
const HAND_OFF_FAILED: Before = &[(Published, TransferFails("source-lost"))];

const PREFILL_LOST_AT_LAST: Then = Then::Told {
    status: 503,
    code: "prefill_lost",
    retry_after: true,
    says: "(fallback.localRecompute.maxConcurrentPerWorker): send the request again",
};
const HAND_OFF_FAILED_AT_LAST: Then = Then::Told {
    status: 503,
    code: "handoff_failed",
    retry_after: true,
    says: "fallback.localRecompute, timeouts.totalSeconds): send the request again",
};
const DECODE_LOST_AT_LAST: Then = Then::Told {
    status: 503,
    code: "decode_lost",
    retry_after: true,
    says: "times, and within timeouts.totalSeconds: send the request again",
};

/// Cases that differ in how and where their last attempt fails.
struct Cases {
    ways: &'static [Way],
    before: Before,
    /// Of the last attempt, where it is not that of those before.
    last: Option<Way>,
    /// Phases that the way does not have are passed over.
    phases: &'static [Phase],
    how: &'static [How],
    then: Then,
    budget: bool,
}

const fn cases(
    ways: &'static [Way],
    before: Before,
    phases: &'static [Phase],
    how: &'static [How],
    then: Then,
) -> Cases {
    Cases {
        ways,
        before,
        last: None,
        phases,
        how,
        then,
        budget: true,
    }
}

impl Cases {
    const fn at_last(mut self, way: Way) -> Self {
        self.last = Some(way);
        self
    }

    const fn without_budget(mut self) -> Self {
        self.budget = false;
        self
    }
}

fn played(all: &[Cases]) -> Vec<Played> {
    let mut played = Vec::new();
    for cases in all {
        for &first in cases.ways {
            let way = cases.last.unwrap_or(first);
            let phases = cases.phases.iter();
            for &phase in phases.filter(|phase| way.phases().contains(phase)) {
                played.extend(cases.how.iter().map(|&how| Played {
                    first,
                    before: cases.before,
                    way,
                    phase,
                    how,
                    then: cases.then,
                    budget: cases.budget,
                }));
            }
        }
    }
    played
}

/// From the opening of the prefill to its seal.
const PREFILLING: &[Phase] = &[
    Reserved,
    Leased,
    PrefillStarted,
    TransferStarted,
    PrefillCompleted,
];

#[tokio::test]
async fn a_prefill_that_is_lost_twice_is_computed_on_one_worker_under_the_budget() {
    let lost: &[How] = &[PrefillBreaks, PrefillFails];
    play(played(&[
        cases(REMOTE, PREFILL_LOST, PREFILLING, lost, Then::ComputedWhole),
        // With a token sent in each of the two.
        cases(
            &[Way::FirstByPrefill],
            &[(PrefillCompleted, PrefillBreaks)],
            PREFILLING,
            lost,
            Then::ComputedWhole,
        ),
        cases(REMOTE, PREFILL_LOST, PREFILLING, lost, PREFILL_LOST_AT_LAST).without_budget(),
        cases(
            &[Way::FirstByPrefill],
            &[(PrefillCompleted, PrefillBreaks)],
            &[PrefillCompleted],
            lost,
            PREFILL_LOST_AT_LAST,
        )
        .without_budget(),
    ]))
    .await;
}

#[tokio::test]
async fn a_hand_off_that_may_not_be_recomputed_is_planned_once_more_after_the_first_token_too() {
    let failed: &[How] = &[TransferFails("lease-gone"), TransferFails("source-lost")];
    play(played(&[
        cases(
            REMOTE,
            &[],
            &[PrefillCompleted, Published],
            failed,
            Then::Served { attempts: 2 },
        )
        .without_budget(),
        cases(
            REMOTE,
            &[],
            &[Published],
            &[TransferSlow],
            Then::Served { attempts: 2 },
        )
        .without_budget(),
        cases(
            REMOTE,
            HAND_OFF_FAILED,
            &[
                Leased,
                PrefillStarted,
                TransferStarted,
                PrefillCompleted,
                Published,
            ],
            failed,
            HAND_OFF_FAILED_AT_LAST,
        )
        .without_budget(),
        // The lost prefill has used up the plans.
        cases(
            REMOTE,
            PREFILL_LOST,
            &[PrefillStarted, PrefillCompleted, Published],
            failed,
            HAND_OFF_FAILED_AT_LAST,
        )
        .without_budget(),
    ]))
    .await;
}

#[tokio::test]
async fn a_hand_off_that_fails_in_a_later_attempt_is_recomputed() {
    let failed: &[How] = &[TransferFails("checksum-mismatch")];
    let phases: &[Phase] = &[Leased, PrefillStarted, PrefillCompleted, Published];
    play(played(&[
        cases(REMOTE, PREFILL_LOST, phases, failed, Then::Recomputed),
        cases(REMOTE, DECODE_LOST, phases, failed, Then::Recomputed),
    ]))
    .await;
}

#[tokio::test]
async fn a_loss_after_another_one_is_survived() {
    let served = Then::Served { attempts: 3 };
    let broken: &[How] = &[DecodeBreaks];
    play(played(&[
        cases(REMOTE, PREFILL_LOST, DISPATCHED, broken, served),
        cases(
            REMOTE,
            DECODE_LOST,
            PREFILLING,
            &[PrefillBreaks, PrefillFails],
            served,
        ),
        cases(LOCAL, DECODE_LOST, DISPATCHED, broken, served),
        cases(LOCAL, DECODE_LOST, &[Streaming], &[DecodeSilent], served),
        // While it computes what it was to read.
        cases(
            REMOTE,
            HAND_OFF_FAILED,
            DISPATCHED,
            &[DecodeBreaks, DecodeFails, DecodeStops],
            served,
        )
        .at_last(Way::Recompute),
    ]))
    .await;
}

/// The last of these losses is one more than a run goes on after.
const LOST_TOO_OFTEN: &[Cases] = &[
    cases(
        LOCAL,
        DECODE_LOST_TWICE,
        DISPATCHED,
        &[DecodeBreaks, DecodeFails, DecodeStops],
        DECODE_LOST_AT_LAST,
    ),
    // Nobody is left of those that may decode for another.
    cases(
        REMOTE,
        DECODE_LOST_TWICE,
        &[RouteSelected, PrefillStarted, Streaming],
        &[DecodeBreaks, DecodeFails],
        DECODE_LOST_AT_LAST,
    )
    .at_last(Way::Local),
];

#[tokio::test]
async fn a_run_whose_workers_are_lost_again_and_again_ends_with_what_it_has_sent() {
    for cases in LOST_TOO_OFTEN {
        assert_eq!(cases.before.len(), RESUMES as usize);
    }
    play(played(LOST_TOO_OFTEN)).await;
}

#[tokio::test]
async fn a_refusal_in_a_later_attempt_is_passed_over_or_told() {
    let served = Then::Served { attempts: 3 };
    let route: &[Phase] = &[RouteSelected];
    play(played(&[
        cases(
            LOCAL,
            DECODE_LOST,
            route,
            &[DecodeRefuses("pool-full")],
            served,
        ),
        cases(
            REMOTE,
            PREFILL_LOST,
            route,
            &[DecodeRefuses("pool-full")],
            served,
        ),
        cases(
            REMOTE,
            DECODE_LOST,
            &[Reserved],
            &[PrefillRefuses("queue-full")],
            served,
        ),
        cases(
            WAYS,
            DECODE_LOST,
            route,
            &[DecodeRefuses("too-long")],
            REFUSED,
        ),
    ]))
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_in_a_later_attempt_leaves_nothing() {
    let leaves: &[How] = &[ClientLeaves];
    let gone = Then::Cancelled;
    play(played(&[
        cases(WAYS, DECODE_LOST, DISPATCHED, leaves, gone),
        cases(REMOTE, PREFILL_LOST, DISPATCHED, leaves, gone),
        cases(REMOTE, HAND_OFF_FAILED, DISPATCHED, leaves, gone).at_last(Way::Recompute),
        cases(REMOTE, PREFILL_LOST_TWICE, DISPATCHED, leaves, gone).at_last(Way::Local),
        cases(REMOTE, HAND_OFF_FAILED, DISPATCHED, leaves, gone).without_budget(),
    ]))
    .await;
}

#[tokio::test]
async fn a_deadline_is_kept_in_a_later_attempt() {
    let overdue: &[How] = &[RunOverdue];
    let phases: &[Phase] = &[RouteSelected, PrefillStarted, Streaming];
    play(played(&[
        cases(WAYS, DECODE_LOST, phases, overdue, OVERDUE),
        cases(REMOTE, PREFILL_LOST, phases, overdue, OVERDUE),
        cases(REMOTE, HAND_OFF_FAILED, phases, overdue, OVERDUE).at_last(Way::Recompute),
    ]))
    .await;
}

#[tokio::test]
async fn a_bug_in_a_later_attempt_ends_its_run_and_no_other() {
    let late: &[How] = &[TokenOutOfPlace];
    let repeats: &[How] = &[Repeats];
    let recomputing: &[Phase] = &[PrefillStarted, PrefillCompleted, DecodeStarted, Streaming];
    let reported: &[Phase] = &[
        Reserved,
        Leased,
        PrefillStarted,
        PrefillCompleted,
        Published,
        TransferCompleted,
        DecodeStarted,
        Streaming,
    ];
    play(played(&[
        cases(WAYS, DECODE_LOST, DISPATCHED, late, BUG),
        cases(WAYS, DECODE_LOST, reported, repeats, BUG),
        cases(REMOTE, PREFILL_LOST, reported, repeats, BUG),
        cases(REMOTE, HAND_OFF_FAILED, recomputing, late, BUG).at_last(Way::Recompute),
        cases(REMOTE, HAND_OFF_FAILED, recomputing, repeats, BUG).at_last(Way::Recompute),
    ]))
    .await;
}

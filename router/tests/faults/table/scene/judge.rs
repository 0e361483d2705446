//! Looks at everything that has to follow from a case.

use baton_placement::record::{DecisionRecord, Kind, RecordedCandidate, RunStatus};
use baton_protocol::lifecycle::State;
use baton_router::run::Mode;

use super::super::{Attempt, BUG, How, Phase, Played, Then, Way};
use super::{ANSWER, Asked, Scene, queues};
use crate::double::Seen;
use crate::router::{outcome, until};

impl Scene {
    /// What the record says, who was cancelled, what is still held, and that the next request is served.
    pub(super) async fn judge(mut self) {
        let case = self.case;
        self.router.holds_nothing().await;
        // A run whose client has left before it was placed has nothing to record.
        if !(case.then == Then::Cancelled && case.phase == Phase::Accepted) {
            let record = self.router.record(&self.run.run.0).await;
            judge_record(&record, &case, self.tokens.len());
        }
        self.cancelled().await;
        self.card_read_again().await;
        let illegal = if case.then == BUG { 1 } else { 0 };
        let line = format!("baton_illegal_events_total {illegal}\n");
        assert!(
            self.router.metrics.text().unwrap().contains(&line),
            "{case:?}"
        );
        if matches!(case.how, How::TooLarge) {
            return;
        }
        queues(&self.router, &self.workers, 0).await;
        let (tokens, last) = outcome(self.router.start_run(Mode::Aggregated, ANSWER)).await;
        assert_eq!(
            tokens.len(),
            ANSWER as usize,
            "{case:?}: the next request: {last:?}"
        );
        self.router.holds_nothing().await;
    }

    /// The card of a worker that is not what it says is read again, and no other.
    async fn card_read_again(&self) {
        let changed = match self.case.how {
            How::DecodeRefuses("identity-mismatch") => Some(0),
            How::PrefillRefuses("identity-mismatch") => Some(2),
            _ => None,
        };
        let expected = |index| 1 + usize::from(changed == Some(index));
        until("cards are read again", || {
            let mut workers = self.workers.iter().enumerate();
            workers.all(|(index, worker)| worker.watched() == expected(index))
        })
        .await;
        if changed.is_some() {
            self.router.ready(self.workers.len()).await;
        }
    }

    /// Whoever was asked in an attempt that failed was told that it is over.
    async fn cancelled(&mut self) {
        let run = self.run.run.to_string();
        let mut asked = std::mem::take(&mut self.asked);
        if self.case.then == Then::Recomputed {
            // Its last reader goes on, over the same stream.
            let reader = asked.iter().rposition(|asked| asked.decodes);
            asked.remove(reader.unwrap());
        }
        for Asked {
            worker, operation, ..
        } in asked
        {
            let told = |seen: &Seen| match seen {
                Seen::Cancel(cancelled) => *cancelled == run,
                Seen::CancelOperation(cancelled) => *cancelled == operation,
                _ => false,
            };
            self.workers[worker].until(told).await;
        }
    }
}

fn judge_record(record: &DecisionRecord, case: &Played, tokens: usize) {
    let outcome = record.outcome.as_ref().unwrap();
    let last = record.states.last().unwrap();
    let failed = u32::try_from(case.before.len()).unwrap() + 1;
    let (status, state, attempts) = match case.then {
        Then::Served { attempts } => (RunStatus::Completed, "completed", attempts),
        Then::Recomputed | Then::ComputedWhole => (RunStatus::Completed, "completed", failed + 1),
        Then::Told { .. } if case.phase == Phase::Accepted => (RunStatus::Rejected, "failed", 0),
        Then::Told { .. } => (RunStatus::Failed, "failed", failed),
        Then::Cancelled => (RunStatus::Cancelled, "cancelled", failed),
    };
    assert_eq!(
        (outcome.status, last.state.as_str(), last.attempt),
        (status, state, attempts),
        "{case:?}: {record:?}"
    );
    assert_eq!(outcome.output_tokens as usize, tokens, "{case:?}");
    let cause = record.fallback.as_ref();
    let cause = cause.map(|fallback| fallback.cause.as_str());
    assert_eq!(cause, fallback(case), "{case:?}");
    judge_decisions(record, case, attempts);
    let remote = record
        .chosen()
        .is_some_and(|chosen| chosen.kind == Kind::Remote);
    if case.how == How::NoPair {
        assert!(
            !remote && record.filtered.values().sum::<u64>() > 0,
            "{case:?}"
        );
    } else if attempts > 0 {
        assert_eq!(remote, case.first.is_remote(), "{case:?}");
    }
    for (number, attempt) in (1..).zip(case.attempts()) {
        reached(record, number, &attempt);
    }
}

/// Each attempt that was placed was placed as the first, but not on the worker that failed.
fn judge_decisions(record: &DecisionRecord, case: &Played, attempts: u32) {
    let first = record.chosen().into_iter();
    let later = record.later_decisions.iter();
    let chosen: Vec<&RecordedCandidate> = first
        .chain(later.filter_map(|later| later.chosen()))
        .collect();
    // A worker that goes on with what it has reserved is not looked for.
    let in_place = u32::from(case.way == Way::Recompute) + u32::from(case.then == Then::Recomputed);
    if let Then::Served { .. } | Then::Recomputed | Then::ComputedWhole = case.then {
        assert_eq!(chosen.len() as u32, attempts - in_place, "{case:?}");
    }
    for pair in chosen.windows(2) {
        let differ = (&pair[0].prefill, &pair[0].decode) != (&pair[1].prefill, &pair[1].decode);
        assert!(differ, "{case:?}: {:?}", pair[1]);
    }
    if let Then::Served { .. } = case.then {
        let numbers = record.later_decisions.iter().map(|later| later.attempt);
        assert!(in_place > 0 || numbers.eq(2..=attempts), "{case:?}");
        let kind = chosen[0].kind;
        assert!(chosen.iter().all(|one| one.kind == kind), "{case:?}");
    }
}

/// Why the run has left its remote plan, if it has.
fn fallback(case: &Played) -> Option<&'static str> {
    let attempts = case.attempts();
    let left = |attempt: &Attempt| match attempt.how {
        How::TransferFails("a-word-of-tomorrow") => "protocol-error",
        How::TransferFails(cause) => cause,
        How::TransferSlow => "timeout",
        How::PrefillBreaks | How::PrefillFails => "prefill-lost",
        How::DecodeBreaks => "decode-lost",
        other => panic!("{case:?}: {other:?} is no cause"),
    };
    let within = attempts.windows(2);
    let mut within = within.filter(|pair| pair[0].way.is_remote() && !pair[1].way.is_remote());
    if let Some(pair) = within.next() {
        return Some(left(&pair[0]));
    }
    let whole = matches!(case.then, Then::Recomputed | Then::ComputedWhole);
    whole.then(|| left(attempts.last().unwrap()))
}

/// An attempt had come to its phase, and no farther.
fn reached(record: &DecisionRecord, number: u32, attempt: &Attempt) {
    let Some(entered) = state_of(attempt.phase) else {
        return;
    };
    // A run begins to stream once.
    let mut before = record.states.iter().filter(|entry| entry.attempt < number);
    let streams = before.any(|entry| entry.state == State::Streaming.word());
    let states = record.states.iter().filter(|entry| entry.attempt == number);
    let states: Vec<&str> = states.map(|entry| entry.state.as_str()).collect();
    assert!(
        states.contains(&entered.word()) || streams && entered == State::Streaming,
        "{attempt:?}: {states:?}"
    );
    let later = attempt.way.phases().iter();
    let later = later.filter(|phase| **phase > attempt.phase);
    for state in later.filter_map(|phase| state_of(*phase)) {
        // The first token of a prefill worker is streamed before decode begins.
        let streamed = attempt.way == Way::FirstByPrefill
            && state == State::Streaming
            && attempt.phase >= Phase::PrefillCompleted;
        let may_be = state == entered || streamed;
        assert!(
            may_be || !states.contains(&state.word()),
            "{attempt:?}: {states:?}"
        );
    }
}

/// The state that a run enters with a phase.
fn state_of(phase: Phase) -> Option<State> {
    Some(match phase {
        Phase::Accepted => return None,
        Phase::RouteSelected | Phase::Reserved | Phase::Leased => State::RouteSelected,
        Phase::PrefillStarted => State::PrefillStarted,
        Phase::TransferStarted => State::KvTransferStarted,
        Phase::PrefillCompleted => State::PrefillCompleted,
        Phase::Published => State::KvPublished,
        Phase::TransferCompleted => State::KvTransferCompleted,
        Phase::DecodeStarted => State::DecodeStarted,
        Phase::Streaming => State::Streaming,
    })
}

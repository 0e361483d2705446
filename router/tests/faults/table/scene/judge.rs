//! Looks at everything that has to follow from a case.

use baton_placement::record::{DecisionRecord, Kind, RunStatus};
use baton_protocol::lifecycle::State;
use baton_router::run::Mode;

use super::super::{BUG, How, Phase, Played, Then, Way};
use super::{ANSWER, Scene, queues};
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

    /// Whoever was asked in the attempt that failed was told that it is over.
    async fn cancelled(&mut self) {
        let case = self.case;
        if case.phase == Phase::Accepted {
            return;
        }
        let run = self.run.run.to_string();
        let of_run = |seen: &Seen, step: &str| match seen {
            Seen::Cancel(cancelled) => *cancelled == run,
            Seen::CancelOperation(operation) => *operation == format!("{run}/1/{step}"),
            _ => false,
        };
        let asked_prefill = case.way != Way::Local && case.phase >= Phase::Reserved;
        if case.then != Then::Recomputed {
            self.workers[0].until(|seen| of_run(seen, "decode")).await;
        }
        if asked_prefill {
            self.workers[2].until(|seen| of_run(seen, "prefill")).await;
        }
    }
}

fn judge_record(record: &DecisionRecord, case: &Played, tokens: usize) {
    let outcome = record.outcome.as_ref().unwrap();
    let last = record.states.last().unwrap();
    let (status, state, attempts) = match case.then {
        Then::Served { attempts } => (RunStatus::Completed, "completed", attempts),
        Then::Recomputed => (RunStatus::Completed, "completed", 2),
        Then::Told { .. } if case.phase == Phase::Accepted => (RunStatus::Rejected, "failed", 0),
        Then::Told { .. } => (RunStatus::Failed, "failed", 1),
        Then::Cancelled => (RunStatus::Cancelled, "cancelled", 1),
    };
    assert_eq!(
        (outcome.status, last.state.as_str(), last.attempt),
        (status, state, attempts),
        "{case:?}: {record:?}"
    );
    assert_eq!(outcome.output_tokens as usize, tokens, "{case:?}");
    let fallback = record
        .fallback
        .as_ref()
        .map(|fallback| fallback.cause.as_str());
    match (case.then, case.how) {
        (Then::Recomputed, How::TransferFails("a-word-of-tomorrow")) => {
            assert_eq!(fallback, Some("protocol-error"));
        }
        (Then::Recomputed, How::TransferFails(cause)) => assert_eq!(fallback, Some(cause)),
        (Then::Recomputed, _) => assert_eq!(fallback, Some("timeout")),
        _ => assert_eq!(fallback, None, "{case:?}"),
    }
    if let Then::Served { attempts: 2 } = case.then {
        let [later] = record.later_decisions.as_slice() else {
            panic!("{case:?}: the second attempt's decision is not recorded");
        };
        assert_eq!(later.attempt, 2);
        // As the first, but not on the worker that failed.
        let (first, second) = (record.chosen().unwrap(), later.chosen().unwrap());
        assert_eq!(first.kind, second.kind, "{case:?}");
        let differ = (&first.prefill, &first.decode) != (&second.prefill, &second.decode);
        assert!(differ, "{case:?}: {second:?}");
    }
    let remote = record
        .chosen()
        .is_some_and(|chosen| chosen.kind == Kind::Remote);
    if case.how == How::NoPair {
        assert!(
            !remote && record.filtered.values().sum::<u64>() > 0,
            "{case:?}"
        );
    } else if attempts > 0 {
        assert_eq!(remote, case.way != Way::Local, "{case:?}");
    }
    reached(record, case);
}

/// The first attempt had come to its phase, and no farther.
fn reached(record: &DecisionRecord, case: &Played) {
    let Some(entered) = state_of(case.phase) else {
        return;
    };
    let first = record.states.iter().filter(|entry| entry.attempt == 1);
    let first: Vec<&str> = first.map(|entry| entry.state.as_str()).collect();
    assert!(first.contains(&entered.word()), "{case:?}: {first:?}");
    let later = case
        .way
        .phases()
        .iter()
        .filter(|phase| **phase > case.phase);
    for state in later.filter_map(|phase| state_of(*phase)) {
        // The first token of a prefill worker is streamed before decode begins.
        let streamed = case.way == Way::FirstByPrefill
            && state == State::Streaming
            && case.phase >= Phase::PrefillCompleted;
        let may_be = state == entered || streamed;
        assert!(
            may_be || !first.contains(&state.word()),
            "{case:?}: {first:?}"
        );
    }
}

/// The state that a run enters with a phase.
fn state_of(phase: Phase) -> Option<State> {
    Some(match phase {
        Phase::Accepted => return None,
        Phase::RouteSelected | Phase::Reserved => State::RouteSelected,
        Phase::PrefillStarted => State::PrefillStarted,
        Phase::TransferStarted => State::KvTransferStarted,
        Phase::PrefillCompleted => State::PrefillCompleted,
        Phase::Published => State::KvPublished,
        Phase::TransferCompleted => State::KvTransferCompleted,
        Phase::DecodeStarted => State::DecodeStarted,
        Phase::Streaming => State::Streaming,
    })
}

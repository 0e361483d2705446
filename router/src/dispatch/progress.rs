//! What is known about a run: its legal history, the tokens that the client has, and what each phase took.
//!
//! Pure. Everything that records, metrics and log lines say about a run is read from here, so they cannot disagree.

use baton_placement::policy::Assurance;
use baton_protocol::ids::{Incarnation, OperationId, WorkerId};
use baton_protocol::lifecycle::{Event, IllegalEvent, Lifecycle, Plan, State};
use baton_protocol::wire;

use super::fetched::Fetch;
use super::http::answer::Counts;
use crate::clock::Moment;

/// A worker in one role of one attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Party {
    pub worker: WorkerId,
    pub incarnation: Incarnation,
    /// Name of its nearest topology domain; empty where none is known.
    pub domain: String,
    pub operation: OperationId,
}

/// What is kept with each state of the history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateDetail {
    pub operation: Option<OperationId>,
    pub worker: Option<WorkerId>,
    pub incarnation: Option<Incarnation>,
    pub generation: Option<u64>,
    pub domain: Option<String>,
    /// Concluded by the router, not reported by a worker.
    pub inferred: bool,
}

impl StateDetail {
    pub fn of(party: &Party) -> Self {
        Self {
            operation: Some(party.operation.clone()),
            worker: Some(party.worker.clone()),
            incarnation: Some(party.incarnation),
            generation: None,
            domain: (!party.domain.is_empty()).then(|| party.domain.clone()),
            inferred: false,
        }
    }

    #[must_use]
    pub fn generation(mut self, generation: Option<u64>) -> Self {
        self.generation = generation;
        self
    }

    #[must_use]
    pub fn inferred(mut self) -> Self {
        self.inferred = true;
        self
    }
}

/// What could be observed of the attempt that answered, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Actual {
    pub queue: Option<f64>,
    pub prefill: Option<f64>,
    /// The part of the transfer that did not hide behind prefill.
    pub transfer: Option<f64>,
    pub synchronization: Option<f64>,
    /// From dispatch to the reservation on the worker that decodes.
    pub admission: Option<f64>,
    /// Claim to last verified block, hidden part included.
    pub transfer_total: Option<f64>,
    pub transfer_retries: u32,
    pub bytes: u64,
    pub blocks: u32,
    pub transport: Option<String>,
    /// That the plan was estimated with.
    pub planned_transport: Option<String>,
    pub transports_left: Vec<wire::TransportLeft>,
    /// The hand-off that an engine was sent to fetch by itself, and the failed ones that it has counted since.
    pub fetch: Option<Fetch>,
    pub failed_transfers: Option<u64>,
}

/// Why and when a run left its remote plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    pub cause: String,
    pub at: Moment,
}

/// A token whose position is not the next one. It is never sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the worker sent the token of position {found}, but position {expected} is next: a token is never repeated, taken back or left out"
)]
pub struct MisplacedToken {
    pub expected: u32,
    pub found: u32,
}

/// The state of one run.
#[derive(Clone, Debug)]
pub struct Progress {
    lifecycle: Lifecycle<StateDetail>,
    illegal: Vec<IllegalEvent>,
    accepted: Moment,
    prompt_tokens: u32,
    sent: Vec<u32>,
    /// The last of them ends the run.
    ended: Option<wire::FinishReason>,
    /// Tokens of an answer that was passed on unread: its pieces, until the engine gives their number.
    passed_on: u32,
    /// The engine has given the number of tokens that it generated.
    counted: bool,
    /// When the first attempt began.
    dispatched: Option<Moment>,
    first_token: Option<Moment>,
    last_token: Option<Moment>,
    cached_tokens: Option<u32>,
    /// Of a prompt that one engine computed for another, by the first one's word.
    prefill_cached_tokens: Option<u32>,
    pub actual: Actual,
    /// Who vouches for the KV of the attempt under way.
    pub assurance: Assurance,
    pub fallback: Option<Fallback>,
}

impl Progress {
    pub fn new(prompt_tokens: u32, accepted: Moment) -> Self {
        let mut progress = Self {
            lifecycle: Lifecycle::new(),
            illegal: Vec::new(),
            accepted,
            prompt_tokens,
            sent: Vec::new(),
            ended: None,
            passed_on: 0,
            counted: false,
            dispatched: None,
            first_token: None,
            last_token: None,
            cached_tokens: None,
            prefill_cached_tokens: None,
            actual: Actual::default(),
            assurance: Assurance::Verified,
            fallback: None,
        };
        progress.observe(State::Accepted, accepted, StateDetail::default());
        progress
    }

    /// Begins an attempt; what the one before has measured is forgotten.
    pub fn begin(&mut self, plan: Plan, now: Moment, detail: StateDetail) -> u32 {
        self.actual = Actual::default();
        self.dispatched.get_or_insert(now);
        // Every transport that Baton has verifies each block; KV that never moved was made where it is used.
        self.assurance = Assurance::Verified;
        match self.lifecycle.begin_attempt(plan, now.0, detail) {
            Ok(attempt) => attempt,
            Err(illegal) => {
                self.illegal.push(illegal);
                self.lifecycle.attempt()
            }
        }
    }

    /// Takes a report about the attempt under way. An illegal one is kept apart and changes no state; what it means for the run
    /// is the attempt's to say.
    pub fn observe(&mut self, state: State, now: Moment, detail: StateDetail) {
        let event = Event {
            state,
            attempt: self.lifecycle.attempt(),
            at: now.0,
            detail,
        };
        if let Err(illegal) = self.lifecycle.observe(event) {
            self.illegal.push(illegal);
        }
    }

    /// Whether this state was reported, be it too early to be entered.
    pub fn heard_of(&self, state: State) -> bool {
        self.lifecycle.heard_of(state)
    }

    /// Whether this state may follow now.
    pub fn allows(&self, state: State) -> bool {
        self.lifecycle.allows(state)
    }

    pub fn has(&self, state: State) -> bool {
        self.lifecycle.has(state)
    }

    pub fn attempt(&self) -> u32 {
        self.lifecycle.attempt()
    }

    pub fn history(&self) -> &[Event<StateDetail>] {
        self.lifecycle.history()
    }

    /// Reports that could never become legal, and those that still waited for something at the end.
    pub fn illegal(&self) -> &[IllegalEvent] {
        &self.illegal
    }

    /// Reports that waited in vain for what must precede them. Where a run was cut short, what they waited for may just not have
    /// been heard any more; only in a completed one does it prove a report wrong.
    pub fn unresolved(&self) -> usize {
        match self.lifecycle.ended() {
            Some(State::Completed) => self.lifecycle.deferred(),
            _ => 0,
        }
    }

    /// Checks that a token is the next one, and keeps it as sent.
    pub fn take_token(
        &mut self,
        token: &wire::Token,
        party: &Party,
        now: Moment,
    ) -> Result<(), MisplacedToken> {
        let expected = self.prompt_tokens + self.sent_tokens();
        if token.position != expected {
            return Err(MisplacedToken {
                expected,
                found: token.position,
            });
        }
        self.sent.push(token.id);
        self.ended = token.finish.is_some().then(|| token.finish());
        self.last_token = Some(now);
        if self.first_token.is_none() {
            self.first_token = Some(now);
            self.observe(State::Streaming, now, StateDetail::of(party));
        }
        Ok(())
    }

    /// So many more pieces of an engine's answer were passed on: about a token each.
    pub fn pass_on(&mut self, pieces: u32, party: &Party, now: Moment) {
        self.passed_on = self.passed_on.saturating_add(pieces);
        self.last_token = Some(now);
        if self.first_token.is_none() {
            self.first_token = Some(now);
            self.observe(State::Streaming, now, StateDetail::of(party));
        }
    }

    /// The engine has counted the tokens itself.
    pub fn counted(&mut self, counts: Counts) {
        self.prompt_tokens = counts.prompt;
        self.passed_on = counts.output;
        self.counted = counts.output > 0;
        if let Some(cached) = counts.cached {
            self.cached_tokens = Some(cached);
        }
    }

    /// Whether the engine has counted tokens that it generated.
    pub fn is_counted(&self) -> bool {
        self.counted
    }

    /// Anything of an answer has gone to the client.
    pub fn has_begun_to_answer(&self) -> bool {
        self.first_token.is_some()
    }

    pub fn accepted(&self) -> Moment {
        self.accepted
    }

    pub fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// Generated tokens that the client has, oldest first.
    pub fn sent(&self) -> &[u32] {
        &self.sent
    }

    /// Why the run ends with the last token that was sent, if it does.
    pub fn ended(&self) -> Option<wire::FinishReason> {
        self.ended
    }

    pub fn sent_tokens(&self) -> u32 {
        let sent = u32::try_from(self.sent.len()).unwrap_or(u32::MAX);
        sent.saturating_add(self.passed_on)
    }

    /// Prompt tokens that the first attempt found in a cache.
    pub fn cached_tokens(&self) -> u32 {
        let cached = self.prefill_cached_tokens.or(self.cached_tokens);
        cached.unwrap_or(0).min(self.prompt_tokens)
    }

    /// Keeps the first report only: later attempts find what earlier ones left behind.
    pub fn found_cached(&mut self, tokens: u32) {
        self.cached_tokens.get_or_insert(tokens);
    }

    /// Whenever it comes: to the engine that answers all of the prompt may have been there already.
    pub fn prefill_found_cached(&mut self, tokens: u32) {
        self.prefill_cached_tokens.get_or_insert(tokens);
    }

    /// Milliseconds from acceptance to the first token.
    pub fn ttft_milliseconds(&self) -> Option<f64> {
        self.first_token
            .map(|first| first.milliseconds_since(self.accepted))
    }

    /// Milliseconds from the first dispatch to the first token.
    pub fn dispatched_to_first_token(&self) -> Option<f64> {
        Some(self.first_token?.milliseconds_since(self.dispatched?))
    }

    /// Mean milliseconds between tokens, from the second on.
    pub fn tpot_milliseconds(&self) -> Option<f64> {
        let (first, last) = (self.first_token?, self.last_token?);
        let gaps = self.sent_tokens().checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some(last.milliseconds_since(first) / f64::from(gaps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn party() -> Party {
        Party {
            worker: "d".into(),
            incarnation: Incarnation(1),
            domain: "host".into(),
            operation: "r/1/decode".to_owned().into(),
        }
    }

    fn token(id: u32, position: u32) -> wire::Token {
        wire::Token {
            id,
            position,
            logprobs: None,
            finish: None,
        }
    }

    #[test]
    fn a_token_is_sent_once_and_in_order() {
        let mut progress = Progress::new(10, Moment(0));
        progress.begin(Plan::Local, Moment(500), StateDetail::default());
        assert!(
            progress
                .take_token(&token(7, 10), &party(), Moment(2_000))
                .is_ok()
        );
        for found in [9, 10, 12] {
            let error = progress
                .take_token(&token(8, found), &party(), Moment(3_000))
                .unwrap_err();
            assert_eq!((error.expected, error.found), (11, found));
        }
        assert_eq!(progress.sent(), [7]);
        assert!(
            progress
                .take_token(&token(8, 11), &party(), Moment(5_000))
                .is_ok()
        );
        assert_eq!(progress.ttft_milliseconds(), Some(2.0));
        assert_eq!(progress.dispatched_to_first_token(), Some(1.5));
        assert_eq!(progress.tpot_milliseconds(), Some(3.0));
    }

    #[test]
    fn positions_go_on_over_attempts() {
        let mut progress = Progress::new(4, Moment(0));
        progress.begin(Plan::Local, Moment(1), StateDetail::default());
        progress
            .take_token(&token(1, 4), &party(), Moment(2))
            .unwrap();
        progress.begin(Plan::Local, Moment(3), StateDetail::default());
        assert!(
            progress
                .take_token(&token(1, 4), &party(), Moment(4))
                .is_err()
        );
        progress
            .take_token(&token(2, 5), &party(), Moment(4))
            .unwrap();
        assert_eq!(progress.sent(), [1, 2]);
    }

    #[test]
    fn an_early_report_of_a_run_that_was_cut_short_proves_nothing() {
        let mut progress = Progress::new(4, Moment(0));
        progress.begin(Plan::Remote, Moment(1), StateDetail::default());
        progress.observe(State::KvTransferStarted, Moment(2), StateDetail::default());
        progress.observe(State::Cancelled, Moment(3), StateDetail::default());
        assert_eq!((progress.illegal().len(), progress.unresolved()), (0, 0));

        let mut progress = Progress::new(4, Moment(0));
        progress.begin(Plan::Remote, Moment(1), StateDetail::default());
        for state in [
            State::KvTransferCompleted,
            State::PrefillStarted,
            State::PrefillCompleted,
            State::Completed,
        ] {
            progress.observe(state, Moment(2), StateDetail::default());
        }
        assert_eq!(progress.unresolved(), 1);
    }

    #[test]
    fn an_illegal_report_is_counted_and_changes_nothing() {
        let mut progress = Progress::new(4, Moment(0));
        progress.begin(Plan::Local, Moment(1), StateDetail::default());
        let before = progress.history().len();
        progress.observe(State::KvPublished, Moment(2), StateDetail::default());
        assert_eq!(progress.illegal().len(), 1);
        assert_eq!(progress.history().len(), before);
    }
}

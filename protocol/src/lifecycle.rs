//! States of a run, and the one table that says which may follow which.
//!
//! A run is a sequence of attempts; an attempt is one plan. Within a remote attempt prefill and transfer overlap, so the order is
//! partial: [`prerequisites`] is the whole of it. The router keeps a [`Lifecycle`] per run, fed with what its workers report;
//! decision records, spans and metrics are made from what it accepted and from nothing else.
//!
//! Reports of two workers race on their way to the router. One that is legal but early is deferred until what must precede it
//! has arrived; one that can never become legal is an error that is counted, never a guess.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Accepted,
    /// Begins an attempt.
    RouteSelected,
    PrefillStarted,
    PrefillCompleted,
    /// The lease's manifest is sealed: all blocks are readable.
    KvPublished,
    KvTransferStarted,
    /// Every block was verified by its reader.
    KvTransferCompleted,
    DecodeStarted,
    /// The first token was sent to the client. Once per run.
    Streaming,
    Completed,
    Failed,
    Cancelled,
}

impl State {
    pub const ALL: [Self; 12] = [
        Self::Accepted,
        Self::RouteSelected,
        Self::PrefillStarted,
        Self::PrefillCompleted,
        Self::KvPublished,
        Self::KvTransferStarted,
        Self::KvTransferCompleted,
        Self::DecodeStarted,
        Self::Streaming,
        Self::Completed,
        Self::Failed,
        Self::Cancelled,
    ];

    pub fn word(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::RouteSelected => "route_selected",
            Self::PrefillStarted => "prefill_started",
            Self::PrefillCompleted => "prefill_completed",
            Self::KvPublished => "kv_published",
            Self::KvTransferStarted => "kv_transfer_started",
            Self::KvTransferCompleted => "kv_transfer_completed",
            Self::DecodeStarted => "decode_started",
            Self::Streaming => "streaming",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }

    /// Holds over all attempts of a run; the others are of one attempt.
    fn is_of_the_run(self) -> bool {
        matches!(self, Self::Accepted | Self::Streaming) || self.is_terminal()
    }

    fn bit(self) -> u16 {
        1 << self as u16
    }
}

impl fmt::Display for State {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.word())
    }
}

/// Kind of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Plan {
    /// Prefill and decode on one worker; also the recomputation after a failed hand-off.
    Local,
    /// Prefill on one, decode on another.
    Remote,
}

/// A set of states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct States(u16);

impl States {
    pub fn of(states: &[State]) -> Self {
        Self(states.iter().fold(0, |set, state| set | state.bit()))
    }

    pub fn contains(self, state: State) -> bool {
        self.0 & state.bit() != 0
    }

    pub fn contains_all(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    fn with(self, state: State) -> Self {
        Self(self.0 | state.bit())
    }
}

/// What must have happened before `state`, as alternatives: one of the sets has to be there. Empty: never in such a plan.
///
/// Total over (plan, state). `Failed` and `Cancelled` may follow anything once the run was accepted.
pub fn prerequisites(plan: Plan, state: State) -> Vec<States> {
    use State::{
        Accepted, Cancelled, Completed, DecodeStarted, Failed, KvPublished, KvTransferCompleted,
        KvTransferStarted, PrefillCompleted, PrefillStarted, RouteSelected, Streaming,
    };
    match (plan, state) {
        (_, Accepted) => vec![States::default()],
        (_, RouteSelected | Failed | Cancelled) => vec![States::of(&[Accepted])],
        (_, PrefillStarted) => vec![States::of(&[RouteSelected])],
        (_, PrefillCompleted) => vec![States::of(&[PrefillStarted])],
        (Plan::Remote, KvPublished) => vec![States::of(&[PrefillCompleted])],
        (Plan::Remote, KvTransferStarted) => vec![States::of(&[PrefillStarted])],
        (Plan::Remote, KvTransferCompleted) => vec![States::of(&[KvTransferStarted, KvPublished])],
        (Plan::Local, KvPublished | KvTransferStarted | KvTransferCompleted) => vec![],
        (Plan::Remote, DecodeStarted) => vec![States::of(&[KvTransferCompleted])],
        (Plan::Local, DecodeStarted) => vec![States::of(&[PrefillCompleted])],
        // The worker that computed the last prompt token samples the first new one.
        (_, Streaming) => vec![
            States::of(&[PrefillCompleted]),
            States::of(&[DecodeStarted]),
        ],
        // An answer may be empty (the first token ends it), and a single token moves nothing.
        (_, Completed) => vec![
            States::of(&[PrefillCompleted]),
            States::of(&[DecodeStarted]),
        ],
    }
}

/// Something that was reported about a run. `T` is what the caller wants to keep with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Event<T> {
    pub state: State,
    pub attempt: u32,
    /// Microseconds on the caller's clock.
    pub at: u64,
    pub detail: T,
}

/// A report that can never become legal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IllegalEvent {
    #[error("{state} in attempt {attempt}, but the run ended with {ended}")]
    AfterEnd {
        state: State,
        attempt: u32,
        ended: State,
    },
    #[error("{state} in attempt {attempt} happened already")]
    Repeated { state: State, attempt: u32 },
    #[error("{state} in attempt {attempt}, but attempt {current} is under way")]
    OtherAttempt {
        state: State,
        attempt: u32,
        current: u32,
    },
    #[error("{state} does not occur in a {plan:?} plan")]
    OtherPlan { state: State, plan: Plan },
    #[error("{state} in attempt {attempt} without what must precede it")]
    Premature { state: State, attempt: u32 },
}

/// States of one run. Events go in as they are reported and come out in a legal order.
#[derive(Clone, Debug)]
pub struct Lifecycle<T> {
    attempt: u32,
    plan: Plan,
    run: States,
    current: States,
    ended: Option<State>,
    history: Vec<Event<T>>,
    /// Early reports of this attempt; at most one of each state, so at most ten.
    deferred: Vec<Event<T>>,
}

impl<T> Default for Lifecycle<T> {
    fn default() -> Self {
        Self {
            attempt: 0,
            plan: Plan::Local,
            run: States::default(),
            current: States::default(),
            ended: None,
            history: Vec::new(),
            deferred: Vec::new(),
        }
    }
}

impl<T> Lifecycle<T> {
    pub fn new() -> Self {
        Self::default()
    }

    /// Accepted events in a legal order, with times that never go back.
    pub fn history(&self) -> &[Event<T>] {
        &self.history
    }

    pub fn into_history(self) -> Vec<Event<T>> {
        self.history
    }

    /// The attempt under way, counted from one; zero before the first.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    pub fn has(&self, state: State) -> bool {
        self.run.contains(state) || self.current.contains(state)
    }

    pub fn ended(&self) -> Option<State> {
        self.ended
    }

    /// Begins the next attempt. Early reports of the one before are dropped with it.
    pub fn begin_attempt(&mut self, plan: Plan, at: u64, detail: T) -> Result<u32, IllegalEvent> {
        let attempt = self.attempt + 1;
        if let Some(ended) = self.ended {
            return Err(IllegalEvent::AfterEnd {
                state: State::RouteSelected,
                attempt,
                ended,
            });
        }
        if !self.run.contains(State::Accepted) {
            return Err(IllegalEvent::Premature {
                state: State::RouteSelected,
                attempt,
            });
        }
        self.attempt = attempt;
        self.plan = plan;
        self.current = States::default();
        self.deferred.clear();
        self.accept(Event {
            state: State::RouteSelected,
            attempt,
            at,
            detail,
        });
        Ok(attempt)
    }

    /// Takes a report. `Ok(true)`: it is part of the history now (as may be earlier ones that waited for it); `Ok(false)`: it waits
    /// for something that has not been reported yet.
    pub fn observe(&mut self, event: Event<T>) -> Result<bool, IllegalEvent> {
        let Event { state, attempt, .. } = event;
        if let Some(ended) = self.ended {
            return Err(IllegalEvent::AfterEnd {
                state,
                attempt,
                ended,
            });
        }
        if attempt != self.attempt {
            return Err(IllegalEvent::OtherAttempt {
                state,
                attempt,
                current: self.attempt,
            });
        }
        if self.heard_of(state) {
            return Err(IllegalEvent::Repeated { state, attempt });
        }
        let alternatives = prerequisites(self.plan, state);
        if alternatives.is_empty() {
            return Err(IllegalEvent::OtherPlan {
                state,
                plan: self.plan,
            });
        }
        if state == State::RouteSelected {
            // An attempt is begun, with its plan; it cannot be reported.
            return Err(IllegalEvent::Premature { state, attempt });
        }
        if !self.met(&alternatives) {
            // The end of a run is the router's own doing, and before the first attempt nobody was asked for anything: nothing is
            // on its way that could make it legal.
            if state.is_terminal() || self.attempt == 0 {
                return Err(IllegalEvent::Premature { state, attempt });
            }
            self.deferred.push(event);
            return Ok(false);
        }
        self.accept(event);
        self.accept_deferred();
        Ok(true)
    }

    /// Whether the state was reported, be it too early to be entered.
    pub fn heard_of(&self, state: State) -> bool {
        self.has(state) || self.deferred.iter().any(|early| early.state == state)
    }

    /// Whether [`Self::observe`] would enter `state` into the history of the attempt under way at once.
    pub fn allows(&self, state: State) -> bool {
        self.ended.is_none()
            && state != State::RouteSelected
            && !self.heard_of(state)
            && self.met(&prerequisites(self.plan, state))
    }

    /// Early reports that still wait. In a run that completed, each of them is an illegal event.
    pub fn deferred(&self) -> usize {
        self.deferred.len()
    }

    fn met(&self, alternatives: &[States]) -> bool {
        let seen = States(self.run.0 | self.current.0);
        alternatives.iter().any(|set| seen.contains_all(*set))
    }

    fn accept(&mut self, mut event: Event<T>) {
        if event.state.is_of_the_run() {
            self.run = self.run.with(event.state);
        } else {
            self.current = self.current.with(event.state);
        }
        if event.state.is_terminal() {
            self.ended = Some(event.state);
        }
        if let Some(last) = self.history.last() {
            event.at = event.at.max(last.at);
        }
        self.history.push(event);
    }

    fn accept_deferred(&mut self) {
        while let Some(ready) = self
            .deferred
            .iter()
            .position(|event| self.met(&prerequisites(self.plan, event.state)))
        {
            let event = self.deferred.remove(ready);
            self.accept(event);
        }
    }
}

#[cfg(test)]
mod histories;
#[cfg(test)]
mod tests;

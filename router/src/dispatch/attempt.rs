//! One attempt as a pure state machine: what workers report goes in, what is to be done comes out.
//!
//! A local attempt has one leg, the Decode stream. A remote one has two: Decode is opened first, so that its blocks are reserved
//! before a token is sampled; its reservation says what the prefill worker need not publish, and opens the Prefill leg; the lease
//! goes to the decode worker as soon as it opens. The shell in `dispatch::drive` moves the messages and owns the timers.
//!
//! `decode_leg` and `prefill_leg` take the reports of the two streams, `deadlines` bounds each wait.

mod deadlines;
mod decode_leg;
mod prefill_leg;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use baton_placement::policy::Timeouts;
use baton_protocol::failure::FailureClass;
use baton_protocol::lifecycle::{Plan, State};
use baton_protocol::wire::{self, decode_request};

use super::failure::Failure;
use super::progress::{Party, Progress, StateDetail};
use crate::clock::Moment;

/// The answer is complete, but the prefill worker's seal has not been reported yet: the record waits this long for it.
const CLOSING: Duration = Duration::from_secs(1);

/// The longest waits of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub reserve: Duration,
    pub prefill_start: Duration,
    pub prefill: Duration,
    pub transfer: Duration,
    pub decode_start: Duration,
    pub token: Duration,
}

impl From<&Timeouts> for Limits {
    fn from(timeouts: &Timeouts) -> Self {
        // A policy's seconds are checked; what does not fit is an hour.
        let duration = |seconds: f64| {
            Duration::try_from_secs_f64(seconds).unwrap_or(Duration::from_secs(3_600))
        };
        Self {
            reserve: duration(timeouts.reserve_seconds),
            prefill_start: duration(timeouts.prefill_start_seconds),
            prefill: duration(timeouts.prefill_seconds),
            transfer: duration(timeouts.transfer_seconds),
            decode_start: duration(timeouts.decode_start_seconds),
            token: duration(timeouts.token_seconds),
        }
    }
}

/// What an attempt is to do.
#[derive(Clone, Debug)]
pub enum Task {
    /// Prefill and decode on one worker.
    Whole { worker: Party },
    /// Prefill on one, decode on the other.
    Split {
        prefill: Party,
        decode: Party,
        /// The prefill worker samples the first token.
        first_token_by_prefill: bool,
    },
}

impl Task {
    pub fn plan(&self) -> Plan {
        match self {
            Self::Whole { .. } => Plan::Local,
            Self::Split { .. } => Plan::Remote,
        }
    }

    /// Who computes the prompt for another; none where one worker does all.
    pub fn source(&self) -> Option<&Party> {
        match self {
            Self::Split { prefill, .. } => Some(prefill),
            Self::Whole { .. } => None,
        }
    }

    /// Who generates.
    pub fn target(&self) -> &Party {
        match self {
            Self::Whole { worker } => worker,
            Self::Split { decode, .. } => decode,
        }
    }
}

/// What the shell is to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Open the Prefill leg; the reader has so many leading blocks.
    OpenPrefill {
        skip_blocks: u32,
    },
    /// Close the Prefill leg and cancel it at its worker.
    DropPrefill,
    ToDecode(decode_request::Message),
    /// The client gets this token.
    Deliver(wire::Token),
    /// The client has all of its tokens: tell it the end. The attempt may go on for a moment.
    Answered(wire::FinishReason),
    /// A worker admitted the operation: from this load report on it counts itself.
    Admitted {
        party: Party,
        admission: wire::Admission,
    },
    /// The reader was granted the lease and reads over this transport.
    Transferring(String),
    /// The transfer is over, as the reader measured it.
    Transferred(wire::TransferCompleted),
    /// The hand-off failed; the Decode stream waits for `recompute` or its end.
    HandoffFailed(Failure),
    End(End),
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    Finished(wire::FinishReason),
    Failed(Failure),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PrefillLeg {
    Closed,
    Opened(Moment),
    Started(Moment),
    Sealed(Moment),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DecodeLeg {
    /// Opened, nothing reserved yet.
    Opened(Moment),
    /// Reserved; waits for KV (remote) or for its turn (local).
    Reserved(Moment),
    /// Computes the prompt itself.
    Prefilling(Moment),
    /// All KV is there.
    Ready(Moment),
    /// Sends tokens; the time of the last one.
    Decoding(Moment),
}

/// The state of one attempt.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// Shared so that a report can be taken on behalf of a party without copying its names.
    task: Arc<Task>,
    limits: Limits,
    block_size: u32,
    opened: Moment,
    prefill: PrefillLeg,
    decode: DecodeLeg,
    generation: Option<u64>,
    /// Set while a failed hand-off is being decided.
    undecided: bool,
    /// From the word to recompute until the worker obeys it: what it says of the hand-off meanwhile is of the past.
    recomputing: bool,
    closing: Option<(Moment, wire::FinishReason)>,
    /// Blocks published before the last batch, and in all.
    published: (u32, u32),
    ended: bool,
    commands: VecDeque<Command>,
}

impl Attempt {
    /// Begins; the lifecycle's attempt has begun already, and the shell opens the Decode leg at once.
    pub fn new(task: Task, limits: Limits, block_size: u32, now: Moment) -> Self {
        Self {
            task: Arc::new(task),
            limits,
            block_size: block_size.max(1),
            opened: now,
            prefill: PrefillLeg::Closed,
            decode: DecodeLeg::Opened(now),
            generation: None,
            undecided: false,
            recomputing: false,
            closing: None,
            published: (0, 0),
            ended: false,
            commands: VecDeque::new(),
        }
    }

    pub fn next_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    pub fn task(&self) -> &Task {
        &self.task
    }

    /// Blocks that became readable with the seal or the step before it: what could not hide behind computing.
    pub fn last_blocks(&self) -> u32 {
        self.published.1.saturating_sub(self.published.0)
    }

    /// Goes on as a local attempt on the worker that decodes, over the same stream.
    pub fn recompute(&mut self, now: Moment, progress: &mut Progress) {
        let target = self.target().clone();
        self.undecided = false;
        self.recomputing = true;
        self.generation = None;
        self.task = Arc::new(Task::Whole {
            worker: target.clone(),
        });
        self.prefill = PrefillLeg::Closed;
        self.decode = DecodeLeg::Reserved(now);
        progress.begin(Plan::Local, now, StateDetail::of(&target).inferred());
        self.tell_decode(decode_request::Message::Recompute(
            wire::RecomputeLocally::default(),
        ));
        self.commands.push_back(Command::DropPrefill);
    }

    fn source(&self) -> Option<&Party> {
        self.task.source()
    }

    fn target(&self) -> &Party {
        self.task.target()
    }

    /// False: the token is out of place and the attempt has failed.
    fn deliver(
        &mut self,
        token: wire::Token,
        from: &Party,
        now: Moment,
        progress: &mut Progress,
    ) -> bool {
        match progress.take_token(&token, from, now) {
            Ok(()) => {
                self.commands.push_back(Command::Deliver(token));
                true
            }
            Err(misplaced) => {
                let message = format!("worker {}: {misplaced}", from.worker);
                self.fail(Failure::new(FailureClass::Bug, message).at(&from.worker));
                false
            }
        }
    }

    fn finished(&mut self, reason: wire::FinishReason, now: Moment, progress: &mut Progress) {
        let unsealed = matches!(self.prefill, PrefillLeg::Opened(_) | PrefillLeg::Started(_));
        // The prefill worker's reports may be slower than a whole answer; KV that was proven is proof of what they will say.
        let proven = unsealed && progress.heard_of(State::KvTransferCompleted);
        if !proven && !progress.allows(State::Completed) {
            // Before anybody is told that the answer is complete. The report is entered as the illegal one that it is.
            return progress.observe(State::Completed, now, StateDetail::of(self.target()));
        }
        self.commands.push_back(Command::Answered(reason));
        if unsealed {
            self.closing = Some((now.plus(CLOSING), reason));
        } else {
            self.complete(reason, now, progress);
        }
    }

    fn complete(&mut self, reason: wire::FinishReason, now: Moment, progress: &mut Progress) {
        if let (true, Some(source)) = (progress.heard_of(State::KvTransferCompleted), self.source())
        {
            // Not reported in time, or never: the reader's proof says as much.
            for state in [
                State::PrefillStarted,
                State::PrefillCompleted,
                State::KvPublished,
            ] {
                if !progress.heard_of(state) {
                    let detail = StateDetail::of(source).generation(self.generation);
                    progress.observe(state, now, detail.inferred());
                }
            }
        }
        let detail = StateDetail::of(self.target());
        progress.observe(State::Completed, now, detail);
        self.end(End::Finished(reason));
    }

    fn hand_off_failed(&mut self, failure: Failure) {
        if !self.undecided {
            self.undecided = true;
            self.commands.push_back(Command::HandoffFailed(failure));
        }
    }

    /// A report that no run could have made is a bug, here or there: nothing that the worker says can be trusted any more. With
    /// the answer complete it changes nothing, and is only counted.
    fn end_if_illegal(&mut self, before: usize, from: &Party, progress: &Progress) {
        let Some(illegal) = progress.illegal().get(before) else {
            return;
        };
        self.illegal(from, format!("worker {} reported {illegal}", from.worker));
    }

    fn illegal(&mut self, from: &Party, message: String) {
        if self.closing.is_none() {
            self.fail(Failure::new(FailureClass::Bug, message).at(&from.worker));
        }
    }

    fn fail(&mut self, failure: Failure) {
        self.end(End::Failed(failure));
    }

    fn end(&mut self, end: End) {
        if !self.ended {
            self.ended = true;
            self.commands.push_back(Command::End(end));
        }
    }

    fn tell_decode(&mut self, message: decode_request::Message) {
        self.commands.push_back(Command::ToDecode(message));
    }
}

#[cfg(test)]
mod tests;

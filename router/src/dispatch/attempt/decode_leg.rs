//! Reports of the worker that decodes.

use std::sync::Arc;

use baton_protocol::failure::FailureClass;
use baton_protocol::lifecycle::State;
use baton_protocol::wire::{self, decode_event};

use super::{Attempt, Command, DecodeLeg, PrefillLeg, Task};
use crate::clock::Moment;
use crate::dispatch::failure::{Failure, handoff_cause};
use crate::dispatch::progress::{Party, Progress, StateDetail};

impl Attempt {
    /// What the Decode stream brought: a report, or why there are none any more.
    pub fn on_decode_leg(
        &mut self,
        brought: Result<decode_event::Event, String>,
        now: Moment,
        progress: &mut Progress,
    ) {
        match brought {
            Ok(event) => self.on_decode(event, now, progress),
            Err(end) => self.on_decode_end(&end),
        }
    }

    /// A report on the Decode stream.
    pub fn on_decode(&mut self, event: decode_event::Event, now: Moment, progress: &mut Progress) {
        let task = Arc::clone(&self.task);
        let target = task.target();
        if self.ended || self.closing.is_some() {
            return;
        }
        let illegal = progress.illegal().len();
        if self.recomputing {
            self.while_recomputing(target, event, now, progress);
        } else {
            self.take_decode(target, event, now, progress);
        }
        self.end_if_illegal(illegal, target, progress);
    }

    /// The word to recompute and the worker's own reports cross on their way.
    fn while_recomputing(
        &mut self,
        target: &Party,
        event: decode_event::Event,
        now: Moment,
        progress: &mut Progress,
    ) {
        use decode_event::Event;
        match event {
            // About the hand-off that was given up.
            Event::TransferStarted(_) | Event::TransferCompleted(_) | Event::TransferFailed(_) => {
                return;
            }
            // The hand-off was proven before the word came, and the worker goes on with its KV: nothing is computed again.
            Event::DecodeStarted(_) | Event::Token(_) => {
                let detail = || StateDetail::of(target).inferred();
                for state in [State::PrefillStarted, State::PrefillCompleted] {
                    progress.observe(state, now, detail());
                }
                self.recomputing = false;
            }
            Event::PrefillStarted(_) | Event::PrefillCompleted(_) => self.recomputing = false,
            Event::Refused(_) | Event::Reserved(_) | Event::Finished(_) | Event::Failed(_) => {}
        }
        self.take_decode(target, event, now, progress);
    }

    fn take_decode(
        &mut self,
        target: &Party,
        event: decode_event::Event,
        now: Moment,
        progress: &mut Progress,
    ) {
        use decode_event::Event;
        let detail = || StateDetail::of(target);
        match event {
            Event::Refused(refused) => self.fail(Failure::refused(&target.worker, &refused)),
            Event::Failed(failed) => self.fail(Failure::failed(
                &target.worker,
                &failed,
                FailureClass::DecodeLost,
            )),
            Event::Reserved(admission) => self.reserved(target, admission, now, progress),
            Event::PrefillStarted(started) => {
                self.decode = DecodeLeg::Prefilling(now);
                progress.actual.queue = Some(started.queue_milliseconds);
                progress.observe(State::PrefillStarted, now, detail());
            }
            Event::PrefillCompleted(done) => {
                self.decode = DecodeLeg::Ready(now);
                progress.actual.queue = Some(done.queue_milliseconds);
                progress.actual.prefill = Some(done.compute_milliseconds);
                progress.found_cached(done.cached_tokens);
                progress.observe(State::PrefillCompleted, now, detail());
            }
            Event::TransferStarted(started) => {
                progress.actual.transport = Some(started.transport.clone());
                self.commands
                    .push_back(Command::Transferring(started.transport));
                // Said again where the reader falls back to another transport: the transfer has begun once.
                if !progress.heard_of(State::KvTransferStarted) {
                    let detail = detail().generation(Some(started.generation));
                    progress.observe(State::KvTransferStarted, now, detail);
                }
            }
            Event::TransferCompleted(done) => {
                self.decode = DecodeLeg::Ready(now);
                let actual = &mut progress.actual;
                actual.bytes = done.bytes;
                actual.blocks = done.blocks;
                actual.transport = Some(done.transport.clone());
                actual.transports_left.clone_from(&done.left);
                actual.transfer = Some(done.exposed_milliseconds);
                actual.transfer_total = Some(done.total_milliseconds);
                actual.synchronization = Some(done.synchronization_milliseconds);
                actual.transfer_retries = done.retries;
                progress.observe(
                    State::KvTransferCompleted,
                    now,
                    detail().generation(self.generation),
                );
                self.commands.push_back(Command::Transferred(done));
            }
            Event::TransferFailed(failed) => {
                progress.actual.transports_left = failed.left;
                if let Some(source) = self.source() {
                    let worker = source.worker.clone();
                    let cause = handoff_cause(&failed.cause);
                    self.hand_off_failed(Failure::handoff(&worker, cause, &failed.message));
                }
            }
            Event::DecodeStarted(_) => {
                self.decode = DecodeLeg::Decoding(now);
                progress.observe(State::DecodeStarted, now, detail());
            }
            Event::Token(token) => {
                self.decode = DecodeLeg::Decoding(now);
                self.deliver(token, target, now, progress);
            }
            // A run that is cancelled from here has no stream left to hear it on: this worker is stopping, and the answer is not
            // complete.
            Event::Finished(finished) if finished.reason() == wire::FinishReason::Cancelled => {
                self.fail(Failure::lost(
                    &target.worker,
                    "it cancelled the operation by itself",
                    FailureClass::DecodeLost,
                ));
            }
            Event::Finished(finished) => self.finished(finished.reason(), now, progress),
        }
    }

    /// The Decode stream is over: broken, or closed by the worker.
    pub fn on_decode_end(&mut self, reason: &str) {
        if self.ended || self.closing.is_some() {
            return;
        }
        let worker = self.target().worker.clone();
        self.fail(Failure::lost(&worker, reason, FailureClass::DecodeLost));
    }

    fn reserved(
        &mut self,
        target: &Party,
        admission: wire::Admission,
        now: Moment,
        progress: &mut Progress,
    ) {
        if !matches!(self.decode, DecodeLeg::Opened(_)) {
            let message = format!("worker {} reserved a second time", target.worker);
            return self.illegal(target, message);
        }
        progress.actual.admission = Some(now.milliseconds_since(self.opened));
        self.decode = DecodeLeg::Reserved(now);
        self.commands.push_back(Command::Admitted {
            party: target.clone(),
            admission,
        });
        if matches!(*self.task, Task::Split { .. }) && self.prefill == PrefillLeg::Closed {
            self.prefill = PrefillLeg::Opened(now);
            self.commands.push_back(Command::OpenPrefill {
                skip_blocks: admission.cached_tokens / self.block_size,
            });
        }
    }
}

//! Reports of the worker that computes the prompt for another one.

use std::sync::Arc;

use baton_protocol::failure::FailureClass;
use baton_protocol::lifecycle::State;
use baton_protocol::wire::{self, decode_request, prefill_event};

use super::{Attempt, Command, PrefillLeg};
use crate::clock::Moment;
use crate::dispatch::failure::Failure;
use crate::dispatch::progress::{Party, Progress, StateDetail};

impl Attempt {
    /// A report on the Prefill stream.
    pub fn on_prefill(
        &mut self,
        event: prefill_event::Event,
        now: Moment,
        progress: &mut Progress,
    ) {
        let task = Arc::clone(&self.task);
        let Some(source) = task.source() else {
            return;
        };
        if self.ended || self.undecided || self.prefill == PrefillLeg::Closed {
            return;
        }
        let illegal = progress.illegal().len();
        self.take_prefill(source, event, now, progress);
        self.end_if_illegal(illegal, source, progress);
    }

    fn take_prefill(
        &mut self,
        source: &Party,
        event: prefill_event::Event,
        now: Moment,
        progress: &mut Progress,
    ) {
        use prefill_event::Event;
        match event {
            Event::Refused(refused) => self.fail(Failure::refused(&source.worker, &refused)),
            Event::Failed(failed) => self.fail(Failure::failed(
                &source.worker,
                &failed,
                FailureClass::PrefillLost,
            )),
            Event::Lease(opened) => self.lease_opened(source, opened),
            Event::Started(started) if matches!(self.prefill, PrefillLeg::Opened(_)) => {
                self.prefill_started(source, started.queue_milliseconds, now, progress);
            }
            // The history has it already, from the same report or from the seal.
            Event::Started(_) => {
                progress.observe(State::PrefillStarted, now, StateDetail::of(source));
            }
            Event::Published(published) => self.published_so_far(published.blocks),
            Event::FirstToken(token) => {
                self.prefill_computed(source, now, progress);
                if self.deliver(token.clone(), source, now, progress) {
                    self.tell_decode(decode_request::Message::FirstToken(token));
                }
            }
            Event::Sealed(sealed) => {
                self.prefill_started(source, sealed.queue_milliseconds, now, progress);
                self.prefill_computed(source, now, progress);
                progress.actual.queue = Some(sealed.queue_milliseconds);
                progress.actual.prefill = Some(sealed.compute_milliseconds);
                self.prefill = PrefillLeg::Sealed(now);
                let detail = StateDetail::of(source).generation(self.generation);
                progress.observe(State::KvPublished, now, detail);
                progress.found_cached(sealed.cached_tokens);
                // The partly filled last block is published by the seal, with the step before it.
                self.published.1 = self.published.1.max(sealed.blocks);
                if let Some((_, reason)) = self.closing {
                    self.complete(reason, now, progress);
                }
            }
        }
    }

    /// The Prefill stream is over. After the seal that is how it ends.
    pub fn on_prefill_end(&mut self, reason: &str, now: Moment, progress: &mut Progress) {
        if self.ended || self.undecided {
            return;
        }
        match self.prefill {
            PrefillLeg::Closed | PrefillLeg::Sealed(_) => {}
            PrefillLeg::Opened(_) | PrefillLeg::Started(_) => {
                if let Some((_, finish)) = self.closing {
                    self.complete(finish, now, progress);
                } else if let Some(source) = self.source() {
                    let worker = source.worker.clone();
                    self.fail(Failure::lost(&worker, reason, FailureClass::PrefillLost));
                }
            }
        }
    }

    fn lease_opened(&mut self, source: &Party, opened: wire::LeaseOpened) {
        if let Some(admission) = opened.admission {
            self.commands.push_back(Command::Admitted {
                party: source.clone(),
                admission,
            });
        }
        if let Some(descriptor) = opened.descriptor {
            if self.generation.is_some() {
                // Its reader takes one: a second lease could only be left behind.
                let message = format!("worker {} opened a second lease", source.worker);
                return self.illegal(source, message);
            }
            self.generation = Some(descriptor.generation);
            self.tell_decode(decode_request::Message::Descriptor(descriptor));
        }
    }

    fn published_so_far(&mut self, blocks: u32) {
        if blocks > self.published.1 {
            self.published = (self.published.1, blocks);
        }
    }

    fn prefill_started(
        &mut self,
        source: &Party,
        queue: f64,
        now: Moment,
        progress: &mut Progress,
    ) {
        if matches!(self.prefill, PrefillLeg::Opened(_)) {
            self.prefill = PrefillLeg::Started(now);
            progress.actual.queue = Some(queue);
            let detail = StateDetail::of(source).generation(self.generation);
            progress.observe(State::PrefillStarted, now, detail);
        }
    }

    fn prefill_computed(&mut self, source: &Party, now: Moment, progress: &mut Progress) {
        if !progress.has(State::PrefillCompleted) {
            let detail = StateDetail::of(source).generation(self.generation);
            progress.observe(State::PrefillCompleted, now, detail);
        }
    }
}

//! The spans of a Decode operation, from what it reports. Pure.
//!
//! `prefill` and `decode` where the prompt is computed here; `transfer` and `decode` after a hand-off; all of them when a hand-off
//! failed and its rest was computed here.

use baton_protocol::failure::FailureClass;
use baton_protocol::wire::decode_event::Event;
use baton_protocol::wire::{Finished, PrefillDone, TransferCompleted, TransferFailed};
use baton_telemetry::context::TraceContext;
use baton_telemetry::span::{Kind, Span};

use super::{Traced, cancelled};

/// One Decode operation.
#[derive(Debug)]
pub(crate) struct DecodeTrace {
    traced: Traced,
    prompt_tokens: usize,
    /// Since when this worker could compute the prompt: its admission, or the word to recompute.
    admitted: u64,
    prefill: Option<u64>,
    /// When the transfer was asked for.
    asked: Option<u64>,
    transfer: Option<u64>,
    generation: Option<u64>,
    decode: Option<u64>,
    tokens: u32,
    spans: Vec<Span>,
}

impl DecodeTrace {
    pub(crate) fn new(traced: Traced, prompt_tokens: usize, at: u64) -> Self {
        Self {
            traced,
            prompt_tokens,
            admitted: at,
            prefill: None,
            asked: None,
            transfer: None,
            generation: None,
            decode: None,
            tokens: 0,
            spans: Vec::new(),
        }
    }

    /// Where the span of the transfer will be, for the worker that is read from.
    pub(crate) fn transfer_place(&self) -> TraceContext {
        self.traced.place("transfer")
    }

    /// The descriptor came at `at`.
    pub(crate) fn transfer_asked(&mut self, at: Option<u64>) {
        self.asked = self.asked.or(at);
    }

    /// The router has said to compute here what was to be handed over, as an attempt of its own.
    pub(crate) fn recomputes(&mut self, parent: Option<TraceContext>, at: u64) {
        self.abandon(at);
        self.admitted = at;
        if let Some(parent) = parent {
            self.traced.parent = parent;
            self.traced.attempt += 1;
        }
    }

    /// Something is reported at `at`.
    pub(crate) fn reported(&mut self, event: &Event, at: u64) {
        match event {
            Event::Reserved(_) => {}
            Event::PrefillStarted(_) => self.prefill = Some(at),
            Event::PrefillCompleted(done) => self.prefilled(done, at),
            Event::TransferStarted(started) => {
                self.transfer = Some(at);
                self.generation = Some(started.generation);
            }
            Event::TransferCompleted(done) => self.transferred(done, at),
            Event::TransferFailed(failed) => self.not_transferred(failed, at),
            Event::DecodeStarted(_) => self.decode = Some(at),
            Event::Token(_) => self.tokens += 1,
            Event::Finished(finished) => self.finished(finished, at),
            Event::Failed(failed) => {
                if failed.class == FailureClass::ClientGone.word() {
                    self.abandon(at);
                } else {
                    let mut span = self.open_span(at).unwrap_or_else(|| self.decode_span(at));
                    span.fail(&failed.class, failed.message.clone());
                    self.spans.push(span);
                    self.close();
                }
            }
            Event::Refused(refused) => {
                let mut span = self.decode_span(at);
                span.fail(&refused.reason, refused.message.clone());
                self.spans.push(span);
            }
        }
    }

    /// The operation is over. What is still open then was cancelled.
    pub(crate) fn end(mut self, at: u64) -> Vec<Span> {
        self.abandon(at);
        self.spans
    }

    fn prefilled(&mut self, done: &PrefillDone, at: u64) {
        let mut span = self.prefill_span(at);
        span.attributes
            .set("baton.queue_milliseconds", done.queue_milliseconds)
            .set("baton.compute_milliseconds", done.compute_milliseconds)
            .set("baton.cached_tokens", done.cached_tokens);
        self.spans.push(span);
        self.prefill = None;
    }

    fn transferred(&mut self, done: &TransferCompleted, at: u64) {
        // Whoever measured it says when it began: with the claim, before it was granted and reported.
        let measured = at.saturating_sub((done.total_milliseconds * 1_000.0) as u64);
        self.transfer = Some(self.transfer.map_or(measured, |begin| begin.min(measured)));
        let mut span = self.transfer_span(at);
        span.attributes
            .set("baton.transport", done.transport.clone())
            .set("baton.bytes", done.bytes)
            .set("baton.blocks", done.blocks)
            .set("baton.exposed_milliseconds", done.exposed_milliseconds)
            .set(
                "baton.synchronization_milliseconds",
                done.synchronization_milliseconds,
            )
            .set("baton.retries", done.retries);
        self.spans.push(span);
        self.transfer = None;
    }

    fn not_transferred(&mut self, failed: &TransferFailed, at: u64) {
        let mut span = self.transfer_span(at);
        span.fail(&failed.cause, failed.message.clone());
        span.attributes
            .set("baton.verified_blocks", failed.verified_blocks);
        self.spans.push(span);
        self.transfer = None;
    }

    fn finished(&mut self, finished: &Finished, at: u64) {
        use baton_protocol::wire::FinishReason;
        if finished.reason() == FinishReason::Cancelled {
            self.abandon(at);
            return;
        }
        // An answer may be over with the token that ends the prompt's computation: then nothing was decoded.
        if self.decode.is_some() {
            let mut span = self.decode_span(at);
            let reason = match finished.reason() {
                FinishReason::Length => "length",
                _ => "stop",
            };
            span.attributes
                .set("gen_ai.response.finish_reasons", vec![reason.to_owned()])
                .set("gen_ai.usage.output_tokens", finished.output_tokens)
                .set("baton.decode_milliseconds", finished.decode_milliseconds);
            self.spans.push(span);
        }
        self.close();
    }

    /// Ends what is open: the run was cancelled, or goes on in another way.
    fn abandon(&mut self, at: u64) {
        if let Some(mut span) = self.open_span(at) {
            cancelled(&mut span);
            self.spans.push(span);
        }
        self.close();
    }

    fn close(&mut self) {
        self.prefill = None;
        self.transfer = None;
        self.decode = None;
    }

    fn open_span(&self, at: u64) -> Option<Span> {
        if self.decode.is_some() {
            Some(self.decode_span(at))
        } else if self.transfer.is_some() {
            Some(self.transfer_span(at))
        } else if self.prefill.is_some() {
            Some(self.prefill_span(at))
        } else {
            None
        }
    }

    fn prefill_span(&self, at: u64) -> Span {
        let mut span = self
            .traced
            .span("prefill", Kind::Server, (self.admitted, at));
        span.attributes
            .set("gen_ai.usage.input_tokens", self.prompt_tokens);
        span
    }

    fn transfer_span(&self, at: u64) -> Span {
        // With the claim, before it was granted and reported.
        let begin = self.asked.or(self.transfer).unwrap_or(at);
        let mut span = self.traced.span("transfer", Kind::Client, (begin, at));
        span.attributes.maybe("baton.generation", self.generation);
        span
    }

    fn decode_span(&self, at: u64) -> Span {
        let begin = self.decode.unwrap_or(self.admitted);
        let mut span = self.traced.span("decode", Kind::Server, (begin, at));
        span.attributes.set("baton.tokens", self.tokens);
        span
    }
}

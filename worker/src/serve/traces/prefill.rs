//! The span of a Prefill operation, from what it reports. Pure.

use baton_protocol::failure::FailureClass;
use baton_protocol::wire::prefill_event::Event;
use baton_telemetry::span::{Attributes, Kind, Span, SpanEvent};

use super::{Traced, cancelled};

/// One Prefill operation: `prefill`, from its admission to its seal.
#[derive(Debug)]
pub(crate) struct PrefillTrace {
    traced: Traced,
    begin: u64,
    blocks: u32,
    attributes: Attributes,
    events: Vec<SpanEvent>,
}

impl PrefillTrace {
    pub(crate) fn new(traced: Traced, prompt_tokens: usize, begin: u64) -> Self {
        let mut attributes = Attributes::default();
        attributes.set("gen_ai.usage.input_tokens", prompt_tokens);
        Self {
            traced,
            begin,
            blocks: 0,
            attributes,
            events: Vec::new(),
        }
    }

    /// Something is reported at `at`; the span, when it was the last report.
    pub(crate) fn reported(&mut self, event: &Event, at: u64) -> Option<Span> {
        match event {
            Event::Lease(opened) => {
                self.happened("lease_opened", at);
                let descriptor = opened.descriptor.as_ref();
                self.attributes.maybe(
                    "baton.generation",
                    descriptor.map(|descriptor| descriptor.generation),
                );
                None
            }
            Event::Started(started) => {
                self.happened("prefill_started", at);
                self.attributes
                    .set("baton.queue_milliseconds", started.queue_milliseconds);
                None
            }
            Event::FirstToken(_) => {
                self.happened("first_token", at);
                None
            }
            Event::Published(published) => {
                self.blocks = published.blocks;
                None
            }
            Event::Sealed(sealed) => {
                self.happened("kv_published", at);
                self.blocks = sealed.blocks;
                self.attributes
                    .set("baton.queue_milliseconds", sealed.queue_milliseconds)
                    .set("baton.compute_milliseconds", sealed.compute_milliseconds)
                    .set("baton.cached_tokens", sealed.cached_tokens);
                Some(self.span(at))
            }
            Event::Failed(failed) => {
                let mut span = self.span(at);
                if failed.class == FailureClass::ClientGone.word() {
                    cancelled(&mut span);
                } else {
                    span.fail(&failed.class, failed.message.clone());
                }
                Some(span)
            }
            Event::Refused(refused) => {
                let mut span = self.span(at);
                span.fail(&refused.reason, refused.message.clone());
                Some(span)
            }
        }
    }

    fn happened(&mut self, name: &str, at: u64) {
        self.events.push(SpanEvent {
            name: name.to_owned(),
            at,
            attributes: Attributes::default(),
        });
    }

    fn span(&mut self, end: u64) -> Span {
        let mut span = self.traced.span("prefill", Kind::Server, (self.begin, end));
        for (name, value) in std::mem::take(&mut self.attributes) {
            span.attributes.set(name, value);
        }
        span.attributes.set("baton.blocks", self.blocks);
        span.events = std::mem::take(&mut self.events);
        span
    }
}

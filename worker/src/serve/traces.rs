//! Spans of what this worker does for runs that their routers trace.
//!
//! - `decode`, `prefill`: from what an operation reports to its router to its spans, pure. [`Traces`]: what they share, and the
//!   reads that other workers make here.

mod decode;
mod prefill;

use std::collections::HashMap;

use baton_protocol::card::Card;
use baton_protocol::ids::TransferId;
use baton_protocol::wire;
use baton_telemetry::anchor::Anchor;
use baton_telemetry::context::TraceContext;
use baton_telemetry::span::{Kind, Span};
use baton_telemetry::tracer::Tracer;
use parking_lot::Mutex;

pub(crate) use decode::DecodeTrace;
pub(crate) use prefill::PrefillTrace;

/// Traced reads that have not ended: as many as a large worker has leases; of more nothing is traced.
const READS: usize = 4096;
/// Microseconds after which a read that nobody has ended is forgotten: the longest that an operation may take.
const LONGEST_READ: u64 = 3_600_000_000;

/// What the spans of one worker share.
#[derive(Debug)]
pub(crate) struct Traces {
    tracer: Tracer,
    anchor: Anchor,
    worker: String,
    incarnation: String,
    reads: Mutex<HashMap<TransferId, Read>>,
}

/// Another worker reads KV here.
#[derive(Debug)]
struct Read {
    parent: TraceContext,
    begin: u64,
    reader: String,
    generation: u64,
}

/// An operation that is traced: where its spans hang, and what all of them say.
#[derive(Clone, Debug)]
pub(crate) struct Traced {
    parent: TraceContext,
    run: String,
    attempt: u32,
    operation: String,
    worker: String,
    incarnation: String,
}

impl Traces {
    pub(crate) fn new(tracer: Tracer, card: &Card) -> Self {
        Self {
            tracer,
            anchor: Anchor::start(),
            worker: card.worker.to_string(),
            incarnation: card.incarnation.to_string(),
            reads: Mutex::default(),
        }
    }

    /// Microseconds since the Unix epoch.
    pub(crate) fn now(&self) -> u64 {
        self.anchor.now()
    }

    pub(crate) fn put(&self, spans: impl IntoIterator<Item = Span>) {
        self.tracer.put(spans);
    }

    /// `None`: the operation is not traced.
    pub(crate) fn operation(&self, operation: &wire::Operation) -> Option<Traced> {
        Some(Traced {
            parent: self.tracer.under(&operation.traceparent)?,
            run: operation.run.clone(),
            attempt: operation.attempt,
            operation: operation.id.clone(),
            worker: self.worker.clone(),
            incarnation: self.incarnation.clone(),
        })
    }

    /// Where a router moves what is done from now on.
    pub(crate) fn moved(&self, traceparent: &str) -> Option<TraceContext> {
        self.tracer.under(traceparent)
    }

    /// A claim was granted.
    pub(crate) fn claimed(
        &self,
        transfer: &TransferId,
        traceparent: &str,
        generation: u64,
        reader: &str,
    ) {
        let Some(parent) = self.tracer.under(traceparent) else {
            return;
        };
        let mut reads = self.reads.lock();
        if reads.len() < READS {
            // A claim that is repeated is the same read.
            reads.entry(transfer.clone()).or_insert_with(|| Read {
                parent,
                begin: self.anchor.now(),
                reader: reader.to_owned(),
                generation,
            });
        }
    }

    /// The reader is done, and says whether what it read was right.
    pub(crate) fn completed(&self, transfer: &TransferId, verified: bool, stale: bool) {
        let Some(read) = self.reads.lock().remove(transfer) else {
            return;
        };
        let context = read.parent.child("transfer", &transfer.0);
        let times = (read.begin, self.anchor.now());
        let mut span = Span::new(
            &context,
            Some(&read.parent),
            "transfer",
            Kind::Server,
            times,
        );
        span.attributes
            .set("baton.worker", self.worker.clone())
            .set("baton.incarnation", self.incarnation.clone())
            .set("baton.reader", read.reader)
            .set("baton.generation", read.generation)
            .set("baton.verified", verified);
        if stale {
            span.fail("stale", "the lease ended before the read did");
        } else if !verified {
            span.fail("unverified", "the reader could not use what it read");
        }
        self.put([span]);
    }

    /// Forgets reads that their readers have never ended.
    pub(crate) fn forget(&self) {
        let now = self.anchor.now();
        self.reads
            .lock()
            .retain(|_, read| now.saturating_sub(read.begin) < LONGEST_READ);
    }
}

impl Traced {
    fn span(&self, name: &'static str, kind: Kind, times: (u64, u64)) -> Span {
        let context = self.place(name);
        let mut span = Span::new(&context, Some(&self.parent), name, kind, times);
        // The router's, whatever the kind.
        span.parent_is_remote = true;
        span.attributes
            .set("baton.run", self.run.clone())
            .set("baton.attempt", self.attempt)
            .set("baton.operation", self.operation.clone())
            .set("baton.worker", self.worker.clone())
            .set("baton.incarnation", self.incarnation.clone());
        span
    }

    /// Place of a span of this operation.
    fn place(&self, name: &str) -> TraceContext {
        self.parent.child(name, &self.operation)
    }
}

/// It was cancelled: nobody's fault.
fn cancelled(span: &mut Span) {
    span.attributes.set("baton.status", "Cancelled");
}

#[cfg(test)]
mod tests;

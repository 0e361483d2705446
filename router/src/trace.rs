//! The trace of a run: what is kept for it while it runs, and its spans once it is over.
//!
//! Ids follow from the run's own (see [`baton_telemetry::context`]), so a worker can be told the place of its spans before that
//! place exists. Nothing is kept for a run that is not sampled. [`spans`] makes the spans, from the run's history.

pub mod spans;

use baton_telemetry::context::TraceContext;
use baton_telemetry::tracer::Tracer;

use crate::clock::Moment;
use crate::dispatch::attempt::Task;
use crate::dispatch::failure::Failure;
use crate::dispatch::progress::Actual;

/// A call to a worker that has a span of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leg {
    Prefill,
    Decode,
}

impl Leg {
    pub fn word(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// The trace of one run.
#[derive(Clone, Debug, Default)]
pub struct RunTrace {
    /// The client's.
    parent: Option<TraceContext>,
    /// `None`: this router traces nothing.
    root: Option<TraceContext>,
    /// What the next attempt was placed by.
    search: Option<Search>,
    attempts: Vec<AttemptTrace>,
}

/// A search for workers, and what it came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Search {
    pub since: Moment,
    /// The decision's one word.
    pub reason: String,
    pub candidates: usize,
    /// Estimated milliseconds to the first token of the plan that was chosen, and the bound that 95 of 100 stay below.
    pub estimate: Option<(f64, f64)>,
}

/// What an attempt's spans say that the run's history does not.
#[derive(Clone, Debug)]
struct AttemptTrace {
    attempt: u32,
    /// `None`: it goes on where the one before was, over the same stream.
    search: Option<Search>,
    task: Task,
    prefill_opened: Option<Moment>,
    ended: Option<Moment>,
    failure: Option<Failure>,
    actual: Actual,
}

impl RunTrace {
    pub fn begin(tracer: &Tracer, parent: Option<TraceContext>, run: &str) -> Self {
        Self {
            root: tracer.root(parent.as_ref(), run),
            parent,
            ..Self::default()
        }
    }

    /// What a worker is told: the place under which its spans hang. A router that traces nothing passes the client's on.
    pub fn traceparent(&self, attempt: u32, leg: Leg) -> String {
        match (&self.root, &self.parent) {
            (Some(root), _) => leg_of(root, attempt, leg).traceparent(),
            (None, Some(parent)) => parent.traceparent(),
            (None, None) => String::new(),
        }
    }

    /// `None`: nothing is to be kept.
    fn recorded(&self) -> Option<&TraceContext> {
        self.root.as_ref().filter(|root| root.sampled)
    }

    /// Workers were looked for; `search` says with what result.
    pub fn searched(&mut self, search: impl FnOnce() -> Search) {
        if self.recorded().is_some() {
            self.search = Some(search());
        }
    }

    pub fn attempt_began(&mut self, attempt: u32, task: &Task) {
        if self.recorded().is_some() {
            self.attempts.push(AttemptTrace {
                attempt,
                search: self.search.take(),
                task: task.clone(),
                prefill_opened: None,
                ended: None,
                failure: None,
                actual: Actual::default(),
            });
        }
    }

    pub fn prefill_opened(&mut self, now: Moment) {
        if let Some(attempt) = self.attempts.last_mut() {
            attempt.prefill_opened = Some(now);
        }
    }

    pub fn attempt_ended(&mut self, now: Moment, failure: Option<&Failure>, actual: &Actual) {
        if let Some(attempt) = self.attempts.last_mut() {
            attempt.ended = Some(now);
            attempt.failure = failure.cloned();
            attempt.actual = actual.clone();
        }
    }
}

fn leg_of(root: &TraceContext, attempt: u32, leg: Leg) -> TraceContext {
    root.child(leg.word(), &attempt.to_string())
}

#[cfg(test)]
mod tests;

//! Spans of a run that is over. Pure.
//!
//! `accept` holds the run, and as events its whole history. Under it, for each attempt: `place`, the search for workers; `prefill`
//! and `decode`, the two calls, from their opening to their end as this router heard it. The workers hang their own spans under
//! the calls: what they computed, and the `transfer`. So a worker that dies takes no more than its own part along.

use baton_placement::record::{RunOutcome, RunStatus};
use baton_protocol::ids::RunId;
use baton_protocol::lifecycle::{Event, Plan, State};
use baton_telemetry::context::TraceContext;
use baton_telemetry::span::{Attributes, Kind, Span, SpanEvent};

use super::{AttemptTrace, Leg, RunTrace, leg_of};
use crate::dispatch::failure::Failure;
use crate::dispatch::progress::{Party, Progress, StateDetail};
use crate::run::RunRequest;

/// What the spans say about the run as a whole.
#[derive(Clone, Copy, Debug)]
pub struct About<'a> {
    pub run: &'a RunId,
    pub request: &'a RunRequest,
    pub progress: &'a Progress,
    pub outcome: &'a RunOutcome,
    /// Why it got no answer.
    pub failure: Option<&'a Failure>,
}

/// The run's spans, the root first; none where it is not sampled.
pub fn of_run(trace: &RunTrace, about: About<'_>) -> Vec<Span> {
    let (Some(root), Some(last)) = (trace.recorded(), about.progress.history().last()) else {
        return Vec::new();
    };
    let end = last.at;
    let mut spans = vec![accept(root, trace.parent.as_ref(), &about, end)];
    for attempt in &trace.attempts {
        Attempt {
            root,
            of: attempt,
            about: &about,
            end: attempt.ended.map_or(end, |ended| ended.0.min(end)),
        }
        .spans_into(&mut spans);
    }
    // Workers were looked for in vain, at first or after the last attempt.
    if let (Some(search), Some(failure)) = (&trace.search, about.failure) {
        let attempt = about.progress.attempt() + 1;
        let context = root.child("place", &attempt.to_string());
        let times = (search.since.0, end);
        let mut place = Span::new(&context, Some(root), "place", Kind::Internal, times);
        place
            .attributes
            .set("baton.run", about.run.to_string())
            .set("baton.attempt", attempt)
            .set("baton.reason", search.reason.clone())
            .set("baton.candidates", search.candidates);
        fail(&mut place, failure);
        spans.push(place);
    }
    spans
}

fn accept(root: &TraceContext, parent: Option<&TraceContext>, about: &About<'_>, end: u64) -> Span {
    let (request, outcome) = (about.request, about.outcome);
    let times = (about.progress.accepted().0, end);
    let mut span = Span::new(root, parent, "accept", Kind::Server, times);
    let policy = &request.policy;
    let sampling = &request.sampling;
    let attributes = &mut span.attributes;
    attributes
        .set("gen_ai.operation.name", request.operation)
        .set("gen_ai.provider.name", "baton")
        .set("gen_ai.request.model", policy.model.clone())
        .set("gen_ai.request.max_tokens", request.stopping.max_tokens)
        .set("gen_ai.request.temperature", sampling.temperature)
        .set("gen_ai.request.top_p", sampling.top_p)
        .set("gen_ai.usage.input_tokens", outcome.input_tokens)
        .set("gen_ai.usage.output_tokens", outcome.output_tokens)
        .set(
            "gen_ai.usage.cache_read.input_tokens",
            outcome.cached_tokens,
        )
        .maybe(
            "gen_ai.response.finish_reasons",
            outcome.finish_reason.clone().map(|reason| vec![reason]),
        )
        .set("baton.run", about.run.to_string())
        .set("baton.request_id", request.request_id.clone())
        .set("baton.policy", policy.name.clone())
        .set("baton.policy.generation", policy.generation)
        .set("baton.attempts", about.progress.attempt())
        .set("baton.status", status(outcome.status))
        .maybe("baton.ttft_milliseconds", outcome.ttft_milliseconds)
        .maybe("baton.tpot_milliseconds", outcome.tpot_milliseconds)
        .maybe(
            "baton.fallback",
            about
                .progress
                .fallback
                .as_ref()
                .map(|fallback| fallback.cause.clone()),
        );
    // 0 is the wire's word for "all": nobody asked for a number.
    if sampling.top_k > 0 {
        span.attributes.set("gen_ai.request.top_k", sampling.top_k);
    }
    span.events = about.progress.history().iter().map(state_event).collect();
    if let Some(failure) = about.failure {
        fail(&mut span, failure);
    }
    span
}

fn status(status: RunStatus) -> &'static str {
    match status {
        RunStatus::Completed => "Completed",
        RunStatus::Failed => "Failed",
        RunStatus::Cancelled => "Cancelled",
        RunStatus::Rejected => "Rejected",
    }
}

fn state_event(event: &Event<StateDetail>) -> SpanEvent {
    let mut attributes = Attributes::default();
    let detail = &event.detail;
    attributes
        .set("baton.attempt", event.attempt)
        .maybe(
            "baton.worker",
            detail.worker.as_ref().map(ToString::to_string),
        )
        .maybe("baton.generation", detail.generation);
    if detail.inferred {
        attributes.set("baton.inferred", true);
    }
    SpanEvent {
        name: event.state.word().to_owned(),
        at: event.at,
        attributes,
    }
}

fn fail(span: &mut Span, failure: &Failure) {
    span.fail(failure.cause, failure.message.clone());
    span.attributes
        .set("baton.failure", failure.class.word())
        .maybe(
            "baton.failure.worker",
            failure.worker.as_ref().map(ToString::to_string),
        );
}

/// One attempt of a run.
struct Attempt<'a> {
    root: &'a TraceContext,
    of: &'a AttemptTrace,
    about: &'a About<'a>,
    /// Microseconds.
    end: u64,
}

impl Attempt<'_> {
    fn spans_into(&self, spans: &mut Vec<Span>) {
        let selected = self.time_of(State::RouteSelected).unwrap_or(self.end);
        spans.extend(self.place(selected));
        let task = &self.of.task;
        if let (Some(source), Some(opened)) = (task.source(), self.of.prefill_opened) {
            spans.push(self.prefill(source, opened.0));
        }
        spans.push(self.decode(task.target(), selected));
    }

    fn time_of(&self, state: State) -> Option<u64> {
        let mut history = self.about.progress.history().iter();
        history
            .find(|event| event.state == state && event.attempt == self.of.attempt)
            .map(|event| event.at)
    }

    fn place(&self, selected: u64) -> Option<Span> {
        let search = self.of.search.as_ref()?;
        let context = self.root.child("place", &self.of.attempt.to_string());
        let times = (search.since.0, selected);
        let mut span = Span::new(&context, Some(self.root), "place", Kind::Internal, times);
        let task = &self.of.task;
        let plan = match task.plan() {
            Plan::Local => "local",
            Plan::Remote => "remote",
        };
        span.attributes
            .set("baton.run", self.about.run.to_string())
            .set("baton.attempt", self.of.attempt)
            .set("baton.plan", plan)
            .set("baton.reason", search.reason.clone())
            .set("baton.candidates", search.candidates)
            .maybe(
                "baton.prefill_worker",
                task.source().map(|source| source.worker.to_string()),
            )
            .set("baton.decode_worker", task.target().worker.to_string())
            .maybe(
                "baton.estimate.mean_milliseconds",
                search.estimate.map(|(mean, _)| mean),
            )
            .maybe(
                "baton.estimate.upper_milliseconds",
                search.estimate.map(|(_, upper)| upper),
            );
        Some(span)
    }

    fn prefill(&self, source: &Party, opened: u64) -> Span {
        let end = self.time_of(State::KvPublished).unwrap_or(self.end);
        let mut span = self.leg(Leg::Prefill, source, (opened, end));
        let actual = &self.of.actual;
        span.attributes
            .maybe("baton.queue_milliseconds", actual.queue)
            .maybe("baton.compute_milliseconds", actual.prefill);
        let at_fault = |failure: &&Failure| failure.worker.as_ref() == Some(&source.worker);
        if let Some(failure) = self.of.failure.as_ref().filter(at_fault) {
            fail(&mut span, failure);
        }
        span
    }

    fn decode(&self, target: &Party, opened: u64) -> Span {
        let mut span = self.leg(Leg::Decode, target, (opened, self.end));
        let actual = &self.of.actual;
        span.attributes
            .maybe("baton.admission_milliseconds", actual.admission)
            .maybe("baton.transport", actual.transport.clone());
        if actual.transfer_total.is_some() {
            span.attributes.set("baton.bytes", actual.bytes);
        }
        if let Some(failure) = &self.of.failure {
            fail(&mut span, failure);
        }
        span
    }

    fn leg(&self, leg: Leg, party: &Party, times: (u64, u64)) -> Span {
        let context = leg_of(self.root, self.of.attempt, leg);
        let mut span = Span::new(&context, Some(self.root), leg.word(), Kind::Client, times);
        span.attributes
            .set("baton.run", self.about.run.to_string())
            .set("baton.attempt", self.of.attempt)
            .set("baton.operation", party.operation.to_string())
            .set("baton.worker", party.worker.to_string())
            .set("baton.incarnation", party.incarnation.to_string());
        if !party.domain.is_empty() {
            span.attributes.set("baton.domain", party.domain.clone());
        }
        span
    }
}

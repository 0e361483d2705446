//! Runs of several attempts and their spans.

use std::sync::Arc;

use baton_placement::policy::Policy;
use baton_placement::record::{RunOutcome, RunStatus};
use baton_protocol::failure::{FailureClass, HandoffFailure};
use baton_protocol::ids::{Incarnation, RunId};
use baton_protocol::lifecycle::{Plan, State};
use baton_protocol::wire;
use baton_telemetry::context::TraceContext;
use baton_telemetry::span::{Kind, Span};

use tokio::time::Instant;

use super::spans::{About, of_run};
use super::*;
use crate::dispatch::progress::{Party, Progress, StateDetail};
use crate::policy::PolicyHandle;
use crate::run::RunRequest;

const RUN: &str = "r0-0af7651916cd43dd8448eb211c80319c";

fn party(worker: &str, step: &str) -> Party {
    Party {
        worker: worker.into(),
        incarnation: Incarnation(1),
        domain: "host".to_owned(),
        operation: format!("{RUN}/{step}").into(),
    }
}

fn split() -> Task {
    Task::Split {
        prefill: party("p0", "1/prefill"),
        decode: party("d0", "1/decode"),
        first_token_by_prefill: true,
    }
}

fn whole(worker: &str) -> Task {
    Task::Whole {
        worker: party(worker, "2/decode"),
    }
}

fn traced(sampled: bool) -> RunTrace {
    RunTrace {
        root: Some(TraceContext::root(None, RUN, sampled)),
        ..RunTrace::default()
    }
}

fn search(since: u64) -> Search {
    Search {
        since: Moment(since),
        reason: "RemoteCheaper".to_owned(),
        candidates: 3,
        estimate: Some((12.0, 20.0)),
    }
}

fn spans(
    trace: &RunTrace,
    progress: &Progress,
    status: RunStatus,
    failure: Option<&Failure>,
) -> Vec<Span> {
    let request = RunRequest {
        request_id: "q".to_owned(),
        policy: Arc::new(PolicyHandle::new(
            Policy::new("p", "m", &["prefill"], &["decode"]),
            Moment(0),
        )),
        tokens: vec![1; 8],
        forward: None,
        sampling: wire::Sampling::default(),
        stopping: wire::Stopping::default(),
        cache_salt: "secret".to_owned(),
        priority: 0,
        mode: None,
        splittable: true,
        operation: "chat",
        traceparent: None,
        received: Instant::now(),
    };
    let outcome = RunOutcome {
        status,
        ttft_milliseconds: Some(1.0),
        tpot_milliseconds: None,
        input_tokens: 8,
        cached_tokens: 0,
        output_tokens: 2,
        finish_reason: None,
    };
    let run = RunId::from(RUN);
    of_run(
        trace,
        About {
            run: &run,
            request: &request,
            progress,
            outcome: &outcome,
            failure,
        },
    )
}

fn named<'a>(spans: &'a [Span], name: &str, attempt: u32) -> &'a Span {
    let mut found = spans.iter().filter(|span| {
        span.name == name && span.attributes.get("baton.attempt") == Some(&attempt.into())
    });
    let span = found.next().unwrap();
    assert!(found.next().is_none(), "{name} of attempt {attempt} twice");
    span
}

/// A remote attempt whose source was lost, and the local one that answered.
fn replanned(trace: &mut RunTrace) -> Progress {
    let mut progress = Progress::new(8, Moment(100));
    trace.searched(|| search(110));
    progress.begin(Plan::Remote, Moment(120), StateDetail::default());
    trace.attempt_began(1, &split());
    trace.prefill_opened(Moment(130));
    progress.observe(
        State::PrefillStarted,
        Moment(140),
        StateDetail::of(&party("p0", "1/prefill")),
    );
    let lost = Failure::lost(&"p0".into(), "broken pipe", FailureClass::PrefillLost);
    trace.attempt_ended(Moment(150), Some(&lost), &progress.actual);
    trace.searched(|| search(150));
    progress.begin(Plan::Local, Moment(160), StateDetail::default());
    trace.attempt_began(2, &whole("d1"));
    for (state, at) in [
        (State::PrefillStarted, 170),
        (State::PrefillCompleted, 180),
        (State::DecodeStarted, 190),
        (State::Completed, 200),
    ] {
        progress.observe(state, Moment(at), StateDetail::of(&party("d1", "2/decode")));
    }
    trace.attempt_ended(Moment(201), None, &progress.actual);
    progress
}

#[test]
fn each_attempt_has_its_own_spans_and_the_one_that_failed_says_so() {
    let mut trace = traced(true);
    let progress = replanned(&mut trace);
    let spans = spans(&trace, &progress, RunStatus::Completed, None);
    let mut names: Vec<&str> = spans.iter().map(|span| span.name).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        ["accept", "decode", "decode", "place", "place", "prefill"]
    );
    let root = trace.root.unwrap();
    let accept = &spans[0];
    assert_eq!((accept.id, accept.parent), (root.span, None));
    assert_eq!((accept.begin, accept.end), (100, 200));
    assert!(accept.error.is_none(), "the run was answered");
    let events: Vec<(&str, u64)> = accept
        .events
        .iter()
        .map(|event| (&*event.name, event.at))
        .collect();
    assert_eq!(events.first(), Some(&("accepted", 100)));
    assert_eq!(events.last(), Some(&("completed", 200)));
    assert_eq!(events.len(), progress.history().len());

    for span in &spans[1..] {
        assert_eq!(span.parent, Some(root.span));
        assert!(span.begin >= accept.begin && span.end <= accept.end);
    }
    let (first, second) = (named(&spans, "decode", 1), named(&spans, "decode", 2));
    assert_eq!((first.begin, first.end), (120, 150));
    assert_eq!((second.begin, second.end), (160, 200));
    assert!(first.error.as_ref().unwrap().contains("broken pipe"));
    assert!(second.error.is_none());
    let prefill = named(&spans, "prefill", 1);
    assert_eq!((prefill.begin, prefill.end), (130, 150));
    assert_eq!(
        prefill.attributes.get("error.type"),
        Some(&"prefill-lost".into()),
        "its worker is at fault"
    );
    assert_eq!(prefill.kind, Kind::Client);
    let place = named(&spans, "place", 2);
    assert_eq!((place.begin, place.end), (150, 160));
}

#[test]
fn workers_are_told_the_place_of_the_leg_that_calls_them() {
    let mut trace = traced(true);
    let progress = replanned(&mut trace);
    let spans = spans(&trace, &progress, RunStatus::Completed, None);
    for (attempt, leg) in [(1, Leg::Prefill), (1, Leg::Decode), (2, Leg::Decode)] {
        let told = TraceContext::parse(&trace.traceparent(attempt, leg)).unwrap();
        let span = named(&spans, leg.word(), attempt);
        assert_eq!((told.trace, told.span), (span.trace, span.id));
        assert!(told.sampled);
    }
}

#[test]
fn a_hand_off_that_is_recomputed_in_place_is_an_attempt_without_a_search() {
    let mut trace = traced(true);
    let mut progress = Progress::new(8, Moment(100));
    trace.searched(|| search(110));
    progress.begin(Plan::Remote, Moment(120), StateDetail::default());
    trace.attempt_began(1, &split());
    let failure = Failure::handoff(&"p0".into(), HandoffFailure::ChecksumMismatch, "block 3");
    trace.attempt_ended(Moment(150), Some(&failure), &progress.actual);
    progress.begin(Plan::Local, Moment(150), StateDetail::default().inferred());
    trace.attempt_began(2, &whole("d0"));
    progress.observe(State::Cancelled, Moment(190), StateDetail::default());
    trace.attempt_ended(Moment(190), None, &progress.actual);
    let spans = spans(&trace, &progress, RunStatus::Cancelled, None);
    let names: Vec<&str> = spans.iter().map(|span| span.name).collect();
    assert_eq!(names, ["accept", "place", "decode", "decode"]);
    assert_eq!(
        named(&spans, "decode", 1).attributes.get("error.type"),
        Some(&"checksum-mismatch".into())
    );
    assert_eq!(named(&spans, "decode", 2).end, 190);
    assert_eq!(
        spans[0].attributes.get("baton.status"),
        Some(&"Cancelled".into())
    );
    assert!(spans[0].error.is_none(), "a client that leaves is no error");
}

#[test]
fn a_search_in_vain_is_a_place_that_failed() {
    let mut trace = traced(true);
    let mut progress = Progress::new(8, Moment(100));
    trace.searched(|| search(110));
    progress.observe(State::Failed, Moment(300), StateDetail::default());
    let failure = Failure::new(FailureClass::NoWorker, "all 2 workers are gone");
    let spans = spans(&trace, &progress, RunStatus::Rejected, Some(&failure));
    let names: Vec<&str> = spans.iter().map(|span| span.name).collect();
    assert_eq!(names, ["accept", "place"]);
    for span in &spans {
        assert_eq!(span.error.as_deref(), Some("all 2 workers are gone"));
        assert_eq!(span.end, 300);
    }
    assert_eq!(spans[1].begin, 110);
}

#[test]
fn nothing_is_kept_or_made_of_a_run_that_is_not_sampled() {
    for mut trace in [traced(false), RunTrace::default()] {
        let progress = replanned(&mut trace);
        assert!(trace.attempts.is_empty() && trace.search.is_none());
        assert!(spans(&trace, &progress, RunStatus::Completed, None).is_empty());
    }
}

#[test]
fn a_router_that_traces_nothing_passes_the_client_s_trace_on() {
    let client = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let trace = RunTrace::begin(&Tracer::off(), TraceContext::parse(client), RUN);
    assert_eq!(trace.traceparent(1, Leg::Decode), client);
    let trace = RunTrace::begin(&Tracer::off(), None, RUN);
    assert_eq!(trace.traceparent(1, Leg::Decode), "");
}

#[test]
fn no_span_holds_a_salt_or_a_token() {
    let mut trace = traced(true);
    let progress = replanned(&mut trace);
    let spans = spans(&trace, &progress, RunStatus::Completed, None);
    let shown = format!("{spans:?}");
    assert!(!shown.contains("secret"), "{shown}");
}

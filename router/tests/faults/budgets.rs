//! What runs share: breakers of links and the fallback budget. What a run takes of them comes back, and what it finds out is
//! booked where it was found.

use baton_placement::fleet::BreakerState;
use baton_placement::policy::{Policy, Pooling};
use baton_protocol::lifecycle::State;
use baton_protocol::wire::{self, decode_event::Event, prefill_event::Event as Report};
use baton_router::clock::{Clock, Moment};
use baton_router::run::{Mode, RunEvent};

use crate::double::{ARTIFACT, Double};
use crate::obedient::lease;
use crate::router::{Router, SOON, outcome, until};
use crate::{policy, samples, with_incarnation};

/// One failure opens a link, and after so many seconds one run may try it.
fn strict(open_seconds: f64) -> Policy {
    let mut policy = policy();
    policy.topology.breaker.failures = 1;
    policy.topology.breaker.open_seconds = open_seconds;
    policy
}

async fn pair() -> (Double, Double) {
    let p = Double::start(with_incarnation(samples::prefill_card("p"), 2), ARTIFACT).await;
    let d = Double::start(samples::card("d"), ARTIFACT).await;
    (p, d)
}

/// The next hand-off to `d` fails on its way, over this transport.
fn breaks_over(p: &Double, d: &Double, transport: &'static str) {
    p.prefill(vec![
        lease(),
        Report::Started(wire::Started::default()),
        Report::Sealed(wire::Sealed::default()),
    ]);
    d.decode(async move |requests, answers| {
        answers
            .send(Event::Reserved(wire::Admission::default()))
            .await;
        for event in [
            Event::TransferStarted(wire::TransferStarted {
                transport: transport.to_owned(),
                generation: 9,
            }),
            Event::TransferFailed(wire::TransferFailed {
                cause: "source-lost".to_owned(),
                ..wire::TransferFailed::default()
            }),
        ] {
            answers.send(event).await;
        }
        let from = crate::router::PROMPT;
        crate::obedient::recompute(requests, answers, from, from + 2).await;
    });
}

async fn served(router: &Router, mode: Mode) {
    let (_, last) = outcome(router.start_run(mode, 2)).await;
    assert!(matches!(last, RunEvent::Finished { .. }), "{last:?}");
    router.holds_nothing().await;
}

#[tokio::test]
async fn a_failed_transfer_speaks_against_the_way_that_was_taken() {
    let (p, d) = pair().await;
    let router = Router::start(&strict(60.0), &[&p, &d]);
    router.ready(2).await;
    breaks_over(&p, &d, "Rdma");
    served(&router, Mode::Disaggregated).await;
    let shut = router.learning.links(Clock::start().now()).shut;
    let shut: Vec<_> = shut
        .iter()
        .map(|(link, state)| (link.transport.as_str(), *state))
        .collect();
    let taken = ("Rdma", BreakerState::Open);
    assert_eq!(shut, [taken], "not the one that was planned");
}

#[tokio::test]
async fn a_probe_that_finds_out_nothing_is_given_back() {
    let (p, d) = pair().await;
    let router = Router::start(&strict(1.0), &[&p, &d]);
    router.ready(2).await;
    breaks_over(&p, &d, "Tcp");
    let clock = router.workers.clock;
    let may_be_tried = |at: Moment| router.learning.link_counts(at).half_open == 1;
    let before = clock.now();
    served(&router, Mode::Disaggregated).await;
    assert_eq!(router.learning.link_counts(before).open, 1);
    until("the link may be tried", || may_be_tried(clock.now())).await;
    // Later looks are as of now: a probe that has taken as long as the link was open is given up for lost, which would look the same.
    let now = clock.now();

    // The run that tries it is left by its client before anything has moved.
    let mut calls = d.direct();
    let client = router.start_run(Mode::Disaggregated, 2);
    let call = calls.decodes.recv().await.unwrap();
    assert!(!may_be_tried(now), "one at a time");
    drop(client);
    router.entered(State::Cancelled, 1).await;
    router.holds_nothing().await;
    until("the next run may try it", || may_be_tried(now)).await;
    drop(call);
    p.obey();
    d.obey();
    served(&router, Mode::Disaggregated).await;
    assert_eq!(router.learning.link_counts(clock.now()).closed, 1);
}

#[tokio::test]
async fn a_recompute_that_its_worker_refuses_costs_no_budget() {
    let p = Double::start(with_incarnation(samples::prefill_card("p"), 3), ARTIFACT).await;
    let first = Double::start(samples::card("d0"), ARTIFACT).await;
    let second = Double::start(with_incarnation(samples::card("d1"), 2), ARTIFACT).await;
    let mut policy = policy();
    policy.fallback.replans = 0;
    policy.fallback.local_recompute.max_percent = 1.0;
    policy.pooling = Pooling::Strict;
    let router = Router::start(&policy, &[&p, &first, &second]);
    router.ready(3).await;
    second.obey();
    // The budget has four to begin with. Each of these runs asks for two, and uses one.
    for run in 0..4 {
        p.prefill(vec![Report::Failed(wire::Failed::default())]);
        first.decode(async |_requests, answers| {
            answers
                .send(Event::Reserved(wire::Admission::default()))
                .await;
            answers.closed().await;
        });
        first.decode(async |_requests, answers| {
            let refused = wire::Refused {
                reason: "pool-full".to_owned(),
                ..wire::Refused::default()
            };
            answers.send(Event::Refused(refused)).await;
        });
        let handle = router.start_run(Mode::Disaggregated, 2);
        let id = handle.run.to_string();
        let (tokens, last) = tokio::time::timeout(SOON, outcome(handle)).await.unwrap();
        assert_eq!(tokens.len(), 2, "run {run}: {last:?}");
        let record = router.record(&id).await;
        assert_eq!(record.fallback.unwrap().cause, "prefill-lost");
        assert_eq!(record.states.last().unwrap().attempt, 3);
        router.holds_nothing().await;
    }
    // Nor is it free: the fifth is refused, with a time to come back.
    p.prefill(vec![Report::Failed(wire::Failed::default())]);
    first.decode(async |_requests, answers| {
        answers
            .send(Event::Reserved(wire::Admission::default()))
            .await;
        answers.closed().await;
    });
    let (_, last) = outcome(router.start_run(Mode::Disaggregated, 2)).await;
    let RunEvent::Failed(failure) = last else {
        panic!("the budget is spent: {last:?}");
    };
    assert_eq!((failure.status, failure.code), (503, "prefill_lost"));
    assert!(
        failure.message.contains("maxPercent"),
        "{}",
        failure.message
    );
    assert!(failure.retry_after_seconds.is_some());
    router.holds_nothing().await;
}

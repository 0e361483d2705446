//! Every way in which a leg of a hand-off can fail, and what becomes of the run.

use std::time::Duration;

use baton_placement::policy::Policy;
use baton_protocol::wire::{self, watch_event};

use crate::engine::{Call, Engine};
use crate::front::{Served, end};
use crate::pull::{ANSWER, prefill_answer};
use crate::router::until;
use crate::steady::steady;
use crate::{NIXL, pair, policy};

/// What an engine does with a leg.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    /// Closes the connection, as a process does that dies.
    Dies,
    Says(u16),
    /// Answers well, but without saying how its KV is fetched.
    NoParameters,
    /// Answers, and dies in the middle of it.
    DiesWithin,
    /// Begins a stream with the word that it has failed.
    FailsInStream,
    /// The same after the role that a chat opens with, which comes by itself: what vLLM does where KV could not be loaded.
    OpensAndFails,
    /// Begins a stream and dies before anything of the answer.
    DiesInStream,
    /// Says nothing within the time that the policy allows: that of its leg alone is short.
    Sleeps,
}

/// Who answers in the end.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    /// The worker that was to generate, whole; the fallback's cause.
    Whole(Option<&'static str>),
    /// Nobody: the client gets this status.
    Error(u16),
}

async fn do_it(does: Does, mut call: Call, asleep: &mut Vec<Call>) {
    match does {
        Does::Dies => call.hang_up().await,
        Does::Says(status) => {
            let body = format!(r#"{{"error":{{"message":"said {status}"}}}}"#);
            call.answer(status, "application/json", body.as_bytes())
                .await;
        }
        Does::NoParameters => {
            call.answer(200, "application/json", br#"{"kv_transfer_params":null}"#)
                .await;
        }
        Does::DiesWithin => {
            call.bytes(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{")
                .await;
            call.hang_up().await;
        }
        Does::FailsInStream => {
            call.begin().await;
            call.chunk(FAILED).await;
            call.end().await;
        }
        Does::OpensAndFails => {
            call.begin().await;
            call.chunk(ROLE).await;
            // Time for the role to be passed on, if anybody does.
            tokio::time::sleep(Duration::from_millis(20)).await;
            call.chunk(FAILED).await;
            call.end().await;
        }
        Does::DiesInStream => {
            call.begin().await;
            call.chunk(b"data: {\"choi").await;
            call.hang_up().await;
        }
        Does::Sleeps => asleep.push(call),
    }
}

/// What a chat's answer opens with.
pub(crate) const ROLE: &[u8] =
    b"data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
pub(crate) const FAILED: &[u8] =
    b"data: {\"error\":{\"message\":\"KV load failed\",\"code\":500}}\n\ndata: [DONE]\n\n";
pub(crate) const STREAM: &str =
    "data: {\"choices\":[{\"text\":\"x\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n";

/// Every leg has its minutes. What fails is not planned anew.
pub(crate) fn patient() -> Policy {
    let mut policy = policy();
    policy.fallback.replans = 0;
    // Each case of the table is the first failure of its link.
    policy.topology.breaker.failures = 1_000;
    policy.fallback.local_recompute.max_concurrent_per_worker = 100;
    policy.fallback.local_recompute.max_percent = 100.0;
    policy
}

/// What [`impatient_with_prompts`] gives, from the call to the head of its answer.
pub(crate) const COMPUTE: Duration = Duration::from_secs(1);

/// The same, but for a leg that computes a prompt for another engine: the other leg and the next attempt have their minutes.
pub(crate) fn impatient_with_prompts() -> Policy {
    let mut policy = patient();
    let half = COMPUTE.as_secs_f64() / 2.0;
    policy.timeouts.prefill_start_seconds = half;
    policy.timeouts.prefill_seconds = half;
    policy
}

/// What [`impatient_with_fetches`] gives, from the end of the prompt to the first of the answer.
pub(crate) const FETCH: Duration = Duration::from_secs(1);

/// The same, but for the leg that fetches.
pub(crate) fn impatient_with_fetches() -> Policy {
    let mut policy = patient();
    let third = FETCH.as_secs_f64() / 3.0;
    policy.timeouts.reserve_seconds = third;
    policy.timeouts.transfer_seconds = third;
    policy.timeouts.decode_start_seconds = third;
    policy
}

/// The whole request, answered well.
pub(crate) async fn answer_whole(d: &mut Engine) {
    let mut call = d.call().await;
    let body = call.json();
    assert!(body.get("kv_transfer_params").is_none(), "{body}");
    assert_eq!(body["max_tokens"], 8, "the client's own request");
    if body["stream"] == true {
        call.begin().await;
        call.chunk(STREAM.as_bytes()).await;
        call.end().await;
    } else {
        call.answer(200, "application/json", ANSWER).await;
    }
}

/// Plays one case.
async fn play(
    served: &Served,
    p: &mut Engine,
    d: &mut Engine,
    prefill: Option<Does>,
    decode: Option<Does>,
    stream: bool,
    then: Then,
) {
    let what = format!("prefill {prefill:?}, decode {decode:?}, stream {stream}");
    // Completions open with nothing.
    let (path, prompt) = if decode == Some(Does::OpensAndFails) {
        let messages = r#""messages":[{"role":"user","content":"a"}]"#;
        ("/v1/chat/completions", messages)
    } else {
        ("/v1/completions", r#""prompt":"a""#)
    };
    let body = format!(r#"{{"model":"m",{prompt},"max_tokens":8,"stream":{stream}}}"#);
    let reply = served.post("Disaggregated", path, body);
    let mut asleep = Vec::new();
    let call = p.call().await;
    match prefill {
        Some(does) => do_it(does, call, &mut asleep).await,
        None => {
            call.answer(200, "application/json", prefill_answer().as_bytes())
                .await;
        }
    }
    if let Some(does) = decode {
        let call = d.call().await;
        assert!(call.json().get("kv_transfer_params").is_some(), "{what}");
        do_it(does, call, &mut asleep).await;
    }
    if let Then::Whole(_) = then {
        answer_whole(d).await;
    }
    let reply = end(reply).await;
    let record = served.record(&reply.run()).await;
    match then {
        Then::Whole(cause) => {
            assert_eq!(reply.status, 200, "{what}: {}", reply.text());
            let expected = if stream { STREAM.as_bytes() } else { ANSWER };
            assert_eq!(reply.body, expected, "{what}");
            let found = record
                .fallback
                .as_ref()
                .map(|fallback| fallback.cause.as_str());
            assert_eq!(found, cause, "{what}");
            assert_eq!(record.states.last().unwrap().state, "completed", "{what}");
        }
        Then::Error(status) => {
            assert_eq!(reply.status, status, "{what}: {}", reply.text());
            assert_eq!(record.states.last().unwrap().state, "failed", "{what}");
        }
    }
    assert!(p.is_idle() && d.is_idle(), "{what}");
    for call in asleep {
        call.closed().await;
    }
    served.router.holds_nothing().await;
    assert_eq!(
        served
            .router
            .metrics
            .text()
            .unwrap()
            .lines()
            .find(|line| line.starts_with("baton_illegal_events_total")),
        Some("baton_illegal_events_total 0"),
        "{what}"
    );
}

#[tokio::test]
async fn a_leg_that_fails_costs_the_run_an_attempt_and_not_its_answer() {
    use Does::{
        Dies, DiesInStream, DiesWithin, FailsInStream, NoParameters, OpensAndFails, Says, Sleeps,
    };
    let lost = Then::Whole(Some("prefill-lost"));
    let engine = Then::Whole(Some("engine-failed"));
    let gone = Then::Whole(Some("source-lost"));
    let cases = [
        (Some(Dies), None, false, lost),
        (Some(Says(500)), None, false, lost),
        (Some(DiesWithin), None, false, lost),
        // It says nothing of the way between the two.
        (
            Some(NoParameters),
            None,
            false,
            Then::Whole(Some("no-transport")),
        ),
        // Its own request decides, and it is a good one.
        (Some(Says(400)), None, false, Then::Whole(None)),
        (None, Some(Says(400)), false, Then::Whole(None)),
        (None, Some(Says(500)), false, engine),
        (None, Some(Says(500)), true, engine),
        (None, Some(FailsInStream), true, engine),
        (None, Some(OpensAndFails), true, engine),
        (None, Some(DiesInStream), true, gone),
        (None, Some(Dies), false, gone),
    ];
    let (served, mut p, mut d) = pair(&patient(), NIXL).await;
    for (prefill, decode, stream, then) in cases {
        play(&served, &mut p, &mut d, prefill, decode, stream, then).await;
    }
    let late = Then::Whole(Some("timeout"));
    for (policy, limit, prefill, decode, then) in [
        (impatient_with_prompts(), COMPUTE, Some(Sleeps), None, lost),
        (impatient_with_fetches(), FETCH, None, Some(Sleeps), late),
    ] {
        steady(limit, async || {
            let (served, mut p, mut d) = pair(&policy, NIXL).await;
            play(&served, &mut p, &mut d, prefill, decode, true, then).await;
        })
        .await;
    }
}

#[tokio::test]
async fn without_a_budget_the_engines_own_words_are_the_answer_where_there_are_any() {
    let mut policy = patient();
    policy.fallback.local_recompute.max_concurrent_per_worker = 0;
    let (served, mut p, mut d) = pair(&policy, NIXL).await;
    for (prefill, decode, stream, status) in [
        (None, Some(Does::Says(500)), false, 500),
        (None, Some(Does::Says(501)), true, 501),
        // Nobody said anything that could be passed on.
        (None, Some(Does::Dies), false, 503),
        (None, Some(Does::FailsInStream), true, 503),
        // What was said of a leg that no client has asked for is not passed on.
        (Some(Does::Says(500)), None, false, 503),
    ] {
        let then = Then::Error(status);
        play(&served, &mut p, &mut d, prefill, decode, stream, then).await;
    }
}

/// vLLM answers 500 and raises its counter, too: two reports of one failure.
#[tokio::test]
async fn a_transfer_that_an_engine_both_says_and_counts_speaks_once_against_its_link() {
    let mut policy = patient();
    policy.topology.breaker.failures = 2;
    let (served, mut p, mut d) = pair(&policy, NIXL).await;
    let body = r#"{"model":"m","prompt":"a","max_tokens":8,"stream":false}"#;
    let reply = served.post("Disaggregated", "/v1/completions", body);
    p.call()
        .await
        .answer(200, "application/json", prefill_answer().as_bytes())
        .await;
    d.call().await.answer(500, "application/json", b"{}").await;
    answer_whole(&mut d).await;
    assert_eq!(end(reply).await.status, 200);
    for (load_sequence, running_sequences) in [(2, 0), (3, 5)] {
        let load = wire::Load {
            load_sequence,
            running_sequences,
            failed_transfers: 1,
            ..wire::Load::default()
        };
        d.daemon.tell(0, watch_event::Event::Load(load));
    }
    until("both reports have come", || {
        let view = served.router.workers.view();
        let mut loads = view.fleet.loads.iter();
        loads.any(|load| load.reported.running_sequences == 5)
    })
    .await;
    let text = served.router.metrics.text().unwrap();
    assert!(text.contains("baton_engine_failed_transfers_total 1"));
    let now = served.router.workers.clock.now();
    assert_eq!(served.router.learning.link_counts(now).open, 0);
}

//! Engines without room: what is waited for, what is sent elsewhere before anything is computed, and what is not learnt from.

use baton_placement::place::{Filter, Reason};
use baton_placement::policy::{Policy, Pooling};
use baton_protocol::card::Split;
use baton_protocol::wire::{self, watch_event};

use crate::front::end;
use crate::pull::ANSWER;
use crate::router::until;
use crate::tied::{BODY, STREAM, halves};
use crate::{Served, one, pair, policy};

/// A load report of 64 blocks, of which so many are free.
fn load(load_sequence: u64, free: u32) -> watch_event::Event {
    watch_event::Event::Load(wire::Load {
        load_sequence,
        blocks: Some(wire::BlockCounts {
            total: 64,
            free,
            active: 64 - free,
            ..wire::BlockCounts::default()
        }),
        ..wire::Load::default()
    })
}

async fn free_blocks(served: &Served, worker: usize, free: u32) {
    until("the report has come", || {
        let view = served.router.workers.view();
        let load = view.fleet.loads.get(worker);
        load.is_some_and(|load| load.reported.free_blocks == free)
    })
    .await;
}

#[tokio::test]
async fn a_pair_that_is_full_now_is_waited_for() {
    let (served, mut p, mut d) = halves(&policy()).await;
    let view = served.router.workers.view();
    let prefill = view.members.iter().position(|one| one.id.as_str() == "p");
    let prefill = prefill.unwrap();
    p.daemon.tell(0, load(2, 0));
    free_blocks(&served, prefill, 0).await;
    let reply = served.post("Conditional", "/v1/completions", BODY);
    until("it looks for room", || {
        let states = served.router.metrics.text().unwrap();
        states.contains("baton_inflight_requests{model=\"m\"} 1")
    })
    .await;
    p.daemon.tell(0, load(3, 64));
    let (prefill, mut decode) = tokio::join!(p.call(), d.call());
    prefill
        .answer(200, "text/event-stream", STREAM.as_bytes())
        .await;
    decode.begin().await;
    decode.chunk(STREAM.as_bytes()).await;
    decode.end().await;
    let reply = end(reply).await;
    assert_eq!((reply.status, reply.text().as_str()), (200, STREAM));

    // As long as it lasts, and no longer than the policy says: then another moment is offered.
    let mut short = policy();
    short.timeouts.reserve_seconds = 0.05;
    let (served, p, _d) = halves(&short).await;
    p.daemon.tell(0, load(2, 0));
    free_blocks(&served, 1, 0).await;
    let reply = end(served.post("Conditional", "/v1/completions", BODY)).await;
    assert_eq!(reply.status, 503, "{}", reply.text());
    assert!(reply.header("retry-after").is_some());
    let record = served.record(&reply.run()).await;
    assert_eq!(record.reason, Reason::KvFull);
}

#[tokio::test]
async fn one_token_is_answered_by_engines_that_do_one_half_each() {
    let (served, mut p, mut d) = halves(&policy()).await;
    let body = BODY.replace(r#""max_tokens":8"#, r#""max_tokens":1"#);
    let reply = served.post("Conditional", "/v1/completions", body);
    let (prefill, mut decode) = tokio::join!(p.call(), d.call());
    prefill
        .answer(200, "text/event-stream", STREAM.as_bytes())
        .await;
    decode.begin().await;
    decode.chunk(STREAM.as_bytes()).await;
    decode.end().await;
    let reply = end(reply).await;
    assert_eq!((reply.status, reply.text().as_str()), (200, STREAM));
    assert_eq!(served.record(&reply.run()).await.reason, Reason::OnlyRemote);
}

#[tokio::test]
async fn nothing_is_computed_for_an_engine_that_would_fetch_it_too_late() {
    let split = Split::NixlPull {
        lease_milliseconds: 1,
    };
    let strict = Policy {
        pooling: Pooling::Strict,
        ..policy()
    };
    let (served, mut p, mut d) = pair(&strict, split).await;
    // All of its eight places are taken.
    let busy = wire::Load {
        load_sequence: 2,
        running_sequences: 8,
        context_tokens: 800,
        ..wire::Load::default()
    };
    d.daemon.tell(0, watch_event::Event::Load(busy));
    until("the report has come", || {
        let view = served.router.workers.view();
        let mut loads = view.fleet.loads.iter();
        loads.any(|load| load.reported.running_sequences == 8)
    })
    .await;
    let body = r#"{"model":"m","prompt":"a","max_tokens":900,"stream":false}"#;
    let reply = served.post("Disaggregated", "/v1/completions", body);
    let call = d.call().await;
    assert!(p.is_idle());
    assert!(call.json().get("kv_transfer_params").is_none());
    call.answer(200, "application/json", ANSWER).await;
    let record = served.record(&end(reply).await.run()).await;
    assert_eq!(record.filtered.get(&Filter::LeaseTooShort), Some(&1));
    assert!(record.fallback.is_none(), "nothing was thrown away");
}

#[tokio::test]
async fn what_generates_nothing_says_nothing_of_how_long_answers_are() {
    let (served, mut d) = one().await;
    let expected = || served.router.learning.expected_output(&policy());
    let before = expected();
    let tokenize = r#"{"model":"m","prompt":"a"}"#;
    let uncounted = r#"{"model":"m","prompt":"a","stream":false}"#;
    for (path, body, answer) in [
        ("/tokenize", tokenize, r#"{"count":1,"tokens":[7]}"#),
        (
            "/v1/completions",
            uncounted,
            r#"{"choices":[{"text":"x","finish_reason":"stop"}]}"#,
        ),
    ] {
        let reply = served.post("Aggregated", path, body);
        let call = d.call().await;
        call.answer(200, "application/json", answer.as_bytes())
            .await;
        let reply = end(reply).await;
        assert_eq!(reply.status, 200);
        served.record(&reply.run()).await;
        assert_eq!(expected(), before, "{path}");
    }
    let reply = served.post("Aggregated", "/v1/completions", uncounted);
    d.call().await.answer(200, "application/json", ANSWER).await;
    served.record(&end(reply).await.run()).await;
    assert_eq!(expected(), 8.0, "the engine has counted");
}

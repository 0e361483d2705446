//! What opens a stream and is none of its text yet: for how long it waits for more, and what it says of a hand-off.

use std::time::Duration;

use crate::engine::{Call, Engine};
use crate::front::{Served, end};
use crate::pull::prefill_answer;
use crate::steady::steady;
use crate::table::{FAILED, FETCH, ROLE, impatient_with_fetches, patient};
use crate::{NIXL, pair};

const CHAT: &str =
    r#"{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":8,"stream":true}"#;
const REST: &[u8] = b"data: {\"choices\":[{\"delta\":{\"content\":\"x\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
/// A token that a parser holds back, as vLLM says it.
const HELD_BACK: &[u8] = b"data: {\"choices\":[{\"index\":0,\"delta\":{},\"logprobs\":{\"content\":[{\"token\":\"a\",\"logprob\":-0.1}]},\"finish_reason\":null}]}\n\n";
/// Longer than the first content may take.
const LONG: Duration = FETCH.saturating_add(Duration::from_millis(500));

/// The second leg, of which the prompt is computed.
async fn second_leg(p: &mut Engine, d: &mut Engine) -> Call {
    p.call()
        .await
        .answer(200, "application/json", prefill_answer().as_bytes())
        .await;
    let mut call = d.call().await;
    assert!(call.json().get("kv_transfer_params").is_some());
    call.begin().await;
    call
}

/// Answers the next attempt, whichever legs it has.
async fn answer_next(p: &mut Engine, d: &mut Engine) {
    loop {
        let mut call = tokio::select! {
            call = p.call() => call,
            call = d.call() => call,
        };
        if call.json()["kv_transfer_params"]["do_remote_decode"] == true {
            call.answer(200, "application/json", prefill_answer().as_bytes())
                .await;
            continue;
        }
        call.begin().await;
        call.chunk(&[ROLE, REST].concat()).await;
        return call.end().await;
    }
}

fn links_open(served: &Served) -> u32 {
    let now = served.router.workers.clock.now();
    served.router.learning.link_counts(now).open
}

/// Engines say the role with the first token, so the KV is there.
#[tokio::test]
async fn a_chat_that_ends_after_its_role_is_begun_anew_and_no_link_is_blamed() {
    let mut policy = impatient_with_fetches();
    policy.topology.breaker.failures = 1;
    // The leg is given up when both limits have passed, and both are the next attempt's too.
    policy.timeouts.token_seconds = FETCH.as_secs_f64();
    steady(FETCH, async || {
        let (served, mut p, mut d) = pair(&policy, NIXL).await;
        for dies in [true, false] {
            let reply = served.post("Disaggregated", "/v1/chat/completions", CHAT);
            let mut call = second_leg(&mut p, &mut d).await;
            call.chunk(ROLE).await;
            let mut asleep = None;
            if dies {
                tokio::time::sleep(Duration::from_millis(20)).await;
                call.hang_up().await;
            } else {
                asleep = Some(call);
            }
            answer_next(&mut p, &mut d).await;
            let reply = end(reply).await;
            assert_eq!(reply.body, [ROLE, REST].concat(), "dies: {dies}");
            assert_eq!(links_open(&served), 0, "dies: {dies}");
            if let Some(call) = asleep {
                call.closed().await;
            }
            served.router.holds_nothing().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_model_that_thinks_unseen_has_the_time_of_a_token_from_each_event_of_its_answer_on() {
    let mut policy = impatient_with_fetches();
    policy.topology.breaker.failures = 1;
    steady(FETCH, async || {
        let (served, mut p, mut d) = pair(&policy, NIXL).await;
        for opening in [ROLE.to_vec(), [ROLE, HELD_BACK].concat()] {
            let reply = served.post("Disaggregated", "/v1/chat/completions", CHAT);
            let mut call = second_leg(&mut p, &mut d).await;
            call.chunk(&opening).await;
            tokio::time::sleep(LONG).await;
            call.chunk(REST).await;
            call.end().await;
            let reply = end(reply).await;
            assert_eq!(reply.body, [opening.as_slice(), REST].concat());
            assert_eq!(links_open(&served), 0);
        }
    })
    .await;
}

#[tokio::test]
async fn comments_prolong_no_wait() {
    let (served, mut p, mut d) = pair(&impatient_with_fetches(), NIXL).await;
    let reply = served.post("Disaggregated", "/v1/chat/completions", CHAT);
    let mut call = second_leg(&mut p, &mut d).await;
    let mut whole = None;
    for _ in 0..50 {
        tokio::select! {
            next = d.call() => {
                whole = Some(next);
                break;
            }
            () = tokio::time::sleep(Duration::from_millis(100)) => call.chunk(b": alive\n\n").await,
        }
    }
    let mut whole = whole.expect("it is given up although it lives");
    assert!(whole.json().get("kv_transfer_params").is_none());
    whole.begin().await;
    whole.chunk(&[ROLE, REST].concat()).await;
    whole.end().await;
    let reply = end(reply).await;
    assert_eq!(reply.body, [ROLE, REST].concat());
    let record = served.record(&reply.run()).await;
    assert_eq!(record.fallback.unwrap().cause, "timeout");
}

/// A token without text is part of the answer; and no request may hold more than its memory.
#[tokio::test]
async fn what_has_gone_to_the_client_is_not_answered_by_another_try() {
    let (served, mut p, mut d) = pair(&patient(), NIXL).await;
    let comments = ": a comment of an engine that has nothing to say yet\n\n".repeat(5_000);
    for opening in [HELD_BACK, comments.as_bytes()] {
        let opening = [ROLE, opening].concat();
        let reply = served.post("Disaggregated", "/v1/chat/completions", CHAT);
        let mut call = second_leg(&mut p, &mut d).await;
        call.chunk(&opening).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        call.chunk(FAILED).await;
        call.end().await;
        let reply = end(reply).await;
        assert!(reply.body == [opening.as_slice(), FAILED].concat());
        assert!(p.is_idle() && d.is_idle());
    }
}

//! The hand-off whose two legs meet: both engines get the request at once, and one's failure is the other's end.

use std::time::Duration;

use baton_placement::policy::{Assurance, Policy};
use baton_placement::record::RunStatus;
use baton_protocol::card::{Role, Split};
use serde_json::Value;

use crate::engine::Engine;
use crate::front::{Served, end};
use crate::keeping::IDLE;
use crate::steady::steady;
use crate::{policy, samples};

pub(crate) const BODY: &str = r#"{"model":"m","prompt":"a","max_tokens":8,"stream":true,"bootstrap_room":1,"rid":"a","routed_dp_rank":3}"#;
pub(crate) const STREAM: &str =
    "data: {\"choices\":[{\"text\":\"x\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n";

const ABORTED_EVENT: &str = "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\n";

/// Engines that can do their own half only, as servers of SGLang in either mode.
pub(crate) async fn halves(policy: &Policy) -> (Served, Engine, Engine) {
    let split = Split::Bootstrap {
        host: "10.0.0.7".into(),
        port: 8998,
    };
    let mut prefill = samples::prefill_card("p");
    prefill.engine.kind = "SGLang".to_owned();
    prefill.roles = vec![Role::Prefill];
    let mut decode = samples::card("d");
    decode.engine.kind = "SGLang".to_owned();
    decode.roles = vec![Role::Decode];
    let p = Engine::start(prefill, split.clone()).await;
    let d = Engine::start(decode, split).await;
    let served = Served::start(policy, &[&p, &d]).await;
    (served, p, d)
}

#[tokio::test]
async fn both_engines_get_the_request_at_once_with_one_room() {
    let (served, mut p, mut d) = halves(&policy()).await;
    let mut rooms = Vec::new();
    for _ in 0..2 {
        let reply = served.post("Disaggregated", "/v1/completions", BODY);
        // Neither answers before the other has its leg.
        let (prefill, mut decode) = tokio::join!(p.call(), d.call());
        assert_eq!(prefill.body, decode.body);
        let body = decode.json();
        assert_eq!(
            (&body["bootstrap_host"], &body["bootstrap_port"]),
            (&"10.0.0.7".into(), &8998.into())
        );
        assert_eq!(
            (&body["max_tokens"], &body["stream"]),
            (&8.into(), &true.into())
        );
        assert_eq!(body["rid"].as_str(), decode.header("x-request-id"));
        assert!(
            body.get("routed_dp_rank").is_none(),
            "the legs would miss each other"
        );
        let room = body["bootstrap_room"].as_u64().unwrap();
        assert!(room > 1 && room < 1 << 63);
        rooms.push(room);
        decode.begin().await;
        prefill
            .answer(200, "text/event-stream", STREAM.as_bytes())
            .await;
        decode.chunk(STREAM.as_bytes()).await;
        decode.end().await;
        let reply = end(reply).await;
        assert_eq!(
            reply.text(),
            STREAM,
            "once, and from the engine that generates"
        );
        let record = served.record(&reply.run()).await;
        assert_eq!(record.assurance, Some(Assurance::EngineTrusted));
        let inferred: Vec<&str> = record
            .states
            .iter()
            .filter(|state| state.inferred)
            .map(|state| state.state.as_str())
            .collect();
        let expected = [
            "prefill_started",
            "prefill_completed",
            "kv_published",
            "kv_transfer_started",
            "kv_transfer_completed",
            "decode_started",
        ];
        assert_eq!(inferred, expected);
        served.router.holds_nothing().await;
    }
    assert_ne!(rooms[0], rooms[1]);
}

#[tokio::test]
async fn when_one_leg_fails_the_other_is_cancelled_and_the_next_try_has_its_own_room() {
    let (served, mut p, mut d) = halves(&policy()).await;
    for fault in 0..8 {
        let reply = served.post("Disaggregated", "/v1/completions", BODY);
        let (prefill, decode) = tokio::join!(p.call(), d.call());
        let room = decode.json()["bootstrap_room"].clone();
        match fault {
            0 => {
                prefill.hang_up().await;
                decode.closed().await;
            }
            1 => {
                prefill.answer(500, "application/json", b"{}").await;
                decode.closed().await;
            }
            2 => {
                decode.hang_up().await;
                prefill.closed().await;
            }
            3 => {
                decode.answer(500, "application/json", b"{}").await;
                prefill.closed().await;
            }
            4 => {
                let mut decode = decode;
                decode.begin().await;
                decode
                    .chunk(b"data: {\"error\":{\"message\":\"KVTransferError\"}}\n\n")
                    .await;
                prefill.closed().await;
            }
            // Of these the engine that generates hears nothing: it would wait for minutes.
            5 => {
                let mut prefill = prefill;
                prefill.begin().await;
                prefill
                    .chunk(b"data: {\"error\":{\"message\":\"Prefill bootstrap failed\"}}\n\n")
                    .await;
                decode.closed().await;
            }
            6 => {
                let mut prefill = prefill;
                prefill.begin().await;
                prefill.chunk(ABORTED_EVENT.as_bytes()).await;
                decode.closed().await;
            }
            _ => {
                let body = ABORTED_EVENT.trim().strip_prefix("data: ").unwrap();
                prefill
                    .answer(200, "application/json", body.as_bytes())
                    .await;
                decode.closed().await;
            }
        }
        let (prefill, mut decode) = tokio::join!(p.call(), d.call());
        assert_ne!(decode.json()["bootstrap_room"], room, "a room is used once");
        assert!(decode.header("x-request-id").unwrap() != "");
        decode.begin().await;
        decode.chunk(STREAM.as_bytes()).await;
        decode.end().await;
        let reply = end(reply).await;
        assert_eq!(reply.text(), STREAM, "fault {fault}");
        drop(prefill);
        served.router.holds_nothing().await;
    }
}

#[tokio::test]
async fn a_request_that_either_engine_refuses_is_refused() {
    let (served, mut p, mut d) = halves(&policy()).await;
    let body = br#"{"error":{"message":"too long"}}"#;
    for by_prefill in [true, false] {
        let reply = served.post("Disaggregated", "/v1/completions", BODY);
        let (prefill, decode) = tokio::join!(p.call(), d.call());
        let (refuses, other) = if by_prefill {
            (prefill, decode)
        } else {
            (decode, prefill)
        };
        refuses.answer(400, "application/json", body).await;
        other.closed().await;
        let reply = end(reply).await;
        assert_eq!(
            (reply.status, reply.body.as_slice()),
            (400, body.as_slice())
        );
        assert!(p.is_idle() && d.is_idle());
    }
}

#[tokio::test]
async fn a_prompt_that_was_given_up_ends_the_answer_that_has_begun_on_it() {
    let (served, mut p, mut d) = halves(&policy()).await;
    let reply = served.post("Disaggregated", "/v1/completions", BODY);
    let (prefill, mut decode) = tokio::join!(p.call(), d.call());
    decode.begin().await;
    let first = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
    decode.chunk(first.as_bytes()).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    prefill.answer(500, "application/json", b"{}").await;
    decode.closed().await;
    let reply = end(reply).await;
    let text = reply.text();
    assert!(
        text.starts_with(first) && text.contains("event: error") && !text.contains("[DONE]"),
        "{text}"
    );
    let record = served.record(&reply.run()).await;
    assert_eq!(record.outcome.unwrap().status, RunStatus::Failed);
}

/// Both legs of the next try come, in a room of their own; it is answered well.
async fn answered_by_the_next_try(p: &mut Engine, d: &mut Engine, room: &Value) {
    let (prefill, mut decode) = tokio::join!(p.call(), d.call());
    assert_ne!(decode.json()["bootstrap_room"], *room);
    prefill
        .answer(200, "text/event-stream", STREAM.as_bytes())
        .await;
    decode.begin().await;
    decode.chunk(STREAM.as_bytes()).await;
    decode.end().await;
}

#[tokio::test]
async fn an_engine_without_room_is_asked_again_and_the_other_does_not_wait_for_it() {
    let (served, mut p, mut d) = halves(&policy()).await;
    for (status, by_prefill) in [(429, true), (429, false), (503, true), (503, false)] {
        let reply = served.post("Disaggregated", "/v1/completions", BODY);
        let (prefill, decode) = tokio::join!(p.call(), d.call());
        let room = decode.json()["bootstrap_room"].clone();
        let (refuses, other) = if by_prefill {
            (prefill, decode)
        } else {
            (decode, prefill)
        };
        refuses.answer(status, "application/json", b"{}").await;
        other.closed().await;
        answered_by_the_next_try(&mut p, &mut d, &room).await;
        let reply = end(reply).await;
        assert_eq!(reply.text(), STREAM, "{status}, by prefill: {by_prefill}");
        served.router.holds_nothing().await;
    }
}

#[tokio::test]
async fn an_engine_that_does_not_answer_is_given_up_within_the_policys_time() {
    let mut policy = policy();
    // Of the engine that generates all five together, and the next try has no more.
    let limit = 0.3;
    policy.timeouts.reserve_seconds = limit;
    policy.timeouts.prefill_start_seconds = limit;
    policy.timeouts.prefill_seconds = limit;
    policy.timeouts.transfer_seconds = limit;
    policy.timeouts.decode_start_seconds = limit;
    steady(Duration::from_secs_f64(5.0 * limit), async || {
        let (served, mut p, mut d) = halves(&policy).await;
        let reply = served.post("Disaggregated", "/v1/completions", BODY);
        let (prefill, decode) = tokio::join!(p.call(), d.call());
        let room = decode.json()["bootstrap_room"].clone();
        prefill
            .answer(200, "text/event-stream", STREAM.as_bytes())
            .await;
        decode.closed().await;
        answered_by_the_next_try(&mut p, &mut d, &room).await;
        assert_eq!(end(reply).await.text(), STREAM);
    })
    .await;
}

#[tokio::test]
async fn servers_that_have_begun_anew_are_asked_over_new_connections() {
    steady(IDLE, async || {
        let (served, mut p, mut d) = halves(&policy()).await;
        let reply = served.post("Disaggregated", "/v1/completions", BODY);
        answered_by_the_next_try(&mut p, &mut d, &Value::Null).await;
        end(reply).await;
        let reply = served.post("Disaggregated", "/v1/completions", BODY);
        let (prefill, decode) = tokio::join!(p.call(), d.call());
        assert_eq!(decode.earlier, 1, "a kept one");
        let room = decode.json()["bootstrap_room"].clone();
        tokio::join!(prefill.hang_up(), decode.hang_up());
        answered_by_the_next_try(&mut p, &mut d, &room).await;
        assert_eq!(end(reply).await.text(), STREAM);
        served.router.holds_nothing().await;
    })
    .await;
}

#[tokio::test]
async fn what_a_pair_of_halves_cannot_answer_is_another_moments() {
    let mut policy = policy();
    policy.timeouts.reserve_seconds = 0.05;
    let (served, mut p, mut d) = halves(&policy).await;
    let body = BODY.replace(r#""max_tokens":8"#, r#""max_tokens":8,"n":2"#);
    let reply = end(served.post("Disaggregated", "/v1/completions", body)).await;
    assert_eq!(reply.status, 503, "{}", reply.text());
    let record = served.record(&reply.run()).await;
    assert_eq!(record.input.unsplittable.as_deref(), Some("n"));
    assert!(p.is_idle() && d.is_idle());
}

/// The role comes before anything is known of the prompt.
#[tokio::test]
async fn a_chat_of_which_only_the_role_has_come_is_answered_by_the_next_try() {
    let (served, mut p, mut d) = halves(&policy()).await;
    let role = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    let chat = format!(
        "{role}data: {{\"choices\":[{{\"delta\":{{\"content\":\"x\"}},\"finish_reason\":\"stop\"}}]}}\n\ndata: [DONE]\n\n"
    );
    let body =
        r#"{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":8,"stream":true}"#;
    let reply = served.post("Disaggregated", "/v1/chat/completions", body);
    let (mut prefill, mut decode) = tokio::join!(p.call(), d.call());
    decode.begin().await;
    decode.chunk(role.as_bytes()).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    prefill.begin().await;
    prefill.chunk(ABORTED_EVENT.as_bytes()).await;
    decode.closed().await;
    let (prefill, mut decode) = tokio::join!(p.call(), d.call());
    prefill
        .answer(200, "text/event-stream", STREAM.as_bytes())
        .await;
    decode.begin().await;
    for event in chat.split_inclusive("\n\n") {
        decode.chunk(event.as_bytes()).await;
    }
    decode.end().await;
    assert_eq!(end(reply).await.text(), chat);
}

#[tokio::test]
async fn a_client_that_leaves_closes_both_connections() {
    let (served, mut p, mut d) = halves(&policy()).await;
    let reply = served.post("Disaggregated", "/v1/completions", BODY);
    let (prefill, decode) = tokio::join!(p.call(), d.call());
    reply.abort();
    tokio::join!(prefill.closed(), decode.closed());
    served.router.holds_nothing().await;
}

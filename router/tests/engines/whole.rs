//! A request on one engine: what it gets, what the client gets, what the record says.

use baton_placement::place::Reason;
use baton_placement::policy::Assurance;
use baton_placement::record::{Credit, RunStatus};

use baton_protocol::hash::{BlockHasher, HashKey};
use baton_protocol::wire::{self, watch_event};

use crate::engine::Engine;
use crate::front::{Served, end};
use crate::router::until;
use crate::{NIXL, one, policy, samples};

/// With everything that Baton does not know.
const BODY: &str = r#"{ "model":"m", "messages":[{"role":"user","content":[{"type":"text","text":"hé\ud83d"}]}], "tools":[{"type":"function","function":{"name":"f","parameters":{"x":1.0e2}}}], "response_format":{"type":"json_schema"}, "logit_bias":{"50256":-100}, "seed": 123456789012345678901234567890, "temperature":0.10, "made_up":[null,{}] ,"stream":false}
"#;
const ANSWER: &str = r#"{ "id":"chatcmpl-1","choices":[{"message":{"content":"x"},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":17,"total_tokens":20,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":16}},"later":1e0}"#;

#[tokio::test]
async fn a_request_reaches_the_engine_as_sent_and_its_answer_the_client() {
    let (served, mut d) = one().await;
    let reply = served.post("Aggregated", "/v1/chat/completions", BODY);
    let call = d.call().await;
    assert_eq!(call.path, "/v1/chat/completions");
    assert_eq!(String::from_utf8(call.body.clone()).unwrap(), BODY);
    assert_eq!(call.header("content-type"), Some("application/json"));
    assert_eq!(call.header("authorization"), None);
    let operation = call.header("x-request-id").unwrap().to_owned();
    call.answer(200, "application/json", ANSWER.as_bytes())
        .await;
    let reply = end(reply).await;
    assert_eq!((reply.status, reply.text().as_str()), (200, ANSWER));
    assert_eq!(reply.header("x-engine"), Some("yes"));
    assert_eq!(reply.header("server"), None);
    assert_ne!(reply.header("x-request-id"), Some("theirs"));

    let record = served.record(&reply.run()).await;
    assert_eq!(operation, format!("{}-01", reply.run()));
    assert_eq!(record.reason, Reason::ModeAggregated);
    assert_eq!(record.assurance, Some(Assurance::Verified));
    let states: Vec<(&str, bool)> = record
        .states
        .iter()
        .map(|state| (state.state.as_str(), state.inferred))
        .collect();
    let expected = [
        ("accepted", false),
        ("route_selected", false),
        ("prefill_started", true),
        ("prefill_completed", true),
        ("decode_started", true),
        ("completed", false),
    ];
    assert_eq!(states, expected, "an answer in one piece does not stream");
    let of_engine = record.states.iter().find(|state| state.inferred).unwrap();
    assert_eq!(of_engine.operation.as_ref().unwrap().as_str(), operation);
    let outcome = record.outcome.unwrap();
    assert_eq!(outcome.status, RunStatus::Completed);
    assert_eq!(outcome.finish_reason.as_deref(), Some("tool_calls"));
    let counts = (
        outcome.input_tokens,
        outcome.cached_tokens,
        outcome.output_tokens,
    );
    assert_eq!(counts, (17, 16, 3), "as the engine counts them");
    assert_eq!(outcome.ttft_milliseconds, None, "nobody saw a first token");
    // What stands in for a tokenizer here is none.
    assert_eq!(record.input.credit, Some(Credit::NoTokenizer));
    assert_eq!(record.input.unsplittable, None);
    served.router.holds_nothing().await;
}

#[tokio::test]
async fn what_only_a_router_may_say_does_not_reach_the_engine() {
    let (served, mut d) = one().await;
    let reply = served.post(
        "Aggregated",
        "/v1/completions",
        r#"{"model":"m","prompt":"a","request_id":"b","vllm_xargs":{"kv_transfer_params":"x","mine":[1.0]},"ec_transfer_params":{},"kv_transfer_params":{"do_remote_prefill":true}}"#,
    );
    let call = d.call().await;
    let expected = r#"{"model":"m","prompt":"a","vllm_xargs":{"mine":[1.0]}}"#;
    assert_eq!(String::from_utf8(call.body.clone()).unwrap(), expected);
    call.answer(200, "application/json", ANSWER.as_bytes())
        .await;
    assert_eq!(end(reply).await.status, 200);
}

#[tokio::test]
async fn a_stream_is_passed_on_frame_by_frame_wherever_it_is_cut() {
    let stream = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n: ping\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"é\u{1f600}\"}}] , \"x\":1e0}\n\ndata: {\"choices\":[{\"delta\":{},\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n";
    let (served, mut d) = one().await;
    let emoji = stream.find('\u{1f600}').unwrap();
    for cut in [1, 70, emoji + 2, stream.len() - 1] {
        let reply = served.post(
            "Aggregated",
            "/v1/chat/completions",
            r#"{"model":"m","stream":true,"messages":[]}"#,
        );
        let mut call = d.call().await;
        call.begin().await;
        let (one, two) = stream.as_bytes().split_at(cut);
        for piece in [one, two] {
            call.chunk(piece).await;
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        call.end().await;
        let reply = end(reply).await;
        assert_eq!((reply.status, reply.text().as_str()), (200, stream));
        assert_eq!(
            reply.header("content-type"),
            Some("text/event-stream; charset=utf-8")
        );
        let record = served.record(&reply.run()).await;
        assert!(record.states.iter().any(|state| state.state == "streaming"));
        let outcome = record.outcome.unwrap();
        assert!(outcome.ttft_milliseconds.is_some());
        assert_eq!(
            outcome.output_tokens, 2,
            "pieces, where the engine says no number"
        );
    }
}

#[tokio::test]
async fn what_an_engine_says_of_a_request_is_said_to_its_client() {
    let (served, mut d) = one().await;
    for (status, body) in [
        (
            400,
            r#"{"error":{"message":"too long","type":"BadRequestError","param":"input_tokens","code":400}}"#,
        ),
        (404, r#"{"error":{"message":"no such adapter","code":404}}"#),
        (422, "not even json"),
    ] {
        let reply = served.post(
            "Aggregated",
            "/v1/completions",
            r#"{"model":"m","prompt":"a"}"#,
        );
        d.call()
            .await
            .answer(status, "application/json", body.as_bytes())
            .await;
        let reply = end(reply).await;
        assert_eq!((reply.status, reply.text().as_str()), (status, body));
        let record = served.record(&reply.run()).await;
        assert_eq!(record.outcome.unwrap().status, RunStatus::Failed);
        assert!(d.is_idle(), "it is not asked again");
    }
}

#[tokio::test]
async fn a_body_that_is_no_json_or_names_no_model_is_refused_here() {
    let (served, mut d) = one().await;
    for (body, status) in [
        ("{", 400),
        ("[]", 400),
        ("{}", 400),
        (r#"{"model":"other"}"#, 404),
    ] {
        let reply = end(served.post("Aggregated", "/v1/chat/completions", body)).await;
        assert_eq!(reply.status, status, "{body}");
    }
    assert!(d.is_idle());
}

#[tokio::test]
async fn an_engine_that_fails_before_it_answers_is_replaced_by_another() {
    let mut first = Engine::start(samples::card("d0"), NIXL).await;
    let mut second = Engine::start(samples::card("d1"), NIXL).await;
    let served = Served::start(&policy(), &[&first, &second]).await;
    for fault in 0..4 {
        let body = format!(r#"{{"model":"m","prompt":"a","stream":{}}}"#, fault == 3);
        let reply = served.post("Aggregated", "/v1/completions", body);
        let mut call = tokio::select! {
            call = first.call() => call,
            call = second.call() => call,
        };
        match fault {
            0 => call.answer(500, "application/json", b"{}").await,
            1 => call.answer(503, "application/json", b"{}").await,
            2 => call.hang_up().await,
            _ => {
                call.begin().await;
                call.chunk(b"data: {\"error\":{\"message\":\"engine dead\"}}\n\n")
                    .await;
                call.closed().await;
            }
        }
        // On a connection that was idle, the same engine is asked once more before another one is.
        let call = loop {
            let call = tokio::select! {
                call = first.call() => call,
                call = second.call() => call,
            };
            if call.header("x-request-id").unwrap().ends_with("-02") {
                break call;
            }
            assert_eq!((fault, call.earlier), (2, 0));
            call.hang_up().await;
        };
        call.answer(200, "application/json", ANSWER.as_bytes())
            .await;
        let reply = end(reply).await;
        assert_eq!(
            (reply.status, reply.text().as_str()),
            (200, ANSWER),
            "fault {fault}"
        );
    }
}

#[tokio::test]
async fn the_last_words_of_an_engine_are_the_clients_when_nobody_else_answers() {
    let (served, mut d) = one().await;
    let reply = served.post(
        "Aggregated",
        "/v1/completions",
        r#"{"model":"m","prompt":"a"}"#,
    );
    let body = r#"{"error":{"message":"CUDA error","type":"InternalServerError","code":500}}"#;
    // It is asked as often as a lost worker is survived.
    for _ in 0..3 {
        let call = d.call().await;
        call.answer(500, "application/json", body.as_bytes()).await;
    }
    let reply = end(reply).await;
    assert_eq!((reply.status, reply.text().as_str()), (500, body));
    assert!(d.is_idle());
}

#[tokio::test]
async fn a_stream_that_breaks_off_ends_with_an_error_and_without_done() {
    let (served, mut d) = one().await;
    let first = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
    let reply = served.post(
        "Aggregated",
        "/v1/completions",
        r#"{"model":"m","prompt":"a","stream":true}"#,
    );
    let mut call = d.call().await;
    call.begin().await;
    call.chunk(first.as_bytes()).await;
    call.chunk(b"data: {\"choices\":[{\"te").await;
    call.dies();
    let reply = end(reply).await;
    let text = reply.text();
    let error = text.strip_prefix(first).unwrap();
    assert!(
        error.starts_with("event: error\ndata: {\"error\":{"),
        "{error}"
    );
    assert!(
        !text.contains("[DONE]") && !text.ends_with("{\"te"),
        "half a frame is none: {text}"
    );
    let record = served.record(&reply.run()).await;
    assert_eq!(record.outcome.unwrap().status, RunStatus::Failed);
    assert_eq!(record.states.last().unwrap().state, "failed");
}

#[tokio::test]
async fn an_engine_that_fails_in_its_stream_has_told_the_client_itself() {
    let (served, mut d) = one().await;
    let stream = "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"error\":{\"message\":\"KV load failed\",\"code\":500}}\n\ndata: [DONE]\n\n";
    let reply = served.post(
        "Aggregated",
        "/v1/completions",
        r#"{"model":"m","prompt":"a","stream":true}"#,
    );
    let mut call = d.call().await;
    call.begin().await;
    call.chunk(stream.as_bytes()).await;
    call.end().await;
    let reply = end(reply).await;
    assert_eq!(reply.text(), stream);
    let record = served.record(&reply.run()).await;
    assert_eq!(record.outcome.unwrap().status, RunStatus::Failed);
}

#[tokio::test]
async fn an_answer_in_one_piece_that_breaks_off_breaks_off() {
    let (served, mut d) = one().await;
    let reply = served.post(
        "Aggregated",
        "/v1/completions",
        r#"{"model":"m","prompt":"a"}"#,
    );
    let mut call = d.call().await;
    call.bytes(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{\"ch",
    )
    .await;
    call.dies();
    let reply = end(reply).await;
    assert!(reply.broken && reply.status == 200, "{reply:?}");
}

#[tokio::test]
async fn endpoints_that_only_an_engine_knows_are_passed_on_whole() {
    let (served, mut d) = one().await;
    let reply = served.post(
        "Disaggregated",
        "/v1/responses",
        r#"{"model":"m","input":"a","stream":true}"#,
    );
    let mut call = d.call().await;
    assert_eq!(call.path, "/v1/responses");
    let stream = "event: response.output_text.delta\ndata: {\"type\":\"x\"}\n\nevent: response.completed\ndata: {}\n\n";
    call.begin().await;
    call.chunk(stream.as_bytes()).await;
    call.end().await;
    let reply = end(reply).await;
    assert_eq!((reply.status, reply.text().as_str()), (200, stream));
    let record = served.record(&reply.run()).await;
    assert_eq!(record.reason, Reason::NotDisaggregatable);
    assert_eq!(record.input.unsplittable.as_deref(), Some("endpoint"));
    assert_eq!(record.input.credit, Some(Credit::Unread));
}

#[tokio::test]
async fn a_client_that_leaves_closes_the_engines_connection() {
    let (served, mut d) = one().await;
    for begun in [false, true] {
        let reply = served.post(
            "Aggregated",
            "/v1/completions",
            r#"{"model":"m","prompt":"a","stream":true}"#,
        );
        let mut call = d.call().await;
        if begun {
            call.begin().await;
            call.chunk(b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n")
                .await;
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        reply.abort();
        call.closed().await;
        served.router.holds_nothing().await;
    }
}

#[tokio::test]
async fn a_prompt_goes_where_its_prefix_is_and_the_record_says_what_was_credited() {
    let mut first = Engine::start(samples::card("d0"), NIXL).await;
    let mut second = Engine::start(samples::card("d1"), NIXL).await;
    let served = Served::start(&policy(), &[&first, &second]).await;
    let tokens: Vec<u32> = (0..200).collect();
    let key = HashKey::from_bytes(&[0; 32]);
    let identity = samples::card("d1").kv_identity;
    let salted = |salt: &str| {
        let chain = BlockHasher::new(&key, &identity, salt).chain(&tokens, 16);
        let bytes: Vec<[u8; 16]> = chain.iter().map(|hash| hash.0.to_le_bytes()).collect();
        bytes.concat()
    };
    let stored = wire::BlocksStored {
        hashes: salted("").into(),
    };
    second.daemon.tell(1, watch_event::Event::Stored(stored));
    until("the blocks are known", || {
        served.router.workers.index_blocks() == 12
    })
    .await;
    for (salt, cached) in [("", 192), (r#","cache_salt":"other""#, 0)] {
        let body = format!(r#"{{"model":"m","prompt":{tokens:?}{salt}}}"#);
        let reply = served.post("Aggregated", "/v1/completions", body);
        let call = tokio::select! {
            call = first.call() => call,
            call = second.call() => call,
        };
        call.answer(200, "application/json", ANSWER.as_bytes())
            .await;
        let record = served.record(&end(reply).await.run()).await;
        assert_eq!(record.input.credit, Some(Credit::Tokens));
        assert_eq!(record.input.tokens, 200);
        let holder = record
            .candidates
            .iter()
            .find(|one| one.decode.as_str() == "d1");
        assert_eq!(holder.unwrap().cached_tokens.decode, cached, "{salt}");
        if cached > 0 {
            assert_eq!(record.chosen().unwrap().decode.as_str(), "d1");
        }
    }
}

#[tokio::test]
async fn long_prompts_and_long_answers_pass_whole() {
    let (served, mut d) = one().await;
    let prompt = "0123456789abcdé ".repeat(13_000);
    let body = format!(r#"{{"model":"m","prompt":"{prompt}","max_tokens":1000}}"#);
    let answer = format!(r#"{{"choices":[{{"text":"{}"}}]}}"#, "x".repeat(3 << 20));
    let reply = served.post("Conditional", "/v1/completions", body.clone());
    let call = d.call().await;
    assert!(call.body == body.as_bytes(), "200 KB, byte for byte");
    call.answer(200, "application/json", answer.as_bytes())
        .await;
    let reply = end(reply).await;
    assert!(reply.status == 200 && reply.body == answer.as_bytes());
}

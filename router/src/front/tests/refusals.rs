//! What is refused, and how a client is told.

use std::time::Duration;

use super::*;
use wire::FinishReason::{Cancelled, Stop};

/// Status, type, param, code.
type Expected<'a> = (u16, &'a str, Option<&'a str>, Option<&'a str>);

/// Sends `request` and checks its error.
async fn refused(setup: Setup, request: Request<Body>, expected: Expected<'_>) -> Reply {
    let (routes, _started) = setup.build();
    let reply = Reply::read(routes.oneshot(request).await.unwrap()).await;
    let body = reply.json();
    let error = &body["error"];
    assert_eq!(
        (
            reply.status,
            error["type"].as_str().unwrap(),
            error["param"].as_str(),
            error["code"].as_str()
        ),
        expected,
        "{}",
        reply.text
    );
    assert_eq!(error.as_object().unwrap().len(), 4);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert!(reply.header("x-request-id").unwrap().starts_with("req-"));
    assert_eq!(
        reply.header("retry-after").is_some(),
        matches!(reply.status, 429 | 503)
    );
    reply
}

fn setup() -> Setup {
    Setup::new(says("hi", Stop))
}

const INVALID: &str = "invalid_request_error";

#[tokio::test]
async fn requests_that_cannot_be_served_name_what_is_wrong() {
    let long = "x".repeat(200);
    let table: Vec<(Request<Body>, Expected<'_>)> = vec![
        (
            chat(&json!({"model": "nope"})),
            (404, INVALID, Some("model"), Some("model_not_found")),
        ),
        (
            chat(&json!({"model": "spoilt"})),
            (503, "server_error", None, Some("policy_refused")),
        ),
        (
            chat(&json!({"temperature": 3})),
            (400, INVALID, Some("temperature"), None),
        ),
        (
            chat(&json!({"n": 2})),
            (400, INVALID, Some("n"), Some("unsupported_parameter")),
        ),
        (
            chat(&json!({"messages": [{"role": "user", "content": long}]})),
            (
                400,
                INVALID,
                Some("messages"),
                Some("context_length_exceeded"),
            ),
        ),
        (
            chat(&json!({"max_tokens": 96})),
            (
                400,
                INVALID,
                Some("max_tokens"),
                Some("context_length_exceeded"),
            ),
        ),
        (
            completion(&json!({"prompt": [1, 99]})),
            (400, INVALID, Some("prompt[1]"), None),
        ),
        (
            completion(&json!({"stop_token_ids": [99]})),
            (400, INVALID, Some("stop_token_ids[0]"), None),
        ),
        (
            completion(&json!({"prompt": ""})),
            (400, INVALID, Some("prompt"), None),
        ),
        (
            post("/v1/chat/completions", "{\"model\": }"),
            (400, INVALID, None, Some("invalid_json")),
        ),
        (
            post("/v1/completions", ""),
            (400, INVALID, None, Some("invalid_json")),
        ),
        (
            post("/v1/completions", &b"{\"model\": \"\xff\"}"[..]),
            (400, INVALID, None, Some("invalid_json")),
        ),
        (
            post("/v1/embeddings", "{}"),
            (404, INVALID, None, Some("unknown_url")),
        ),
        (
            Request::get("/v1/models/%ff").body(Body::empty()).unwrap(),
            (400, INVALID, Some("model"), None),
        ),
        (
            chat(&json!({"max_completion_tokens": 96})),
            (
                400,
                INVALID,
                Some("max_completion_tokens"),
                Some("context_length_exceeded"),
            ),
        ),
        (
            Request::get("/v1/models/nope").body(Body::empty()).unwrap(),
            (404, INVALID, Some("model"), Some("model_not_found")),
        ),
        (
            Request::get("/v1/chat/completions")
                .body(Body::empty())
                .unwrap(),
            (405, INVALID, None, Some("method_not_allowed")),
        ),
    ];
    for (request, expected) in table {
        refused(setup(), request, expected).await;
    }
}

#[tokio::test]
async fn a_wrong_method_is_told_the_right_one() {
    let request = Request::get("/v1/completions").body(Body::empty()).unwrap();
    let reply = refused(
        setup(),
        request,
        (405, INVALID, None, Some("method_not_allowed")),
    )
    .await;
    assert_eq!(reply.header("allow"), Some("POST"));
}

#[tokio::test]
async fn a_prompt_that_is_too_long_is_told_both_numbers() {
    let request = completion(&json!({"prompt": "x".repeat(120)}));
    let reply = refused(
        setup(),
        request,
        (
            400,
            INVALID,
            Some("prompt"),
            Some("context_length_exceeded"),
        ),
    )
    .await;
    let message = reply.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(
        message.contains("100 tokens") && message.contains("120 tokens"),
        "{message}"
    );
}

#[tokio::test]
async fn a_prompt_that_is_hopelessly_long_is_refused_without_being_tokenised() {
    let reply = refused(
        setup(),
        completion(&json!({"prompt": "x".repeat(3_000_000)})),
        (
            400,
            INVALID,
            Some("prompt"),
            Some("context_length_exceeded"),
        ),
    )
    .await;
    assert!(
        reply.text.contains("at least 428572 tokens"),
        "{}",
        reply.text
    );
}

#[tokio::test]
async fn a_template_that_refuses_the_messages_is_told_in_its_words() {
    let mut setup = setup();
    setup.scripted.artifacts = Some(Arc::new(artifacts(
        "{{ raise_exception('roles must alternate') }}",
    )));
    let reply = refused(
        setup,
        chat(&json!({})),
        (400, INVALID, Some("messages"), None),
    )
    .await;
    assert!(
        reply.text.contains("roles must alternate"),
        "{}",
        reply.text
    );
}

#[tokio::test]
async fn a_template_that_is_broken_is_our_fault() {
    let mut setup = setup();
    setup.scripted.artifacts = Some(Arc::new(artifacts("{{ messages | nothing }}")));
    let reply = refused(
        setup,
        chat(&json!({})),
        (500, "server_error", None, Some("model_unusable")),
    )
    .await;
    assert!(reply.text.contains("template is broken"), "{}", reply.text);
}

#[tokio::test]
async fn no_error_repeats_what_is_long() {
    let long = "x".repeat(50_000);
    let mut setup = setup();
    let template = "{{ raise_exception('not ' ~ messages[0].content) }}";
    setup.scripted.artifacts = Some(Arc::new(artifacts(template)));
    let (routes, _started) = setup.build();
    for request in [
        chat(&json!({"model": long})),
        chat(&json!({"messages": [{"role": long, "content": "x"}]})),
        chat(&json!({"messages": [{"role": "user", "content": [{"type": long}]}]})),
        chat(&json!({"messages": [{"role": "user", "content": long}]})),
        chat(&json!({"response_format": {"type": long}})),
        post(&format!("/v1/{long}"), ""),
        Request::get(format!("/v1/models/{long}"))
            .body(Body::empty())
            .unwrap(),
        Request::delete(format!("/v1/models/{long}"))
            .body(Body::empty())
            .unwrap(),
    ] {
        let reply = Reply::read(routes.clone().oneshot(request).await.unwrap()).await;
        assert!((400..500).contains(&reply.status), "{}", reply.status);
        assert!(reply.text.len() < 1500, "{}", reply.text);
    }
}

#[tokio::test]
async fn a_model_without_a_template_names_the_other_endpoint() {
    let mut setup = setup();
    setup.scripted.artifacts = Some(Arc::new(artifacts("")));
    let reply = refused(
        setup,
        chat(&json!({})),
        (
            400,
            INVALID,
            Some("messages"),
            Some("unsupported_parameter"),
        ),
    )
    .await;
    assert!(reply.text.contains("use /v1/completions"), "{}", reply.text);
}

#[tokio::test]
async fn a_model_that_no_worker_serves_yet_is_unavailable() {
    let mut setup = setup();
    setup.scripted.artifacts = None;
    refused(
        setup,
        chat(&json!({})),
        (503, "server_error", None, Some("model_not_ready")),
    )
    .await;
}

#[tokio::test]
async fn a_model_whose_files_are_broken_is_our_fault() {
    let mut setup = setup();
    let mut broken = artifacts("");
    broken.tokenizer = Bytes::from_static(b"{}");
    setup.scripted.artifacts = Some(Arc::new(broken));
    let reply = refused(
        setup,
        chat(&json!({})),
        (500, "server_error", None, Some("model_unusable")),
    )
    .await;
    assert!(
        reply.text.contains("tokenizer.json cannot be loaded"),
        "{}",
        reply.text
    );
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_whether_or_not_it_says_its_length() {
    let body = || "x".repeat(101);
    let announced = Request::post("/v1/completions")
        .header("content-length", "101")
        .body(Body::from(body()))
        .unwrap();
    let chunked = post(
        "/v1/completions",
        Body::from_stream(futures::stream::iter([Ok::<_, std::io::Error>(body())])),
    );
    for request in [announced, chunked] {
        let mut setup = setup();
        setup.config.max_body_bytes = 100;
        refused(
            setup,
            request,
            (413, INVALID, None, Some("request_too_large")),
        )
        .await;
    }
}

#[tokio::test]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let mut setup = setup();
    setup.config.body_timeout = Duration::from_millis(10);
    let never = Body::from_stream(futures::stream::pending::<std::io::Result<Bytes>>());
    refused(
        setup,
        post("/v1/completions", never),
        (408, INVALID, None, Some("request_timeout")),
    )
    .await;
}

#[tokio::test]
async fn a_mode_that_nobody_knows_is_refused() {
    let mut request = chat(&json!({}));
    request
        .headers_mut()
        .insert("x-baton-mode", "Fast".parse().unwrap());
    let reply = refused(setup(), request, (400, INVALID, Some("x-baton-mode"), None)).await;
    assert!(
        reply
            .text
            .contains("use Aggregated, Disaggregated or Conditional"),
        "{}",
        reply.text
    );
}

#[tokio::test]
async fn a_run_that_fails_before_its_first_token_gets_its_own_status() {
    for request in [chat(&json!({})), chat(&json!({"stream": true}))] {
        let expected = (503, "server_error", None, Some("no_worker"));
        let reply = refused(Setup::new(vec![failed(503)]), request, expected).await;
        assert_eq!(reply.header("retry-after"), Some("3"));
        assert_eq!(reply.header("x-baton-run"), Some("run-7"));
    }
}

#[tokio::test]
async fn a_run_that_fails_after_its_first_token_ends_a_stream_with_an_error_and_no_done() {
    let script = vec![token(ids("a")[0]), failed(503)];
    let reply = ask(script.clone(), chat(&json!({"stream": true}))).await;
    assert_eq!(reply.status, 200);
    assert!(
        reply.text.contains("\n\nevent: error\ndata: {\"error\":"),
        "{}",
        reply.text
    );
    let (events, done) = reply.events();
    assert!(!done);
    assert_eq!(events.last().unwrap()["error"]["code"], "no_worker");
    assert_eq!(ask(script, chat(&json!({}))).await.status, 503);
}

#[tokio::test]
async fn a_run_that_is_lost_or_cancelled_is_never_taken_for_an_answer() {
    let cancelled = says("a", Cancelled);
    assert_eq!(
        ask(cancelled.clone(), chat(&json!({}))).await.json()["error"]["code"],
        "cancelled"
    );
    let (events, done) = ask(cancelled, completion(&json!({"stream": true})))
        .await
        .events();
    assert!(!done && events.last().unwrap().get("error").is_some());

    // Dispatch drops its end without a word.
    let (routes, mut started) = Setup::new(vec![token(0)]).build();
    let response = tokio::spawn(routes.oneshot(chat(&json!({}))));
    drop(started.recv().await.unwrap());
    let reply = Reply::read(response.await.unwrap().unwrap()).await;
    assert_eq!(
        (reply.status, reply.json()["error"]["code"].clone()),
        (500, json!("internal_error"))
    );
}

//! What a run is given for what a client sends.

use super::*;
use baton_telemetry::context::TraceContext;
use wire::FinishReason::Stop;

/// The run that `request` starts, and its answer.
async fn run_of(setup: Setup, request: Request<Body>) -> (RunRequest, Reply) {
    let (routes, mut started) = setup.build();
    let reply = Reply::read(routes.oneshot(request).await.unwrap()).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    (started.recv().await.unwrap().0, reply)
}

fn setup() -> Setup {
    Setup::new(says("x", Stop))
}

#[tokio::test]
async fn a_chat_is_written_by_the_template_and_may_use_what_the_context_leaves() {
    let (run, _) = run_of(setup(), chat(&json!({}))).await;
    assert_eq!(run.tokens, ids("u:hi;"));
    assert_eq!(run.stopping.max_tokens, 95);
    assert!(run.splittable);
    assert_eq!(run.policy.name, "p");
}

#[tokio::test]
async fn a_completion_is_taken_as_it_is_and_gets_sixteen_tokens() {
    for prompt in [
        json!("hi"),
        json!(["hi"]),
        json!(ids("hi")),
        json!([ids("hi")]),
    ] {
        let (run, _) = run_of(setup(), completion(&json!({"prompt": prompt}))).await;
        assert_eq!(run.tokens, ids("hi"));
        assert_eq!(run.stopping.max_tokens, 16);
    }
}

#[tokio::test]
async fn a_long_prompt_is_tokenised_as_a_short_one() {
    let mut setup = setup();
    let mut long = artifacts("");
    long.max_context = 100_000;
    setup.scripted.artifacts = Some(Arc::new(long));
    let text = "ab ".repeat(20_000);
    let (run, _) = run_of(setup, completion(&json!({"prompt": text}))).await;
    assert_eq!(run.tokens, ids(&text));
}

#[tokio::test]
async fn sampling_and_stopping_are_passed_on() {
    let fields = json!({"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 42, "max_completion_tokens": 9,
        "min_tokens": 2, "ignore_eos": true, "stop_token_ids": [3], "logprobs": true, "top_logprobs": 2, "cache_salt": "tenant",
        "priority": -3});
    let (run, _) = run_of(setup(), chat(&fields)).await;
    assert_eq!(
        run.sampling,
        wire::Sampling {
            temperature: 0.5,
            top_p: 0.9,
            top_k: 7,
            seed: 42,
            top_logprobs: Some(2),
            min_p: 0.1,
        }
    );
    assert_eq!(
        run.stopping,
        wire::Stopping {
            max_tokens: 9,
            min_tokens: 2,
            ignore_eos: true,
            stop_token_ids: vec![3],
        }
    );
    assert_eq!(run.cache_salt, "tenant");
    // As with vLLM the smaller number is the more urgent; inside it is the larger.
    assert_eq!(run.priority, 3);
}

#[tokio::test]
async fn requests_without_a_seed_get_one_each() {
    let (routes, mut started) = setup().build();
    let mut seeds = Vec::new();
    for _ in 0..2 {
        routes.clone().oneshot(chat(&json!({}))).await.unwrap();
        seeds.push(started.recv().await.unwrap().0.sampling.seed);
    }
    assert_ne!(seeds[0], seeds[1]);
}

#[tokio::test]
async fn the_id_of_a_request_is_kept_or_made_and_returned() {
    let with = |id: &str| {
        let mut request = chat(&json!({}));
        request
            .headers_mut()
            .insert("x-request-id", id.parse().unwrap());
        request
    };
    let (run, reply) = run_of(setup(), with("mine-1")).await;
    assert_eq!(
        (run.request_id.as_str(), reply.header("x-request-id")),
        ("mine-1", Some("mine-1"))
    );
    let (run, reply) = run_of(setup(), with("not visible")).await;
    assert!(run.request_id.starts_with("req-"));
    assert_eq!(reply.header("x-request-id"), Some(run.request_id.as_str()));
}

#[tokio::test]
async fn a_mode_counts_only_where_the_policy_allows_it() {
    let with_mode = || {
        let mut request = chat(&json!({}));
        request
            .headers_mut()
            .insert("x-baton-mode", "Disaggregated".parse().unwrap());
        request
    };
    let (run, _) = run_of(setup(), with_mode()).await;
    assert_eq!(run.mode, Some(crate::run::Mode::Disaggregated));
    let mut strict = setup();
    let policy = Policy::new("p", "tiny", &[], &["decode"]);
    assert_eq!(policy.overrides, Overrides::Ignored);
    strict.scripted.policy = Arc::new(PolicyHandle::new(policy, Moment::default()));
    let (run, _) = run_of(strict, with_mode()).await;
    assert_eq!(run.mode, None);
}

#[tokio::test]
async fn trace_context_is_passed_on() {
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let mut request = chat(&json!({}));
    request
        .headers_mut()
        .insert("traceparent", parent.parse().unwrap());
    let (run, _) = run_of(setup(), request).await;
    assert_eq!(run.traceparent, TraceContext::parse(parent));
}

#[tokio::test]
async fn an_alias_answers_under_its_own_name() {
    let (_, reply) = run_of(setup(), chat(&json!({"model": "org/alias"}))).await;
    assert_eq!(reply.json()["model"], "org/alias");
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_run() {
    // While it waits for a whole answer.
    let (routes, mut started) = Setup::new(vec![token(0)]).build();
    let waiting = tokio::spawn(routes.oneshot(chat(&json!({}))));
    let (_, sink) = started.recv().await.unwrap();
    waiting.abort();
    sink.client_gone.cancelled().await;
    // While it reads a stream.
    let (routes, mut started) = Setup::new(vec![token(0)]).build();
    let response = routes
        .oneshot(chat(&json!({"stream": true})))
        .await
        .unwrap();
    let (_, sink) = started.recv().await.unwrap();
    assert!(!sink.client_gone.is_cancelled());
    drop(response);
    sink.client_gone.cancelled().await;
}

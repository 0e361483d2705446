//! Who is served, who waits, and who is told to come again; keys and what they allow.

use std::time::Duration;

use super::super::keys;
use super::*;
use wire::FinishReason::Stop;

fn one_at_a_time(max_waiting: usize) -> Setup {
    let mut setup = Setup::new(Vec::new());
    setup.config.max_in_flight = 1;
    setup.config.max_waiting = max_waiting;
    setup
}

async fn finish(sink: &RunSink) {
    let end = says("", Stop).pop().unwrap();
    sink.events.send(end).await.unwrap();
}

#[tokio::test]
async fn the_more_urgent_request_is_served_first() {
    let (front, mut started) = one_at_a_time(10).front();
    let routes = front.routes();
    let ask = |priority: i32| {
        let request =
            chat(&json!({"priority": priority, "user": "x", "max_tokens": 10 + priority}));
        tokio::spawn(routes.clone().oneshot(request))
    };
    let first = ask(0);
    let (_, mut sink) = started.recv().await.unwrap();
    let mut answers = vec![first];
    for (waiting, priority) in [7, -3, 0].into_iter().enumerate() {
        answers.push(ask(priority));
        while front.gate.counts().1 <= waiting {
            tokio::task::yield_now().await;
        }
    }
    let mut order = Vec::new();
    for _ in 0..3 {
        finish(&sink).await;
        let (run, next) = started.recv().await.unwrap();
        order.push(i64::from(run.stopping.max_tokens) - 10);
        sink = next;
    }
    // As with vLLM, the smaller number is the more urgent.
    assert_eq!(order, [-3, 0, 7]);
    finish(&sink).await;
    for answer in answers {
        assert_eq!(answer.await.unwrap().unwrap().status(), 200);
    }
    assert_eq!(front.gate.counts(), (0, 0));
}

#[tokio::test]
async fn with_a_full_line_a_request_is_told_to_come_again_and_a_finished_one_makes_room() {
    let (routes, mut started) = one_at_a_time(0).build();
    let first = tokio::spawn(routes.clone().oneshot(chat(&json!({}))));
    let (_, sink) = started.recv().await.unwrap();
    let reply = Reply::read(routes.clone().oneshot(chat(&json!({}))).await.unwrap()).await;
    assert_eq!(
        (reply.status, reply.header("retry-after")),
        (503, Some("1"))
    );
    assert_eq!(reply.json()["error"]["type"], "server_error");
    assert_eq!(reply.json()["error"]["code"], "overloaded");
    // What is wrong is told at once, not after a wait.
    let wrong = chat(&json!({"temperature": 9}));
    assert_eq!(routes.clone().oneshot(wrong).await.unwrap().status(), 400);
    finish(&sink).await;
    assert_eq!(first.await.unwrap().unwrap().status(), 200);
    let again = tokio::spawn(routes.oneshot(chat(&json!({}))));
    started.recv().await.unwrap();
    again.abort();
}

#[tokio::test]
async fn nobody_waits_for_longer_than_said() {
    let mut setup = one_at_a_time(10);
    setup.config.waiting_timeout = Duration::from_millis(20);
    let (routes, mut started) = setup.build();
    let first = tokio::spawn(routes.clone().oneshot(chat(&json!({}))));
    let _running = started.recv().await.unwrap();
    let reply = Reply::read(routes.oneshot(chat(&json!({}))).await.unwrap()).await;
    assert_eq!(
        (reply.status, reply.header("retry-after")),
        (503, Some("1"))
    );
    first.abort();
}

#[tokio::test]
async fn a_client_that_leaves_while_it_waits_leaves_nothing() {
    let (front, mut started) = one_at_a_time(10).front();
    let routes = front.routes();
    let first = tokio::spawn(routes.clone().oneshot(chat(&json!({}))));
    let (_, sink) = started.recv().await.unwrap();
    let waiting = tokio::spawn(routes.oneshot(chat(&json!({}))));
    while front.gate.counts().1 == 0 {
        tokio::task::yield_now().await;
    }
    waiting.abort();
    waiting.await.unwrap_err();
    assert_eq!(front.gate.counts(), (1, 0));
    finish(&sink).await;
    first.await.unwrap().unwrap();
    assert_eq!(front.gate.counts(), (0, 0));
    assert!(started.try_recv().is_err(), "it was never run");
}

#[tokio::test(start_paused = true)]
async fn scrapers_see_the_line_and_how_each_wait_ended() {
    let setup = one_at_a_time(2);
    let seen = setup.seen();
    let (front, mut started) = setup.front();
    let routes = front.routes();
    let ask = |priority: i32| {
        let request = chat(&json!({"priority": priority}));
        tokio::spawn(routes.clone().oneshot(request))
    };
    let waiting = async |requests: usize| {
        while front.gate.counts().1 != requests {
            tokio::task::yield_now().await;
        }
    };
    let first = ask(0);
    let (_, sink) = started.recv().await.unwrap();
    // One that leaves; one that is displaced by one more urgent; one that finds the line full; two that are served or too late.
    let left = ask(0);
    waiting(1).await;
    left.abort();
    waiting(0).await;
    let served = ask(0);
    waiting(1).await;
    let displaced = ask(1);
    waiting(2).await;
    seen(&["baton_waiting_requests 2"]);
    let late = ask(0);
    assert_eq!(displaced.await.unwrap().unwrap().status(), 503);
    assert_eq!(ask(5).await.unwrap().unwrap().status(), 503);
    tokio::time::advance(Duration::from_secs(3)).await;
    finish(&sink).await;
    first.await.unwrap().unwrap();
    let (_, sink) = started.recv().await.unwrap();
    assert_eq!(late.await.unwrap().unwrap().status(), 503);
    let closed = ask(0);
    waiting(1).await;
    front.gate.close();
    assert_eq!(closed.await.unwrap().unwrap().status(), 503);
    finish(&sink).await;
    served.await.unwrap().unwrap();
    seen(&[
        "baton_waiting_requests 0",
        "baton_waiting_duration_seconds_count{outcome=\"left\"} 1",
        "baton_waiting_duration_seconds_count{outcome=\"full\"} 1",
        "baton_waiting_duration_seconds_count{outcome=\"served\"} 1",
        "baton_waiting_duration_seconds_bucket{le=\"2.048\",outcome=\"served\"} 0",
        "baton_waiting_duration_seconds_bucket{le=\"4.096\",outcome=\"served\"} 1",
        "baton_waiting_duration_seconds_count{outcome=\"late\"} 1",
        "baton_waiting_duration_seconds_count{outcome=\"closed\"} 1",
        "baton_waiting_refusals_total{cause=\"full\"} 2",
        "baton_waiting_refusals_total{cause=\"late\"} 1",
        "baton_waiting_refusals_total{cause=\"closed\"} 1",
    ]);
}

#[tokio::test]
async fn an_answer_too_large_to_be_kept_is_asked_to_be_streamed() {
    let mut setup = Setup::new(says("x", Stop));
    let mut large = artifacts("{{ messages[0].content }}");
    large.max_context = 10_000_000;
    setup.scripted.artifacts = Some(Arc::new(large));
    let (routes, _started) = setup.build();
    let fields = json!({"logprobs": true, "top_logprobs": 20});
    let reply = Reply::read(routes.clone().oneshot(chat(&fields)).await.unwrap()).await;
    assert_eq!(reply.status, 400);
    assert!(reply.text.contains("set stream"), "{}", reply.text);
    let fields = json!({"logprobs": true, "top_logprobs": 20, "stream": true});
    assert_eq!(routes.oneshot(chat(&fields)).await.unwrap().status(), 200);
}

/// `secret-a` of tenant `a` and `secret-b` of tenant `b`.
fn with_keys(fields: &str) -> (Setup, tempfile::TempDir) {
    let mut setup = Setup::new(says("x", Stop));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.json");
    let hash = |key: &str| {
        let digest = ring::digest::digest(&ring::digest::SHA256, key.as_bytes());
        let digits: Vec<String> = digest
            .as_ref()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        format!("sha256:{}", digits.concat())
    };
    let text = format!(
        r#"[{{"name": "a", "hash": "{}"{fields}}}, {{"name": "b", "hash": "{}"}}]"#,
        hash("secret-a"),
        hash("secret-b")
    );
    std::fs::write(&path, text).unwrap();
    setup.access.keys = Some(Arc::new(keys::open(path, salts()).unwrap()));
    (setup, folder)
}

fn under(key: &str, mut request: Request<Body>) -> Request<Body> {
    let value = format!("Bearer {key}").parse().unwrap();
    request.headers_mut().insert("authorization", value);
    request
}

#[tokio::test]
async fn only_known_keys_come_in_and_health_needs_none() {
    let (setup, _folder) = with_keys("");
    let (routes, mut started) = setup.build();
    let models = || Request::get("/v1/models").body(Body::empty()).unwrap();
    for request in [
        chat(&json!({})),
        under("secret-c", chat(&json!({}))),
        models(),
        under("", models()),
        post("/v1/nothing", ""),
    ] {
        let reply = Reply::read(routes.clone().oneshot(request).await.unwrap()).await;
        let error = &reply.json()["error"];
        assert_eq!(reply.status, 401);
        assert_eq!(error["type"], "authentication_error");
        assert_eq!(error["code"], "invalid_api_key");
        assert_eq!(error.as_object().unwrap().len(), 4);
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
        assert!(reply.header("x-request-id").is_some());
        assert!(!reply.text.contains("secret"), "{}", reply.text);
    }
    assert!(started.try_recv().is_err());
    for request in [
        under("secret-a", chat(&json!({}))),
        under("secret-b", models()),
        Request::get("/healthz").body(Body::empty()).unwrap(),
    ] {
        assert_eq!(routes.clone().oneshot(request).await.unwrap().status(), 200);
    }
}

#[tokio::test]
async fn tenants_share_no_prefixes_whatever_they_send() {
    let (setup, _folder) = with_keys("");
    let (routes, mut started) = setup.build();
    let mut salts = Vec::new();
    for (key, salt) in [
        ("secret-a", ""),
        ("secret-b", ""),
        ("secret-a", "s"),
        ("secret-b", "s"),
        ("secret-b", "a"),
    ] {
        let request = under(key, chat(&json!({"cache_salt": salt})));
        routes.clone().oneshot(request).await.unwrap();
        salts.push(started.recv().await.unwrap().0.cache_salt);
    }
    let distinct: std::collections::BTreeSet<&String> = salts.iter().collect();
    assert_eq!(distinct.len(), salts.len(), "{salts:?}");
    let again = under("secret-a", chat(&json!({"cache_salt": "s"})));
    routes.oneshot(again).await.unwrap();
    assert_eq!(started.recv().await.unwrap().0.cache_salt, salts[2]);
}

#[tokio::test]
async fn a_key_has_its_own_limits() {
    let fields = r#", "maxInFlight": 1, "requestsPerMinute": 12, "mostUrgentPriority": 3"#;
    let (mut setup, _folder) = with_keys(fields);
    setup.scripted.script = Vec::new();
    let (routes, mut started) = setup.build();
    let first = tokio::spawn(
        routes
            .clone()
            .oneshot(under("secret-a", chat(&json!({"priority": -9})))),
    );
    let (run, sink) = started.recv().await.unwrap();
    assert_eq!(run.priority, -3, "no more urgent than the key may be");
    let limited = async |expected: &str| {
        let request = under("secret-a", chat(&json!({})));
        let reply = Reply::read(routes.clone().oneshot(request).await.unwrap()).await;
        assert_eq!(reply.status, 429);
        assert_eq!(reply.json()["error"]["code"], "rate_limit_exceeded");
        assert!(reply.text.contains(expected), "{}", reply.text);
        reply.header("retry-after").unwrap().parse::<u64>().unwrap()
    };
    limited("in flight").await;
    // Another key does not notice.
    let other = tokio::spawn(routes.clone().oneshot(under("secret-b", chat(&json!({})))));
    finish(&started.recv().await.unwrap().1).await;
    assert_eq!(other.await.unwrap().unwrap().status(), 200);
    finish(&sink).await;
    first.await.unwrap().unwrap();
    // Two at once are ten seconds' worth; the second ends at once, and the third has to wait.
    let second = tokio::spawn(routes.clone().oneshot(under("secret-a", chat(&json!({})))));
    finish(&started.recv().await.unwrap().1).await;
    second.await.unwrap().unwrap();
    let wait = limited("requests a minute").await;
    assert!((1..=5).contains(&wait), "{wait}");
}

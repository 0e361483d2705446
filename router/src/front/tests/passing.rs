//! Requests of engines: what is read of them, and what the run is given.

use baton_placement::record::Credit;
use http::StatusCode;

use super::*;
use crate::forward::Forward;
use crate::forward::edit::Edit;
use crate::front::keys;
use crate::run::EngineHead;

const TEMPLATE: &str = "{% if tools %}[{{ tools[0].name }}]{% endif %}{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}";

/// A front before engines with a context of 100 tokens.
fn setup(text: Result<(), Credit>) -> Setup {
    let head = EngineHead {
        status: StatusCode::OK,
        headers: HeaderMap::new(),
    };
    let mut setup = Setup::new(vec![
        RunEvent::Answer(head),
        RunEvent::Bytes(Bytes::from_static(b"the engine's")),
        RunEvent::Finished {
            reason: wire::FinishReason::Stop,
            usage: Usage::default(),
        },
    ]);
    setup.scripted.engines = Some(PassedOn {
        max_context: 100,
        text: text.map(|()| Arc::new(artifacts(TEMPLATE))),
    });
    setup
}

async fn run_of(setup: Setup, request: Request<Body>) -> (RunRequest, Arc<Forward>) {
    let (routes, mut started) = setup.build();
    let reply = Reply::read(routes.oneshot(request).await.unwrap()).await;
    assert_eq!((reply.status, reply.text.as_str()), (200, "the engine's"));
    let run = started.recv().await.unwrap().0;
    let forward = run.forward.clone().unwrap();
    (run, forward)
}

#[tokio::test]
async fn a_text_is_tokenised_to_find_what_workers_hold_of_it() {
    let body = r#"{"model":"tiny", "messages":[{"role":"user","content":"hi"}], "tools":[{"name":"t"}],"made_up":1}"#;
    let (run, forward) = run_of(setup(Ok(())), post("/v1/chat/completions", body)).await;
    assert_eq!(&forward.body[..], body.as_bytes());
    assert_eq!(run.tokens, ids("[t]u:hi;"));
    assert_eq!((forward.credit, forward.prompt_tokens), (Credit::Tokens, 8));
    assert_eq!(run.stopping.max_tokens, 92);
    assert!(run.splittable && forward.edits.is_empty() && !forward.stream);
}

#[tokio::test]
async fn what_cannot_be_tokenised_is_estimated_and_passed_on_all_the_same() {
    let text = r#"{"model":"tiny","prompt":"0123456789"}"#;
    let picture =
        r#"{"model":"tiny","messages":[{"role":"user","content":[{"type":"image_url"}]}]}"#;
    let own = r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"chat_template":"x"}"#;
    let refused = r#"{"model":"tiny","messages":[{"content":"no role"}]}"#;
    let table = [
        (Ok(()), "/v1/completions", text, Credit::Tokens, 10),
        (
            Err(Credit::NoTokenizer),
            "/v1/completions",
            text,
            Credit::NoTokenizer,
            3,
        ),
        (
            Err(Credit::TextUnverified),
            "/v1/completions",
            text,
            Credit::TextUnverified,
            3,
        ),
        // More than the context holds is the engine's to refuse: it counts as what fits.
        (Ok(()), "/v1/chat/completions", picture, Credit::NotText, 98),
        (Ok(()), "/v1/chat/completions", own, Credit::Unread, 1),
        (Ok(()), "/v1/chat/completions", refused, Credit::Unread, 1),
    ];
    for (engine, path, body, credit, tokens) in table {
        let (run, forward) = run_of(setup(engine), post(path, body)).await;
        assert_eq!(
            (forward.credit, forward.prompt_tokens),
            (credit, tokens),
            "{body}"
        );
        assert_eq!(run.tokens.is_empty(), credit != Credit::Tokens);
    }
    // Token ids are the engine's own.
    let body = r#"{"model":"tiny","prompt":[5,6,7]}"#;
    let (run, _) = run_of(
        setup(Err(Credit::NoTokenizer)),
        post("/v1/completions", body),
    )
    .await;
    assert_eq!(run.tokens, [5, 6, 7]);
}

#[tokio::test]
async fn a_long_body_is_read_as_a_short_one() {
    let text = "ab ".repeat(20_000);
    let body = json!({"model": "tiny", "prompt": text}).to_string();
    let (run, forward) = run_of(setup(Ok(())), post("/v1/completions", body.clone())).await;
    assert_eq!(&forward.body[..], body.as_bytes());
    assert_eq!(
        (run.tokens.len(), forward.credit),
        (0, Credit::Unread),
        "no engine takes it"
    );
}

#[tokio::test]
async fn the_salt_and_the_priority_of_a_key_are_written_into_the_body() {
    let mut setup = setup(Ok(()));
    // Of the key `secret`.
    let entries = r#"[{"name": "a", "hash": "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b", "cacheSalt": "t", "mostUrgentPriority": 5}]"#;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.json");
    std::fs::write(&path, entries).unwrap();
    setup.access.keys = Some(Arc::new(keys::open(path).unwrap()));
    let body = r#"{"model":"tiny","prompt":"hi","cache_salt":"s","priority":-9}"#;
    let mut request = post("/v1/completions", body);
    let bearer = "Bearer secret".parse().unwrap();
    request.headers_mut().insert("authorization", bearer);
    let (run, forward) = run_of(setup, request).await;
    let salt = format!("\"{}\"", run.cache_salt);
    assert!(run.cache_salt.len() == 64, "the tenant's own: {salt}");
    let expected = [
        Edit::Set("cache_salt", salt),
        Edit::Replace("priority", "5".to_owned()),
    ];
    assert_eq!(forward.edits, expected);
    assert_eq!(run.priority, -5);
}

#[tokio::test]
async fn an_unknown_model_is_said_to_be_unknown_whatever_else_is_asked() {
    let body = r#"{"model":"other","messages":[],"tools":[{}]}"#;
    let (routes, _started) = setup(Ok(())).build();
    let reply = Reply::read(
        routes
            .oneshot(post("/v1/chat/completions", body))
            .await
            .unwrap(),
    )
    .await;
    assert_eq!(
        (reply.status, &reply.json()["error"]["code"]),
        (404, &json!("model_not_found"))
    );
    // Where no engine serves, what only engines know is no route.
    let (routes, _started) = Setup::new(Vec::new()).build();
    let reply = Reply::read(
        routes
            .oneshot(post("/v1/responses", r#"{"model":"tiny"}"#))
            .await
            .unwrap(),
    )
    .await;
    assert_eq!(reply.status, 404);
}

//! Requests of engines: what is read of them, and what the run is given.

use baton_placement::record::Credit;
use http::StatusCode;
use http::header::RETRY_AFTER;

use super::*;
use crate::forward::{Forward, Keyed};
use crate::front::keys;
use crate::run::{EngineHead, EngineRefusal};

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
    assert!(run.splittable && forward.keyed.is_none() && !forward.stream);
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

/// A front whose one key, `secret`, has these fields too.
fn keyed(fields: &str) -> (Setup, tempfile::TempDir) {
    let mut setup = setup(Ok(()));
    let entries = format!(
        r#"[{{"name": "a", "hash": "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"{fields}}}]"#
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.json");
    std::fs::write(&path, entries).unwrap();
    setup.access.keys = Some(Arc::new(keys::open(path, salts()).unwrap()));
    (setup, folder)
}

fn under_key(path: &str, body: &str) -> Request<Body> {
    let mut request = post(path, body.to_owned());
    let bearer = "Bearer secret".parse().unwrap();
    request.headers_mut().insert("authorization", bearer);
    request
}

#[tokio::test]
async fn the_salt_and_the_priority_of_a_key_go_with_the_request() {
    let (setup, _folder) = keyed(r#", "cacheSalt": "t", "mostUrgentPriority": 5"#);
    let body = r#"{"model":"tiny","prompt":"hi","cache_salt":"s","priority":-9}"#;
    let (run, forward) = run_of(setup, under_key("/v1/completions", body)).await;
    assert!(run.cache_salt.len() == 64, "the tenant's own");
    let expected = Keyed {
        cache_salt: Some(run.cache_salt.clone()),
        priority: Some(5),
    };
    assert_eq!(forward.keyed, Some(expected));
    assert_eq!(run.priority, -5);
}

#[tokio::test]
async fn a_keys_bound_holds_whatever_the_request_says() {
    let bound = r#", "mostUrgentPriority": 5"#;
    for (fields, key, engine, line) in [
        ("", bound, Some(5), -5),
        (r#","priority":null"#, bound, Some(5), -5),
        (r#","priority":-3000000000"#, bound, Some(5), -5),
        (r#","priority":7"#, bound, Some(7), -7),
        (
            r#","priority":3000000000"#,
            bound,
            Some(3_000_000_000),
            i32::MIN,
        ),
        ("", r#", "mostUrgentPriority": -5"#, Some(0), 0),
        (r#","priority":-3000000000"#, "", None, i32::MAX),
        (r#","priority":"-9""#, "", None, 0),
    ] {
        let (setup, _folder) = keyed(key);
        let body = format!(r#"{{"model":"tiny","prompt":"hi"{fields}}}"#);
        let (run, forward) = run_of(setup, under_key("/v1/completions", &body)).await;
        let keyed = forward.keyed.as_ref().unwrap();
        assert_eq!(
            (keyed.priority, run.priority),
            (engine, line),
            "{fields} {key}"
        );
    }
    // An engine may read -9 here.
    let (setup, _folder) = keyed(bound);
    let (routes, _started) = setup.build();
    let body = r#"{"model":"tiny","prompt":"hi","priority":"-9"}"#;
    let reply = routes.oneshot(under_key("/v1/completions", body)).await;
    let reply = Reply::read(reply.unwrap()).await;
    assert_eq!(
        (reply.status, &reply.json()["error"]["param"]),
        (400, &json!("priority"))
    );
}

#[tokio::test]
async fn each_429_and_503_says_when_to_ask_again_an_engines_too() {
    for (status, said, known, expected) in [
        (429, None, None, Some("1")),
        (503, None, Some(7), Some("7")),
        (503, Some("4"), Some(7), Some("4")),
        (
            429,
            Some("Wed, 21 Oct 2026 07:28:00 GMT"),
            Some(2),
            Some("2"),
        ),
        (400, None, None, None),
    ] {
        let RunEvent::Failed(failure) = failed(status) else {
            panic!("it fails");
        };
        let headers = said.map(|said| (RETRY_AFTER, said.parse().unwrap()));
        let refusal = EngineRefusal {
            head: EngineHead {
                status: StatusCode::from_u16(status).unwrap(),
                headers: HeaderMap::from_iter(headers),
            },
            body: Bytes::from_static(b"{\"the engine's\":1}"),
        };
        let mut setup = setup(Ok(()));
        setup.scripted.script = vec![RunEvent::Failed(RunFailure {
            engine: Some(Box::new(refusal)),
            retry_after_seconds: known,
            ..failure
        })];
        let (routes, _started) = setup.build();
        let body = r#"{"model":"tiny","prompt":"hi"}"#;
        let reply = routes.oneshot(post("/v1/completions", body)).await.unwrap();
        let reply = Reply::read(reply).await;
        assert_eq!(
            (
                reply.status,
                reply.text.as_str(),
                reply.header("retry-after")
            ),
            (status, "{\"the engine's\":1}", expected)
        );
    }
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

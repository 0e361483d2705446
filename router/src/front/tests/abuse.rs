//! What nobody should send, over real connections: told what is wrong, or served; and others are served meanwhile.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::connections::served;
use super::*;
use wire::FinishReason::Stop;

/// Sends bytes as they are and reads until the server has nothing more to say.
async fn raw(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let (mut read, mut write) = stream.split();
    let sending = async {
        // Cut off when the server has heard enough.
        let _ = write.write_all(request).await;
    };
    let mut answer = Vec::new();
    let reading = async {
        let _ = read.read_to_end(&mut answer).await;
    };
    tokio::join!(sending, reading);
    String::from_utf8_lossy(&answer).into_owned()
}

fn posted(path: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Status, and `param` and `code` of the error.
fn told(answer: &str) -> (u16, Option<String>, Option<String>) {
    let status = answer[9..12].parse().unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    let error = &body["error"];
    if status != 200 {
        assert_eq!(
            error.as_object().map(serde_json::Map::len),
            Some(4),
            "{answer}"
        );
    }
    let text = |name: &str| error[name].as_str().map(str::to_owned);
    (status, text("param"), text("code"))
}

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn bodies_that_are_no_request_are_told_why() {
    let mut setup = Setup::new(says("x", Stop));
    // One that shows calls: of another, their being dropped would be what is wrong.
    let template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.tool_calls %}!{{ m.tool_calls[0].function.name }}{% endif %};{% endfor %}";
    setup.scripted.artifacts = Some(Arc::new(artifacts(template)));
    let served = served(setup).await;
    let message = |content: &str| format!(r#"{{"model":"tiny","messages":[{content}]}}"#);
    let user = |content: &str| message(&format!(r#"{{"role":"user","content":{content}}}"#));
    let assistant = |more: &str| {
        message(&format!(
            r#"{{"role":"user","content":"hi"}},{{"role":"assistant","content":null{more}}}"#
        ))
    };
    let with =
        |field: &str| user(r#""hi""#).replace("\"messages\"", &format!("{field},\"messages\""));
    let deep = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let json = Some("invalid_json");
    let table: Vec<(String, u16, Option<&str>, Option<&str>)> = vec![
        // No JSON.
        ("{".into(), 400, None, json),
        ("{\"model\": \"tiny\",}".into(), 400, None, json),
        ("nul\0l".into(), 400, None, json),
        (user("\"a\0b\""), 400, None, json),
        (user(r#""\ud800""#), 400, None, json),
        (user(r#""\udc00\ud800""#), 400, None, json),
        (user(&deep(100_000)), 400, None, json),
        (with(&format!("\"x\": {}", deep(200))), 400, None, json),
        (with("\"seed\": 1e999"), 400, None, json),
        (with("\"seed\": 01"), 400, None, json),
        (with("\"seed\": NaN"), 400, None, json),
        // JSON, but no request.
        ("[]".into(), 400, None, None),
        ("null".into(), 400, None, None),
        ("{}".into(), 400, Some("model"), None),
        (r#"{"model": ["tiny"]}"#.into(), 400, Some("model"), None),
        (r#"{"model": "tiny"}"#.into(), 400, Some("messages"), None),
        (message(""), 400, Some("messages"), None),
        (message("[]"), 400, Some("messages[0]"), None),
        (user("null"), 400, Some("messages[0].content"), None),
        // Only who calls may say nothing.
        (assistant(""), 400, Some("messages[1].content"), None),
        (
            assistant(r#","tool_calls":[]"#),
            400,
            Some("messages[1].content"),
            None,
        ),
        (user("{}"), 400, Some("messages[0].content"), None),
        (user("[[]]"), 400, Some("messages[0].content[0]"), None),
        (
            user(r#"[{"type":"image_url","image_url":{"url":"x"}}]"#),
            400,
            Some("messages[0].content[0].type"),
            Some("unsupported_parameter"),
        ),
        (
            with("\"n\": 2"),
            400,
            Some("n"),
            Some("unsupported_parameter"),
        ),
        (with("\"n\": 1e400"), 400, None, json),
        (with("\"max_tokens\": 1e300"), 400, Some("max_tokens"), None),
        (
            with("\"max_tokens\": 99999999999999999999999"),
            400,
            Some("max_tokens"),
            None,
        ),
        (with("\"max_tokens\": -0.5"), 400, Some("max_tokens"), None),
        (with("\"top_k\": 4294967296"), 400, Some("top_k"), None),
        (
            with("\"skip_special_tokens\": false"),
            400,
            Some("skip_special_tokens"),
            Some("unsupported_parameter"),
        ),
        (
            user(&format!("\"{}\"", "x".repeat(5000))),
            400,
            Some("messages"),
            Some("context_length_exceeded"),
        ),
        // Of two, the last counts.
        (
            user(r#""hi""#).replace("\"model\":\"tiny\"", "\"model\":5,\"model\":\"tiny\""),
            200,
            None,
            None,
        ),
        (
            user(r#""hi""#).replace("}]}", "}],\"model\":\"nope\"}"),
            404,
            Some("model"),
            Some("model_not_found"),
        ),
        // Strange, and served.
        (
            assistant(
                r#","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]"#,
            ),
            200,
            None,
            None,
        ),
        (
            user(r#"[{"type":"text","text":"a"},{"type":"text","text":"b"}]"#),
            200,
            None,
            None,
        ),
        (user(r#""\ud83d\ude00\u0000\uffff""#), 200, None, None),
        (with("\"seed\": -9223372036854775808"), 200, None, None),
        (
            with("\"max_tokens\": 5.0, \"temperature\": 1e-300"),
            200,
            None,
            None,
        ),
        (
            with("\"\": {}, \"constructor\": {\"__proto__\": 1}"),
            200,
            None,
            None,
        ),
        (
            with(&format!("\"unknown\": {}", deep(100))),
            200,
            None,
            None,
        ),
        (
            with(&format!("\"unknown\": [{}0]", "{\"\":0},".repeat(20_000))),
            200,
            None,
            None,
        ),
    ];
    for (body, status, param, code) in table {
        let answer = raw(served.address, &posted(CHAT, body.as_bytes())).await;
        let shown: String = body.chars().take(200).collect();
        let found = told(&answer);
        let found = (found.0, found.1.as_deref(), found.2.as_deref());
        assert_eq!(found, (status, param, code), "{shown}: {answer}");
    }
    // Bytes that are no text.
    for body in [&b"\xff\xfe{}"[..], b"{\"model\": \"ti\xc3\"}"] {
        let answer = raw(served.address, &posted(CHAT, body)).await;
        assert_eq!(told(&answer), (400, None, Some("invalid_json".into())));
    }
}

/// Every field that counts, with a value of every type that it does not have.
#[tokio::test]
async fn every_field_of_a_wrong_type_is_named() {
    let (routes, _started) = Setup::new(says("x", Stop)).build();
    let types = [
        ("null", json!(null)),
        ("boolean", json!(true)),
        ("number", json!(1)),
        ("string", json!("x")),
        ("array", json!([{}])),
        ("object", json!({"a": 1})),
    ];
    let fields: &[(&str, &[&str])] = &[
        ("model", &["string"]),
        ("messages", &["array"]),
        ("temperature", &["number"]),
        ("top_p", &["number"]),
        ("top_k", &["number"]),
        ("min_p", &["number"]),
        ("seed", &["number"]),
        ("max_tokens", &["number"]),
        ("max_completion_tokens", &["number"]),
        ("min_tokens", &["number"]),
        ("stop", &["string", "array"]),
        ("stop_token_ids", &["array"]),
        ("ignore_eos", &["boolean"]),
        ("stream", &["boolean"]),
        ("stream_options", &["object"]),
        ("cache_salt", &["string"]),
        ("priority", &["number"]),
        ("add_special_tokens", &["boolean"]),
        ("add_generation_prompt", &["boolean"]),
        ("chat_template_kwargs", &["object"]),
        ("logprobs", &["boolean"]),
        ("top_logprobs", &["number"]),
        ("tools", &["array"]),
        ("tool_choice", &["string", "object"]),
        ("response_format", &["object"]),
        ("modalities", &["array"]),
        ("n", &["number"]),
        ("logit_bias", &["object", "array", "string"]),
        ("presence_penalty", &["number"]),
        ("frequency_penalty", &["number"]),
    ];
    for (field, right) in fields {
        for (kind, value) in &types {
            // Null is absent, and a right type is another test's.
            if *kind == "null" || right.contains(kind) {
                continue;
            }
            let request = chat(&json!({*field: value}));
            let reply = Reply::read(routes.clone().oneshot(request).await.unwrap()).await;
            let param = reply.json()["error"]["param"].clone();
            assert_eq!(reply.status, 400, "{field} as {kind}: {}", reply.text);
            assert_eq!(param, *field, "{field} as {kind}: {}", reply.text);
        }
    }
}

#[tokio::test]
async fn http_that_is_wrong_or_rare_is_refused_or_served() {
    let served = served(Setup::new(says("x", Stop))).await;
    let body = r#"{"model":"tiny","prompt":"hi"}"#;
    let length = body.len();
    let chunked = format!("{length:x};x=y\r\n{body}\r\n0\r\ntrailer: t\r\n\r\n");
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    let head = |fields: &str| {
        format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{fields}\r\n")
    };
    let many = "x-a: b\r\n".repeat(200);
    let wide = format!("x-a: {}\r\n", "b".repeat(100_000));
    let table: Vec<(String, &str)> = vec![
        // Served.
        (
            format!("POST /v1/completions HTTP/1.0\r\ncontent-length: {length}\r\n\r\n{body}"),
            "200",
        ),
        (
            head(&format!(
                "expect: 100-continue\r\ncontent-length: {length}\r\n"
            )) + body,
            "100",
        ),
        (head("transfer-encoding: chunked\r\n") + &chunked, "200"),
        (
            head(&format!(
                "content-type: text/plain\r\ncontent-length: {length}\r\n"
            )) + body,
            "200",
        ),
        // Told why not, in OpenAI's form.
        (get("/v1/models/%ff"), "400"),
        (get("/v1/models/%00"), "404"),
        (get("/v1/models/..%2f..%2fetc"), "404"),
        (get("//v1/models"), "404"),
        (get("/v1/completions"), "405"),
        (get("/v1/models").replace("GET", "BREW"), "405"),
        (head("content-length: 200000000\r\n"), "413"),
        (
            head("transfer-encoding: chunked\r\n") + "fffffff\r\n" + &"x".repeat(5 << 20),
            "413",
        ),
        (
            head("transfer-encoding: chunked\r\n") + "zz\r\ngarbage",
            "400",
        ),
        // No HTTP, or not one that has an answer in any form: the status says it.
        ("\0\0\0\0\r\n\r\n".into(), "400 "),
        ("GET / HTTP/9.9\r\n\r\n".into(), "400 "),
        ("GET /a b HTTP/1.1\r\n\r\n".into(), "400 "),
        (head(&many), "431 "),
        (head(&wide), "431 "),
        (head("content-length: 5\r\ncontent-length: 6\r\n"), "400 "),
        (head("content-length: -1\r\n"), "400 "),
    ];
    for (request, expected) in table {
        let answer = raw(served.address, request.as_bytes()).await;
        let shown: String = request.chars().take(150).collect();
        let status = answer.get(9..13).unwrap_or_default();
        assert_eq!(status.trim(), expected.trim(), "{shown:?}: {answer}");
        if expected.starts_with('4') && !expected.ends_with(' ') {
            told(&answer);
        }
        if expected == "100" {
            assert!(answer.contains("\r\n\r\nHTTP/1.1 200 OK\r\n"), "{answer}");
        }
    }
}

#[tokio::test]
async fn a_body_of_two_hundred_megabytes_is_told_that_it_is_too_large() {
    let served = served(Setup::new(says("x", Stop))).await;
    // Announced, and refused while it is still being sent. What such bodies cost a router, also one that does not say its length, is
    // seen on a process: `front_door` of the end-to-end tests.
    let body = vec![b' '; 200_000_000];
    let answer = raw(served.address, &posted(CHAT, &body)).await;
    assert_eq!(told(&answer), (413, None, Some("request_too_large".into())));
}

#[tokio::test]
async fn requests_in_one_packet_are_answered_in_order() {
    let served = served(Setup::new(says("x", Stop))).await;
    let get = |path: &str, more: &str| format!("GET {path} HTTP/1.1\r\nhost: x\r\n{more}\r\n");
    let three = [
        get("/healthz", ""),
        get("/v1/models/tiny", ""),
        get("/v1/nothing", "connection: close\r\n"),
    ];
    let answer = raw(served.address, three.concat().as_bytes()).await;
    let places = ["ok\n", "\"id\":\"tiny\"", "unknown_url"].map(|text| answer.find(text).unwrap());
    assert!(places.is_sorted(), "{answer}");
}

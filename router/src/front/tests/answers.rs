//! Answers, whole and streamed, beside recorded answers of vLLM.

use std::collections::BTreeSet;

use super::*;
use wire::FinishReason::{Length, Stop};

fn text_of(events: &[Value]) -> String {
    let pieces = events.iter().filter_map(|event| {
        let choice = event["choices"].get(0)?;
        choice["delta"]["content"]
            .as_str()
            .or(choice["text"].as_str())
    });
    pieces.collect()
}

#[tokio::test]
async fn a_whole_chat_answer() {
    let reply = ask(says("hello you", Stop), chat(&json!({}))).await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert_eq!(reply.header("x-baton-run"), Some("run-7"));
    let body = reply.json();
    assert_eq!(body["id"], "chatcmpl-run-7");
    assert_eq!(body["model"], "tiny");
    assert_eq!(body["choices"][0]["message"]["content"], "hello you");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(
        body["usage"],
        json!({"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18, "prompt_tokens_details": {"cached_tokens": 4}})
    );
    assert!(body["created"].as_u64().unwrap() > 1_700_000_000);
}

#[tokio::test]
async fn a_streamed_answer_is_the_whole_answer_in_pieces() {
    for request in [chat as fn(&Value) -> Request<Body>, completion] {
        let reply = ask(says("hello you", Length), request(&json!({"stream": true}))).await;
        assert_eq!(reply.status, 200);
        assert_eq!(
            reply.header("content-type"),
            Some("text/event-stream; charset=utf-8")
        );
        assert_eq!(reply.header("cache-control"), Some("no-cache"));
        assert_eq!(reply.header("x-baton-run"), Some("run-7"));
        let (events, done) = reply.events();
        assert!(done);
        assert_eq!(text_of(&events), "hello you");
        let reasons: Vec<&Value> = events
            .iter()
            .map(|event| &event["choices"][0]["finish_reason"])
            .collect();
        assert_eq!(reasons.last(), Some(&&json!("length")));
        assert!(
            reasons[..reasons.len() - 1]
                .iter()
                .all(|reason| reason.is_null())
        );
        assert!(
            events
                .iter()
                .all(|event| event["id"] == events[0]["id"] && event.get("usage").is_none())
        );
    }
}

#[tokio::test]
async fn events_that_have_come_already_are_one_write_and_a_long_answer_is_several() {
    for (letters, most) in [(9, 1), (200, 30)] {
        let (routes, _started) = Setup::new(says(&"x".repeat(letters), Stop)).build();
        let request = chat(&json!({"stream": true}));
        let mut body = routes.oneshot(request).await.unwrap().into_body();
        let mut frames = Vec::new();
        while let Some(frame) = body.frame().await {
            frames.push(frame.unwrap().into_data().unwrap());
        }
        assert!(frames.len() <= most, "{letters}: {}", frames.len());
        assert!(frames.iter().all(|frame| frame.len() < 6_000));
        let text = String::from_utf8(frames.concat()).unwrap();
        assert_eq!(text.matches("\"x\"").count(), letters, "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"));
    }
}

#[tokio::test]
async fn usage_comes_in_a_last_event_without_choices() {
    let fields = json!({"stream": true, "stream_options": {"include_usage": true}});
    let (events, done) = ask(says("ab", Stop), chat(&fields)).await.events();
    assert!(done);
    let (last, before) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 2);
    assert!(
        before
            .iter()
            .all(|event| event["usage"].is_null() && event.get("usage").is_some())
    );
}

#[tokio::test]
async fn a_character_split_over_tokens_comes_in_one_piece() {
    let mut script = vec![token(EURO[0]), token(EURO[1])];
    script.extend(says("x", Stop));
    let (events, _) = ask(script.clone(), chat(&json!({"stream": true})))
        .await
        .events();
    assert!(
        events
            .iter()
            .all(|event| !event.to_string().contains('\u{fffd}'))
    );
    assert_eq!(text_of(&events), "€x");
    assert_eq!(
        ask(script, chat(&json!({}))).await.json()["choices"][0]["message"]["content"],
        "€x"
    );
}

#[tokio::test]
async fn a_stop_string_ends_the_answer_before_it() {
    let script = says("one END two", Length);
    let fields = json!({"stop": ["nope", "END"]});
    let body = ask(script.clone(), chat(&fields)).await.json();
    assert_eq!(body["choices"][0]["message"]["content"], "one ");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    // The tokens of the stop string were generated; what came after was not asked for.
    assert_eq!(body["usage"]["completion_tokens"], 7);
    let fields = json!({"stop": "END", "stream": true});
    let (events, done) = ask(script, completion(&fields)).await.events();
    assert!(done);
    assert_eq!(text_of(&events), "one ");
    assert_eq!(
        events.last().unwrap()["choices"][0]["finish_reason"],
        "stop"
    );
}

#[tokio::test]
async fn a_stop_string_tells_the_run_to_end() {
    let (routes, mut started) = Setup::new(Vec::new()).build();
    let response = tokio::spawn(routes.oneshot(chat(&json!({"stop": "b"}))));
    let (_, sink) = started.recv().await.unwrap();
    for id in ids("ab") {
        sink.events.send(token(id)).await.unwrap();
    }
    // The run goes on until it is told.
    assert_eq!(sink.stop.await, Ok(2));
    sink.events
        .send(says("", Stop).pop().unwrap())
        .await
        .unwrap();
    let reply = Reply::read(response.await.unwrap().unwrap()).await;
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "a");
}

#[tokio::test]
async fn the_end_of_a_sequence_is_no_text() {
    let mut script = vec![token(ids("a")[0]), token(END)];
    script.extend(says("", Stop));
    assert_eq!(
        ask(script, chat(&json!({}))).await.json()["choices"][0]["message"]["content"],
        "a"
    );
}

fn scored(text: &str) -> Vec<RunEvent> {
    let mut script: Vec<RunEvent> = ids(text)
        .into_iter()
        .map(|id| RunEvent::Token {
            id,
            logprobs: Some(wire::Logprobs {
                chosen: -0.5,
                top: vec![wire::TokenLogprob { id, logprob: -0.5 }],
            }),
        })
        .collect();
    script.extend(says("", Stop));
    script
}

#[tokio::test]
async fn log_probabilities_of_chat_join_to_the_text() {
    let fields = json!({"logprobs": true, "top_logprobs": 1});
    let whole = ask(scored("a b"), chat(&fields)).await.json();
    let content = whole["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
        .clone();
    let tokens: String = content
        .iter()
        .map(|token| token["token"].as_str().unwrap())
        .collect();
    assert_eq!(tokens, "a b");
    assert_eq!(content[1]["bytes"], json!([32]));
    assert_eq!(content[1]["top_logprobs"][0]["logprob"], -0.5);

    let fields = json!({"logprobs": true, "top_logprobs": 1, "stream": true});
    let (events, _) = ask(scored("a b"), chat(&fields)).await.events();
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(streamed, content);
}

/// Fields of `ours`, as paths, that are not in `theirs`, the other way round, and those of another type. A null says nothing.
fn differences(ours: &Value, theirs: &Value) -> (BTreeSet<String>, BTreeSet<String>) {
    fn paths(value: &Value, path: &str, into: &mut BTreeSet<(String, bool)>) {
        match value {
            Value::Object(members) => {
                for (name, member) in members {
                    paths(member, &format!("{path}.{name}"), into);
                }
            }
            Value::Array(items) => {
                for item in items {
                    paths(item, &format!("{path}[]"), into);
                }
            }
            leaf => {
                into.insert((
                    format!("{path}:{}", crate::openai::field::kind(leaf)),
                    leaf.is_null(),
                ));
            }
        }
    }
    let leaves = |value: &Value| {
        let mut leaves = BTreeSet::new();
        paths(value, "", &mut leaves);
        leaves
    };
    let names = |leaves: &BTreeSet<(String, bool)>| -> BTreeSet<String> {
        leaves
            .iter()
            .map(|(leaf, _)| leaf.split(':').next().unwrap().to_owned())
            .collect()
    };
    let (mine, other) = (leaves(ours), leaves(theirs));
    let (mine_names, other_names) = (names(&mine), names(&other));
    for (leaf, null) in &mine {
        let name = leaf.split(':').next().unwrap();
        let typed = other
            .iter()
            .any(|(leaf, null)| !null && leaf.split(':').next() == Some(name));
        if typed && !null {
            assert!(
                other.contains(&(leaf.clone(), false)),
                "another type: {leaf}"
            );
        }
    }
    (
        mine_names.difference(&other_names).cloned().collect(),
        other_names.difference(&mine_names).cloned().collect(),
    )
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

#[tokio::test]
async fn a_chat_answer_has_the_fields_of_a_recorded_one() {
    let recorded: Value =
        serde_json::from_str(include_str!("samples/vllm-chat-response.json")).unwrap();
    let ours = ask(says("hi", Stop), chat(&json!({}))).await.json();
    let (more, less) = differences(&ours, &recorded);
    assert_eq!(more, set(&[".usage.prompt_tokens_details.cached_tokens"]));
    let extensions = set(&[
        ".choices[].message.annotations",
        ".choices[].message.audio",
        ".choices[].message.function_call",
        ".choices[].message.reasoning",
        ".choices[].routed_experts",
        ".choices[].stop_reason",
        ".choices[].token_ids",
        ".ec_transfer_params",
        ".kv_transfer_params",
        ".metrics",
        ".prompt_logprobs",
        ".prompt_text",
        ".prompt_token_ids",
        ".service_tier",
        ".usage.completion_tokens_details",
        ".usage.prompt_tokens_details",
    ]);
    assert_eq!(less, extensions);
}

#[tokio::test]
async fn a_completion_with_log_probabilities_has_the_fields_of_a_recorded_one() {
    let recorded: Value =
        serde_json::from_str(include_str!("samples/vllm-completions-response.json")).unwrap();
    let ours = ask(scored("ab"), completion(&json!({"logprobs": 1})))
        .await
        .json();
    assert_eq!(
        ours["choices"][0]["logprobs"],
        json!({"text_offset": [0, 1], "token_logprobs": [-0.5, -0.5], "tokens": ["a", "b"],
            "top_logprobs": [{"a": -0.5}, {"b": -0.5}]})
    );
    // Members of `top_logprobs` are named after tokens.
    let unnamed = |mut body: Value| {
        body["choices"][0]["logprobs"]["top_logprobs"] = json!([]);
        body
    };
    let (more, less) = differences(&unnamed(ours), &unnamed(recorded));
    assert_eq!(more, set(&[".usage.prompt_tokens_details.cached_tokens"]));
    assert!(
        less.iter()
            .all(|name| !name.contains("logprobs") || name.contains("prompt_logprobs")),
        "{less:?}"
    );
}

#[tokio::test]
async fn models_have_the_fields_of_recorded_ones() {
    let recorded: Value = serde_json::from_str(include_str!("samples/vllm-models.json")).unwrap();
    let list = ask(
        Vec::new(),
        Request::get("/v1/models").body(Body::empty()).unwrap(),
    )
    .await
    .json();
    let (more, less) = differences(&list, &recorded);
    assert_eq!(more, BTreeSet::new());
    assert!(
        less.iter()
            .all(|name| name.starts_with(".data[].permission")),
        "{less:?}"
    );
    assert_eq!(list["data"][0]["max_model_len"], 100);
    let one = ask(
        Vec::new(),
        Request::get("/v1/models/org/alias")
            .body(Body::empty())
            .unwrap(),
    )
    .await;
    assert_eq!(one.json(), list["data"][1]);
}

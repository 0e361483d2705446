//! Bodies and events as clients of OpenAI's API read them.

use serde_json::{Value, json};

use super::super::logprobs::ChatLogprobs;
use super::*;

const USAGE: Usage = Usage {
    prompt_tokens: 7,
    cached_tokens: 4,
    output_tokens: 3,
};

fn answer(kind: Kind, include_usage: bool) -> Answer {
    Answer::new(kind, "r1", 5, "m".into(), include_usage)
}

fn events(bytes: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(bytes).unwrap();
    let mut events: Vec<&str> = text.split_terminator("\n\n").collect();
    assert_eq!(events.pop(), Some("data: [DONE]"));
    events
        .iter()
        .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
        .collect()
}

#[test]
fn a_chat_stream_says_the_role_first_and_the_usage_last() {
    let answer = answer(Kind::Chat, true);
    let mut out = Vec::new();
    answer.open(&mut out).unwrap();
    answer.more(&mut out, "hi", None).unwrap();
    answer.close(&mut out, "stop", USAGE).unwrap();
    let chunk = |choices: Value, usage: Value| {
        json!({"id": "chatcmpl-r1", "object": "chat.completion.chunk", "created": 5, "model": "m",
            "system_fingerprint": FINGERPRINT, "choices": choices, "usage": usage})
    };
    let choice = |delta: Value, finish: Value| json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]);
    assert_eq!(
        events(&out),
        [
            chunk(
                choice(json!({"role": "assistant", "content": ""}), Value::Null),
                Value::Null
            ),
            chunk(choice(json!({"content": "hi"}), Value::Null), Value::Null),
            chunk(choice(json!({}), json!("stop")), Value::Null),
            chunk(
                json!([]),
                json!({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}})
            ),
        ]
    );
}

#[test]
fn events_of_text_alone_are_written_as_all_others_are() {
    for kind in [Kind::Chat, Kind::Completion] {
        for model in [
            "m",
            "\"text\":\"\"",
            "\"content\":\"\"",
            "\\\"text\\\":\"\"",
            "é\n",
        ] {
            for usage in [true, false] {
                let answer = Answer::new(kind, "r1", 5, model.to_owned(), usage);
                for text in [
                    "",
                    "a",
                    "\"",
                    "\\",
                    "\u{0}\u{1f}\n",
                    "é日🙂",
                    "\"text\":\"\"",
                ] {
                    let (mut short, mut long) = (Vec::new(), Vec::new());
                    answer.more(&mut short, text, None).unwrap();
                    answer.text(&mut long, text, None).unwrap();
                    assert_eq!(short, long, "{kind:?} {model:?} {text:?}");
                }
            }
        }
    }
}

#[test]
fn without_include_usage_no_chunk_has_the_member() {
    for kind in [Kind::Chat, Kind::Completion] {
        let answer = answer(kind, false);
        let mut out = Vec::new();
        answer.open(&mut out).unwrap();
        answer.more(&mut out, "hi", None).unwrap();
        answer.close(&mut out, "length", USAGE).unwrap();
        let events = events(&out);
        assert!(events.iter().all(|event| event.get("usage").is_none()));
        assert_eq!(
            events.last().unwrap()["choices"][0]["finish_reason"],
            "length"
        );
    }
}

#[test]
fn a_completion_stream_holds_text() {
    let answer = answer(Kind::Completion, false);
    let mut out = Vec::new();
    answer.open(&mut out).unwrap();
    answer.more(&mut out, "hi", None).unwrap();
    answer.close(&mut out, "stop", USAGE).unwrap();
    let events = events(&out);
    assert_eq!(events.len(), 2);
    assert_eq!(events[0]["object"], "text_completion");
    assert_eq!(
        events[0]["choices"],
        json!([{"index": 0, "text": "hi", "logprobs": null, "finish_reason": null}])
    );
    assert_eq!(events[1]["choices"][0]["text"], "");
}

#[test]
fn whole_answers_hold_everything() {
    let logprobs = Logprobs::Chat(ChatLogprobs::default());
    let whole = answer(Kind::Chat, false)
        .whole("hi", Some(&logprobs), "stop", USAGE)
        .unwrap();
    let whole: Value = serde_json::from_slice(&whole).unwrap();
    assert_eq!(
        whole["choices"],
        json!([{"index": 0, "message": {"role": "assistant", "content": "hi", "refusal": null},
            "logprobs": {"content": [], "refusal": null}, "finish_reason": "stop"}])
    );
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["usage"]["total_tokens"], 10);
    let whole = answer(Kind::Completion, false)
        .whole("hi", None, "length", USAGE)
        .unwrap();
    let whole: Value = serde_json::from_slice(&whole).unwrap();
    assert_eq!(whole["id"], "cmpl-r1");
    assert_eq!(
        whole["choices"],
        json!([{"index": 0, "text": "hi", "logprobs": null, "finish_reason": "length"}])
    );
}

#[test]
fn a_failed_stream_ends_with_an_error_event_and_no_done() {
    let mut out = Vec::new();
    error_event(&mut out, &ApiError::internal("broken")).unwrap();
    let text = String::from_utf8(out).unwrap();
    let data = text
        .strip_prefix("event: error\ndata: ")
        .unwrap()
        .strip_suffix("\n\n")
        .unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["error"]["type"], "server_error");
    assert!(!text.contains("[DONE]"));
}

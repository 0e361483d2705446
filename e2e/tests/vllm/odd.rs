//! Requests with fields that Baton does not interpret: what the server says directly and through Baton is the same, field by field.

use anyhow::{Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::told;
use baton_e2e::vllm::{Server, Vllm};
use serde_json::{Value, json};

use super::equal::{Answered, CHAT, COMPLETIONS, Question, ask, prompt, same};

fn tools() -> Value {
    json!([{"type": "function", "function": {
        "name": "weather", "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]},
    }}])
}

fn schema() -> Value {
    let object = json!({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false});
    json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": object}})
}

const FOREIGN: &str = "an answer that is not ASCII";

/// Everything odd, by name.
fn questions(vllm: &Vllm) -> Result<Vec<(&'static str, Question)>> {
    let chat = || Question::chat(&prompt(1000, 60));
    let completion = || Question::completion(prompt(1001, 60));
    let unicode = "水光は é ü ß 🙂 ".repeat(40);
    let ids: Vec<u32> = (0..200).map(|index| 100 + index * 13 % 3000).collect();
    // The bytes of é, each a token of its own.
    let mut bytes = json!({});
    for token in ["Ã", "©"] {
        bytes[vllm.token(token)?.to_string()] = 100.into();
    }
    let foreign = || completion().with("logit_bias", bytes.clone());
    Ok(vec![
        (FOREIGN, foreign()),
        ("the same, streamed", foreign().with("stream", true)),
        (
            "a tool, whichever, streamed",
            chat()
                .with("tools", tools())
                .with("tool_choice", "required")
                .with("stream", true),
        ),
        (
            "a tool that must be called",
            chat().with("tools", tools()).with(
                "tool_choice",
                json!({"type": "function", "function": {"name": "weather"}}),
            ),
        ),
        ("tools that may be called", chat().with("tools", tools())),
        ("response_format", chat().with("response_format", schema())),
        (
            "logit_bias",
            completion().with("logit_bias", json!({"300": 100})),
        ),
        (
            "n: 2",
            chat().with("n", 2).with("temperature", 0.8).with("seed", 7),
        ),
        ("echo", completion().with("echo", true)),
        ("token ids", Question::completion(json!(ids))),
        (
            "two prompts",
            Question::completion(json!([prompt(1002, 20), prompt(1003, 30)])),
        ),
        (
            "prompts of token ids",
            Question::completion(json!([[300, 301, 302], [400, 401]])),
        ),
        (
            "stream_options",
            chat().with("stream", true).with(
                "stream_options",
                json!({"include_usage": true, "continuous_usage_stats": true}),
            ),
        ),
        ("a stream without usage", completion().with("stream", true)),
        ("characters of several bytes", Question::chat(&unicode)),
        (
            "characters of several bytes, streamed",
            Question::chat(&unicode)
                .with("stream", true)
                .with("max_tokens", 60),
        ),
        (
            "fields of vLLM's own",
            chat()
                .with("top_k", 5)
                .with("min_p", 0.01)
                .with("repetition_penalty", 1.1)
                .with("min_tokens", 4)
                .with("return_token_ids", true),
        ),
        (
            "a stop string",
            completion()
                .with("stop", json!(["e"]))
                .with("include_stop_str_in_output", true),
        ),
        ("prompt_logprobs", completion().with("prompt_logprobs", 1)),
        (
            "200 KB",
            Question::completion("The baton has one owner at a time. ".repeat(6000)),
        ),
        (
            "max_tokens that cannot be",
            completion().with("max_tokens", -1),
        ),
        (
            "a temperature that is no number",
            chat().with("temperature", "hot"),
        ),
        (
            "messages that are none",
            Question {
                path: CHAT,
                body: json!({"model": "tiny", "messages": "x"}),
            },
        ),
        (
            "no prompt",
            Question {
                path: COMPLETIONS,
                body: json!({"model": "tiny", "max_tokens": 2}),
            },
        ),
    ])
}

/// Asks all of them directly and through Baton, in the modes given.
///
/// # Errors
/// All that differ.
pub(crate) async fn requests_answer_as_they_do_directly(
    vllm: &Vllm,
    fleet: &Fleet,
    modes: &[Option<&str>],
) -> Result<()> {
    let decode = Server::of(fleet, "decode")?;
    let mut wrong = Vec::new();
    let mut count = 0;
    for (name, question) in questions(vllm)? {
        let direct =
            without_call_ids(ask(&decode.client, &question.clone().salted("direct"), None).await?);
        let ascii = direct.body["choices"].to_string().is_ascii();
        ensure!(name != FOREIGN || !ascii, "{name}: {}", direct.body);
        for mode in modes {
            count += 1;
            let salted = question.clone().salted(mode.unwrap_or("none"));
            let through = without_call_ids(ask(&fleet.api, &salted, *mode).await?);
            if let Err(error) = same(&question, &direct, &through) {
                wrong.push(format!("{name} in mode {mode:?}: {error}"));
            }
        }
    }
    told(&format!(
        "{count} odd requests compared with the server's own answers"
    ));
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Ids of tool calls are drawn anew for each answer.
fn without_call_ids(mut answered: Answered) -> Answered {
    fn drop_ids(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                if let Some(Value::Array(calls)) = fields.get_mut("tool_calls") {
                    for call in calls {
                        call["id"] = Value::Null;
                    }
                }
                fields.values_mut().for_each(drop_ids);
            }
            Value::Array(list) => list.iter_mut().for_each(drop_ids),
            _ => {}
        }
    }
    drop_ids(&mut answered.body);
    answered
}

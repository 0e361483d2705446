//! Answers of vLLM held against each other.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// An answer of which nothing is left that may differ between two answers to one question: ids, times, what was cached.
pub fn comparable(mut answer: Value) -> Value {
    strip(&mut answer);
    answer
}

fn strip(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for name in [
                "id",
                "created",
                "prompt_tokens_details",
                "kv_transfer_params",
            ] {
                fields.remove(name);
            }
            fields.values_mut().for_each(strip);
        }
        Value::Array(list) => list.iter_mut().for_each(strip),
        _ => {}
    }
}

/// Where two values differ, with both; numbers may differ by what another order of additions makes of them.
pub fn differences(left: &Value, right: &Value) -> Vec<String> {
    let mut found = Vec::new();
    compare("", left, right, &mut found);
    found
}

/// Log-probabilities in 32 bits differ by less than this with how a prompt is cut into steps, and by more with any other KV.
const ROUNDING: f64 = 1e-3;

fn compare(at: &str, left: &Value, right: &Value, found: &mut Vec<String>) {
    match (left, right) {
        (Value::Object(first), Value::Object(second)) => {
            let mut names: Vec<&String> = first.keys().chain(second.keys()).collect();
            names.sort();
            names.dedup();
            for name in names {
                let null = Value::Null;
                let (left, right) = (
                    first.get(name).unwrap_or(&null),
                    second.get(name).unwrap_or(&null),
                );
                compare(&format!("{at}.{name}"), left, right, found);
            }
        }
        (Value::Array(first), Value::Array(second)) if first.len() == second.len() => {
            for (index, (left, right)) in first.iter().zip(second).enumerate() {
                compare(&format!("{at}[{index}]"), left, right, found);
            }
        }
        (Value::Number(first), Value::Number(second)) if first.is_f64() || second.is_f64() => {
            let number = |value: &serde_json::Number| value.as_f64().unwrap_or(f64::NAN);
            if (number(first) - number(second)).abs() > ROUNDING {
                found.push(format!("{at}: {left} and {right}"));
            }
        }
        _ if left == right => {}
        _ => found.push(format!("{at}: {left} and {right}")),
    }
}

/// The events of a stream as one answer: how tokens are spread over events differs from stream to stream.
///
/// # Errors
/// An event that is none, or a stream without its last one.
pub fn assembled(events: &[String]) -> Result<Value> {
    let (last, events) = events.split_last().context("no event")?;
    ensure!(last == "[DONE]", "the stream ends with {last}");
    let mut whole = json!({"choices": {}});
    for event in events {
        let event: Value = serde_json::from_str(event).with_context(|| event.clone())?;
        for (name, value) in event.as_object().context("no object")? {
            if name != "choices" {
                whole[name] = value.clone();
            }
        }
        for choice in event["choices"].as_array().context("no choices")? {
            add(&mut whole["choices"][choice["index"].to_string()], choice);
        }
    }
    Ok(whole)
}

/// Texts and lists grow, everything else is the last that was said.
fn add(whole: &mut Value, part: &Value) {
    match (&mut *whole, part) {
        (Value::Object(fields), Value::Object(parts)) => {
            for (name, part) in parts {
                add(fields.entry(name.as_str()).or_insert(Value::Null), part);
            }
        }
        (Value::String(text), Value::String(part)) => text.push_str(part),
        (Value::Array(list), Value::Array(part)) => list.extend(part.iter().cloned()),
        (_, Value::Null) => {}
        _ => *whole = part.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named_and_what_may_is_not() {
        let left =
            json!({"id": "a", "choices": [{"text": "x", "logprobs": [-0.5, null]}], "extra": null});
        let mut right =
            json!({"id": "b", "choices": [{"text": "x", "logprobs": [-0.500_000_1, null]}]});
        let all =
            |right: &Value| differences(&comparable(left.clone()), &comparable(right.clone()));
        assert_eq!(all(&right), Vec::<String>::new());
        right["choices"][0]["text"] = "y".into();
        right["choices"][0]["logprobs"][0] = (-0.6).into();
        let found = all(&right);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found
                .iter()
                .any(|line| line.starts_with(".choices[0].text: ")),
            "{found:?}"
        );
    }

    #[test]
    fn a_stream_is_one_answer_however_it_is_cut() {
        let of = |texts: &[&str]| {
            let mut events: Vec<String> = texts
                .iter()
                .map(|text| {
                    json!({"choices": [{"index": 0, "text": text, "finish_reason": null}]})
                        .to_string()
                })
                .collect();
            events.push(
                json!({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}).to_string(),
            );
            events.push(json!({"choices": [], "usage": {"n": 2}}).to_string());
            events.push("[DONE]".to_owned());
            assembled(&events).expect("a stream")
        };
        assert_eq!(of(&["a", "b"]), of(&["ab"]));
        assert_eq!(of(&["ab"])["choices"]["0"]["finish_reason"], "stop");
        assert!(assembled(&["{}".to_owned()]).is_err());
    }
}

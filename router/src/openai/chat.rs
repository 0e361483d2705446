//! `POST /v1/chat/completions`: the request.

use baton_text::chat::{Chat, Message};
use serde_json::Value;

use super::error::{ApiError, echo};
use super::field::{Object, mismatch, parse_body};
use super::parameters::{MAX_TOP_LOGPROBS, Parameters};
use super::refused::{Neutral, Refused, refused};

const ROLES: [&str; 6] = [
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];

/// A chat request, read and checked as far as it can be without the model.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    pub chat: Chat,
    pub parameters: Parameters,
    /// Let the tokenizer add its special tokens to what the template wrote.
    pub add_special_tokens: bool,
}

impl ChatRequest {
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut body = parse_body(body)?;
        let mut parameters = Parameters::read(&mut body)?;
        parameters.logprobs = read_logprobs(&mut body)?;
        for field in REFUSED {
            field.check(&mut body)?;
        }
        check_tools(&mut body)?;
        check_modalities(&mut body)?;
        let messages = body
            .array("messages")?
            .ok_or_else(|| ApiError::field("messages", "messages is required"))?;
        if messages.is_empty() {
            return Err(ApiError::field("messages", "messages must not be empty"));
        }
        let messages = messages
            .into_iter()
            .enumerate()
            .map(|(index, message)| {
                read_message(Object::new(format!("messages[{index}]"), message)?)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            chat: Chat {
                messages,
                add_generation_prompt: body.boolean("add_generation_prompt", true)?,
                template_arguments: body
                    .object("chat_template_kwargs")?
                    .map(Object::into_fields)
                    .unwrap_or_default(),
            },
            parameters,
            add_special_tokens: body.boolean("add_special_tokens", false)?,
        })
    }
}

fn read_message(mut message: Object) -> Result<Message, ApiError> {
    let role_path = message.path_of("role");
    let role = message
        .string("role")?
        .ok_or_else(|| ApiError::field(&role_path, format!("{role_path} is required")))?;
    if !ROLES.contains(&role.as_str()) {
        return Err(ApiError::field(
            &role_path,
            format!(
                "{role_path} must be one of {}, found {:?}",
                ROLES.join(", "),
                echo(&role)
            ),
        ));
    }
    for field in REFUSED_IN_MESSAGES {
        field.check(&mut message)?;
    }
    let tool_calls = read_tool_calls(&mut message)?;
    let content_path = message.path_of("content");
    let content = match message.take("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => read_parts(&content_path, parts)?,
        Some(other) => {
            return Err(mismatch(
                content_path,
                "a string or an array of text parts",
                &other,
            ));
        }
        None if role == "assistant" && !tool_calls.is_empty() => String::new(),
        None => {
            return Err(ApiError::field(
                &content_path,
                format!("{content_path} is required"),
            ));
        }
    };
    Ok(Message {
        role,
        content,
        name: message.string("name")?,
        tool_calls,
        tool_call_id: message.string("tool_call_id")?,
    })
}

/// Text parts, a line each, as vLLM joins them for templates that take text.
fn read_parts(path: &str, parts: Vec<Value>) -> Result<String, ApiError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = Object::new(format!("{path}[{index}]"), part)?;
        let kind_path = part.path_of("type");
        let member = match part.string("type")?.as_deref() {
            Some("text") => "text",
            Some("refusal") => "refusal",
            Some(other) => {
                return Err(ApiError::unsupported(
                    &kind_path,
                    format!(
                        "{kind_path} {:?} is not supported by this version: messages hold text",
                        echo(other)
                    ),
                ));
            }
            None => {
                return Err(ApiError::field(
                    &kind_path,
                    format!("{kind_path} is required"),
                ));
            }
        };
        let text_path = part.path_of(member);
        let text = part.string(member)?;
        texts.push(
            text.ok_or_else(|| ApiError::field(&text_path, format!("{text_path} is required")))?,
        );
    }
    Ok(texts.join("\n"))
}

/// Tool calls with their arguments as an object where they are one in JSON text: templates iterate over it.
fn read_tool_calls(message: &mut Object) -> Result<Vec<Value>, ApiError> {
    let path = message.path_of("tool_calls");
    let mut calls = message.array("tool_calls")?.unwrap_or_default();
    for (index, call) in calls.iter_mut().enumerate() {
        if !call.is_object() {
            return Err(mismatch(format!("{path}[{index}]"), "an object", call));
        }
        let Some(arguments) = call.pointer_mut("/function/arguments") else {
            let path = format!("{path}[{index}].function.arguments");
            return Err(ApiError::field(&path, format!("{path} is required")));
        };
        if let Some(Ok(parsed @ Value::Object(_))) = arguments.as_str().map(serde_json::from_str) {
            *arguments = parsed;
        }
    }
    Ok(calls)
}

fn read_logprobs(body: &mut Object) -> Result<Option<u32>, ApiError> {
    let wanted = body.boolean("logprobs", false)?;
    let top = body.integer("top_logprobs", 0..=MAX_TOP_LOGPROBS)?;
    match (wanted, top) {
        (false, Some(top)) if top > 0 => Err(ApiError::field(
            "top_logprobs",
            "top_logprobs is only allowed when logprobs is true",
        )),
        (false, _) => Ok(None),
        (true, top) => Ok(Some(
            top.and_then(|top| u32::try_from(top).ok()).unwrap_or(0),
        )),
    }
}

/// With `tool_choice` `auto` or `none` an answer in text is right, and text is what this version gives.
fn check_tools(body: &mut Object) -> Result<(), ApiError> {
    body.array("tools")?;
    for name in ["tool_choice", "function_call"] {
        match body.take(name) {
            None => {}
            Some(Value::String(word)) if matches!(word.as_str(), "none" | "auto") => {}
            Some(Value::String(_) | Value::Object(_)) => {
                return Err(ApiError::unsupported(
                    name,
                    format!(
                        "{name} that requires a call is not supported by this version: use \"auto\" or \"none\", answers are text"
                    ),
                ));
            }
            Some(other) => return Err(mismatch(name.into(), "a string or an object", &other)),
        }
    }
    Ok(())
}

fn check_modalities(body: &mut Object) -> Result<(), ApiError> {
    for (index, modality) in body
        .array("modalities")?
        .unwrap_or_default()
        .iter()
        .enumerate()
    {
        if modality.as_str() != Some("text") {
            let path = format!("modalities[{index}]");
            let message = format!("{path} is not supported by this version: answers are text");
            return Err(ApiError::unsupported(path, message));
        }
    }
    Ok(())
}

const REFUSED: &[Refused] = &[
    refused(
        "chat_template",
        Neutral::Never,
        "the model's own template is used",
    ),
    refused(
        "continue_final_message",
        Neutral::False,
        "the answer is a new message",
    ),
    refused("documents", Neutral::Empty, "put them into the messages"),
];

const REFUSED_IN_MESSAGES: &[Refused] = &[
    refused("function_call", Neutral::Never, "use tool_calls"),
    refused("audio", Neutral::Never, "messages hold text"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(messages: &str, fields: &str) -> Result<ChatRequest, ApiError> {
        ChatRequest::parse(
            format!("{{\"model\": \"m\", \"messages\": {messages}{fields}}}").as_bytes(),
        )
    }

    const HELLO: &str = r#"[{"role": "user", "content": "hello"}]"#;

    #[test]
    fn content_is_a_string_or_text_parts() {
        let request = parse(
            r#"[{"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"}]"#,
            "",
        )
        .unwrap();
        assert_eq!(request.chat.messages[0].content, "be brief");
        assert_eq!(request.chat.messages[1].content, "a\nb");
        assert_eq!(request.chat.messages[1].name.as_deref(), Some("ann"));
        assert!(request.chat.add_generation_prompt && !request.add_special_tokens);
    }

    #[test]
    fn what_is_wrong_with_a_message_is_named_by_its_path() {
        for (messages, param) in [
            ("[]", "messages"),
            ("null", "messages"),
            ("\"hello\"", "messages"),
            (r#"["hello"]"#, "messages[0]"),
            (r#"[{"content": "x"}]"#, "messages[0].role"),
            (r#"[{"role": "robot", "content": "x"}]"#, "messages[0].role"),
            (
                r#"[{"role": "user", "content": "x"}, {"role": "user"}]"#,
                "messages[1].content",
            ),
            (r#"[{"role": "user", "content": 5}]"#, "messages[0].content"),
            (
                r#"[{"role": "assistant", "content": null}]"#,
                "messages[0].content",
            ),
            (
                r#"[{"role": "user", "content": ["x"]}]"#,
                "messages[0].content[0]",
            ),
            (
                r#"[{"role": "user", "content": [{"text": "x"}]}]"#,
                "messages[0].content[0].type",
            ),
            (
                r#"[{"role": "user", "content": [{"type": "text"}]}]"#,
                "messages[0].content[0].text",
            ),
            (
                r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]"#,
                "messages[0].content[0].type",
            ),
            (
                r#"[{"role": "user", "content": "x", "name": 1}]"#,
                "messages[0].name",
            ),
            (
                r#"[{"role": "assistant", "tool_calls": [{}]}]"#,
                "messages[0].tool_calls[0].function.arguments",
            ),
            (
                r#"[{"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}]"#,
                "messages[0].function_call",
            ),
            (
                r#"[{"role": "assistant", "tool_calls": [5]}]"#,
                "messages[0].tool_calls[0]",
            ),
        ] {
            let error = parse(messages, "").unwrap_err();
            assert_eq!(error.status, 400);
            assert_eq!(error.param.as_deref(), Some(param), "{messages}: {error}");
        }
    }

    #[test]
    fn an_assistant_that_called_a_tool_may_have_said_nothing() {
        let request = parse(
            r#"[{"role": "user", "content": "weather?"},
                {"role": "assistant", "content": null, "tool_calls":
                    [{"id": "1", "type": "function", "function": {"name": "w", "arguments": "{\"city\": \"Ulm\"}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "rain"}]"#,
            "",
        )
        .unwrap();
        assert_eq!(request.chat.messages[1].content, "");
        assert_eq!(
            request.chat.messages[1].tool_calls[0]["function"]["arguments"]["city"],
            "Ulm"
        );
        assert_eq!(request.chat.messages[2].tool_call_id.as_deref(), Some("1"));
        assert_eq!(
            request.chat.first_tool_calls().as_deref(),
            Some("messages[1].tool_calls")
        );
    }

    #[test]
    fn log_probabilities_are_asked_for_in_two_fields() {
        let logprobs =
            |fields: &str| parse(HELLO, fields).map(|request| request.parameters.logprobs);
        assert_eq!(logprobs(""), Ok(None));
        assert_eq!(logprobs(r#", "logprobs": true"#), Ok(Some(0)));
        assert_eq!(
            logprobs(r#", "logprobs": true, "top_logprobs": 20"#),
            Ok(Some(20))
        );
        assert_eq!(
            logprobs(r#", "logprobs": false, "top_logprobs": 0"#),
            Ok(None)
        );
        for fields in [
            r#", "top_logprobs": 3"#,
            r#", "logprobs": true, "top_logprobs": 21"#,
            r#", "logprobs": true, "top_logprobs": -1"#,
        ] {
            assert_eq!(
                logprobs(fields).unwrap_err().param.as_deref(),
                Some("top_logprobs")
            );
        }
        assert_eq!(
            logprobs(r#", "logprobs": 1"#).unwrap_err().param.as_deref(),
            Some("logprobs")
        );
    }

    #[test]
    fn tools_are_ignored_unless_a_call_is_required() {
        let tools = r#", "tools": [{"type": "function", "function": {"name": "f"}}]"#;
        assert_eq!(parse(HELLO, tools), parse(HELLO, ""));
        assert!(parse(HELLO, &format!(r#"{tools}, "tool_choice": "auto""#)).is_ok());
        for choice in [
            r#""required""#,
            r#"{"type": "function", "function": {"name": "f"}}"#,
        ] {
            let error = parse(HELLO, &format!(r#"{tools}, "tool_choice": {choice}"#)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("tool_choice"));
        }
        assert_eq!(
            parse(HELLO, r#", "modalities": ["text", "audio"]"#)
                .unwrap_err()
                .param
                .as_deref(),
            Some("modalities[1]")
        );
        assert_eq!(
            parse(HELLO, r#", "chat_template": "x""#)
                .unwrap_err()
                .param
                .as_deref(),
            Some("chat_template")
        );
    }
}

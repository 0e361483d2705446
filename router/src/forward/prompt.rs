//! Tokens of a prompt that an engine will tokenise again: they find what workers hold of it. A wrong one finds less, never anything
//! else: what is held is named by its tokens.

use baton_placement::record::Credit;
use baton_text::chat::{Chat as Rendered, Message};
use jiff::Timestamp;
use serde_json::Value;

use super::asked::{Chat, Prompt};
use crate::text::model::ModelText;

/// The tokens of a prompt, or why there are none to credit. `max_context` in tokens; `salt`: whose tokens are kept apart from others'.
pub fn tokens(
    model: &ModelText,
    prompt: Prompt,
    max_context: u32,
    now: Timestamp,
    salt: &str,
) -> Result<Vec<u32>, Credit> {
    let (text, add_special_tokens) = match prompt {
        Prompt::Tokens(tokens) => return Ok(tokens),
        Prompt::NotText => return Err(Credit::NotText),
        Prompt::Unread => return Err(Credit::Unread),
        Prompt::Text {
            text,
            add_special_tokens,
        } => (text, add_special_tokens),
        Prompt::Chat(chat) => {
            let add_special_tokens = chat.add_special_tokens;
            let chat = rendered(chat).ok_or(Credit::Unread)?;
            // What the template refuses, the engine refuses in its own words.
            let text = model.render(&chat, now).map_err(|_| Credit::Unread)?;
            (text, add_special_tokens)
        }
    };
    // Megabytes of text take seconds, and an engine refuses them at once.
    if usize::try_from(max_context).is_ok_and(|most| model.least_tokens(&text) > most) {
        return Err(Credit::Unread);
    }
    let tokens = model.encode(&text, add_special_tokens, salt);
    tokens.map_err(|_| Credit::Unread)
}

fn rendered(chat: Chat) -> Option<Rendered> {
    let messages = chat.messages.into_iter().map(message);
    Some(Rendered {
        messages: messages.collect::<Option<_>>()?,
        add_generation_prompt: chat.add_generation_prompt,
        template_arguments: chat.arguments,
    })
}

fn message(message: Value) -> Option<Message> {
    let Value::Object(mut members) = message else {
        return None;
    };
    let mut text = |name: &str| match members.remove(name) {
        Some(Value::String(text)) => Some(text),
        _ => None,
    };
    let (role, name, tool_call_id) = (text("role")?, text("name"), text("tool_call_id"));
    let content = match members.remove("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => parts
            .iter()
            .map(|part| part.get("text").or_else(|| part.get("refusal"))?.as_str())
            .collect::<Option<Vec<_>>>()?
            .join("\n"),
        _ => String::new(),
    };
    let mut tool_calls = match members.remove("tool_calls") {
        Some(Value::Array(calls)) => calls,
        _ => Vec::new(),
    };
    for call in &mut tool_calls {
        // As engines give them to templates: an object, where the text is one.
        if let Some(arguments) = call.pointer_mut("/function/arguments")
            && let Some(Ok(read @ Value::Object(_))) =
                arguments.as_str().map(serde_json::from_str::<Value>)
        {
            *arguments = read;
        }
    }
    Some(Message {
        role,
        content,
        name,
        tool_calls,
        tool_call_id,
    })
}

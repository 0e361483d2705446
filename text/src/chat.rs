//! A chat as its model's template sees it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What is rendered.
#[derive(Clone, Debug, PartialEq)]
pub struct Chat {
    pub messages: Vec<Message>,
    /// End the prompt with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables of the template.
    pub template_arguments: Map<String, Value>,
}

/// One message as the template sees it: content is always text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub role: String,
    /// Empty where the client sent none.
    pub content: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

impl Chat {
    /// Messages alone, to be answered.
    pub fn of(messages: Vec<Message>) -> Self {
        Self {
            messages,
            add_generation_prompt: true,
            template_arguments: Map::new(),
        }
    }

    /// The simplest chat that there is: a model whose template cannot show it cannot chat.
    pub fn simplest() -> Self {
        Self::of(vec![Message::new("user", "hello")])
    }

    /// The first message that holds tool calls: a template that does not show them would drop them silently.
    pub fn first_tool_calls(&self) -> Option<String> {
        let index = self
            .messages
            .iter()
            .position(|message| !message.tool_calls.is_empty())?;
        Some(format!("messages[{index}].tool_calls"))
    }
}

impl Message {
    /// Text of a role.
    pub fn new(role: &str, content: &str) -> Self {
        Self {
            role: role.to_owned(),
            content: content.to_owned(),
            name: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
        }
    }
}

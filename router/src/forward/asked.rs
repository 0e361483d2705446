//! What Baton needs to know of a request that an engine will answer. Read leniently: whatever is odd about a field is the engine's to
//! say, in its own words.

use serde_json::Value;

use super::members::{NoObject, visit};
use crate::openai::error::ApiError;

/// Bytes of text that count as a token where nobody has tokenised it: English is at about four.
const BYTES_PER_TOKEN: usize = 4;
/// Tokens that an image counts as until an engine has seen it.
const IMAGE_TOKENS: u32 = 1024;
/// Answers of `/v1/completions` that name no length.
const DEFAULT_COMPLETION: u32 = 16;

/// What the prompt is, as far as it can become tokens here.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// `messages`, and what the chat template is given beside them. JSON.
    Chat(Chat),
    Text {
        text: String,
        add_special_tokens: bool,
    },
    Tokens(Vec<u32>),
    /// Images, sound and what else is no text.
    NotText,
    /// Several prompts, embeddings, a template of the client's own, or what is no prompt at all.
    Unread,
}

/// A chat, for a template.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    pub messages: Vec<Value>,
    /// `chat_template_kwargs`, `tools`, `documents`.
    pub arguments: serde_json::Map<String, Value>,
    pub add_generation_prompt: bool,
    pub add_special_tokens: bool,
}

/// A request as far as it is read.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    pub model: String,
    pub stream: bool,
    /// As sent.
    pub cache_salt: Option<String>,
    pub priority: Priority,
    /// Tokens of the answer at most.
    pub max_output: Option<u32>,
    /// The field for which it has to stay on one worker.
    pub whole: Option<&'static str>,
    pub prompt: Prompt,
    /// Tokens of the prompt, by its length.
    pub about_tokens: u32,
}

/// What is asked of the line. Smaller is more urgent, as with vLLM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Nothing, which counts as 0.
    Absent,
    Number(i64),
    /// No whole number; engines read numbers out of some of these.
    Unread,
}

impl Priority {
    fn of(value: Option<&str>) -> Self {
        match value {
            None => Self::Absent,
            Some(value) => number(value).map_or(Self::Unread, Self::Number),
        }
    }
}

/// Which endpoint a body was sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Completions,
    /// Passed on whole: its prompt is not read.
    Other,
}

/// The members that are looked at.
#[derive(Default)]
struct Found<'a> {
    model: Option<&'a str>,
    stream: Option<&'a str>,
    cache_salt: Option<&'a str>,
    priority: Option<&'a str>,
    max_tokens: Option<&'a str>,
    max_completion_tokens: Option<&'a str>,
    max_output_tokens: Option<&'a str>,
    n: Option<&'a str>,
    best_of: Option<&'a str>,
    echo: Option<&'a str>,
    use_beam_search: Option<&'a str>,
    prompt_logprobs: Option<&'a str>,
    prompt_embeds: Option<&'a str>,
    prompt: Option<&'a str>,
    messages: Option<&'a str>,
    tools: Option<&'a str>,
    documents: Option<&'a str>,
    chat_template: Option<&'a str>,
    chat_template_kwargs: Option<&'a str>,
    add_generation_prompt: Option<&'a str>,
    continue_final_message: Option<&'a str>,
    add_special_tokens: Option<&'a str>,
}

impl<'a> Found<'a> {
    fn in_text(text: &'a [u8]) -> Result<Self, NoObject> {
        let mut found = Self::default();
        visit(text, |member| {
            let slot = match &*member.name {
                "model" => &mut found.model,
                "stream" => &mut found.stream,
                "cache_salt" => &mut found.cache_salt,
                "priority" => &mut found.priority,
                "max_tokens" => &mut found.max_tokens,
                "max_completion_tokens" => &mut found.max_completion_tokens,
                "max_output_tokens" => &mut found.max_output_tokens,
                "n" => &mut found.n,
                "best_of" => &mut found.best_of,
                "echo" => &mut found.echo,
                "use_beam_search" => &mut found.use_beam_search,
                "prompt_logprobs" => &mut found.prompt_logprobs,
                "prompt_embeds" => &mut found.prompt_embeds,
                "prompt" => &mut found.prompt,
                "messages" => &mut found.messages,
                "tools" => &mut found.tools,
                "documents" => &mut found.documents,
                "chat_template" => &mut found.chat_template,
                "chat_template_kwargs" => &mut found.chat_template_kwargs,
                "add_generation_prompt" => &mut found.add_generation_prompt,
                "continue_final_message" => &mut found.continue_final_message,
                "add_special_tokens" => &mut found.add_special_tokens,
                _ => return,
            };
            // Of two the last counts, as with Python's reader.
            *slot = (member.value != "null").then_some(member.value);
        })?;
        Ok(found)
    }
}

/// The model that a body names, where it is a JSON object that names one.
pub fn model(body: &[u8]) -> Option<String> {
    let mut model = None;
    visit(body, |member| {
        if member.name == "model" {
            model = serde_json::from_str(member.value).ok();
        }
    })
    .ok()?;
    model
}

/// Reads a body.
///
/// # Errors
/// 400: it is no JSON object, or names no model.
pub fn read(endpoint: Endpoint, body: &[u8]) -> Result<Asked, ApiError> {
    let found = Found::in_text(body).map_err(|error| {
        let refusal = ApiError::bad_request(error.to_string());
        match error {
            NoObject::Syntax(_) => refusal.with_code("invalid_json"),
            NoObject::OtherKind => refusal,
        }
    })?;
    let model: String = found
        .model
        .and_then(|model| serde_json::from_str(model).ok())
        .filter(|model: &String| !model.is_empty())
        .ok_or_else(|| {
            ApiError::field(
                "model",
                "model is required: GET /v1/models lists what is served",
            )
        })?;
    let (prompt, bytes, images) = match endpoint {
        Endpoint::Chat => chat(&found),
        Endpoint::Completions => completion(&found),
        Endpoint::Other => (Prompt::Unread, body.len(), 0),
    };
    let about = match &prompt {
        Prompt::Tokens(tokens) => tokens.len(),
        _ => bytes / BYTES_PER_TOKEN,
    };
    Ok(Asked {
        model,
        stream: found.stream == Some("true"),
        cache_salt: found
            .cache_salt
            .and_then(|salt| serde_json::from_str(salt).ok()),
        priority: Priority::of(found.priority),
        max_output: [
            found.max_completion_tokens,
            found.max_tokens,
            found.max_output_tokens,
        ]
        .into_iter()
        .flatten()
        .find_map(number)
        .or((endpoint == Endpoint::Completions).then_some(DEFAULT_COMPLETION)),
        whole: whole(endpoint, &found, &prompt),
        prompt,
        about_tokens: narrow(about)
            .saturating_add(images.saturating_mul(IMAGE_TOKENS))
            .max(1),
    })
}

/// Why it has to stay on one worker.
fn whole(endpoint: Endpoint, found: &Found<'_>, prompt: &Prompt) -> Option<&'static str> {
    let several = |value: Option<&str>| value.is_some_and(|value| number::<i64>(value) != Some(1));
    let asked = |value: Option<&str>| value.is_some_and(|value| value != "false");
    if endpoint == Endpoint::Other {
        return Some("endpoint");
    }
    if several(found.n) {
        return Some("n");
    }
    if several(found.best_of) {
        return Some("best_of");
    }
    for (name, value) in [
        ("echo", found.echo),
        ("use_beam_search", found.use_beam_search),
        ("prompt_logprobs", found.prompt_logprobs),
        ("prompt_embeds", found.prompt_embeds),
    ] {
        if asked(value) {
            return Some(name);
        }
    }
    match (endpoint, prompt) {
        (Endpoint::Completions, Prompt::Unread) => Some("prompt"),
        (_, Prompt::NotText) => Some("messages"),
        _ => None,
    }
}

/// The prompt, its bytes of text, and how many parts of it are no text.
fn completion(found: &Found<'_>) -> (Prompt, usize, u32) {
    let Some(value) = found.prompt else {
        return (Prompt::Unread, 0, 0);
    };
    let add_special_tokens = found.add_special_tokens != Some("false");
    if value.starts_with('"') {
        let prompt = serde_json::from_str(value).map_or(Prompt::Unread, |text| Prompt::Text {
            text,
            add_special_tokens,
        });
        return (prompt, value.len(), 0);
    }
    let prompt = serde_json::from_str::<Vec<u32>>(value)
        .ok()
        .filter(|tokens| !tokens.is_empty())
        .map_or(Prompt::Unread, Prompt::Tokens);
    (prompt, value.len(), 0)
}

fn chat(found: &Found<'_>) -> (Prompt, usize, u32) {
    let length = |value: Option<&str>| value.map_or(0, str::len);
    let bytes = length(found.messages) + length(found.tools) + length(found.documents);
    let Some(messages) = found
        .messages
        .and_then(|messages| serde_json::from_str::<Vec<Value>>(messages).ok())
    else {
        return (Prompt::Unread, bytes, 0);
    };
    let (mut text, mut images) = (length(found.tools) + length(found.documents), 0);
    for message in &messages {
        match message.get("content") {
            Some(Value::String(content)) => text += content.len(),
            Some(Value::Array(parts)) => {
                for part in parts {
                    match part.get("text").or_else(|| part.get("refusal")) {
                        Some(Value::String(part)) => text += part.len(),
                        _ => images += 1,
                    }
                }
            }
            _ => {}
        }
        text += message
            .get("tool_calls")
            .map_or(0, |calls| calls.to_string().len());
    }
    if images > 0 {
        return (Prompt::NotText, text, images);
    }
    if found.chat_template.is_some()
        || found
            .continue_final_message
            .is_some_and(|value| value != "false")
    {
        return (Prompt::Unread, text, 0);
    }
    let object = |value: Option<&str>| match value.map(serde_json::from_str) {
        Some(Ok(Value::Object(members))) => members,
        _ => serde_json::Map::new(),
    };
    let mut arguments = object(found.chat_template_kwargs);
    for (name, value) in [("tools", found.tools), ("documents", found.documents)] {
        if let Some(Ok(value)) = value.map(serde_json::from_str::<Value>) {
            arguments.insert(name.to_owned(), value);
        }
    }
    let chat = Chat {
        messages,
        arguments,
        add_generation_prompt: found.add_generation_prompt != Some("false"),
        add_special_tokens: found.add_special_tokens == Some("true"),
    };
    (Prompt::Chat(chat), text, 0)
}

fn number<T: TryFrom<i64>>(value: &str) -> Option<T> {
    let number: Value = serde_json::from_str(value).ok()?;
    let whole = number.as_i64().or_else(|| {
        number
            .as_f64()
            .filter(|n| n.fract() == 0.0)
            .map(|n| n as i64)
    })?;
    T::try_from(whole).ok()
}

fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(fields: &str) -> Asked {
        let body =
            format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hello"}}]{fields}}}"#);
        read(Endpoint::Chat, body.as_bytes()).unwrap()
    }

    fn completion(fields: &str) -> Asked {
        read(
            Endpoint::Completions,
            format!(r#"{{"model":"m"{fields}}}"#).as_bytes(),
        )
        .unwrap()
    }

    #[test]
    fn only_what_is_no_object_or_names_no_model_is_refused() {
        for (body, param) in [
            ("[]", None),
            ("{", None),
            ("{}", Some("model")),
            (r#"{"model":7}"#, Some("model")),
        ] {
            let error = read(Endpoint::Chat, body.as_bytes()).unwrap_err();
            assert_eq!(
                (error.status, error.param.as_deref()),
                (400, param),
                "{body}"
            );
        }
        let odd =
            chat(r#","max_tokens":"many","n":1.0,"stream":"yes","priority":[],"temperature":-3"#);
        assert_eq!(
            (odd.max_output, odd.whole, odd.stream, odd.priority),
            (None, None, false, Priority::Unread)
        );
    }

    #[test]
    fn a_priority_is_a_number_of_any_size_or_unread() {
        for (fields, priority) in [
            ("", Priority::Absent),
            (r#","priority":null"#, Priority::Absent),
            (
                r#","priority":-3000000000"#,
                Priority::Number(-3_000_000_000),
            ),
            (r#","priority":-1e300"#, Priority::Number(i64::MIN)),
            (r#","priority":2.0"#, Priority::Number(2)),
            (r#","priority":"-9""#, Priority::Unread),
            (r#","priority":true"#, Priority::Unread),
            (r#","priority":0.5"#, Priority::Unread),
        ] {
            assert_eq!(chat(fields).priority, priority, "{fields}");
        }
    }

    #[test]
    fn what_cannot_be_split_is_told_by_its_field() {
        for (fields, field) in [
            (r#","n":2"#, Some("n")),
            (r#","n":"two""#, Some("n")),
            (r#","n":1,"best_of":null,"echo":false"#, None),
            (r#","best_of":2"#, Some("best_of")),
            (r#","echo":true"#, Some("echo")),
            (r#","prompt_logprobs":0"#, Some("prompt_logprobs")),
            (r#","use_beam_search":true"#, Some("use_beam_search")),
        ] {
            assert_eq!(chat(fields).whole, field, "{fields}");
        }
        for (prompt, field) in [
            (r#""hi""#, None),
            ("[1,2]", None),
            (r#"["hi"]"#, Some("prompt")),
            ("[[1],[2]]", Some("prompt")),
            ("7", Some("prompt")),
        ] {
            assert_eq!(
                completion(&format!(r#","prompt":{prompt}"#)).whole,
                field,
                "{prompt}"
            );
        }
        assert_eq!(
            read(Endpoint::Other, br#"{"model":"m"}"#).unwrap().whole,
            Some("endpoint")
        );
    }

    #[test]
    fn pictures_are_no_text_and_do_not_count_by_their_bytes() {
        let picture = "A".repeat(1 << 20);
        let body = format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":[{{"type":"text","text":"12345678"}},{{"type":"image_url","image_url":{{"url":"data:{picture}"}}}}]}}]}}"#
        );
        let asked = read(Endpoint::Chat, body.as_bytes()).unwrap();
        assert_eq!(
            (asked.prompt, asked.whole, asked.about_tokens),
            (Prompt::NotText, Some("messages"), 2 + IMAGE_TOKENS)
        );
    }

    #[test]
    fn a_prompt_is_read_where_it_can_become_tokens_here() {
        let asked =
            chat(r#","tools":[{"type":"function"}],"chat_template_kwargs":{"thinking":false}"#);
        let Prompt::Chat(chat_prompt) = asked.prompt else {
            panic!("{:?}", asked.prompt);
        };
        assert!(
            chat_prompt.arguments.contains_key("tools")
                && chat_prompt.arguments.contains_key("thinking")
        );
        assert!(chat_prompt.add_generation_prompt && !chat_prompt.add_special_tokens);
        for fields in [
            r#","chat_template":"x""#,
            r#","continue_final_message":true"#,
        ] {
            assert_eq!(chat(fields).prompt, Prompt::Unread, "{fields}");
        }
        assert_eq!(
            completion(r#","prompt":[5,6]"#).prompt,
            Prompt::Tokens(vec![5, 6])
        );
        let text = completion(r#","prompt":"hi\u00e9","max_tokens":3"#);
        assert_eq!(
            text.prompt,
            Prompt::Text {
                text: "hié".to_owned(),
                add_special_tokens: true
            }
        );
        assert_eq!(text.max_output, Some(3));
        assert_eq!(completion("").max_output, Some(16));
        assert_eq!(
            completion(r#","prompt":"\ud800""#).prompt,
            Prompt::Unread,
            "half a character has no tokens"
        );
    }

    #[test]
    fn the_last_of_two_members_counts() {
        let asked = chat(r#","max_tokens":1,"max_tokens":2,"stream":true,"stream":false"#);
        assert_eq!((asked.max_output, asked.stream), (Some(2), false));
    }
}

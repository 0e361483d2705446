//! Chat templates: Jinja as Hugging Face's `apply_chat_template` runs it.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::{Deserialize, Serialize};

use super::python_json::to_json;
use crate::chat::Chat;

/// What a worker serves under the digest of its chat template.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateArtifact {
    /// Empty: the model has none.
    #[serde(default)]
    pub chat_template: String,
    #[serde(default)]
    pub bos_token: Option<String>,
    #[serde(default)]
    pub eos_token: Option<String>,
    /// Prompts begin with `bos_token`.
    #[serde(default)]
    pub add_bos: bool,
}

/// A compiled template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
    shows_tool_calls: bool,
    shows_developer: bool,
}

/// A template that does not compile or cannot be rendered. Carries the template's own words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// It called `raise_exception`: these messages are not what the model was trained on.
    #[error("{0}")]
    Refusal(String),
    /// It could not be rendered for these messages, or with these arguments; others pass.
    #[error("{0}")]
    Request(String),
    /// It is broken: the fault is the model's.
    #[error("{0}")]
    Fault(String),
}

/// Marks the error of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("the template refuses")]
struct Raised;

const NAME: &str = "chat";
/// Variable with the time of the request, in seconds since the epoch.
const NOW: &str = "baton_now";

impl ChatTemplate {
    pub fn compile(artifact: &TemplateArtifact) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        environment.set_syntax(syntax.map_err(|error| fault(&error))?);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_formatter(format_as_python);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        let source = without_training_marks(&artifact.chat_template);
        environment
            .add_template_owned(NAME, source)
            .map_err(|error| fault(&error))?;
        Ok(Self {
            environment,
            bos_token: artifact.bos_token.clone().unwrap_or_default(),
            eos_token: artifact.eos_token.clone().unwrap_or_default(),
            shows_tool_calls: artifact.chat_template.contains("tool_calls"),
            shows_developer: artifact.chat_template.contains("developer"),
        })
    }

    /// Whether tool calls of earlier turns reach the prompt.
    pub fn shows_tool_calls(&self) -> bool {
        self.shows_tool_calls
    }

    /// The prompt of a chat. `now` is for templates that write the date.
    ///
    /// # Errors
    /// The template refuses, or cannot be rendered.
    pub fn render(&self, chat: &Chat, now: Timestamp) -> Result<String, TemplateError> {
        self.render_with(&chat.template_arguments, chat, now)
            .map_err(|error| self.whose_fault(&error, now))
    }

    /// What failed for a request fails for every one where the template is broken: the simplest chat there is tells.
    fn whose_fault(&self, error: &Error, now: Timestamp) -> TemplateError {
        let unknown = [
            ErrorKind::UnknownFilter,
            ErrorKind::UnknownFunction,
            ErrorKind::UnknownTest,
            ErrorKind::SyntaxError,
            ErrorKind::TemplateNotFound,
        ];
        if raised(error) {
            TemplateError::Refusal(readable(error))
        } else if unknown.contains(&error.kind()) {
            fault(error)
        } else {
            let simplest = self.render_with(&serde_json::Map::new(), &Chat::simplest(), now);
            match simplest {
                Err(broken) if !raised(&broken) => fault(error),
                _ => TemplateError::Request(readable(error)),
            }
        }
    }

    fn render_with(
        &self,
        arguments: &serde_json::Map<String, serde_json::Value>,
        chat: &Chat,
        now: Timestamp,
    ) -> Result<String, Error> {
        let mut context: Vec<(String, Value)> = arguments
            .iter()
            .map(|(name, value)| (name.clone(), Value::from(Serde(value))))
            .collect();
        let mut messages = chat.messages.clone();
        if !self.shows_developer {
            // The newer name of the same role.
            for message in messages
                .iter_mut()
                .filter(|message| message.role == "developer")
            {
                "system".clone_into(&mut message.role);
            }
        }
        context.extend(
            [
                ("messages", Value::from(Serde(&messages))),
                ("bos_token", Value::from(self.bos_token.as_str())),
                ("eos_token", Value::from(self.eos_token.as_str())),
                (
                    "add_generation_prompt",
                    Value::from(chat.add_generation_prompt),
                ),
                (NOW, Value::from(now.as_second())),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        );
        let context: Value = context
            .into_iter()
            .collect::<std::collections::BTreeMap<_, _>>()
            .into();
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(context))
    }
}

/// `{% generation %}` marks the assistant's text for training; it has no effect on the text.
fn without_training_marks(template: &str) -> String {
    let mut source = template.to_owned();
    for (mark, neutral) in [("generation", "if true"), ("endgeneration", "endif")] {
        for (open, close) in [("{%", "%}"), ("{%-", "%}"), ("{%", "-%}"), ("{%-", "-%}")] {
            source = source.replace(
                &format!("{open} {mark} {close}"),
                &format!("{open} {neutral} {close}"),
            );
        }
    }
    source
}

fn fault(error: &Error) -> TemplateError {
    TemplateError::Fault(readable(error))
}

fn raised(error: &Error) -> bool {
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if inner.is::<Raised>() {
            return true;
        }
        source = inner.source();
    }
    false
}

fn readable(error: &Error) -> String {
    let detail = error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{detail} (line {line} of the chat template)"),
        None => detail,
    }
}

/// Prints `None`, `True` and `False` as Python does.
fn format_as_python(
    output: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    let word = if value.is_none() {
        "None"
    } else if value.is_true() && value.kind() == minijinja::value::ValueKind::Bool {
        "True"
    } else if value.kind() == minijinja::value::ValueKind::Bool {
        "False"
    } else {
        return minijinja::escape_formatter(output, state, value);
    };
    output.write_str(word).map_err(Error::from)
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message).with_source(Raised))
}

fn strftime_now(state: &State<'_, '_>, format: &str) -> Result<String, Error> {
    let invalid = |error: jiff::Error| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now: {error}"),
        )
    };
    let seconds = state
        .lookup(NOW)
        .and_then(|now| now.as_i64())
        .unwrap_or_default();
    let now = Timestamp::from_second(seconds)
        .map_err(invalid)?
        .to_zoned(TimeZone::UTC);
    jiff::fmt::strtime::format(format, &now).map_err(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The template of SmolLM2-135M-Instruct.
    const SMOLLM2: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ \
        '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}\
        {% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}\
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

    fn render(template: &str, fields: &str) -> Result<String, TemplateError> {
        let artifact = TemplateArtifact {
            chat_template: template.to_owned(),
            bos_token: Some("<s>".into()),
            eos_token: Some("</s>".into()),
            add_bos: false,
        };
        let request = asked(fields);
        // 2026-11-29T17:45:00Z
        ChatTemplate::compile(&artifact)?
            .render(&request, Timestamp::from_second(1_795_974_300).unwrap())
    }

    /// A request's fields, as routers read them.
    fn asked(fields: &str) -> Chat {
        let fields: serde_json::Value = serde_json::from_str(&format!("{{{fields}}}")).unwrap();
        let arguments = fields["chat_template_kwargs"].as_object();
        Chat {
            messages: serde_json::from_value(fields["messages"].clone()).unwrap(),
            add_generation_prompt: fields["add_generation_prompt"].as_bool().unwrap_or(true),
            template_arguments: arguments.cloned().unwrap_or_default(),
        }
    }

    const HELLO: &str = r#""messages": [{"role": "user", "content": "hello"}]"#;

    #[test]
    fn the_template_of_the_embedded_model_gives_what_transformers_gives() {
        assert_eq!(
            render(SMOLLM2, HELLO).unwrap(),
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
             <|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        );
        let with_system = r#""messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a"}], "add_generation_prompt": false"#;
        assert_eq!(
            render(SMOLLM2, with_system).unwrap(),
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        );
    }

    #[test]
    fn block_tags_take_no_lines_and_python_methods_work() {
        let template = "{{ bos_token }}\n  {% for m in messages %}\n    {% if m.content.strip().startswith('h') %}\n\
            {{ m.content.upper().split('L')[0] ~ eos_token }}\n    {%- endif %}\n  {% endfor %}\nend\n";
        assert_eq!(render(template, HELLO).unwrap(), "<s>\nHE</s>end");
    }

    #[test]
    fn a_refusal_of_the_template_is_told_in_its_own_words() {
        let template = "{% if messages[0].role != 'system' %}\n{{ raise_exception('a system message must come first') }}{% endif %}";
        let error = render(template, HELLO).unwrap_err();
        let words = "a system message must come first (line 2 of the chat template)";
        assert_eq!(error, TemplateError::Refusal(words.to_owned()));
    }

    #[test]
    fn a_broken_template_is_told_from_messages_that_it_cannot_take() {
        // Renders nothing at all.
        let broken = render("{{ messages[0].content.nothing.further }}", HELLO).unwrap_err();
        assert!(matches!(broken, TemplateError::Fault(_)), "{broken:?}");
        // A filter that nobody has, on a way that only some chats take.
        let template = "{% if messages | length > 1 %}{{ messages | no_such_filter }}{% endif %}";
        let two =
            r#""messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]"#;
        let broken = render(template, two).unwrap_err();
        assert!(matches!(broken, TemplateError::Fault(_)), "{broken:?}");
        assert_eq!(render(template, HELLO).unwrap(), "");
        // An argument of a client's that the template cannot use.
        let fields = format!(r#"{HELLO}, "chat_template_kwargs": {{"depth": "deep"}}"#);
        let error = render("{% if depth %}{{ depth - 1 }}{% endif %}", &fields).unwrap_err();
        assert!(matches!(error, TemplateError::Request(_)), "{error:?}");
    }

    #[test]
    fn a_template_that_does_not_compile_says_where() {
        let error = render("{% if %}", HELLO).unwrap_err().to_string();
        assert!(error.contains("line 1 of the chat template"), "{error}");
    }

    #[test]
    fn values_are_written_as_python_writes_them() {
        let fields = format!(
            r#"{HELLO}, "chat_template_kwargs": {{"t": {{"a": [1, "<é>", null, true, 0.5], "b": {{}}}}}}"#
        );
        assert_eq!(
            render("{{ t | tojson }}", &fields).unwrap(),
            r#"{"a": [1, "<é>", null, true, 0.5], "b": {}}"#
        );
        assert_eq!(
            render("{{ t.a[:2] | tojson(indent=2) }}", &fields).unwrap(),
            "[\n  1,\n  \"<é>\"\n]"
        );
        assert_eq!(
            render(
                "{{ t.b | tojson(separators=(',', ':')) }}{{ none }}{{ true }}",
                &fields
            )
            .unwrap(),
            "{}NoneTrue"
        );
    }

    #[test]
    fn the_date_is_that_of_the_request() {
        assert_eq!(
            render("{{ strftime_now('%d %b %Y') }}", HELLO).unwrap(),
            "29 Nov 2026"
        );
        assert!(
            render("{{ strftime_now('%!') }}", HELLO)
                .unwrap_err()
                .to_string()
                .contains("strftime_now")
        );
    }

    #[test]
    fn marks_for_training_and_loop_controls_are_understood() {
        let template = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{%- generation -%} x {%- endgeneration %}{{ i }}{% endfor %}";
        assert_eq!(render(template, HELLO).unwrap(), "x1");
    }

    #[test]
    fn a_client_cannot_replace_what_the_router_says() {
        let fields =
            format!(r#"{HELLO}, "chat_template_kwargs": {{"bos_token": "evil", "messages": []}}"#);
        assert_eq!(
            render("{{ bos_token }}{{ messages | length }}", &fields).unwrap(),
            "<s>1"
        );
    }

    #[test]
    fn developer_is_system_where_the_template_does_not_know_it() {
        let fields = r#""messages": [{"role": "developer", "content": "d"}]"#;
        assert_eq!(render("{{ messages[0].role }}", fields).unwrap(), "system");
        assert_eq!(
            render("{{ messages[0].role }}{# developer #}", fields).unwrap(),
            "developer"
        );
    }
}

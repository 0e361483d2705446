//! Tokenizer, token bytes and chat template of one model.

use jiff::Timestamp;
use tokenizers::Tokenizer;

use super::bpe::{BytePairs, Unfit};
use super::segments::Segments;
use super::template::{ChatTemplate, TemplateArtifact, TemplateError};
use super::vocabulary::{UnsupportedDecoder, Vocabulary};
use crate::chat::Chat;

/// Everything that turns text of a model into tokens and back.
#[derive(Debug)]
pub struct ModelText {
    tokenizer: Tokenizer,
    /// Makes the same tokens faster, where the tokenizer is of its kind.
    pairs: Result<BytePairs, Unfit>,
    segments: Segments,
    vocabulary: Vocabulary,
    /// `None`: the model continues text but does not chat.
    template: Option<ChatTemplate>,
    /// Put before every prompt that lacks it.
    bos: Option<u32>,
    /// Bytes of text that one token covers at most; `None` where the tokenizer drops or joins text first.
    longest_token: Option<usize>,
}

/// Artifacts that this build cannot use. A fault of the model's files, not of a request.
#[derive(Debug, thiserror::Error)]
pub enum UnusableArtifact {
    #[error("tokenizer.json cannot be loaded: {0}")]
    Tokenizer(String),
    #[error(transparent)]
    Decoder(#[from] UnsupportedDecoder),
    #[error("the chat template artifact is not readable: {0}")]
    TemplateJson(#[from] serde_json::Error),
    #[error("the chat template does not compile: {0}")]
    Template(#[from] TemplateError),
}

/// A prompt that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    #[error("the model has no chat template: use /v1/completions")]
    NoTemplate,
    #[error("the model's chat template does not show tool calls")]
    ToolCalls(String),
    #[error("the model's chat template refuses the messages: {0}")]
    Refused(String),
    #[error("the model's chat template cannot show these messages: {0}")]
    Unshown(String),
    #[error("the model's chat template is broken: {0}")]
    Broken(String),
    #[error("the prompt cannot be tokenised: {0}")]
    Tokenizer(String),
}

impl ModelText {
    /// Compiles what workers serve: a Hugging Face `tokenizer.json`, and the template as
    /// [`TemplateArtifact`](super::template::TemplateArtifact) has it. Takes up to a second for a large vocabulary.
    pub fn compile(tokenizer_json: &[u8], chat_template: &[u8]) -> Result<Self, UnusableArtifact> {
        let broken = |error: tokenizers::Error| UnusableArtifact::Tokenizer(error.to_string());
        let mut tokenizer = Tokenizer::from_bytes(tokenizer_json).map_err(broken)?;
        // Settings of a training run: a prompt is served whole or refused.
        tokenizer.with_truncation(None).map_err(broken)?;
        tokenizer.with_padding(None);
        let artifact: TemplateArtifact = serde_json::from_slice(chat_template)?;
        let template = if artifact.chat_template.is_empty() {
            None
        } else {
            Some(ChatTemplate::compile(&artifact)?)
        };
        let control: Vec<&str> = [&artifact.bos_token, &artifact.eos_token]
            .into_iter()
            .flatten()
            .map(String::as_str)
            .collect();
        let vocabulary = Vocabulary::new(&tokenizer, tokenizer_json, &control)?;
        let bos = artifact
            .bos_token
            .filter(|_| artifact.add_bos)
            .and_then(|token| tokenizer.token_to_id(&token));
        Ok(Self {
            longest_token: longest_token(&tokenizer, &vocabulary),
            pairs: BytePairs::new(tokenizer_json, &tokenizer),
            segments: Segments::default(),
            tokenizer,
            vocabulary,
            template,
            bos,
        })
    }

    /// Whether it has a chat template.
    pub fn chats(&self) -> bool {
        self.template.is_some()
    }

    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Why each text costs tens of times what it does with models whose tokenizer is byte-level BPE; `None`: it does not.
    pub fn slow(&self) -> Option<Unfit> {
        self.pairs.as_ref().err().copied()
    }

    /// Tokens that a text has at least, found without tokenising it: what is hopelessly long is refused at no cost.
    pub fn least_tokens(&self, text: &str) -> usize {
        self.longest_token
            .map_or(0, |longest| text.len().div_ceil(longest))
    }

    /// The text of a chat's prompt.
    pub fn render(&self, chat: &Chat, now: Timestamp) -> Result<String, PromptError> {
        let template = self.template.as_ref().ok_or(PromptError::NoTemplate)?;
        if let Some(path) = chat
            .first_tool_calls()
            .filter(|_| !template.shows_tool_calls())
        {
            return Err(PromptError::ToolCalls(path));
        }
        template.render(chat, now).map_err(|error| match error {
            TemplateError::Refusal(words) => PromptError::Refused(words),
            TemplateError::Request(words) => PromptError::Unshown(words),
            TemplateError::Fault(words) => PromptError::Broken(words),
        })
    }

    /// Tokens of a text. With `add_special_tokens` it begins as the model's sequences do. What is kept of it is found again under
    /// the same `salt` only.
    pub fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        salt: &str,
    ) -> Result<Vec<u32>, PromptError> {
        let failed = |error: tokenizers::Error| PromptError::Tokenizer(error.to_string());
        let mut tokens = match &self.pairs {
            Ok(pairs) => pairs.encode(text, self.segments.of(salt)).map_err(failed)?,
            Err(_) => {
                let encoding = self.tokenizer.encode_fast(text, add_special_tokens);
                encoding.map_err(failed)?.get_ids().to_vec()
            }
        };
        if let Some(bos) = self
            .bos
            .filter(|bos| add_special_tokens && tokens.first() != Some(bos))
        {
            tokens.insert(0, bos);
        }
        Ok(tokens)
    }
}

fn longest_token(tokenizer: &Tokenizer, vocabulary: &Vocabulary) -> Option<usize> {
    let swallows = tokenizer
        .get_added_tokens_decoder()
        .values()
        .any(|token| token.lstrip || token.rstrip);
    if swallows || tokenizer.get_normalizer().is_some() {
        return None;
    }
    let longest = (0..vocabulary.size())
        .map(|id| vocabulary.bytes(id).len())
        .max();
    longest.filter(|&bytes| bytes > 0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::samples::tokenizer_json;

    /// `tokenizer.json` and the template's artifact.
    fn artifacts(template: &str, add_bos: bool) -> (Vec<u8>, Vec<u8>) {
        let decoder = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let template = TemplateArtifact {
            chat_template: template.to_owned(),
            bos_token: Some("<s>".into()),
            eos_token: None,
            add_bos,
        };
        (
            tokenizer_json(&["h", "i", "<s>"], &["<s>"], &decoder),
            serde_json::to_vec(&template).unwrap(),
        )
    }

    fn compiled(template: &str, add_bos: bool) -> ModelText {
        let (tokenizer, template) = artifacts(template, add_bos);
        ModelText::compile(&tokenizer, &template).unwrap()
    }

    fn chat(messages: &str) -> Chat {
        Chat::of(serde_json::from_str(messages).unwrap())
    }

    #[test]
    fn a_sequence_begins_once_with_its_first_token_and_only_where_asked() {
        let model = compiled("", true);
        assert_eq!(model.encode("hi", true, "").unwrap(), [2, 0, 1]);
        assert_eq!(model.encode("<s>hi", true, "").unwrap(), [2, 0, 1]);
        assert_eq!(model.encode("hi", false, "").unwrap(), [0, 1]);
        let model = compiled("", false);
        assert_eq!(model.encode("hi", true, "").unwrap(), [0, 1]);
    }

    #[test]
    fn the_least_number_of_tokens_is_never_more_than_there_are() {
        let model = compiled("", false);
        // The longest token is "<s>".
        assert_eq!(model.least_tokens("hihihi"), 2);
        for text in ["", "h", "hihih", "<s><s>h"] {
            assert!(model.least_tokens(text) <= model.encode(text, false, "").unwrap().len());
        }
    }

    #[test]
    fn a_model_without_a_template_does_not_chat() {
        let model = compiled("", false);
        let error = model
            .render(
                &chat(r#"[{"role": "user", "content": "hi"}]"#),
                Timestamp::UNIX_EPOCH,
            )
            .unwrap_err();
        assert!(error.to_string().contains("use /v1/completions"), "{error}");
    }

    #[test]
    fn tool_calls_that_the_template_would_drop_are_refused_by_path() {
        let messages = r#"[{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]"#;
        let model = compiled("{{ messages[0].content }}", false);
        let error = model
            .render(&chat(messages), Timestamp::UNIX_EPOCH)
            .unwrap_err();
        assert!(matches!(error, PromptError::ToolCalls(path) if path == "messages[0].tool_calls"));
        let model = compiled("{{ messages[0].tool_calls[0].function.name }}", false);
        assert_eq!(
            model
                .render(&chat(messages), Timestamp::UNIX_EPOCH)
                .unwrap(),
            "f"
        );
    }

    #[test]
    fn files_that_are_no_tokenizer_or_template_say_which() {
        let refused = |tokenizer: &[u8], template: &[u8]| {
            ModelText::compile(tokenizer, template)
                .unwrap_err()
                .to_string()
        };
        let (tokenizer, template) = artifacts("", false);
        let error = refused(b"{}", &template);
        assert!(
            error.starts_with("tokenizer.json cannot be loaded"),
            "{error}"
        );
        let error = refused(&tokenizer, b"x");
        assert!(error.starts_with("the chat template artifact"), "{error}");
        let error = refused(&tokenizer, &artifacts("{% for %}", false).1);
        assert!(
            error.starts_with("the chat template does not compile"),
            "{error}"
        );
    }
}

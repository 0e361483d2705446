//! Tokenizer, token bytes and chat template of one model.

use jiff::Timestamp;
use tokenizers::Tokenizer;

use super::template::{ChatTemplate, TemplateArtifact, TemplateError};
use super::vocabulary::{UnsupportedDecoder, Vocabulary};
use crate::openai::chat::ChatRequest;
use crate::run::TextArtifacts;

/// Everything that turns text of a model into tokens and back.
#[derive(Debug)]
pub struct ModelText {
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    /// `None`: the model continues text but does not chat.
    template: Option<ChatTemplate>,
    /// Put before every prompt that lacks it.
    bos: Option<u32>,
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
    Template(#[from] TemplateError),
    #[error("the prompt cannot be tokenised: {0}")]
    Tokenizer(String),
}

impl ModelText {
    /// Compiles what workers serve. Takes up to a second for a large vocabulary.
    pub fn compile(artifacts: &TextArtifacts) -> Result<Self, UnusableArtifact> {
        let broken = |error: tokenizers::Error| UnusableArtifact::Tokenizer(error.to_string());
        let mut tokenizer = Tokenizer::from_bytes(&artifacts.tokenizer).map_err(broken)?;
        // Settings of a training run: a prompt is served whole or refused.
        tokenizer.with_truncation(None).map_err(broken)?;
        tokenizer.with_padding(None);
        let artifact: TemplateArtifact = serde_json::from_slice(&artifacts.chat_template)?;
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
        let vocabulary = Vocabulary::new(&tokenizer, &artifacts.tokenizer, &control)?;
        let bos = artifact
            .bos_token
            .filter(|_| artifact.add_bos)
            .and_then(|token| tokenizer.token_to_id(&token));
        Ok(Self {
            tokenizer,
            vocabulary,
            template,
            bos,
        })
    }

    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// The text of a chat's prompt.
    pub fn render(&self, request: &ChatRequest, now: Timestamp) -> Result<String, PromptError> {
        let template = self.template.as_ref().ok_or(PromptError::NoTemplate)?;
        if let Some(path) = request
            .first_tool_calls()
            .filter(|_| !template.shows_tool_calls())
        {
            return Err(PromptError::ToolCalls(path));
        }
        Ok(template.render(request, now)?)
    }

    /// Tokens of a text. With `add_special_tokens` it begins as the model's sequences do.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, PromptError> {
        let encoding = self
            .tokenizer
            .encode_fast(text, add_special_tokens)
            .map_err(|error| PromptError::Tokenizer(error.to_string()))?;
        let mut tokens = encoding.get_ids().to_vec();
        if let Some(bos) = self
            .bos
            .filter(|bos| add_special_tokens && tokens.first() != Some(bos))
        {
            tokens.insert(0, bos);
        }
        Ok(tokens)
    }
}

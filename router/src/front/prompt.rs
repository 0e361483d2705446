//! A request into the tokens of its prompt, checked against the model.

use jiff::Timestamp;

use crate::openai::answer::Kind;
use crate::openai::budget::{DefaultBudget, prompt_too_long, token_budget};
use crate::openai::chat::ChatRequest;
use crate::openai::completion::{CompletionRequest, Prompt};
use crate::openai::error::ApiError;
use crate::openai::parameters::Parameters;
use crate::text::model::{ModelText, PromptError};
use crate::text::vocabulary::Vocabulary;

/// A request of either kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Asked {
    Chat(ChatRequest),
    Completion(CompletionRequest),
}

/// What a run is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    pub tokens: Vec<u32>,
    /// Tokens that may be generated.
    pub max_tokens: u32,
}

impl Asked {
    /// A body as a request of this kind.
    pub fn parse(kind: Kind, body: &[u8]) -> Result<Self, ApiError> {
        Ok(match kind {
            Kind::Chat => Self::Chat(ChatRequest::parse(body)?),
            Kind::Completion => Self::Completion(CompletionRequest::parse(body)?),
        })
    }

    /// All but the prompt.
    pub fn into_parameters(self) -> Parameters {
        match self {
            Self::Chat(request) => request.parameters,
            Self::Completion(request) => request.parameters,
        }
    }

    pub fn parameters(&self) -> &Parameters {
        match self {
            Self::Chat(request) => &request.parameters,
            Self::Completion(request) => &request.parameters,
        }
    }

    /// `max_context` in tokens; `now` for templates that write the date; `salt`: whose tokens are kept apart from others'.
    pub fn prepare(
        &self,
        model: &ModelText,
        max_context: u32,
        now: Timestamp,
        salt: &str,
    ) -> Result<Prepared, ApiError> {
        let (tokens, default) = match self {
            Self::Chat(request) => {
                let refused = |error| refusal(error, "messages");
                let text = model.render(&request.chat, now).map_err(refused)?;
                check_length("messages", model, &text, max_context)?;
                let tokens = model
                    .encode(&text, request.add_special_tokens, salt)
                    .map_err(refused)?;
                (tokens, DefaultBudget::Rest)
            }
            Self::Completion(request) => {
                let tokens = match &request.prompt {
                    Prompt::Text(text) => {
                        check_length("prompt", model, text, max_context)?;
                        model
                            .encode(text, request.add_special_tokens, salt)
                            .map_err(|error| refusal(error, "prompt"))?
                    }
                    Prompt::Tokens(tokens) => {
                        check_tokens("prompt", tokens, model.vocabulary())?;
                        tokens.clone()
                    }
                };
                if tokens.is_empty() {
                    return Err(ApiError::field("prompt", "prompt must not be empty"));
                }
                (tokens, DefaultBudget::Sixteen)
            }
        };
        let parameters = self.parameters();
        check_tokens(
            "stop_token_ids",
            &parameters.stop_token_ids,
            model.vocabulary(),
        )?;
        let max_tokens = token_budget(parameters, tokens.len(), default, max_context)?;
        Ok(Prepared { tokens, max_tokens })
    }
}

/// Refuses what cannot fit before it is tokenised: megabytes of text take seconds.
fn check_length(
    field: &str,
    model: &ModelText,
    text: &str,
    max_context: u32,
) -> Result<(), ApiError> {
    let least = model.least_tokens(text);
    if usize::try_from(max_context).is_ok_and(|max_context| least > max_context) {
        let tokens = format!("at least {least}");
        return Err(prompt_too_long(field, &tokens, max_context));
    }
    Ok(())
}

fn check_tokens(field: &str, tokens: &[u32], vocabulary: &Vocabulary) -> Result<(), ApiError> {
    let size = vocabulary.size();
    match tokens.iter().position(|&token| token >= size) {
        None => Ok(()),
        Some(index) => {
            let path = format!("{field}[{index}]");
            let message = format!(
                "{path} is {}, but the model's token ids end at {}",
                tokens[index],
                size.saturating_sub(1)
            );
            Err(ApiError::field(path, message))
        }
    }
}

fn refusal(error: PromptError, field: &str) -> ApiError {
    let message = error.to_string();
    match error {
        PromptError::ToolCalls(path) => ApiError::unsupported(path, message),
        PromptError::NoTemplate => ApiError::unsupported(field, message),
        PromptError::Broken(_) => {
            tracing::error!("{message}");
            ApiError::internal(message).with_code("model_unusable")
        }
        PromptError::Refused(_) | PromptError::Unshown(_) | PromptError::Tokenizer(_) => {
            ApiError::field(field, message)
        }
    }
}

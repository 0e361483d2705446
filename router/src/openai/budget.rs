//! How many tokens a request may generate: what it asks for, what its kind defaults to, what the context leaves.

use super::error::ApiError;
use super::parameters::Parameters;

/// What a request without `max_tokens` gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultBudget {
    /// Chat: what the context leaves.
    Rest,
    /// Completions: OpenAI's 16, or less where the context leaves less.
    Sixteen,
}

impl DefaultBudget {
    /// Where the prompt is in a request of the kind that has this default.
    fn prompt_field(self) -> &'static str {
        match self {
            Self::Rest => "messages",
            Self::Sixteen => "prompt",
        }
    }
}

/// Tokens to generate after `prompt` tokens, at least 1. `max_context` counts prompt and answer together.
pub fn token_budget(
    parameters: &Parameters,
    prompt: usize,
    default: DefaultBudget,
    max_context: u32,
) -> Result<u32, ApiError> {
    let rest = usize::try_from(max_context)
        .unwrap_or(usize::MAX)
        .saturating_sub(prompt);
    let rest = u32::try_from(rest).unwrap_or(u32::MAX);
    if rest == 0 {
        return Err(prompt_too_long(
            default.prompt_field(),
            &prompt.to_string(),
            max_context,
        ));
    }
    let budget = match (parameters.max_tokens, default) {
        (Some(asked), _) if asked > rest => {
            let field = parameters.max_tokens_field;
            let mut error = too_long(format!(
                "this model's maximum context length is {max_context} tokens, but the prompt has {prompt} tokens and {field} asks for {asked}: lower {field} to {rest} or shorten the prompt"
            ));
            error.param = Some(field.to_owned());
            return Err(error);
        }
        (Some(asked), _) => asked,
        (None, DefaultBudget::Rest) => rest,
        (None, DefaultBudget::Sixteen) => rest.min(16),
    };
    if parameters.min_tokens > budget {
        let message = format!(
            "min_tokens is {}, which is more than the {budget} tokens that may be generated",
            parameters.min_tokens
        );
        return Err(ApiError::field("min_tokens", message));
    }
    Ok(budget)
}

/// 400 for a prompt that leaves no room for an answer. `field` is where it is, `tokens` how many it has, in words if need be.
pub fn prompt_too_long(field: &str, tokens: &str, max_context: u32) -> ApiError {
    let mut error = too_long(format!(
        "this model's maximum context length is {max_context} tokens, but the prompt has {tokens} tokens and leaves no room for an answer: shorten the prompt"
    ));
    error.param = Some(field.to_owned());
    error
}

fn too_long(message: String) -> ApiError {
    ApiError::bad_request(message).with_code("context_length_exceeded")
}

#[cfg(test)]
mod tests {
    use super::super::field::parse_body;
    use super::*;

    fn budget(fields: &str, prompt: usize, default: DefaultBudget) -> Result<u32, ApiError> {
        let body = format!("{{\"model\": \"m\"{fields}}}");
        let parameters = Parameters::read(&mut parse_body(body.as_bytes()).unwrap()).unwrap();
        token_budget(&parameters, prompt, default, 100)
    }

    #[test]
    fn without_a_limit_chat_gets_the_rest_and_completions_sixteen() {
        assert_eq!(budget("", 30, DefaultBudget::Rest), Ok(70));
        assert_eq!(budget("", 30, DefaultBudget::Sixteen), Ok(16));
        assert_eq!(budget("", 95, DefaultBudget::Sixteen), Ok(5));
    }

    #[test]
    fn a_prompt_that_fills_the_context_is_told_both_numbers() {
        for prompt in [100, 4097] {
            let error = budget("", prompt, DefaultBudget::Rest).unwrap_err();
            assert_eq!(error.code.as_deref(), Some("context_length_exceeded"));
            assert!(
                error.message.contains("100 tokens")
                    && error.message.contains(&format!("has {prompt} tokens"))
            );
        }
        assert_eq!(budget("", 99, DefaultBudget::Rest), Ok(1));
    }

    #[test]
    fn asking_for_more_than_is_left_is_refused_not_shortened() {
        let error = budget(", \"max_tokens\": 71", 30, DefaultBudget::Rest).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("max_tokens"));
        assert!(error.message.contains("lower max_tokens to 70"), "{error}");
        assert_eq!(
            budget(", \"max_tokens\": 70", 30, DefaultBudget::Rest),
            Ok(70)
        );
        // By the name that the client used.
        let fields = ", \"max_tokens\": 5, \"max_completion_tokens\": 71";
        let error = budget(fields, 30, DefaultBudget::Rest).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("max_completion_tokens"));
        assert!(
            error.message.contains("lower max_completion_tokens to 70"),
            "{error}"
        );
    }

    #[test]
    fn more_least_tokens_than_most_is_a_contradiction() {
        let error = budget(
            ", \"max_tokens\": 5, \"min_tokens\": 6",
            30,
            DefaultBudget::Rest,
        )
        .unwrap_err();
        assert_eq!(error.param.as_deref(), Some("min_tokens"));
    }
}

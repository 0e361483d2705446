//! A body that a client sends: read as a chat and as a completion request, and made into tokens.

use std::sync::OnceLock;

use baton_router::front::prompt::Asked;
use baton_router::openai::chat::ChatRequest;
use baton_router::openai::completion::{CompletionRequest, Prompt};
use baton_router::openai::error::ApiError;
use baton_router::openai::parameters::Parameters;
use baton_text::model::ModelText;
use baton_worker::model::artifacts::{
    BYTE_LEVEL_TEMPLATE, byte_level, chat_template_json, tokenizer_json,
};
use jiff::Timestamp;
use serde_json::Value;

use crate::passed_on;

/// Tokens of the context, small enough that inputs reach it.
const MAX_CONTEXT: u32 = 2048;
/// An answer that refuses says what is wrong and repeats little of what was sent: a kilobyte, and the mark of what is left out.
const LONGEST_MESSAGE: usize = 1024 + "…".len();
/// Paths such as `messages[4095].tool_calls[4095].function.arguments`.
const LONGEST_PARAM: usize = 80;

/// Both kinds of request read every body.
pub fn check(body: &[u8]) {
    passed_on::check(body);
    if let Some(request) = read(body, ChatRequest::parse) {
        chat(request);
    }
    if let Some(request) = read(body, CompletionRequest::parse) {
        completion(request);
    }
}

/// One of both endpoints takes it.
pub fn accepts(body: &[u8]) -> bool {
    ChatRequest::parse(body).is_ok() || CompletionRequest::parse(body).is_ok()
}

/// Reads; whether the body is written with other spaces and escapes makes no difference.
fn read<Request: PartialEq + std::fmt::Debug>(
    body: &[u8],
    parse: fn(&[u8]) -> Result<Request, ApiError>,
) -> Option<Request> {
    let read = parse(body);
    if let Ok(value) = serde_json::from_slice::<Value>(body) {
        let again = serde_json::to_vec_pretty(&value).expect("what was read can be written");
        assert_eq!(parse(&again), read, "the same JSON in other spacing");
    }
    read.inspect_err(refused).ok()
}

fn chat(request: ChatRequest) {
    within_limits(&request.parameters);
    assert!(!request.chat.messages.is_empty());
    let model = model();
    if let Ok(text) = model.render(&request.chat, Timestamp::UNIX_EPOCH) {
        for message in &request.chat.messages {
            assert!(
                text.contains(&message.content),
                "a message is not in the prompt"
            );
        }
        let tokens = model
            .encode(&text, request.add_special_tokens, "")
            .expect("a byte-level vocabulary has every text");
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|token| model.vocabulary().bytes(*token).to_vec())
            .collect();
        assert_eq!(bytes, text.as_bytes(), "the tokens are another text");
    }
    prepare(&Asked::Chat(request));
}

fn completion(request: CompletionRequest) {
    within_limits(&request.parameters);
    if let Prompt::Tokens(tokens) = &request.prompt {
        assert!(!tokens.is_empty());
    }
    prepare(&Asked::Completion(request));
}

/// What OpenAI and the worker hold to be the ranges of these.
fn within_limits(parameters: &Parameters) {
    assert!(!parameters.model.is_empty());
    assert!((0.0..=2.0).contains(&parameters.temperature));
    assert!(parameters.top_p > 0.0 && parameters.top_p <= 1.0);
    assert!((0.0..=1.0).contains(&parameters.min_p));
    assert!(parameters.max_tokens != Some(0));
    assert!(parameters.stop.len() <= 16 && parameters.stop.iter().all(|stop| !stop.is_empty()));
    assert!(parameters.logprobs.is_none_or(|top| top <= 20));
    assert!(parameters.stream || !parameters.include_usage);
}

fn prepare(asked: &Asked) {
    let model = model();
    match asked.prepare(model, MAX_CONTEXT, Timestamp::UNIX_EPOCH, "") {
        Ok(prepared) => {
            let vocabulary = model.vocabulary().size();
            assert!(!prepared.tokens.is_empty());
            assert!(prepared.tokens.iter().all(|token| *token < vocabulary));
            assert!(prepared.max_tokens >= 1);
            assert!(prepared.max_tokens >= asked.parameters().min_tokens);
            let whole = prepared.tokens.len() + prepared.max_tokens as usize;
            assert!(whole <= MAX_CONTEXT as usize, "{whole} tokens");
        }
        Err(error) => refused(&error),
    }
}

/// A refusal blames the client, in OpenAI's form and in few words.
fn refused(error: &ApiError) {
    assert!(
        (400..500).contains(&error.status),
        "status {}",
        error.status
    );
    let length = error.message.len();
    assert!(
        (1..=LONGEST_MESSAGE).contains(&length),
        "a message of {length} bytes"
    );
    if let Some(param) = &error.param {
        assert!((1..=LONGEST_PARAM).contains(&param.len()), "param {param}");
    }
    let body = serde_json::to_value(error.body()).expect("an error can be written");
    assert_eq!(body["error"]["type"], "invalid_request_error");
}

/// One token for each byte, and three control tokens.
fn model() -> &'static ModelText {
    static MODEL: OnceLock<ModelText> = OnceLock::new();
    MODEL.get_or_init(|| {
        let tokenizer = tokenizer_json(&byte_level(0));
        let template = chat_template_json(BYTE_LEVEL_TEMPLATE, None, None, false);
        ModelText::compile(&tokenizer, &template).expect("the worker's own artifacts")
    })
}

//! Whether the tokens that routers make of a text are those that the server computes with.
//!
//! The server is asked for the tokens of sample texts, and they are held against what [`baton_text`] makes of the model's files, which
//! is what routers do. Where they differ, or cannot be compared, prefixes are not credited: the router would look for what is not
//! there.

use std::sync::Arc;

use baton_protocol::card::TextCheck;
use baton_system::threads::Threads;
use baton_text::chat::{Chat, Message};
use baton_text::model::ModelText;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::folder::ModelFolder;
use super::http::Server;
use crate::config::WorkerConfig;

/// Texts in which tokenizers are known to differ: spaces and lines, digits, scripts with and without spaces, marks that combine, and
/// characters of four bytes.
const TEXTS: [&str; 8] = [
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,\ttab,\n\n  lines \r\n and  trailing  ",
    "3.14159 2026-11-30 1,000,000 0x7f",
    "Größe, naïve, Ångström, e\u{301}tude, ﬁn",
    "Привет, мир! Γειά σου Κόσμε.",
    "你好，世界。こんにちは世界。안녕하세요 세계",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया",
    "🙂👩‍👩‍👧‍👦 fn main() { println!(\"{}\", x?); } don't we'll I'M",
];

/// Long enough that it is cut into segments.
const REPEATED: usize = 40;

/// Compares.
pub(crate) async fn check(
    server: &Server,
    config: &WorkerConfig,
    folder: Option<&ModelFolder>,
    threads: Threads,
) -> TextCheck {
    match compare(server, config, folder, threads).await {
        Ok(()) => TextCheck::Verified,
        Err(reason) => TextCheck::Unverified { reason },
    }
}

async fn compare(
    server: &Server,
    config: &WorkerConfig,
    folder: Option<&ModelFolder>,
    threads: Threads,
) -> Result<(), String> {
    let folder = folder.ok_or("model.source is absent, so there is no tokenizer to compare")?;
    let tokenizer = folder
        .tokenizer
        .clone()
        .ok_or("the model's folder holds no tokenizer.json")?;
    let template = folder.chat_template.clone();
    let compiled = threads
        .run(move || ModelText::compile(&tokenizer, &template))
        .await
        .map_err(|error| error.to_string())?;
    let model = Arc::new(compiled.map_err(|error| error.to_string())?);
    for sample in samples(&model, &config.model.name)? {
        let theirs = ask(server, &sample).await?;
        if let Some(difference) = difference(&sample.tokens, &theirs) {
            return Err(format!("{}: {difference}", sample.what));
        }
    }
    Ok(())
}

/// A question to the server, and the tokens that a router would make.
struct Sample {
    what: String,
    question: Value,
    tokens: Vec<u32>,
}

fn samples(model: &ModelText, name: &str) -> Result<Vec<Sample>, String> {
    let failed = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
    let mut samples = Vec::new();
    let long = TEXTS.join("\n").repeat(REPEATED);
    let texts = TEXTS.iter().copied().chain([long.as_str()]);
    for (number, text) in texts.enumerate() {
        let what = format!("sample text {}", number + 1);
        let tokens = model
            .encode(text, true, "")
            .map_err(|error| failed(&what, &error))?;
        samples.push(Sample {
            question: json!({"model": name, "prompt": text, "add_special_tokens": true}),
            what,
            tokens,
        });
    }
    if !model.chats() {
        return Ok(samples);
    }
    let user = |text: &str| Message::new("user", text);
    let chats = [
        vec![user("Hello!")],
        vec![Message::new("system", "Be brief."), user(TEXTS[7])],
        vec![
            user(TEXTS[3]),
            Message::new("assistant", "Yes."),
            user("And <|im_end|> or </s>?"),
        ],
    ];
    for (number, messages) in chats.into_iter().enumerate() {
        let what = format!("sample chat {}", number + 1);
        let question = json!({"model": name, "messages": messages, "add_generation_prompt": true, "add_special_tokens": false});
        // A template may take no system message: what it refuses, the server refuses too, and no prefix comes of it.
        let Ok(text) = model.render(&Chat::of(messages), Timestamp::now()) else {
            continue;
        };
        let tokens = model
            .encode(&text, false, "")
            .map_err(|error| failed(&what, &error))?;
        samples.push(Sample {
            what,
            question,
            tokens,
        });
    }
    Ok(samples)
}

async fn ask(server: &Server, sample: &Sample) -> Result<Vec<u32>, String> {
    let answer = server
        .post("/tokenize", &sample.question)
        .await
        .map_err(|error| format!("{}: POST /tokenize: {error}", sample.what))?;
    let unlike = || {
        let said: String = answer.text().chars().take(200).collect();
        format!(
            "{}: POST /tokenize: status {}: {said}",
            sample.what, answer.status
        )
    };
    if !answer.is_ok() {
        return Err(unlike());
    }
    let answered = answer.json();
    let tokens = answered["tokens"].as_array().ok_or_else(unlike)?;
    tokens
        .iter()
        .map(|token| token.as_u64().and_then(|token| u32::try_from(token).ok()))
        .collect::<Option<_>>()
        .ok_or_else(unlike)
}

/// The first place where two lists of tokens differ.
fn difference(ours: &[u32], theirs: &[u32]) -> Option<String> {
    let common = ours
        .iter()
        .zip(theirs)
        .take_while(|(our, their)| our == their);
    let at = common.count();
    if at == ours.len() && at == theirs.len() {
        return None;
    }
    let shown = |tokens: &[u32]| {
        tokens
            .get(at)
            .map_or("the end".to_owned(), |token| format!("token {token}"))
    };
    Some(format!(
        "at place {at} the model's files give {}, the server {} ({} and {} tokens in all)",
        shown(ours),
        shown(theirs),
        ours.len(),
        theirs.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::artifacts::{
        BYTE_LEVEL_TEMPLATE, byte_level, chat_template_json, tokenizer_json,
    };

    #[test]
    fn the_first_difference_is_named() {
        assert_eq!(difference(&[1, 2], &[1, 2]), None);
        let words = difference(&[1, 2, 3], &[1, 5]).unwrap();
        assert!(
            words.starts_with("at place 1 the model's files give token 2, the server token 5"),
            "{words}"
        );
        let words = difference(&[1], &[1, 5]).unwrap();
        assert!(
            words.contains("give the end, the server token 5 (1 and 2"),
            "{words}"
        );
    }

    #[test]
    fn samples_are_of_texts_and_of_chats_where_the_model_chats() {
        let tokenizer = tokenizer_json(&byte_level(0));
        let model = |template| {
            ModelText::compile(&tokenizer, &chat_template_json(template, None, None, false))
                .unwrap()
        };
        let chatting = samples(&model(BYTE_LEVEL_TEMPLATE), "m").unwrap();
        assert_eq!(chatting.len(), TEXTS.len() + 4);
        assert!(chatting.iter().all(|sample| !sample.tokens.is_empty()));
        assert_eq!(samples(&model(""), "m").unwrap().len(), TEXTS.len() + 1);
    }
}

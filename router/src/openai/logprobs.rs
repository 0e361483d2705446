//! Log-probabilities of generated tokens, in the form of chat and in the older form of completions.

use std::fmt::Write;

use baton_protocol::wire;
use serde::{Serialize, Serializer};

use crate::text::output::TokenEntry;

/// JSON has no minus infinity; vLLM writes this.
const LEAST: f32 = -9999.0;

/// Log-probabilities in the form of one endpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Logprobs {
    Chat(ChatLogprobs),
    Completion(CompletionLogprobs),
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ChatLogprobs {
    pub content: Vec<ChatToken>,
    /// Always null: there is no refusal apart from the text.
    pub refusal: Option<()>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatToken {
    #[serde(flatten)]
    pub chosen: ScoredToken,
    pub top_logprobs: Vec<ScoredToken>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScoredToken {
    /// The token's bytes as text; bytes that are no text of their own show as U+FFFD.
    pub token: String,
    pub logprob: f32,
    /// Join them over tokens to get text that spans several.
    pub bytes: Vec<u8>,
}

/// Parallel lists, one element a token.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    /// Characters from the start of the answer to the token.
    pub text_offset: Vec<u32>,
    pub token_logprobs: Vec<f32>,
    pub tokens: Vec<String>,
    pub top_logprobs: Vec<TopTokens>,
}

/// The likeliest tokens, likeliest first, and the chosen one if it is not among them. An object in JSON.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TopTokens(pub Vec<(String, f32)>);

impl Serialize for TopTokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

/// Chat's form. `bytes` gives the bytes of a token.
pub fn chat<'t>(entries: &[TokenEntry], bytes: impl Fn(u32) -> &'t [u8]) -> ChatLogprobs {
    let scored = |id: u32, logprob: f32| {
        let bytes = bytes(id);
        ScoredToken {
            token: String::from_utf8_lossy(bytes).into_owned(),
            logprob: logprob.max(LEAST),
            bytes: bytes.to_vec(),
        }
    };
    let content = with_logprobs(entries)
        .map(|(entry, logprobs)| ChatToken {
            chosen: scored(entry.id, logprobs.chosen),
            top_logprobs: logprobs
                .top
                .iter()
                .map(|top| scored(top.id, top.logprob))
                .collect(),
        })
        .collect();
    ChatLogprobs {
        content,
        refusal: None,
    }
}

/// The form of completions. `bytes` gives the bytes of a token.
pub fn completion<'t>(
    entries: &[TokenEntry],
    bytes: impl Fn(u32) -> &'t [u8],
) -> CompletionLogprobs {
    let mut lists = CompletionLogprobs::default();
    for (entry, logprobs) in with_logprobs(entries) {
        let token = name(bytes(entry.id));
        let chosen = logprobs.chosen.max(LEAST);
        let mut top = TopTokens::default();
        for candidate in &logprobs.top {
            add(
                &mut top,
                name(bytes(candidate.id)),
                candidate.logprob.max(LEAST),
            );
        }
        add(&mut top, token.clone(), chosen);
        lists.text_offset.push(entry.text_offset);
        lists.token_logprobs.push(chosen);
        lists.tokens.push(token);
        lists.top_logprobs.push(top);
    }
    lists
}

fn with_logprobs(entries: &[TokenEntry]) -> impl Iterator<Item = (&TokenEntry, &wire::Logprobs)> {
    entries
        .iter()
        .filter_map(|entry| Some((entry, entry.logprobs.as_ref()?)))
}

/// Two tokens of the same name are one member of the object.
fn add(top: &mut TopTokens, token: String, logprob: f32) {
    if top.0.iter().all(|(other, _)| *other != token) {
        top.0.push((token, logprob));
    }
}

/// The text of a token, or, where its bytes are none, OpenAI's `bytes:\xe2\x82`: otherwise half characters were all one name.
fn name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |mut name, byte| {
            // Writing to a string cannot fail.
            let _ = write!(name, "\\x{byte:02x}");
            name
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TOKENS: [&[u8]; 3] = [b" red", b"\xe2\x82", b"\xac"];

    fn entry(id: u32, text_offset: u32, chosen: f32, top: &[(u32, f32)]) -> TokenEntry {
        let top = top
            .iter()
            .map(|&(id, logprob)| wire::TokenLogprob { id, logprob })
            .collect();
        TokenEntry {
            id,
            text_offset,
            logprobs: Some(wire::Logprobs { chosen, top }),
        }
    }

    #[test]
    fn chat_gives_each_token_its_bytes() {
        let entries = [
            entry(0, 0, -0.5, &[(0, -0.5), (1, -1.5)]),
            entry(1, 4, f32::NEG_INFINITY, &[]),
        ];
        let json = serde_json::to_value(chat(&entries, |id| TOKENS[id as usize])).unwrap();
        assert_eq!(
            json,
            json!({"refusal": null, "content": [
                {"token": " red", "logprob": -0.5, "bytes": [32, 114, 101, 100], "top_logprobs": [
                    {"token": " red", "logprob": -0.5, "bytes": [32, 114, 101, 100]},
                    {"token": "\u{fffd}", "logprob": -1.5, "bytes": [226, 130]}]},
                {"token": "\u{fffd}", "logprob": -9999.0, "bytes": [226, 130], "top_logprobs": []},
            ]})
        );
    }

    #[test]
    fn completions_give_parallel_lists_with_the_chosen_token_among_the_top() {
        let entries = [
            entry(0, 0, -2.5, &[(1, -0.5), (2, -1.5)]),
            entry(2, 4, -0.25, &[(2, -0.25)]),
        ];
        let json = serde_json::to_value(completion(&entries, |id| TOKENS[id as usize])).unwrap();
        assert_eq!(
            json,
            json!({"text_offset": [0, 4], "tokens": [" red", "bytes:\\xac"], "token_logprobs": [-2.5, -0.25],
                "top_logprobs": [{"bytes:\\xe2\\x82": -0.5, "bytes:\\xac": -1.5, " red": -2.5}, {"bytes:\\xac": -0.25}]})
        );
    }
}

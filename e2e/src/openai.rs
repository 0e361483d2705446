//! Requests as a client writes them, and what of the answers is compared.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::http::{Answer, Client, Events};

/// One completion asked for.
#[derive(Clone, Debug)]
pub struct Ask {
    pub body: Value,
    /// `x-baton-mode`, if any.
    pub mode: Option<&'static str>,
    /// `x-request-id`, if any.
    pub request: Option<String>,
}

impl Ask {
    /// Greedy, log-probabilities reported.
    pub fn new(model: &str, prompt: &str, max_tokens: u32) -> Self {
        Self {
            body: json!({
                "model": model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "logprobs": 2,
            }),
            mode: None,
            request: None,
        }
    }

    /// The same with token ids for a prompt.
    pub fn ids(model: &str, prompt: &[u32], max_tokens: u32) -> Self {
        let mut ask = Self::new(model, "", max_tokens);
        ask.body["prompt"] = json!(prompt);
        ask
    }

    #[must_use]
    pub fn mode(mut self, mode: &'static str) -> Self {
        self.mode = Some(mode);
        self
    }

    /// Gives it an `x-request-id`.
    #[must_use]
    pub fn request(mut self, request: &str) -> Self {
        self.request = Some(request.to_owned());
        self
    }

    /// Sets any field of the body.
    #[must_use]
    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.body[field] = value.into();
        self
    }

    fn headers(&self) -> Vec<(&'static str, &str)> {
        let mode = self.mode.map(|mode| ("x-baton-mode", mode));
        let request = self.request.as_deref();
        let request = request.map(|request| ("x-request-id", request));
        mode.into_iter().chain(request).collect()
    }

    /// The answer as it comes, whatever its status.
    ///
    /// # Errors
    /// No connection, or no whole answer.
    pub async fn raw(&self, client: &Client) -> Result<Answer> {
        client
            .post("/v1/completions", &self.headers(), &self.body)
            .await
    }

    /// The answer of a request that is served.
    ///
    /// # Errors
    /// It is not.
    pub async fn send(&self, client: &Client) -> Result<Completion> {
        Completion::of(&self.raw(client).await?.well()?)
    }

    /// The answer as a stream.
    ///
    /// # Errors
    /// The request is refused.
    pub async fn stream(&self, client: &Client) -> Result<Stream> {
        let mut body = self.body.clone();
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let open = client
            .open("/v1/completions", &self.headers(), &body)
            .await?;
        if open.status != 200 {
            let answer = open.whole().await?;
            anyhow::bail!("status {}: {}", answer.status, answer.text());
        }
        let run = open
            .header("x-baton-run")
            .context("x-baton-run is missing")?
            .to_owned();
        Ok(Stream {
            run,
            events: open.events(),
        })
    }
}

/// What must be equal when nothing but the way through the fleet differs.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    pub text: String,
    pub finish_reason: String,
    /// Text and log-probability of each token; the number is compared as it was written.
    pub tokens: Vec<(String, String)>,
    /// Alternatives of each token.
    pub alternatives: Value,
    pub prompt_tokens: u64,
    pub output_tokens: u64,
}

/// An answer in whole.
#[derive(Clone, Debug)]
pub struct Completion {
    pub run: String,
    pub output: Output,
    pub cached_tokens: u64,
}

impl Completion {
    fn of(answer: &Answer) -> Result<Self> {
        let run = answer
            .header("x-baton-run")
            .context("x-baton-run is missing")?
            .to_owned();
        let body = answer.json()?;
        let choice = &body["choices"][0];
        let logprobs = &choice["logprobs"];
        let list =
            |name: &str| -> Vec<Value> { logprobs[name].as_array().cloned().unwrap_or_default() };
        let tokens = list("tokens")
            .iter()
            .zip(list("token_logprobs"))
            .map(|(token, logprob)| {
                (
                    token.as_str().unwrap_or_default().to_owned(),
                    logprob.to_string(),
                )
            })
            .collect();
        let usage = &body["usage"];
        Ok(Self {
            run,
            output: Output {
                text: text(choice, "text")?,
                finish_reason: text(choice, "finish_reason")?,
                tokens,
                alternatives: logprobs["top_logprobs"].clone(),
                prompt_tokens: number(usage, "prompt_tokens")?,
                output_tokens: number(usage, "completion_tokens")?,
            },
            cached_tokens: usage["prompt_tokens_details"]["cached_tokens"]
                .as_u64()
                .unwrap_or(0),
        })
    }
}

fn text(value: &Value, field: &str) -> Result<String> {
    Ok(value[field]
        .as_str()
        .with_context(|| format!("{field} is no text in {value}"))?
        .to_owned())
}

fn number(value: &Value, field: &str) -> Result<u64> {
    value[field]
        .as_u64()
        .with_context(|| format!("{field} is no number in {value}"))
}

/// An answer that is coming.
#[derive(Debug)]
pub struct Stream {
    pub run: String,
    pub events: Events,
}

impl Stream {
    /// Text of the next chunk that has one; nothing when the stream has ended well.
    ///
    /// # Errors
    /// The stream breaks, ends without `[DONE]`, or carries an error event.
    pub async fn text(&mut self) -> Result<Option<String>> {
        loop {
            let event = self
                .events
                .next()
                .await?
                .context("the stream ends without [DONE]")?;
            if event.data == "[DONE]" {
                return Ok(None);
            }
            let chunk: Value = serde_json::from_str(&event.data)?;
            anyhow::ensure!(chunk.get("error").is_none(), "error event: {chunk}");
            if let Some(text) = chunk["choices"][0]["text"].as_str()
                && !text.is_empty()
            {
                return Ok(Some(text.to_owned()));
            }
        }
    }

    /// Everything that is still to come.
    ///
    /// # Errors
    /// As for a single chunk.
    pub async fn rest(mut self) -> Result<String> {
        let mut whole = String::new();
        while let Some(text) = self.text().await? {
            whole.push_str(&text);
        }
        Ok(whole)
    }
}

//! Clients that ask one after the other for as long as a test wants, and what became of each request.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::task::JoinSet;

use crate::http::Client;
use crate::openai::Ask;

/// What clients ask for, of the model `tiny`. Each streams an answer to a prompt of its own, then asks again.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub clients: u32,
    /// Tokens of each prompt.
    pub prompt: u32,
    /// Of each answer.
    pub tokens: u32,
    /// `x-baton-mode`, if any.
    pub mode: Option<&'static str>,
}

impl Asked {
    /// Short ones, placed as the policy wants.
    pub fn short(clients: u32, tokens: u32) -> Self {
        Self {
            clients,
            prompt: 48,
            tokens,
            mode: None,
        }
    }
}

/// Requests under way. Dropped, it hangs up.
#[derive(Debug)]
pub struct Load {
    clients: JoinSet<Vec<String>>,
    ends: Arc<AtomicBool>,
    /// Runs that were answered in whole, in the order of their ends.
    runs: Arc<Mutex<Vec<String>>>,
}

impl Load {
    /// Starts the clients.
    pub fn start(api: Client, asked: Asked) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let runs: Arc<Mutex<Vec<String>>> = Arc::default();
        let mut clients = JoinSet::new();
        for client in 0..asked.clients {
            let (ends, runs) = (ends.clone(), runs.clone());
            clients.spawn(async move {
                let mut failed = Vec::new();
                for turn in 0_u32.. {
                    if ends.load(Ordering::Relaxed) {
                        break;
                    }
                    match one(api, asked, client, turn).await {
                        Ok(run) => {
                            let mut runs = runs.lock().unwrap_or_else(PoisonError::into_inner);
                            runs.push(run);
                        }
                        Err(error) => {
                            failed.push(format!("client {client}, request {turn}: {error:#}"));
                        }
                    }
                }
                failed
            });
        }
        Self {
            clients,
            ends,
            runs,
        }
    }

    /// Ids of the runs that were answered in whole so far.
    pub fn answered(&self) -> Vec<String> {
        let runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        runs.clone()
    }

    /// Waits until that many more are answered, and returns their runs: the load goes on.
    ///
    /// # Errors
    /// They are not, in time.
    pub async fn more(&self, count: usize) -> Result<Vec<String>> {
        let before = self.answered().len();
        let wanted = before + count;
        crate::wait::until(
            "requests are answered",
            super::installed::SOON,
            async || match self.answered() {
                mut now if now.len() >= wanted => Ok(now.split_off(before)),
                now => Err(format!("{} of {wanted}", now.len())),
            },
        )
        .await
    }

    /// Lets each client finish its request, and returns what became of those that failed.
    ///
    /// # Errors
    /// A client itself has failed.
    pub async fn end(mut self) -> Result<Vec<String>> {
        self.ends.store(true, Ordering::Relaxed);
        let mut failed = Vec::new();
        while let Some(client) = self.clients.join_next().await {
            failed.extend(client?);
        }
        Ok(failed)
    }

    /// The same where none may fail: returns how many were answered.
    ///
    /// # Errors
    /// One request failed; the error says which and how.
    pub async fn all_well(self) -> Result<usize> {
        let runs = self.runs.clone();
        let failed = self.end().await?;
        let answered = runs.lock().unwrap_or_else(PoisonError::into_inner).len();
        ensure!(
            failed.is_empty(),
            "{} failed and {answered} were answered; the first: {}",
            failed.len(),
            failed[0]
        );
        Ok(answered)
    }
}

/// One request to its end: every token that was asked for, by the answer's own count.
async fn one(api: Client, asked: Asked, client: u32, turn: u32) -> Result<String> {
    let prompt: Vec<u32> = (0..asked.prompt)
        .map(|place| (client * 7919 + turn * 104_729 + place * 31) % 200 + 3)
        .collect();
    // Nobody finds another's blocks, so each is prefilled.
    let salt = format!("client {client}, turn {turn}");
    let mut ask = Ask::ids("tiny", &prompt, asked.tokens)
        .with("ignore_eos", true)
        .with("cache_salt", salt);
    ask.mode = asked.mode;
    let mut stream = ask.stream(&api).await?;
    let run = stream.run.clone();
    let (mut text, mut usage) = (0, Value::Null);
    loop {
        let event = stream.events.next().await?;
        let data = event.context("the stream ends without [DONE]")?.data;
        if data == "[DONE]" {
            break;
        }
        let chunk: Value = serde_json::from_str(&data)?;
        ensure!(
            chunk.get("error").is_none(),
            "run {run}: error event: {chunk}"
        );
        text += chunk["choices"][0]["text"].as_str().map_or(0, str::len);
        if chunk["usage"].is_object() {
            usage = chunk["usage"].clone();
        }
    }
    ensure!(text > 0, "run {run}: an answer without text");
    ensure!(
        usage["completion_tokens"] == asked.tokens,
        "run {run}: {usage}"
    );
    Ok(run)
}

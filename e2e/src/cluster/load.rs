//! Clients that ask one after the other for as long as a test wants, and what became of each request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use anyhow::{Result, ensure};
use tokio::task::JoinSet;

use crate::http::Client;
use crate::openai::Ask;

/// Requests under way. Dropped, it hangs up.
#[derive(Debug)]
pub struct Load {
    clients: JoinSet<Vec<String>>,
    ends: Arc<AtomicBool>,
    answered: Arc<AtomicU32>,
}

impl Load {
    /// Starts this many clients. Each streams an answer of some tokens to a prompt of its own, then asks again.
    pub fn start(api: Client, model: &str, clients: u32, tokens: u32) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let answered = Arc::new(AtomicU32::new(0));
        let mut set = JoinSet::new();
        for client in 0..clients {
            let (ends, answered, model) = (ends.clone(), answered.clone(), model.to_owned());
            set.spawn(async move {
                let mut failed = Vec::new();
                for turn in 0_u32.. {
                    if ends.load(Ordering::Relaxed) {
                        break;
                    }
                    match one(api, &model, client, turn, tokens).await {
                        Ok(()) => {
                            answered.fetch_add(1, Ordering::Relaxed);
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
            clients: set,
            ends,
            answered,
        }
    }

    /// How many were answered in whole so far.
    pub fn answered(&self) -> u32 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Waits until that many more are answered: the load goes on.
    ///
    /// # Errors
    /// They are not, in time.
    pub async fn more(&self, count: u32) -> Result<()> {
        let wanted = self.answered() + count;
        crate::wait::until(
            "requests are answered",
            super::installed::SOON,
            async || match self.answered() {
                now if now >= wanted => Ok(()),
                now => Err(format!("{now} of {wanted}")),
            },
        )
        .await
    }

    /// Lets each client finish its request, and returns how many were answered.
    ///
    /// # Errors
    /// One request failed; the error says which and how.
    pub async fn all_well(mut self) -> Result<u32> {
        self.ends.store(true, Ordering::Relaxed);
        let mut failed = Vec::new();
        while let Some(client) = self.clients.join_next().await {
            failed.extend(client?);
        }
        ensure!(
            failed.is_empty(),
            "{} failed and {} were answered; the first: {}",
            failed.len(),
            self.answered(),
            failed[0]
        );
        Ok(self.answered())
    }
}

async fn one(api: Client, model: &str, client: u32, turn: u32, tokens: u32) -> Result<()> {
    // Of its own from the first token on: no two share a prefix, so each is prefilled.
    let prompt: Vec<u32> = (0..48)
        .map(|place| (client * 7919 + turn * 104_729 + place * 31) % 200 + 3)
        .collect();
    let stream = Ask::ids(model, &prompt, tokens)
        .with("ignore_eos", true)
        .stream(&api)
        .await?;
    let text = stream.rest().await?;
    ensure!(!text.is_empty(), "an answer without text");
    Ok(())
}

//! Compiled text models by the digests of their artifacts: each is compiled once, off the threads that serve.

use std::collections::HashMap;
use std::sync::Arc;

use baton_system::threads::Threads;
use parking_lot::Mutex;
use tokio::sync::OnceCell;

use super::model::ModelText;
use crate::run::TextArtifacts;

/// Compiled models kept. A router serves few at a time; during a change of weights or template, twice as many. One takes about
/// 40 MB for a vocabulary of 49,152 tokens.
pub const CAPACITY: usize = 16;

type Slot = Arc<OnceCell<Arc<ModelText>>>;

/// Digest of the tokenizer, digest of the chat template.
type Key = (String, String);

/// Keeps what was used last.
#[derive(Debug, Default)]
pub struct Library {
    shelf: Mutex<Shelf>,
}

#[derive(Debug, Default)]
struct Shelf {
    slots: HashMap<Key, (u64, Slot)>,
    uses: u64,
}

/// Why a model cannot be used, in words. It is logged where it is found, once for each attempt to compile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unusable(pub String);

impl Library {
    /// The model, if it is compiled already.
    pub fn compiled(&self, artifacts: &TextArtifacts) -> Option<Arc<ModelText>> {
        self.slot(artifacts).get().cloned()
    }

    fn slot(&self, artifacts: &TextArtifacts) -> Slot {
        self.shelf.lock().slot((
            artifacts.tokenizer_digest.clone(),
            artifacts.chat_template_digest.clone(),
        ))
    }

    /// The compiled model. Requests that come while it is compiled wait for it; a failed attempt is made again by the next.
    pub async fn get(
        &self,
        artifacts: Arc<TextArtifacts>,
        threads: Threads,
    ) -> Result<Arc<ModelText>, Unusable> {
        let slot = self.slot(&artifacts);
        if let Some(model) = slot.get() {
            return Ok(model.clone());
        }
        let compile = || async {
            let digest = artifacts.tokenizer_digest.clone();
            let compiled = threads
                .run(move || ModelText::compile(&artifacts.tokenizer, &artifacts.chat_template))
                .await;
            let reason = match compiled {
                Ok(Ok(model)) => {
                    if let Some(reason) = model.slow() {
                        tracing::info!(tokenizer = %digest, "prompts of the model are tokenised by the slow way: {reason}");
                    }
                    return Ok(Arc::new(model));
                }
                Ok(Err(error)) => error.to_string(),
                Err(error) => error.to_string(),
            };
            tracing::error!(tokenizer = %digest, "the model's text artifacts cannot be used: {reason}");
            Err(Unusable(reason))
        };
        slot.get_or_try_init(compile).await.cloned()
    }
}

impl Shelf {
    fn slot(&mut self, key: Key) -> Slot {
        self.uses += 1;
        let now = self.uses;
        if let Some((used, slot)) = self.slots.get_mut(&key) {
            *used = now;
            return slot.clone();
        }
        if self.slots.len() >= CAPACITY {
            let oldest = self
                .slots
                .iter()
                .min_by_key(|(_, (used, _))| *used)
                .map(|(key, _)| key.clone());
            if let Some(oldest) = oldest {
                self.slots.remove(&oldest);
            }
        }
        let slot = Slot::default();
        self.slots.insert(key, (now, slot.clone()));
        slot
    }
}

//! Who asks for the descriptor of a prompt that is computed here, by the router's id of the operation.
//!
//! A router asks while its request is on its way to the engine. It is answered when the first block of the prompt can be read: its turn
//! has come, so that whoever reads from then on waits for its computation alone, and not for the prompts before it.
//!
//! Nothing is kept of what has ended: who asks later waits for an operation that is not known, within a bound.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::timeout;

/// Bytes of an operation's id: a run, which carries a router's name (253) and 32 digits, and an attempt.
pub(crate) const LONGEST: usize = 512;
/// Those that ask at a time: as many prompts as are handed over at once, and a bound on what strangers can make this process remember.
const MOST: usize = 4096;
/// Of them, those that ask for what is not known yet. Prompts are on their way to the engine for a moment; whoever makes ids up is to leave
/// room for those that ask for what is computed.
const MOST_UNKNOWN: usize = 1024;
/// How long an operation that is not known is waited for: an HTTP server that reads and tokenizes a long prompt, beside others.
const UNKNOWN: Duration = Duration::from_secs(60);

/// All of them. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Operations(Arc<Mutex<All>>);

#[derive(Debug, Default)]
struct All {
    by_id: HashMap<String, Entry>,
    asking: usize,
    /// Of them, those that ask for what no prompt has.
    unknown: usize,
    /// Entries and prompts are numbered alike.
    numbers: u64,
}

impl All {
    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn entry(&mut self, operation: &str) -> &mut Entry {
        let number = self.number();
        self.by_id
            .entry(operation.to_owned())
            .or_insert_with(|| Entry {
                number,
                told: watch::Sender::new(Told::Unknown),
                asking: 0,
                prompt: None,
            })
    }
}

#[derive(Debug)]
struct Entry {
    /// Not that of an earlier one of the same operation.
    number: u64,
    told: watch::Sender<Told>,
    asking: usize,
    /// The prompt that has the id; the last one where several have it.
    prompt: Option<u64>,
}

#[derive(Debug)]
enum Told {
    Unknown,
    /// The prompt waits for its turn, or for its first block.
    Open,
    Parameters(String),
    Nothing(String),
}

/// Why there are no parameters.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Untold {
    /// Not an id.
    #[error("operation: {0} bytes, it must have between 1 and {LONGEST}")]
    Id(usize),
    /// Ask again.
    #[error(
        "operations are asked for at once: {MOST}, or {MOST_UNKNOWN} that the engine has not been asked for"
    )]
    Many,
    /// It has not come in time.
    #[error("the engine has not been asked for this operation within {} s", UNKNOWN.as_secs())]
    Unknown,
    /// The prompt is not handed over.
    #[error("{0}")]
    Nothing(String),
}

impl Operations {
    /// What `kv_transfer_params` of the decode leg are, once there is something to read. Dropping it leaves nothing behind.
    ///
    /// # Errors
    /// [`Untold`]: the prompt is not handed over, or nobody has heard of it.
    pub async fn parameters(&self, operation: &str) -> Result<String, Untold> {
        let mut asking = self.ask(operation)?;
        let known = |told: &Told| !matches!(told, Told::Unknown);
        timeout(UNKNOWN, asking.told.wait_for(known))
            .await
            .map_err(|_| Untold::Unknown)?
            .map(drop)
            .map_err(|_| ended())?;
        let over = |told: &Told| matches!(told, Told::Parameters(_) | Told::Nothing(_));
        let told = asking.told.wait_for(over).await.map_err(|_| ended())?;
        match &*told {
            Told::Parameters(json) => Ok(json.clone()),
            Told::Nothing(why) => Err(Untold::Nothing(why.clone())),
            Told::Unknown | Told::Open => Err(ended()),
        }
    }

    fn ask(&self, operation: &str) -> Result<Asking, Untold> {
        if operation.is_empty() || operation.len() > LONGEST {
            return Err(Untold::Id(operation.len()));
        }
        let mut all = self.0.lock();
        let known = all.by_id.get(operation);
        let unknown = known.is_none_or(|entry| entry.prompt.is_none());
        if all.asking >= MOST || unknown && all.unknown >= MOST_UNKNOWN {
            return Err(Untold::Many);
        }
        all.asking += 1;
        all.unknown += usize::from(unknown);
        let entry = all.entry(operation);
        entry.asking += 1;
        Ok(Asking {
            told: entry.told.subscribe(),
            entry: entry.number,
            operation: operation.to_owned(),
            operations: self.clone(),
        })
    }

    /// A prompt of this operation is computed, and its lease open: `parameters` are told once there is something to read. `None`: that
    /// is no id, and nobody asks for it.
    pub(super) fn prompt(&self, operation: &str, parameters: String) -> Option<Prompt> {
        if operation.is_empty() || operation.len() > LONGEST {
            return None;
        }
        let mut all = self.0.lock();
        let number = all.number();
        let entry = all.entry(operation);
        let known = entry.prompt.replace(number).is_some();
        entry.told.send_replace(Told::Open);
        let newly_known = if known { 0 } else { entry.asking };
        all.unknown -= newly_known;
        Some(Prompt {
            operations: self.clone(),
            operation: operation.to_owned(),
            number,
            parameters: Some(parameters),
        })
    }

    /// A prompt of this operation has come and is not handed over. Where another one of it is computed, that one is told of.
    pub(super) fn refused(&self, operation: &str, why: &str) {
        let mut all = self.0.lock();
        let entry = all.by_id.get(operation);
        if entry.is_some_and(|entry| entry.prompt.is_none())
            && let Some(entry) = all.by_id.remove(operation)
        {
            all.unknown -= entry.asking;
            entry.told.send_replace(Told::Nothing(why.to_owned()));
        }
    }

    /// No request will come any more for those that wait for one.
    pub(super) fn nobody_comes(&self, why: &str) {
        let mut all = self.0.lock();
        all.by_id.retain(|_, entry| {
            if entry.prompt.is_none() {
                entry.told.send_replace(Told::Nothing(why.to_owned()));
            }
            entry.prompt.is_some()
        });
        all.unknown = 0;
    }

    fn tell(&self, prompt: &Prompt, told: Told) {
        let mut all = self.0.lock();
        let entry = all.by_id.get(&prompt.operation);
        if entry.is_some_and(|entry| entry.prompt == Some(prompt.number))
            && let Some(entry) = all.by_id.remove(&prompt.operation)
        {
            entry.told.send_replace(told);
        }
    }

    /// Operations that somebody asks for, or that are computed and not told of.
    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        self.0.lock().by_id.len()
    }
}

fn ended() -> Untold {
    Untold::Nothing("the prompt is not handed over".to_owned())
}

/// Somebody who asks.
#[derive(Debug)]
struct Asking {
    told: watch::Receiver<Told>,
    entry: u64,
    operation: String,
    operations: Operations,
}

impl Drop for Asking {
    fn drop(&mut self) {
        let mut all = self.operations.0.lock();
        all.asking -= 1;
        let Some(entry) = all.by_id.get_mut(&self.operation) else {
            return;
        };
        if entry.number != self.entry {
            return;
        }
        entry.asking -= 1;
        // One that a prompt has is the prompt's to end.
        if entry.prompt.is_none() {
            let nobody = entry.asking == 0;
            all.unknown -= 1;
            if nobody {
                all.by_id.remove(&self.operation);
            }
        }
    }
}

/// A prompt that somebody may ask for. Dropped before it was told of, it is not handed over.
#[derive(Debug)]
pub(super) struct Prompt {
    operations: Operations,
    operation: String,
    number: u64,
    parameters: Option<String>,
}

impl Prompt {
    /// Something of it can be read. Told once.
    pub(super) fn readable(&mut self) {
        if let Some(parameters) = self.parameters.take() {
            self.operations.tell(self, Told::Parameters(parameters));
        }
    }

    /// It is not handed over. Whoever has been told hears of it as its reader.
    pub(super) fn is_not_handed_over(&self, why: &str) {
        self.operations.tell(self, Told::Nothing(why.to_owned()));
    }
}

impl Drop for Prompt {
    fn drop(&mut self) {
        self.is_not_handed_over("the prompt is not handed over");
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn whoever_asks_is_told_when_the_first_block_can_be_read() {
        let operations = Operations::default();
        let early = operations.parameters("r-01");
        tokio::pin!(early);
        assert!(early.as_mut().now_or_never().is_none(), "nobody knows it");
        let mut prompt = operations.prompt("r-01", "{}".to_owned()).expect("an id");
        // However long it waits for its turn.
        tokio::time::sleep(10 * UNKNOWN).await;
        assert!(early.as_mut().now_or_never().is_none(), "it waits");
        let late = operations.parameters("r-01");
        tokio::pin!(late);
        assert!(late.as_mut().now_or_never().is_none());
        prompt.readable();
        assert_eq!(
            (early.await, late.await),
            (Ok("{}".to_owned()), Ok("{}".to_owned()))
        );
        assert_eq!(operations.kept(), 0);
        drop(prompt);
        assert_eq!(operations.kept(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_handed_over_is_said_at_once_and_in_words() {
        let operations = Operations::default();
        let refused = operations.parameters("refused");
        let dropped = operations.parameters("dropped");
        let waits = operations.parameters("waits");
        tokio::pin!(refused, dropped, waits);
        for asks in [&mut refused, &mut dropped, &mut waits] {
            assert!(asks.as_mut().now_or_never().is_none());
        }
        operations.refused("refused", "no room");
        drop(operations.prompt("dropped", String::new()));
        operations.nobody_comes("the engine is gone");
        let untold = |why: &str| Some(Err(Untold::Nothing(why.to_owned())));
        assert_eq!(refused.now_or_never(), untold("no room"));
        assert!(matches!(
            dropped.now_or_never(),
            Some(Err(Untold::Nothing(_)))
        ));
        assert_eq!(waits.now_or_never(), untold("the engine is gone"));
        assert_eq!((operations.kept(), operations.0.lock().unknown), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn an_operation_that_nobody_knows_is_waited_for_within_bounds() {
        let operations = Operations::default();
        assert_eq!(operations.parameters("r-01").await, Err(Untold::Unknown));
        assert_eq!(operations.kept(), 0, "its time is over");
        let id = "r".repeat(LONGEST + 1);
        assert_eq!(operations.parameters(&id).await, Err(Untold::Id(id.len())));
        for no_id in [id.as_str(), ""] {
            assert!(operations.prompt(no_id, String::new()).is_none());
        }
        let asked: Vec<String> = (0..MOST_UNKNOWN)
            .map(|number| format!("r-{number}"))
            .collect();
        let mut asking: Vec<_> = asked
            .iter()
            .map(|operation| Box::pin(operations.parameters(operation)))
            .collect();
        for asks in &mut asking {
            assert!(asks.as_mut().now_or_never().is_none());
        }
        for id in ["one more", "r-0"] {
            assert_eq!(operations.parameters(id).await, Err(Untold::Many), "{id}");
        }
        drop(asking.pop());
        assert_eq!(
            operations.kept(),
            MOST_UNKNOWN - 1,
            "who hangs up is forgotten"
        );
        let more = operations.parameters("one more");
        assert_eq!(more.now_or_never(), None, "and makes room");
        drop(asking);
        assert_eq!((operations.kept(), operations.0.lock().unknown), (0, 0));
    }

    /// Whoever makes ids up does not keep routers from what is computed.
    #[tokio::test(start_paused = true)]
    async fn what_is_computed_is_told_of_however_much_is_asked_for_that_nobody_knows() {
        let operations = Operations::default();
        let stranger = |number| {
            let operations = operations.clone();
            Box::pin(async move { operations.parameters(&format!("x-{number}")).await })
        };
        let mut strangers: Vec<_> = (0..MOST_UNKNOWN).map(stranger).collect();
        for asks in &mut strangers {
            assert!(asks.as_mut().now_or_never().is_none());
        }
        assert_eq!(stranger(MOST_UNKNOWN).await, Err(Untold::Many));
        let prompt = operations.prompt("r-01", "{}".to_owned());
        let mut known: Vec<_> = (MOST_UNKNOWN..MOST)
            .map(|_| Box::pin(operations.parameters("r-01")))
            .collect();
        for asks in &mut known {
            assert!(asks.as_mut().now_or_never().is_none(), "it waits");
        }
        assert_eq!(operations.parameters("r-01").await, Err(Untold::Many));
        // One of theirs that becomes known is none of the unknown any more.
        let theirs = operations.prompt("x-0", String::new());
        drop(known.pop());
        assert!(stranger(MOST_UNKNOWN).now_or_never().is_none(), "a place");
        drop((theirs, prompt, known, strangers));
        assert_eq!((operations.kept(), operations.0.lock().unknown), (0, 0));
    }

    #[tokio::test]
    async fn a_prompt_that_is_refused_does_not_end_another_one_of_its_operation() {
        let operations = Operations::default();
        let mut asks = Box::pin(operations.parameters("r-01"));
        assert!(asks.as_mut().now_or_never().is_none());
        let mut prompt = operations.prompt("r-01", "{}".to_owned()).expect("an id");
        operations.refused("r-01", "known already");
        assert!(asks.as_mut().now_or_never().is_none());
        prompt.readable();
        assert_eq!(asks.await, Ok("{}".to_owned()));
    }

    #[tokio::test]
    async fn one_of_two_that_ask_may_leave() {
        let operations = Operations::default();
        let mut first = Box::pin(operations.parameters("r-01"));
        let mut second = Box::pin(operations.parameters("r-01"));
        assert!(first.as_mut().now_or_never().is_none());
        assert!(second.as_mut().now_or_never().is_none());
        drop(first);
        let mut prompt = operations.prompt("r-01", "{}".to_owned()).expect("an id");
        prompt.readable();
        assert_eq!(second.await, Ok("{}".to_owned()));
    }

    /// A request that is sent again over another connection has the id of the first, of which the engine may hear the end later.
    #[tokio::test]
    async fn the_last_prompt_of_an_operation_is_the_one_that_is_told_of() {
        let operations = Operations::default();
        let mut asks = Box::pin(operations.parameters("r-01"));
        assert!(asks.as_mut().now_or_never().is_none());
        let mut first = operations
            .prompt("r-01", "first".to_owned())
            .expect("an id");
        let mut second = operations
            .prompt("r-01", "second".to_owned())
            .expect("an id");
        first.readable();
        drop(first);
        assert!(asks.as_mut().now_or_never().is_none());
        second.readable();
        assert_eq!(asks.await, Ok("second".to_owned()));
    }
}

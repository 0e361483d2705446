//! What is known of one worker from its Watch stream. Pure: events and the time go in.
//!
//! Soft state: it is rebuilt from the worker in seconds. A hole in the sequence or a new incarnation drops this worker's prefix
//! index and asks for a snapshot of this worker only.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use baton_placement::coefficients::WorkerCoefficients;
use baton_placement::fleet::WorkerState;
use baton_placement::index::{IndexEvent, PrefixIndex};
use baton_protocol::card::{Card, InvalidCard};
use baton_protocol::hash::{BlockHash, MalformedHashes};
use baton_protocol::ids::{Incarnation, WorkerId};
use baton_protocol::wire::{self, watch_event};
use tokio::sync::Notify;

use super::discovery::Domain;
use super::pairs::compatibility_key;
use super::topology;
use crate::clock::Moment;

/// A worker of which nothing was heard for so long is lost. Idle workers report about once a second.
pub const SILENCE: Duration = Duration::from_secs(5);

/// Where to go on in a worker's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resume {
    pub incarnation: Incarnation,
    pub sequence: u64,
}

/// What an event changed, for whoever has to act on it.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    Nothing,
    /// A card came: pairs, artifacts and connections follow from it.
    Card(Arc<Card>),
    Load {
        load_sequence: u64,
    },
    Index,
    /// State, coefficients, drain.
    Other,
}

/// An event that makes the stream useless. The next stream starts anew.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    #[error(
        "events {expected}..{found} of worker {worker} are missing: its prefix index is taken anew"
    )]
    Gap {
        worker: WorkerId,
        expected: u64,
        found: u64,
    },
    #[error(transparent)]
    Card(#[from] InvalidCard),
    #[error("worker {listed} calls itself {called}: correct the workers file or the worker's name")]
    Name { listed: WorkerId, called: WorkerId },
    #[error("worker {worker} sent {what} before its card")]
    NoCard {
        worker: WorkerId,
        what: &'static str,
    },
    #[error("worker {worker}: {source}")]
    Hashes {
        worker: WorkerId,
        source: MalformedHashes,
    },
    #[error("coefficients of worker {worker} are not readable: {source}")]
    Coefficients {
        worker: WorkerId,
        source: serde_json::Error,
    },
}

#[derive(Clone, Debug)]
enum Cache {
    /// Nothing usable.
    Empty,
    /// A snapshot is on its way.
    Loading(HashSet<BlockHash>),
    Live,
}

/// One worker.
#[derive(Clone, Debug)]
pub struct Tracked {
    pub id: WorkerId,
    /// Position in prefix hits.
    pub slot: u32,
    pub card: Option<Arc<Card>>,
    /// What pairing reads of the card, as a key.
    pub class: String,
    pub load: Option<wire::Load>,
    /// When `load` came.
    pub load_at: Moment,
    pub coefficients: Option<WorkerCoefficients>,
    pub draining: bool,
    /// When the prefix index was last known to be in step.
    pub indexed_at: Moment,
    /// What keeps it from being of full use, in a sentence.
    pub trouble: Option<String>,
    /// Where whoever lists it says that it is.
    listed_domains: Vec<Domain>,
    /// Whoever lists it will end it.
    leaving: bool,
    topology: Arc<[Domain]>,
    connected: bool,
    heard: Moment,
    incarnation: Option<Incarnation>,
    sequence: Option<u64>,
    cache: Cache,
    /// The next stream is to begin with the card.
    card_doubted: bool,
    /// Told when it is doubted, for whoever holds the stream.
    doubted: Arc<Notify>,
    /// Told of each report of its load.
    reported: Arc<Notify>,
}

impl Tracked {
    pub fn new(id: WorkerId, slot: u32) -> Self {
        Self {
            id,
            slot,
            card: None,
            class: String::new(),
            load: None,
            load_at: Moment::default(),
            coefficients: None,
            draining: false,
            indexed_at: Moment::default(),
            trouble: None,
            listed_domains: Vec::new(),
            leaving: false,
            topology: Arc::default(),
            connected: false,
            heard: Moment::default(),
            incarnation: None,
            sequence: None,
            cache: Cache::Empty,
            card_doubted: false,
            doubted: Arc::default(),
            reported: Arc::default(),
        }
    }

    /// Told when the stream is to be opened anew.
    pub fn doubted(&self) -> Arc<Notify> {
        self.doubted.clone()
    }

    /// Told of each report of its load.
    pub fn reported(&self) -> Arc<Notify> {
        self.reported.clone()
    }

    /// What the worker says of itself is not what its card says: the card is to be read again.
    pub fn doubt_card(&mut self) {
        if self.card.is_some() && !self.card_doubted {
            self.card_doubted = true;
            self.doubted.notify_one();
        }
    }

    /// What its listing says of it now.
    pub fn listed(&mut self, domains: Vec<Domain>, leaving: bool) {
        self.listed_domains = domains;
        self.leaving = leaving;
        self.locate();
    }

    fn locate(&mut self) {
        self.topology = match &self.card {
            Some(card) => topology::of(card, &self.listed_domains).into(),
            None => self.listed_domains.as_slice().into(),
        };
    }

    /// Its domain at each level, nearest first. Another allocation after each change.
    pub fn topology(&self) -> &Arc<[Domain]> {
        &self.topology
    }

    /// What the next stream may resume from; nothing while the index is not in step.
    pub fn resume(&self) -> Option<Resume> {
        match (&self.cache, self.incarnation, self.sequence) {
            (Cache::Live, Some(incarnation), Some(sequence)) if !self.card_doubted => {
                Some(Resume {
                    incarnation,
                    sequence,
                })
            }
            _ => None,
        }
    }

    pub fn connected(&mut self, now: Moment) {
        self.connected = true;
        self.heard = now;
    }

    /// The stream ended. What is known stays: the worker may come back and resume.
    pub fn disconnected(&mut self) {
        self.connected = false;
    }

    pub fn state(&self, now: Moment) -> WorkerState {
        if !self.connected || now.since(self.heard) > SILENCE {
            WorkerState::Lost
        } else if self.draining || self.leaving {
            WorkerState::Draining
        } else {
            WorkerState::Ready
        }
    }

    /// When the state changes by itself if nothing more is heard.
    pub fn silent_at(&self) -> Option<Moment> {
        self.connected
            .then(|| self.heard.plus(SILENCE + Duration::from_millis(1)))
    }

    /// Takes one event. After an error the stream is to be closed; the next one gets a new snapshot.
    pub fn apply(
        &mut self,
        event: wire::WatchEvent,
        index: &mut dyn PrefixIndex,
        now: Moment,
    ) -> Result<Change, WatchError> {
        self.heard = now;
        let incarnation = Incarnation(event.incarnation);
        if self.incarnation != Some(incarnation) {
            self.reborn(incarnation, index);
        }
        let Some(body) = event.event else {
            // An event of a later version.
            return Ok(Change::Nothing);
        };
        if let Err(gap) = self.in_sequence(&body, event.sequence) {
            self.drop_index(index);
            return Err(gap);
        }
        let change = self.take(body, index, now);
        if change.is_err() {
            self.drop_index(index);
        } else if matches!(self.cache, Cache::Live) {
            self.indexed_at = now;
        }
        change
    }

    /// Another process under the same name: nothing that is known of the one before holds.
    fn reborn(&mut self, incarnation: Incarnation, index: &mut dyn PrefixIndex) {
        self.incarnation = Some(incarnation);
        self.card = None;
        self.locate();
        self.load = None;
        self.draining = false;
        // Fitted on the same machine by the same program: the best prior until it publishes its own.
        self.drop_index(index);
    }

    fn drop_index(&mut self, index: &mut dyn PrefixIndex) {
        self.sequence = None;
        self.cache = Cache::Empty;
        index.apply(self.slot, IndexEvent::Cleared);
    }

    fn in_sequence(&mut self, body: &watch_event::Event, found: u64) -> Result<(), WatchError> {
        use watch_event::Event;
        let cache_event = matches!(
            body,
            Event::Stored(_) | Event::Removed(_) | Event::Cleared(_)
        );
        // A snapshot starts from wherever the worker is.
        if matches!(body, Event::SnapshotBegin(_)) {
            self.sequence = Some(found);
            return Ok(());
        }
        let Some(last) = self.sequence else {
            return Ok(());
        };
        // A number that no worker reaches, and that anyone may send.
        let expected = last.wrapping_add(u64::from(cache_event));
        if found != expected {
            return Err(WatchError::Gap {
                worker: self.id.clone(),
                expected,
                found,
            });
        }
        self.sequence = Some(found);
        Ok(())
    }

    fn take(
        &mut self,
        body: watch_event::Event,
        index: &mut dyn PrefixIndex,
        now: Moment,
    ) -> Result<Change, WatchError> {
        use watch_event::Event;
        match body {
            Event::Card(card) => {
                let card = Card::from_json(&card.json)?;
                if card.worker != self.id {
                    return Err(WatchError::Name {
                        listed: self.id.clone(),
                        called: card.worker,
                    });
                }
                let card = Arc::new(card);
                self.class = compatibility_key(&card);
                self.card = Some(card.clone());
                self.card_doubted = false;
                self.locate();
                Ok(Change::Card(card))
            }
            Event::SnapshotBegin(_) => {
                self.need_card("a snapshot")?;
                self.cache = Cache::Loading(HashSet::new());
                Ok(Change::Nothing)
            }
            Event::Stored(stored) => {
                let hashes = self.unpack(&stored.hashes)?;
                Ok(match &mut self.cache {
                    Cache::Empty => Change::Nothing,
                    Cache::Loading(blocks) => {
                        blocks.extend(hashes);
                        Change::Nothing
                    }
                    Cache::Live => {
                        index.apply(self.slot, IndexEvent::Stored(&hashes));
                        Change::Index
                    }
                })
            }
            Event::Removed(removed) => {
                let hashes = self.unpack(&removed.hashes)?;
                Ok(match &mut self.cache {
                    Cache::Empty => Change::Nothing,
                    Cache::Loading(blocks) => {
                        for hash in &hashes {
                            blocks.remove(hash);
                        }
                        Change::Nothing
                    }
                    Cache::Live => {
                        index.apply(self.slot, IndexEvent::Removed(&hashes));
                        Change::Index
                    }
                })
            }
            Event::Cleared(_) => Ok(match &mut self.cache {
                Cache::Empty => Change::Nothing,
                Cache::Loading(blocks) => {
                    blocks.clear();
                    Change::Nothing
                }
                Cache::Live => {
                    index.apply(self.slot, IndexEvent::Cleared);
                    Change::Index
                }
            }),
            Event::SnapshotEnd(_) => {
                // The end of one that never began says nothing of what is held.
                let Cache::Loading(blocks) = &mut self.cache else {
                    return Ok(Change::Nothing);
                };
                let blocks: Vec<_> = std::mem::take(blocks).into_iter().collect();
                self.cache = Cache::Live;
                index.apply(self.slot, IndexEvent::Snapshot(&blocks));
                Ok(Change::Index)
            }
            Event::Load(load) => {
                self.need_card("a load report")?;
                let load_sequence = load.load_sequence;
                self.draining = load.draining;
                self.load = Some(load);
                self.load_at = now;
                self.reported.notify_waiters();
                Ok(Change::Load { load_sequence })
            }
            Event::Coefficients(coefficients) => {
                let coefficients: WorkerCoefficients = serde_json::from_str(&coefficients.json)
                    .map_err(|source| WatchError::Coefficients {
                        worker: self.id.clone(),
                        source,
                    })?;
                // Constants that are no costs would spoil the snapshot of the whole fleet: the last good ones, or the prior, stay.
                if coefficients.is_sound() {
                    self.coefficients = Some(coefficients);
                }
                Ok(Change::Other)
            }
            Event::Draining(draining) => {
                self.draining = draining.draining;
                Ok(Change::Other)
            }
        }
    }

    fn need_card(&self, what: &'static str) -> Result<(), WatchError> {
        match self.card {
            Some(_) => Ok(()),
            None => Err(WatchError::NoCard {
                worker: self.id.clone(),
                what,
            }),
        }
    }

    fn unpack(&self, bytes: &[u8]) -> Result<Vec<BlockHash>, WatchError> {
        BlockHash::unpack(bytes).map_err(|source| WatchError::Hashes {
            worker: self.id.clone(),
            source,
        })
    }
}

#[cfg(test)]
mod tests;

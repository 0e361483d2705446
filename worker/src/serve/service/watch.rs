//! `Watch`: the card, the prefix cache and its changes, load, coefficients and drain, for as long as the router listens.
//!
//! Numbering: cache events rise by one each; everything else repeats the last one that this stream has sent. A snapshot of k
//! messages ends with the number of the last change that it contains, so it begins k lower. (There are at least as many changes as
//! messages, since a message holds many hashes.) A reader that counts therefore sees no hole from a snapshot into the changes
//! after it, on any stream, and can resume on another one.
//!
//! A slow reader costs nothing: the pool's log is bounded, and one that has fallen out of it gets a new snapshot.

use std::sync::Arc;

use async_stream::stream;
use baton_placement::coefficients::WorkerCoefficients;
use baton_protocol::hash::BlockHash;
use baton_protocol::wire::{self, WatchEvent, watch_event::Event};
use futures::Stream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::kv::events::{CacheChange, CacheEvent, EventsSince};
use crate::serve::daemon::Daemon;

/// What a stream tells of: a worker with its own engine, or one life of a server that a daemon runs beside.
pub(crate) trait Watched: Send + Sync {
    fn incarnation(&self) -> u64;
    fn card_json(&self) -> &str;
    /// Number of the newest cache event; changes when there is a newer one.
    fn cache_changes(&self) -> watch::Receiver<u64>;
    fn events_since(&self, sequence: u64) -> EventsSince;
    /// All that can be hit, and the number of the last event in it.
    fn snapshot(&self) -> (u64, Vec<BlockHash>);
    fn load(&self) -> watch::Receiver<wire::Load>;
    fn coefficients(&self) -> watch::Receiver<WorkerCoefficients>;
    fn draining(&self) -> watch::Receiver<bool>;
    /// Ends the stream.
    fn ended(&self) -> &CancellationToken;
}

impl Watched for Daemon {
    fn incarnation(&self) -> u64 {
        self.card.incarnation.0
    }

    fn card_json(&self) -> &str {
        &self.card_json
    }

    fn cache_changes(&self) -> watch::Receiver<u64> {
        self.pool.watch_events()
    }

    fn events_since(&self, sequence: u64) -> EventsSince {
        self.pool.events_since(sequence)
    }

    fn snapshot(&self) -> (u64, Vec<BlockHash>) {
        self.pool.snapshot()
    }

    fn load(&self) -> watch::Receiver<wire::Load> {
        self.load.subscribe()
    }

    fn coefficients(&self) -> watch::Receiver<WorkerCoefficients> {
        self.coefficients.subscribe()
    }

    fn draining(&self) -> watch::Receiver<bool> {
        self.draining.subscribe()
    }

    fn ended(&self) -> &CancellationToken {
        &self.stop
    }
}

/// Hashes in one message: 1 MiB with the rest of the message.
const HASHES: usize = 65_000;

pub(crate) fn events<W: Watched + 'static>(
    watched: Arc<W>,
    request: wire::WatchRequest,
) -> impl Stream<Item = Result<WatchEvent, Status>> + Send {
    stream! {
        let mut changes = watched.cache_changes();
        let mut load = watched.load();
        let mut coefficients = watched.coefficients();
        let mut draining = watched.draining();
        let mut feed = Feed::new(watched.incarnation(), &request);

        // What is not in the log is always told.
        load.mark_changed();
        coefficients.mark_changed();
        draining.mark_changed();
        let mut first = true;
        loop {
            let seen = changes.has_changed().unwrap_or(false);
            if first || seen {
                changes.mark_unchanged();
                let since = match feed.resumes_from() {
                    Some(sequence) => watched.events_since(sequence),
                    None => EventsSince::TooOld,
                };
                let messages = match since {
                    EventsSince::Events(events) => feed.changes(events),
                    EventsSince::TooOld => {
                        if first {
                            yield Ok(feed.repeat(Event::Card(wire::Card {
                                json: watched.card_json().to_owned(),
                            })));
                        }
                        let (sequence, hashes) = watched.snapshot();
                        feed.snapshot(sequence, &hashes)
                    }
                };
                for message in messages {
                    yield Ok(message);
                }
                first = false;
            }
            if draining.has_changed().unwrap_or(false) {
                let now = *draining.borrow_and_update();
                yield Ok(feed.repeat(Event::Draining(wire::Draining { draining: now })));
            }
            if coefficients.has_changed().unwrap_or(false) {
                let now = *coefficients.borrow_and_update();
                match serde_json::to_string(&now) {
                    Ok(json) => yield Ok(feed.repeat(Event::Coefficients(wire::Coefficients { json }))),
                    Err(error) => tracing::error!(%error, "coefficients cannot be written"),
                }
            }
            if load.has_changed().unwrap_or(false) {
                let now = *load.borrow_and_update();
                yield Ok(feed.repeat(Event::Load(now)));
            }
            tokio::select! {
                () = watched.ended().cancelled() => break,
                // An error says that the sender is gone, and the worker with it.
                changed = changes.changed() => {
                    if changed.is_err() { break }
                    changes.mark_changed();
                }
                changed = load.changed() => {
                    if changed.is_err() { break }
                    load.mark_changed();
                }
                changed = coefficients.changed() => {
                    if changed.is_err() { break }
                    coefficients.mark_changed();
                }
                changed = draining.changed() => {
                    if changed.is_err() { break }
                    draining.mark_changed();
                }
            }
        }
    }
}

/// Numbers the messages of one stream.
#[derive(Debug)]
struct Feed {
    incarnation: u64,
    /// Number of the last cache event that the reader has; none before its first snapshot.
    sent: Option<u64>,
    /// What other messages repeat until then: the reader's own place, if it has one.
    place: u64,
}

impl Feed {
    fn new(incarnation: u64, request: &wire::WatchRequest) -> Self {
        let same = request.incarnation == Some(incarnation);
        let sent = request.sequence.filter(|_| same);
        Self {
            incarnation,
            sent,
            place: sent.unwrap_or(0),
        }
    }

    fn resumes_from(&self) -> Option<u64> {
        self.sent
    }

    fn repeat(&self, event: Event) -> WatchEvent {
        WatchEvent {
            incarnation: self.incarnation,
            sequence: self.sent.unwrap_or(self.place),
            event: Some(event),
        }
    }

    fn next(&mut self, sequence: u64, event: Event) -> WatchEvent {
        self.sent = Some(sequence);
        self.repeat(event)
    }

    fn changes(&mut self, events: Vec<CacheEvent>) -> Vec<WatchEvent> {
        events
            .into_iter()
            .map(|CacheEvent { sequence, change }| {
                let event = match change {
                    CacheChange::Stored(hashes) => Event::Stored(stored(&hashes)),
                    CacheChange::Removed(hashes) => Event::Removed(wire::BlocksRemoved {
                        hashes: BlockHash::pack(&hashes).into(),
                    }),
                    CacheChange::Cleared => Event::Cleared(wire::CacheCleared {}),
                };
                self.next(sequence, event)
            })
            .collect()
    }

    fn snapshot(&mut self, sequence: u64, hashes: &[BlockHash]) -> Vec<WatchEvent> {
        let chunks = hashes.chunks(HASHES);
        let begin = sequence.saturating_sub(chunks.len() as u64);
        let mut messages = vec![self.next(begin, Event::SnapshotBegin(wire::SnapshotBegin {}))];
        for (chunk, number) in chunks.zip(begin + 1..) {
            messages.push(self.next(number, Event::Stored(stored(chunk))));
        }
        messages.push(self.next(sequence, Event::SnapshotEnd(wire::SnapshotEnd {})));
        messages
    }
}

fn stored(hashes: &[BlockHash]) -> wire::BlocksStored {
    wire::BlocksStored {
        hashes: BlockHash::pack(hashes).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(incarnation: Option<u64>, sequence: Option<u64>) -> Feed {
        Feed::new(
            7,
            &wire::WatchRequest {
                incarnation,
                sequence,
            },
        )
    }

    #[test]
    fn a_snapshot_runs_into_the_changes_after_it_without_a_hole() {
        let mut feed = feed(None, None);
        let hashes: Vec<_> = (0..HASHES as u128 * 2 + 1).map(BlockHash).collect();
        let mut messages = feed.snapshot(200_000, &hashes);
        messages.extend(feed.changes(vec![CacheEvent {
            sequence: 200_001,
            change: CacheChange::Cleared,
        }]));
        let numbers: Vec<_> = messages.iter().map(|message| message.sequence).collect();
        assert_eq!(
            numbers,
            [199_997, 199_998, 199_999, 200_000, 200_000, 200_001]
        );
        for message in messages {
            if let Some(Event::Stored(stored)) = message.event {
                assert!(stored.hashes.len() <= 1 << 20);
            }
        }
    }

    #[test]
    fn only_a_reader_of_this_process_resumes() {
        assert_eq!(feed(Some(7), Some(3)).resumes_from(), Some(3));
        assert_eq!(feed(Some(8), Some(3)).resumes_from(), None);
        assert_eq!(feed(Some(7), None).resumes_from(), None);
        assert_eq!(feed(None, Some(3)).resumes_from(), None);
    }
}

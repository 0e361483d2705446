//! Listening to the server's cache events for one life: the sockets around [`super::follow`].

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::events::{Event, Malformed, decode};
use super::follow::{Follower, Numbered, Step, Timed};
use super::life::Life;
use super::sockets::{Endpoint, Published, Subscription, replay, replay_address};
use super::told::EventSource;
use crate::config::EngineKind;

/// Silence after which the engine is asked whether there was nothing to hear: a lost batch shows by the next one only.
const SILENCE: Duration = Duration::from_secs(10);
/// Soon after the start: what was published before the subscription had reached the engine is not heard.
const FIRST_LOOK: Duration = Duration::from_secs(1);
/// After a socket failed.
const PAUSE: Duration = Duration::from_secs(1);

/// A batch as it was read.
#[derive(Debug)]
struct Read {
    time: f64,
    events: Result<Vec<Event>, Malformed>,
}

impl Timed for Read {
    fn time(&self) -> f64 {
        self.time
    }
}

fn read(published: &Published) -> Numbered<Read> {
    let batch = match decode(&published.payload) {
        Ok(batch) => Read {
            time: batch.time,
            events: Ok(batch.events),
        },
        Err(error) => Read {
            time: f64::NEG_INFINITY,
            events: Err(error),
        },
    };
    Numbered {
        sequence: published.sequence,
        batch,
    }
}

/// Follows until the life ends. Returns when another process of the server publishes: the life is over then.
pub(crate) async fn follow(
    life: &Life,
    source: &EventSource,
    (kind, host): (EngineKind, &str),
) -> &'static str {
    let Ok(endpoint) = Endpoint::of_engine(kind, &source.endpoint, host) else {
        // The card has said so.
        life.ended.cancelled().await;
        return "the life has ended";
    };
    let replays = source.replay.as_deref().and_then(|replay| {
        replay_address(replay, host)
            .inspect_err(|error| tracing::warn!(%error, "lost batches cannot be replayed"))
            .ok()
    });
    let mut listener = Listener {
        life,
        replays,
        restarted: false,
    };
    let mut subscription = listener.subscribe(&endpoint).await;
    let (mut follower, steps) = Follower::new(listener.replays.is_some());
    listener.perform(&mut follower, steps).await;
    let mut look = Instant::now() + FIRST_LOOK;
    while !listener.restarted {
        tokio::select! {
            published = subscription.next() => match published {
                Ok(published) => {
                    let steps = follower.published(read(&published));
                    listener.perform(&mut follower, steps).await;
                    look = look.min(Instant::now() + SILENCE).max(Instant::now() + FIRST_LOOK);
                }
                Err(error) => {
                    tracing::warn!(%error, "cache events are not heard: subscribing again");
                    tokio::time::sleep(PAUSE).await;
                    subscription = listener.subscribe(&endpoint).await;
                    look = Instant::now();
                }
            },
            () = tokio::time::sleep_until(look) => {
                let steps = follower.look();
                listener.perform(&mut follower, steps).await;
                look = Instant::now() + SILENCE;
            }
        }
    }
    "its events are numbered from the beginning"
}

struct Listener<'a> {
    life: &'a Life,
    replays: Option<String>,
    restarted: bool,
}

impl Listener<'_> {
    /// Tries until it works; whoever ends the life drops it.
    async fn subscribe(&self, endpoint: &Endpoint) -> Subscription {
        let mut said = false;
        loop {
            match Subscription::open(endpoint).await {
                Ok(subscription) => return subscription,
                Err(error) => {
                    if !said {
                        tracing::warn!(%error, "cache events cannot be subscribed to: trying on");
                        said = true;
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    /// Does what the follower says. A replay is read at once: what is published meanwhile waits in the socket.
    async fn perform(&mut self, follower: &mut Follower<Read>, mut steps: Vec<Step<Read>>) {
        while let Some(from) = self.take(steps) {
            self.life.replays.fetch_add(1, Ordering::Relaxed);
            if let Some(address) = self.replays.clone() {
                let answered = replay(&address, from, |published| {
                    let steps = follower.replayed(read(&published));
                    // A replay asks for no other.
                    self.take(steps);
                })
                .await;
                if let Err(error) = answered {
                    tracing::warn!(%error, from, "lost batches were not replayed");
                }
            }
            steps = follower.replay_ended();
        }
    }

    /// Applies steps; the number from which a replay is asked for, if it is.
    fn take(&mut self, steps: Vec<Step<Read>>) -> Option<u64> {
        let mut asked = None;
        for step in steps {
            match step {
                Step::Apply(batch) => self.apply(&batch),
                Step::Replay { from } => asked = Some(from),
                Step::Lost(hole) => {
                    tracing::warn!(
                        worker = %self.life.card.worker, from = hole.from, to = hole.to,
                        "cache events are lost for good: what was known of the server's prefix cache is forgotten"
                    );
                    self.forget();
                }
                Step::Restarted => self.restarted = true,
            }
        }
        asked
    }

    fn apply(&self, batch: &Read) {
        match &batch.events {
            Ok(events) => {
                let kept = self.life.with_index(|index| {
                    let mut kept = true;
                    for event in events {
                        kept &= index.apply(event);
                    }
                    kept
                });
                if !kept {
                    tracing::warn!(worker = %self.life.card.worker, "the server tells of more blocks than it can have: they are forgotten");
                    self.life.lost();
                }
            }
            Err(error) => {
                tracing::warn!(worker = %self.life.card.worker, %error, "a batch cannot be read: what was known of the server's prefix cache is forgotten");
                self.life.with_index(|index| {
                    index.apply(&Event::Unread);
                });
                self.forget();
            }
        }
    }

    fn forget(&self) {
        self.life.lost();
        self.life.with_index(super::index::Index::clear);
    }
}

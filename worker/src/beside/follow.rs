//! Following an engine's stream of batches without a hole: pure, driven by what its sockets bring.
//!
//! Batches are numbered from 0 by each process of an engine. A hole is filled from the engine's replay socket, which keeps the last
//! batches and has no snapshot: what is missing there is lost, and with it all that was known of the cache, since a removal may have
//! been in it. A number that was passed already, in a batch newer than what was taken, is another process of the engine.

use std::collections::VecDeque;

/// Batches that are held back while a replay is asked for; the oldest are given up beyond that, as a hole.
pub const WAITING: usize = 4096;

/// A batch as it was published.
#[derive(Clone, Debug, PartialEq)]
pub struct Numbered<B> {
    pub sequence: u64,
    pub batch: B,
}

/// What is to be done, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Step<B> {
    Apply(B),
    /// Ask the engine for all from this number on; its answer comes as `replayed` and ends with `replay_ended`.
    Replay {
        from: u64,
    },
    /// Batches are lost: forget all that is known of the cache.
    Lost(Hole),
    /// Another process of the engine publishes.
    Restarted,
}

/// Numbers that nobody has any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    pub from: u64,
    /// The first that is there again.
    pub to: u64,
}

/// When a batch was published, by the engine's clock.
pub trait Timed {
    fn time(&self) -> f64;
}

/// One life of an engine's publisher.
#[derive(Debug)]
pub struct Follower<B> {
    next: u64,
    newest: f64,
    /// A replay is asked for.
    replaying: bool,
    replays: bool,
    waiting: VecDeque<Numbered<B>>,
}

impl<B: Timed> Follower<B> {
    /// `replays`: whether the engine has a replay socket. The first steps ask it for all there is.
    pub fn new(replays: bool) -> (Self, Vec<Step<B>>) {
        let follower = Self {
            next: 0,
            newest: f64::NEG_INFINITY,
            replaying: replays,
            replays,
            waiting: VecDeque::new(),
        };
        let first = if replays {
            vec![Step::Replay { from: 0 }]
        } else {
            Vec::new()
        };
        (follower, first)
    }

    /// The number that is expected.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Asks whether the last batches were all heard: a hole shows by what comes after it, and nothing may come for long.
    pub fn look(&mut self) -> Vec<Step<B>> {
        if !self.replays || self.replaying {
            return Vec::new();
        }
        self.replaying = true;
        vec![Step::Replay { from: self.next }]
    }

    /// A batch was published.
    pub fn published(&mut self, one: Numbered<B>) -> Vec<Step<B>> {
        if self.replaying {
            if self.waiting.len() == WAITING {
                // What is dropped shows as a hole when the replay has ended.
                self.waiting.pop_front();
            }
            self.waiting.push_back(one);
            return Vec::new();
        }
        self.take(one)
    }

    fn take(&mut self, one: Numbered<B>) -> Vec<Step<B>> {
        if one.sequence < self.next {
            // Heard twice, live and replayed, unless it is newer than all that was heard.
            return if one.batch.time() > self.newest {
                vec![Step::Restarted]
            } else {
                Vec::new()
            };
        }
        if one.sequence == self.next {
            return vec![self.apply(one)];
        }
        if self.replays {
            let from = self.next;
            self.replaying = true;
            self.waiting.push_back(one);
            return vec![Step::Replay { from }];
        }
        self.over_a_hole(one)
    }

    fn over_a_hole(&mut self, one: Numbered<B>) -> Vec<Step<B>> {
        let hole = Hole {
            from: self.next,
            to: one.sequence,
        };
        vec![Step::Lost(hole), self.apply(one)]
    }

    fn apply(&mut self, one: Numbered<B>) -> Step<B> {
        self.next = one.sequence.saturating_add(1);
        self.newest = self.newest.max(one.batch.time());
        Step::Apply(one.batch)
    }

    /// A batch of the replay.
    pub fn replayed(&mut self, one: Numbered<B>) -> Vec<Step<B>> {
        if !self.replaying || one.sequence < self.next {
            return Vec::new();
        }
        if one.sequence == self.next {
            return vec![self.apply(one)];
        }
        self.over_a_hole(one)
    }

    /// The replay has ended, or failed: what was not in it is lost.
    pub fn replay_ended(&mut self) -> Vec<Step<B>> {
        self.replaying = false;
        let mut steps = Vec::new();
        while let Some(one) = self.waiting.pop_front() {
            let taken = if one.sequence > self.next {
                self.over_a_hole(one)
            } else {
                self.take(one)
            };
            let restarted = matches!(taken.as_slice(), [Step::Restarted]);
            steps.extend(taken);
            if restarted {
                break;
            }
        }
        steps
    }
}

#[cfg(test)]
mod tests;

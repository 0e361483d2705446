//! Scheduler: which tokens of which sequences the next step computes. Pure: no clock, no model, no bytes.
//!
//! Continuous batching with chunked prefill. Each step carries every sequence that decodes, one token each, and as many prompt
//! tokens as fit beside them. Prompts wait in order of priority, then of shortest remaining work; every fifth step that computes
//! prompts starts with the oldest, and when the oldest cannot start then, nobody of its priority or below starts before it.
//! So short prompts are quick and no prompt starves.
//!
//! Memory grows on demand. When there is none, the sequence of the lowest priority, the youngest among equals, gives its blocks
//! back and waits again with all its tokens: what it had computed is computed again, and nobody notices but the clock.

mod queue;

use std::collections::BTreeMap;

use crate::model::SequenceKey;

/// Every so many steps that compute prompts, the first is the oldest prompt (reference/placement-lab.md, section 11.4).
const AGEING_PERIOD: u64 = 5;

/// What a step may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sequences that hold memory: decode, are being filled, or wait for a hand-off.
    pub max_sequences: usize,
    /// Tokens of one step; at least `max_sequences`, so that decoding never waits.
    pub max_batched_tokens: usize,
    /// Sequences that wait for their first step.
    pub max_waiting: usize,
}

/// What a chunk of prompt would be computed beside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beside {
    /// Sequences that decode in the step.
    pub sequences: usize,
    /// Sum of their contexts in tokens.
    pub context_tokens: usize,
    /// Tokens of the chunk's own sequence that are there already.
    pub cached: usize,
}

/// Memory of sequences, as the scheduler sees it.
pub trait Memory {
    /// Takes what all known tokens of the sequence need, if `spare` blocks are left after it. Returns the leading tokens whose KV
    /// is there already (at least one token is always left to compute), or `None` when there is not enough.
    fn start(&mut self, sequence: SequenceKey, spare: usize) -> Option<usize>;
    /// Makes room for the KV of all known tokens of a sequence that decodes. False when there is none.
    fn grow(&mut self, sequence: SequenceKey) -> bool;
    /// Gives back all that a sequence holds.
    fn give_back(&mut self, sequence: SequenceKey);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Holds nothing.
    Waiting,
    /// Holds memory; its prompt is being computed.
    Filling,
    /// Computes one token a step.
    Decoding,
    /// Holds memory; its KV comes from elsewhere.
    Held,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: SequenceKey,
    priority: i32,
    /// Rises with each submission; kept over preemption.
    order: u64,
    phase: Phase,
    /// Tokens known.
    total: usize,
    /// Leading tokens whose KV is there; of a waiting sequence an expectation.
    computed: usize,
    /// Its memory does not come back when it is preempted (a lease holds it).
    pinned: bool,
}

impl Entry {
    fn remaining(&self) -> usize {
        self.total.saturating_sub(self.computed).max(1)
    }

    /// Who is served first; the last one is the first to be preempted.
    fn rank(&self) -> (std::cmp::Reverse<i32>, u64) {
        (std::cmp::Reverse(self.priority), self.order)
    }
}

/// A sequence that wants to be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submission {
    pub key: SequenceKey,
    /// Larger is more urgent.
    pub priority: i32,
    pub total_tokens: usize,
    /// Leading tokens that are expected to be in the cache.
    pub expected_cached: usize,
    /// A lease will hold its blocks: preempting it would free nothing.
    pub pinned: bool,
}

/// The part of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    pub key: SequenceKey,
    /// Leading tokens whose KV is there.
    pub start: usize,
    pub tokens: usize,
    /// All known tokens are computed after this: its outcome is the next token.
    pub last: bool,
    pub decodes: bool,
}

/// What the next step computes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Decoding sequences first.
    pub slices: Vec<Slice>,
    /// Sequences that took memory now, with the leading tokens that the cache had.
    pub started: Vec<(SequenceKey, usize)>,
    /// Sequences that gave their memory back and wait again.
    pub preempted: Vec<SequenceKey>,
    /// Sequences that decode in this step and the sum of their contexts.
    pub decoding: usize,
    pub context_tokens: usize,
}

impl StepPlan {
    /// Prompt tokens in the step.
    pub fn prompt_tokens(&self) -> usize {
        self.slices
            .iter()
            .filter(|slice| !slice.decodes)
            .map(|slice| slice.tokens)
            .sum()
    }
}

/// The admission queue has no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{waiting} requests wait already: try again later or on another worker")]
pub struct QueueFull {
    pub waiting: usize,
}

/// What waits and what runs, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerLoad {
    /// Prompt tokens that are not computed yet.
    pub queued_tokens: usize,
    /// Sequences whose prompt is not computed yet.
    pub queued_sequences: usize,
    pub decoding: usize,
    /// Sum of the contexts of those that decode.
    pub context_tokens: usize,
    /// Sequences that hold memory and wait for a hand-off, to decode then, and the sum of their tokens.
    pub held: usize,
    pub held_tokens: usize,
}

/// See the module's text.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    entries: BTreeMap<SequenceKey, Entry>,
    submissions: u64,
    filled_steps: u64,
    /// [`AGEING_PERIOD`], but in the test that shows what it is for.
    ageing: u64,
    /// The oldest waiting sequence had its turn and could not start: it is next.
    turn: Option<SequenceKey>,
}

impl Scheduler {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            entries: BTreeMap::new(),
            submissions: 0,
            filled_steps: 0,
            ageing: AGEING_PERIOD,
            turn: None,
        }
    }

    /// Puts a sequence into the queue.
    ///
    /// # Errors
    /// [`QueueFull`] when as many wait as may.
    pub fn submit(&mut self, submission: Submission) -> Result<(), QueueFull> {
        let waiting = self.in_phase(Phase::Waiting).count();
        if waiting >= self.limits.max_waiting {
            return Err(QueueFull { waiting });
        }
        self.insert(submission, Phase::Waiting);
        Ok(())
    }

    /// Whether one more sequence may hold memory.
    pub fn has_seat(&self) -> bool {
        self.seated() < self.limits.max_sequences
    }

    /// Seats a sequence that holds memory and whose KV comes from elsewhere.
    pub fn hold(&mut self, submission: Submission) {
        self.insert(submission, Phase::Held);
    }

    /// A held sequence goes on with `computed` of `total` tokens: with one token left it decodes, with more it is filled first.
    pub fn join(&mut self, key: SequenceKey, total: usize, computed: usize) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.total = total;
            entry.computed = computed;
            entry.phase = if entry.remaining() == 1 {
                Phase::Decoding
            } else {
                Phase::Filling
            };
        }
    }

    /// A held sequence has lost its memory and its hand-off: it waits for memory like any other, at its old place.
    pub fn queue_held(&mut self, key: SequenceKey, total: usize) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.total = total;
        }
        self.requeue(key);
    }

    /// Forgets a sequence, whatever it does. Its memory is the caller's.
    pub fn remove(&mut self, key: SequenceKey) {
        self.entries.remove(&key);
        if self.turn == Some(key) {
            self.turn = None;
        }
    }

    /// Takes note that a step was computed: sequences that were filled decode from now on. Call [`Self::extend`] or
    /// [`Self::remove`] for each slice that was its sequence's last.
    pub fn computed(&mut self, plan: &StepPlan) {
        for slice in &plan.slices {
            if let Some(entry) = self.entries.get_mut(&slice.key) {
                entry.computed = slice.start + slice.tokens;
                if slice.last {
                    entry.phase = Phase::Decoding;
                }
            }
        }
    }

    /// A sequence got one more token.
    pub fn extend(&mut self, key: SequenceKey) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.total += 1;
        }
    }

    /// Whether a step would compute anything, memory permitting.
    pub fn has_work(&self) -> bool {
        self.entries
            .values()
            .any(|entry| entry.phase != Phase::Held)
    }

    pub fn load(&self) -> SchedulerLoad {
        let mut load = SchedulerLoad::default();
        for entry in self.entries.values() {
            match entry.phase {
                Phase::Waiting | Phase::Filling => {
                    load.queued_tokens += entry.remaining();
                    load.queued_sequences += 1;
                }
                Phase::Decoding => {
                    load.decoding += 1;
                    load.context_tokens += entry.total;
                }
                Phase::Held => {
                    load.held += 1;
                    load.held_tokens += entry.total;
                }
            }
        }
        load
    }

    /// Chooses the next step. `bound` says how many prompt tokens may be computed beside decoding; alone, a prompt gets the whole
    /// step. An empty plan means that nothing can be computed now.
    pub fn plan(
        &mut self,
        memory: &mut impl Memory,
        bound: impl FnMut(Beside) -> usize,
    ) -> StepPlan {
        let mut plan = StepPlan::default();
        self.grow_decoding(memory, &mut plan);
        self.fill(memory, bound, &mut plan);
        plan
    }

    fn insert(&mut self, submission: Submission, phase: Phase) {
        self.submissions += 1;
        self.entries.insert(
            submission.key,
            Entry {
                key: submission.key,
                priority: submission.priority,
                order: self.submissions,
                phase,
                total: submission.total_tokens,
                computed: submission
                    .expected_cached
                    .min(submission.total_tokens.saturating_sub(1)),
                pinned: submission.pinned,
            },
        );
    }

    fn in_phase(&self, phase: Phase) -> impl Iterator<Item = &Entry> {
        self.entries
            .values()
            .filter(move |entry| entry.phase == phase)
    }

    fn seated(&self) -> usize {
        self.entries
            .values()
            .filter(|entry| entry.phase != Phase::Waiting)
            .count()
    }

    /// Gives every decoding sequence room for its next token, first ranked first, at the cost of those ranked last.
    fn grow_decoding(&mut self, memory: &mut impl Memory, plan: &mut StepPlan) {
        let mut decoding: Vec<Entry> = self.in_phase(Phase::Decoding).copied().collect();
        decoding.sort_unstable_by_key(Entry::rank);
        for entry in decoding {
            if plan.preempted.contains(&entry.key) {
                continue;
            }
            let mut grown = memory.grow(entry.key);
            while !grown {
                // The sequence itself is a candidate, so there is always one, and none ranked above it is touched.
                let victim = self.victim().unwrap_or(entry.key);
                memory.give_back(victim);
                self.requeue(victim);
                plan.preempted.push(victim);
                if victim == entry.key {
                    break;
                }
                grown = memory.grow(entry.key);
            }
            if grown {
                plan.decoding += 1;
                plan.context_tokens += entry.total;
                plan.slices.push(Slice {
                    key: entry.key,
                    start: entry.computed,
                    tokens: 1,
                    last: true,
                    decodes: true,
                });
            }
        }
    }

    fn victim(&self) -> Option<SequenceKey> {
        self.entries
            .values()
            .filter(|entry| match entry.phase {
                Phase::Decoding => true,
                Phase::Filling => !entry.pinned,
                Phase::Waiting | Phase::Held => false,
            })
            .max_by_key(|entry| entry.rank())
            .map(|entry| entry.key)
    }

    fn requeue(&mut self, key: SequenceKey) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.phase = Phase::Waiting;
            entry.computed = 0;
        }
    }
}

#[cfg(test)]
mod tests;

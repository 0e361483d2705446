//! Sequences: what the engine remembers of each operation, and their memory as the scheduler sees it.

use std::collections::HashMap;

use super::request::{Admission, EngineRequest, RequestKind};
use super::scheduler::Memory;
use crate::kv::{KvPool, Reservation, Reserve};
use crate::model::SequenceKey;

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) request: EngineRequest,
    /// Tokens to compute: the prompt, what was generated, and what was generated here.
    pub(super) history: Vec<u32>,
    /// Generated over the whole run.
    pub(super) generated: u32,
    pub(super) reservation: Option<Reservation>,
    pub(super) admission: Admission,
    /// Since when it waits for its next phase.
    pub(super) waits_since: f64,
    /// Milliseconds from admission to its first step.
    pub(super) queue: f64,
    /// Milliseconds of the steps that computed its prompt.
    pub(super) compute: f64,
    /// Milliseconds of the steps in which it decoded.
    pub(super) decode: f64,
    pub(super) cached_tokens: usize,
    pub(super) progress: Progress,
}

/// What was reported of a sequence already. Preemption does not take any of it back.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    pub(super) prefill_started: bool,
    pub(super) prefill_completed: bool,
    pub(super) decode_started: bool,
    /// Blocks of the lease's manifest that were reported.
    pub(super) published: u32,
}

impl Sequence {
    pub(super) fn new(request: EngineRequest, admission: Admission, now: f64) -> Self {
        let mut history = request.tokens.clone();
        if let RequestKind::Prefill(terms) = &request.kind
            && !terms.sample_first
        {
            // The reader computes the last prompt token, for its logits.
            history.pop();
        }
        Self {
            history,
            generated: request.generated,
            reservation: None,
            admission,
            waits_since: now,
            queue: 0.0,
            compute: 0.0,
            decode: 0.0,
            cached_tokens: 0,
            progress: Progress::default(),
            request,
        }
    }

    /// Whether this prefill opens a lease: not when the run ends with the token that is sampled here.
    pub(super) fn opens_lease(&self) -> bool {
        match &self.request.kind {
            RequestKind::Prefill(terms) => {
                let last = self.request.generated + 1 >= self.request.stopping.max_tokens;
                !(terms.sample_first && last)
            }
            RequestKind::Generate | RequestKind::Receive => false,
        }
    }

    /// Whether the outcome of its last token is wanted.
    pub(super) fn wants_output(&self) -> bool {
        match &self.request.kind {
            RequestKind::Prefill(terms) => terms.sample_first,
            RequestKind::Generate | RequestKind::Receive => true,
        }
    }

    /// New tokens that blocks are taken for beside the known ones: up to one block, so that decoding does not begin with growth.
    pub(super) fn room(&self, block_size: usize) -> usize {
        match &self.request.kind {
            RequestKind::Prefill(_) => 0,
            RequestKind::Generate | RequestKind::Receive => {
                let left = self
                    .request
                    .stopping
                    .max_tokens
                    .saturating_sub(self.generated);
                block_size.min(left as usize)
            }
        }
    }
}

/// All sequences and the pool that their memory is from.
#[derive(Debug)]
pub(super) struct Sequences {
    pub(super) pool: KvPool,
    pub(super) all: HashMap<SequenceKey, Sequence>,
}

impl Memory for Sequences {
    fn start(&mut self, key: SequenceKey, spare: usize) -> Option<usize> {
        let sequence = self.all.get_mut(&key)?;
        let geometry = self.pool.store().geometry();
        // A sequence that fills the whole pool must still start: room for new tokens is grown later anyway.
        let room = if spare == 0 {
            0
        } else {
            sequence.room(geometry.block_size)
        };
        let reserve = Reserve {
            tokens: &sequence.history,
            scope: &sequence.request.scope,
            room,
            // Even where no outcome is wanted a block that others may read is never written again.
            leave_last: true,
        };
        let reservation = self.pool.reserve_beside(&reserve, spare).ok()?;
        let cached = reservation.cached_tokens();
        sequence.reservation = Some(reservation);
        Some(cached)
    }

    fn grow(&mut self, key: SequenceKey) -> bool {
        self.all.get_mut(&key).is_some_and(|sequence| {
            let tokens = sequence.history.len();
            sequence
                .reservation
                .as_mut()
                .is_some_and(|reservation| self.pool.grow(reservation, tokens).is_ok())
        })
    }

    fn give_back(&mut self, key: SequenceKey) {
        if let Some(sequence) = self.all.get_mut(&key) {
            sequence.reservation = None;
        }
    }
}

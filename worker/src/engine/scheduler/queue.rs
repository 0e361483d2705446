//! The prefill queue: which prompts are computed beside what decodes, and how much of each.

use super::{Beside, Entry, Memory, Phase, Scheduler, Slice, StepPlan};
use crate::model::SequenceKey;

impl Scheduler {
    pub(super) fn fill(
        &mut self,
        memory: &mut impl Memory,
        mut bound: impl FnMut(Beside) -> usize,
        plan: &mut StepPlan,
    ) {
        // Chunks share one bound: that of the first, which is nearly all of the work.
        let mut left: Option<usize> = None;
        let room = self.limits.max_batched_tokens.saturating_sub(plan.decoding);
        let mut filled = false;
        let turn_due = (self.filled_steps + 1).is_multiple_of(self.ageing);
        for candidate in self.candidates(turn_due) {
            if left == Some(0) || room == 0 {
                break;
            }
            let Some(entry) = self.begin(candidate, memory, turn_due, plan) else {
                continue;
            };
            let allowed = *left.get_or_insert_with(|| {
                if plan.decoding == 0 {
                    room
                } else {
                    bound(Beside {
                        sequences: plan.decoding,
                        context_tokens: plan.context_tokens,
                        cached: entry.computed,
                    })
                    .clamp(1, room)
                }
            });
            let tokens = entry.remaining().min(allowed);
            if tokens == 0 {
                break;
            }
            plan.slices.push(Slice {
                key: entry.key,
                start: entry.computed,
                tokens,
                last: tokens == entry.remaining(),
                decodes: false,
            });
            left = Some(allowed - tokens);
            filled = true;
        }
        if filled {
            self.filled_steps += 1;
        }
    }

    /// Everyone with prompt tokens to compute, in the order of service.
    fn candidates(&self, turn_due: bool) -> Vec<SequenceKey> {
        let mut found: Vec<Entry> = self
            .entries
            .values()
            .filter(|entry| matches!(entry.phase, Phase::Waiting | Phase::Filling))
            .copied()
            .collect();
        found.sort_unstable_by_key(|entry| {
            (
                std::cmp::Reverse(entry.priority),
                entry.remaining(),
                entry.order,
            )
        });
        let first = if turn_due || self.turn.is_some() {
            self.turn.or_else(|| {
                found
                    .iter()
                    .min_by_key(|entry| entry.rank())
                    .map(|entry| entry.key)
            })
        } else {
            None
        };
        let mut keys: Vec<SequenceKey> = found.iter().map(|entry| entry.key).collect();
        if let Some(place) = keys.iter().position(|key| Some(*key) == first) {
            keys[..=place].rotate_right(1);
        }
        keys
    }

    /// Makes sure that a candidate holds memory; `None` when it cannot be computed in this step.
    fn begin(
        &mut self,
        key: SequenceKey,
        memory: &mut impl Memory,
        turn_due: bool,
        plan: &mut StepPlan,
    ) -> Option<Entry> {
        let entry = *self.entries.get(&key)?;
        if entry.phase == Phase::Filling {
            return Some(entry);
        }
        if self.must_yield(&entry) {
            return None;
        }
        // One block for each sequence that decodes, so that a start does not force a preemption in the very next steps. With
        // nobody else computing there is nobody to spare for.
        let busy = self
            .entries
            .values()
            .filter(|other| matches!(other.phase, Phase::Filling | Phase::Decoding))
            .count();
        let started = if self.has_seat() {
            memory.start(key, busy)
        } else {
            None
        };
        let Some(cached) = started else {
            let oldest = self
                .in_phase(Phase::Waiting)
                .min_by_key(|entry| entry.rank())
                .is_some_and(|oldest| oldest.key == key);
            if turn_due && oldest {
                self.turn = Some(key);
            }
            return None;
        };
        if self.turn == Some(key) {
            self.turn = None;
        }
        plan.started.push((key, cached));
        let entry = self.entries.get_mut(&key)?;
        entry.phase = Phase::Filling;
        entry.computed = cached.min(entry.total.saturating_sub(1));
        Some(*entry)
    }

    fn must_yield(&self, entry: &Entry) -> bool {
        self.turn
            .and_then(|turn| self.entries.get(&turn))
            .is_some_and(|first| first.key != entry.key && first.priority >= entry.priority)
    }
}

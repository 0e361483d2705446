//! Beginning a step: deadlines, the plan, memory and leases of those that start. Computes nothing.

use baton_placement::calibration::StepShape;
use baton_placement::cost;
use baton_protocol::failure::FailureClass;

use super::request::{EngineEvent, RequestKind};
use super::{Engine, Next, StepOutcome};
use crate::kv::lease::LeaseOpen;
use crate::model::SequenceKey;

impl Engine {
    /// Chooses the next step at `now` milliseconds. [`Next::Again`] means: call [`Self::compute`]. The events are true already.
    pub fn begin(&mut self, now: f64) -> StepOutcome {
        self.step_over();
        let mut events = std::mem::take(&mut self.early);
        self.expire(now, &mut events);
        let coefficients = self.fit.coefficients();
        let objective = self.config.tpot_objective;
        self.plan = self.scheduler.plan(&mut self.sequences, |beside| {
            cost::chunk_bound(
                &coefficients,
                beside.sequences as f64,
                beside.context_tokens as f64,
                objective,
                beside.cached as f64,
            ) as usize
        });
        self.counters.preemptions += self.plan.preempted.len() as u64;
        for key in self.plan.preempted.clone() {
            if let Some(sequence) = self.sequences.all.get_mut(&key) {
                sequence.waits_since = now;
            }
        }
        for (key, cached) in self.plan.started.clone() {
            self.start(key, cached, &mut events);
        }
        self.report_phases(now, &mut events);
        self.board.write(self.scheduler.load());
        let next = if self.plan.slices.is_empty() {
            if self.sequences.all.is_empty() {
                Next::Idle
            } else {
                Next::Wait
            }
        } else {
            self.board.step_begins(now, self.predicted());
            Next::Again
        };
        StepOutcome {
            events,
            duration: 0.0,
            next,
        }
    }

    fn expire(&mut self, now: f64, events: &mut Vec<(SequenceKey, EngineEvent)>) {
        let mut late: Vec<SequenceKey> = self
            .sequences
            .all
            .iter()
            .filter(|(_, sequence)| {
                sequence
                    .request
                    .deadline
                    .is_some_and(|deadline| now >= deadline)
            })
            .map(|(key, _)| *key)
            .collect();
        late.sort_unstable();
        for key in late {
            self.fail(
                key,
                FailureClass::DeadlineExceeded,
                "operation: its deadline has passed: ask for a longer one or for fewer tokens"
                    .to_owned(),
                events,
            );
        }
    }

    /// A sequence took memory. The first time, a prefill for somebody else opens its lease.
    fn start(
        &mut self,
        key: SequenceKey,
        cached: usize,
        events: &mut Vec<(SequenceKey, EngineEvent)>,
    ) {
        let Some(sequence) = self.sequences.all.get_mut(&key) else {
            return;
        };
        if !sequence.progress.prefill_started {
            sequence.cached_tokens = cached;
        }
        let RequestKind::Prefill(terms) = &sequence.request.kind else {
            return;
        };
        let tokens = sequence.history.len();
        let leased = sequence.opens_lease();
        let Some(reservation) = &mut sequence.reservation else {
            return;
        };
        let mut admission = sequence.admission;
        admission.cached_tokens = cached;
        admission.blocks = reservation.blocks().len();
        if !leased {
            if !sequence.progress.prefill_started {
                events.push((key, EngineEvent::NoLease { admission }));
            }
            return;
        }
        let open = LeaseOpen {
            id: terms.lease,
            run: sequence.request.run.clone(),
            duration: terms.lease_duration,
            skip_blocks: terms.skip_blocks,
        };
        match self.sequences.pool.open_lease(reservation, &open) {
            Ok(opened) => events.push((
                key,
                EngineEvent::LeaseOpened {
                    lease: open.id,
                    opened,
                    tokens,
                    admission,
                },
            )),
            Err(error) => {
                self.plan.slices.retain(|slice| slice.key != key);
                self.fail(key, FailureClass::Bug, error.to_string(), events);
            }
        }
    }

    fn report_phases(&mut self, now: f64, events: &mut Vec<(SequenceKey, EngineEvent)>) {
        for slice in &self.plan.slices {
            let Some(sequence) = self.sequences.all.get_mut(&slice.key) else {
                continue;
            };
            let progress = &mut sequence.progress;
            let queue = (now - sequence.waits_since).max(0.0);
            if slice.decodes && !progress.decode_started {
                progress.decode_started = true;
                events.push((slice.key, EngineEvent::DecodeStarted { queue }));
            } else if !slice.decodes && !progress.prefill_started {
                progress.prefill_started = true;
                sequence.queue = queue;
                events.push((slice.key, EngineEvent::PrefillStarted { queue }));
            }
        }
    }

    fn predicted(&self) -> f64 {
        self.fit.predict(&self.step_shape())
    }

    /// The chosen step as the cost model sees it.
    pub(super) fn step_shape(&self) -> StepShape {
        let mut shape = StepShape {
            sequences: narrow(self.plan.decoding),
            context: self.plan.context_tokens as u64,
            ..StepShape::default()
        };
        for slice in self.plan.slices.iter().filter(|slice| !slice.decodes) {
            shape.add_chunk(narrow(slice.tokens), narrow(slice.start));
        }
        shape
    }
}

fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

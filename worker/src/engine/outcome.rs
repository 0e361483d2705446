//! Computing the chosen step, and what it means for each sequence: blocks, tokens, ends.

use baton_protocol::failure::FailureClass;

use super::request::EngineEvent;
use super::scheduler::Slice;
use super::{Engine, RequestKind, StepOutcome};
use crate::kv::BlockId;
use crate::model::{Batch, ModelError, Output, SequenceKey, SequenceSlice};
use crate::sampling::{self, Finish, Sampled};

/// A computed step that nobody has seen yet.
#[derive(Debug)]
pub struct Forwarded {
    /// Outputs, and the modelled duration where the work was not real.
    result: Result<(Vec<Output>, Option<f64>), ModelError>,
    /// Milliseconds that the work took.
    measured: f64,
}

impl Forwarded {
    /// Milliseconds that the step takes in modelled time; none where the work was real and its time has passed.
    pub fn modelled(&self) -> Option<f64> {
        self.result
            .as_ref()
            .ok()
            .and_then(|(_, modelled)| *modelled)
    }
}

impl Engine {
    /// Computes what [`Self::begin`] chose. A model that only says how long a step takes has its result at once, and nobody may
    /// see it before: [`Forwarded::modelled`] has to pass until [`Self::conclude`], so that no block is read, and no token sent,
    /// before its time. Load reports show the step until [`Self::step_over`] or the next `begin`.
    pub fn forward(&mut self) -> Forwarded {
        let begun = (self.stopwatch)();
        let result = self.run_model();
        Forwarded {
            measured: (self.stopwatch)() - begun,
            result,
        }
    }

    /// What the step that began at `now` milliseconds means for each of its sequences.
    pub fn conclude(&mut self, forwarded: Forwarded, now: f64) -> StepOutcome {
        let mut events = Vec::new();
        let duration = forwarded.modelled().unwrap_or(forwarded.measured);
        match forwarded.result {
            Ok((outputs, _)) => {
                self.counters.steps += 1;
                let shape = self.step_shape();
                self.fit.observe(&shape, duration);
                self.scheduler.computed(&self.plan);
                let slices = std::mem::take(&mut self.plan.slices);
                for (slice, output) in slices.iter().zip(outputs) {
                    self.settle(*slice, output, duration, now + duration, &mut events);
                }
            }
            Err(error) => self.give_up(&error, &mut events),
        }
        StepOutcome {
            events,
            duration,
            next: self.next(),
        }
    }

    fn run_model(&mut self) -> Result<(Vec<Output>, Option<f64>), ModelError> {
        let no_blocks: &[BlockId] = &[];
        let all = &self.sequences.all;
        let batch = Batch {
            slices: self
                .plan
                .slices
                .iter()
                .filter_map(|slice| {
                    let sequence = all.get(&slice.key)?;
                    let reservation = sequence.reservation.as_ref();
                    Some(SequenceSlice {
                        sequence: slice.key,
                        history: sequence.history.get(..slice.start + slice.tokens)?,
                        start: slice.start,
                        blocks: reservation.map_or(no_blocks, |held| held.blocks()),
                        wants_output: slice.last && sequence.wants_output(),
                    })
                })
                .collect(),
        };
        let store = self.sequences.pool.store().clone();
        let report = self.model.forward(&batch, &store)?;
        Ok((report.outputs, report.duration_milliseconds))
    }

    /// A batch that the model refuses is a bug of this process. The sequence it names ends; without a name, all of the batch do.
    fn give_up(&mut self, error: &ModelError, events: &mut Vec<(SequenceKey, EngineEvent)>) {
        let keys = match error {
            ModelError::Batch { sequence, .. } => vec![*sequence],
            _ => self.plan.slices.iter().map(|slice| slice.key).collect(),
        };
        self.plan.slices.clear();
        for key in keys {
            self.fail(key, FailureClass::Bug, error.to_string(), events);
        }
    }

    fn settle(
        &mut self,
        slice: Slice,
        output: Output,
        duration: f64,
        now: f64,
        events: &mut Vec<(SequenceKey, EngineEvent)>,
    ) {
        let key = slice.key;
        let Some(sequence) = self.sequences.all.get_mut(&key) else {
            return;
        };
        if slice.decodes {
            sequence.decode += duration;
        } else {
            sequence.compute += duration;
            self.counters.prompt_tokens += slice.tokens as u64;
        }
        if let Err(message) = self.complete_blocks(key, slice.start + slice.tokens, events) {
            self.fail(key, FailureClass::Bug, message, events);
            return;
        }
        if !slice.last {
            return;
        }
        let sampled = self.choose(key, output);
        let Some(sequence) = self.sequences.all.get_mut(&key) else {
            return;
        };
        if !slice.decodes && !sequence.progress.prefill_completed {
            sequence.progress.prefill_completed = true;
            if !matches!(sequence.request.kind, RequestKind::Prefill(_)) {
                events.push((
                    key,
                    EngineEvent::PrefillCompleted {
                        queue: sequence.queue,
                        compute: sequence.compute,
                        cached_tokens: sequence.cached_tokens,
                    },
                ));
            }
        }
        sequence.waits_since = now;
        let mut finish = None;
        if let Some(sampled) = sampled {
            let position = sequence.history.len();
            sequence.history.push(sampled.token);
            sequence.generated += 1;
            self.counters.generated_tokens += 1;
            finish = sequence
                .request
                .stopping
                .finish(sampled.token, sequence.generated, &self.eos)
                .or((sequence.history.len() >= self.max_context).then_some(Finish::Length));
            events.push((
                key,
                EngineEvent::Token {
                    id: sampled.token,
                    position: u32::try_from(position).unwrap_or(u32::MAX),
                    logprobs: sampled.logprobs,
                    finish,
                },
            ));
        }
        if matches!(sequence.request.kind, RequestKind::Prefill(_)) {
            self.seal(key, slice.start + slice.tokens, events);
        } else if let Some(finish) = finish {
            events.push((
                key,
                EngineEvent::Finished {
                    finish,
                    output_tokens: sequence.generated,
                    decode: sequence.decode,
                },
            ));
            self.forget(key);
        } else {
            self.scheduler.extend(key);
        }
    }

    /// The token after the sequence's last, or none where it is not wanted.
    fn choose(&self, key: SequenceKey, output: Output) -> Option<Sampled> {
        let sequence = self.sequences.all.get(&key)?;
        match output {
            Output::None => None,
            Output::Token(token) => Some(Sampled {
                token,
                logprobs: None,
            }),
            Output::Logits(logits) => {
                let request = &sequence.request;
                let forbidden = request.stopping.forbidden(sequence.generated, &self.eos);
                Some(sampling::sample(
                    &logits,
                    &request.sampling,
                    sequence.history.len() as u64,
                    &forbidden,
                ))
            }
        }
    }

    /// The KV of the first `computed` tokens is there: its full blocks can be found, and read under a lease.
    fn complete_blocks(
        &mut self,
        key: SequenceKey,
        computed: usize,
        events: &mut Vec<(SequenceKey, EngineEvent)>,
    ) -> Result<(), String> {
        let pool = &self.sequences.pool;
        let block_size = pool.store().geometry().block_size;
        let Some(sequence) = self.sequences.all.get_mut(&key) else {
            return Ok(());
        };
        let Some(reservation) = &mut sequence.reservation else {
            return Ok(());
        };
        for index in reservation.completed_blocks()..computed / block_size {
            let tokens = sequence
                .history
                .get(index * block_size..(index + 1) * block_size)
                .unwrap_or_default();
            pool.complete_block(reservation, index, tokens)
                .map_err(|error| error.to_string())?;
        }
        if let RequestKind::Prefill(terms) = &sequence.request.kind
            && reservation.lease().is_some()
        {
            let complete = u32::try_from(reservation.completed_blocks()).unwrap_or(u32::MAX);
            let published = complete.saturating_sub(terms.skip_blocks);
            if published > sequence.progress.published {
                sequence.progress.published = published;
                events.push((key, EngineEvent::BlocksPublished { blocks: published }));
            }
        }
        Ok(())
    }

    /// A prefill for somebody else is done: its lease keeps the blocks, and the operation ends.
    fn seal(
        &mut self,
        key: SequenceKey,
        computed: usize,
        events: &mut Vec<(SequenceKey, EngineEvent)>,
    ) {
        let Some(sequence) = self.sequences.all.get(&key) else {
            return;
        };
        let sealed = match &sequence.reservation {
            Some(reservation) if reservation.lease().is_some() => {
                self.sequences.pool.seal(reservation, computed)
            }
            _ => Ok(0),
        };
        let event = match sealed {
            Ok(blocks) => EngineEvent::Sealed {
                blocks,
                queue: sequence.queue,
                compute: sequence.compute,
                cached_tokens: sequence.cached_tokens,
            },
            Err(error) => EngineEvent::Failed {
                class: FailureClass::PrefillLost,
                message: error.to_string(),
            },
        };
        events.push((key, event));
        self.forget(key);
    }
}

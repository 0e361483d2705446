//! Admission: which requests are taken, and what is reserved for them at once.

use baton_protocol::failure::Refusal;

use super::Engine;
use super::request::{Admission, Admitted, EngineRequest, Refused, RequestKind};
use super::scheduler::Submission;
use super::sequence::Sequence;
use crate::kv::{Reservation, Reserve};
use crate::model::SequenceKey;
use crate::sampling::MOST_LOGPROBS;

impl Engine {
    /// Takes an operation, at `now` milliseconds.
    ///
    /// # Errors
    /// [`Refused`]; nothing is held then.
    pub fn submit(&mut self, request: EngineRequest, now: f64) -> Result<Admitted, Refused> {
        self.check(&request)?;
        let geometry = self.sequences.pool.store().geometry();
        let key = SequenceKey(self.next_key);
        let mut sequence = Sequence::new(
            request,
            Admission {
                load_sequence: 0,
                cached_tokens: 0,
                blocks: 0,
            },
            now,
        );
        let tokens = sequence.history.len();
        let mut submission = Submission {
            key,
            priority: sequence.request.priority,
            total_tokens: tokens,
            expected_cached: 0,
            pinned: sequence.opens_lease(),
        };
        let mut reservation = None;
        if sequence.request.kind == RequestKind::Receive {
            let reserved = self.reserve_for_handoff(&sequence)?;
            sequence.cached_tokens = reserved.cached_tokens();
            sequence.admission.cached_tokens = reserved.cached_tokens();
            sequence.admission.blocks = reserved.blocks().len();
            reservation = Some(reserved);
            self.scheduler.hold(submission);
        } else {
            let cached = self.sequences.pool.cached_tokens(
                &sequence.history[..tokens.saturating_sub(1)],
                &sequence.request.scope,
            );
            submission.expected_cached = cached;
            sequence.admission.cached_tokens = cached;
            sequence.admission.blocks = geometry.blocks_for(tokens);
            self.scheduler.submit(submission).map_err(|full| Refused {
                reason: Refusal::QueueFull,
                message: full.to_string(),
                retry_after: self.retry_after(),
            })?;
        }
        self.next_key += 1;
        sequence.admission.load_sequence = self.board.write(self.scheduler.load());
        let admission = sequence.admission;
        self.sequences.all.insert(key, sequence);
        Ok(Admitted {
            key,
            admission,
            reservation,
        })
    }

    fn check(&self, request: &EngineRequest) -> Result<(), Refused> {
        let invalid = |message: String| Refused {
            reason: Refusal::InvalidRequest,
            message,
            retry_after: 0,
        };
        let tokens = request.tokens.len();
        let vocabulary = self.model.facts().shape.vocabulary;
        if tokens == 0 {
            return Err(invalid(
                "tokens: empty: a prompt needs one token".to_owned(),
            ));
        }
        if request.generated as usize > tokens {
            return Err(invalid(format!(
                "generated: {} of {tokens} tokens cannot have been generated",
                request.generated
            )));
        }
        if let Some(token) = request
            .tokens
            .iter()
            .find(|token| **token as usize >= vocabulary)
        {
            return Err(invalid(format!(
                "tokens: id {token} is beyond the vocabulary of {vocabulary}: tokenise with this worker's tokenizer"
            )));
        }
        if let Some(count) = request.sampling.top_logprobs
            && count > MOST_LOGPROBS
        {
            return Err(invalid(format!(
                "topLogprobs: {count} alternatives are more than {MOST_LOGPROBS}: ask for fewer"
            )));
        }
        if request.generated >= request.stopping.max_tokens {
            return Err(invalid(format!(
                "maxTokens: {} were generated of {}: nothing is left to do",
                request.generated, request.stopping.max_tokens
            )));
        }
        if let RequestKind::Prefill(terms) = &request.kind
            && !terms.sample_first
            && tokens < 2
        {
            return Err(invalid(
                "tokens: the reader computes the last one, so nothing is left to compute here"
                    .to_owned(),
            ));
        }
        if tokens >= self.max_context {
            return Err(Refused {
                reason: Refusal::TooLong,
                message: format!(
                    "tokens: {tokens} and one to come are more than the {} that one sequence may have here",
                    self.max_context
                ),
                retry_after: 0,
            });
        }
        Ok(())
    }

    fn reserve_for_handoff(&self, sequence: &Sequence) -> Result<Reservation, Refused> {
        if !self.scheduler.has_seat() {
            return Err(Refused {
                reason: Refusal::QueueFull,
                message: format!(
                    "all {} sequences are taken: try again later or on another worker",
                    self.config.limits.max_sequences
                ),
                retry_after: self.retry_after(),
            });
        }
        let pool = &self.sequences.pool;
        pool.reserve(&Reserve {
            tokens: &sequence.history,
            scope: &sequence.request.scope,
            room: sequence.room(pool.store().geometry().block_size),
            // Should the hand-off fail, the last prompt token is computed here, and must not be written into a block that others
            // read. It costs moving one block when all of the prompt is cached.
            leave_last: true,
        })
        .map_err(|full| Refused {
            reason: Refusal::PoolFull,
            message: full.to_string(),
            retry_after: self.retry_after(),
        })
    }

    /// A guess of when a place is free: the prompts that wait, one after the other; at least 50 ms, one report period.
    fn retry_after(&self) -> u64 {
        let load = self.scheduler.load();
        let coefficients = self.fit.coefficients();
        let backlog = coefficients.b * load.queued_tokens as f64;
        (backlog as u64).clamp(50, 10_000)
    }
}

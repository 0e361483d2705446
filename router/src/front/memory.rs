//! Memory that requests hold, counted before it is taken: what a client sends cannot make the router larger than is said here.
//!
//! The front of a router needs at most, beside what the process has without clients:
//!
//! | what | bytes | why |
//! |---|---|---|
//! | connections | [`CONNECTION`] each | 32 KiB of head or body, 32 KiB of answer and the frame that filled it, TLS, tasks; the first 16 KiB of a body |
//! | requests in flight or in line | [`REQUEST`] each | stop strings, 256 events with log-probabilities, streams to two workers |
//! | bodies being read | 3 · 32 · `max_body_bytes` | counted above their first 16 KiB; a growing buffer has its old copy beside it |
//! | reading and tokenising | 128 · `max_body_bytes` | [`AMPLIFICATION`] · the bodies that are parsed and tokenised now |
//! | prompts and whole answers | [`HELD`] | counted when a run begins, by its tokens and what it may answer |
//!
//! [`FrontConfig::memory_bound`] adds them up. A request that finds no memory is answered 503, and others go on.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::limits::FrontConfig;
use crate::openai::error::ApiError;
use crate::openai::parameters::Parameters;

/// Bytes of a connection at most.
pub const CONNECTION: usize = 128 << 10;

/// Bytes of a request in flight or in line at most, but for what is counted by its size.
pub const REQUEST: usize = 256 << 10;

/// Bytes of a body that are part of its connection's.
pub const UNCOUNTED_BODY: usize = 16 << 10;

/// Bodies of the largest size that may be read at a time.
const BODIES: usize = 32;

/// Bytes for one byte of a body while it is parsed, rendered and tokenised. The worst JSON is `{"":0},`, 7 bytes that become a map of
/// 632; a token of one byte takes about 100 while it is encoded.
pub const AMPLIFICATION: usize = 128;

/// Bytes of prompts and whole answers of all runs together.
pub const HELD: usize = 512 << 20;

/// A prompt's token: in the run, in the message to a worker, and once more in that message's encoding.
const PROMPT_TOKEN: usize = 12;

/// A token of a whole answer, as text.
const ANSWER_TOKEN: usize = 16;

/// A log-probability of a whole answer: as it came, and in JSON.
const LOGPROB: usize = 192;

/// A semaphore counts in these.
const KIB: usize = 1 << 10;

/// See the module's text.
#[derive(Debug)]
pub struct Memory {
    bodies: Arc<Semaphore>,
    working: Arc<Semaphore>,
    /// KiB of body that may be worked on at a time.
    largest_work: u32,
    held: Arc<Semaphore>,
}

/// What one body takes; grows with it.
#[derive(Debug)]
pub struct BodyShare {
    memory: Arc<Memory>,
    taken: Option<OwnedSemaphorePermit>,
}

impl Memory {
    pub fn new(max_body_bytes: usize) -> Arc<Self> {
        let largest_work = kib(max_body_bytes).max(1);
        Arc::new(Self {
            bodies: Arc::new(Semaphore::new(BODIES * largest_work as usize)),
            working: Arc::new(Semaphore::new(largest_work as usize)),
            largest_work,
            held: Arc::new(Semaphore::new(HELD / KIB)),
        })
    }

    pub fn body(self: &Arc<Self>) -> BodyShare {
        BodyShare {
            memory: self.clone(),
            taken: None,
        }
    }

    /// The turn of a body of so many bytes to be parsed and tokenised. Turns come in the order in which they are asked for.
    pub async fn work(&self, body_bytes: usize) -> Option<OwnedSemaphorePermit> {
        let share = kib(body_bytes).clamp(1, self.largest_work);
        // The semaphore is never closed.
        self.working.clone().acquire_many_owned(share).await.ok()
    }

    /// Room for a run's prompt and, where it is kept until it is whole, its answer.
    ///
    /// # Errors
    /// There is none now; or never, for an answer that is too large to be kept.
    pub fn hold(
        &self,
        prompt_tokens: usize,
        max_tokens: u32,
        parameters: &Parameters,
    ) -> Result<OwnedSemaphorePermit, ApiError> {
        let bytes = held_bytes(prompt_tokens, max_tokens, parameters);
        if bytes > HELD {
            let message = format!(
                "an answer of {max_tokens} tokens with log-probabilities is too large to be kept until it is whole: set stream, or lower {}",
                parameters.max_tokens_field
            );
            return Err(ApiError::field(parameters.max_tokens_field, message));
        }
        let held = self.held.clone().try_acquire_many_owned(kib(bytes));
        held.map_err(|_| {
            ApiError::overloaded(
                "the prompts and answers in flight take all the memory that this router has for them: try again",
            )
        })
    }
}

fn held_bytes(prompt_tokens: usize, max_tokens: u32, parameters: &Parameters) -> usize {
    let prompt = prompt_tokens.saturating_mul(PROMPT_TOKEN);
    if parameters.stream {
        return prompt;
    }
    // The chosen token is reported beside the likeliest.
    let logprobs = parameters
        .logprobs
        .map_or(0, |top| (top as usize + 1) * LOGPROB);
    prompt.saturating_add((max_tokens as usize).saturating_mul(ANSWER_TOKEN + logprobs))
}

impl BodyShare {
    /// The body has this many bytes now.
    ///
    /// # Errors
    /// The bodies that are being read take all the memory that there is for them.
    pub fn grow_to(&mut self, bytes: usize) -> Result<(), ApiError> {
        let counted = kib(bytes.saturating_sub(UNCOUNTED_BODY)) as usize;
        let taken = self.taken.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let Ok(more @ 1..) = u32::try_from(counted.saturating_sub(taken)) else {
            return Ok(());
        };
        let permit = self.memory.bodies.clone().try_acquire_many_owned(more);
        let permit = permit.map_err(|_| {
            ApiError::overloaded(
                "the requests that are being read take all the memory that this router has for them: try again",
            )
        })?;
        match &mut self.taken {
            Some(taken) => taken.merge(permit),
            None => self.taken = Some(permit),
        }
        Ok(())
    }
}

impl FrontConfig {
    /// Bytes that clients can make the process take, however they behave.
    pub fn memory_bound(&self) -> usize {
        self.max_connections * CONNECTION
            + (self.max_in_flight + self.max_waiting) * REQUEST
            + (3 * BODIES + AMPLIFICATION) * self.max_body_bytes
            + HELD
    }
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(KIB)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(stream: bool, logprobs: Option<u32>) -> Parameters {
        Parameters {
            stream,
            logprobs,
            max_tokens_field: "max_tokens",
            ..Parameters::default()
        }
    }

    #[test]
    fn bodies_are_counted_as_they_grow_and_given_back() {
        let memory = Memory::new(1 << 20);
        let mut share = memory.body();
        share.grow_to(UNCOUNTED_BODY).unwrap();
        let mut large: Vec<_> = (0..BODIES).map(|_| memory.body()).collect();
        for body in &mut large {
            body.grow_to(1 << 19).unwrap();
            body.grow_to((1 << 20) + UNCOUNTED_BODY).unwrap();
        }
        let error = share.grow_to(UNCOUNTED_BODY + 1).unwrap_err();
        assert_eq!((error.status, error.code.as_deref()), (503, Some("overloaded")));
        large.pop();
        share.grow_to(UNCOUNTED_BODY + 1).unwrap();
        drop((share, large));
        assert_eq!(memory.bodies.available_permits(), BODIES << 10);
    }

    #[tokio::test]
    async fn the_largest_bodies_are_worked_on_one_at_a_time() {
        let memory = Memory::new(1 << 20);
        let first = memory.work(usize::MAX).await;
        let mut second = std::pin::pin!(memory.work(1));
        assert!(futures::poll!(&mut second).is_pending());
        drop(first);
        assert!(second.await.is_some());
    }

    #[test]
    fn whole_answers_count_and_streams_do_not() {
        let memory = Memory::new(1 << 20);
        let streamed = memory.hold(1000, u32::MAX, &parameters(true, Some(20))).unwrap();
        assert_eq!(streamed.num_permits(), 12);
        let error = memory.hold(1000, 1 << 20, &parameters(false, Some(20))).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some("max_tokens")));
        let _most = memory.hold(1000, 1 << 16, &parameters(false, Some(20))).unwrap();
        let _rest = memory.hold(1000, 1 << 16, &parameters(false, Some(20))).unwrap();
        let error = memory.hold(1000, 1 << 16, &parameters(false, Some(20))).unwrap_err();
        assert_eq!((error.status, error.retry_after_seconds), (503, Some(1)));
    }

    #[test]
    fn the_bound_is_what_the_documentation_says() {
        let config = FrontConfig {
            max_connections: 1000,
            max_in_flight: 100,
            max_waiting: 50,
            max_body_bytes: 1 << 20,
            ..FrontConfig::default()
        };
        let mib = config.memory_bound() >> 20;
        // 125 + 37.5 + 224 + 512.
        assert_eq!(mib, 898);
    }
}

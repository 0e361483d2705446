//! Memory that requests hold, counted before it is taken: what a client sends cannot make the router larger than is said here.
//!
//! The front of a router needs at most, beside what the process has without clients:
//!
//! | what | bytes | why |
//! |---|---|---|
//! | connections | [`CONNECTION`] each | 32 KiB of head or body, 32 KiB of answer and the frame that filled it, TLS, tasks; the first 16 KiB of a body |
//! | requests in flight or in line | [`REQUEST`] each | stop strings, 256 events with log-probabilities, streams to two workers; of one that is passed on, what opens its answer |
//! | bodies being read | 3 · 32 · `max_body_bytes` | counted above their first 16 KiB; a growing buffer has its old copy beside it |
//! | reading and tokenising | 128 · `max_body_bytes` | [`AMPLIFICATION`] · the bodies that are parsed and tokenised now |
//! | tokens of what prompts have in common | [`SEGMENTS`] | for each model that is kept compiled; dropped as others come |
//! | bodies that are passed on to engines | as prompts | with a copy for each of two legs |
//! | prompts and whole answers | [`HELD`] | counted when a run begins, and as its answer grows |
//!
//! [`FrontConfig::memory_bound`] adds them up. A request that finds no memory is answered 503, and others go on.
//!
//! Not in it is what an engine may send, which clients choose in part: an event of a stream is held until it is whole, in up to four copies
//! of at most 16 MiB (`dispatch::http::frames::LONGEST`). A token's event has some hundred bytes. The first one has eight for each token of
//! the prompt under `return_token_ids`: 1 MiB for a prompt of 128,000 tokens.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::limits::FrontConfig;
use crate::openai::error::ApiError;
use crate::openai::parameters::Parameters;
use crate::text::{library, segments};

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

/// Bytes of segments of all models together.
pub const SEGMENTS: usize = library::CAPACITY * segments::CAPACITY;

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

/// What one body, or one run, takes; grows with it and is given back when dropped.
#[derive(Debug)]
pub struct Share {
    pool: Arc<Semaphore>,
    taken: Option<OwnedSemaphorePermit>,
    /// Bytes that are not counted.
    free: usize,
    /// What takes all the memory when there is none left.
    others: &'static str,
}

impl Memory {
    pub fn new(max_body_bytes: usize) -> Self {
        let largest_work = kib(max_body_bytes).max(1);
        Self {
            bodies: Arc::new(Semaphore::new(BODIES * largest_work as usize)),
            working: Arc::new(Semaphore::new(largest_work as usize)),
            largest_work,
            held: Arc::new(Semaphore::new(HELD / KIB)),
        }
    }

    /// For a body.
    pub fn body(&self) -> Share {
        Share {
            pool: self.bodies.clone(),
            taken: None,
            free: UNCOUNTED_BODY,
            others: "the requests that are being read",
        }
    }

    /// The turn of a body of so many bytes to be parsed and tokenised. Turns come in the order in which they are asked for.
    pub async fn work(&self, body_bytes: usize) -> Option<OwnedSemaphorePermit> {
        let share = kib(body_bytes).clamp(1, self.largest_work);
        // The semaphore is never closed.
        self.working.clone().acquire_many_owned(share).await.ok()
    }

    /// For a request that is passed on: its body, and a copy with the router's own changes for each of two legs.
    ///
    /// # Errors
    /// There is no room for it now.
    pub fn passed_on(&self, body_bytes: usize, prompt_tokens: usize) -> Result<Share, ApiError> {
        let mut share = Share {
            pool: self.held.clone(),
            taken: None,
            free: UNCOUNTED_BODY,
            others: "the prompts and answers in flight",
        };
        let tokens = prompt_tokens.saturating_mul(size_of::<u32>());
        share.grow_to(body_bytes.saturating_mul(3).saturating_add(tokens))?;
        Ok(share)
    }

    /// For a run's prompt and, where it is kept until it is whole, its answer.
    ///
    /// # Errors
    /// There is no room for the prompt now, or never any for an answer of `max_tokens`.
    pub fn run(
        &self,
        prompt_tokens: usize,
        max_tokens: u32,
        parameters: &Parameters,
    ) -> Result<Holding, ApiError> {
        // The chosen token is reported beside the likeliest.
        let logprobs = parameters
            .logprobs
            .map_or(0, |top| (top as usize + 1) * LOGPROB);
        let mut holding = Holding {
            share: Share {
                pool: self.held.clone(),
                taken: None,
                free: 0,
                others: "the prompts and answers in flight",
            },
            bytes: prompt_tokens.saturating_mul(PROMPT_TOKEN),
            token: ANSWER_TOKEN + logprobs,
        };
        let whole = holding.token.saturating_mul(max_tokens as usize);
        if !parameters.stream && holding.bytes.saturating_add(whole) > HELD {
            let field = parameters.max_tokens_field;
            let message = format!(
                "an answer of {max_tokens} tokens may be too large to be kept until it is whole: set stream, or lower {field}"
            );
            return Err(ApiError::field(field, message));
        }
        holding.share.grow_to(holding.bytes)?;
        Ok(holding)
    }
}

/// What a run holds.
#[derive(Debug)]
pub struct Holding {
    share: Share,
    bytes: usize,
    /// Bytes of a token of its answer.
    token: usize,
}

impl Holding {
    /// One more token is kept until the answer is whole.
    ///
    /// # Errors
    /// The runs in flight take all the memory that there is for them.
    pub fn token(&mut self) -> Result<(), ApiError> {
        self.bytes = self.bytes.saturating_add(self.token);
        self.share.grow_to(self.bytes)
    }
}

impl Share {
    /// It has this many bytes now.
    ///
    /// # Errors
    /// 503: there is no memory left.
    pub fn grow_to(&mut self, bytes: usize) -> Result<(), ApiError> {
        let counted = kib(bytes.saturating_sub(self.free)) as usize;
        let taken = self
            .taken
            .as_ref()
            .map_or(0, OwnedSemaphorePermit::num_permits);
        let Ok(more @ 1..) = u32::try_from(counted.saturating_sub(taken)) else {
            return Ok(());
        };
        let permit = self
            .pool
            .clone()
            .try_acquire_many_owned(more)
            .map_err(|_| {
                ApiError::overloaded(format!(
                    "{} take all the memory that this router has for them: try again",
                    self.others
                ))
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
            + SEGMENTS
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
        assert_eq!(
            (error.status, error.code.as_deref()),
            (503, Some("overloaded"))
        );
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
    fn whole_answers_count_as_they_grow() {
        let memory = Memory::new(1 << 20);
        let free = || memory.held.available_permits();
        let all = free();
        let mut run = memory
            .run(1024, 1 << 16, &parameters(false, Some(20)))
            .unwrap();
        assert_eq!(free(), all - PROMPT_TOKEN);
        for _ in 0..1024 {
            run.token().unwrap();
        }
        assert_eq!(free(), all - PROMPT_TOKEN - ANSWER_TOKEN - 21 * LOGPROB);
        // Somebody else takes the rest.
        let rest = memory.held.try_acquire_many(u32::try_from(free()).unwrap());
        let error = (0..1024).find_map(|_| run.token().err()).unwrap();
        assert_eq!((error.status, error.retry_after_seconds), (503, Some(1)));
        drop((rest, run));
        assert_eq!(free(), all);
    }

    #[test]
    fn an_answer_that_can_never_be_kept_is_refused_unless_it_is_streamed() {
        let memory = Memory::new(1 << 20);
        let error = memory
            .run(1000, 1 << 20, &parameters(false, Some(20)))
            .unwrap_err();
        assert_eq!(
            (error.status, error.param.as_deref()),
            (400, Some("max_tokens"))
        );
        memory.run(1000, 1 << 20, &parameters(false, None)).unwrap();
        memory
            .run(1000, u32::MAX, &parameters(true, Some(20)))
            .unwrap();
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
        // 125 + 37.5 + 224 + 128 + 512.
        assert_eq!(mib, 1026);
    }

    /// Otherwise clients could have the kubelet end a router with all its streams.
    #[test]
    fn the_chart_gives_a_router_more_than_clients_can_make_it_take() {
        let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/baton/values.yaml");
        let values = std::fs::read_to_string(chart).unwrap();
        let (_, router) = values.split_once("\nrouter:\n").unwrap();
        let (_, limit) = router.split_once("limits: {memory: ").unwrap();
        let (gib, _) = limit.split_once("Gi}").unwrap();
        let limit = gib.parse::<usize>().unwrap() << 30;
        let bound = FrontConfig::default().memory_bound();
        assert_eq!(bound >> 20, 4096, "as the values say");
        // What it has without clients: index, models, what it has learnt.
        assert!(limit >= bound + (512 << 20), "{limit} is below {bound}");
    }
}

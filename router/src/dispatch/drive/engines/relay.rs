//! An engine's answer on its way to the client: its bytes as they come, its events whole, its end told.

use std::time::Duration;

use baton_protocol::failure::FailureClass;
use baton_protocol::lifecycle::State;
use bytes::{Bytes, BytesMut};
use tokio::time::Instant;

use super::super::{Drive, Ending};
use super::{Call, OnEngines, Stop};
use crate::dispatch::failure::Failure;
use crate::dispatch::http::answer::{Said, event, said};
use crate::dispatch::http::engine::head;
use crate::dispatch::http::frames::Frames;
use crate::dispatch::http::pool::Answer;
use crate::dispatch::http::verdict::{Asked, Verdict, of_refusal, of_words};
use crate::dispatch::progress::Party;
use crate::run::{EngineHead, EngineRefusal, PIECE, RunEvent};

/// Bytes of an error's body: more says no more.
pub(super) const LONGEST_REFUSAL: usize = 1 << 20;
/// So much of a stream waits for its first content; with room to grow it is within a request's memory (`front::memory`).
const LONGEST_OPENING: usize = 128 << 10;
/// Of an answer in one piece so many bytes are kept to read its counts from. Longer ones are passed on uncounted.
pub(super) const COUNTED: usize = 4 << 20;

/// What was heard of an answer so far.
#[derive(Default)]
struct Heard {
    done: bool,
    finish: Option<String>,
    failed: Option<String>,
}

impl Drive {
    /// Passes an answer on to its end.
    pub(super) async fn relay(
        &mut self,
        mut answer: Answer,
        call: Call<'_>,
        attempt: &mut OnEngines,
    ) -> Result<Ending, Stop> {
        let head = head(&answer.head);
        if !head.status.is_success() {
            return Err(self.refused(answer, head, call, attempt.limits.token).await);
        }
        if head.streams() {
            return self.relay_events(&mut answer, head, call, attempt).await;
        }
        self.relay_whole(&mut answer, head, call, attempt).await
    }

    /// What an engine says instead of an answer.
    pub(super) async fn refused(
        &self,
        mut answer: Answer,
        head: EngineHead,
        call: Call<'_>,
        limit: Duration,
    ) -> Stop {
        let limit = Some(limit);
        let body = match self.within(limit, answer.whole(LONGEST_REFUSAL)).await {
            Ok(Ok(body)) => body,
            Ok(Err(why)) => {
                let worker = &call.engine.worker;
                return Stop::Failed(Failure::lost(worker, &why, FailureClass::DecodeLost));
            }
            Err(stopped) => return self.stopped(stopped, call),
        };
        let refusal = EngineRefusal { head, body };
        match of_refusal(&call.engine.worker, call.asked, refusal) {
            Verdict::Failed(failure) => Stop::Failed(failure),
            Verdict::AskWhole(failure) => Stop::AskWhole(failure),
        }
    }

    async fn relay_whole(
        &mut self,
        answer: &mut Answer,
        head: EngineHead,
        call: Call<'_>,
        attempt: &mut OnEngines,
    ) -> Result<Ending, Stop> {
        let limit = Some(attempt.limits.token);
        let mut kept = Vec::new();
        let mut head = Some(head);
        while let Some(bytes) = self
            .within_both(attempt, call, limit, answer.next())
            .await?
        {
            let bytes = bytes.map_err(|error| broke_off(call, &error.to_string()))?;
            if kept.len() + bytes.len() <= COUNTED {
                kept.extend_from_slice(&bytes);
            }
            self.pass_on(head.take(), bytes, attempt).await?;
        }
        // An answer without a body is one, too.
        self.pass_on(head.take(), Bytes::new(), attempt).await?;
        let said = said(&kept);
        self.answered(call.party, attempt);
        if let Some(counts) = said.counts {
            self.progress.counted(counts);
        }
        Ok(Ending::Answered(said.finish))
    }

    async fn relay_events(
        &mut self,
        answer: &mut Answer,
        head: EngineHead,
        mut call: Call<'_>,
        attempt: &mut OnEngines,
    ) -> Result<Ending, Stop> {
        let asked = call.asked;
        let mut frames = Frames::default();
        let mut heard = Heard::default();
        let mut head = Some(head);
        // What opens an answer and is none yet: a chat's role, a comment. Engines send it although they are about to say that they have
        // failed, so it waits for what follows it.
        let mut opening = BytesMut::new();
        let limits = attempt.limits;
        let mut first_until = Instant::now() + first_event(asked, &limits);
        loop {
            if let Some(computed) = attempt.computed.take() {
                // The prompt was computed after the head had come.
                first_until = first_until.max(computed + first_event(asked, &limits));
            }
            let limit = if attempt.begun.is_some() {
                limits.token
            } else if attempt.awaits_prompt() {
                first_event(asked, &limits)
            } else {
                first_until.saturating_duration_since(Instant::now())
            };
            let next = self
                .within_both(attempt, call, Some(limit), answer.next())
                .await?;
            let Some(bytes) = next else {
                break;
            };
            let bytes = bytes.map_err(|error| broke_off(call, &error.to_string()))?;
            let (mut ready, events) = frames
                .push(&bytes)
                .map_err(|error| broke_off(call, &error.to_string()))?;
            if ready.is_empty() {
                continue;
            }
            let said: Vec<Said> = events.iter().map(event).collect();
            if attempt.begun.is_none() {
                let first = said.iter().find(|said| said.says_something());
                if let Some(words) = first.and_then(|first| first.error.clone()) {
                    // The client has seen nothing: another attempt may do better.
                    return Err(Stop::Failed(of_words(&call.engine.worker, asked, &words)));
                }
                if said.iter().any(|said| said.choice) {
                    // It computes the answer, so it has the KV: what becomes of it now says nothing of the way that the KV came, unless
                    // the engine says so in words. A role comes with the first token, and a model may think unseen after it.
                    call.asked = Asked::Whole;
                    first_until = first_until.max(Instant::now() + limits.token);
                }
                if first.is_none() && opening.len() + ready.len() <= LONGEST_OPENING {
                    opening.extend_from_slice(&ready);
                    ready = Bytes::new();
                }
            }
            self.hear(&said, &mut heard, call.party, attempt);
            if !ready.is_empty() {
                let opened = std::mem::take(&mut opening).freeze();
                self.pass_on(head.take(), opened, attempt).await?;
                self.pass_on(None, ready, attempt).await?;
            }
        }
        let rest = frames.rest();
        let worker = &call.engine.worker;
        if let Some(words) = heard.failed {
            let mut failure = of_words(worker, Asked::Whole, &words);
            failure.told = true;
            return Err(Stop::Failed(failure));
        }
        if !rest.is_empty()
            || !(heard.done || heard.finish.is_some() || self.has_events_of_its_own())
        {
            return Err(broke_off(call, "it ended before its last event"));
        }
        // An answer of another protocol may have nothing that is known here to be one.
        self.pass_on(head.take(), opening.freeze(), attempt).await?;
        self.answered(call.party, attempt);
        Ok(Ending::Answered(heard.finish))
    }

    /// Protocols other than OpenAI's older two name their events, of which not each is a token, and end their streams each in its own
    /// way.
    pub(in crate::dispatch) fn has_events_of_its_own(&self) -> bool {
        let path = self.request.forward.as_ref().map(|forward| forward.path);
        !matches!(path, Some("/v1/chat/completions" | "/v1/completions"))
    }

    fn hear(&mut self, said: &[Said], heard: &mut Heard, party: &Party, attempt: &mut OnEngines) {
        let pieces = said.iter().filter(|said| said.content).count();
        if pieces > 0 {
            self.answered(party, attempt);
            let pieces = u32::try_from(pieces).unwrap_or(u32::MAX);
            let now = self.shared.clock.now();
            self.progress.pass_on(pieces, party, now);
        }
        for said in said {
            heard.done |= said.done;
            heard.finish = said.finish.clone().or(heard.finish.take());
            heard.failed = said.error.clone().or(heard.failed.take());
            if let Some(counts) = said.counts {
                self.progress.counted(counts);
            }
        }
    }

    /// There is something of an answer: whatever must have come before it has.
    fn answered(&mut self, party: &Party, attempt: &mut OnEngines) {
        if self.progress.heard_of(State::DecodeStarted) {
            return;
        }
        if let Some(source) = attempt.task.source().cloned() {
            self.infer(
                &[
                    State::PrefillStarted,
                    State::PrefillCompleted,
                    State::KvPublished,
                ],
                &source,
            );
            self.infer(
                &[State::KvTransferStarted, State::KvTransferCompleted],
                party,
            );
            if let Some(fetch) = &self.progress.actual.fetch {
                fetch.over();
            }
            if let Some((link, _)) = &attempt.link {
                self.progress.actual.transport = Some(link.transport.clone());
            }
            self.tell_link_worked(attempt);
        } else {
            self.infer(&[State::PrefillStarted, State::PrefillCompleted], party);
        }
        self.infer(&[State::DecodeStarted], party);
    }

    async fn pass_on(
        &mut self,
        head: Option<EngineHead>,
        bytes: Bytes,
        attempt: &mut OnEngines,
    ) -> Result<(), Stop> {
        let head = head.map(RunEvent::Answer);
        let starts = (0..bytes.len()).step_by(PIECE);
        let pieces = starts.map(|start| bytes.slice(start..bytes.len().min(start + PIECE)));
        for event in head.into_iter().chain(pieces.map(RunEvent::Bytes)) {
            attempt.begun.get_or_insert_with(Instant::now);
            self.deliver(event).await.map_err(Stop::Run)?;
        }
        Ok(())
    }
}

/// The longest wait for the first event, from the head on.
pub(super) fn first_event(asked: Asked, limits: &crate::dispatch::attempt::Limits) -> Duration {
    match asked {
        Asked::Whole | Asked::Prefill | Asked::TiedPrefill => {
            limits.reserve + limits.prefill_start + limits.prefill + limits.decode_start
        }
        Asked::TiedDecode => {
            limits.reserve
                + limits.prefill_start
                + limits.prefill
                + limits.transfer
                + limits.decode_start
        }
        Asked::Decode => limits.reserve + limits.transfer + limits.decode_start,
    }
}

fn broke_off(call: Call<'_>, why: &str) -> Stop {
    let worker = &call.engine.worker;
    Stop::Failed(match call.asked {
        // Before anything of the answer was here; after that the class makes no difference.
        Asked::Decode | Asked::TiedDecode => crate::dispatch::http::verdict::handoff(
            worker,
            baton_protocol::failure::HandoffFailure::SourceLost,
            &format!("worker {worker}: {why}"),
        ),
        Asked::Whole | Asked::Prefill | Asked::TiedPrefill => {
            Failure::lost(worker, why, FailureClass::DecodeLost)
        }
    })
}

//! One attempt: messages between its state machine and its workers, under deadlines, until it ends.

use std::time::Duration;

use baton_protocol::failure::{FailureClass, HandoffFailure};
use baton_protocol::lifecycle::{Plan, State};
use baton_protocol::wire::{self, decode_request};
use futures::FutureExt as _;
use futures::future::join_all;
use tokio::time::sleep_until;
use tracing::{Span, debug, info, info_span};

use super::prepare::{Clients, Prepared, Reached};
use super::{AttemptEnding, Drive, Ending, overdue};
use crate::dispatch::attempt::{Attempt, Command, End};
use crate::dispatch::decide::Next;
use crate::dispatch::failure::Failure;
use crate::dispatch::held::Held;
use crate::dispatch::legs::{Cancelled, DecodeLeg, PrefillLeg, cancel, next};
use crate::learning::{LinkUse, Moved};
use crate::metrics::TransferLabels;
use crate::run::RunEvent;
use crate::trace::Leg;

/// How long the next attempt waits for the cancellation of the last one: many round trips of a live worker.
const CANCELLED_WITHIN: Duration = Duration::from_millis(250);

/// An attempt under way.
struct Performance {
    attempt: Attempt,
    held: Held,
    clients: Clients,
    link: Option<(LinkUse, String)>,
    decode: Option<DecodeLeg>,
    prefill: Option<PrefillLeg>,
    opened_prefill: bool,
    /// While the reader reads.
    transfer: Option<Span>,
}

impl Drive {
    pub(super) async fn perform(&mut self, prepared: Prepared) -> AttemptEnding {
        let (attempt, held, clients, link) = self.begin(prepared);
        let decode = clients.open_decode(self, attempt.task());
        let mut performance = Performance {
            attempt,
            held,
            clients,
            link,
            decode: Some(decode),
            prefill: None,
            opened_prefill: false,
            transfer: None,
        };
        let ending = self.until_attempt_ends(&mut performance).await;
        self.trace.attempt_ended(
            self.shared.clock.now(),
            ending.failure(),
            &self.progress.actual,
        );
        let remote = performance.attempt.task().plan() == Plan::Remote;
        if let (true, AttemptEnding::Failed(failure) | AttemptEnding::Decided(failure, _)) =
            (remote, &ending)
        {
            self.left_remote = Some(failure.cause);
        }
        if let AttemptEnding::Failed(failure) = &ending
            && failure.class == FailureClass::NoWorker
            && performance.held.recompute_refused()
        {
            // Nothing was begun with what the budget granted: the next worker's is asked.
            self.recompute = true;
        }
        self.clean_up(performance, &ending).await;
        ending
    }

    async fn until_attempt_ends(&mut self, performance: &mut Performance) -> AttemptEnding {
        let mut stop_open = true;
        loop {
            while let Some(command) = performance.attempt.next_command() {
                if let Some(ending) = self.execute(command, performance).await {
                    return ending;
                }
            }
            self.count_states();
            if self.hears(performance) {
                continue;
            }
            let until = performance.attempt.deadline();
            let until = until.map_or(self.deadline, |until| until.min(self.deadline));
            let until = self.instant(until);
            let Performance {
                attempt,
                decode,
                prefill,
                ..
            } = performance;
            tokio::select! {
                biased;
                // First: a front that found a stop string has its answer, and may be gone already.
                counted = &mut self.sink.stop, if !self.told && stop_open => {
                    if let Some(ending) = stopped(counted.ok(), &mut stop_open) {
                        return ending;
                    }
                }
                () = self.sink.client_gone.cancelled(), if !self.told => {
                    return AttemptEnding::Run(Ending::ClientGone);
                }
                event = next(prefill) => {
                    let now = self.shared.clock.now();
                    match event {
                        Ok(event) => attempt.on_prefill(event, now, &mut self.progress),
                        Err(end) => attempt.on_prefill_end(&end, now, &mut self.progress),
                    }
                }
                event = next(decode) => {
                    let now = self.shared.clock.now();
                    attempt.on_decode_leg(event, now, &mut self.progress);
                }
                () = sleep_until(until) => {
                    let now = self.shared.clock.now();
                    if now >= self.deadline {
                        return AttemptEnding::Failed(overdue());
                    }
                    attempt.on_timer(now, &mut self.progress);
                }
            }
        }
    }

    /// Takes what the Decode stream has brought already. Tokens come several at a time, and a timer and a watch on the client for
    /// each would cost more than the token. False: there is something else to look at, a stop string that was found among it, or to be
    /// waited for.
    fn hears(&mut self, performance: &mut Performance) -> bool {
        let now = self.shared.clock.now();
        let ended = self.sink.client_gone.is_cancelled() || !self.sink.stop.is_empty();
        let ended = ended && !self.told;
        if ended || now >= self.deadline || performance.prefill.is_some() {
            return false;
        }
        let Some(event) = next(&mut performance.decode).now_or_never() else {
            return false;
        };
        let attempt = &mut performance.attempt;
        attempt.on_decode_leg(event, now, &mut self.progress);
        true
    }

    /// Does what the attempt asks for; says how it ended, if it did.
    async fn execute(
        &mut self,
        command: Command,
        performance: &mut Performance,
    ) -> Option<AttemptEnding> {
        match command {
            Command::OpenPrefill { skip_blocks } => {
                performance.opened_prefill = true;
                self.trace.prefill_opened(self.shared.clock.now());
                let task = performance.attempt.task();
                performance.prefill = performance.clients.open_prefill(self, task, skip_blocks);
            }
            Command::DropPrefill => {
                performance.prefill = None;
                if let Some(source) = performance.clients.prefill.clone() {
                    self.cancel_operation(source);
                }
            }
            Command::ToDecode(mut message) => {
                if let decode_request::Message::Recompute(recompute) = &mut message {
                    recompute.traceparent =
                        self.trace.traceparent(self.progress.attempt(), Leg::Decode);
                }
                if let Some(leg) = &performance.decode
                    && !leg.send(message)
                {
                    debug!("the Decode stream takes nothing any more");
                }
            }
            Command::Deliver(token) => {
                let event = RunEvent::Token {
                    id: token.id,
                    logprobs: token.logprobs,
                };
                if let Err(ending) = self.deliver(event).await {
                    return Some(AttemptEnding::Run(ending));
                }
            }
            Command::Answered(reason) => self.tell(&Ending::Finished(reason)),
            Command::Admitted { party, admission } => {
                performance
                    .held
                    .admitted(&party.worker, admission.load_sequence);
            }
            Command::Transferring(transport) => {
                performance.transfer = Some(info_span!("transfer", transport));
            }
            Command::Transferred(done) => self.transferred(&done, performance),
            Command::HandoffFailed(failure) => return self.handoff_failed(failure, performance),
            Command::End(End::Finished(reason)) => {
                return Some(AttemptEnding::Run(Ending::Finished(reason)));
            }
            Command::End(End::Failed(failure)) => return Some(AttemptEnding::Failed(failure)),
        }
        None
    }

    fn transferred(&self, done: &wire::TransferCompleted, performance: &mut Performance) {
        performance.held.moved();
        performance.transfer = None;
        let Some((link, level)) = &performance.link else {
            return;
        };
        let moved = Moved {
            bytes: done.bytes,
            blocks: done.blocks,
            last_blocks: performance.attempt.last_blocks(),
            exposed_milliseconds: done.exposed_milliseconds,
            synchronization_milliseconds: done.synchronization_milliseconds,
        };
        // The worker may have taken another transport than the plan was costed with.
        let used = LinkUse {
            transport: done.transport.clone(),
            ..link.clone()
        };
        let now = self.shared.clock.now();
        let policy = &self.request.policy.policy;
        let pass = performance.held.pass_for(&used);
        self.shared.learning.moved(&used, moved, pass, policy, now);
        self.shared.workers.learnt_more();
        let labels = TransferLabels {
            transport: done.transport.clone(),
            level: level.clone(),
        };
        let metrics = &self.shared.metrics;
        metrics
            .transfer_bytes
            .get_or_create(&labels)
            .inc_by(done.bytes);
        metrics
            .transfer_duration
            .get_or_create(&labels)
            .observe(done.total_milliseconds / 1_000.0);
    }

    fn handoff_failed(
        &mut self,
        failure: Failure,
        performance: &mut Performance,
    ) -> Option<AttemptEnding> {
        performance.held.moved();
        performance.transfer = None;
        let now = self.shared.clock.now();
        if let (Some((link, _)), true) = (&performance.link, speaks_against_link(&failure)) {
            let policy = &self.request.policy.policy;
            // The worker may have taken another transport than the plan was costed with.
            let transport = self.progress.actual.transport.as_ref();
            let used = LinkUse {
                transport: transport.unwrap_or(&link.transport).clone(),
                ..link.clone()
            };
            let pass = performance.held.pass_for(&used);
            let learning = &self.shared.learning;
            learning.transfer_failed(&used, pass, policy, now);
            self.shared.workers.learnt_more();
        }
        performance.held.give_back_pass();
        let task = performance.attempt.task();
        if task.plan() == Plan::Local {
            return Some(AttemptEnding::Failed(failure));
        }
        let worker = task.target().worker.clone();
        let open = performance.decode.is_some();
        match self.decide_handoff(&failure, &worker, open, &mut performance.held) {
            Next::RecomputeInPlace => {
                info!(cause = failure.cause, %worker, "{}; it is recomputed there", failure.message);
                self.fell_back(failure.cause, now);
                self.trace
                    .attempt_ended(now, Some(&failure), &self.progress.actual);
                performance.attempt.recompute(now, &mut self.progress);
                self.trace
                    .attempt_began(self.progress.attempt(), performance.attempt.task());
                None
            }
            next => Some(AttemptEnding::Decided(failure, next)),
        }
    }

    /// Ends what the workers still do for the attempt.
    async fn clean_up(&self, performance: Performance, ending: &AttemptEnding) {
        let Performance {
            held,
            clients,
            decode,
            prefill,
            opened_prefill,
            ..
        } = performance;
        // Dropping a stream ends its operation; the cancellation also ends leases, and reaches a worker behind a lost stream.
        drop((decode, prefill, held));
        let source = clients.prefill.filter(|_| opened_prefill);
        if matches!(ending, AttemptEnding::Run(Ending::Finished(_))) {
            // An answer that was over before its KV was moved, or a seal that was not waited for, leaves a lease that nobody will
            // read.
            let read = self.progress.has(State::KvTransferCompleted);
            if let (Some(source), false) = (source, read) {
                self.cancel_operation(source);
            }
            return;
        }
        let again = !matches!(ending, AttemptEnding::Run(_));
        let cancels = [clients.decode].into_iter().chain(source).map(|reached| {
            let cancelled = if again {
                Cancelled::Operation(reached.operation)
            } else {
                Cancelled::Run
            };
            let cancel = cancel(reached.client, self.run.clone(), cancelled);
            self.shared.tasks.spawn(cancel)
        });
        let cancels = join_all(cancels.collect::<Vec<_>>());
        // The next attempt finds free what this one held, but a dead worker must not hold it up.
        if again
            && tokio::time::timeout(CANCELLED_WITHIN, cancels)
                .await
                .is_err()
        {
            debug!("a cancellation is not answered yet");
        }
    }

    /// Cancels what one worker does for the attempt. The run goes on, or has its answer: nobody waits for it.
    fn cancel_operation(&self, reached: Reached) {
        let cancelled = Cancelled::Operation(reached.operation);
        let cancel = cancel(reached.client, self.run.clone(), cancelled);
        self.shared.tasks.spawn(cancel);
    }
}

/// A stop string was found after so many tokens. `None`: the handle is being dropped, so the client is gone and finds none any more.
fn stopped(counted: Option<u32>, open: &mut bool) -> Option<AttemptEnding> {
    *open = counted.is_some();
    counted.map(|counted| AttemptEnding::Run(Ending::Stopped(counted)))
}

/// Failures that say something about the way, not about what was to be read.
pub(super) fn speaks_against_link(failure: &Failure) -> bool {
    [
        HandoffFailure::ChecksumMismatch,
        HandoffFailure::Partial,
        HandoffFailure::Timeout,
        HandoffFailure::SourceLost,
        HandoffFailure::ProtocolError,
        HandoffFailure::EngineFailed,
    ]
    .iter()
    .any(|cause| cause.word() == failure.cause)
}

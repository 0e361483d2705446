//! Driving a run: place, try a plan, decide about its failure, until the client has its answer or is told why not.
//!
//! `prepare` turns a placement into what an attempt needs; `perform` moves messages between the attempt and its workers; `client` tells
//! the client.

mod client;
mod engines;
mod perform;
mod prepare;

use std::sync::Arc;
use std::time::Duration;

use baton_placement::place::Outcome;
use baton_protocol::failure::{Action, FailureClass};
use baton_protocol::ids::{Incarnation, RunId, WorkerId};
use baton_protocol::wire;
use tokio::time::{Instant, sleep_until};
use tracing::{Instrument, debug, info, info_span, warn};

use super::Shared;
use super::decide::{Allowed, Next, Spent, decide};
use super::failure::Failure;
use super::fetched;
use super::held::Held;
use super::planning::{Circumstances, Placed, is_final, no_plan, place_run, workers_up};
use super::progress::{Fallback, Progress};
use crate::clock::Moment;
use crate::metrics::{CauseLabels, ModelLabels, StateLabels};
use crate::records::build::Material;
use crate::run::{RunRequest, RunSink};
use crate::trace::{RunTrace, Search};
use prepare::Prepared;

/// Between two looks at a fleet that has no prefill worker for a run that may wait for one.
const WAIT_FOR_PREFILL: Duration = Duration::from_millis(20);
/// How often a run looks again at once when what was chosen is gone as it is taken. Each look is at a newer picture, so one is
/// enough but for a race; a run that loses more than this backs off like one that finds nobody.
const AGAIN: u32 = 8;
/// Later decisions that a record keeps: more than the policy's replans and the resumes allow. Only a fleet that refuses again and
/// again makes more.
const LATER_DECISIONS: usize = 16;

/// How a run ended.
#[derive(Clone, Debug)]
pub(super) enum Ending {
    Finished(wire::FinishReason),
    /// An engine's answer was passed on to its end; its own word for why it ended.
    Answered(Option<String>),
    /// The front found a stop string after so many tokens.
    Stopped(u32),
    ClientGone,
    Failed(Failure),
}

/// How an attempt ended.
enum AttemptEnding {
    /// With the run.
    Run(Ending),
    Failed(Failure),
    /// A hand-off failed and is not recomputed in place; this was decided instead.
    Decided(Failure, Next),
}

impl AttemptEnding {
    fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Run(Ending::Failed(failure))
            | Self::Failed(failure)
            | Self::Decided(failure, _) => Some(failure),
            Self::Run(_) => None,
        }
    }
}

/// Why there is no plan to try now.
enum NoPlan {
    /// Look again at once: another run took what was chosen.
    Again,
    /// The policy lets the run wait for a prefill worker.
    Wait,
    /// Another moment may help.
    Search(Failure),
    /// Nothing will.
    Final(Failure),
}

/// A decision after the first, and the attempt that it was made for.
#[derive(Clone, Debug)]
pub(super) struct Later {
    pub(super) attempt: u32,
    pub(super) placed: Placed,
}

/// One run.
pub(super) struct Drive {
    pub(super) shared: Arc<Shared>,
    pub(super) request: RunRequest,
    pub(super) run: RunId,
    pub(super) progress: Progress,
    /// The first decision that chose a plan; until then the last that chose none.
    pub(super) placed: Option<Placed>,
    /// Decisions of later attempts, oldest first.
    pub(super) later: Vec<Later>,
    /// States of the history that metrics have counted.
    counted: usize,
    /// The last decision, where it chose no plan and `placed` is another one.
    unplaced: Option<Placed>,
    sink: RunSink,
    told: bool,
    spent: Spent,
    excluded: Vec<WorkerId>,
    /// Workers that are not what their cards said, with the processes of those cards: excluded until another card is read.
    changed: Vec<(WorkerId, Incarnation)>,
    /// From now on only plans on one worker.
    whole: bool,
    /// The next attempt is a fallback: it has to fit the budget of its worker.
    recompute: bool,
    deadline: Moment,
    /// Cause of the remote attempt that failed last.
    left_remote: Option<&'static str>,
    searching_since: Moment,
    pub(super) trace: RunTrace,
}

/// Runs a request to its end. Owned by the dispatcher's task tracker.
pub(super) async fn run(shared: Arc<Shared>, request: RunRequest, sink: RunSink, run: RunId) {
    let span = info_span!("accept", %run, request_id = request.request_id);
    let labels = ModelLabels {
        model: request.policy.model.clone(),
    };
    let counted = shared.metrics.in_flight(&labels);
    let material = Box::pin(Drive::new(shared.clone(), request, sink, run).until_end())
        .instrument(span)
        .await;
    drop(counted);
    fetched::keep(&shared, material).await;
}

impl Drive {
    fn new(shared: Arc<Shared>, request: RunRequest, sink: RunSink, run: RunId) -> Self {
        let now = shared.clock.now();
        let policy = &request.policy.policy;
        shared.learning.run_began(policy, now);
        let accepted = shared.clock.at(request.received);
        let trace = RunTrace::begin(&shared.tracer, request.traceparent, &run.0);
        let total = Duration::try_from_secs_f64(policy.timeouts.total_seconds)
            .unwrap_or(Duration::from_secs(3_600));
        let prompt_tokens = request.prompt_tokens();
        Self {
            progress: Progress::new(prompt_tokens, accepted),
            shared,
            request,
            run,
            placed: None,
            later: Vec::new(),
            counted: 0,
            unplaced: None,
            sink,
            told: false,
            spent: Spent::default(),
            excluded: Vec::new(),
            changed: Vec::new(),
            whole: false,
            recompute: false,
            deadline: accepted.plus(total),
            left_remote: None,
            searching_since: now,
            trace,
        }
    }

    async fn until_end(mut self) -> Option<Material> {
        let ending = self.try_plans().await;
        if let Some(placed) = self.unplaced.take() {
            self.decided_later(placed);
        }
        self.tell(&ending);
        self.conclude(&ending)
    }

    async fn try_plans(&mut self) -> Ending {
        let mut again = 0;
        loop {
            self.count_states();
            if self.sink.client_gone.is_cancelled() {
                return self.gone();
            }
            let (failure, next) = match self.place() {
                Ok(prepared) => {
                    again = 0;
                    let ending = match prepared.called.clone() {
                        Some(called) => self.perform_on_engines(prepared, called).await,
                        None => self.perform(prepared).await,
                    };
                    self.searching_since = self.shared.clock.now();
                    // A refusal is part of the search; after anything else the next one has its patience to itself.
                    if !matches!(&ending, AttemptEnding::Failed(failure) if failure.class.action() == Action::BackOff)
                    {
                        self.spent.search_ended();
                    }
                    match ending {
                        AttemptEnding::Run(ending) => return ending,
                        AttemptEnding::Failed(failure) => {
                            let next = self.decide(&failure);
                            (failure, next)
                        }
                        AttemptEnding::Decided(failure, next) => (failure, next),
                    }
                }
                Err(NoPlan::Again) if again < AGAIN => {
                    again += 1;
                    tokio::task::yield_now().await;
                    continue;
                }
                Err(NoPlan::Again) => {
                    again = 0;
                    let message = "other runs took what was chosen, again and again";
                    let failure = Failure::new(FailureClass::NoWorker, message);
                    let next = self.decide(&failure);
                    (failure, next)
                }
                Err(NoPlan::Wait) => match self.wait(WAIT_FOR_PREFILL).await {
                    Some(ending) => return ending,
                    None => {
                        // Whoever failed may be back.
                        self.excluded.clear();
                        continue;
                    }
                },
                Err(NoPlan::Final(failure)) => return Ending::Failed(self.spent.told(failure)),
                Err(NoPlan::Search(failure)) => {
                    let next = self.decide(&failure);
                    (failure, next)
                }
            };
            if let Some(reason) = self.complete_answer() {
                info!(class = %failure.class, cause = failure.cause, "after the last token: {}", failure.message);
                return Ending::Finished(reason);
            }
            if let Some(ending) = self.stopped_by_front() {
                return ending;
            }
            if let Some(ending) = self.follow(failure, next).await {
                return ending;
            }
        }
    }

    /// The client has the whole answer, whatever became of the worker before it could say so. To go on from the last token would be to
    /// say what the model has not said.
    fn complete_answer(&self) -> Option<wire::FinishReason> {
        let all = !self.progress.sent().is_empty() && self.remaining_tokens() == 0;
        self.progress
            .ended()
            .or(all.then_some(wire::FinishReason::Length))
    }

    /// Does what was decided about a failure. `None`: place again.
    async fn follow(&mut self, failure: Failure, next: Next) -> Option<Ending> {
        let attempt = self.progress.attempt();
        info!(attempt, class = %failure.class, cause = failure.cause, ?next, "{}", failure.message);
        if failure.class == FailureClass::Incompatible
            && let Some(worker) = &failure.worker
        {
            self.not_as_its_card(worker);
        }
        match next {
            Next::Replan => self.excluded.extend(failure.worker),
            Next::RecomputeElsewhere => {
                self.excluded.extend(failure.worker);
                self.whole = true;
                self.recompute = true;
            }
            // Another worker may take at once what this one refused.
            Next::BackOff(_) if failure.worker.is_some() => self.excluded.extend(failure.worker),
            Next::BackOff(wait) => {
                if let Some(ending) = self.wait(wait).await {
                    return Some(ending);
                }
                // Whoever failed may be back.
                self.excluded.clear();
            }
            Next::RecomputeInPlace | Next::GiveUp => {
                return Some(Ending::Failed(self.spent.told(failure.last())));
            }
        }
        None
    }

    fn not_as_its_card(&mut self, worker: &WorkerId) {
        let view = self.shared.workers.view();
        let member = view.members.iter().find(|member| member.id == *worker);
        if let Some(member) = member {
            self.changed.push((worker.clone(), member.card.incarnation));
            self.shared.workers.doubt_card(worker);
        }
    }

    /// Asks placement and prepares what it chose.
    fn place(&mut self) -> Result<Prepared, NoPlan> {
        let circumstances = Circumstances {
            sent: self.progress.sent(),
            excluded: &self.excluded,
            changed: &self.changed,
            whole: self.whole,
            searching_since: self.searching_since,
        };
        let placed = place_run(&self.shared, &self.request, circumstances);
        self.trace.searched(|| Search {
            since: self.searching_since,
            reason: placed.decision.reason.word(),
            candidates: placed.decision.candidates.len(),
            estimate: placed
                .decision
                .chosen()
                .map(|chosen| (chosen.mean, chosen.upper)),
        });
        let decision = &placed.decision;
        debug!(reason = ?decision.reason, "{}", decision.explanation);
        let result = match decision.outcome {
            Outcome::Run(plan) => self.prepare(plan, &placed),
            Outcome::Wait { .. } => Err(NoPlan::Wait),
            Outcome::Reject { .. } => {
                let failure = no_plan(&placed, &self.request.policy);
                Err(if is_final(decision.reason) {
                    NoPlan::Final(failure)
                } else {
                    NoPlan::Search(failure)
                })
            }
        };
        if !matches!(result, Err(NoPlan::Again)) {
            self.remember(placed, result.is_ok());
        }
        result
    }

    /// Keeps a decision for the record. `begins`: an attempt follows from it.
    fn remember(&mut self, placed: Placed, begins: bool) {
        let chosen = |placed: &Placed| placed.decision.chosen.is_some();
        if !self.placed.as_ref().is_some_and(chosen) {
            self.placed = Some(placed);
        } else if begins {
            self.unplaced = None;
            self.decided_later(placed);
        } else {
            self.unplaced = Some(placed);
        }
    }

    fn decided_later(&mut self, placed: Placed) {
        if self.later.len() < LATER_DECISIONS {
            let attempt = self.progress.attempt() + 1;
            self.later.push(Later { attempt, placed });
        }
    }

    fn remaining_tokens(&self) -> u32 {
        let asked = self.request.stopping.max_tokens;
        asked.saturating_sub(self.progress.sent_tokens())
    }

    /// What is done about a failed attempt, or about finding no plan.
    fn decide(&mut self, failure: &Failure) -> Next {
        let view = self.shared.workers.view();
        let handle = &self.request.policy;
        let allowed = Allowed {
            any_worker: workers_up(&view, handle).0 > 0,
            // Asked for when the worker is chosen.
            budget: true,
            ..Allowed::under(&handle.policy, self.deadline)
        };
        let now = self.shared.clock.now();
        decide(failure, &mut self.spent, allowed, now)
    }

    /// What is done about a failed hand-off, while the Decode stream to `worker` may still be open. Asks that worker's budget.
    fn decide_handoff(
        &mut self,
        failure: &Failure,
        worker: &WorkerId,
        open: bool,
        held: &mut Held,
    ) -> Next {
        let now = self.shared.clock.now();
        let policy = self.request.policy.policy.clone();
        let granted = open
            && match self.shared.learning.recompute(worker, &policy, now) {
                Ok(()) => true,
                Err(refusal) => {
                    warn!(%worker, "no local recompute: {refusal}");
                    false
                }
            };
        let allowed = Allowed {
            can_recompute_in_place: open,
            budget: granted,
            ..Allowed::under(&policy, self.deadline)
        };
        let next = decide(failure, &mut self.spent, allowed, now);
        if granted && next == Next::RecomputeInPlace {
            held.recomputes(worker.clone());
        } else if granted {
            self.shared.learning.recompute_refused(worker, &policy);
        }
        next
    }

    /// Counts the states that were entered since the last time.
    pub(super) fn count_states(&mut self) {
        let history = self.progress.history();
        for event in &history[self.counted..] {
            let state = event.state.word();
            let states = &self.shared.metrics.run_states;
            states.get_or_create(&StateLabels { state }).inc();
        }
        self.counted = history.len();
    }

    /// The run has left its remote plan.
    fn fell_back(&mut self, cause: &str, now: Moment) {
        let cause = cause.to_owned();
        let labels = CauseLabels {
            cause: cause.clone(),
        };
        self.shared.metrics.fallbacks.get_or_create(&labels).inc();
        self.progress
            .fallback
            .get_or_insert(Fallback { cause, at: now });
    }

    /// Waits, unless the run ends meanwhile.
    async fn wait(&mut self, wait: Duration) -> Option<Ending> {
        let until = self.shared.clock.now().plus(wait).min(self.deadline);
        let until = self.instant(until);
        let stop = &mut self.sink.stop;
        tokio::select! {
            biased;
            // What the client has may be its whole answer.
            Ok(counted) = &mut *stop, if !stop.is_terminated() => return Some(Ending::Stopped(counted)),
            () = self.sink.client_gone.cancelled() => return Some(self.gone()),
            () = sleep_until(until) => {}
        }
        (self.shared.clock.now() >= self.deadline).then(|| Ending::Failed(overdue()))
    }

    fn instant(&self, moment: Moment) -> Instant {
        self.shared.clock.instant(moment)
    }
}

fn overdue() -> Failure {
    Failure::new(
        FailureClass::DeadlineExceeded,
        "the run's total deadline has passed (timeouts.totalSeconds)",
    )
}

//! The end of a run: its terminal state, what was learnt, metrics, one log line, and the material of its record.

use baton_placement::place::Plan;
use baton_placement::record::{PolicyName, RecordHead, RunOutcome, RunStatus};
use baton_protocol::failure::FailureClass;
use baton_protocol::lifecycle::State;
use baton_protocol::wire::FinishReason;
use tracing::{info, warn};

use super::drive::{Drive, Ending, Later};
use super::progress::StateDetail;
use crate::clock::Moment;
use crate::metrics::{DecisionLabels, PlanLabels, RunLabels};
use crate::records::build::{LaterMaterial, Material};
use crate::trace::spans::{self, About};

impl Drive {
    /// What its record is made of, if it has one.
    pub(super) fn conclude(mut self, ending: &Ending) -> Option<Material> {
        let now = self.shared.clock.now();
        self.enter_terminal(ending, now);
        self.count_states();
        let illegal = self.progress.illegal().len() + self.progress.unresolved();
        if illegal > 0 {
            let first = self.progress.illegal().first();
            warn!(
                illegal,
                ?first,
                "workers reported what no run could have done"
            );
            let count = u64::try_from(illegal).unwrap_or(u64::MAX);
            self.shared.metrics.illegal_events.inc_by(count);
        }
        let outcome = self.outcome(ending);
        let plan = self.plan();
        self.measure(ending, &outcome, plan, now);
        info!(
            plan,
            status = ?outcome.status,
            attempts = self.progress.attempt(),
            input = outcome.input_tokens,
            cached = outcome.cached_tokens,
            output = outcome.output_tokens,
            ttft = outcome.ttft_milliseconds,
            "run ended"
        );
        let about = About {
            run: &self.run,
            request: &self.request,
            progress: &self.progress,
            outcome: &outcome,
            failure: match ending {
                Ending::Failed(failure) => Some(failure),
                _ => None,
            },
        };
        self.shared.tracer.put(spans::of_run(&self.trace, about));
        self.material(outcome)
    }

    fn enter_terminal(&mut self, ending: &Ending, now: Moment) {
        let state = match ending {
            Ending::Finished(_) | Ending::Answered(_) | Ending::Stopped(_) => State::Completed,
            Ending::ClientGone => State::Cancelled,
            Ending::Failed(_) => State::Failed,
        };
        // A remote attempt completes itself: its seal may have been waited for.
        if !self.progress.has(state) {
            self.progress.observe(state, now, StateDetail::default());
        }
    }

    fn outcome(&self, ending: &Ending) -> RunOutcome {
        let (status, finish_reason) = match ending {
            Ending::Finished(reason) => (RunStatus::Completed, Some(finish_word(*reason))),
            Ending::Answered(reason) => (RunStatus::Completed, reason.as_deref()),
            Ending::Stopped(_) => (RunStatus::Completed, Some("stop")),
            Ending::ClientGone => (RunStatus::Cancelled, None),
            Ending::Failed(_) if self.progress.attempt() == 0 => (RunStatus::Rejected, None),
            Ending::Failed(_) => (RunStatus::Failed, None),
        };
        let output_tokens = match ending {
            Ending::Stopped(counted) => *counted,
            _ => self.progress.sent_tokens(),
        };
        RunOutcome {
            status,
            ttft_milliseconds: self.progress.ttft_milliseconds(),
            tpot_milliseconds: self.progress.tpot_milliseconds(),
            input_tokens: self.progress.prompt_tokens(),
            cached_tokens: self.progress.cached_tokens(),
            output_tokens,
            finish_reason: finish_reason.map(str::to_owned),
        }
    }

    fn plan(&self) -> &'static str {
        let chosen = self
            .placed
            .as_ref()
            .and_then(|placed| placed.decision.chosen());
        match chosen.map(|candidate| candidate.plan) {
            None => "none",
            Some(Plan::Local { .. }) => "local",
            Some(Plan::Remote { .. }) => "remote",
        }
    }

    fn measure(&self, ending: &Ending, outcome: &RunOutcome, plan: &'static str, now: Moment) {
        let metrics = &self.shared.metrics;
        let handle = &self.request.policy;
        let model = handle.model.clone();
        let labels = RunLabels {
            model: model.clone(),
            plan,
            outcome: match outcome.status {
                RunStatus::Completed => "completed",
                RunStatus::Failed => "failed",
                RunStatus::Cancelled => "cancelled",
                RunStatus::Rejected => "rejected",
            },
        };
        metrics.requests.get_or_create(&labels).inc();
        if let Some(placed) = &self.placed {
            let labels = DecisionLabels {
                policy: handle.name.clone(),
                plan,
                reason: placed.decision.reason.word(),
            };
            metrics.decisions.get_or_create(&labels).inc();
        }
        let labels = PlanLabels { model, plan };
        if let Some(milliseconds) = outcome.ttft_milliseconds {
            metrics
                .time_to_first_token
                .get_or_create(&labels)
                .observe(milliseconds / 1_000.0);
        }
        if let Some(milliseconds) = outcome.tpot_milliseconds {
            metrics
                .time_per_output_token
                .get_or_create(&labels)
                .observe(milliseconds / 1_000.0);
        }
        let duration = now.since(self.progress.accepted());
        metrics
            .request_duration
            .get_or_create(&labels)
            .observe(duration.as_secs_f64());
        match ending {
            Ending::Answered(_) if !self.has_counted_output() => {}
            Ending::Finished(_) | Ending::Answered(_) | Ending::Stopped(_) => {
                let policy = &handle.policy;
                self.shared.learning.output(policy, outcome.output_tokens);
            }
            // An illegal report is counted as what it is; here those that are no state, such as a token out of place.
            Ending::Failed(failure)
                if failure.class == FailureClass::Bug && self.progress.illegal().is_empty() =>
            {
                metrics.illegal_events.inc();
            }
            Ending::Failed(_) | Ending::ClientGone => {}
        }
    }

    /// Whether it is known how many tokens an engine has generated: by its own count, or by the pieces of a stream that has one for
    /// each. What generates nothing (`/tokenize`) says nothing of how long answers are.
    fn has_counted_output(&self) -> bool {
        let forward = self.request.forward.as_deref();
        let by_piece =
            forward.is_some_and(|forward| forward.stream) && !self.has_events_of_its_own();
        self.progress.is_counted() || (by_piece && self.progress.sent_tokens() > 0)
    }

    fn material(self, outcome: RunOutcome) -> Option<Material> {
        let handle = &self.request.policy;
        // A run whose client was gone before it was placed has nothing to record.
        let placed = self.placed?;
        let forward = self.request.forward.as_deref();
        let head = RecordHead {
            run: self.run,
            request_id: self.request.request_id.clone(),
            time: self.progress.accepted().rfc3339(),
            policy: PolicyName {
                name: handle.name.clone(),
                generation: handle.generation,
                digest: handle.digest.clone(),
            },
            model: handle.model.clone(),
            prefix_fingerprint: placed.fingerprint,
            credit: forward.map(|forward| forward.credit),
            unsplittable: forward.and_then(|forward| forward.whole).map(str::to_owned),
        };
        Some(Material {
            head,
            decision: placed.decision,
            fleet: placed.view.fleet.clone(),
            later: self.later.into_iter().map(LaterMaterial::from).collect(),
            policy: handle.policy.clone(),
            progress: self.progress,
            outcome,
        })
    }
}

impl From<Later> for LaterMaterial {
    fn from(later: Later) -> Self {
        Self {
            attempt: later.attempt,
            decision: later.placed.decision,
            fleet: later.placed.view.fleet.clone(),
        }
    }
}

fn finish_word(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Stop | FinishReason::Unspecified => "stop",
    }
}

//! An attempt on engines over HTTP: its legs, under deadlines, until it ends.
//!
//! `relay` passes an answer on; `pull` runs two legs of which the second fetches from the first, `tied` two that meet. `prefill` is the
//! first leg of the former; `beside` is what waits for two at once.

mod beside;
mod prefill;
mod pull;
mod relay;
mod tied;

use std::time::Duration;

use baton_placement::policy::Assurance;
use baton_protocol::card::Split;
use baton_protocol::failure::FailureClass;
use baton_protocol::lifecycle::{self, State};
use baton_protocol::wire::worker_client::WorkerClient;
use bytes::Bytes;
use futures::future::BoxFuture;
use tokio::time::{Instant, sleep_until};
use tonic::transport::Channel;
use tracing::info;

use self::beside::Beside;
use super::prepare::Prepared;
use super::{AttemptEnding, Drive, Ending, overdue};
use crate::clock::Moment;
use crate::dispatch::attempt::{Limits, Task};
use crate::dispatch::decide::Next;
use crate::dispatch::failure::Failure;
use crate::dispatch::held::Held;
use crate::dispatch::http::engine::Engine;
use crate::dispatch::http::pool::{Again, Answer, CallError};
use crate::dispatch::http::verdict::{Asked, of_call};
use crate::dispatch::progress::{Party, StateDetail};
use crate::forward::Forward;
use crate::forward::legs::{self, Leg as Body, NoBody, To};
use crate::learning::{LinkUse, Moved};
use crate::trace::Leg;

/// The engines of an attempt.
#[derive(Clone, Debug)]
pub(super) struct Called {
    pub(super) decode: Engine,
    pub(super) prefill: Option<Engine>,
    /// When the worker that generates is expected to have room for a new request.
    pub(super) room_at: Moment,
}

/// An attempt under way.
struct OnEngines {
    task: Task,
    limits: Limits,
    held: Held,
    link: Option<(LinkUse, String)>,
    called: Called,
    /// How the daemon beside the engine that computes is asked.
    daemon: Option<WorkerClient<Channel>>,
    /// The other leg of two that are under way at once.
    beside: Option<Beside>,
    /// When the prompt was computed, of a leg that was sent before that.
    computed: Option<Instant>,
    /// Since when something of the answer has gone to the client: no other attempt can take over.
    begun: Option<Instant>,
}

/// Why a leg goes no further.
enum Stop {
    /// With the run.
    Run(Ending),
    Failed(Failure),
    /// The request as the client sent it is to be judged by the worker that would generate.
    AskWhole(Failure),
}

/// What came first.
#[derive(Clone, Copy)]
enum Stopped {
    ClientGone,
    /// The leg's own limit.
    Late,
    /// The run's deadline.
    Overdue,
}

/// One leg.
#[derive(Clone, Copy)]
struct Call<'a> {
    engine: &'a Engine,
    party: &'a Party,
    asked: Asked,
    body: Body<'a>,
    /// To the head of its answer.
    limit: Option<Duration>,
}

impl Drive {
    pub(super) async fn perform_on_engines(
        &mut self,
        prepared: Prepared,
        called: Called,
    ) -> AttemptEnding {
        let Prepared {
            task,
            limits,
            held,
            link,
            clients,
            ..
        } = prepared;
        self.begin_history(&task);
        if called
            .prefill
            .as_ref()
            .is_some_and(|source| !source.split.is_verified())
        {
            self.progress.assurance = Assurance::EngineTrusted;
        }
        let mut attempt = OnEngines {
            task,
            limits,
            held,
            link,
            called,
            daemon: clients.prefill.map(|reached| reached.client),
            beside: None,
            computed: None,
            begun: None,
        };
        let ending = self.legs(&mut attempt).await;
        self.trace.attempt_ended(
            self.shared.clock.now(),
            ending.failure(),
            &self.progress.actual,
        );
        let failed = matches!(
            ending,
            AttemptEnding::Failed(_) | AttemptEnding::Decided(..)
        );
        if let (lifecycle::Plan::Remote, true, Some(failure)) =
            (attempt.task.plan(), failed, ending.failure())
        {
            self.left_remote = Some(failure.cause);
        }
        if let AttemptEnding::Failed(failure) = &ending
            && failure.class == FailureClass::NoWorker
            && attempt.held.recompute_refused()
        {
            self.recompute = true;
        }
        ending
    }

    async fn legs(&mut self, attempt: &mut OnEngines) -> AttemptEnding {
        let Some(forward) = self.request.forward.clone() else {
            let message = "a request that was not kept as it came cannot be passed on to an engine";
            return AttemptEnding::Failed(Failure::new(FailureClass::Bug, message));
        };
        let result = match (&attempt.task, &attempt.called.prefill) {
            (Task::Whole { .. }, _) => self.whole(&forward, attempt).await,
            (
                Task::Split {
                    prefill, decode, ..
                },
                Some(source),
            ) => {
                let (source, prefill, decode) = (source.clone(), prefill.clone(), decode.clone());
                match &source.split {
                    Split::NixlPull { lease_milliseconds }
                    | Split::Baton { lease_milliseconds } => {
                        let lease = Duration::from_millis(*lease_milliseconds);
                        let parties = (&prefill, &decode);
                        self.pull(&forward, attempt, &source, parties, lease).await
                    }
                    Split::Bootstrap { host, port } => {
                        let bootstrap = (host.as_str(), *port);
                        let parties = (&prefill, &decode);
                        self.tied(&forward, attempt, &source, parties, bootstrap)
                            .await
                    }
                    Split::None => Err(Stop::Failed(Failure::new(
                        FailureClass::Incompatible,
                        format!("worker {} hands nothing over", source.worker),
                    ))),
                }
            }
            (Task::Split { .. }, None) => Err(Stop::Failed(Failure::new(
                FailureClass::Bug,
                "a remote plan without an engine that computes",
            ))),
        };
        if attempt.awaits_prompt() {
            // The prompt is given up with its lease, and the engine that reads may count that.
            self.excuse_link();
        }
        match result {
            Ok(ending) => AttemptEnding::Run(ending),
            Err(Stop::Run(ending)) => AttemptEnding::Run(ending),
            Err(Stop::Failed(failure)) if attempt.begun.is_some() => {
                AttemptEnding::Run(Ending::Failed(failure))
            }
            Err(Stop::Failed(failure)) => self.engine_failed(failure, &forward, attempt).await,
            Err(Stop::AskWhole(failure)) => {
                info!(
                    cause = failure.cause,
                    "{}; the request is asked whole", failure.message
                );
                self.again_whole(&failure, &forward, attempt).await
            }
        }
    }

    /// The whole request on the worker that generates.
    async fn whole(&mut self, forward: &Forward, attempt: &mut OnEngines) -> Result<Ending, Stop> {
        let limits = attempt.limits;
        let limit = limits.reserve + limits.prefill_start + limits.prefill + limits.decode_start;
        let (engine, party) = (attempt.called.decode.clone(), attempt.task.target().clone());
        let call = Call {
            engine: &engine,
            party: &party,
            asked: Asked::Whole,
            body: Body::Whole,
            // An answer in one piece comes when it is whole.
            limit: forward.stream.then_some(limit),
        };
        let answer = self.call(forward, attempt, call).await?;
        self.relay(answer, call, attempt).await
    }

    /// Sends a leg; resolves with the head of its answer.
    async fn call(
        &self,
        forward: &Forward,
        attempt: &mut OnEngines,
        call: Call<'_>,
    ) -> Result<Answer, Stop> {
        let calling = self.calling(forward, attempt, call)?;
        match self.within(call.limit, calling).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => {
                let worker = &call.engine.worker;
                Err(Stop::Failed(of_call(worker, call.asked, &error)))
            }
            Err(stopped) => Err(self.stopped(stopped, call)),
        }
    }

    /// A leg that is sent when it is first waited for.
    fn calling(
        &self,
        forward: &Forward,
        attempt: &OnEngines,
        call: Call<'_>,
    ) -> Result<BoxFuture<'static, Result<Answer, CallError>>, Stop> {
        let engine = call.engine.clone();
        let operation = call.party.operation.to_string();
        let to = To {
            kind: engine.kind,
            model: (forward.model != engine.model).then_some(engine.model.as_str()),
            operation: &operation,
        };
        let body = legs::body(forward, call.body, to).map_err(|error| {
            let class = match error {
                NoBody::NoObject(_) => FailureClass::Bug,
                NoBody::Unsalted(_) => FailureClass::BadRequest,
            };
            Stop::Failed(Failure::new(class, error.to_string()))
        })?;
        let body = Bytes::from(body);
        let leg = match call.asked {
            Asked::Prefill | Asked::TiedPrefill => Leg::Prefill,
            Asked::Whole | Asked::Decode | Asked::TiedDecode => Leg::Decode,
        };
        let traceparent = self.trace.traceparent(self.progress.attempt(), leg);
        let again = match call.asked {
            Asked::Whole | Asked::Prefill => Again::Allowed,
            Asked::Decode | Asked::TiedPrefill | Asked::TiedDecode => Again::Never,
        };
        self.counted_from_now(attempt, call.party);
        let (engines, path) = (self.shared.engines.clone(), forward.path);
        Ok(Box::pin(async move {
            let request = || engine.request(path, &operation, &traceparent, body.clone());
            engines.call(&engine.address, again, request).await
        }))
    }

    /// Its next load report may have been made before the engine had the request; the one after that counts it.
    fn counted_from_now(&self, attempt: &OnEngines, party: &Party) {
        let last = self.shared.workers.with_tracked(|tracked| {
            let load = tracked.get(&party.worker)?.load?;
            Some(load.load_sequence)
        });
        if let Some(last) = last {
            attempt.held.admitted(&party.worker, last.saturating_add(2));
        }
    }

    /// Waits for something, unless the run or the leg ends before.
    async fn within<T>(
        &self,
        limit: Option<Duration>,
        wanted: impl Future<Output = T>,
    ) -> Result<T, Stopped> {
        let overdue = self.instant(self.deadline);
        let late = limit.map(|limit| Instant::now() + limit);
        let until = late.map_or(overdue, |late| late.min(overdue));
        tokio::select! {
            biased;
            () = self.sink.client_gone.cancelled() => Err(Stopped::ClientGone),
            got = wanted => Ok(got),
            () = sleep_until(until) => Err(if until < overdue { Stopped::Late } else { Stopped::Overdue }),
        }
    }

    fn stopped(&self, stopped: Stopped, call: Call<'_>) -> Stop {
        let worker = &call.party.worker;
        match stopped {
            Stopped::ClientGone => Stop::Run(Ending::ClientGone),
            Stopped::Overdue => Stop::Run(Ending::Failed(overdue())),
            Stopped::Late => Stop::Failed(late(worker, call.asked)),
        }
    }

    /// What follows from a failed attempt of which the client has seen nothing.
    async fn engine_failed(
        &mut self,
        failure: Failure,
        forward: &Forward,
        attempt: &mut OnEngines,
    ) -> AttemptEnding {
        attempt.held.moved();
        if failure.class != FailureClass::HandoffFailed {
            return AttemptEnding::Failed(failure);
        }
        let now = self.shared.clock.now();
        self.tell_link_failed(&failure, attempt);
        let worker = attempt.task.target().worker.clone();
        // An engine takes the request again at any time, whole: but for those that cannot compute a prompt for themselves.
        let prefill = attempt.called.prefill.as_ref();
        let open = !prefill.is_some_and(|source| matches!(source.split, Split::Bootstrap { .. }));
        match self.decide_handoff(&failure, &worker, open, &mut attempt.held) {
            Next::RecomputeInPlace => {
                info!(cause = failure.cause, %worker, "{}; it is recomputed there", failure.message);
                self.fell_back(failure.cause, now);
                self.again_whole(&failure, forward, attempt).await
            }
            next => AttemptEnding::Decided(failure, next),
        }
    }

    /// The next attempt, whole on the worker that was to generate.
    async fn again_whole(
        &mut self,
        failure: &Failure,
        forward: &Forward,
        attempt: &mut OnEngines,
    ) -> AttemptEnding {
        let now = self.shared.clock.now();
        attempt.held.moved();
        attempt.held.give_back_pass();
        // A prompt that is still computed elsewhere is wanted no more.
        attempt.beside = None;
        attempt.computed = None;
        self.trace
            .attempt_ended(now, Some(failure), &self.progress.actual);
        let mut worker = attempt.task.target().clone();
        worker.operation = super::prepare::engine_operation(&self.run, self.progress.attempt() + 1);
        attempt.task = Task::Whole { worker };
        attempt.called.prefill = None;
        let detail = StateDetail {
            operation: None,
            ..StateDetail::of(attempt.task.target())
        };
        self.progress
            .begin(lifecycle::Plan::Local, now, detail.inferred());
        self.trace
            .attempt_began(self.progress.attempt(), &attempt.task);
        match self.whole(forward, attempt).await {
            Ok(ending) | Err(Stop::Run(ending)) => AttemptEnding::Run(ending),
            Err(Stop::Failed(failure) | Stop::AskWhole(failure)) if attempt.begun.is_some() => {
                AttemptEnding::Run(Ending::Failed(failure))
            }
            Err(Stop::Failed(failure) | Stop::AskWhole(failure)) => AttemptEnding::Failed(failure),
        }
    }

    /// The hand-off has worked, and that is all that is known of it.
    fn tell_link_worked(&self, attempt: &mut OnEngines) {
        attempt.held.moved();
        let Some((link, _)) = &attempt.link else {
            return;
        };
        let nothing_measured = Moved {
            bytes: 0,
            blocks: 0,
            last_blocks: 0,
            exposed_milliseconds: 0.0,
            synchronization_milliseconds: 0.0,
        };
        let now = self.shared.clock.now();
        let policy = &self.request.policy.policy;
        let pass = attempt.held.pass_for(link);
        self.shared
            .learning
            .moved(link, nothing_measured, pass, policy, now);
        self.shared.workers.learnt_more();
    }

    fn tell_link_failed(&self, failure: &Failure, attempt: &mut OnEngines) {
        if let (Some((link, _)), true) = (
            attempt.link.clone(),
            super::perform::speaks_against_link(failure),
        ) {
            let policy = &self.request.policy.policy;
            let pass = attempt.held.pass_for(&link);
            let now = self.shared.clock.now();
            self.shared
                .learning
                .transfer_failed(&link, pass, policy, now);
            // The engine counts it, too: its next report is not to count against the link once more.
            self.excuse_link();
            self.shared.workers.learnt_more();
        }
        attempt.held.give_back_pass();
    }

    /// What the engine that fetches counts of this transfer is not to count against any link.
    fn excuse_link(&self) {
        if let Some(fetch) = &self.progress.actual.fetch {
            fetch.charged();
        }
    }

    /// States that an answer proves, none of which an engine reports.
    fn infer(&mut self, states: &[State], party: &Party) {
        let now = self.shared.clock.now();
        for &state in states {
            if !self.progress.heard_of(state) {
                self.progress
                    .observe(state, now, StateDetail::of(party).inferred());
            }
        }
    }
}

/// A leg took longer than the policy allows.
fn late(worker: &baton_protocol::ids::WorkerId, asked: Asked) -> Failure {
    use baton_protocol::failure::HandoffFailure;
    let why = "it has not answered in time (timeouts of the policy)";
    match asked {
        Asked::Whole => Failure::lost(worker, why, FailureClass::DecodeLost),
        Asked::Prefill | Asked::TiedPrefill => {
            Failure::lost(worker, why, FailureClass::PrefillLost)
        }
        Asked::Decode | Asked::TiedDecode => crate::dispatch::http::verdict::handoff(
            worker,
            HandoffFailure::Timeout,
            &format!("worker {worker}: {why}"),
        ),
    }
}

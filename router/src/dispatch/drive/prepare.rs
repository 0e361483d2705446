//! From a placement to what an attempt needs: parties, streams to open, what is held while it runs.

use std::time::Duration;

use baton_placement::fleet::OwnDispatches;
use baton_placement::place::{Candidate, Plan, Reason};
use baton_placement::policy::FirstToken;
use baton_protocol::card::Dispatch;
use baton_protocol::failure::FailureClass;
use baton_protocol::ids::{OperationId, RunId};
use baton_protocol::lifecycle;
use baton_protocol::wire::{self, worker_client::WorkerClient};
use tonic::transport::Channel;

use super::engines::Called;
use super::{Drive, NoPlan};
use crate::clock::Moment;
use crate::dispatch::attempt::{Attempt, Limits, Task};
use crate::dispatch::failure::Failure;
use crate::dispatch::held::Held;
use crate::dispatch::http::engine::Engine;
use crate::dispatch::legs::{DecodeLeg, PrefillLeg};
use crate::dispatch::messages::Legs;
use crate::dispatch::planning::Placed;
use crate::dispatch::progress::{Party, StateDetail};
use crate::fleet::Member;
use crate::fleet::snapshot::Promise;
use crate::learning::LinkUse;

/// An attempt that is about to begin.
pub(super) struct Prepared {
    pub(super) task: Task,
    pub(super) limits: Limits,
    pub(super) block_size: u32,
    pub(super) held: Held,
    pub(super) clients: Clients,
    /// The link that a remote plan was costed with, and its level.
    pub(super) link: Option<(LinkUse, String)>,
    /// Engines over HTTP, where the workers are such.
    pub(super) called: Option<Called>,
}

/// A worker, and what it does for the attempt.
#[derive(Clone)]
pub(super) struct Reached {
    pub(super) client: WorkerClient<Channel>,
    pub(super) operation: OperationId,
}

/// How the attempt's workers are reached.
pub(super) struct Clients {
    pub(super) decode: Reached,
    pub(super) prefill: Option<Reached>,
    transports: Vec<String>,
    kv_identity: String,
}

impl Drive {
    /// Takes what the plan needs. What is taken is given back when the attempt ends.
    pub(super) fn prepare(&mut self, plan: Plan, placed: &Placed) -> Result<Prepared, NoPlan> {
        let (Some(candidate), Some(decode)) = (
            placed.decision.chosen(),
            placed.view.members.get(plan.decode()),
        ) else {
            // A view and its members are made together.
            return Err(NoPlan::Again);
        };
        let policy = self.request.policy.policy.clone();
        let mut held = Held::new(self.shared.clone(), policy.clone());
        let now = self.shared.clock.now();
        if placed.decision.reason == Reason::NoPrefillWorker {
            held.lacks_prefill();
        }
        let tokens = placed.decision.facts.tokens;
        let attempt = self.progress.attempt() + 1;
        let party = |member: &Member, step: &str| Party {
            worker: member.id.clone(),
            incarnation: member.card.incarnation,
            domain: member.domain(),
            operation: match member.card.dispatch {
                Dispatch::Grpc => OperationId::new(&self.run, attempt, step),
                Dispatch::OpenAiHttp { .. } => engine_operation(&self.run, attempt),
            },
        };
        let (task, prefill, link) = match plan {
            Plan::Local { .. } => {
                let worker = party(decode, "decode");
                let dispatch = OwnDispatches {
                    queued_tokens: computing(candidate, tokens).queued_tokens,
                    queued_sequences: 1,
                    ..generating(candidate, tokens)
                };
                held.dispatched(&worker, dispatch);
                (Task::Whole { worker }, None, None)
            }
            Plan::Remote { prefill, .. } => {
                let Some(source) = placed.view.members.get(prefill) else {
                    return Err(NoPlan::Again);
                };
                let link = LinkUse {
                    source: source.path.clone(),
                    target: decode.path.clone(),
                    transport: placed
                        .decision
                        .transport(&placed.view.fleet)
                        .unwrap_or_default()
                        .to_owned(),
                };
                let Some(pass) = self.shared.learning.try_use(&link, &policy, now) else {
                    // The next view shows the link as it is.
                    self.shared.workers.learnt_more();
                    return Err(NoPlan::Again);
                };
                held.may_use(link.clone(), pass);
                let (source_party, target) = (party(source, "prefill"), party(decode, "decode"));
                held.dispatched(&source_party, computing(candidate, tokens));
                held.dispatched(&target, generating(candidate, tokens));
                let bytes = candidate.inputs.link.map_or(0, |link| link.missing_bytes);
                held.promise(Promise::new(&link.source, &link.target, bytes));
                let level = candidate.inputs.link.map_or(0, |link| link.level as usize);
                let level = placed.view.fleet.level_name(level).to_owned();
                let task = Task::Split {
                    prefill: source_party,
                    decode: target,
                    first_token_by_prefill: policy.first_token == FirstToken::Prefill,
                };
                (task, Some(source), Some((link, level)))
            }
        };
        // Last: what is granted is used.
        if self.recompute {
            self.shared
                .learning
                .recompute(&decode.id, &policy, now)
                .map_err(|refusal| {
                    let message =
                        format!("the remote plan failed, and {refusal}: send the request again");
                    NoPlan::Final(Failure::new(FailureClass::PrefillLost, message))
                })?;
            held.recomputes(decode.id.clone());
            self.recompute = false;
        }
        let mut transports: Vec<String> = link
            .iter()
            .map(|(link, _)| link.transport.clone())
            .filter(|transport| !transport.is_empty())
            .collect();
        for transport in &policy.transports {
            if !transports.contains(transport) {
                transports.push(transport.clone());
            }
        }
        let called = called(candidate, decode, prefill, now).map_err(NoPlan::Final)?;
        let reached = |member: &Member, party: &Party| Reached {
            client: member.client.clone(),
            operation: party.operation.clone(),
        };
        let decodes = reached(decode, task.target());
        let prefills = prefill.zip(task.source());
        let prefills = prefills.map(|(member, source)| reached(member, source));
        Ok(Prepared {
            task,
            limits: Limits::from(&policy.timeouts),
            block_size: decode.card.capacity.block_size,
            held,
            clients: Clients {
                decode: decodes,
                prefill: prefills,
                transports,
                kv_identity: decode.card.kv_identity.clone(),
            },
            link,
            called,
        })
    }

    /// Enters an attempt into the run's history.
    pub(super) fn begin_history(&mut self, task: &Task) {
        let now = self.shared.clock.now();
        let plan = task.plan();
        if let (lifecycle::Plan::Local, Some(cause)) = (plan, self.left_remote.take()) {
            self.fell_back(cause, now);
        }
        let detail = StateDetail {
            operation: None,
            ..StateDetail::of(task.target())
        };
        self.progress.begin(plan, now, detail);
        self.trace.attempt_began(self.progress.attempt(), task);
    }

    /// Enters the attempt into the run's history, and takes it apart.
    pub(super) fn begin(
        &mut self,
        prepared: Prepared,
    ) -> (Attempt, Held, Clients, Option<(LinkUse, String)>) {
        let now = self.shared.clock.now();
        self.begin_history(&prepared.task);
        let planned = prepared.link.as_ref().map(|(link, _)| &link.transport);
        self.progress.actual.planned_transport = planned.filter(|kind| !kind.is_empty()).cloned();
        let Prepared {
            task,
            limits,
            block_size,
            held,
            clients,
            link,
            called: _,
        } = prepared;
        (
            Attempt::new(task, limits, block_size, now),
            held,
            clients,
            link,
        )
    }
}

/// The engines of a plan; none where its workers speak Baton's own protocol.
fn called(
    candidate: &Candidate,
    decode: &Member,
    prefill: Option<&Member>,
    now: Moment,
) -> Result<Option<Called>, Failure> {
    let of = |member: &Member| {
        Engine::of(&member.card).map_err(|why| Failure::new(FailureClass::Incompatible, why))
    };
    let Some(decode) = of(decode)? else {
        return Ok(None);
    };
    let wait = Duration::try_from_secs_f64(candidate.terms.admission / 1_000.0);
    Ok(Some(Called {
        decode,
        prefill: prefill.map(of).transpose()?.flatten(),
        room_at: now.plus(wait.unwrap_or_default()),
    }))
}

/// The request id of both legs of an attempt on engines: some match their two sides by it, some by how it begins, so all are of one
/// length.
pub(super) fn engine_operation(run: &RunId, attempt: u32) -> OperationId {
    OperationId::from(format!("{run}-{attempt:02}"))
}

impl Clients {
    pub(super) fn open_decode(&self, drive: &Drive, task: &Task) -> DecodeLeg {
        let legs = self.legs(drive);
        let start = match task {
            Task::Whole { worker } => legs.decode_whole(worker),
            Task::Split {
                decode,
                first_token_by_prefill,
                ..
            } => legs.decode_handed(decode, *first_token_by_prefill, self.transports.clone()),
        };
        DecodeLeg::open(self.decode.client.clone(), start)
    }

    pub(super) fn open_prefill(
        &self,
        drive: &Drive,
        task: &Task,
        skip_blocks: u32,
    ) -> Option<PrefillLeg> {
        let legs = self.legs(drive);
        let request: wire::PrefillRequest = match task {
            Task::Whole { .. } => return None,
            Task::Split {
                prefill,
                first_token_by_prefill,
                ..
            } => legs.prefill(prefill, skip_blocks, *first_token_by_prefill),
        };
        Some(PrefillLeg::open(self.prefill.clone()?.client, request))
    }

    fn legs<'a>(&'a self, drive: &'a Drive) -> Legs<'a> {
        let now = drive.shared.clock.now();
        Legs {
            run: &drive.run,
            attempt: drive.progress.attempt(),
            request: &drive.request,
            trace: &drive.trace,
            policy: &drive.request.policy.policy,
            sent: drive.progress.sent(),
            kv_identity: &self.kv_identity,
            remaining: drive.deadline.since(now),
        }
    }
}

/// What the worker that computes the prompt gets to do.
fn computing(candidate: &Candidate, tokens: u32) -> OwnDispatches {
    let inputs = &candidate.inputs;
    OwnDispatches {
        queued_tokens: u64::from(tokens.saturating_sub(inputs.compute.cached_tokens)),
        queued_sequences: 1,
        ..OwnDispatches::default()
    }
}

/// What the worker that generates gets to do.
fn generating(candidate: &Candidate, tokens: u32) -> OwnDispatches {
    OwnDispatches {
        sequences: 1,
        context_tokens: u64::from(tokens),
        blocks: candidate.inputs.decode.needed_blocks,
        ..OwnDispatches::default()
    }
}

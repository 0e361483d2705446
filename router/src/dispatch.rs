//! Dispatch: places each run, tries plans for it on workers until one answers, and leaves a record of it.
//!
//! Pure: [`progress`] (what is known about a run), [`attempt`] (one plan as a state machine), [`decide`] (what is done about a
//! failure), [`messages`] (what workers are sent). Around them: `planning` asks placement, `legs` holds the streams, `held` what
//! has to be given back, `drive` runs it all, `conclude` records the end.

pub mod attempt;
mod conclude;
pub mod decide;
mod drive;
pub mod failure;
mod fetched;
mod held;
pub mod http;
mod legs;
pub mod messages;
mod planning;
pub mod progress;

use std::collections::HashMap;
use std::sync::Arc;

use baton_placement::fleet::WorkerState;
use baton_placement::record::Credit;
use baton_placement::rng::Rng;
use baton_protocol::card::{Role, TextCheck};
use baton_protocol::ids::RunId;
use baton_system::entropy::Entropy;
use baton_system::network::Network;
use baton_telemetry::tracer::Tracer;
use parking_lot::Mutex;
use tokio_util::task::TaskTracker;

use http::pool::Engines;

use crate::clock::Clock;
use crate::fleet::{View, Workers};
use crate::learning::Learning;
use crate::metrics::Metrics;
use crate::policy::{Policies, PolicyHandle};
use crate::records::Records;
use crate::run::{
    Dispatch, EVENTS_IN_FLIGHT, ModelListing, PIECES_IN_FLIGHT, PassedOn, RunHandle, RunRequest,
    TextArtifacts, channel_of,
};

/// What all runs share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) router: String,
    pub(crate) clock: Clock,
    pub(crate) workers: Arc<Workers>,
    pub(crate) policies: Arc<Policies>,
    pub(crate) learning: Arc<Learning>,
    pub(crate) records: Arc<Records>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) tracer: Tracer,
    /// Connections to engines that are called over HTTP.
    pub(crate) engines: Arc<Engines>,
    pub(crate) rng: Mutex<Rng>,
    entropy: Arc<dyn Entropy>,
    /// Runs under way that are local only for lack of a prefill worker, by policy.
    pub(crate) without_prefill: Mutex<HashMap<String, u32>>,
    /// Runs, and cancellations that outlive them.
    pub(crate) tasks: TaskTracker,
}

/// The router's implementation of [`Dispatch`].
#[derive(Clone, Debug)]
pub struct Dispatcher {
    shared: Arc<Shared>,
}

/// What a dispatcher is built from.
#[derive(Debug)]
pub struct Parts {
    /// Replica id: the first part of each run id, without `-`.
    pub router: String,
    pub clock: Clock,
    pub workers: Arc<Workers>,
    pub policies: Arc<Policies>,
    pub learning: Arc<Learning>,
    pub records: Arc<Records>,
    pub metrics: Arc<Metrics>,
    /// Where the spans of runs go.
    pub tracer: Tracer,
    /// Engines are called over it.
    pub network: Arc<dyn Network>,
    /// Of the chance in placement.
    pub seed: u64,
    /// Of run ids.
    pub entropy: Arc<dyn Entropy>,
}

impl Dispatcher {
    pub fn new(parts: Parts) -> Self {
        Self {
            shared: Arc::new(Shared {
                router: parts.router,
                clock: parts.clock,
                workers: parts.workers,
                policies: parts.policies,
                learning: parts.learning,
                records: parts.records,
                metrics: parts.metrics,
                tracer: parts.tracer,
                engines: Engines::new(parts.network),
                rng: Mutex::new(Rng::new(parts.seed)),
                entropy: parts.entropy,
                without_prefill: Mutex::default(),
                tasks: TaskTracker::new(),
            }),
        }
    }

    /// Resolves when every run and every cancellation has ended; no run may be started any more.
    pub async fn finished(&self) {
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
        self.shared.engines.close();
    }

    /// Workers that may be placed on now.
    pub fn workers_ready(&self) -> usize {
        let view = self.shared.workers.view();
        let loads = view.fleet.loads.iter();
        loads
            .filter(|load| load.state == WorkerState::Ready)
            .count()
    }

    /// Workers of the policy's pools, by position in the view.
    fn members<'a>(
        view: &'a View,
        policy: &'a PolicyHandle,
    ) -> impl Iterator<Item = (usize, &'a crate::fleet::Member)> + Clone {
        view.members.iter().enumerate().filter(move |(_, member)| {
            let pools = match member.card.pool_role {
                Role::Prefill => &policy.policy.prefill_pools,
                Role::Decode => &policy.policy.decode_pools,
            };
            pools.contains(&member.card.pool)
        })
    }
}

/// A run id: the replica that took it, then 128 random bits.
fn run_id(router: &str, entropy: &dyn Entropy) -> RunId {
    let mut bits = [0; 16];
    // Without the system's randomness nothing here is safe; zeros would still be answered, only not told apart.
    if let Err(error) = entropy.fill(&mut bits) {
        tracing::error!(%error, "no random bits for a run id");
    }
    RunId(format!("{router}-{:032x}", u128::from_be_bytes(bits)))
}

impl Dispatch for Dispatcher {
    fn policy(&self, model: &str) -> Option<Arc<PolicyHandle>> {
        self.shared.policies.in_force().set.of_model(model)
    }

    fn refused(&self, model: &str) -> Option<String> {
        let in_force = self.shared.policies.in_force();
        in_force.refused_for(model)?.name.clone()
    }

    fn models(&self) -> Vec<ModelListing> {
        let in_force = self.shared.policies.in_force();
        let view = self.shared.workers.view();
        let mut models = Vec::new();
        for policy in &in_force.set.policies {
            let max_context = Self::members(&view, policy)
                .map(|(_, member)| member.card.capacity.max_context)
                .min();
            for id in std::iter::once(&policy.model).chain(&policy.aliases) {
                models.push(ModelListing {
                    id: id.clone(),
                    created: i64::try_from(policy.since.0 / 1_000_000).unwrap_or(0),
                    max_context,
                });
            }
        }
        models
    }

    fn artifacts(&self, policy: &PolicyHandle) -> Option<Arc<TextArtifacts>> {
        let view = self.shared.workers.view();
        let filter = planning::text_of(&self.shared, &view, policy)?;
        let artifacts = &self.shared.workers.artifacts;
        let max_context = Self::members(&view, policy)
            .map(|(_, member)| member.card.capacity.max_context)
            .min()?;
        Some(Arc::new(TextArtifacts {
            tokenizer: artifacts.get(filter.tokenizer)?,
            tokenizer_digest: filter.tokenizer.to_owned(),
            chat_template: artifacts.get(filter.chat_template)?,
            chat_template_digest: filter.chat_template.to_owned(),
            max_context,
        }))
    }

    fn passed_on(&self, policy: &PolicyHandle) -> Option<PassedOn> {
        let view = self.shared.workers.view();
        if !planning::passes_on(&view, policy) {
            return None;
        }
        let engines =
            Self::members(&view, policy).filter(|(_, member)| planning::is_engine(member));
        let max_context = engines
            .clone()
            .map(|(_, member)| member.card.capacity.max_context)
            .max()?;
        let verified = engines
            .clone()
            .all(|(_, member)| member.card.text == TextCheck::Verified);
        let text = match self.artifacts(policy) {
            None => Err(Credit::NoTokenizer),
            Some(_) if !verified => Err(Credit::TextUnverified),
            Some(artifacts) => Ok(artifacts),
        };
        Some(PassedOn { max_context, text })
    }

    fn passes_on(&self) -> bool {
        let view = self.shared.workers.view();
        view.members.iter().any(planning::is_engine)
    }

    fn unserved(&self) -> Vec<String> {
        let in_force = self.shared.policies.in_force();
        let view = self.shared.workers.view();
        let missing = |policy: &PolicyHandle| {
            let up = Self::members(&view, policy).any(|(index, member)| {
                view.fleet.loads[index].state == WorkerState::Ready
                    && member.card.pool_role == Role::Decode
            });
            let model = &policy.model;
            if !up {
                Some(format!("model {model}: no decode worker is up"))
            } else if !planning::passes_on(&view, policy) && self.artifacts(policy).is_none() {
                Some(format!("model {model}: its tokenizer is not here yet"))
            } else {
                None
            }
        };
        let policies = in_force.set.policies.iter();
        policies.filter_map(|policy| missing(policy)).collect()
    }

    fn ready(&self) -> Result<(), String> {
        let policies = self.shared.policies.in_force().set.policies.len();
        let missing = self.unserved();
        if missing.len() < policies {
            return Ok(());
        }
        Err(missing.join("; "))
    }

    fn start(&self, request: RunRequest) -> RunHandle {
        let run = run_id(&self.shared.router, &*self.shared.entropy);
        let events = match request.forward {
            Some(_) => PIECES_IN_FLIGHT,
            None => EVENTS_IN_FLIGHT,
        };
        let (sink, handle) = channel_of(run.clone(), events);
        let shared = self.shared.clone();
        self.shared
            .tasks
            .spawn(drive::run(shared, request, sink, run));
        handle
    }
}

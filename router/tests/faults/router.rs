//! A whole dispatcher over scripted workers, without HTTP.

use std::sync::Arc;
use std::time::Duration;

use baton_placement::policy::Policy;
use baton_placement::record::DecisionRecord;
use baton_protocol::hash::HashKey;
use baton_protocol::lifecycle::State;
use baton_protocol::wire;
use baton_router::clock::Clock;
use baton_router::dispatch::{Dispatcher, Parts};
use baton_router::fleet::artifacts::Artifacts;
use baton_router::fleet::discovery::Listed;
use baton_router::fleet::{Workers, watch as follow};
use baton_router::learning::Learning;
use baton_router::metrics::Metrics;
use baton_router::policy::{Policies, PolicyHandle, PolicySet};
use baton_router::records::Records;
use baton_router::run::{Dispatch, Mode, RunEvent, RunHandle, RunRequest};
use baton_system::entropy::MachineEntropy;
use baton_system::network::MachineNetwork;
use baton_system::threads::Threads;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::double::Double;

/// Longer than anything here takes.
pub(crate) const SOON: Duration = Duration::from_secs(20);
pub(crate) const PROMPT: u32 = 40;

pub(crate) struct Router {
    pub(crate) dispatcher: Dispatcher,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) records: Arc<Records>,
    pub(crate) workers: Arc<Workers>,
    pub(crate) learning: Arc<Learning>,
    _folder: tempfile::TempDir,
    pub(crate) lists: watch::Sender<Vec<Listed>>,
}

impl Router {
    pub(crate) fn start(policy: &Policy, doubles: &[&Double]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path();
        let artifacts = state.join("artifacts");
        std::fs::create_dir(&artifacts).unwrap();
        let clock = Clock::start();
        let metrics = Arc::new(Metrics::new());
        let learning = Arc::new(Learning::default());
        let records = Records::start(
            state,
            clock,
            metrics.clone(),
            learning.clone(),
            Threads::Machine,
        )
        .map(Arc::new)
        .unwrap();
        let workers = Arc::new(Workers::new(
            clock,
            1,
            HashKey::from_bytes(&[0; 32]),
            Artifacts::new(artifacts),
            learning.clone(),
            metrics.clone(),
        ));
        let listed = doubles
            .iter()
            .map(|double| Listed {
                name: double.name.as_str().into(),
                control: double.address.to_string(),
                domains: Vec::new(),
                leaving: false,
            })
            .collect();
        let (lists, listed) = watch::channel(listed);
        let stop = CancellationToken::new();
        tokio::spawn(follow::supervise(
            workers.clone(),
            listed,
            Arc::new(MachineNetwork),
            stop,
        ));
        let dispatcher = Dispatcher::new(Parts {
            router: "r0".to_owned(),
            clock,
            workers: workers.clone(),
            policies: Arc::new(policies(policy, clock)),
            learning: learning.clone(),
            records: records.clone(),
            metrics: metrics.clone(),
            tracer: baton_telemetry::tracer::Tracer::off(),
            network: Arc::new(MachineNetwork),
            seed: 1,
            entropy: Arc::new(MachineEntropy),
        });
        Self {
            dispatcher,
            metrics,
            records,
            workers,
            learning,
            _folder: folder,
            lists,
        }
    }

    /// Waits until every worker of the policy can be placed on.
    pub(crate) async fn ready(&self, workers: usize) {
        until("the workers are ready", || {
            let view = self.dispatcher.ready();
            let listed = self.dispatcher.models();
            view.is_ok() && listed[0].max_context.is_some() && self.up() == workers
        })
        .await;
    }

    /// Waits until nothing is held for any run: no place in estimates, no promised bytes, no fallback budget, no probe.
    pub(crate) async fn holds_nothing(&self) {
        until("everything is given back", || {
            self.workers.outstanding() == (0, 0) && self.learning.recomputes() == 0
        })
        .await;
    }

    /// Waits until so many runs have entered a state.
    pub(crate) async fn entered(&self, state: State, times: u32) {
        let line = format!("baton_run_states_total{{state=\"{state}\"}} {times}");
        let what = format!("{times} runs are {state}");
        until(&what, || {
            self.metrics.text().unwrap().lines().any(|one| one == line)
        })
        .await;
    }

    fn up(&self) -> usize {
        self.dispatcher.workers_ready()
    }

    pub(crate) fn start_run(&self, mode: Mode, max_tokens: u32) -> RunHandle {
        self.dispatcher.start(RunRequest {
            request_id: "q".to_owned(),
            policy: self.dispatcher.policy("m").unwrap(),
            tokens: (0..PROMPT).collect(),
            forward: None,
            sampling: wire::Sampling::default(),
            stopping: wire::Stopping {
                max_tokens,
                ..wire::Stopping::default()
            },
            cache_salt: String::new(),
            priority: 0,
            mode: Some(mode),
            splittable: true,
            operation: "text_completion",
            traceparent: None,
            received: Instant::now(),
        })
    }

    pub(crate) async fn record(&self, run: &str) -> DecisionRecord {
        let json = self.records.recent.find_within(run, SOON).await.unwrap();
        serde_json::from_str(&json).unwrap()
    }
}

fn policies(policy: &Policy, clock: Clock) -> Policies {
    let mut set = PolicySet::default();
    let handle = PolicyHandle::new(policy.clone(), clock.now());
    set.add(Arc::new(handle)).unwrap();
    Policies::new(Arc::new(set))
}

/// The tokens of a run and its last event.
pub(crate) async fn outcome(mut handle: RunHandle) -> (Vec<u32>, RunEvent) {
    let all = async {
        let mut tokens = Vec::new();
        loop {
            match handle.next().await.expect("a run ends with an event") {
                RunEvent::Token { id, .. } => tokens.push(id),
                last => return (tokens, last),
            }
        }
    };
    tokio::time::timeout(SOON, all).await.expect("the run ends")
}

/// Looks again and again until it holds.
pub(crate) async fn until(what: &str, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < SOON, "{what}: not within {SOON:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

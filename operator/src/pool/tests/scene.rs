//! A pool with pods in states of choice, as a planner sees it.

pub(super) mod card;

use std::collections::BTreeMap;

use baton_crds::{PoolRole, labels};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, Pod, PodCondition,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

use crate::pool::member::{CONTAINER, DRAINING};
use crate::pool::render::Rendered;
use crate::pool::{
    Action, Level, Observed, Plan, PolicyFacts, PoolObject, Settings, WorkerLoad, WorkerReport,
    plan,
};

/// An hour after the epoch of these tests.
pub(super) fn start() -> Timestamp {
    "2026-11-30T12:00:00Z".parse().unwrap()
}

/// The spec that tests change fields of: two replicas of a tiny model.
pub(super) fn spec() -> Value {
    json!({
        "replicas": 2,
        "model": {"name": "tiny", "source": {"uri": "builtin://tiny?seed=7"}},
        "engine": {"type": "Builtin", "image": "worker:1"},
    })
}

/// The spec with the fields of `change` laid over, nested.
pub(super) fn changed(change: &Value) -> Value {
    let mut spec = spec();
    lay_over(&mut spec, change);
    spec
}

pub(super) fn lay_over(base: &mut Value, change: &Value) {
    let (Value::Object(base_fields), Value::Object(fields)) = (&mut *base, change) else {
        *base = change.clone();
        return;
    };
    for (name, value) in fields {
        lay_over(
            base_fields.entry(name.clone()).or_insert(Value::Null),
            value,
        );
    }
}

pub(super) fn levels() -> Vec<Level> {
    let level = |name: &str, label: &str| Level {
        name: name.to_owned(),
        node_label: label.to_owned(),
    };
    vec![
        level("host", "kubernetes.io/hostname"),
        level("rack", "topology.kubernetes.io/rack"),
    ]
}

pub(super) fn observed(spec: &Value) -> Observed {
    let node = |host: &str, rack: Option<&str>| {
        let mut labels = BTreeMap::from([("kubernetes.io/hostname".to_owned(), host.to_owned())]);
        labels.extend(rack.map(|rack| ("topology.kubernetes.io/rack".to_owned(), rack.to_owned())));
        (host.to_owned(), labels)
    };
    Observed {
        pool: PoolObject {
            role: PoolRole::Decode,
            name: "chat".to_owned(),
            namespace: "serving".to_owned(),
            uid: "pool-uid".to_owned(),
            generation: 3,
            labels: BTreeMap::new(),
            deleting: false,
            spec: serde_json::from_value(spec.clone()).unwrap(),
            status: None,
        },
        refusals: Vec::new(),
        pods: Vec::new(),
        nodes: BTreeMap::from([node("n1", Some("r1")), node("n2", None)]),
        workers: BTreeMap::new(),
        policies: PolicyFacts::default(),
        disruption_budget: None,
        creation_error: None,
        settings: Settings {
            worker_image: None,
            levels: levels(),
        },
        now: start(),
    }
}

/// What a planner is told, with pods to add.
pub(super) struct Scene {
    pub(super) observed: Observed,
}

impl Scene {
    pub(super) fn new(change: &Value) -> Self {
        Self {
            observed: observed(&changed(change)),
        }
    }

    /// The hash of the spec as it is now.
    pub(super) fn revision(&self) -> String {
        Rendered::of(&self.observed).unwrap().revision
    }

    pub(super) fn add(&mut self, build: Build) -> &mut Self {
        let (pod, report) = build.made(&self.observed);
        if let Some(report) = report {
            let name = pod.metadata.name.clone().unwrap();
            self.observed.workers.insert(name, report);
        }
        self.observed.pods.push(pod);
        self
    }

    pub(super) fn with(mut self, builds: impl IntoIterator<Item = Build>) -> Self {
        for build in builds {
            self.add(build);
        }
        self
    }

    pub(super) fn plan(&self) -> Plan {
        let mut number = 0;
        plan(&self.observed, &mut || {
            number += 1;
            number
        })
    }

    pub(super) fn pod(&mut self, name: &str) -> &mut Pod {
        let mut pods = self.observed.pods.iter_mut();
        pods.find(|pod| pod.metadata.name.as_deref() == Some(name))
            .unwrap()
    }

    /// What a plan does with pods, in words: `create`, `drain a`, `undrain a`, `delete a`, sorted.
    pub(super) fn moves(&self) -> Vec<String> {
        moves(&self.plan())
    }
}

pub(super) fn moves(plan: &Plan) -> Vec<String> {
    let mut moves: Vec<String> = plan
        .actions
        .iter()
        .filter_map(|action| match action {
            Action::CreatePod(_) => Some("create".to_owned()),
            Action::DeletePod { pod, .. } => Some(format!("delete {pod}")),
            Action::SetCondition { pod, condition, .. } if condition.type_ == DRAINING => {
                let undo = if condition.status == "True" { "" } else { "un" };
                Some(format!("{undo}drain {pod}"))
            }
            _ => None,
        })
        .collect();
    moves.sort();
    moves
}

/// A pod to be.
#[derive(Clone)]
pub(super) struct Build {
    name: String,
    revision: Option<String>,
    age: i64,
    node: Option<String>,
    state: Option<ContainerState>,
    restarts: i32,
    last: Option<ContainerState>,
    ready: bool,
    registered: Option<bool>,
    draining_for: Option<i64>,
    load: Result<WorkerLoad, String>,
    phase: &'static str,
    deleted: bool,
    silent: bool,
}

/// A pod of the current revision, an hour old, that was just created: no node, no container.
pub(super) fn pod(name: &str) -> Build {
    Build {
        name: name.to_owned(),
        revision: None,
        age: 3600,
        node: None,
        state: None,
        restarts: 0,
        last: None,
        ready: false,
        registered: None,
        draining_for: None,
        load: Ok(WorkerLoad::default()),
        phase: "Pending",
        deleted: false,
        silent: true,
    }
}

/// A pod that serves.
pub(super) fn ready(name: &str) -> Build {
    Build {
        ready: true,
        registered: Some(true),
        ..pod(name).running()
    }
}

impl Build {
    pub(super) fn running(self) -> Self {
        let started_at = Some(Time(start() - SignedDuration::from_secs(self.age)));
        Self {
            node: Some("n1".to_owned()),
            state: Some(ContainerState {
                running: Some(ContainerStateRunning { started_at }),
                ..ContainerState::default()
            }),
            phase: "Running",
            silent: false,
            ..self
        }
    }

    pub(super) fn revision(self, revision: &str) -> Self {
        Self {
            revision: Some(revision.to_owned()),
            ..self
        }
    }

    pub(super) fn old(self) -> Self {
        self.revision("old")
    }

    /// Seconds.
    pub(super) fn age(self, age: i64) -> Self {
        Self { age, ..self }
    }

    pub(super) fn node(self, node: &str) -> Self {
        Self {
            node: Some(node.to_owned()),
            ..self
        }
    }

    /// Registered and, for now, not ready.
    pub(super) fn unready(self) -> Self {
        Self {
            ready: false,
            ..self
        }
    }

    /// For so many seconds; its worker knows.
    pub(super) fn draining(self, seconds: i64) -> Self {
        let load = self.load.map(|load| WorkerLoad {
            draining: true,
            ..load
        });
        Self {
            draining_for: Some(seconds),
            load,
            ..self
        }
    }

    pub(super) fn running_sequences(self, running_sequences: u64) -> Self {
        let load = self.load.map(|load| WorkerLoad {
            running_sequences,
            ..load
        });
        Self { load, ..self }
    }

    pub(super) fn leases(self, leases_open: u64) -> Self {
        let load = self.load.map(|load| WorkerLoad {
            leases_open,
            ..load
        });
        Self { load, ..self }
    }

    pub(super) fn cached(self, cached_blocks: u64) -> Self {
        let load = self.load.map(|load| WorkerLoad {
            cached_blocks,
            ..load
        });
        Self { load, ..self }
    }

    pub(super) fn unreachable(self) -> Self {
        Self {
            load: Err("10.0.0.1:7002 does not answer".to_owned()),
            ..self
        }
    }

    pub(super) fn waiting(self, reason: &str, message: &str) -> Self {
        Self {
            node: Some("n1".to_owned()),
            state: Some(ContainerState {
                waiting: Some(ContainerStateWaiting {
                    reason: Some(reason.to_owned()),
                    message: Some(message.to_owned()),
                }),
                ..ContainerState::default()
            }),
            ..self
        }
    }

    /// The worker ended so many times, the last time so.
    pub(super) fn ended(self, restarts: i32, exit_code: i32, message: &str) -> Self {
        Self {
            restarts,
            last: Some(ContainerState {
                terminated: Some(ContainerStateTerminated {
                    exit_code,
                    message: Some(message.to_owned()),
                    ..ContainerStateTerminated::default()
                }),
                ..ContainerState::default()
            }),
            ..self
        }
    }

    pub(super) fn phase(self, phase: &'static str) -> Self {
        Self { phase, ..self }
    }

    pub(super) fn deleted(self) -> Self {
        Self {
            deleted: true,
            ..self
        }
    }

    fn made(self, observed: &Observed) -> (Pod, Option<WorkerReport>) {
        let rendered = Rendered::of(observed).unwrap();
        let mut made = rendered.pod(&self.name);
        let revision = self.revision.unwrap_or(rendered.revision);
        let before = |seconds: i64| Time(observed.now - SignedDuration::from_secs(seconds));
        made.metadata.uid = Some(format!("uid-{}", self.name));
        made.metadata.creation_timestamp = Some(before(self.age));
        made.metadata.deletion_timestamp = self.deleted.then(|| before(1));
        let stamped = made.metadata.labels.get_or_insert_default();
        stamped.insert(labels::REVISION.to_owned(), revision.clone());
        let annotations = made.metadata.annotations.get_or_insert_default();
        let mut configuration: Value =
            serde_json::from_str(&annotations[labels::WORKER_CONFIG]).unwrap();
        configuration["revision"] = revision.as_str().into();
        annotations.insert(labels::WORKER_CONFIG.to_owned(), configuration.to_string());
        let condition = |name: &str, holds: bool, age: i64| PodCondition {
            type_: name.to_owned(),
            status: if holds { "True" } else { "False" }.to_owned(),
            last_transition_time: Some(before(age)),
            ..PodCondition::default()
        };
        let mut conditions = vec![condition("Ready", self.ready, self.age)];
        if self.node.is_some() {
            conditions.push(condition("PodScheduled", true, self.age));
        }
        if let Some(registered) = self.registered {
            conditions.push(PodCondition {
                reason: Some(
                    if registered {
                        "CardRead"
                    } else {
                        "CardUnavailable"
                    }
                    .to_owned(),
                ),
                ..condition(labels::REGISTERED, registered, self.age)
            });
        }
        if let Some(seconds) = self.draining_for {
            conditions.push(condition(DRAINING, true, seconds));
            stamped.insert(labels::DRAINING.to_owned(), "true".to_owned());
        }
        made.spec.as_mut().unwrap().node_name = self.node;
        let status = made.status.get_or_insert_default();
        status.phase = Some(self.phase.to_owned());
        status.pod_ip = self.state.as_ref().map(|_| "10.0.0.1".to_owned());
        status.conditions = Some(conditions);
        status.container_statuses = self.state.map(|state| {
            vec![ContainerStatus {
                name: CONTAINER.to_owned(),
                image: "worker:1".to_owned(),
                state: Some(state),
                last_state: self.last,
                restart_count: self.restarts,
                ..ContainerStatus::default()
            }]
        });
        let report = (!self.silent).then(|| WorkerReport {
            card: match &self.load {
                Ok(_) => Ok(Box::new(card::card(&made))),
                Err(why) => Err(why.clone()),
            },
            load: self.load,
        });
        (made, report)
    }
}

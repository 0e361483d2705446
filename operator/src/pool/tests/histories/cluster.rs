//! A small cluster: pods and their kubelets, workers with work, nodes with power, and an operator whose cache lags.

mod operator;

pub(super) use operator::Fates;

use std::collections::{BTreeMap, BTreeSet};

use baton_crds::labels;
use baton_protocol::card::Card;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateRunning, ContainerStatus, Pod, PodCondition,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

use crate::controller::context::Attempt;
use crate::pool::member::{CONTAINER, DRAINING, holds, label};
use crate::pool::tests::scene::card::card;
use crate::pool::tests::scene::{changed, observed};
use crate::pool::{Observed, Pending};

/// The image whose workers never come up.
pub(super) const BROKEN_IMAGE: &str = "worker:broken";
const LONGEST_LAG: i64 = 200;
const NODES: [&str; 3] = ["n1", "n2", "n3"];

/// A worker's process, as it is.
#[derive(Debug, Clone, Default)]
struct Worker {
    running: u64,
    leases: u64,
    draining: bool,
    reachable: bool,
}

#[derive(Debug)]
pub(super) struct Cluster {
    /// The pool, its nodes and the time; the rest is filled in for each plan.
    pub(super) base: Observed,
    spec: Value,
    /// What is, by uid.
    pods: BTreeMap<String, Pod>,
    /// What the operator's watch has shown.
    seen: BTreeMap<String, Pod>,
    pending: Pending,
    /// Writes of the operator whose answers were lost, by the pod's name.
    uncertain: BTreeMap<String, Attempt>,
    workers: BTreeMap<String, Worker>,
    cards: BTreeMap<String, Card>,
    /// Nodes without power.
    dark: BTreeSet<String>,
    deleted_by_us: BTreeSet<String>,
    numbers: u64,
    /// Seconds since the watch showed everything.
    lag: i64,
    /// Pods that were ever created.
    pub(super) created: usize,
}

impl Cluster {
    pub(super) fn new(replicas: i32) -> Self {
        let spec = changed(&json!({
            "replicas": replicas, "rollout": {"drainTimeoutSeconds": 60},
        }));
        let mut base = observed(&spec);
        base.nodes = NODES
            .iter()
            .map(|name| ((*name).to_owned(), BTreeMap::new()))
            .collect();
        Self {
            base,
            spec,
            pods: BTreeMap::new(),
            seen: BTreeMap::new(),
            pending: Pending::default(),
            uncertain: BTreeMap::new(),
            workers: BTreeMap::new(),
            cards: BTreeMap::new(),
            dark: BTreeSet::new(),
            deleted_by_us: BTreeSet::new(),
            numbers: 0,
            lag: 0,
            created: 0,
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn nth(&self, index: usize) -> Option<String> {
        let count = self.pods.len().max(1);
        self.pods.keys().nth(index % count).cloned()
    }

    /// Writes a pod as the API server does: its version grows.
    fn write(&mut self, uid: &str, change: impl FnOnce(&mut Pod)) -> Option<Pod> {
        let version = self.number().to_string();
        let pod = self.pods.get_mut(uid)?;
        change(pod);
        pod.metadata.resource_version = Some(version);
        Some(pod.clone())
    }

    /// A watch lags, but not for as long as own writes are remembered.
    pub(super) fn pass(&mut self, seconds: i64) {
        self.base.now += SignedDuration::from_secs(seconds);
        self.lag += seconds;
        if self.lag > LONGEST_LAG {
            self.see(None);
        }
    }

    // What an author does.

    pub(super) fn set(&mut self, pointer: &str, value: Value) {
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        self.spec.pointer_mut(parent).unwrap()[field] = value;
        self.base.pool.spec = serde_json::from_value(self.spec.clone()).unwrap();
        self.base.pool.generation += 1;
    }

    // What the cluster does.

    /// The operator's watch catches up, with one pod or with all.
    pub(super) fn see(&mut self, index: Option<usize>) {
        let Some(index) = index else {
            self.seen = self.pods.clone();
            self.lag = 0;
            return;
        };
        let mut uids: BTreeSet<&String> = self.pods.keys().collect();
        uids.extend(self.seen.keys());
        let count = uids.len().max(1);
        let Some(uid) = uids.into_iter().nth(index % count).cloned() else {
            return;
        };
        match self.pods.get(&uid) {
            Some(pod) => self.seen.insert(uid, pod.clone()),
            None => self.seen.remove(&uid),
        };
    }

    pub(super) fn kubelets(&mut self) {
        for uid in self.pods.keys().cloned().collect::<Vec<_>>() {
            self.kubelet(&uid);
        }
    }

    pub(super) fn kubelet_of(&mut self, index: usize) {
        if let Some(uid) = self.nth(index) {
            self.kubelet(&uid);
        }
    }

    /// One pod's next step: a node, a process, readiness, its end.
    fn kubelet(&mut self, uid: &str) {
        let pod = self.pods[uid].clone();
        let name = pod.metadata.name.clone().unwrap();
        let spec = pod.spec.as_ref().unwrap();
        if is_failed(&pod) {
            if pod.metadata.deletion_timestamp.is_some() {
                self.gone(uid);
            }
            return;
        }
        let Some(node) = spec.node_name.clone() else {
            if pod.metadata.deletion_timestamp.is_some() {
                self.gone(uid);
                return;
            }
            let lit: Vec<String> = self.base.nodes.keys().cloned().collect();
            let lit: Vec<&String> = lit
                .iter()
                .filter(|node| !self.dark.contains(*node))
                .collect();
            if lit.is_empty() {
                return;
            }
            let digit = usize::from(*uid.as_bytes().last().unwrap());
            let node = lit[digit % lit.len()].clone();
            let now = self.base.now;
            self.write(uid, |pod| {
                pod.spec.as_mut().unwrap().node_name = Some(node);
                set_condition(pod, "PodScheduled", true, now);
            });
            return;
        };
        if self.dark.contains(&node) || !self.base.nodes.contains_key(&node) {
            return;
        }
        if pod.metadata.deletion_timestamp.is_some() {
            self.gone(uid);
            return;
        }
        if spec.containers[0].image.as_deref() == Some(BROKEN_IMAGE) {
            return;
        }
        if !self.workers.contains_key(&name) {
            let worker = Worker {
                reachable: true,
                ..Worker::default()
            };
            self.workers.insert(name.clone(), worker);
            self.cards.insert(name, card(&pod));
            let now = self.base.now;
            self.write(uid, |pod| start(pod, now));
            return;
        }
        let ready = holds(&pod, labels::REGISTERED) && !self.workers[&name].draining;
        let now = self.base.now;
        if holds(&pod, "Ready") != ready {
            self.write(uid, |pod| set_condition(pod, "Ready", ready, now));
        }
    }

    fn gone(&mut self, uid: &str) {
        if let Some(pod) = self.pods.remove(uid) {
            self.workers.remove(&pod.metadata.name.unwrap());
        }
    }

    /// The pod's readiness probe fails once.
    pub(super) fn flap(&mut self, index: usize) {
        let now = self.base.now;
        if let Some(uid) = self.nth(index) {
            self.write(&uid, |pod| set_condition(pod, "Ready", false, now));
        }
    }

    pub(super) fn fail(&mut self, index: usize) {
        let now = self.base.now;
        if let Some(uid) = self.nth(index) {
            let name = self.pods[&uid].metadata.name.clone().unwrap();
            self.workers.remove(&name);
            self.write(&uid, |pod| {
                pod.status.get_or_insert_default().phase = Some("Failed".to_owned());
                set_condition(pod, "Ready", false, now);
            });
        }
    }

    /// Somebody else deletes the pod; its preStop drains the worker.
    pub(super) fn evict(&mut self, index: usize) {
        let now = Time(self.base.now);
        if let Some(uid) = self.nth(index) {
            let name = self.pods[&uid].metadata.name.clone().unwrap();
            if let Some(worker) = self.workers.get_mut(&name) {
                worker.draining = true;
            }
            self.write(&uid, |pod| {
                pod.metadata.deletion_timestamp.get_or_insert(now);
            });
        }
    }

    pub(super) fn reach(&mut self, index: usize, reachable: bool) {
        let count = self.workers.len().max(1);
        if let Some(worker) = self.workers.values_mut().nth(index % count) {
            worker.reachable = reachable;
        }
    }

    /// A router places a run, if the worker is one that may be placed on.
    pub(super) fn place(&mut self, index: usize) {
        let Some(uid) = self.nth(index) else { return };
        let pod = &self.pods[&uid];
        let placed = holds(pod, labels::REGISTERED) && pod.metadata.deletion_timestamp.is_none();
        let name = pod.metadata.name.clone().unwrap();
        if let Some(worker) = self
            .workers
            .get_mut(&name)
            .filter(|worker| placed && !worker.draining)
        {
            worker.running += 1;
            worker.leases += 1;
        }
    }

    pub(super) fn finish_work(&mut self, index: Option<usize>) {
        let count = self.workers.len().max(1);
        for (place, worker) in self.workers.values_mut().enumerate() {
            if index.is_none_or(|index| index % count == place) {
                // What was computed is read by somebody else afterwards.
                if worker.running > 0 {
                    worker.running -= 1;
                } else {
                    worker.leases = worker.leases.saturating_sub(1);
                }
            }
        }
    }

    pub(super) fn power(&mut self, index: usize, on: bool) {
        let node = NODES[index % NODES.len()].to_owned();
        let now = self.base.now;
        if on {
            self.dark.remove(&node);
            self.base.nodes.entry(node).or_default();
            return;
        }
        self.dark.insert(node.clone());
        for uid in self.on(&node) {
            let name = self.pods[&uid].metadata.name.clone().unwrap();
            self.workers
                .entry(name)
                .and_modify(|worker| worker.reachable = false);
            self.write(&uid, |pod| set_condition(pod, "Ready", false, now));
        }
    }

    /// The node's object goes, and with it the pods that were ending on it.
    pub(super) fn remove_node(&mut self, index: usize) {
        let node = NODES[index % NODES.len()];
        self.power(index, false);
        self.base.nodes.remove(node);
        for uid in self.on(node) {
            if self.pods[&uid].metadata.deletion_timestamp.is_some() {
                self.gone(&uid);
            }
        }
    }

    fn on(&self, node: &str) -> Vec<String> {
        let on = |pod: &Pod| pod.spec.as_ref().unwrap().node_name.as_deref() == Some(node);
        let pods = self.pods.iter().filter(|(_, pod)| on(pod));
        pods.map(|(uid, _)| uid.clone()).collect()
    }

    /// The cluster ends the pods of nodes that have been dark for long.
    pub(super) fn evict_from_dark_nodes(&mut self) {
        let now = Time(self.base.now);
        for node in self.dark.clone() {
            for uid in self.on(&node) {
                self.write(&uid, |pod| {
                    pod.metadata.deletion_timestamp.get_or_insert(now.clone());
                });
            }
        }
    }

    pub(super) fn all_reachable(&mut self) {
        for (name, worker) in &mut self.workers {
            let pod = self
                .pods
                .values()
                .find(|pod| pod.metadata.name.as_ref() == Some(name));
            let node = pod.and_then(|pod| pod.spec.as_ref()?.node_name.clone());
            worker.reachable = node.is_some_and(|node| !self.dark.contains(&node));
        }
    }

    // What is so in the end.

    /// Pods that serve, and of these the ready ones of an image.
    pub(super) fn serving(&self) -> (usize, usize) {
        let image = self.spec["engine"]["image"].as_str();
        let serving: Vec<&Pod> = self
            .pods
            .values()
            .filter(|pod| self.is_live(pod) && !holds(pod, DRAINING))
            .collect();
        let of_image = |pod: &&&Pod| {
            let spec = pod.spec.as_ref().unwrap();
            spec.containers[0].image.as_deref() == image
        };
        let ready = serving
            .iter()
            .filter(of_image)
            .filter(|pod| holds(pod, "Ready"));
        (serving.len(), ready.count())
    }

    pub(super) fn live(&self) -> usize {
        self.pods.values().filter(|pod| self.is_live(pod)).count()
    }

    /// Pods whose label and worker do not agree on whether they drain.
    pub(super) fn disagreeing(&self) -> Vec<String> {
        let live = self.pods.values().filter(|pod| self.is_live(pod));
        live.filter(|pod| {
            let name = pod.metadata.name.as_ref().unwrap();
            let Some(worker) = self.workers.get(name).filter(|worker| worker.reachable) else {
                return false;
            };
            worker.draining != holds(pod, DRAINING)
                || worker.draining != (label(pod, labels::DRAINING) == Some("true"))
        })
        .map(|pod| pod.metadata.name.clone().unwrap())
        .collect()
    }
}

fn is_failed(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    phase == Some("Failed")
}

fn put(pod: &mut Pod, condition: PodCondition) {
    let status = pod.status.get_or_insert_default();
    let conditions = status.conditions.get_or_insert_default();
    conditions.retain(|known| known.type_ != condition.type_);
    conditions.push(condition);
}

fn set_condition(pod: &mut Pod, name: &str, holds: bool, now: Timestamp) {
    put(
        pod,
        PodCondition {
            type_: name.to_owned(),
            status: if holds { "True" } else { "False" }.to_owned(),
            last_transition_time: Some(Time(now)),
            ..PodCondition::default()
        },
    );
}

fn start(pod: &mut Pod, now: Timestamp) {
    let status = pod.status.get_or_insert_default();
    status.phase = Some("Running".to_owned());
    status.pod_ip = Some("10.0.0.1".to_owned());
    status.container_statuses = Some(vec![ContainerStatus {
        name: CONTAINER.to_owned(),
        state: Some(ContainerState {
            running: Some(ContainerStateRunning {
                started_at: Some(Time(now)),
            }),
            ..ContainerState::default()
        }),
        ..ContainerStatus::default()
    }]);
}

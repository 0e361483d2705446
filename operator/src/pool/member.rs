//! A pod of a pool, and what can be said of it.

use std::net::{IpAddr, SocketAddr};

use baton_crds::{PoolRole, labels};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition};
use serde_json::Value;

use super::observed::{Observed, PoolObject, WorkerLoad, WorkerReport};

/// Port of a worker's gRPC.
pub(crate) const CONTROL_PORT: u16 = 7000;
/// The one container of a worker's pod.
pub(crate) const CONTAINER: &str = "worker";
/// Name of the container of an engine that is a server of its own.
pub(crate) const ENGINE: &str = "engine";
/// Condition of a pod that is drained: True from when on, and False where a drain was taken back. The label of the same name is for
/// selectors and follows it.
pub(crate) const DRAINING: &str = labels::DRAINING;

/// The cache of nodes may learn of a node after that of pods shows a pod on it.
const NODE_LAG: SignedDuration = SignedDuration::from_secs(120);

/// A pod that the pool owns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Member<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) name: &'a str,
    pub(crate) uid: &'a str,
    pub(crate) revision: &'a str,
    pub(crate) stage: Stage,
    /// Kubernetes calls the pod ready: it can be given work.
    pub(crate) ready: bool,
    pub(crate) report: Option<&'a WorkerReport>,
}

/// Where a pod is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It is, or is to become, a replica.
    Serving,
    /// It finishes what it runs and goes then.
    Draining { since: Timestamp },
    /// Its deletion is under way.
    Terminating,
    /// It ended and is only a record.
    Finished,
    /// Its node is no more, and nobody will say so for it.
    Lost,
}

impl Stage {
    /// The pod holds its place: its devices are not free for another.
    pub(crate) fn is_live(self) -> bool {
        matches!(self, Self::Serving | Self::Draining { .. })
    }
}

impl<'a> Member<'a> {
    fn of(pod: &'a Pod, observed: &'a Observed) -> Option<Self> {
        let name = pod.metadata.name.as_deref()?;
        let uid = pod.metadata.uid.as_deref()?;
        let stage = stage(pod, observed);
        Some(Self {
            pod,
            name,
            uid,
            revision: label(pod, labels::REVISION).unwrap_or_default(),
            stage,
            ready: stage.is_live() && holds(pod, "Ready"),
            report: observed.workers.get(name),
        })
    }

    pub(crate) fn is_serving(&self) -> bool {
        self.stage == Stage::Serving
    }

    pub(crate) fn load(&self) -> Option<&'a WorkerLoad> {
        self.report?.load.as_ref().ok()
    }

    pub(crate) fn cached_blocks(&self) -> u64 {
        self.load().map_or(0, |load| load.cached_blocks)
    }

    pub(crate) fn created(&self) -> Timestamp {
        created(self.pod)
    }

    pub(crate) fn registered(&self) -> Option<&'a PodCondition> {
        condition(self.pod, labels::REGISTERED)
    }

    /// Routers may have placed runs on it: its card was accepted, or it says that something runs.
    pub(crate) fn may_hold_work(&self) -> bool {
        let busy = self.load().is_some_and(|load| !is_idle(load));
        self.process_runs() && (busy || holds(self.pod, labels::REGISTERED))
    }

    /// Nothing that was placed can be lost any more.
    pub(crate) fn is_drained(&self) -> bool {
        !self.may_hold_work()
            || self
                .load()
                .is_some_and(|load| load.draining && is_idle(load))
    }

    /// Its removal takes nothing away: it does not serve and has nothing to finish.
    pub(crate) fn is_broken(&self) -> bool {
        !self.ready && !self.may_hold_work()
    }

    /// The worker's process lives, as far as the kubelet has said. Without a status of its container nothing was started yet.
    pub(crate) fn process_runs(&self) -> bool {
        container(self.pod)
            .and_then(|status| status.state.as_ref())
            .is_some_and(|state| state.running.is_some())
    }

    pub(crate) fn control(&self) -> Option<SocketAddr> {
        let ip: IpAddr = self.pod.status.as_ref()?.pod_ip.as_deref()?.parse().ok()?;
        Some(SocketAddr::new(ip, CONTROL_PORT))
    }
}

/// Nothing runs, waits or is still to be fetched.
fn is_idle(load: &WorkerLoad) -> bool {
    load.running_sequences == 0 && load.queued_sequences == 0 && load.leases_open == 0
}

fn stage(pod: &Pod, observed: &Observed) -> Stage {
    if pod.metadata.deletion_timestamp.is_some() {
        return Stage::Terminating;
    }
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Failed" | "Succeeded")) {
        return Stage::Finished;
    }
    if is_lost(pod, observed) {
        return Stage::Lost;
    }
    match condition(pod, DRAINING).filter(|condition| condition.status == "True") {
        Some(condition) => Stage::Draining {
            since: transition(condition).unwrap_or(observed.now),
        },
        None => Stage::Serving,
    }
}

/// Its node is gone for longer than caches differ. That no node at all is there is more likely a fault of the cache; the cluster's own
/// collector ends pods of nodes that are gone in any case.
fn is_lost(pod: &Pod, observed: &Observed) -> bool {
    if observed.nodes.is_empty() {
        return false;
    }
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    let Some(node) = node.filter(|node| !observed.nodes.contains_key(*node)) else {
        return false;
    };
    let scheduled = condition(pod, "PodScheduled").and_then(transition);
    let scheduled = scheduled.unwrap_or_else(|| created(pod));
    !node.is_empty() && observed.now.duration_since(scheduled) > NODE_LAG
}

/// The pool's own pods by name, and those that carry its labels and belong to somebody else.
pub(crate) fn members(observed: &Observed) -> (Vec<Member<'_>>, Vec<&Pod>) {
    let mut own = Vec::new();
    let mut foreign = Vec::new();
    for pod in &observed.pods {
        if is_own(pod, &observed.pool.uid) {
            own.extend(Member::of(pod, observed));
        } else if is_labelled(pod, &observed.pool) {
            foreign.push(pod);
        }
    }
    own.sort_by_key(|member| member.name);
    foreign.sort_by_key(|pod| &pod.metadata.name);
    (own, foreign)
}

/// Whether the pod is that of the pool of this uid, whatever it is called and labelled.
pub(crate) fn is_own(pod: &Pod, pool: &str) -> bool {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    owners
        .iter()
        .any(|owner| owner.controller == Some(true) && owner.uid == pool)
}

/// Pools of the two kinds may share a name, so the role tells their pods apart.
fn is_labelled(pod: &Pod, pool: &PoolObject) -> bool {
    label(pod, labels::POOL) == Some(pool.name.as_str())
        && label(pod, labels::ROLE) == Some(role(pool.role))
}

/// `prefill` or `decode`.
pub(crate) fn role(role: PoolRole) -> &'static str {
    match role {
        PoolRole::Prefill => "prefill",
        PoolRole::Decode => "decode",
    }
}

pub(crate) fn label<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    Some(pod.metadata.labels.as_ref()?.get(name)?.as_str())
}

pub(crate) fn annotation<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    Some(pod.metadata.annotations.as_ref()?.get(name)?.as_str())
}

/// What the pod's worker was told when it was made; null where nothing can be read.
pub(crate) fn configuration(pod: &Pod) -> Value {
    let text = annotation(pod, labels::WORKER_CONFIG);
    text.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

pub(crate) fn condition<'a>(pod: &'a Pod, name: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == name)
}

pub(crate) fn transition(condition: &PodCondition) -> Option<Timestamp> {
    condition.last_transition_time.as_ref().map(|time| time.0)
}

/// The pod has the condition, and it is True.
pub(crate) fn holds(pod: &Pod, name: &str) -> bool {
    condition(pod, name).is_some_and(|condition| condition.status == "True")
}

/// Of the worker's container: one of the pod's own, or a sidecar where an engine is beside it.
pub(crate) fn container(pod: &Pod) -> Option<&ContainerStatus> {
    containers(pod).find(|status| status.name == CONTAINER)
}

/// Of the worker's container, and of its engine's. Others' sidecars, which a cluster may add, are no part of a worker.
pub(crate) fn containers(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    let status = pod.status.as_ref();
    let beside = status.and_then(|status| status.init_container_statuses.as_ref());
    let own = status.and_then(|status| status.container_statuses.as_ref());
    let all = beside.into_iter().chain(own).flatten();
    all.filter(|status| status.name == CONTAINER || status.name == ENGINE)
}

pub(crate) fn created(pod: &Pod) -> Timestamp {
    let created = pod.metadata.creation_timestamp.as_ref();
    created.map_or(Timestamp::MIN, |time| time.0)
}

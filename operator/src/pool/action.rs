//! What the planner of a pool answers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use baton_crds::status::PoolStatus;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

/// What to do now, what to say, and when to look again.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// To be done in this order. When one fails for a pod, the later ones of the same pod are left for the next plan; those of
    /// other pods are done. Each is harmless when it is done twice.
    pub actions: Vec<Action>,
    /// To be written if it is not what the pool has ([`super::observed::PoolObject::status`]).
    pub status: PoolStatus,
    /// Events. They tell of changes, so a pool at rest has none.
    pub notes: Vec<Note>,
    /// Something is awaited that no watch tells of.
    pub look_again: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    CreatePod(Box<Pod>),
    /// Labels and annotations of a pod; a value of none takes the name away.
    StampPod {
        pod: String,
        uid: String,
        labels: BTreeMap<String, Option<String>>,
        annotations: BTreeMap<String, Option<String>>,
    },
    /// One condition of a pod's status, merged by its type.
    SetCondition {
        pod: String,
        uid: String,
        condition: PodCondition,
    },
    /// gRPC `Worker.Drain` to the worker of the pod; `undo`: it takes work again.
    Drain {
        pod: String,
        uid: String,
        control: SocketAddr,
        undo: bool,
    },
    /// With the uid as precondition. `grace`: seconds instead of the pod's own.
    DeletePod {
        pod: String,
        uid: String,
        grace: Option<i64>,
    },
    ApplyDisruptionBudget(Box<PodDisruptionBudget>),
    /// With the uid as precondition.
    DeleteDisruptionBudget {
        name: String,
        uid: String,
    },
}

/// An event to publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    pub kind: NoteKind,
    /// One CamelCase word.
    pub reason: &'static str,
    pub message: String,
    pub regarding: Regarding,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoteKind {
    Normal,
    Warning,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Regarding {
    Pool,
    Pod { name: String, uid: String },
}

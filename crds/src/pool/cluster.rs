//! What of a pool only a cluster can honour: devices, rollout, disruption, and the author's part of the pod.
//!
//! Kubernetes' own structures are held as JSON: whoever makes pods knows their types, this crate does not.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{EngineType, Parallelism, PoolSpec};

/// Devices of one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Accelerator {
    /// The extended resource that a device is. Default [`DEFAULT_ACCELERATOR`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_name: Option<String>,
    /// Devices of each pod; see [`PoolSpec::accelerators`] for the default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma: Option<Rdma>,
    /// ResourceClaimTemplates of the pool's namespace; each pod gets a claim of each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub resource_claim_templates: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_class_name: Option<String>,
}

/// The extended resource of one GPU where a pool names none.
pub const DEFAULT_ACCELERATOR: &str = "nvidia.com/gpu";

impl Accelerator {
    #[must_use]
    pub fn resource_name(&self) -> &str {
        self.resource_name.as_deref().unwrap_or(DEFAULT_ACCELERATOR)
    }

    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// RDMA devices of each pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rdma {
    /// The extended resource that the device plugin offers.
    pub resource_name: String,
    #[serde(default = "one")]
    pub count: i32,
}

fn one() -> i32 {
    1
}

impl PoolSpec {
    /// Devices of each pod. Default: none for engines that compute on the processor (`Builtin`, `Simulated`), and what
    /// `parallelism` says for the others.
    #[must_use]
    pub fn accelerators(&self) -> i32 {
        let needed = match self.engine.engine_type {
            EngineType::Builtin | EngineType::Simulated => 0,
            EngineType::Vllm | EngineType::SgLang => {
                let Parallelism {
                    tensor, pipeline, ..
                } = self.parallelism;
                tensor.saturating_mul(pipeline)
            }
        };
        self.accelerator.count.unwrap_or(needed)
    }
}

/// How pods of an old revision make place for those of a new one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Rollout {
    /// Pods that may be there beyond `replicas`. Default 0: accelerators are scarce.
    pub max_surge: i32,
    /// Replicas that may be missing meanwhile. Default 1.
    pub max_unavailable: i32,
    /// How long a pod may go on with what it runs once it is to go. Default 300.
    pub drain_timeout_seconds: i64,
    /// Nothing of the old revision is replaced while this is true; pods that are lost still are.
    pub paused: bool,
}

impl Default for Rollout {
    fn default() -> Self {
        Self {
            max_surge: 0,
            max_unavailable: 1,
            drain_timeout_seconds: 300,
            paused: false,
        }
    }
}

impl Rollout {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// What a drain of nodes must leave.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Disruption {
    /// Makes a PodDisruptionBudget of that many pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_available: Option<i32>,
}

impl Disruption {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A variable of the environment of what computes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnvironmentVariable {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Kubernetes' `EnvVarSource`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_from: Option<Value>,
}

/// The author's part of a pod. Structures without a type here are Kubernetes' own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Template {
    #[serde(skip_serializing_if = "TemplateMetadata::is_empty")]
    pub metadata: TemplateMetadata,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// `Toleration`s.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Value>,
    /// `Affinity`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_account_name: Option<String>,
    #[serde(skip_serializing_if = "SecurityContext::is_empty")]
    pub security_context: SecurityContext,
    /// `Volume`s.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Value>,
    /// `VolumeMount`s of the container that computes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volume_mounts: Vec<Value>,
    /// `requests` and `limits` of the container that computes, beside the accelerators.
    #[serde(skip_serializing_if = "ResourceRequirements::is_empty")]
    pub resources: ResourceRequirements,
}

impl Template {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// As whom the pods run. What is absent is as Baton has it: its own images run as their user, an engine's as the image says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SecurityContext {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_as_non_root: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_as_user: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_as_group: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fs_group: Option<i64>,
}

impl SecurityContext {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Labels and annotations beside those that Baton sets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TemplateMetadata {
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl TemplateMetadata {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Resource → quantity; a quantity is a text or an integer, as Kubernetes takes both.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceRequirements {
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub requests: Map<String, Value>,
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub limits: Map<String, Value>,
}

impl ResourceRequirements {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

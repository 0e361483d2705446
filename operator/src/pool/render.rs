//! The pod of a pool's worker, made from the pool's spec.
//!
//! The container `worker` runs Baton's daemon, with the engine in it or beside a server of the engine, which is the container `engine`
//! then (`render::engine`). The daemon's configuration is an annotation of the pod that the pod reads back as a file, so
//! that a pod and its configuration cannot differ, and there is no ConfigMap to keep, to roll and to delete.
//!
//! # How `spec.template` is merged
//! | field | rule |
//! |---|---|
//! | `metadata.labels`, `metadata.annotations` | the author's and Baton's; where both have a name, Baton's |
//! | `nodeSelector`, `priorityClassName`, `serviceAccountName` | the author's |
//! | `securityContext` | the author's, field by field, of the pod; the daemon beside a server has its own |
//! | `tolerations` | the author's |
//! | `affinity` | the author's; terms of `topology.requireSame` are added to its required pod affinity |
//! | `volumes`, `volumeMounts` | Baton's, then the author's; a name or a path of Baton's is refused |
//! | `resources` | by resource name; `accelerator` wins over a resource of the same name |
//! | `engine.env` (not of the template, but alike) | Baton's, then the author's; a name of Baton's is refused |
//!
//! # What pods do not share
//! Pods have no abstract sockets and no memory in common, so `Shm` of `kvPool.transports` is left out: workers of a cluster offer
//! `Tcp` and `Local`. For the same reason no `/dev/shm` is made larger than a runtime makes it.

mod container;
mod engine;
mod model;
mod scheduling;
mod volumes;

use std::collections::BTreeMap;

use baton_crds::pool::Transport;
use baton_crds::worker_configuration::{ServerOfWorker, Weights, WorkerConfiguration};
use baton_crds::{GROUP, PoolRole, PoolSpec, VERSION, labels};
use k8s_openapi::api::core::v1::{
    Pod, PodReadinessGate, PodSecurityContext, PodSpec, SeccompProfile,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::member::role;
use super::observed::Observed;
use super::refusal::{self, Refusal};
use super::revision;

/// Seconds of a pod's grace beyond its drain: in them the process ends, and a drain that was not enough is cut in order.
pub(crate) const GRACE_BEYOND_DRAIN: i64 = 30;
/// How long SIGTERM waits for what runs. `preStop` has drained before, so what is left has had its time; the end of the pod's grace
/// would cut it without a word.
const SECONDS_AFTER_PRE_STOP: i64 = 20;
/// The user of Baton's images.
const USER: i64 = 65532;

/// Pods of the pool's current revision.
#[derive(Debug, Clone)]
pub(crate) struct Rendered<'a> {
    pub(crate) revision: String,
    observed: &'a Observed,
    /// As the worker sees them.
    weights: Option<Weights>,
    /// What the worker is told of the server beside it.
    server: Option<ServerOfWorker>,
    /// Everything of the pod but its name and what follows from it.
    template: Pod,
}

/// What of a pod does not follow from the spec that its revision is made of.
struct Particulars<'a> {
    name: &'a str,
    revision: &'a str,
    tpot_objective_milliseconds: Option<i64>,
}

impl<'a> Rendered<'a> {
    /// # Errors
    /// No pod follows from the spec: which field is wrong, and what to write instead.
    pub(crate) fn of(observed: &'a Observed) -> Result<Self, Refusal> {
        refusal::before_rendering(observed)?;
        let spec = &observed.pool.spec;
        let model = model::mounted(spec)?;
        let template = Pod {
            metadata: ObjectMeta {
                namespace: Some(observed.pool.namespace.clone()),
                labels: Some(pod_labels(observed)),
                annotations: Some(pod_annotations(spec)),
                owner_references: Some(vec![owner(observed)]),
                ..ObjectMeta::default()
            },
            spec: Some(pod_spec(observed, &model)?),
            status: None,
        };
        let mut rendered = Self {
            revision: String::new(),
            observed,
            weights: engine::weights_of_daemon(spec, model),
            server: engine::described(spec),
            template,
        };
        rendered.revision = rendered.hash();
        Ok(rendered)
    }

    /// Over the pod without what is a particular one's: its owner too, as a pool made anew from the same file has the same revision.
    fn hash(&self) -> String {
        let mut template = self.with(&Particulars {
            name: "",
            revision: "",
            tpot_objective_milliseconds: None,
        });
        template.metadata.owner_references = None;
        if let Some(spec) = &mut template.spec {
            spec.termination_grace_period_seconds = None;
            for container in &mut spec.containers {
                container.lifecycle = None;
            }
        }
        revision::of(&template)
    }

    /// A pod to create.
    pub(crate) fn pod(&self, name: &str) -> Pod {
        self.with(&Particulars {
            name,
            revision: &self.revision,
            tpot_objective_milliseconds: self.observed.policies.tpot_objective_milliseconds,
        })
    }

    fn with(&self, particulars: &Particulars<'_>) -> Pod {
        let pool = &self.observed.pool;
        let mut spec = pool.spec.clone();
        spec.kv_pool
            .transports
            .retain(|transport| *transport != Transport::Shm);
        let configuration = WorkerConfiguration {
            spec: &spec,
            role: pool.role,
            name: particulars.name,
            pool: &pool.name,
            revision: Some(particulars.revision),
            weights: self.weights.as_ref(),
            server: self.server.as_ref(),
            // A pod does not know its node's domains; they are labels of the pod once it has a node.
            topology: Vec::new(),
            tpot_objective_milliseconds: particulars.tpot_objective_milliseconds,
            drain_seconds: SECONDS_AFTER_PRE_STOP,
        };
        let mut pod = self.template.clone();
        let metadata = &mut pod.metadata;
        metadata.name = Some(particulars.name.to_owned());
        let annotations = metadata.annotations.get_or_insert_default();
        annotations.insert(
            labels::WORKER_CONFIG.to_owned(),
            configuration.to_json().to_string(),
        );
        let stamped = metadata.labels.get_or_insert_default();
        stamped.insert(labels::REVISION.to_owned(), particulars.revision.to_owned());
        pod
    }
}

pub(crate) fn owner(observed: &Observed) -> OwnerReference {
    let pool = &observed.pool;
    OwnerReference {
        api_version: format!("{GROUP}/{VERSION}"),
        kind: pool.role.kind().to_owned(),
        name: pool.name.clone(),
        uid: pool.uid.clone(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// What finds a pool's pods.
pub(crate) fn selector(name: &str, pool_role: PoolRole) -> BTreeMap<String, String> {
    BTreeMap::from([
        (labels::POOL.to_owned(), name.to_owned()),
        (labels::ROLE.to_owned(), role(pool_role).to_owned()),
    ])
}

fn pod_labels(observed: &Observed) -> BTreeMap<String, String> {
    let pool = &observed.pool;
    let role = role(pool.role);
    let mut all = pool.spec.template.metadata.labels.clone();
    all.extend(selector(&pool.name, pool.role));
    let named = [
        (labels::APP_NAME, labels::WORKER_APP),
        (labels::APP_INSTANCE, &pool.name),
        (labels::APP_COMPONENT, role),
        (labels::APP_PART_OF, labels::PART_OF_BATON),
        (labels::APP_MANAGED_BY, labels::OPERATOR_APP),
        (labels::LLM_D_ROLE, role),
        (labels::MODEL, &labels::value(&pool.spec.model.name)),
    ];
    all.extend(named.map(|(name, value)| (name.to_owned(), value.to_owned())));
    // Set by what happens to a pod, never by a template.
    all.retain(|name, _| {
        name != labels::DRAINING && name != labels::KV_IDENTITY && labels::level(name).is_none()
    });
    all
}

fn pod_annotations(spec: &PoolSpec) -> BTreeMap<String, String> {
    let mut all = spec.template.metadata.annotations.clone();
    all.insert(labels::MODEL_NAME.to_owned(), spec.model.name.clone());
    all.remove(labels::KV_IDENTITY_DIGEST);
    all
}

fn pod_spec(observed: &Observed, model: &model::Mounted) -> Result<PodSpec, Refusal> {
    let pool = &observed.pool;
    let template = &pool.spec.template;
    let drain = pool.spec.rollout.drain_timeout_seconds.max(0);
    let is_server = pool.spec.engine.engine_type.is_server();
    // Images of engines are others' and are run as they are, unless the author says otherwise; the daemon beside has the same for itself.
    let user = (!is_server).then_some(USER);
    let authors = &template.security_context;
    let worker_image = observed.settings.worker_image.as_deref();
    let (beside, computing) = if is_server {
        let daemon = engine::daemon(observed, model)?;
        (Some(vec![daemon]), engine::server(observed, model, drain)?)
    } else {
        (None, container::worker(observed, model, drain)?)
    };
    Ok(PodSpec {
        init_containers: beside,
        containers: vec![computing],
        volumes: Some(volumes::all(&pool.spec, model, worker_image)?),
        affinity: scheduling::affinity(observed)?,
        topology_spread_constraints: scheduling::spread(observed)?,
        node_selector: Some(template.node_selector.clone()).filter(|labels| !labels.is_empty()),
        tolerations: Some(parsed_list("tolerations", &template.tolerations)?)
            .filter(|tolerations| !tolerations.is_empty()),
        priority_class_name: template.priority_class_name.clone(),
        service_account_name: template.service_account_name.clone(),
        // A worker asks the API server for nothing.
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        runtime_class_name: pool.spec.accelerator.runtime_class_name.clone(),
        resource_claims: container::claims(&pool.spec),
        readiness_gates: Some(vec![PodReadinessGate {
            condition_type: labels::REGISTERED.to_owned(),
        }]),
        termination_grace_period_seconds: Some(drain + GRACE_BEYOND_DRAIN),
        restart_policy: Some("Always".to_owned()),
        security_context: Some(PodSecurityContext {
            run_as_non_root: authors.run_as_non_root.or(user.map(|_| true)),
            run_as_user: authors.run_as_user.or(user),
            run_as_group: authors.run_as_group.or(user),
            fs_group: authors.fs_group,
            seccomp_profile: Some(SeccompProfile {
                type_: "RuntimeDefault".to_owned(),
                ..SeccompProfile::default()
            }),
            ..PodSecurityContext::default()
        }),
        ..PodSpec::default()
    })
}

/// A structure of Kubernetes that the author wrote.
fn parsed<T: DeserializeOwned>(field: &str, value: &Value) -> Result<T, Refusal> {
    serde_json::from_value(value.clone()).map_err(|error| {
        let message = format!("spec.template.{field}: {error}: write it as in a pod");
        Refusal::new("InvalidTemplate", message)
    })
}

fn parsed_list<T: DeserializeOwned>(field: &str, values: &[Value]) -> Result<Vec<T>, Refusal> {
    let items = values.iter().enumerate();
    items
        .map(|(index, value)| parsed(&format!("{field}[{index}]"), value))
        .collect()
}

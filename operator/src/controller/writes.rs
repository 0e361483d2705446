//! Writes to the API server: each only while this process leads, counted, and with an error that names its object.
//!
//! Who owns which field is told apart by field managers: pods are created under one, their stamps and conditions set under another,
//! status and disruption budgets applied under their own.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use k8s_openapi::api::core::v1::{Pod, PodCondition, Secret};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions,
};
use kube::{Api, Client, ResourceExt as _};
use serde::Serialize;
use serde_json::{Value, json};

use super::fault::{Fault, code};
use crate::lease::Claim;
use crate::metrics::Metrics;

const PODS: &str = "baton-operator/pods";
const STAMPS: &str = "baton-operator/stamps";
const STATUS: &str = "baton-operator/status";
const BUDGETS: &str = "baton-operator/budgets";

/// The one way out.
#[derive(Clone)]
pub struct Writes {
    client: Client,
    claim: Arc<Claim>,
    metrics: Arc<Metrics>,
}

impl std::fmt::Debug for Writes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Writes")
            .field("claim", &self.claim)
            .finish_non_exhaustive()
    }
}

/// What a write to one object came to.
#[derive(Clone, Debug)]
pub enum Written<T> {
    /// As the API server has it now.
    Now(T),
    /// The object is not there any more.
    Gone,
}

impl Writes {
    #[must_use]
    pub fn new(client: Client, claim: Arc<Claim>, metrics: Arc<Metrics>) -> Self {
        Self {
            client,
            claim,
            metrics,
        }
    }

    /// # Errors
    /// This process does not lead.
    pub fn may(&self) -> Result<(), Fault> {
        if self.claim.holds() {
            Ok(())
        } else {
            Err(Fault::NotLeading)
        }
    }

    async fn one<T>(
        &self,
        verb: &'static str,
        resource: &'static str,
        object: &str,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Fault> {
        self.may()?;
        self.metrics.wrote(verb, resource);
        let mut request = pin!(request);
        // The client tries again by itself where the server says that it is busy. Whoever has lost the lease in such a pause, or was
        // stopped in it, must not send what it meant to write then.
        let answer = poll_fn(|context| match self.may() {
            Ok(()) => request.as_mut().poll(context).map(Ok),
            Err(fault) => Poll::Ready(Err(fault)),
        });
        answer
            .await?
            .map_err(|source| Fault::api(format!("{verb} {resource} {object}"), source))
    }

    /// Creates a pod. A pod of that name that is there already is not touched: that is a conflict.
    ///
    /// # Errors
    /// The API server refuses it or cannot be reached.
    pub async fn create_pod(&self, pod: &Pod) -> Result<Pod, Fault> {
        let namespace = pod.namespace().unwrap_or_default();
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        let parameters = PostParams {
            field_manager: Some(PODS.into()),
            ..PostParams::default()
        };
        let object = format!("{namespace}/{}", pod.name_any());
        self.one("create", "pods", &object, pods.create(&parameters, pod))
            .await
    }

    /// The pod as it is now, asked of the API server itself.
    ///
    /// # Errors
    /// The API server cannot be reached.
    pub async fn read_pod(&self, namespace: &str, pod: &str) -> Result<Option<Pod>, Fault> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        pods.get_opt(pod)
            .await
            .map_err(|source| Fault::api(format!("get pods {namespace}/{pod}"), source))
    }

    /// Sets labels and annotations of the pod `uid`; a value of none takes the name away.
    ///
    /// # Errors
    /// As [`Writes::create_pod`].
    pub async fn stamp_pod(
        &self,
        namespace: &str,
        pod: &str,
        uid: &str,
        labels: &BTreeMap<String, Option<String>>,
        annotations: &BTreeMap<String, Option<String>>,
    ) -> Result<Written<Pod>, Fault> {
        let patch = json!({"metadata": {"uid": uid, "labels": labels, "annotations": annotations}});
        self.patch_pod(namespace, pod, &patch, false).await
    }

    /// Sets one condition of the pod `uid`.
    ///
    /// # Errors
    /// As [`Writes::create_pod`].
    pub async fn set_condition(
        &self,
        namespace: &str,
        pod: &str,
        uid: &str,
        condition: &PodCondition,
    ) -> Result<Written<Pod>, Fault> {
        let patch = json!({"metadata": {"uid": uid}, "status": {"conditions": [condition]}});
        self.patch_pod(namespace, pod, &patch, true).await
    }

    async fn patch_pod(
        &self,
        namespace: &str,
        pod: &str,
        patch: &Value,
        status: bool,
    ) -> Result<Written<Pod>, Fault> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let parameters = PatchParams {
            field_manager: Some(STAMPS.into()),
            ..PatchParams::default()
        };
        // Strategic: conditions are merged by their type, and a null takes a name away.
        let patch = Patch::Strategic(patch);
        let object = format!("{namespace}/{pod}");
        let patched = if status {
            let request = pods.patch_status(pod, &parameters, &patch);
            self.one("patch", "pods/status", &object, request).await
        } else {
            let request = pods.patch(pod, &parameters, &patch);
            self.one("patch", "pods", &object, request).await
        };
        gone(patched)
    }

    /// Deletes the pod `uid`, and no other of its name.
    ///
    /// # Errors
    /// As [`Writes::create_pod`].
    pub async fn delete_pod(
        &self,
        namespace: &str,
        pod: &str,
        uid: &str,
        grace: Option<i64>,
    ) -> Result<(), Fault> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let parameters = DeleteParams {
            grace_period_seconds: grace.and_then(|grace| u32::try_from(grace).ok()),
            ..of_uid(uid)
        };
        let object = format!("{namespace}/{pod}");
        let deleted = self
            .one("delete", "pods", &object, pods.delete(pod, &parameters))
            .await;
        absent(deleted)
    }

    /// # Errors
    /// As [`Writes::create_pod`].
    pub async fn apply_budget(&self, budget: &PodDisruptionBudget) -> Result<(), Fault> {
        let namespace = budget.namespace().unwrap_or_default();
        let name = budget.name_any();
        let budgets: Api<PodDisruptionBudget> = Api::namespaced(self.client.clone(), &namespace);
        let parameters = PatchParams::apply(BUDGETS).force();
        let patch = Patch::Apply(budget);
        let request = budgets.patch(&name, &parameters, &patch);
        let object = format!("{namespace}/{name}");
        self.one("apply", "poddisruptionbudgets", &object, request)
            .await
            .map(|_| ())
    }

    /// # Errors
    /// As [`Writes::create_pod`].
    pub async fn delete_budget(&self, namespace: &str, name: &str, uid: &str) -> Result<(), Fault> {
        let budgets: Api<PodDisruptionBudget> = Api::namespaced(self.client.clone(), namespace);
        let parameters = of_uid(uid);
        let request = budgets.delete(name, &parameters);
        let object = format!("{namespace}/{name}");
        absent(
            self.one("delete", "poddisruptionbudgets", &object, request)
                .await,
        )
    }

    /// Applies the whole status of the object `uid` of one of Baton's kinds.
    ///
    /// # Errors
    /// As [`Writes::create_pod`].
    pub async fn apply_status(
        &self,
        resource: &'static str,
        kind: &str,
        object: &Identity<'_>,
        status: &impl Serialize,
    ) -> Result<(), Fault> {
        let api = ApiResource {
            group: baton_crds::GROUP.into(),
            version: baton_crds::VERSION.into(),
            api_version: format!("{}/{}", baton_crds::GROUP, baton_crds::VERSION),
            kind: kind.into(),
            plural: resource.into(),
        };
        let objects: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), object.namespace, &api);
        let body = json!({
            "apiVersion": api.api_version,
            "kind": kind,
            // With the uid, an object of that name that came later does not get this one's status.
            "metadata": {"name": object.name, "uid": object.uid},
            "status": status,
        });
        let parameters = PatchParams::apply(STATUS).force();
        let patch = Patch::Apply(&body);
        let request = objects.patch_status(object.name, &parameters, &patch);
        let title = format!("{}/{} (status)", object.namespace, object.name);
        let applied = self.one("apply", resource, &title, request).await;
        // It was deleted meanwhile, or its namespace is.
        gone(applied).map(|_| ())
    }

    /// Creates the secret unless one of its name is there.
    ///
    /// # Errors
    /// As [`Writes::create_pod`].
    pub async fn create_secret(&self, secret: &Secret) -> Result<(), Fault> {
        let namespace = secret.namespace().unwrap_or_default();
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), &namespace);
        let parameters = PostParams::default();
        let object = format!("{namespace}/{}", secret.name_any());
        let created = self
            .one(
                "create",
                "secrets",
                &object,
                secrets.create(&parameters, secret),
            )
            .await;
        match created {
            Err(Fault::Api { source, .. }) if already_exists(&source) => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// # Errors
    /// As [`Writes::create_pod`].
    pub async fn create_event(&self, event: &Event) -> Result<(), Fault> {
        let namespace = event.namespace().unwrap_or_default();
        let events: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let parameters = PostParams::default();
        let object = format!("{namespace}/{}", event.name_any());
        self.one(
            "create",
            "events",
            &object,
            events.create(&parameters, event),
        )
        .await
        .map(|_| ())
    }
}

/// One object of the API server.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
    pub uid: &'a str,
}

fn of_uid(uid: &str) -> DeleteParams {
    DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(uid.to_owned()),
            resource_version: None,
        }),
        ..DeleteParams::default()
    }
}

fn gone<T>(written: Result<T, Fault>) -> Result<Written<T>, Fault> {
    match written {
        Ok(object) => Ok(Written::Now(object)),
        Err(Fault::Api { source, .. }) if code(&source) == Some(404) => Ok(Written::Gone),
        Err(fault) => Err(fault),
    }
}

/// A deletion of what is not there has reached its aim, and so has one of an object that another one has replaced.
fn absent(written: Result<impl Sized, Fault>) -> Result<(), Fault> {
    match written {
        Ok(_) => Ok(()),
        Err(Fault::Api { source, .. }) if matches!(code(&source), Some(404 | 409)) => Ok(()),
        Err(fault) => Err(fault),
    }
}

fn already_exists(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409 && status.reason == "AlreadyExists")
}

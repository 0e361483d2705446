//! A look at one policy: what exists is gathered, and what follows from it written to its status.

use std::sync::Arc;
use std::time::Duration;

use baton_crds::status::RoutePolicyStatus;
use baton_crds::{GROUP, VERSION};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::ResourceExt as _;
use tracing::info;

use super::context::Context;
use super::fault::Fault;
use super::key::PolicyKey;
use super::pools::{resync, unreadable_conditions};
use super::views;
use super::work::Looked;
use super::writes::Identity;
use crate::objects::RoutePolicy;
use crate::policy::{Observed, Other, PolicyObject, plan};

/// The least pause between two looks that nothing but time is the reason for.
const LEAST: Duration = Duration::from_millis(500);

/// Looks at the policy `key`.
///
/// # Errors
/// Something has to be tried again; the error names the object and the next step.
pub async fn look(context: Arc<Context>, key: PolicyKey) -> Result<Looked, Fault> {
    let Some(object) = context.caches.policy(&key) else {
        let routers: Vec<String> = context
            .caches
            .routers
            .state()
            .iter()
            .filter_map(|pod| pod.uid())
            .collect();
        context
            .routers
            .retain(|uid| routers.iter().any(|known| known == uid));
        context.unreadable_policies.lock().remove(&key);
        return Ok(Looked::Gone);
    };
    context.writes.may()?;
    match &object.0 {
        Ok(policy) => reconcile(&context, &key, policy).await,
        Err(invalid) => {
            unreadable(&context, &key, &invalid.metadata, &invalid.error).await?;
            Ok(Looked::Again(resync()))
        }
    }
}

async fn reconcile(
    context: &Context,
    key: &PolicyKey,
    policy: &RoutePolicy,
) -> Result<Looked, Fault> {
    let object = object(key, policy);
    if object.deleting {
        return Ok(Looked::Again(resync()));
    }
    let pods = context.caches.routers_of(&key.namespace);
    let wanted = (key.name.as_str(), object.generation);
    let (routers, next) = context.routers.ask(&pods, wanted, context.now()).await;
    let uid = object.uid.clone();
    let status = object.status.clone();
    let observed = Observed {
        refusals: policy.problems(),
        pools: views::pools(&context.caches, &key.namespace),
        others: others(context, key),
        cards: views::cards(&context.caches, &context.reports, &key.namespace),
        routers,
        now: Timestamp::now(),
        policy: object,
    };
    let plan = plan(&observed);
    if status.as_ref() != Some(&plan.status) {
        apply(context, key, &uid, &plan.status).await?;
        info!(policy = %key, generation = observed.policy.generation, "status written");
    }
    let regarding = ObjectReference {
        api_version: Some(format!("{GROUP}/{VERSION}")),
        kind: Some("RoutePolicy".into()),
        name: Some(key.name.clone()),
        namespace: Some(key.namespace.clone()),
        uid: Some(uid),
        ..ObjectReference::default()
    };
    for note in &plan.notes {
        context
            .events
            .publish(&context.writes, note, regarding.clone(), context.now())
            .await;
    }
    let after = next.map_or_else(resync, |next| next.min(resync()));
    Ok(Looked::Again(after.max(LEAST)))
}

fn object(key: &PolicyKey, policy: &RoutePolicy) -> PolicyObject {
    let metadata = &policy.metadata;
    PolicyObject {
        name: key.name.clone(),
        namespace: key.namespace.clone(),
        uid: policy.uid().unwrap_or_default(),
        generation: metadata.generation.unwrap_or_default(),
        created: metadata.creation_timestamp.as_ref().map(|time| time.0),
        deleting: metadata.deletion_timestamp.is_some(),
        spec: policy.spec.clone(),
        status: policy.status.clone(),
    }
}

fn others(context: &Context, key: &PolicyKey) -> Vec<Other> {
    context
        .caches
        .policies_of(&key.namespace)
        .iter()
        .filter_map(|policy| {
            let policy = policy.0.as_ref().ok()?;
            let metadata = &policy.metadata;
            if policy.name_any() == key.name || metadata.deletion_timestamp.is_some() {
                return None;
            }
            let mut models = vec![policy.spec.model.clone()];
            models.extend(policy.spec.aliases.iter().cloned());
            Some(Other {
                name: policy.name_any(),
                created: metadata.creation_timestamp.as_ref().map(|time| time.0),
                models,
            })
        })
        .collect()
}

async fn apply(
    context: &Context,
    key: &PolicyKey,
    uid: &str,
    status: &RoutePolicyStatus,
) -> Result<(), Fault> {
    let identity = Identity {
        namespace: &key.namespace,
        name: &key.name,
        uid,
    };
    context
        .writes
        .apply_status("routepolicies", "RoutePolicy", &identity, status)
        .await
}

/// The status says why, once for each generation.
async fn unreadable(
    context: &Context,
    key: &PolicyKey,
    metadata: &kube::core::ObjectMeta,
    reason: &str,
) -> Result<(), Fault> {
    let said = (metadata.generation, reason.to_owned());
    if context.unreadable_policies.lock().get(key) == Some(&said) {
        return Ok(());
    }
    let status = RoutePolicyStatus {
        observed_generation: metadata.generation,
        conditions: unreadable_conditions(reason, metadata.generation.unwrap_or_default()),
        ..RoutePolicyStatus::default()
    };
    let uid = metadata.uid.clone().unwrap_or_default();
    apply(context, key, &uid, &status).await?;
    context.unreadable_policies.lock().insert(key.clone(), said);
    Ok(())
}

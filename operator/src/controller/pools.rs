//! A look at one pool: what exists is gathered, planned with, and the plan carried out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use baton_crds::labels as names;
use baton_crds::status::PoolStatus;
use baton_crds::{GROUP, VERSION};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use kube::ResourceExt as _;
use parking_lot::Mutex;
use tracing::info;

use super::context::{Context, Memory};
use super::execute::{Trouble, execute, find_out};
use super::fault::{Class, Fault};
use super::key::PoolKey;
use super::views;
use super::work::Looked;
use super::writes::Identity;
use crate::condition::{Verdict, condition};
use crate::metrics::PoolLabels;
use crate::objects::{Pool, PoolKind, labels};
use crate::policy::facts;
use crate::pool::{Note, Observed, PoolObject, Regarding, disruption, plan};
use crate::random;

/// A worker that did not answer is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// A pool at rest is compared with what exists this often, and up to twice: a watch may have missed something.
const RESYNC: Duration = Duration::from_secs(300);
/// The least pause between two looks that nothing but time is the reason for.
const LEAST: Duration = Duration::from_millis(500);

/// Looks at the pool `key`.
///
/// # Errors
/// Something has to be tried again; the error names the object and the next step.
pub async fn look(context: Arc<Context>, key: PoolKey) -> Result<Looked, Fault> {
    let Some(object) = context.caches.pool(&key) else {
        forget(&context, &key);
        return Ok(Looked::Gone);
    };
    context.writes.may()?;
    let memory = context.memory_of(&key);
    match &object.0 {
        Ok(pool) => reconcile(&context, &key, pool, &memory).await,
        Err(invalid) => {
            let reason = invalid.error.clone();
            unreadable(&context, &key, &invalid.metadata, &reason, &memory).await?;
            Ok(Looked::Again(resync()))
        }
    }
}

async fn reconcile(
    context: &Context,
    key: &PoolKey,
    pool: &Pool,
    memory: &Mutex<Memory>,
) -> Result<Looked, Fault> {
    find_out(context, key, &pool.uid().unwrap_or_default(), memory).await?;
    let pods = pods(context, key, memory);
    context
        .reports
        .refresh(&pods, &context.workers, context.now())
        .await;
    // Workers have taken their time to answer, and the cache may have moved on.
    let pods = self::pods(context, key, memory);
    let (reports, next_report) = context.reports.of(&pods);
    let object = object(key, pool);
    let status = object.status.clone();
    let observed = Observed {
        refusals: pool.problems(key.role),
        nodes: context.caches.nodes_of(&pods),
        workers: reports,
        policies: policies(context, key),
        disruption_budget: context
            .caches
            .budget(&key.namespace, &disruption::name(&object)),
        creation_error: memory.lock().creation_error.clone(),
        settings: context.settings.clone(),
        now: Timestamp::now(),
        pool: object,
        pods,
    };
    let mut random = random_numbers(key)?;
    let plan = plan(&observed, &mut random);
    measure(context, key, &observed.pool, &plan.status);

    let mut refused = None;
    if !observed.pool.deleting && status.as_ref() != Some(&plan.status) {
        let identity = Identity {
            namespace: &key.namespace,
            name: &key.name,
            uid: &observed.pool.uid,
        };
        let (resource, kind) = resource(key);
        let written = context
            .writes
            .apply_status(resource, kind, &identity, &plan.status)
            .await;
        match written {
            Ok(()) => {
                info!(pool = %key, generation = observed.pool.generation, ready = plan.status.ready, draining = plan.status.draining_replicas, "status written");
            }
            // A pool whose status is refused is looked after all the same: nothing that is done depends on it.
            Err(fault) if fault.is_of_one_request() && fault.class() == Class::Failure => {
                refused = Some(fault);
            }
            Err(fault) => return Err(fault),
        }
    }
    let done = execute(context, key, plan.actions, memory).await;
    publish(context, key, &observed.pool.uid, &plan.notes).await;
    let Trouble {
        fault,
        worker_silent,
    } = done?;
    if let Some(fault) = refused.or(fault) {
        return Err(fault);
    }
    let next_report = next_report.map(|due| due.saturating_sub(context.now()));
    let after = [
        plan.look_again,
        next_report,
        worker_silent.then_some(ASK_AGAIN),
        Some(resync()),
    ];
    let after = after.into_iter().flatten().min().unwrap_or(RESYNC);
    Ok(Looked::Again(after.max(LEAST)))
}

/// The pool's pods with own writes laid over.
fn pods(context: &Context, key: &PoolKey, memory: &Mutex<Memory>) -> Vec<Pod> {
    let cached = context.caches.pods_of(key);
    let shown = || cached.iter().map(Arc::as_ref);
    let mut memory = memory.lock();
    memory.pending.settle(shown(), Timestamp::now());
    memory.pending.overlay(shown())
}

fn object(key: &PoolKey, pool: &Pool) -> PoolObject {
    PoolObject {
        role: key.role,
        name: key.name.clone(),
        namespace: key.namespace.clone(),
        uid: pool.uid().unwrap_or_default(),
        generation: pool.metadata.generation.unwrap_or_default(),
        labels: labels(&pool.metadata),
        deleting: pool.metadata.deletion_timestamp.is_some(),
        spec: pool.spec.clone(),
        status: pool.status.clone(),
    }
}

fn policies(context: &Context, key: &PoolKey) -> crate::pool::PolicyFacts {
    let pools = views::pools(&context.caches, &key.namespace);
    let Some(mine) = pools
        .iter()
        .find(|pool| pool.role == key.role && pool.name == key.name)
    else {
        // It is being deleted.
        return crate::pool::PolicyFacts::default();
    };
    let policies = context.caches.policies_of(&key.namespace);
    let specs: Vec<(String, &baton_crds::RoutePolicySpec)> = policies
        .iter()
        .filter(|policy| {
            policy
                .0
                .as_ref()
                .is_ok_and(|policy| policy.metadata.deletion_timestamp.is_none())
        })
        .filter_map(|policy| Some((policy.name_any(), &policy.0.as_ref().ok()?.spec)))
        .collect();
    facts::of(mine, &specs, &pools)
}

/// Numbers that nobody can foresee. Names of pods are made of them, a few a look.
fn random_numbers(key: &PoolKey) -> Result<impl FnMut() -> u64 + use<>, Fault> {
    let failed = |error| {
        Fault::Other(format!(
            "{key}: the system gives no random numbers: {error}"
        ))
    };
    let seed = random::bytes::<32>().map_err(failed)?;
    let mut count = 0_u64;
    Ok(move || {
        count += 1;
        let digest = blake3::keyed_hash(&seed, &count.to_le_bytes());
        let mut number = [0; 8];
        number.copy_from_slice(&digest.as_bytes()[..8]);
        u64::from_le_bytes(number)
    })
}

/// The last resort: a spec that cannot be read has a status that says so, and nothing of its pods is changed.
async fn unreadable(
    context: &Context,
    key: &PoolKey,
    metadata: &kube::core::ObjectMeta,
    reason: &str,
    memory: &Mutex<Memory>,
) -> Result<(), Fault> {
    let said = (metadata.generation, reason.to_owned());
    if memory.lock().unreadable.as_ref() == Some(&said) {
        return Ok(());
    }
    let generation = metadata.generation.unwrap_or_default();
    let status = PoolStatus {
        observed_generation: metadata.generation,
        conditions: unreadable_conditions(reason, generation),
        ..PoolStatus::default()
    };
    let uid = metadata.uid.clone().unwrap_or_default();
    let identity = Identity {
        namespace: &key.namespace,
        name: &key.name,
        uid: &uid,
    };
    let (resource, kind) = resource(key);
    context
        .writes
        .apply_status(resource, kind, &identity, &status)
        .await?;
    memory.lock().unreadable = Some(said);
    Ok(())
}

/// Conditions of an object that cannot be read.
#[must_use]
pub fn unreadable_conditions(reason: &str, generation: i64) -> Vec<baton_crds::Condition> {
    let message = format!(
        "{reason}: mend the field; the object was written under other rules than those of the installed CustomResourceDefinition"
    );
    [
        (
            names::READY,
            Verdict::fails("SpecUnreadable", message.clone()),
        ),
        (names::RECONCILING, Verdict::fails("Stalled", "")),
        (names::STALLED, Verdict::holds("SpecUnreadable", message)),
    ]
    .into_iter()
    .map(|(name, verdict)| condition(name, verdict, &[], generation, Timestamp::now()))
    .collect()
}

async fn publish(context: &Context, key: &PoolKey, uid: &str, notes: &[Note]) {
    for note in notes {
        let regarding = match &note.regarding {
            Regarding::Pool => ObjectReference {
                api_version: Some(format!("{GROUP}/{VERSION}")),
                kind: Some(key.role.kind().into()),
                name: Some(key.name.clone()),
                namespace: Some(key.namespace.clone()),
                uid: Some(uid.to_owned()),
                ..ObjectReference::default()
            },
            Regarding::Pod { name, uid } => ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Pod".into()),
                name: Some(name.clone()),
                namespace: Some(key.namespace.clone()),
                uid: Some(uid.clone()),
                ..ObjectReference::default()
            },
        };
        context
            .events
            .publish(&context.writes, note, regarding, context.now())
            .await;
    }
}

const STATES: [&str; 6] = [
    "desired",
    "current",
    "ready",
    "available",
    "updated",
    "draining",
];

fn measure(context: &Context, key: &PoolKey, pool: &PoolObject, status: &PoolStatus) {
    let counts = [
        pool.spec.replicas,
        status.replicas,
        status.ready_replicas,
        status.available_replicas,
        status.updated_replicas,
        status.draining_replicas,
    ];
    let gauges: BTreeMap<&'static str, i32> = STATES.into_iter().zip(counts).collect();
    for (state, count) in gauges {
        let labels = pool_labels(key, state);
        let gauge = context.metrics.pool_replicas.get_or_create(&labels);
        gauge.set(count.into());
    }
}

fn pool_labels(key: &PoolKey, state: &'static str) -> PoolLabels {
    PoolLabels {
        namespace: key.namespace.clone(),
        role: match key.role {
            baton_crds::PoolRole::Prefill => "prefill",
            baton_crds::PoolRole::Decode => "decode",
        },
        pool: key.name.clone(),
        state,
    }
}

/// A pool that is gone leaves no memory and no metric.
fn forget(context: &Context, key: &PoolKey) {
    context.memory.lock().remove(key);
    for state in STATES {
        context
            .metrics
            .pool_replicas
            .remove(&pool_labels(key, state));
    }
    let there: std::collections::BTreeSet<String> = context
        .caches
        .workers
        .state()
        .iter()
        .filter_map(|pod| pod.uid())
        .collect();
    context.reports.retain(|uid| there.contains(uid));
}

fn resource(key: &PoolKey) -> (&'static str, &'static str) {
    let kind = PoolKind(key.role);
    match kind.0 {
        baton_crds::PoolRole::Prefill => ("prefillpools", key.role.kind()),
        baton_crds::PoolRole::Decode => ("decodepools", key.role.kind()),
    }
}

/// From [`RESYNC`] to twice that.
pub(super) fn resync() -> Duration {
    RESYNC.mul_f64(1.0 + random::fraction())
}

#[cfg(test)]
mod tests;

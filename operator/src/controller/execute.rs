//! Carries out what a plan of a pool says.

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use parking_lot::Mutex;
use tracing::{info, warn};

use super::context::{Attempt, Context, Memory};
use super::fault::{Class, Fault, code, words};
use super::hash_key;
use super::key::PoolKey;
use super::writes::Written;
use crate::pool::{Action, CreationError, is_own};
use crate::worker;

/// What has not worked.
#[derive(Debug, Default)]
pub struct Trouble {
    /// The first refusal of the API server; what it was about is tried again later.
    pub fault: Option<Fault>,
    /// A worker did not answer: it is asked again soon, which the API server has nothing to do with.
    pub worker_silent: bool,
}

/// Does what `actions` say, in their order. An action that fails keeps back the later ones of the same pod only, unless the API server
/// itself is in trouble.
///
/// # Errors
/// The API server cannot be reached, or this process does not lead: nothing more was tried.
pub async fn execute(
    context: &Context,
    key: &PoolKey,
    actions: Vec<Action>,
    memory: &Mutex<Memory>,
) -> Result<Trouble, Fault> {
    let mut trouble = Trouble::default();
    let mut kept_back: BTreeSet<String> = BTreeSet::new();
    let mut creates = true;
    let mut has_key = false;
    if !actions
        .iter()
        .any(|action| matches!(action, Action::CreatePod(_)))
    {
        // What was refused is not wanted any more. Should it be again, the next try says whether it still is refused.
        memory.lock().creation_error = None;
    }
    for action in actions {
        let pod = pod_of(&action).map(str::to_owned);
        if pod.as_ref().is_some_and(|pod| kept_back.contains(pod)) {
            continue;
        }
        let new = match &action {
            Action::CreatePod(pod) => pod.name_any(),
            _ => String::new(),
        };
        let is_creation = !new.is_empty();
        if is_creation && !creates {
            continue;
        }
        if is_creation && !has_key {
            // Without it the pods would wait for a volume.
            if let Err(fault) = hash_key::ensure(&context.writes, &key.namespace).await {
                note(&mut trouble, fault)?;
            }
            has_key = true;
        }
        if let Action::Drain {
            pod,
            control,
            undo,
            uid: _,
        } = &action
        {
            context.writes.may()?;
            match worker::drain(*control, *undo).await {
                Ok(()) => {
                    memory.lock().silent.remove(pod);
                    info!(pool = %key, pod, undo, "worker asked to drain");
                }
                Err(error) => {
                    // It is asked again every few seconds until its time to drain is over: said once.
                    if memory.lock().silent.insert(pod.clone()) {
                        warn!(pool = %key, pod, undo, %error, "worker not asked to drain, tried again");
                    }
                    trouble.worker_silent = true;
                    kept_back.insert(pod.clone());
                }
            }
            continue;
        }
        let Err(fault) = one(context, key, action, memory).await else {
            continue;
        };
        if is_creation {
            // A server that is out of order has refused nothing.
            if fault.class() == Class::Failure && fault.is_of_one_request() {
                memory.lock().creation_error = Some(refusal(&fault, &new));
            }
            // What refuses one refuses the next, be it a quota or a rule.
            creates = false;
        }
        kept_back.extend(pod);
        note(&mut trouble, fault)?;
    }
    Ok(trouble)
}

/// Keeps the first fault; one that is not of one request ends everything.
fn note(trouble: &mut Trouble, fault: Fault) -> Result<(), Fault> {
    if !fault.is_of_one_request() {
        return Err(fault);
    }
    trouble.fault.get_or_insert(fault);
    Ok(())
}

async fn one(
    context: &Context,
    key: &PoolKey,
    action: Action,
    memory: &Mutex<Memory>,
) -> Result<(), Fault> {
    let writes = &context.writes;
    let namespace = &key.namespace;
    match action {
        Action::CreatePod(pod) => {
            let name = pod.name_any();
            begin(memory, &name, Attempt::Create);
            let created = writes.create_pod(&pod).await;
            end(memory, &name, created.as_ref().err());
            let created = created?;
            info!(pool = %key, pod = created.name_any(), "pod created");
            let mut memory = memory.lock();
            memory.creation_error = None;
            memory.pending.created(created, Timestamp::now());
        }
        Action::StampPod {
            pod,
            uid,
            labels,
            annotations,
        } => {
            let written = writes
                .stamp_pod(namespace, &pod, &uid, &labels, &annotations)
                .await?;
            patched(memory, &uid, written);
        }
        Action::SetCondition {
            pod,
            uid,
            condition,
        } => {
            let written = writes
                .set_condition(namespace, &pod, &uid, &condition)
                .await?;
            info!(pool = %key, pod, condition = condition.type_, status = condition.status, reason = condition.reason, "condition set");
            patched(memory, &uid, written);
        }
        Action::DeletePod { pod, uid, grace } => {
            begin(memory, &pod, Attempt::Delete(uid.clone()));
            let deleted = writes.delete_pod(namespace, &pod, &uid, grace).await;
            end(memory, &pod, deleted.as_ref().err());
            deleted?;
            info!(pool = %key, pod, grace, "pod deleted");
            memory.lock().pending.deleted(&uid, Timestamp::now());
        }
        Action::ApplyDisruptionBudget(budget) => writes.apply_budget(&budget).await?,
        Action::DeleteDisruptionBudget { name, uid } => {
            writes.delete_budget(namespace, &name, &uid).await?;
        }
        // Workers are no affair of the API server.
        Action::Drain { .. } => {}
    }
    Ok(())
}

/// From here on the write may be made, even if this look is cut short.
fn begin(memory: &Mutex<Memory>, pod: &str, attempt: Attempt) {
    memory.lock().uncertain.insert(pod.to_owned(), attempt);
}

fn end(memory: &Mutex<Memory>, pod: &str, fault: Option<&Fault>) {
    let mut memory = memory.lock();
    // Nobody else is likely to use a name that was made up here: a pod that is there already is that of an earlier try of the same
    // request, whose answer was lost. The client tries again by itself. Whose the pod is, is asked before the next plan.
    let creates = matches!(memory.uncertain.get(pod), Some(Attempt::Create));
    let is_there = creates && fault.is_some_and(|fault| fault.class() == Class::Conflict);
    if !is_there && !fault.is_some_and(Fault::is_unanswered) {
        memory.uncertain.remove(pod);
    }
}

/// Finds out what became of writes whose answers did not come. The cache may be behind them, and a plan that does not know of them
/// would make a pod too many.
///
/// `uid`: of the pool.
///
/// # Errors
/// The API server cannot be reached: nothing may be planned.
pub async fn find_out(
    context: &Context,
    key: &PoolKey,
    uid: &str,
    memory: &Mutex<Memory>,
) -> Result<(), Fault> {
    let uncertain = memory.lock().uncertain.clone();
    for (pod, attempt) in uncertain {
        let found = context.writes.read_pod(&key.namespace, &pod).await?;
        let mut memory = memory.lock();
        let now = Timestamp::now();
        match (attempt, found) {
            (Attempt::Create, Some(pod)) if is_own(&pod, uid) => memory.pending.created(pod, now),
            // Nothing was made, or somebody else has the name: the next plan makes up another one.
            (Attempt::Create, _) => {}
            (Attempt::Delete(uid), Some(pod)) if pod.uid().as_ref() == Some(&uid) => {
                memory.pending.patched(pod, now);
            }
            (Attempt::Delete(uid), _) => memory.pending.deleted(&uid, now),
        }
        memory.uncertain.remove(&pod);
    }
    Ok(())
}

fn patched(memory: &Mutex<Memory>, uid: &str, written: Written<Pod>) {
    let pending = &mut memory.lock().pending;
    match written {
        Written::Now(pod) => pending.patched(pod, Timestamp::now()),
        Written::Gone => pending.deleted(uid, Timestamp::now()),
    }
}

fn pod_of(action: &Action) -> Option<&str> {
    match action {
        Action::StampPod { pod, .. }
        | Action::SetCondition { pod, .. }
        | Action::Drain { pod, .. }
        | Action::DeletePod { pod, .. } => Some(pod),
        Action::CreatePod(_)
        | Action::ApplyDisruptionBudget(_)
        | Action::DeleteDisruptionBudget { .. } => None,
    }
}

/// In the API server's words where it has said something. The name of the pod is another one at each try, and is left out: a status must
/// not change with it.
fn refusal(fault: &Fault, pod: &str) -> CreationError {
    let (code, said) = match fault {
        Fault::Api { source, .. } if code(source).is_some() => (code(source), words(source)),
        other => (None, other.to_string()),
    };
    let fixed = pod.rsplit_once('-').map_or(pod, |(fixed, _)| fixed);
    CreationError {
        code,
        message: said.replace(pod, &format!("{fixed}-…")),
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn a_refusal_is_the_same_at_each_try() {
        let refused = |pod: &str| {
            let status = Status {
                code: 403,
                message: format!("pods \"{pod}\" is forbidden: exceeded quota: gpus"),
                ..Status::default()
            };
            let fault = Fault::api("create pods n/p", kube::Error::Api(Box::new(status)));
            refusal(&fault, pod)
        };
        let said = CreationError {
            code: Some(403),
            message: "pods \"d-abc-…\" is forbidden: exceeded quota: gpus".to_owned(),
        };
        assert_eq!(refused("d-abc-12345"), said);
        assert_eq!(refused("d-abc-67890"), said);
    }
}

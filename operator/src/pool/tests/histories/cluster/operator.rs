//! The operator at work on the cluster, and what must never happen while it is.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{Attempt, Cluster, is_failed, put};
use crate::pool::member::{DRAINING, condition, holds};
use crate::pool::{Action, Observed, Pending, Plan, WorkerLoad, WorkerReport, plan};

/// What becomes of a plan's actions, each named by its place.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::pool::tests::histories) struct Fates {
    /// It is refused, and so are later ones of the same pod.
    pub(in crate::pool::tests::histories) fails: Option<usize>,
    /// If it makes or deletes a pod: it is done, the answer is lost, and nothing more is tried.
    pub(in crate::pool::tests::histories) unanswered: Option<usize>,
    /// The operator is killed before it.
    pub(in crate::pool::tests::histories) killed_after: Option<usize>,
}

impl Cluster {
    /// It is killed and started again: what it had in memory is lost, and its cache is filled anew.
    pub(in crate::pool::tests::histories) fn restart(&mut self) {
        self.pending = Pending::default();
        self.uncertain.clear();
        self.see(None);
    }

    pub(in crate::pool::tests::histories) fn observe(&mut self) -> Observed {
        let now = self.base.now;
        self.pending.settle(self.seen.values(), now);
        let pods = self.pending.overlay(self.seen.values());
        let workers = self.workers.iter().map(|(name, worker)| {
            let report = if worker.reachable {
                WorkerReport {
                    card: Ok(Box::new(self.cards[name].clone())),
                    load: Ok(WorkerLoad {
                        running_sequences: worker.running,
                        leases_open: worker.leases,
                        draining: worker.draining,
                        ..WorkerLoad::default()
                    }),
                }
            } else {
                WorkerReport {
                    card: Err("it does not answer".to_owned()),
                    load: Err("it does not answer".to_owned()),
                }
            };
            (name.clone(), report)
        });
        Observed {
            pods,
            workers: workers.collect(),
            ..self.base.clone()
        }
    }

    /// As the operator asks the API server itself, which knows by now: what became of writes that were not answered.
    fn find_out(&mut self) {
        let now = self.base.now;
        for (name, attempt) in std::mem::take(&mut self.uncertain) {
            let mut pods = self.pods.values();
            let found = pods.find(|pod| pod.metadata.name.as_ref() == Some(&name));
            match (attempt, found.cloned()) {
                (Attempt::Create, Some(pod)) => self.pending.created(pod, now),
                (Attempt::Create, None) => {}
                (Attempt::Delete(uid), Some(pod)) if pod.metadata.uid.as_ref() == Some(&uid) => {
                    self.pending.patched(pod, now);
                }
                (Attempt::Delete(uid), _) => self.pending.deleted(&uid, now),
            }
        }
    }

    /// Finds out, plans and carries the plan out.
    pub(in crate::pool::tests::histories) fn reconcile(&mut self, fates: Fates) -> Plan {
        self.find_out();
        let observed = self.observe();
        let mut number = self.numbers;
        let plan = plan(&observed, &mut || {
            number += 1;
            number * 7919
        });
        self.numbers = number;
        let mut left_alone = BTreeSet::new();
        for (index, action) in plan.actions.iter().enumerate() {
            if fates.killed_after == Some(index) {
                self.restart();
                return plan;
            }
            let pod = acted_on(action);
            if pod.is_some_and(|pod| left_alone.contains(pod)) {
                continue;
            }
            let lost = fates.unanswered == Some(index);
            let done = fates.fails != Some(index) && self.carry_out(action, &observed, lost);
            if !self.uncertain.is_empty() {
                // The API server is in trouble.
                break;
            }
            if let Some(pod) = pod.filter(|_| !done) {
                left_alone.insert(pod);
            }
        }
        self.base.pool.status = Some(plan.status.clone());
        plan
    }

    /// `lost`: the operator does not learn what it came to.
    fn carry_out(&mut self, action: &Action, observed: &Observed, lost: bool) -> bool {
        let now = self.base.now;
        match action {
            Action::CreatePod(pod) => self.create(pod, observed, lost),
            Action::StampPod {
                uid,
                labels,
                annotations,
                ..
            } => {
                let written = self.write(uid, |pod| {
                    lay_over(pod.metadata.labels.get_or_insert_default(), labels);
                    lay_over(
                        pod.metadata.annotations.get_or_insert_default(),
                        annotations,
                    );
                });
                self.answered(written, now)
            }
            Action::SetCondition { uid, condition, .. } => {
                if condition.type_ == DRAINING && condition.status == "True" {
                    self.check_floor(uid, observed);
                }
                let written = self.write(uid, |pod| put(pod, condition.clone()));
                self.answered(written, now)
            }
            Action::Drain { pod, undo, .. } => {
                let worker = self.workers.get_mut(pod).filter(|worker| worker.reachable);
                worker.map(|worker| worker.draining = !undo).is_some()
            }
            Action::DeletePod { pod, uid, grace } => {
                let done = self.delete(pod, uid, *grace, observed);
                if lost {
                    let attempt = Attempt::Delete(uid.clone());
                    self.uncertain.insert(pod.clone(), attempt);
                } else {
                    self.pending.deleted(uid, self.base.now);
                }
                done
            }
            other => panic!("no budget is declared: {other:?}"),
        }
    }

    fn answered(&mut self, written: Option<Pod>, now: Timestamp) -> bool {
        let done = written.is_some();
        if let Some(pod) = written {
            self.pending.patched(pod, now);
        }
        done
    }

    fn create(&mut self, pod: &Pod, observed: &Observed, lost: bool) -> bool {
        let name = pod.metadata.name.as_deref().unwrap();
        let mut names = self
            .pods
            .values()
            .filter_map(|pod| pod.metadata.name.as_deref());
        assert!(names.all(|known| known != name), "name {name} is taken");
        let uid = format!("uid-{:06}", self.number());
        let version = self.number().to_string();
        let mut pod = pod.clone();
        pod.metadata.uid = Some(uid.clone());
        pod.metadata.resource_version = Some(version);
        pod.metadata.creation_timestamp = Some(Time(self.base.now));
        if lost {
            let name = pod.metadata.name.clone().unwrap();
            self.uncertain.insert(name, Attempt::Create);
        } else {
            self.pending.created(pod.clone(), self.base.now);
        }
        self.pods.insert(uid, pod);
        self.created += 1;

        let rollout = &observed.pool.spec.rollout;
        let most = observed.pool.spec.replicas + rollout.max_surge;
        let live = self.pods.values().filter(|pod| self.is_live(pod)).count();
        assert!(
            live <= usize::try_from(most).unwrap(),
            "{live} pods hold devices, at most {most} may"
        );
        true
    }

    pub(super) fn is_live(&self, pod: &Pod) -> bool {
        let ends = pod.metadata.deletion_timestamp.is_some() || is_failed(pod);
        !ends && !self.has_lost_its_node(pod)
    }

    fn has_lost_its_node(&self, pod: &Pod) -> bool {
        let node = pod.spec.as_ref().unwrap().node_name.as_ref();
        node.is_some_and(|node| !self.base.nodes.contains_key(node))
    }

    fn is_stranded(&self, uid: &str) -> bool {
        let pod = self.pods.get(uid);
        pod.is_some_and(|pod| self.has_lost_its_node(pod))
    }

    /// Ready as far as the operator can know; marked and deleted as it really is by the operator, for these are its own writes.
    fn is_available(&self, uid: &str, observed: &Observed) -> bool {
        let mut pods = observed.pods.iter();
        let known = pods.find(|pod| pod.metadata.uid.as_deref() == Some(uid));
        let marked = self.pods.get(uid).is_some_and(|pod| holds(pod, DRAINING));
        let ours = marked || self.deleted_by_us.contains(uid);
        known.is_some_and(|pod| {
            holds(pod, "Ready") && pod.metadata.deletion_timestamp.is_none() && !is_failed(pod)
        }) && !ours
    }

    /// A replica that serves may go only if enough are left.
    fn check_floor(&self, uid: &str, observed: &Observed) {
        // A pod whose node is gone serves nobody, whatever its conditions said last.
        if !self.is_available(uid, observed) || self.is_stranded(uid) {
            return;
        }
        let spec = &observed.pool.spec;
        let surge = spec.rollout.max_surge;
        let unavailable = spec.rollout.max_unavailable.max(i32::from(surge == 0));
        let least = usize::try_from(spec.replicas - unavailable).unwrap_or_default();
        let known = observed
            .pods
            .iter()
            .filter_map(|pod| pod.metadata.uid.as_deref());
        let available = known.filter(|uid| self.is_available(uid, observed)).count();
        assert!(
            available > least,
            "{available} are available, {least} have to stay, and {uid} is taken away"
        );
    }

    fn delete(&mut self, name: &str, uid: &str, grace: Option<i64>, observed: &Observed) -> bool {
        let Some(pod) = self.pods.get(uid) else {
            // Somebody else was faster: not found.
            return false;
        };
        self.check_floor(uid, observed);
        assert!(
            self.deleted_by_us.insert(uid.to_owned()),
            "pod {name} is deleted twice"
        );
        self.check_drained(pod, name, observed);
        let now = Time(self.base.now);
        if grace == Some(0) {
            self.gone(uid);
        } else {
            self.write(uid, |pod| {
                pod.metadata.deletion_timestamp.get_or_insert(now);
            });
        }
        true
    }

    fn check_drained(&self, pod: &Pod, name: &str, observed: &Observed) {
        let busy = self
            .workers
            .get(name)
            .is_some_and(|w| w.running > 0 || w.leases > 0);
        let mark = condition(pod, DRAINING).filter(|mark| mark.status == "True");
        let timeout = observed.pool.spec.rollout.drain_timeout_seconds;
        let timed_out = mark.is_some_and(|mark| {
            let since = mark.last_transition_time.as_ref().unwrap().0;
            self.base.now.duration_since(since) >= SignedDuration::from_secs(timeout)
        });
        assert!(
            !busy || timed_out || !self.is_live(pod),
            "pod {name} is deleted while its worker has work"
        );
    }
}

fn acted_on(action: &Action) -> Option<&str> {
    match action {
        Action::StampPod { pod, .. }
        | Action::SetCondition { pod, .. }
        | Action::Drain { pod, .. }
        | Action::DeletePod { pod, .. } => Some(pod),
        _ => None,
    }
}

fn lay_over(base: &mut BTreeMap<String, String>, change: &BTreeMap<String, Option<String>>) {
    for (name, value) in change {
        match value {
            Some(value) => base.insert(name.clone(), value.clone()),
            None => base.remove(name),
        };
    }
}

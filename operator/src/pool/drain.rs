//! Drain before delete: how far a pod is, and what its worker has to be told.
//!
//! That a pod drains, and since when, is a condition of the pod. The label follows the condition, and the worker is told again until
//! its load says that it takes nothing new. So each of the three may fail, or its writer be killed, at any time.
//!
//! The whole pool is not drained when it is deleted: its pods go by their owner reference, each with its own `preStop` drain and the
//! grace that this needs. A finalizer that waited for drains would keep a namespace from going while a worker does not answer.

use std::net::SocketAddr;
use std::time::Duration;

use jiff::SignedDuration;

use super::member::{DRAINING, Member, Stage, condition, holds, transition};
use super::observed::{Observed, WorkerLoad};
use super::render::GRACE_BEYOND_DRAIN;

/// A drain that was not enough is not waited for again by the pod's `preStop`.
pub(crate) const GRACE_AFTER_TIMEOUT: i64 = 30;
/// Between two looks at a worker that drains.
pub(crate) const LOOK: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Progress {
    Drained,
    /// What is left, in words.
    TimedOut(String),
    /// So long at most.
    Waiting(Duration),
}

/// None: the pod does not drain.
pub(crate) fn progress(member: &Member<'_>, observed: &Observed) -> Option<Progress> {
    let Stage::Draining { since } = member.stage else {
        return None;
    };
    if member.is_drained() {
        return Some(Progress::Drained);
    }
    let seconds = observed.pool.spec.rollout.drain_timeout_seconds.max(0);
    let spent = observed.now.duration_since(since);
    let left = SignedDuration::from_secs(seconds) - spent;
    match Duration::try_from(left) {
        Ok(left) if !left.is_zero() => Some(Progress::Waiting(left)),
        _ => Some(Progress::TimedOut(what_is_left(member, seconds))),
    }
}

fn what_is_left(member: &Member<'_>, seconds: i64) -> String {
    match member.report.map(|report| &report.load) {
        Some(Ok(WorkerLoad {
            running_sequences,
            queued_sequences,
            leases_open,
            ..
        })) => format!(
            "after {seconds} s it still had {running_sequences} running and {queued_sequences} queued sequences and {leases_open} open leases"
        ),
        Some(Err(error)) => format!("for {seconds} s, and its worker cannot be asked: {error}"),
        None => format!("for {seconds} s, and its worker was never heard"),
    }
}

/// Seconds for which a drain that nobody here ordered is left to whoever did. A `preStop` may wait for it so long: that of a pod which
/// its node ends, which shows late or not at all.
pub(crate) fn patience(observed: &Observed) -> i64 {
    observed.pool.spec.rollout.drain_timeout_seconds.max(0) + GRACE_BEYOND_DRAIN
}

/// A replica that was told to drain by nobody here (a probe that failed, somebody's `GET /drain`), and has not served since for longer
/// than a pod takes to end.
fn is_stray(member: &Member<'_>, observed: &Observed) -> bool {
    let unready = condition(member.pod, "Ready").filter(|ready| ready.status == "False");
    let since = unready.and_then(transition);
    let long = since.is_some_and(|since| {
        observed.now.duration_since(since) > SignedDuration::from_secs(patience(observed))
    });
    member.is_serving() && long && !holds(member.pod, "DisruptionTarget")
}

/// What the worker has to be told: to drain, or (true) that it need not. `drains`: as it is after this plan.
pub(crate) fn order(
    member: &Member<'_>,
    drains: bool,
    observed: &Observed,
) -> Option<(SocketAddr, bool)> {
    let control = member
        .control()
        .filter(|_| member.stage.is_live() && member.process_runs())?;
    let told = member.load().map(|load| load.draining);
    if drains {
        return (told != Some(true)).then_some((control, false));
    }
    // A worker also drains by itself when its pod is to end, and must not be called back from that: only whom we marked is, and who has
    // not ended in all the time that a pod has for it.
    let taken_back = matches!(member.stage, Stage::Draining { .. });
    let marked = condition(member.pod, DRAINING).is_some();
    let unheard = told == Some(true) && (marked || is_stray(member, observed));
    (taken_back || unheard).then_some((control, true))
}

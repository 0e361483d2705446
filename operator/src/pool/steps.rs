//! Scale and rollout: which pods are created, drained, taken back from their drain, and deleted, in this step.
//!
//! # Rules
//! - Replicas that are ready never become fewer than `replicas - maxUnavailable` by what is done here.
//! - Pods that hold their devices, those that drain too, never become more than `replicas + maxSurge` by what is created here. A pod
//!   whose deletion is under way is not counted: on a dead node it may stay so for ever.
//! - What is deleted in a step makes room in the next one, when it was seen to be gone. So a deletion that fails costs nothing.
//! - A pod that does not serve and holds no work ([`Member::is_broken`]) costs nothing when it goes, so a revision that never came up
//!   does not stand in the way of its own fix.
//! - Pods that would stay beyond `replicas + maxSurge` (a spec was changed in a rollout that is stuck) go as far as they are broken.
//! - A pod that serves and is not ready just now does cost: many of them at once are more often a fault of the cluster than theirs.
//! - Who is drained and wanted again is taken back before anything is created: its cache is warm.
//! - With `rollout.paused` every revision counts as the current one.

use std::cmp::Reverse;
use std::time::Duration;

use super::drain::{self, Progress};
use super::failed;
use super::member::{Member, Stage};
use super::observed::Observed;

/// Pods that are created in one step. Each creation that is seen makes the next step.
const CREATED_AT_ONCE: usize = 32;

/// What to do now.
#[derive(Debug, Default)]
pub(crate) struct Steps<'m, 'a> {
    pub(crate) undrain: Vec<&'m Member<'a>>,
    pub(crate) drain: Vec<(&'m Member<'a>, Why)>,
    pub(crate) delete: Vec<Deletion<'m, 'a>>,
    pub(crate) create: usize,
    /// Something is to be done at that time from now on, if nothing else happens.
    pub(crate) wait: Option<Duration>,
}

#[derive(Debug)]
pub(crate) struct Deletion<'m, 'a> {
    pub(crate) member: &'m Member<'a>,
    pub(crate) why: Why,
    /// Seconds instead of the pod's own.
    pub(crate) grace: Option<i64>,
}

/// Why a pod goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Why {
    /// There are more than are wanted.
    ScaleDown,
    /// It is of an old revision.
    Rollout,
    /// It has finished what it ran.
    Drained,
    /// It has not, and its time is over: what still runs, in words.
    DrainTimedOut(String),
    /// Its node is gone.
    NodeLost,
    /// It has ended, and was kept for a while to be looked at.
    Finished,
}

/// The numbers of the rules above.
struct Bounds {
    replicas: usize,
    most: usize,
    least_available: usize,
}

impl Bounds {
    fn of(observed: &Observed) -> Self {
        let spec = &observed.pool.spec;
        let number = |value: i32| usize::try_from(value).unwrap_or_default();
        let replicas = number(spec.replicas);
        let surge = number(spec.rollout.max_surge);
        // Neither more nor fewer would be no step at all.
        let unavailable = number(spec.rollout.max_unavailable).max(usize::from(surge == 0));
        Self {
            replicas,
            most: replicas + surge,
            least_available: replicas.saturating_sub(unavailable),
        }
    }
}

pub(crate) fn decide<'m, 'a>(
    members: &'m [Member<'a>],
    revision: &str,
    observed: &Observed,
) -> Steps<'m, 'a> {
    let bounds = Bounds::of(observed);
    let paused = observed.pool.spec.rollout.paused;
    let is_current = |member: &Member<'_>| paused || member.revision == revision;
    let mut steps = Steps::default();

    clear_away(members, observed, &mut steps);
    let current = members
        .iter()
        .filter(|member| member.is_serving() && is_current(member))
        .count();
    let missing = bounds.replicas.saturating_sub(current);
    drains(members, observed, &mut steps, missing, is_current);
    let current = current + steps.undrain.len();
    removals(members, &bounds, &mut steps, current, is_current);

    let live = members.iter().filter(|member| member.stage.is_live());
    let room = bounds.most.saturating_sub(live.count());
    let missing = bounds.replicas.saturating_sub(current);
    let wanted = room.min(missing).min(CREATED_AT_ONCE);
    match failed::pause(members, observed.now).filter(|_| wanted > 0) {
        Some(pause) => steps.look_within(pause),
        None => steps.create = wanted,
    }
    steps
}

impl Steps<'_, '_> {
    fn look_within(&mut self, time: Duration) {
        self.wait = Some(self.wait.map_or(time, |known| known.min(time)));
    }
}

/// Pods that are none any more.
fn clear_away<'m, 'a>(members: &'m [Member<'a>], observed: &Observed, steps: &mut Steps<'m, 'a>) {
    for member in members.iter().filter(|member| member.stage == Stage::Lost) {
        // No kubelet is there that could confirm the end.
        let (why, grace) = (Why::NodeLost, Some(0));
        steps.delete.push(Deletion { member, why, grace });
    }
    for member in failed::old_records(members, observed.now) {
        let (why, grace) = (Why::Finished, None);
        steps.delete.push(Deletion { member, why, grace });
    }
}

/// Draining pods: wanted again, done, out of time, or waited for.
fn drains<'m, 'a>(
    members: &'m [Member<'a>],
    observed: &Observed,
    steps: &mut Steps<'m, 'a>,
    missing: usize,
    is_current: impl Fn(&Member<'_>) -> bool,
) {
    let mut draining: Vec<(&Member<'_>, Progress)> = members
        .iter()
        .filter_map(|member| Some((member, drain::progress(member, observed)?)))
        .collect();
    // Who is taken back first: who answers, then who has most in its cache, then the oldest.
    draining.sort_by_key(|(member, _)| {
        (
            member.load().is_none(),
            Reverse(member.cached_blocks()),
            member.created(),
            member.name,
        )
    });
    for (member, progress) in draining {
        let is_missed = steps.undrain.len() < missing && is_current(member);
        // Whoever is out of time and does not answer is no replica.
        let can_return = member.may_hold_work()
            && (member.load().is_some() || matches!(progress, Progress::Waiting(_)));
        match progress {
            _ if is_missed && can_return => steps.undrain.push(member),
            Progress::TimedOut(left) => steps.delete.push(Deletion {
                member,
                why: Why::DrainTimedOut(left),
                grace: Some(drain::GRACE_AFTER_TIMEOUT),
            }),
            Progress::Drained => steps.delete.push(Deletion {
                member,
                why: Why::Drained,
                grace: None,
            }),
            Progress::Waiting(time) => steps.look_within(time.min(drain::LOOK)),
        }
    }
}

/// Serving pods that have to go, as far as the bounds let them go now. `current`: how many of the current revision serve.
fn removals<'m, 'a>(
    members: &'m [Member<'a>],
    bounds: &Bounds,
    steps: &mut Steps<'m, 'a>,
    current: usize,
    is_current: impl Fn(&Member<'_>) -> bool,
) {
    let mut serving: Vec<&Member<'_>> = members.iter().filter(|m| m.is_serving()).collect();
    // Who goes first: who is not ready, then an old revision, then who has least in its cache, then the youngest.
    serving.sort_by_key(|member| {
        (
            member.ready,
            !member.is_broken(),
            is_current(member),
            member.cached_blocks(),
            Reverse(member.created()),
            member.name,
        )
    });
    let mut surplus = current.saturating_sub(bounds.replicas);
    let mut leaving = Vec::new();
    for member in &serving {
        if !is_current(member) {
            leaving.push((*member, Why::Rollout));
        } else if surplus > 0 {
            surplus -= 1;
            leaving.push((*member, Why::ScaleDown));
        }
    }

    let available = serving.iter().filter(|member| member.ready).count();
    let mut may_be_missed = available.saturating_sub(bounds.least_available);
    // Pods of the old revision that serve and are not ready now: as many as there would be, were they ready and the new ones too.
    let unready_new = serving.iter().filter(|m| !m.ready && is_current(m)).count();
    let whole = serving
        .iter()
        .filter(|member| !member.is_broken() || is_current(member));
    let mut may_leave = whole
        .count()
        .saturating_sub(bounds.least_available + unready_new);
    for (member, why) in leaving {
        if member.is_broken() {
            let grace = None;
            steps.delete.push(Deletion { member, why, grace });
            continue;
        }
        let is_old = why == Why::Rollout;
        if (member.ready && may_be_missed == 0) || (is_old && may_leave == 0) {
            continue;
        }
        if member.ready {
            may_be_missed -= 1;
        }
        if is_old {
            may_leave -= 1;
        }
        steps.look_within(drain::LOOK);
        steps.drain.push((member, why));
    }
    let goes = |member: &Member<'_>| {
        let drains = steps.drain.iter().any(|(other, _)| other.uid == member.uid);
        drains || steps.delete.iter().any(|one| one.member.uid == member.uid)
    };
    let staying: Vec<_> = serving.into_iter().filter(|member| !goes(member)).collect();
    let excess = staying.len().saturating_sub(bounds.most);
    let broken = staying.into_iter().filter(|member| member.is_broken());
    let excess: Vec<_> = broken.take(excess).collect();
    steps.delete.extend(excess.into_iter().map(|member| {
        let (why, grace) = (Why::ScaleDown, None);
        Deletion { member, why, grace }
    }));
}

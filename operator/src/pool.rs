//! What a pool needs next: a pure planner from what exists to what to do.
//!
//! | module | subject |
//! |---|---|
//! | [`observed`] | what the planner is told: the pool, its pods, their nodes, what their workers say, the time |
//! | [`action`] | what it answers: actions, the pool's status, events |
//! | [`pending`] | own writes that a cache does not show yet, laid over what it shows |
//! | `member` | a pod of the pool, and where it is in its life |
//! | `refusal`, `render`, `revision` | the pod that a spec means, or why none; its hash |
//! | `steps` | scale and rollout: who is created, drained, taken back, deleted |
//! | `drain`, `failed` | how far a drain is; pods that ended, and how long their replacements wait |
//! | `registration`, `stamp` | the readiness gate by the worker's card; labels that a pod gets later |
//! | [`disruption`] | the PodDisruptionBudget |
//! | `status`, `trouble`, `notes` | what the pool's author is told |
//!
//! [`plan`] is a function of its arguments and of nothing else. It remembers nothing: what it did before it reads from the objects
//! (a draining pod's condition says since when it drains), so an operator that is killed at any line goes on where it was.

pub mod action;
pub mod disruption;
mod drain;
mod failed;
mod member;
mod notes;
pub mod observed;
pub mod pending;
mod refusal;
mod registration;
mod render;
mod revision;
mod stamp;
mod status;
mod steps;
mod trouble;

pub use action::{Action, Note, NoteKind, Plan, Regarding};
pub use observed::{
    Compatibility, CreationError, Level, Observed, PolicyFacts, PoolObject, Settings, WorkerLoad,
    WorkerReport,
};
pub use pending::Pending;

pub(crate) use member::is_own;

use std::collections::BTreeSet;
use std::time::Duration;

use member::{DRAINING, Member, Stage, members};
use render::Rendered;
use steps::{Steps, Why};

/// Between two looks at a worker that has not registered.
const REGISTRATION_LOOK: Duration = Duration::from_secs(2);
/// Between two looks at a pod that is not ready for another reason, which a watch tells of when it changes.
const READINESS_LOOK: Duration = Duration::from_secs(30);

/// What to do now for a pool.
///
/// `random` gives numbers that nobody can foresee; names of pods are made of them.
pub fn plan(observed: &Observed, random: &mut dyn FnMut() -> u64) -> Plan {
    if observed.pool.deleting {
        // The garbage collector takes the pods, and whatever is written to the pool is lost.
        return Plan {
            actions: Vec::new(),
            status: observed.pool.status.clone().unwrap_or_default(),
            notes: Vec::new(),
            look_again: None,
        };
    }
    let (members, foreign) = members(observed);
    let rendered = Rendered::of(observed);
    let current = rendered.as_ref().map_or("", |rendered| &rendered.revision);
    let (budget, foreign_budget) = disruption::plan(observed);
    let mut actions: Vec<Action> = budget.into_iter().collect();
    let mut notes = Vec::new();
    let mut look_again = None;

    let steps = match &rendered {
        Ok(rendered) => steps::decide(&members, &rendered.revision, observed),
        // Nothing is started or ended by a spec that cannot be followed; what is there is still looked after.
        Err(_) => Steps::default(),
    };
    for member in &members {
        actions.extend(member_actions(member, &steps, observed, current));
        look_again = earlier(look_again, awaited(member));
    }
    actions.extend(steps.delete.iter().map(|deletion| Action::DeletePod {
        pod: deletion.member.name.to_owned(),
        uid: deletion.member.uid.to_owned(),
        grace: deletion.grace,
    }));
    if let Ok(rendered) = &rendered {
        let mut taken: BTreeSet<String> = members.iter().map(|m| m.name.to_owned()).collect();
        for _ in 0..steps.create {
            let name = new_name(&observed.pool.name, &rendered.revision, &taken, random);
            actions.push(Action::CreatePod(Box::new(rendered.pod(&name))));
            taken.insert(name);
        }
        notes.extend(notes::of_steps(&steps, &rendered.revision, observed));
    }
    let facts = status::Facts {
        members: &members,
        foreign: &foreign,
        foreign_budget,
        revision: rendered.as_ref().map(|rendered| rendered.revision.as_str()),
    };
    let status = status::of(&facts, observed);
    notes.extend(notes::of_change(observed.pool.status.as_ref(), &status));
    Plan {
        actions,
        status,
        notes,
        look_again: earlier(look_again, steps.wait),
    }
}

/// What is to be written on a pod, and said to its worker.
fn member_actions(
    member: &Member<'_>,
    steps: &Steps<'_, '_>,
    observed: &Observed,
    current: &str,
) -> Vec<Action> {
    let is = |other: &Member<'_>| other.uid == member.uid;
    if !member.stage.is_live() || steps.delete.iter().any(|deletion| is(deletion.member)) {
        return Vec::new();
    }
    let starts = steps.drain.iter().find(|(other, _)| is(other));
    let returns = steps.undrain.iter().any(|other| is(other));
    let drains = !returns && (starts.is_some() || matches!(member.stage, Stage::Draining { .. }));
    let (pod, uid) = (member.name.to_owned(), member.uid.to_owned());
    let mut actions = Vec::new();

    let (gate, accepted) = registration::gate(member, observed, current);
    let mark = match starts {
        Some((_, why)) => Some(("True", reason(why))),
        None if returns => Some(("False", "TakenBack")),
        None => None,
    };
    let mark = mark.and_then(|(status, reason)| {
        let known = member::condition(member.pod, DRAINING);
        let verdict = (status, reason, String::new());
        registration::condition(DRAINING, verdict, known, observed.now)
    });
    // The mark first: with it the rest follows in any later plan. The labels before the gate: routers read them once it is open.
    actions.extend(mark.map(|condition| Action::SetCondition {
        pod: pod.clone(),
        uid: uid.clone(),
        condition,
    }));
    actions.extend(stamp::stamp(member, observed, accepted, drains));
    actions.extend(gate.map(|condition| Action::SetCondition {
        pod: pod.clone(),
        uid: uid.clone(),
        condition,
    }));
    actions.extend(
        drain::order(member, drains, observed).map(|(control, undo)| Action::Drain {
            pod,
            uid,
            control,
            undo,
        }),
    );
    actions
}

fn reason(why: &Why) -> &'static str {
    match why {
        Why::Rollout => "Rollout",
        _ => "ScaleDown",
    }
}

/// When a pod that is not ready is to be looked at again: its worker may answer at any time, and what takes long becomes a trouble.
fn awaited(member: &Member<'_>) -> Option<Duration> {
    if !member.is_serving() || member.ready {
        return None;
    }
    let registered = member
        .registered()
        .is_some_and(|gate| gate.status == "True");
    Some(if member.process_runs() && !registered {
        REGISTRATION_LOOK
    } else {
        READINESS_LOOK
    })
}

/// `POOL-REVISION-RANDOM`. A name is never used twice: the pod of a node that is out of power may stay for ever as one that ends.
fn new_name(
    pool: &str,
    revision: &str,
    taken: &BTreeSet<String>,
    random: &mut dyn FnMut() -> u64,
) -> String {
    const LETTERS: usize = 5;
    loop {
        let mut number = random();
        let mut name = format!("{pool}-{revision}-");
        for _ in 0..LETTERS {
            let base = revision::ALPHABET.len() as u64;
            let letter = usize::try_from(number % base).unwrap_or_default();
            name.push(char::from(revision::ALPHABET[letter]));
            number /= base;
        }
        if !taken.contains(&name) {
            return name;
        }
    }
}

fn earlier(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests;

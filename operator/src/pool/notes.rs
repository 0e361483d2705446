//! Events: what happened to a pool, said once, when it happened.

use baton_crds::labels;
use baton_crds::status::PoolStatus;

use super::action::{Note, NoteKind, Regarding};
use super::member::Member;
use super::observed::Observed;
use super::steps::{Deletion, Steps, Why};

/// Of what this plan does.
pub(crate) fn of_steps(steps: &Steps<'_, '_>, revision: &str, observed: &Observed) -> Vec<Note> {
    let seconds = observed.pool.spec.rollout.drain_timeout_seconds;
    let mut notes = Vec::new();
    for (member, why) in &steps.drain {
        let message = format!(
            "{}; it drains for at most {seconds} s",
            cause(why, revision, observed)
        );
        notes.push(of_pod(member, NoteKind::Normal, "Draining", message));
    }
    for member in &steps.undrain {
        let message = "it is wanted again and takes work again".to_owned();
        notes.push(of_pod(member, NoteKind::Normal, "DrainTakenBack", message));
    }
    for Deletion { member, why, .. } in &steps.delete {
        let (kind, reason) = match why {
            Why::DrainTimedOut(_) => (NoteKind::Warning, "DrainTimedOut"),
            Why::NodeLost => (NoteKind::Warning, "NodeLost"),
            _ => (NoteKind::Normal, "Deleted"),
        };
        notes.push(of_pod(member, kind, reason, cause(why, revision, observed)));
    }
    notes
}

fn cause(why: &Why, revision: &str, observed: &Observed) -> String {
    match why {
        Why::ScaleDown => format!(
            "more pods than the {} that are wanted",
            observed.pool.spec.replicas
        ),
        Why::Rollout => format!("the current revision is {revision}"),
        Why::Drained => "nothing runs on it any more".to_owned(),
        Why::DrainTimedOut(left) => format!("it has drained {left}: it is ended now"),
        Why::NodeLost => "its node is gone: it is replaced".to_owned(),
        Why::Finished => "it ended, and was kept for a while to be looked at".to_owned(),
    }
}

fn of_pod(member: &Member<'_>, kind: NoteKind, reason: &'static str, message: String) -> Note {
    Note {
        kind,
        reason,
        message,
        regarding: Regarding::Pod {
            name: member.name.to_owned(),
            uid: member.uid.to_owned(),
        },
    }
}

/// Of what the new status says and the known one did not: that it stalled, and that it is ready.
pub(crate) fn of_change(known: Option<&PoolStatus>, new: &PoolStatus) -> Vec<Note> {
    let find = |status: Option<&PoolStatus>, name: &str| {
        let conditions = status.iter().flat_map(|status| &status.conditions);
        let mut found = conditions.filter(|condition| condition.condition_type == name);
        found.next().cloned()
    };
    let mut notes = Vec::new();
    let mut tell = |kind, reason, message: &str| {
        notes.push(Note {
            kind,
            reason,
            message: message.to_owned(),
            regarding: Regarding::Pool,
        });
    };
    let (was, is) = (
        find(known, labels::STALLED),
        find(Some(new), labels::STALLED),
    );
    if let Some(is) = is.filter(|is| is.status == "True")
        && was.is_none_or(|was| was.status != is.status || was.reason != is.reason)
    {
        tell(
            NoteKind::Warning,
            "Stalled",
            &format!("{}: {}", is.reason, is.message),
        );
    }
    let (was, is) = (find(known, labels::READY), find(Some(new), labels::READY));
    if let Some(is) = is {
        let changed = was.as_ref().is_none_or(|was| was.status != is.status);
        if is.status == "True" && changed {
            tell(NoteKind::Normal, "Ready", &is.message);
        }
        let left_alone = |message: &str| message.contains(" is left alone");
        let told = was.is_some_and(|was| left_alone(&was.message));
        if left_alone(&is.message) && !told {
            tell(NoteKind::Warning, "NotAdopted", &is.message);
        }
    }
    notes
}

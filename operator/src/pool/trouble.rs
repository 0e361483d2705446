//! What is wrong with a pod, in words that say what to do.
//!
//! The texts change only when the trouble does: no counts and no times, so that a pod that keeps failing does not keep writing.

use baton_crds::labels;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod};

use super::drain;
use super::member::{CONTAINER, ENGINE, Member, Stage, condition, containers, created, transition};
use super::observed::Observed;
use super::registration::{CARD_MISMATCH, CARD_UNAVAILABLE};

/// Something that keeps a pod from serving.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trouble {
    /// One CamelCase word.
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    /// It does not go away by waiting.
    pub(crate) needs_a_human: bool,
}

/// A pod that is merely slow is not in trouble yet.
const PATIENCE: SignedDuration = SignedDuration::from_mins(2);
/// After so many restarts a worker keeps ending.
const CRASHES: i32 = 2;
/// A restarted worker that runs for so long does not.
const STEADY: SignedDuration = SignedDuration::from_mins(5);

/// None for a pod that serves, and for one that only needs its time.
pub(crate) fn of(member: &Member<'_>, observed: &Observed) -> Option<Trouble> {
    if member.ready || !matches!(member.stage, Stage::Serving) {
        return None;
    }
    let pod = member.pod;
    unscheduled(pod)
        .or_else(|| waiting(pod))
        .or_else(|| ended(pod, observed.now))
        .or_else(|| contradicting(pod))
        .or_else(|| slow(member, observed))
}

fn trouble(reason: &'static str, message: String, needs_a_human: bool) -> Option<Trouble> {
    Some(Trouble {
        reason,
        message,
        needs_a_human,
    })
}

/// Nodes may be added by themselves, so this is waited for.
fn unscheduled(pod: &Pod) -> Option<Trouble> {
    let scheduled =
        condition(pod, "PodScheduled").filter(|condition| condition.status == "False")?;
    let why = scheduled
        .message
        .as_deref()
        .unwrap_or("the scheduler does not say why");
    let message = format!("cannot be scheduled: {}", sentence(why));
    trouble("Unschedulable", message, false)
}

fn waiting(pod: &Pod) -> Option<Trouble> {
    containers(pod).find_map(|status| waiting_container(pod, status))
}

fn waiting_container(pod: &Pod, status: &ContainerStatus) -> Option<Trouble> {
    let waiting = status.state.as_ref()?.waiting.as_ref()?;
    let why = waiting.message.as_deref().map(sentence).unwrap_or_default();
    let spec = pod.spec.as_ref()?;
    let own = spec.containers.iter();
    let image = own
        .chain(spec.init_containers.iter().flatten())
        .find(|container| container.name == status.name)
        .and_then(|container| container.image.as_deref())
        .unwrap_or(&status.image);
    // The image of a daemon beside an engine is the operator's.
    let field = match (status.name.as_str(), spec.init_containers.is_some()) {
        (CONTAINER, true) => "the operator's --worker-image",
        _ => "spec.engine.image",
    };
    match waiting.reason.as_deref()? {
        // The kubelet alternates between the two; the second repeats the first's words after its own.
        "ErrImagePull" | "ImagePullBackOff" | "RegistryUnavailable" => {
            let why = why
                .rsplit_once("ErrImagePull: ")
                .map_or(why.as_str(), |(_, why)| why);
            trouble(
                "ImagePullFailed",
                format!(
                    "image {image} cannot be pulled: check its name in {field}, and that nodes may pull it: {why}"
                ),
                true,
            )
        }
        "InvalidImageName" | "ErrImageNeverPull" | "ImageInspectError" => trouble(
            "ImagePullFailed",
            format!("image {image} cannot be used: correct {field}: {why}"),
            true,
        ),
        "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => trouble(
            "ContainerNotStarted",
            format!("its container cannot be started: {why}"),
            true,
        ),
        _ => None,
    }
}

/// A worker that keeps ending is in turn ended, waited with and run again; that it was started once more is no news until it has
/// run for a while.
fn ended(pod: &Pod, now: Timestamp) -> Option<Trouble> {
    containers(pod).find_map(|status| ended_container(status, now))
}

fn ended_container(status: &ContainerStatus, now: Timestamp) -> Option<Trouble> {
    let what = if status.name == ENGINE {
        "engine"
    } else {
        "worker"
    };
    let state = status.state.as_ref()?;
    if let Some(running) = &state.running {
        let started = running.started_at.as_ref().map(|time| time.0);
        let young = started.is_some_and(|started| now.duration_since(started) < STEADY);
        if status.restart_count < CRASHES || !young {
            return None;
        }
    }
    let last = status.last_state.as_ref();
    let last = last.and_then(|state| state.terminated.as_ref());
    let terminated = state.terminated.as_ref().or(last)?;
    let words = last_words(terminated);
    if status.restart_count < CRASHES {
        return trouble("WorkerEnded", format!("its {what} ended: {words}"), false);
    }
    trouble(
        "CrashLoop",
        format!("its {what} keeps ending: {words}"),
        true,
    )
}

fn last_words(terminated: &ContainerStateTerminated) -> String {
    let memory = if terminated.reason.as_deref() == Some("OOMKilled") {
        ", killed for memory: raise spec.template.resources.limits.memory, or lower spec.kvPool"
    } else {
        ""
    };
    let code = terminated.exit_code;
    let said = terminated
        .message
        .as_deref()
        .map(last_line)
        .unwrap_or_default();
    let said = if said.is_empty() {
        String::new()
    } else {
        format!(": {said}")
    };
    format!("exit status {code}{memory}{said}")
}

fn contradicting(pod: &Pod) -> Option<Trouble> {
    let gate = condition(pod, labels::REGISTERED)?;
    if gate.reason.as_deref() != Some(CARD_MISMATCH) {
        return None;
    }
    let message = gate.message.clone().unwrap_or_default();
    trouble(CARD_MISMATCH, message, true)
}

/// It was given time, and is still not there.
fn slow(member: &Member<'_>, observed: &Observed) -> Option<Trouble> {
    let pod = member.pod;
    let since = condition(pod, "Ready").and_then(transition);
    let since = since.unwrap_or_else(|| created(pod));
    if observed.now.duration_since(since) < PATIENCE {
        return None;
    }
    if !member.process_runs() {
        let message = format!(
            "its container has not been created: see the events of kubectl describe pod {}",
            member.name
        );
        return trouble("ContainerNotStarted", message, false);
    }
    let gate = member.registered();
    if let Some(gate) = gate.filter(|gate| gate.reason.as_deref() == Some(CARD_UNAVAILABLE)) {
        let why = gate.message.as_deref().unwrap_or_default();
        let message = format!("its worker's card cannot be read: {}", sentence(why));
        return trouble(CARD_UNAVAILABLE, message, false);
    }
    if member.load().is_some_and(|load| load.draining) {
        let seconds = drain::patience(observed);
        let message = format!(
            "its worker was told to drain, by a probe that failed or by somebody: {seconds} s after it became unready it is told to take work again"
        );
        return trouble("NotReady", message, false);
    }
    let message = "its worker runs and is not ready: see its log".to_owned();
    trouble("NotReady", message, false)
}

/// Others' texts, bounded and in one line, without the stop at their end.
pub(crate) fn sentence(text: &str) -> String {
    const LONGEST: usize = 300;
    let words: Vec<&str> = text.split_whitespace().collect();
    let line = words.join(" ");
    let cut: String = line.chars().take(LONGEST).collect();
    cut.trim_end_matches('.').to_owned()
}

/// Of a log: what it says in the end is why.
fn last_line(text: &str) -> String {
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    sentence(last.unwrap_or_default())
}

/// Pods of a pool that are in the same trouble, as one sentence each trouble, the one that needs a human most first.
pub(crate) fn told(troubles: &[(&str, Trouble)]) -> Option<Trouble> {
    let (pod, first) = troubles
        .iter()
        .min_by_key(|(pod, trouble)| (!trouble.needs_a_human, *pod))?;
    let alike = troubles
        .iter()
        .filter(|(_, other)| other.reason == first.reason);
    let others = others(alike.count());
    Some(Trouble {
        message: format!("pod {pod} {}{others}", first.message),
        ..first.clone()
    })
}

/// After the name of one of so many pods of which the same is to be said.
pub(crate) fn others(pods: usize) -> String {
    match pods.saturating_sub(1) {
        0 => String::new(),
        1 => " (and 1 pod alike)".to_owned(),
        more => format!(" (and {more} pods alike)"),
    }
}

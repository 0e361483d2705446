//! Pods that ended: replaced at once the first time, later and later when their replacements end as well.
//!
//! A container that ends is started again by its kubelet. A pod ends for good when its node refuses or evicts it, and a node that
//! refuses one refuses the next: without a pause that is a pod a second. What to remember for it are the ended pods themselves, so
//! a few are kept for a while. They are also what somebody wants to look at.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;

use super::member::{Member, Stage, condition, created, transition};

const KEPT_FOR: SignedDuration = SignedDuration::from_mins(10);
const KEPT: usize = 5;
const FIRST_PAUSE: Duration = Duration::from_secs(10);
/// Up to 320 seconds.
const MOST_DOUBLINGS: u32 = 5;

fn ended<'m, 'a>(members: &'m [Member<'a>]) -> Vec<(&'m Member<'a>, Timestamp)> {
    let mut ended: Vec<_> = members
        .iter()
        .filter(|member| member.stage == Stage::Finished)
        .map(|member| (member, end(member.pod)))
        .collect();
    ended.sort_by_key(|(member, end)| (*end, member.name));
    ended
}

/// When it ended: the latest time that is written on it.
fn end(pod: &Pod) -> Timestamp {
    let conditions = ["DisruptionTarget", "Ready", "ContainersReady"];
    let changed = conditions
        .iter()
        .filter_map(|name| transition(condition(pod, name)?));
    let statuses = pod
        .status
        .as_ref()
        .and_then(|status| status.container_statuses.as_ref());
    let finished = statuses.into_iter().flatten().filter_map(|status| {
        let terminated = status.state.as_ref()?.terminated.as_ref()?;
        Some(terminated.finished_at.as_ref()?.0)
    });
    changed.chain(finished).fold(created(pod), Timestamp::max)
}

/// Those that were kept long enough, or are too many.
pub(crate) fn old_records<'m, 'a>(
    members: &'m [Member<'a>],
    now: Timestamp,
) -> Vec<&'m Member<'a>> {
    let ended = ended(members);
    let too_many = ended.len().saturating_sub(KEPT);
    let old = ended
        .iter()
        .enumerate()
        .filter(|(index, (_, end))| *index < too_many || now.duration_since(*end) > KEPT_FOR);
    old.map(|(_, (member, _))| *member).collect()
}

/// How long no pod is to be created. Pods that ended at the same time ended of one cause and are one failure; the second in a row is
/// waited for.
pub(crate) fn pause(members: &[Member<'_>], now: Timestamp) -> Option<Duration> {
    let mut in_a_row = 0_u32;
    let mut last: Option<Timestamp> = None;
    for (member, end) in ended(members) {
        if last.is_none_or(|last| member.created() >= last) {
            in_a_row += 1;
            last = Some(end);
        }
    }
    let doublings = in_a_row.checked_sub(2)?;
    let pause = FIRST_PAUSE * 2_u32.pow(doublings.min(MOST_DOUBLINGS));
    let since = Duration::try_from(now.duration_since(last?)).unwrap_or_default();
    pause.checked_sub(since).filter(|left| !left.is_zero())
}

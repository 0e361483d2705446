//! Which workers are asked when, and what is kept of their answers.

use serde_json::json;

use super::*;
use crate::pool::WorkerLoad;

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn pod(container: &str, version: &str, draining: bool) -> Pod {
    let labels = if draining {
        json!({names::DRAINING: "true"})
    } else {
        json!({})
    };
    serde_json::from_value(json!({
        "metadata": {"name": "w", "uid": "u", "resourceVersion": version, "labels": labels},
        "status": {
            "podIP": "127.0.0.1",
            "containerStatuses": [{
                "name": "worker", "containerID": container, "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"running": {}},
            }],
        },
    }))
    .unwrap()
}

fn silent() -> WorkerReport {
    WorkerReport {
        card: Err("silent".into()),
        load: Err("silent".into()),
    }
}

fn loaded(card: Result<Box<baton_protocol::card::Card>, String>) -> WorkerReport {
    WorkerReport {
        card,
        load: Ok(WorkerLoad::default()),
    }
}

fn entry(pod: &Pod, before: Option<Entry>, report: WorkerReport, now: Duration) -> Entry {
    let asked = Asked {
        uid: "u".into(),
        version: pod.resource_version(),
        process: process(pod).unwrap(),
    };
    next(before, asked, report, now)
}

fn due_of(pod: &Pod, entry: &Entry) -> Duration {
    due(pod, &process(pod).unwrap(), Some(entry))
}

#[test]
fn only_a_running_worker_with_an_address_is_asked() {
    assert!(process(&pod("c", "1", false)).is_some());
    let mut without = pod("c", "1", false);
    without.status.as_mut().unwrap().pod_ip = None;
    assert!(process(&without).is_none());
    let mut waiting = pod("c", "1", false);
    let status = waiting.status.as_mut().unwrap();
    status.container_statuses.as_mut().unwrap()[0].state = None;
    assert!(process(&waiting).is_none());
}

#[test]
fn a_silent_worker_is_asked_less_and_less_and_at_once_when_its_pod_changes() {
    let pod_then = pod("c", "1", false);
    let mut known = None;
    let mut pauses = Vec::new();
    for _ in 0..6 {
        let entry = entry(&pod_then, known, silent(), s(100));
        pauses.push((due_of(&pod_then, &entry) - s(100)).as_secs());
        known = Some(entry);
    }
    assert_eq!(pauses, [1, 2, 4, 8, 15, 15]);
    assert_eq!(due_of(&pod("c", "2", false), &known.clone().unwrap()), s(0));
    assert_eq!(due_of(&pod("other", "1", false), &known.unwrap()), s(0));
}

#[test]
fn a_worker_that_answers_is_asked_every_minute_and_every_second_while_it_drains() {
    let card = Err("not looked at here".to_owned());
    let mut answered = entry(&pod("c", "1", false), None, loaded(card), s(100));
    answered.failures = 0;
    assert_eq!(due_of(&pod("c", "9", false), &answered), s(160));
    assert_eq!(due_of(&pod("c", "9", true), &answered), s(101));
}

#[test]
fn a_card_that_was_read_stays_as_long_as_its_container() {
    let card = serde_json::from_str(include_str!("../../worker/tests/card.json"));
    let card: Box<baton_protocol::card::Card> = Box::new(card.unwrap());
    let pod = pod("c", "1", false);
    let first = entry(&pod, None, loaded(Ok(card.clone())), s(1));
    assert_eq!(first.failures, 0);
    let second = entry(&pod, Some(first), silent(), s(2));
    assert_eq!(second.report.card, Ok(card));
    assert_eq!(second.report.load, Err("silent".into()));
    assert_eq!(second.failures, 1);
}

/// Each of them takes its 2 s: no look may take longer than its deadline, and each has to get on.
#[tokio::test(start_paused = true)]
async fn hundreds_of_silent_workers_hold_no_look_up_and_each_is_asked_in_its_turn() {
    let pods: Vec<Pod> = (0..500)
        .map(|index| {
            let mut pod = pod("c", "1", false);
            pod.metadata.name = Some(format!("w-{index}"));
            pod.metadata.uid = Some(format!("u-{index}"));
            pod
        })
        .collect();
    let reports = Reports::default();
    let start = tokio::time::Instant::now();
    let ask = |_| async {
        tokio::time::sleep(s(2)).await;
        silent()
    };
    for look in 1..=4 {
        let began = tokio::time::Instant::now();
        reports.refresh_by(&pods, ask, start.elapsed()).await;
        assert!(began.elapsed() < s(21), "look {look}");
        let known = reports.of(&pods).0.len();
        assert!(known >= (look * 144).min(500), "{known} in look {look}");
    }
}

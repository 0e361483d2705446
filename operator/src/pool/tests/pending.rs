//! Own writes over a cache that lags.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::scene::start;
use crate::pool::Pending;

fn pod(uid: &str, version: u32) -> Pod {
    Pod {
        metadata: ObjectMeta {
            uid: Some(uid.to_owned()),
            resource_version: Some(version.to_string()),
            ..ObjectMeta::default()
        },
        ..Pod::default()
    }
}

fn later(seconds: i64) -> Timestamp {
    start() + SignedDuration::from_secs(seconds)
}

/// Uid, version and whether it is ending.
fn shown(pending: &Pending, cache: &[Pod]) -> Vec<(String, String, bool)> {
    let pods = pending.overlay(cache);
    pods.into_iter()
        .map(|pod| {
            let metadata = pod.metadata;
            (
                metadata.uid.unwrap(),
                metadata.resource_version.unwrap(),
                metadata.deletion_timestamp.is_some(),
            )
        })
        .collect()
}

fn row(uid: &str, version: u32, ends: bool) -> (String, String, bool) {
    (uid.to_owned(), version.to_string(), ends)
}

#[test]
fn a_created_pod_is_shown_before_the_cache_has_it_and_not_after_it_went() {
    let mut pending = Pending::default();
    pending.created(pod("a", 9), start());
    assert_eq!(shown(&pending, &[]), [row("a", 9, false)]);

    pending.settle(&[], later(1));
    assert_eq!(shown(&pending, &[]), [row("a", 9, false)], "not seen yet");

    pending.settle(&[pod("a", 9)], later(2));
    assert!(pending.is_empty(), "seen");
    assert_eq!(shown(&pending, &[]), [], "and gone since");
}

#[test]
fn a_patched_pod_is_shown_as_it_was_answered_until_the_cache_has_as_new_a_one() {
    let mut pending = Pending::default();
    pending.patched(pod("a", 12), start());
    // Versions are numbers: 9 is older than 12.
    assert_eq!(shown(&pending, &[pod("a", 9)]), [row("a", 12, false)]);
    assert_eq!(shown(&pending, &[pod("a", 13)]), [row("a", 13, false)]);
    assert_eq!(
        shown(&pending, &[]),
        [],
        "a pod that went does not come back"
    );
    pending.patched(pod("a", 11), later(1));
    assert_eq!(
        shown(&pending, &[pod("a", 9)]),
        [row("a", 12, false)],
        "answers cross"
    );
    pending.settle(&[pod("a", 12)], later(2));
    assert!(pending.is_empty());
}

#[test]
fn a_pod_that_is_patched_before_it_was_seen_is_still_shown() {
    let mut pending = Pending::default();
    pending.created(pod("a", 9), start());
    pending.patched(pod("a", 12), start());
    pending.settle(&[], later(1));
    assert_eq!(shown(&pending, &[]), [row("a", 12, false)]);
}

#[test]
fn a_deleted_pod_is_shown_as_ending_until_the_cache_does_so() {
    let mut pending = Pending::default();
    pending.deleted("a", start());
    assert_eq!(shown(&pending, &[pod("a", 9)]), [row("a", 9, true)]);
    pending.settle(&[pod("a", 9)], later(1));
    assert_eq!(
        shown(&pending, &[pod("a", 9)]),
        [row("a", 9, true)],
        "not seen yet"
    );
    pending.settle(&[], later(2));
    assert!(pending.is_empty(), "gone");

    pending.created(pod("b", 3), later(3));
    pending.deleted("b", later(4));
    pending.settle(&[], later(5));
    assert_eq!(
        shown(&pending, &[]),
        [row("b", 3, true)],
        "created and deleted before it was seen"
    );
}

#[test]
fn after_five_minutes_the_cache_is_right() {
    let mut pending = Pending::default();
    pending.created(pod("never-shown", 9), start());
    pending.deleted("a", start());
    pending.settle(&[pod("a", 9)], later(299));
    assert_eq!(
        shown(&pending, &[pod("a", 9)]),
        [row("a", 9, true), row("never-shown", 9, false)]
    );
    pending.settle(&[pod("a", 9)], later(300));
    assert_eq!(shown(&pending, &[pod("a", 9)]), [row("a", 9, false)]);
}

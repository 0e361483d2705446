//! Breakers, fits, and what is forgotten.

use super::*;

fn used() -> LinkUse {
    LinkUse {
        source: vec![Some("h1".into())],
        target: vec![Some("h2".into())],
        transport: "Tcp".into(),
    }
}

/// A small transfer that went well.
pub(crate) fn moved() -> Moved {
    Moved {
        bytes: 1 << 20,
        blocks: 4,
        last_blocks: 4,
        exposed_milliseconds: 1.0,
        synchronization_milliseconds: 0.5,
    }
}

fn policy() -> Policy {
    Policy::new("chat", "m", &["p"], &["d"])
}

#[test]
fn a_link_that_fails_again_and_again_is_opened_and_closed_by_a_probe_that_works() {
    let learning = Learning::default();
    let (policy, mut now) = (policy(), Moment(1_000_000));
    for _ in 0..policy.topology.breaker.failures {
        learning.transfer_failed(&used(), Pass::Free, &policy, now);
    }
    assert_eq!(learning.links(now).shut[0].1, BreakerState::Open);
    assert_eq!(learning.try_use(&used(), &policy, now), None);
    now = Moment(now.0 + 11_000_000);
    assert_eq!(learning.link_counts(now).half_open, 1);
    let probe = learning.try_use(&used(), &policy, now).unwrap();
    assert_eq!(
        learning.try_use(&used(), &policy, now),
        None,
        "one probe at a time"
    );
    let moved = moved();
    learning.moved(&used(), moved, Pass::Free, &policy, now);
    assert_eq!(learning.link_counts(now).open, 1, "a run that began before");
    learning.moved(&used(), moved, probe, &policy, now);
    assert_eq!(learning.link_counts(now).closed, 1);
}

#[test]
fn transfers_that_are_known_to_have_failed_open_their_own_link_alone() {
    let learning = Learning::default();
    let (policy, now) = (policy(), Moment(0));
    let other = LinkUse {
        source: vec![Some("h3".into())],
        ..used()
    };
    for link in [&used(), &other] {
        assert!(learning.try_use(link, &policy, now).is_some());
    }
    let times = u64::from(policy.topology.breaker.failures);
    learning.failed_over(&[other], times, now);
    let counts = learning.link_counts(now);
    assert_eq!((counts.open, counts.closed), (1, 1));
    assert!(learning.try_use(&used(), &policy, now).is_some());
    learning.failed_to(&used().target, times, now);
    assert_eq!(learning.link_counts(now).open, 2);
}

#[test]
fn a_busy_host_does_not_open_a_link_and_a_slow_way_does() {
    let (policy, now) = (policy(), Moment(0));
    for (bytes, exposed_milliseconds, open) in [(4096, 80.0, 0), (200 << 20, 5_000.0, 1)] {
        let learning = Learning::default();
        for _ in 0..policy.topology.breaker.failures {
            let moved = Moved {
                bytes,
                blocks: 1,
                last_blocks: 1,
                exposed_milliseconds,
                synchronization_milliseconds: 0.5,
            };
            learning.moved(&used(), moved, Pass::Free, &policy, now);
        }
        assert_eq!(learning.link_counts(now).open, open, "{bytes} bytes");
    }
}

#[test]
fn links_are_forgotten_when_their_places_have_been_empty_for_long() {
    let learning = Learning::default();
    let (policy, began) = (policy(), Moment(1_000_000));
    learning.transfer_failed(&used(), Pass::Free, &policy, began);
    let both: HashSet<String> = ["h1".to_owned(), "h2".to_owned()].into();
    let one: HashSet<String> = ["h1".to_owned()].into();
    let later = |minutes: u64| began.plus(Duration::from_secs(60 * minutes));
    let known = || learning.learnt().links.len();
    learning.workers_at(&both, later(100));
    assert_eq!(known(), 1, "however rarely it is used");
    learning.workers_at(&one, later(120));
    assert_eq!(known(), 1, "a worker may come back");
    learning.workers_at(&one, later(131));
    assert_eq!(known(), 0);
}

#[test]
fn what_links_have_a_fit_is_another_number_with_the_first_and_when_it_is_forgotten() {
    let learning = Learning::default();
    let (policy, now) = (policy(), Moment(1_000_000));
    let moved = moved();
    let mut seen = vec![learning.links(now).fits];
    learning.transfer_failed(&used(), Pass::Free, &policy, now);
    assert_eq!(learning.links(now).fits, seen[0], "it has no fit yet");
    for _ in 0..2 {
        learning.moved(&used(), moved, Pass::Free, &policy, now);
        seen.push(learning.links(now).fits);
    }
    assert!(seen[0] != seen[1] && seen[1] == seen[2], "{seen:?}");
    learning.workers_at(&HashSet::new(), now.plus(FORGOTTEN_AFTER));
    assert_ne!(learning.links(now).fits, seen[2]);
}

#[test]
fn transfers_replace_the_prior() {
    let learning = Learning::default();
    let (policy, now) = (policy(), Moment(0));
    assert!(learning.try_use(&used(), &policy, now).is_some());
    assert!(learning.learnt().links[0].coefficients.is_none());
    for blocks in 1..100_u32 {
        let bytes = u64::from(blocks) << 18;
        // Four times as fast as the prior of TCP.
        let exposed_milliseconds = bytes as f64 * 0.25e-6;
        let moved = Moved {
            bytes,
            blocks,
            last_blocks: blocks,
            exposed_milliseconds,
            synchronization_milliseconds: 0.5,
        };
        learning.moved(&used(), moved, Pass::Free, &policy, now);
    }
    let fitted = learning.learnt().links[0].coefficients.unwrap();
    let predicted = fitted.alpha + fitted.per_byte * 1e7 + fitted.per_descriptor * 38.0;
    assert!((2.0..3.0).contains(&predicted), "{predicted}");
}

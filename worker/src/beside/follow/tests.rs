//! Following: any loss on either socket ends in what is true, or in having forgotten.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug, PartialEq)]
struct At(f64);

impl Timed for At {
    fn time(&self) -> f64 {
        self.0
    }
}

fn at(sequence: u64) -> Numbered<At> {
    Numbered {
        sequence,
        batch: At(sequence as f64),
    }
}

fn begun() -> Follower<At> {
    let (mut follower, steps) = Follower::new(true);
    assert_eq!(steps, [Step::Replay { from: 0 }]);
    assert_eq!(follower.replay_ended(), []);
    follower
}

#[test]
fn batches_in_order_are_applied_and_those_heard_twice_are_not() {
    let (mut follower, _) = Follower::new(true);
    // Heard while the replay goes on.
    assert_eq!(follower.published(at(1)), []);
    assert_eq!(follower.published(at(2)), []);
    assert_eq!(follower.replayed(at(0)), [Step::Apply(At(0.0))]);
    assert_eq!(follower.replayed(at(1)), [Step::Apply(At(1.0))]);
    assert_eq!(follower.replay_ended(), [Step::Apply(At(2.0))]);
    assert_eq!(follower.published(at(2)), []);
    assert_eq!(follower.published(at(3)), [Step::Apply(At(3.0))]);
}

#[test]
fn a_hole_is_filled_from_the_replay() {
    let mut follower = begun();
    follower.published(at(0));
    assert_eq!(follower.published(at(3)), [Step::Replay { from: 1 }]);
    assert_eq!(follower.published(at(4)), []);
    assert_eq!(follower.replayed(at(1)), [Step::Apply(At(1.0))]);
    assert_eq!(follower.replayed(at(2)), [Step::Apply(At(2.0))]);
    let rest = [Step::Apply(At(3.0)), Step::Apply(At(4.0))];
    assert_eq!(follower.replay_ended(), rest);
}

#[test]
fn a_hole_in_the_replay_is_lost_and_said() {
    let mut follower = begun();
    follower.published(at(0));
    follower.published(at(5));
    let lost = Step::Lost(Hole { from: 1, to: 4 });
    assert_eq!(follower.replayed(at(4)), [lost, Step::Apply(At(4.0))]);
    assert_eq!(follower.replay_ended(), [Step::Apply(At(5.0))]);
    // A replay that brings nothing.
    assert_eq!(follower.published(at(8)), [Step::Replay { from: 6 }]);
    let lost = Step::Lost(Hole { from: 6, to: 8 });
    assert_eq!(follower.replay_ended(), [lost, Step::Apply(At(8.0))]);
}

#[test]
fn without_a_replay_socket_a_hole_is_lost_at_once() {
    let (mut follower, steps) = Follower::new(false);
    assert_eq!(steps, []);
    let lost = Step::Lost(Hole { from: 0, to: 7 });
    assert_eq!(follower.published(at(7)), [lost, Step::Apply(At(7.0))]);
    assert_eq!(follower.look(), []);
}

#[test]
fn a_number_that_was_passed_in_a_newer_batch_is_another_process() {
    let mut follower = begun();
    for sequence in 0..3 {
        follower.published(at(sequence));
    }
    let newer = Numbered {
        sequence: 0,
        batch: At(99.0),
    };
    assert_eq!(follower.published(newer), [Step::Restarted]);
}

#[test]
fn silence_is_looked_into() {
    let mut follower = begun();
    assert_eq!(follower.look(), [Step::Replay { from: 0 }]);
    assert_eq!(follower.look(), [], "one at a time");
    assert_eq!(follower.replayed(at(0)), [Step::Apply(At(0.0))]);
    assert_eq!(follower.replay_ended(), []);
    assert_eq!(follower.next(), 1);
}

#[test]
fn what_waits_is_bounded() {
    let (mut follower, _) = Follower::new(true);
    let many = 2 * WAITING as u64;
    for sequence in 0..many {
        assert_eq!(follower.published(at(sequence)), []);
    }
    let steps = follower.replay_ended();
    assert_eq!(steps.len(), 1 + WAITING);
    let to = many - WAITING as u64;
    assert_eq!(steps[0], Step::Lost(Hole { from: 0, to }));
}

proptest! {
    /// Batches are lost on the way and drop out of the replay's memory. What is applied is each batch once, in order, and where some
    /// are missing it is said before the next.
    #[test]
    fn nothing_is_missing_without_a_word(
        heard in prop::collection::vec(any::<bool>(), 1..60),
        memory in 1..20_u64,
        patience in prop::collection::vec(0..4_usize, 60),
    ) {
        let (mut follower, mut steps) = Follower::new(true);
        let mut done = Vec::new();
        let mut published = 0;
        let mut asked: Option<u64> = None;
        let take = |steps: Vec<Step<At>>, done: &mut Vec<Step<At>>, asked: &mut Option<u64>| {
            for step in steps {
                match step {
                    Step::Replay { from } => *asked = Some(from),
                    other => done.push(other),
                }
            }
        };
        take(std::mem::take(&mut steps), &mut done, &mut asked);
        for (sequence, heard) in heard.iter().enumerate() {
            published = sequence as u64 + 1;
            if *heard {
                take(follower.published(at(sequence as u64)), &mut done, &mut asked);
            }
            if patience[sequence] == 0 && let Some(from) = asked.take() {
                for replayed in from.max(published.saturating_sub(memory))..published {
                    take(follower.replayed(at(replayed)), &mut done, &mut asked);
                }
                take(follower.replay_ended(), &mut done, &mut asked);
            }
        }
        // Silence, and a last look.
        for _ in 0..2 {
            take(follower.look(), &mut done, &mut asked);
            if let Some(from) = asked.take() {
                for replayed in from.max(published.saturating_sub(memory))..published {
                    take(follower.replayed(at(replayed)), &mut done, &mut asked);
                }
                take(follower.replay_ended(), &mut done, &mut asked);
            }
        }
        let mut next = 0;
        for step in done {
            match step {
                Step::Apply(At(time)) => {
                    prop_assert_eq!(time as u64, next);
                    next += 1;
                }
                Step::Lost(hole) => {
                    prop_assert_eq!(hole.from, next);
                    prop_assert!(hole.to > next);
                    next = hole.to;
                }
                other => prop_assert!(false, "{:?}", other),
            }
        }
        prop_assert_eq!(next, published);
    }
}

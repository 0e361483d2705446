//! Properties of the scheduler over random histories, with a memory that only counts.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const BLOCK: usize = 4;

/// Counts blocks; what the tests assert about it is that it is never overdrawn.
#[derive(Debug, Default)]
struct Counted {
    capacity: usize,
    held: BTreeMap<SequenceKey, usize>,
    known: BTreeMap<SequenceKey, usize>,
}

impl Counted {
    fn used(&self) -> usize {
        self.held.values().sum()
    }
}

impl Memory for Counted {
    fn start(&mut self, key: SequenceKey, spare: usize) -> Option<usize> {
        let blocks = self.known[&key].div_ceil(BLOCK);
        assert!(!self.held.contains_key(&key), "started twice");
        (self.used() + blocks + spare <= self.capacity).then(|| {
            self.held.insert(key, blocks);
            0
        })
    }

    fn grow(&mut self, key: SequenceKey) -> bool {
        let needed = self.known[&key].div_ceil(BLOCK);
        let more = needed.saturating_sub(self.held[&key]);
        let fits = self.used() + more <= self.capacity;
        if fits {
            *self.held.get_mut(&key).unwrap() += more;
        }
        fits
    }

    fn give_back(&mut self, key: SequenceKey) {
        assert!(self.held.remove(&key).is_some(), "gave back nothing");
    }
}

#[derive(Clone, Copy, Debug)]
struct Job {
    prompt: usize,
    output: usize,
    priority: i32,
}

struct World {
    scheduler: Scheduler,
    memory: Counted,
    left: BTreeMap<SequenceKey, usize>,
    next: u64,
}

const LIMITS: Limits = Limits {
    max_sequences: 5,
    max_batched_tokens: 24,
    max_waiting: 1000,
};

impl World {
    fn new(capacity: usize) -> Self {
        Self {
            scheduler: Scheduler::new(LIMITS),
            memory: Counted {
                capacity,
                ..Counted::default()
            },
            left: BTreeMap::new(),
            next: 0,
        }
    }

    fn add(&mut self, job: Job) -> SequenceKey {
        let key = SequenceKey(self.next);
        self.next += 1;
        self.scheduler
            .submit(Submission {
                key,
                priority: job.priority,
                total_tokens: job.prompt,
                expected_cached: 0,
                pinned: false,
            })
            .unwrap();
        self.memory.known.insert(key, job.prompt);
        self.left.insert(key, job.output);
        key
    }

    fn cancel(&mut self, key: SequenceKey) {
        self.scheduler.remove(key);
        self.memory.held.remove(&key);
        self.left.remove(&key);
    }

    /// One step; returns those that finished in it.
    fn step(&mut self, bound: usize) -> Vec<SequenceKey> {
        let decoding: BTreeSet<_> = self
            .scheduler
            .in_phase(Phase::Decoding)
            .map(|entry| entry.key)
            .collect();
        let plan = self.scheduler.plan(&mut self.memory, |_| bound);
        assert!(self.memory.used() <= self.memory.capacity, "memory");
        let tokens: usize = plan.slices.iter().map(|slice| slice.tokens).sum();
        assert!(tokens <= LIMITS.max_batched_tokens, "budget");
        assert!(self.scheduler.seated() <= LIMITS.max_sequences, "seats");
        if plan.decoding > 0 {
            assert!(plan.prompt_tokens() <= bound, "chunk");
        }
        let sliced: BTreeSet<_> = plan.slices.iter().map(|slice| slice.key).collect();
        assert_eq!(sliced.len(), plan.slices.len(), "one slice each");
        for key in decoding {
            assert!(
                sliced.contains(&key) || plan.preempted.contains(&key),
                "{key:?} decodes, so it is in every step"
            );
        }
        self.scheduler.computed(&plan);
        let mut finished = Vec::new();
        for slice in plan.slices.iter().filter(|slice| slice.last) {
            *self.memory.known.get_mut(&slice.key).unwrap() += 1;
            let left = self.left.get_mut(&slice.key).unwrap();
            *left -= 1;
            if *left == 0 {
                finished.push(slice.key);
            } else {
                self.scheduler.extend(slice.key);
            }
        }
        for key in &finished {
            self.cancel(*key);
        }
        finished
    }
}

fn job() -> impl Strategy<Value = Job> {
    (1usize..40, 1usize..20, -1i32..2).prop_map(|(prompt, output, priority)| Job {
        prompt,
        output,
        priority,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The pool holds one sequence at its longest (60 tokens, 15 blocks) and not much more, so preemption is the rule.
    #[test]
    fn all_finish_within_memory_and_budget(
        jobs in prop::collection::vec((job(), 0u8..4), 1..40),
        capacity in 15usize..40,
        bound in 1usize..24,
        cancelled in prop::collection::btree_set(0u64..40, 0..5),
    ) {
        let mut world = World::new(capacity);
        let mut waiting = jobs.into_iter();
        let mut open = true;
        let mut steps = 0;
        while open || !world.left.is_empty() {
            match waiting.next() {
                Some((job, pause)) => {
                    let key = world.add(job);
                    for _ in 0..pause {
                        world.step(bound);
                    }
                    if cancelled.contains(&key.0) && world.left.contains_key(&key) {
                        world.cancel(key);
                    }
                }
                None => {
                    open = false;
                    world.step(bound);
                }
            }
            steps += 1;
            prop_assert!(steps < 20_000, "stuck: {:?}", world.scheduler);
        }
        prop_assert_eq!(world.memory.used(), 0);
        prop_assert!(!world.scheduler.has_work());
    }

    /// A long prompt among an endless stream of short ones is done in time that does not depend on how long the stream is.
    #[test]
    fn no_prompt_starves(bound in 4usize..16, length in 20usize..60, capacity in 60usize..80) {
        prop_assert!(long_prompt_is_done(World::new(capacity), bound, length));
    }
}

fn long_prompt_is_done(mut world: World, bound: usize, length: usize) -> bool {
    const SHORT: Job = Job {
        prompt: 3,
        output: 4,
        priority: 0,
    };
    for _ in 0..8 {
        world.add(SHORT);
    }
    let long = world.add(Job {
        prompt: length,
        output: 1,
        priority: 0,
    });
    (0..2_000).any(|_| {
        while world.scheduler.in_phase(Phase::Waiting).count() < 8 {
            world.add(SHORT);
        }
        world.step(bound).contains(&long)
    })
}

#[test]
fn without_ageing_a_long_prompt_does_starve() {
    let mut world = World::new(70);
    world.scheduler.ageing = u64::MAX;
    assert!(!long_prompt_is_done(world, 8, 40));
}

#[test]
fn the_shortest_prompt_goes_first_and_every_fifth_step_begins_with_the_oldest() {
    let mut world = World::new(1000);
    let old = world.add(Job {
        prompt: 200,
        output: 1,
        priority: 0,
    });
    let mut firsts = Vec::new();
    for _ in 0..10 {
        // Fills a whole step.
        let short = world.add(Job {
            prompt: 24,
            output: 1,
            priority: 0,
        });
        let plan = world.scheduler.plan(&mut world.memory, |_| 24);
        firsts.push(plan.slices[0].key == old);
        world.scheduler.computed(&plan);
        world.cancel(short);
    }
    assert_eq!(
        firsts,
        [
            false, false, false, false, true, false, false, false, false, true
        ]
    );
}

#[test]
fn urgent_prompts_go_before_short_ones() {
    let mut world = World::new(1000);
    world.add(Job {
        prompt: 2,
        output: 1,
        priority: 0,
    });
    let urgent = world.add(Job {
        prompt: 20,
        output: 1,
        priority: 1,
    });
    let plan = world.scheduler.plan(&mut world.memory, |_| 24);
    assert_eq!(plan.slices[0].key, urgent);
    assert_eq!(plan.slices.len(), 2);
}

#[test]
fn the_youngest_gives_its_memory_back() {
    let mut world = World::new(6);
    let old = world.add(Job {
        prompt: 8,
        output: 20,
        priority: 0,
    });
    world.step(24);
    let young = world.add(Job {
        prompt: 7,
        output: 20,
        priority: 0,
    });
    world.step(24);
    let mut preempted = Vec::new();
    while preempted.is_empty() {
        let plan = world.scheduler.plan(&mut world.memory, |_| 24);
        preempted.extend(plan.preempted.clone());
        world.scheduler.computed(&plan);
        for slice in plan.slices.iter().filter(|slice| slice.last) {
            *world.memory.known.get_mut(&slice.key).unwrap() += 1;
            world.scheduler.extend(slice.key);
        }
    }
    assert_eq!(preempted, [young]);
    assert!(world.memory.held.contains_key(&old));
    assert_eq!(world.scheduler.load().queued_sequences, 1);
}

#[test]
fn a_full_queue_refuses() {
    let mut scheduler = Scheduler::new(Limits {
        max_waiting: 1,
        ..LIMITS
    });
    let submission = |key| Submission {
        key: SequenceKey(key),
        priority: 0,
        total_tokens: 4,
        expected_cached: 0,
        pinned: false,
    };
    assert_eq!(scheduler.submit(submission(1)), Ok(()));
    assert_eq!(
        scheduler.submit(submission(2)),
        Err(QueueFull { waiting: 1 })
    );
}

#[test]
fn a_handed_over_sequence_decodes_at_once_and_a_failed_hand_off_is_filled() {
    let mut world = World::new(100);
    for (key, computed, decodes) in [(50, 8, true), (51, 4, false)] {
        let key = SequenceKey(key);
        world.memory.known.insert(key, 9);
        world.memory.held.insert(key, 3);
        world.scheduler.hold(Submission {
            key,
            priority: 0,
            total_tokens: 8,
            expected_cached: 0,
            pinned: false,
        });
        assert!(
            world
                .scheduler
                .plan(&mut world.memory, |_| 24)
                .slices
                .is_empty()
        );
        world.scheduler.join(key, 9, computed);
        let plan = world.scheduler.plan(&mut world.memory, |_| 24);
        assert_eq!(plan.slices[0].decodes, decodes);
        assert_eq!(plan.slices[0].start, computed);
        assert!(plan.slices[0].last);
        world.scheduler.remove(key);
    }
}

//! The event table as a whole: every situation that two attempts can lead to, and a million random runs.

use std::collections::{HashMap, HashSet, VecDeque};

use super::*;

/// Runs in the suite. More or fewer with `BATON_HISTORIES`.
const RUNS: u64 = 1_000_000;

/// All that a lifecycle can differ in but its history.
type Situation = (u32, bool, u16, u16, u16);

fn situation(lifecycle: &Lifecycle<()>) -> Situation {
    let early = lifecycle
        .deferred
        .iter()
        .fold(0, |set, event| set | event.state.bit());
    (
        lifecycle.attempt,
        lifecycle.plan == Plan::Remote,
        lifecycle.run.0,
        lifecycle.current.0,
        early,
    )
}

fn report(state: State, attempt: u32) -> Event<()> {
    Event {
        state,
        attempt,
        at: 0,
        detail: (),
    }
}

/// Every situation that reports in any order can lead to within two attempts, each with one way to it.
fn situations() -> Vec<Lifecycle<()>> {
    let mut found = vec![Lifecycle::new()];
    let mut known: HashSet<Situation> = found.iter().map(situation).collect();
    let mut waiting: VecDeque<usize> = VecDeque::from([0]);
    while let Some(at) = waiting.pop_front() {
        let before = found[at].clone();
        let mut reached = Vec::new();
        for state in State::ALL {
            let mut after = before.clone();
            if after.observe(report(state, before.attempt)).is_ok() {
                reached.push(after);
            }
        }
        for plan in [Plan::Local, Plan::Remote] {
            let mut after = before.clone();
            if before.attempt < 2 && after.begin_attempt(plan, 0, ()).is_ok() {
                reached.push(after);
            }
        }
        for after in reached {
            if known.insert(situation(&after)) {
                waiting.push_back(found.len());
                found.push(after);
            }
        }
    }
    found
}

#[test]
fn the_table_is_total_and_no_terminal_state_is_left() {
    let all = situations();
    assert!(all.len() > 1000, "{} situations", all.len());
    let mut illegal = 0_u64;
    for before in &all {
        for state in State::ALL {
            for attempt in before.attempt.saturating_sub(1)..=before.attempt + 1 {
                let mut after = before.clone();
                let taken = after.observe(report(state, attempt));
                match taken {
                    Ok(entered) => {
                        assert_eq!(attempt, before.attempt);
                        assert_eq!(before.ended, None, "nothing follows an end");
                        assert!(!before.heard_of(state), "once");
                        assert_eq!(after.has(state), entered);
                        assert_eq!(before.allows(state), entered);
                        assert!(entered || after.deferred() == before.deferred() + 1);
                    }
                    Err(why) => {
                        illegal += 1;
                        assert_eq!(
                            situation(&after),
                            situation(before),
                            "refused, so unchanged"
                        );
                        assert_eq!(after.history(), before.history());
                        let right = right_refusal(before, state, attempt);
                        assert_eq!(Some(why), right);
                    }
                }
            }
        }
        for plan in [Plan::Local, Plan::Remote] {
            let mut after = before.clone();
            let begun = after.begin_attempt(plan, 0, ());
            let may = before.ended.is_none() && before.has(State::Accepted);
            assert_eq!(
                begun.is_ok(),
                may,
                "a run may be planned anew until it ends"
            );
        }
    }
    assert!(illegal > 0);
}

/// Why a report is refused, said from the text of the table and in its order.
fn right_refusal(before: &Lifecycle<()>, state: State, attempt: u32) -> Option<IllegalEvent> {
    let alternatives = prerequisites(before.plan, state);
    if let Some(ended) = before.ended {
        return Some(IllegalEvent::AfterEnd {
            state,
            attempt,
            ended,
        });
    }
    if attempt != before.attempt {
        return Some(IllegalEvent::OtherAttempt {
            state,
            attempt,
            current: before.attempt,
        });
    }
    if before.heard_of(state) {
        return Some(IllegalEvent::Repeated { state, attempt });
    }
    if alternatives.is_empty() {
        return Some(IllegalEvent::OtherPlan {
            state,
            plan: before.plan,
        });
    }
    let early = !before.met(&alternatives);
    let hopeless = state.is_terminal() || before.attempt == 0;
    (state == State::RouteSelected || (early && hopeless))
        .then_some(IllegalEvent::Premature { state, attempt })
}

#[test]
fn each_state_is_reached_and_each_run_can_end_in_every_way() {
    let all = situations();
    for plan in [Plan::Local, Plan::Remote] {
        for state in State::ALL {
            let reached = all
                .iter()
                .any(|lifecycle| lifecycle.plan == plan && lifecycle.has(state));
            let occurs = !prerequisites(plan, state).is_empty();
            assert_eq!(reached, occurs, "{state} in a {plan:?} plan");
        }
    }
    for before in all {
        if before.ended.is_some() || !before.has(State::Accepted) {
            continue;
        }
        for end in [State::Failed, State::Cancelled] {
            assert!(before.allows(end), "a run ends when it must");
        }
        // What an attempt lacks can still come, however much of it came early.
        if before.attempt > 0 {
            let mut rest = before.clone();
            for _ in State::ALL {
                for state in State::ALL {
                    if !state.is_terminal() && rest.allows(state) {
                        assert_eq!(rest.observe(report(state, rest.attempt)), Ok(true));
                    }
                }
            }
            assert_eq!(rest.deferred(), 0, "nothing waits for ever");
            assert_eq!(
                rest.observe(report(State::Completed, rest.attempt)),
                Ok(true)
            );
        }
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }
}

/// What happens in an attempt that comes through, in one of its legal orders.
const ATTEMPT: [&[State]; 2] = [
    &[
        State::PrefillStarted,
        State::PrefillCompleted,
        State::Streaming,
        State::DecodeStarted,
    ],
    &[
        State::PrefillStarted,
        State::PrefillCompleted,
        State::KvPublished,
        State::KvTransferStarted,
        State::KvTransferCompleted,
        State::Streaming,
        State::DecodeStarted,
    ],
];

/// A run of up to three attempts: reports of each arrive shuffled, some twice, some of another attempt or plan. Whatever the order,
/// what is legal is in the history when all of it has come, and what is not is refused, each once.
fn run(seed: u64) {
    let mut draw = Draw(seed);
    let mut lifecycle = Lifecycle::new();
    lifecycle.observe(report(State::Accepted, 0)).unwrap();
    let attempts = 1 + draw.below(3);
    let (mut sent, mut refused) = (0, 0);
    for attempt in 1..=attempts as u32 {
        let remote = draw.below(2);
        let plan = [Plan::Local, Plan::Remote][remote];
        assert_eq!(lifecycle.begin_attempt(plan, 0, ()), Ok(attempt));
        let mut arriving: Vec<(State, u32)> = ATTEMPT[remote]
            .iter()
            .map(|state| (*state, attempt))
            .collect();
        let streamed = lifecycle.has(State::Streaming);
        let mut wrong = usize::from(streamed);
        for _ in 0..draw.below(3) {
            let state = ATTEMPT[remote][draw.below(ATTEMPT[remote].len())];
            arriving.push(match draw.below(3) {
                0 => (state, attempt),
                1 => (state, attempt - 1),
                _ if remote == 0 => (State::KvPublished, attempt),
                _ => (State::Accepted, attempt),
            });
            wrong += 1;
        }
        for last in (1..arriving.len()).rev() {
            arriving.swap(last, draw.below(last + 1));
        }
        sent += wrong;
        for (state, of) in arriving {
            if lifecycle.observe(report(state, of)).is_err() {
                refused += 1;
            }
        }
        assert_eq!(lifecycle.deferred(), 0, "all that it waited for has come");
        for state in ATTEMPT[remote] {
            assert!(lifecycle.has(*state), "{state}");
        }
    }
    assert_eq!(
        refused, sent,
        "each illegal report is counted, and no other"
    );
    let end = [State::Completed, State::Failed, State::Cancelled][draw.below(3)];
    let last = attempts as u32;
    assert_eq!(lifecycle.observe(report(end, last)), Ok(true));
    for state in State::ALL {
        assert!(lifecycle.observe(report(state, last)).is_err());
    }
    assert!(lifecycle.begin_attempt(Plan::Local, 0, ()).is_err());
    assert_legal(&lifecycle);
}

/// The history itself, by the table alone.
fn assert_legal(lifecycle: &Lifecycle<()>) {
    let mut seen: HashMap<State, u32> = HashMap::new();
    for event in lifecycle.history() {
        let has = |state: State| {
            seen.get(&state)
                .is_some_and(|attempt| *attempt == event.attempt || state.is_of_the_run())
        };
        assert!(!has(event.state), "once");
        let plan = [Plan::Remote, Plan::Local]
            .into_iter()
            .filter(|plan| {
                let alternatives = prerequisites(*plan, event.state);
                alternatives.iter().any(|set| {
                    State::ALL
                        .into_iter()
                        .all(|state| !set.contains(state) || has(state))
                })
            })
            .count();
        assert!(plan > 0, "{} without what must precede it", event.state);
        seen.insert(event.state, event.attempt);
    }
}

#[test]
fn a_million_runs_whose_reports_race_come_out_legal() {
    let runs = std::env::var("BATON_HISTORIES")
        .ok()
        .and_then(|number| number.parse().ok())
        .unwrap_or(RUNS);
    for seed in 0..runs {
        let legal = std::panic::catch_unwind(|| run(seed));
        assert!(legal.is_ok(), "the run of seed {seed} is not legal");
    }
}

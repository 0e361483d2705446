//! Legal histories stay legal, in whatever order reports arrive.

use proptest::prelude::*;

use super::*;

fn event(state: State, attempt: u32) -> Event<()> {
    Event {
        state,
        attempt,
        at: 0,
        detail: (),
    }
}

fn accepted() -> Lifecycle<()> {
    let mut lifecycle = Lifecycle::new();
    lifecycle.observe(event(State::Accepted, 0)).unwrap();
    lifecycle
}

fn states(lifecycle: &Lifecycle<()>) -> Vec<State> {
    lifecycle
        .history()
        .iter()
        .map(|event| event.state)
        .collect()
}

const REMOTE: [State; 8] = [
    State::PrefillStarted,
    State::KvTransferStarted,
    State::PrefillCompleted,
    State::Streaming,
    State::KvPublished,
    State::KvTransferCompleted,
    State::DecodeStarted,
    State::Completed,
];

#[test]
fn a_remote_run_passes_all_ten_states() {
    let mut lifecycle = accepted();
    lifecycle.begin_attempt(Plan::Remote, 0, ()).unwrap();
    for state in REMOTE {
        assert_eq!(lifecycle.observe(event(state, 1)), Ok(true), "{state}");
    }
    assert_eq!(states(&lifecycle).len(), 10);
    assert_eq!(lifecycle.ended(), Some(State::Completed));
}

#[test]
fn racing_reports_come_out_in_a_legal_order() {
    let mut lifecycle = accepted();
    lifecycle.begin_attempt(Plan::Remote, 0, ()).unwrap();
    // The decode worker's reports overtake the prefill worker's.
    for (state, taken) in [
        (State::KvTransferStarted, false),
        (State::KvTransferCompleted, false),
        (State::DecodeStarted, false),
        (State::PrefillStarted, true),
        (State::PrefillCompleted, true),
        (State::KvPublished, true),
    ] {
        assert_eq!(lifecycle.observe(event(state, 1)), Ok(taken), "{state}");
    }
    assert_eq!(lifecycle.deferred(), 0);
    assert_eq!(states(&lifecycle).last(), Some(&State::DecodeStarted));
}

#[test]
fn what_a_local_plan_cannot_do_is_illegal() {
    let mut lifecycle = accepted();
    lifecycle.begin_attempt(Plan::Local, 0, ()).unwrap();
    assert_eq!(
        lifecycle.observe(event(State::KvPublished, 1)),
        Err(IllegalEvent::OtherPlan {
            state: State::KvPublished,
            plan: Plan::Local
        })
    );
}

#[test]
fn reports_of_an_earlier_attempt_are_illegal() {
    let mut lifecycle = accepted();
    lifecycle.begin_attempt(Plan::Remote, 0, ()).unwrap();
    lifecycle.observe(event(State::PrefillStarted, 1)).unwrap();
    assert_eq!(lifecycle.begin_attempt(Plan::Local, 0, ()), Ok(2));
    assert!(matches!(
        lifecycle.observe(event(State::PrefillCompleted, 1)),
        Err(IllegalEvent::OtherAttempt { .. })
    ));
    for state in [
        State::PrefillStarted,
        State::PrefillCompleted,
        State::DecodeStarted,
        State::Streaming,
        State::Completed,
    ] {
        assert_eq!(lifecycle.observe(event(state, 2)), Ok(true));
    }
    assert!(lifecycle.begin_attempt(Plan::Local, 0, ()).is_err());
}

#[test]
fn streaming_outlives_an_attempt_and_happens_once() {
    let mut lifecycle = accepted();
    lifecycle.begin_attempt(Plan::Local, 0, ()).unwrap();
    for state in [
        State::PrefillStarted,
        State::PrefillCompleted,
        State::Streaming,
    ] {
        lifecycle.observe(event(state, 1)).unwrap();
    }
    lifecycle.begin_attempt(Plan::Local, 0, ()).unwrap();
    assert!(lifecycle.has(State::Streaming));
    assert!(!lifecycle.has(State::PrefillCompleted));
    assert!(matches!(
        lifecycle.observe(event(State::Streaming, 2)),
        Err(IllegalEvent::Repeated { .. })
    ));
}

#[test]
fn nothing_begins_before_it_is_accepted() {
    let mut lifecycle = Lifecycle::new();
    assert!(lifecycle.begin_attempt(Plan::Local, 0, ()).is_err());
    assert!(lifecycle.observe(event(State::Failed, 0)).is_err());
}

proptest! {
    /// Whatever arrives in whatever order: the history is legal, each state is in it once per attempt, times never go back.
    #[test]
    fn every_history_is_legal(reports in prop::collection::vec((0usize..14, 0u64..100), 0..60)) {
        let mut lifecycle = Lifecycle::new();
        let mut plans = vec![Plan::Local];
        for (what, at) in reports {
            match what {
                12 | 13 => {
                    let plan = if what == 12 { Plan::Local } else { Plan::Remote };
                    if lifecycle.begin_attempt(plan, at, ()).is_ok() {
                        plans.push(plan);
                    }
                }
                state => {
                    let attempt = lifecycle.attempt();
                    let _ = lifecycle.observe(Event { state: State::ALL[state], attempt, at, detail: () });
                }
            }
        }
        let (mut run, mut current, mut attempt, mut last) = (States::default(), States::default(), 0, 0);
        for event in lifecycle.history() {
            prop_assert!(event.at >= last);
            last = event.at;
            if event.attempt != attempt {
                prop_assert_eq!(event.state, State::RouteSelected);
                attempt = event.attempt;
                current = States::default();
            }
            let seen = States(run.0 | current.0);
            prop_assert!(!seen.contains(event.state));
            prop_assert!(!State::ALL.iter().any(|state| state.is_terminal() && seen.contains(*state)));
            let legal = prerequisites(plans[attempt as usize], event.state);
            prop_assert!(legal.iter().any(|set| seen.contains_all(*set)), "{}", event.state);
            if event.state.is_of_the_run() { run = run.with(event.state) } else { current = current.with(event.state) }
        }
    }
}

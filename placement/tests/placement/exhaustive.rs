//! `place` finds what trying every plan finds.

use baton_placement::place::{Decision, Filter, Outcome, Plan, RECORD_ALL, RECORD_BEST, place};
use baton_placement::policy::{Mode, Policy};
use baton_placement::rng::Rng;
use proptest::prelude::*;

use crate::fleets::{entry, random_policy, random_request, random_world, simple};
use crate::reference::{Costed, NOW, Reference};

fn least(costed: &[Costed]) -> Option<Costed> {
    costed
        .iter()
        .copied()
        .min_by(|left, right| left.cost.total_cmp(&right.cost))
}

fn least_of(decision: &Decision, remote: bool) -> Option<f64> {
    decision
        .candidates
        .iter()
        .filter(|candidate| candidate.plan.is_remote() == remote)
        .map(|candidate| candidate.cost)
        .min_by(f64::total_cmp)
}

fn same(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-9 * right.abs().max(1.0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn the_choice_is_that_of_exhaustive_search(seed in any::<u64>(), most in prop_oneof![Just(4usize), Just(14), Just(70)]) {
        let mut rng = Rng::new(seed);
        let world = random_world(&mut rng, most);
        let request = random_request(&mut rng, &world);
        let policy = random_policy(&mut rng);
        policy.check().unwrap();
        let decision = place(&world.fleet, &request, &policy, NOW, &mut Rng::new(seed));
        let reference = Reference::new(&world, &request, &policy);
        let (locals, remotes) = (reference.locals(), reference.remotes());

        // The cheapest of each kind is there, at the same cost.
        for (remote, all) in [(false, &locals), (true, &remotes)] {
            let (expected, found) = (least(all).map(|one| one.cost), least_of(&decision, remote));
            prop_assert_eq!(expected.is_some(), found.is_some(), "remote {}: {:?} {:?}", remote, expected, found);
            if let (Some(expected), Some(found)) = (expected, found) {
                prop_assert!(same(found, expected), "remote {}: {} for {}", remote, found, expected);
            }
        }
        // Up to 64 candidates are all there; of more, the rest is counted.
        let whole = locals.len() + remotes.len() + reference.late_pairs();
        if whole <= RECORD_ALL {
            prop_assert_eq!(decision.candidates.len(), locals.len() + remotes.len());
        } else {
            prop_assert!(decision.candidates.len() <= RECORD_ALL);
            all_are_accounted_for(&decision, whole)?;
            the_best_are_recorded(&decision, &locals, &remotes, &reference)?;
        }
        // And every cost is that of the plain formula.
        for candidate in &decision.candidates {
            let (prefill, decode) = match candidate.plan {
                Plan::Local { worker } => (None, worker),
                Plan::Remote { prefill, decode } => (Some(prefill), decode),
            };
            let expected = locals.iter().chain(&remotes)
                .find(|one| one.prefill == prefill && one.decode == decode);
            prop_assert!(expected.is_some(), "{:?} is not allowed", candidate.plan);
            prop_assert!(same(candidate.cost, expected.unwrap().cost), "{:?}: {:?}", candidate, expected);
        }
        // The choice is the margin rule over the two cheapest, unless they are within rounding of the margin.
        if let (Some(local), Some(remote)) = (least(&locals), least(&remotes)) {
            let line = remote.cost + reference.margin(local.cost) - local.cost;
            if line.abs() > 1e-6 * local.cost {
                prop_assert_eq!(decision.chosen().unwrap().plan.is_remote(), line < 0.0);
            }
        }
    }
}

/// A plan that is not recorded is counted.
fn all_are_accounted_for(decision: &Decision, whole: usize) -> Result<(), TestCaseError> {
    let counted = |why: Filter| decision.filtered.get(&why).copied().unwrap_or(0);
    let beside = [
        Filter::ProvedWorse,
        Filter::NotRecorded,
        Filter::LeaseTooShort,
    ];
    let beside: u64 = beside.into_iter().map(counted).sum();
    prop_assert_eq!(decision.candidates.len() as u64 + beside, whole as u64);
    Ok(())
}

/// Of more candidates than can be recorded, the best are: but for the few that a rule would take, whatever they cost.
fn the_best_are_recorded(
    decision: &Decision,
    locals: &[Costed],
    remotes: &[Costed],
    reference: &Reference<'_>,
) -> Result<(), TestCaseError> {
    const DECISIVE: usize = 5;
    let margin = match (decision.mode, least(locals)) {
        (Mode::Conditional, Some(local)) => reference.margin(local.cost),
        _ => 0.0,
    };
    let remotes = remotes.iter().map(|one| (one.cost + margin, one));
    let mut all: Vec<(f64, &Costed)> = locals
        .iter()
        .map(|one| (one.cost, one))
        .chain(remotes)
        .collect();
    all.sort_by(|left, right| left.0.total_cmp(&right.0));
    let edge = all[RECORD_BEST - DECISIVE].0;
    for (cost, one) in &all[..RECORD_BEST - DECISIVE] {
        let recorded = decision
            .candidates
            .iter()
            .any(|candidate| match candidate.plan {
                Plan::Local { worker } => one.prefill.is_none() && one.decode == worker,
                Plan::Remote { prefill, decode } => {
                    one.prefill == Some(prefill) && one.decode == decode
                }
            });
        // Of equal ones any may be left out.
        prop_assert!(
            recorded || *cost >= edge - 1e-9 * edge,
            "{:?} costs {} of {}",
            one,
            cost,
            edge
        );
    }
    Ok(())
}

#[test]
fn ties_go_to_the_first_in_fleet_order_whether_searched_or_tried_out() {
    for count in [3, 12] {
        let mut workers = vec![];
        for index in 0..count {
            workers.push(entry(&format!("p{index}"), "prefill", index));
            workers.push(entry(&format!("d{index}"), "decode", count + index));
        }
        let fleet = simple(workers);
        let mut policy = Policy::new("chat", "m", &["prefill"], &["decode"]);
        policy.mode = Mode::Disaggregated;
        let request = baton_placement::place::Request {
            tokens: 300,
            max_output_tokens: 64,
            expected_output_tokens: 64.0,
            ..Default::default()
        };
        let decision = place(&fleet, &request, &policy, 0.0, &mut Rng::new(0));
        assert_eq!(
            decision.outcome,
            Outcome::Run(Plan::Remote {
                prefill: 0,
                decode: 1
            })
        );
    }
}

//! Who vouches for KV that is handed over, and policies that require it.

use baton_placement::fleet::WorkerEntry;
use baton_placement::place::{Filter, Outcome, Plan, Request, place};
use baton_placement::policy::{Assurance, Mode, Policy};
use baton_placement::rng::Rng;

use crate::fleets::{entry, simple};

#[test]
fn kv_that_nobody_checks_is_not_handed_over_where_the_policy_requires_a_check() {
    let prefill = WorkerEntry {
        hands_over: Assurance::EngineTrusted,
        ..entry("p0", "prefill", 0)
    };
    let fleet = simple(vec![prefill, entry("d0", "decode", 1)]);
    let mut policy = Policy::new("chat", "m", &["prefill"], &["decode"]);
    policy.mode = Mode::Disaggregated;
    let request = Request {
        tokens: 600,
        max_output_tokens: 64,
        expected_output_tokens: 64.0,
        ..Request::default()
    };
    let remote = Plan::Remote {
        prefill: 0,
        decode: 1,
    };
    let decision = place(&fleet, &request, &policy, 0.0, &mut Rng::new(1));
    assert_eq!(decision.outcome, Outcome::Run(remote));
    policy.verify.require = Assurance::Verified;
    let decision = place(&fleet, &request, &policy, 0.0, &mut Rng::new(1));
    assert_ne!(decision.outcome, Outcome::Run(remote));
    assert_eq!(decision.filtered.get(&Filter::NotVerified), Some(&1));
}

//! The limits that a case is played under: all have their minutes but the one that is to pass.

use std::time::Duration;

use baton_placement::policy::{FirstToken, NoPrefillAction, Overrides, Policy};

use super::super::{How, Phase, Played, Way};

/// What a deadline is set to that is to pass.
const SHORT: f64 = 0.5;
/// One that the attempt after it has as well, and is to keep.
const KEPT: f64 = 2.0 * SHORT;

pub(super) fn policy(case: &Played) -> Policy {
    let mut policy = Policy {
        overrides: Overrides::Allowed,
        first_token: match case.first {
            Way::FirstByDecode => FirstToken::Decode,
            _ => FirstToken::Prefill,
        },
        ..Policy::new("chat", "m", &["p"], &["d"])
    };
    if !case.budget {
        policy.fallback.local_recompute.max_concurrent_per_worker = 0;
    }
    let timeouts = &mut policy.timeouts;
    match case.how {
        How::DecodeSilent => match case.phase {
            Phase::RouteSelected => timeouts.reserve_seconds = KEPT,
            Phase::Reserved => timeouts.prefill_start_seconds = KEPT,
            Phase::PrefillStarted => timeouts.prefill_seconds = KEPT,
            Phase::PrefillCompleted | Phase::TransferCompleted => {
                timeouts.decode_start_seconds = KEPT;
            }
            _ => timeouts.token_seconds = KEPT,
        },
        How::PrefillSilent if case.phase < Phase::PrefillStarted => {
            timeouts.prefill_start_seconds = KEPT;
        }
        How::PrefillSilent => timeouts.prefill_seconds = KEPT,
        How::TransferSlow => timeouts.transfer_seconds = KEPT,
        How::QueuesFull { for_good: true } => timeouts.reserve_seconds = SHORT,
        // Longer than the attempts take to come so far.
        How::RunOverdue if case.before.is_empty() => timeouts.total_seconds = 4.0 * SHORT,
        How::RunOverdue => timeouts.total_seconds = 6.0 * SHORT,
        How::WaitsForPrefill => {
            timeouts.total_seconds = 2.0 * SHORT;
            policy.on_no_prefill.action = NoPrefillAction::Queue;
        }
        _ => {}
    }
    policy
}

/// Whoever is held up for so long misses one that is not to pass, or that is not to pass yet.
pub(super) fn shortest(policy: &Policy) -> Duration {
    let timeouts = &policy.timeouts;
    let all = [
        timeouts.reserve_seconds,
        timeouts.prefill_start_seconds,
        timeouts.prefill_seconds,
        timeouts.transfer_seconds,
        timeouts.decode_start_seconds,
        timeouts.token_seconds,
        timeouts.total_seconds,
    ];
    Duration::from_secs_f64(all.into_iter().fold(f64::INFINITY, f64::min))
}

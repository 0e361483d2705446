//! What is done about a failed attempt: the table of `baton_protocol::failure`, bounded by what the run and the policy still allow.

use std::time::Duration;

use baton_placement::policy::Policy;
use baton_protocol::failure::{Action, FailureClass};

use super::failure::Failure;
use crate::clock::Moment;

/// Attempts that continue after tokens were sent, or after the decode worker was lost. Two workers lost under one run is an outage
/// of the fleet and not of a worker.
pub const RESUMES: u32 = 2;
/// First wait of a back-off; doubled each time.
const BACK_OFF: Duration = Duration::from_millis(25);
const LONGEST_BACK_OFF: Duration = Duration::from_secs(1);
/// With no worker of the model left, longer than a crashed process needs to come back where one is near.
const GONE_PATIENCE: Duration = Duration::from_secs(5);

/// What a run has used up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    pub replans: u32,
    pub resumes: u32,
    pub back_offs: u32,
    /// The soonest that a worker which refused since the last wait expects to have room.
    pub room_in: Option<Duration>,
    /// A local recompute was tried.
    pub recomputes: u32,
    /// When the run first found no worker, in its present search.
    pub searching_since: Option<Moment>,
}

impl Spent {
    /// A worker took the run: what its search has waited does not count against a later one.
    pub fn search_ended(&mut self) {
        self.searching_since = None;
        self.back_offs = 0;
        self.room_in = None;
    }

    /// The soonest that a worker expects to have room, of all that refused since the last wait and of the one that `failure` is about.
    fn soonest(&self, failure: &Failure) -> Option<Duration> {
        let said = [self.room_in, failure.retry_after];
        said.into_iter().flatten().min()
    }

    /// The run ends by `failure`. Its client is told the soonest that anybody has room, whoever was asked last.
    #[must_use]
    pub fn told(&self, failure: Failure) -> Failure {
        let retry_after = self.soonest(&failure);
        Failure {
            retry_after,
            ..failure
        }
    }
}

/// What the policy and the moment allow.
#[derive(Clone, Copy, Debug)]
pub struct Allowed {
    pub replans: u32,
    /// How long a run may look for a worker.
    pub patience: Duration,
    /// The run's total deadline.
    pub deadline: Moment,
    /// The fallback budget of the worker that would recompute has room.
    pub budget: bool,
    /// The hand-off failed with the decode stream still open.
    pub can_recompute_in_place: bool,
    /// Some worker of the model is up.
    pub any_worker: bool,
}

impl Allowed {
    pub fn under(policy: &Policy, deadline: Moment) -> Self {
        Self {
            replans: policy.fallback.replans,
            patience: Duration::try_from_secs_f64(policy.timeouts.reserve_seconds)
                .unwrap_or(GONE_PATIENCE),
            deadline,
            budget: false,
            can_recompute_in_place: false,
            any_worker: true,
        }
    }
}

/// The next step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Place again without the workers that failed.
    Replan,
    /// Compute on the worker that decodes, over the open stream.
    RecomputeInPlace,
    /// Place again, on one worker, under the fallback budget.
    RecomputeElsewhere,
    /// Wait, then place again.
    BackOff(Duration),
    /// Tell the client.
    GiveUp,
}

/// Total over the failure classes.
pub fn decide(failure: &Failure, spent: &mut Spent, allowed: Allowed, now: Moment) -> Next {
    if now >= allowed.deadline {
        return Next::GiveUp;
    }
    match failure.class.action() {
        // Nobody refused who could be passed over: it is a fact of what is deployed.
        Action::BackOff
            if failure.class == FailureClass::Incompatible && failure.worker.is_none() =>
        {
            Next::GiveUp
        }
        Action::BackOff => back_off(failure, spent, allowed, now),
        Action::Replan => replan_or_recompute(spent, allowed),
        Action::RecomputeLocally => {
            if allowed.can_recompute_in_place && allowed.budget && spent.recomputes == 0 {
                spent.recomputes += 1;
                Next::RecomputeInPlace
            } else {
                replan(spent, allowed)
            }
        }
        Action::Resume => {
            if spent.resumes < RESUMES {
                spent.resumes += 1;
                Next::Replan
            } else {
                Next::GiveUp
            }
        }
        Action::CancelEverywhere | Action::Refuse | Action::FailRun => Next::GiveUp,
    }
}

fn replan(spent: &mut Spent, allowed: Allowed) -> Next {
    if spent.replans < allowed.replans {
        spent.replans += 1;
        Next::Replan
    } else {
        Next::GiveUp
    }
}

fn replan_or_recompute(spent: &mut Spent, allowed: Allowed) -> Next {
    match replan(spent, allowed) {
        Next::GiveUp if allowed.budget && spent.recomputes == 0 => {
            spent.recomputes += 1;
            Next::RecomputeElsewhere
        }
        next => next,
    }
}

/// A refusal is not waited for: another worker may take the run at once. When nobody is left the wait is as long as the soonest of
/// those that refused has said, and ever longer where they say it again and again.
fn back_off(failure: &Failure, spent: &mut Spent, allowed: Allowed, now: Moment) -> Next {
    let since = *spent.searching_since.get_or_insert(now);
    let patience = if allowed.any_worker {
        allowed.patience
    } else {
        allowed.patience.min(GONE_PATIENCE)
    };
    let doubled = BACK_OFF.saturating_mul(1 << spent.back_offs.min(8));
    let room_in = spent.soonest(failure);
    let wait = room_in
        .unwrap_or_default()
        .max(doubled)
        .min(LONGEST_BACK_OFF);
    let refused = failure.worker.is_some();
    let until = if refused { now } else { now.plus(wait) };
    if until >= since.plus(patience) || until >= allowed.deadline {
        return Next::GiveUp;
    }
    if refused {
        spent.room_in = room_in;
    } else {
        spent.room_in = None;
        spent.back_offs += 1;
    }
    Next::BackOff(wait)
}

/// Whole seconds that a client is told to wait, for the classes that are answered with 503: what workers have said, and never less than
/// the policy does.
pub fn retry_after_seconds(failure: &Failure, policy: &Policy) -> Option<u64> {
    let worth_a_retry = failure.class.status() == 503;
    worth_a_retry.then(|| {
        let said = failure
            .retry_after
            .map_or(0, |wait| wait.as_millis().div_ceil(1_000));
        let said = u64::try_from(said).unwrap_or(u64::MAX);
        said.max(u64::from(policy.admission.retry_after_seconds.max(1)))
    })
}

/// The machine-readable code of a failure, as the client sees it.
pub fn code(class: FailureClass) -> &'static str {
    match class {
        FailureClass::NoWorker => "no_worker",
        FailureClass::PrefillLost => "prefill_lost",
        FailureClass::HandoffFailed => "handoff_failed",
        FailureClass::DecodeLost => "decode_lost",
        FailureClass::ClientGone => "client_gone",
        FailureClass::Incompatible => "incompatible_workers",
        FailureClass::BadRequest => "bad_request",
        FailureClass::DeadlineExceeded => "deadline_exceeded",
        FailureClass::Bug => "internal_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed() -> Allowed {
        Allowed {
            replans: 1,
            patience: Duration::from_secs(30),
            deadline: Moment(600_000_000),
            budget: true,
            can_recompute_in_place: true,
            any_worker: true,
        }
    }

    fn failure(class: FailureClass) -> Failure {
        Failure::new(class, "")
    }

    /// Decides until the run gives up.
    fn course(class: FailureClass, allowed: Allowed) -> Vec<Next> {
        let mut spent = Spent::default();
        let mut steps = Vec::new();
        loop {
            let next = decide(&failure(class), &mut spent, allowed, Moment(0));
            steps.push(next);
            if next == Next::GiveUp {
                return steps;
            }
            assert!(steps.len() < 10, "a run never tries for ever");
        }
    }

    #[test]
    fn a_lost_prefill_is_replanned_once_and_then_computed_locally_under_the_budget() {
        assert_eq!(
            course(FailureClass::PrefillLost, allowed()),
            [Next::Replan, Next::RecomputeElsewhere, Next::GiveUp]
        );
        let poor = Allowed {
            budget: false,
            ..allowed()
        };
        assert_eq!(
            course(FailureClass::PrefillLost, poor),
            [Next::Replan, Next::GiveUp]
        );
    }

    #[test]
    fn a_failed_hand_off_is_recomputed_in_place_only_under_the_budget() {
        assert_eq!(
            course(FailureClass::HandoffFailed, allowed()),
            [Next::RecomputeInPlace, Next::Replan, Next::GiveUp]
        );
        let poor = Allowed {
            budget: false,
            ..allowed()
        };
        assert_eq!(
            course(FailureClass::HandoffFailed, poor),
            [Next::Replan, Next::GiveUp]
        );
    }

    #[test]
    fn a_lost_decode_worker_is_survived_a_bounded_number_of_times() {
        assert_eq!(
            course(FailureClass::DecodeLost, allowed()),
            [Next::Replan, Next::Replan, Next::GiveUp]
        );
    }

    #[test]
    fn what_the_client_or_a_bug_did_is_not_retried() {
        for class in [
            FailureClass::BadRequest,
            FailureClass::Bug,
            FailureClass::ClientGone,
            FailureClass::DeadlineExceeded,
        ] {
            assert_eq!(course(class, allowed()), [Next::GiveUp], "{class}");
        }
    }

    #[test]
    fn a_worker_that_has_changed_is_one_refusal_of_a_search() {
        let mut spent = Spent::default();
        let nobody = failure(FailureClass::Incompatible);
        assert_eq!(
            decide(&nobody, &mut spent, allowed(), Moment(0)),
            Next::GiveUp
        );
        let changed = nobody.at(&"w".into());
        assert_eq!(
            decide(&changed, &mut spent, allowed(), Moment(0)),
            Next::BackOff(BACK_OFF)
        );
        assert_eq!((spent.replans, spent.resumes), (0, 0));
    }

    #[test]
    fn looking_for_a_worker_ends_within_the_patience() {
        for (any_worker, patience) in [(true, 30), (false, 5)] {
            let allowed = Allowed {
                any_worker,
                ..allowed()
            };
            let (mut spent, mut now) = (Spent::default(), Moment(1_000));
            let mut tries = 0;
            while let Next::BackOff(wait) =
                decide(&failure(FailureClass::NoWorker), &mut spent, allowed, now)
            {
                now = now.plus(wait);
                tries += 1;
            }
            assert!(now.0 < patience * 1_000_000, "{now:?}");
            assert!(tries > 5);
        }
    }

    #[test]
    fn a_search_waits_as_long_as_those_that_refused_have_said() {
        let mut spent = Spent::default();
        let mut wait = |failure: &Failure| match decide(failure, &mut spent, allowed(), Moment(0)) {
            Next::BackOff(wait) => wait.as_millis(),
            next => panic!("{next:?}"),
        };
        let mut refused = failure(FailureClass::NoWorker).at(&"w".into());
        let nobody = failure(FailureClass::NoWorker);
        for milliseconds in [400, 70, 900] {
            refused.retry_after = Some(Duration::from_millis(milliseconds));
            wait(&refused);
        }
        assert_eq!(wait(&nobody), 70, "the soonest of them");
        assert_eq!(wait(&nobody), 50, "nobody has said anything since");
        refused.retry_after = Some(Duration::from_millis(30));
        wait(&refused);
        assert_eq!(wait(&nobody), 100, "said in vain, it is waited longer");
        refused.retry_after = Some(Duration::from_secs(60));
        wait(&refused);
        assert_eq!(wait(&nobody), LONGEST_BACK_OFF.as_millis());
        // It is asked of others all the same, however long this one's line is.
        let hasty = Allowed {
            patience: Duration::from_millis(50),
            ..allowed()
        };
        let next = decide(&refused, &mut Spent::default(), hasty, Moment(0));
        assert!(matches!(next, Next::BackOff(_)), "{next:?}");
    }

    #[test]
    fn a_client_is_told_the_soonest_that_was_said_since_the_last_wait() {
        let mut spent = Spent::default();
        let mut policy = Policy::new("chat", "m", &[], &["d"]);
        let nobody = failure(FailureClass::NoWorker);
        let seconds = |spent: &Spent, policy: &Policy| {
            retry_after_seconds(&spent.told(nobody.clone()), policy)
        };
        assert_eq!(
            seconds(&spent, &policy),
            Some(1),
            "nobody has said anything"
        );
        let mut refused = failure(FailureClass::NoWorker).at(&"w".into());
        for milliseconds in [9_000, 2_100, 7_000] {
            refused.retry_after = Some(Duration::from_millis(milliseconds));
            decide(&refused, &mut spent, allowed(), Moment(0));
        }
        assert_eq!(seconds(&spent, &policy), Some(3), "in whole seconds");
        policy.admission.retry_after_seconds = 5;
        assert_eq!(
            seconds(&spent, &policy),
            Some(5),
            "the policy's is the least"
        );
        // The one that ends the search has said so itself.
        let last = spent.told(refused);
        assert_eq!(last.retry_after, Some(Duration::from_millis(2_100)));
        decide(&nobody, &mut spent, allowed(), Moment(0));
        assert_eq!(
            spent.told(nobody.clone()).retry_after,
            None,
            "it was waited for"
        );
    }

    #[test]
    fn a_later_search_has_its_patience_to_itself() {
        let mut spent = Spent::default();
        let lost = failure(FailureClass::NoWorker);
        assert!(matches!(
            decide(&lost, &mut spent, allowed(), Moment(0)),
            Next::BackOff(_)
        ));
        let much_later = Moment(40_000_000);
        let mut worn = spent;
        assert_eq!(
            decide(&lost, &mut worn, allowed(), much_later),
            Next::GiveUp
        );
        spent.search_ended();
        assert_eq!(
            decide(&lost, &mut spent, allowed(), much_later),
            Next::BackOff(BACK_OFF)
        );
    }

    #[test]
    fn after_the_deadline_nothing_is_tried() {
        let late = Allowed {
            deadline: Moment(5),
            ..allowed()
        };
        let mut spent = Spent::default();
        assert_eq!(
            decide(
                &failure(FailureClass::DecodeLost),
                &mut spent,
                late,
                Moment(5)
            ),
            Next::GiveUp
        );
    }
}

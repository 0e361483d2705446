//! Conditions of a status: one that says what it said before keeps its time.

use baton_crds::status::{Condition, LONGEST_MESSAGE};
use jiff::{Timestamp, Unit};

/// What a condition says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// `True`, `False` or `Unknown`.
    pub status: &'static str,
    /// One CamelCase word.
    pub reason: &'static str,
    pub message: String,
}

impl Verdict {
    pub fn holds(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new("True", reason, message)
    }

    pub fn fails(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new("False", reason, message)
    }

    pub fn unknown(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new("Unknown", reason, message)
    }

    fn new(status: &'static str, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            reason,
            message: message.into(),
        }
    }

    #[must_use]
    pub fn is_true(&self) -> bool {
        self.status == "True"
    }
}

/// The condition of type `name` after `known`; its time is that of the last change of its status.
#[must_use]
pub fn condition(
    name: &str,
    verdict: Verdict,
    known: &[Condition],
    generation: i64,
    now: Timestamp,
) -> Condition {
    let since = known
        .iter()
        .find(|known| known.condition_type == name && known.status == verdict.status)
        .map(|known| known.last_transition_time.clone());
    Condition {
        condition_type: name.to_owned(),
        status: verdict.status.to_owned(),
        observed_generation: Some(generation),
        last_transition_time: since.unwrap_or_else(|| whole_seconds(now)),
        reason: verdict.reason.to_owned(),
        message: bounded(verdict.message),
    }
}

fn whole_seconds(time: Timestamp) -> String {
    time.round(Unit::Second).unwrap_or(time).to_string()
}

/// A message that a status can hold.
#[must_use]
pub fn bounded(message: String) -> String {
    if message.chars().count() <= LONGEST_MESSAGE {
        return message;
    }
    let mut cut: String = message.chars().take(LONGEST_MESSAGE - 1).collect();
    cut.push('…');
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_changes_with_the_status_only() {
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let first = condition("Ready", Verdict::fails("A", "a"), &[], 1, at(10));
        let known = [first.clone()];
        let same = condition("Ready", Verdict::fails("B", "b"), &known, 2, at(20));
        assert_eq!(same.last_transition_time, first.last_transition_time);
        assert_eq!(
            (same.reason.as_str(), same.observed_generation),
            ("B", Some(2))
        );
        let other = condition("Ready", Verdict::holds("C", ""), &known, 2, at(20));
        assert_eq!(other.last_transition_time, "1970-01-01T00:00:20Z");
        let another = condition("Stalled", Verdict::fails("B", ""), &known, 2, at(30));
        assert_eq!(another.last_transition_time, "1970-01-01T00:00:30Z");
    }

    #[test]
    fn a_message_is_cut_where_a_status_ends() {
        let long = "é".repeat(LONGEST_MESSAGE + 1);
        let cut = bounded(long);
        assert_eq!(cut.chars().count(), LONGEST_MESSAGE);
        assert!(cut.ends_with('…'));
        let exact = "é".repeat(LONGEST_MESSAGE);
        assert_eq!(bounded(exact.clone()), exact);
    }
}

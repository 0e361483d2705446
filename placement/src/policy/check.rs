//! What a policy may not say: each refusal names the field, the value and what is allowed.

use super::{CacheSource, Mode, Policy, Preset};
use crate::fleet::BEYOND;

/// A policy that cannot be honoured. The router keeps the last good one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy {policy}: {field} {problem}")]
pub struct PolicyError {
    pub policy: String,
    pub field: String,
    pub problem: String,
}

impl Policy {
    /// Checks what the types do not.
    pub fn check(&self) -> Result<(), PolicyError> {
        let refuse = |field: &str, problem: String| {
            Err(PolicyError {
                policy: self.name.clone(),
                field: field.to_owned(),
                problem,
            })
        };
        if self.name.is_empty() {
            return refuse("name", "is empty: give the policy a name".into());
        }
        if self.model.is_empty() {
            return refuse(
                "model",
                "is empty: name the model that clients ask for".into(),
            );
        }
        if self.decode_pools.is_empty() {
            return refuse(
                "decodePools",
                "is empty: name at least one decode pool".into(),
            );
        }
        if self.cost.preset == Preset::LookAhead {
            return refuse(
                "cost.preset",
                "is LookAhead, which is not built yet: use Balanced or Latency".into(),
            );
        }
        if self.cache.source == CacheSource::Approximate {
            return refuse(
                "cache.source",
                "is Approximate, which is not built yet: use Events or None".into(),
            );
        }
        let wants_remote = matches!(self.mode, Mode::Disaggregated);
        if wants_remote && self.prefill_pools.is_empty() {
            return refuse(
                "prefillPools",
                "is empty, but mode is Disaggregated: name a prefill pool or use another mode"
                    .into(),
            );
        }
        for (field, value, lowest, highest) in self.numbers() {
            if !(lowest..=highest).contains(&value) {
                return refuse(
                    &field,
                    format!("is {value}: it has to be between {lowest} and {highest}"),
                );
            }
        }
        Ok(())
    }

    /// Checks level names against those of the cluster, which a policy alone does not know. A limit at a level that does not
    /// exist would refuse every pair.
    pub fn check_levels(&self, levels: &[String]) -> Result<(), PolicyError> {
        let refuse = |field: &str, level: &str| {
            Err(PolicyError {
                policy: self.name.clone(),
                field: field.to_owned(),
                problem: format!(
                    "names level {level:?}: the levels here are {}",
                    levels.join(", ")
                ),
            })
        };
        if let Some(level) = &self.topology.farthest_level
            && !levels.contains(level)
        {
            return refuse("topology.farthestLevel", level);
        }
        for level in self.cost.level_penalty_milliseconds.keys() {
            if !levels.contains(level) && level != BEYOND {
                return refuse("cost.levelPenaltyMilliseconds", level);
            }
        }
        Ok(())
    }

    /// Every number with its range, bounds included.
    fn numbers(&self) -> Vec<(String, f64, f64, f64)> {
        const DAY_MILLISECONDS: f64 = 86_400_000.0;
        const DAY_SECONDS: f64 = 86_400.0;
        let mut numbers = Vec::with_capacity(40);
        let mut add = |field: &str, value: f64, lowest: f64, highest: f64| {
            numbers.push((field.to_owned(), value, lowest, highest));
        };
        let objective = &self.objective;
        let objectives = [
            ("objective.ttftMilliseconds", objective.ttft_milliseconds),
            ("objective.tpotMilliseconds", objective.tpot_milliseconds),
            (
                "objective.endToEndMilliseconds",
                objective.end_to_end_milliseconds,
            ),
        ];
        for (field, value) in objectives {
            if let Some(value) = value {
                add(field, value, 0.001, DAY_MILLISECONDS);
            }
        }
        if let Some(percentile) = objective.percentile {
            add("objective.percentile", percentile, 1.0, 100.0);
        }
        for (name, percent) in self.cost.weights.named() {
            if let Some(percent) = percent {
                add(&format!("cost.weights.{name}"), percent, 0.0, 10_000.0);
            }
        }
        if let Some(percent) = self.cost.margin_percent {
            add("cost.marginPercent", percent, 0.0, 1_000.0);
        }
        if let Some(milliseconds) = self.cost.margin_milliseconds {
            add(
                "cost.marginMilliseconds",
                milliseconds,
                0.0,
                DAY_MILLISECONDS,
            );
        }
        add(
            "cost.temperaturePercent",
            self.cost.temperature_percent,
            0.0,
            1_000.0,
        );
        for (level, penalty) in &self.cost.level_penalty_milliseconds {
            add(
                &format!("cost.levelPenaltyMilliseconds.{level}"),
                *penalty,
                0.0,
                DAY_MILLISECONDS,
            );
        }
        if let Mode::DynamoIslBounding { ratio, .. } | Mode::DynamoIslOrLoad { ratio, .. } =
            self.mode
        {
            add("mode.ratio", ratio, 0.0, 1.0);
        }
        let breaker = &self.topology.breaker;
        add(
            "topology.breaker.failures",
            f64::from(breaker.failures),
            1.0,
            1_000.0,
        );
        add(
            "topology.breaker.windowSeconds",
            breaker.window_seconds,
            0.001,
            DAY_SECONDS,
        );
        add(
            "topology.breaker.openSeconds",
            breaker.open_seconds,
            0.001,
            DAY_SECONDS,
        );
        add(
            "topology.breaker.slowdownPercent",
            breaker.slowdown_percent,
            100.0,
            1e6,
        );
        add(
            "onNoPrefill.queueMilliseconds",
            self.on_no_prefill.queue_milliseconds,
            0.0,
            DAY_MILLISECONDS,
        );
        add(
            "fallback.localRecompute.maxPercent",
            self.fallback.local_recompute.max_percent,
            0.0,
            100.0,
        );
        add(
            "fallback.replans",
            f64::from(self.fallback.replans),
            0.0,
            10.0,
        );
        let timeouts = &self.timeouts;
        add(
            "timeouts.reserveSeconds",
            timeouts.reserve_seconds,
            0.001,
            DAY_SECONDS,
        );
        add(
            "timeouts.prefillStartSeconds",
            timeouts.prefill_start_seconds,
            0.001,
            DAY_SECONDS,
        );
        add(
            "timeouts.prefillSeconds",
            timeouts.prefill_seconds,
            0.001,
            DAY_SECONDS,
        );
        add(
            "timeouts.transferSeconds",
            timeouts.transfer_seconds,
            0.001,
            DAY_SECONDS,
        );
        add(
            "timeouts.decodeStartSeconds",
            timeouts.decode_start_seconds,
            0.001,
            DAY_SECONDS,
        );
        add(
            "timeouts.tokenSeconds",
            timeouts.token_seconds,
            0.001,
            DAY_SECONDS,
        );
        add(
            "timeouts.totalSeconds",
            timeouts.total_seconds,
            0.001,
            DAY_SECONDS,
        );
        add(
            "admission.maxQueuedPerWorker",
            f64::from(self.admission.max_queued_per_worker),
            1.0,
            1e6,
        );
        add(
            "admission.retryAfterSeconds",
            f64::from(self.admission.retry_after_seconds),
            1.0,
            3_600.0,
        );
        add(
            "cache.staleAfterMilliseconds",
            self.cache.stale_after_milliseconds,
            0.0,
            DAY_MILLISECONDS,
        );
        numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut Policy)) -> String {
        let mut policy = Policy::new("chat", "m", &["p"], &["d"]);
        change(&mut policy);
        policy.check().unwrap_err().to_string()
    }

    #[test]
    fn defaults_are_accepted_and_survive_json() {
        let policy = Policy::new("chat", "m", &["p"], &["d"]);
        policy.check().unwrap();
        let text = serde_json::to_string(&policy).unwrap();
        let back: Policy = serde_json::from_str(&text).unwrap();
        assert_eq!(back, policy);
        assert_eq!(back.digest(), policy.digest());
        let short: Policy =
            serde_json::from_str(r#"{"name":"chat","model":"m","decodePools":["d"]}"#).unwrap();
        assert_eq!(short.mode, Mode::Conditional);
    }

    #[test]
    fn what_is_not_built_is_refused_by_name() {
        let message = refused(|policy| policy.cost.preset = Preset::LookAhead);
        assert_eq!(
            message,
            "policy chat: cost.preset is LookAhead, which is not built yet: use Balanced or Latency"
        );
        assert!(
            refused(|policy| policy.cache.source = CacheSource::Approximate)
                .contains("not built yet")
        );
    }

    #[test]
    fn numbers_out_of_range_name_field_and_range() {
        let message = refused(|policy| policy.objective.ttft_milliseconds = Some(0.0));
        assert!(
            message.contains("objective.ttftMilliseconds is 0: it has to be between"),
            "{message}"
        );
        assert!(refused(|policy| policy.cost.weights.wm = Some(-1.0)).contains("cost.weights.wm"));
        assert!(
            refused(|policy| policy.topology.breaker.failures = 0).contains("breaker.failures")
        );
        assert!(
            refused(|policy| policy.cost.temperature_percent = f64::NAN).contains("temperature")
        );
        assert!(refused(|policy| policy.decode_pools.clear()).contains("decodePools"));
    }

    #[test]
    fn a_level_that_the_cluster_does_not_have_is_named_with_those_it_has() {
        let levels = ["host".to_owned(), "rack".to_owned()];
        let mut policy = Policy::new("chat", "m", &["p"], &["d"]);
        policy.cost.level_penalty_milliseconds = [("beyond".to_owned(), 5.0)].into();
        policy.topology.farthest_level = Some("rack".into());
        policy.check_levels(&levels).unwrap();
        policy.topology.farthest_level = Some("rakc".into());
        let message = policy.check_levels(&levels).unwrap_err().to_string();
        assert_eq!(
            message,
            "policy chat: topology.farthestLevel names level \"rakc\": the levels here are host, rack"
        );
    }

    #[test]
    fn an_unknown_field_is_an_error() {
        let text = r#"{"name":"chat","model":"m","decodePools":["d"],"mode":{"Threshold":{"tokens":512}},"modee":1}"#;
        let error = serde_json::from_str::<Policy>(text)
            .unwrap_err()
            .to_string();
        assert!(error.contains("modee"), "{error}");
    }
}

//! Weights of the cost rule: presets, and a policy's percentages over them.

use serde::{Deserialize, Serialize};

use super::LevelPenalties;

/// The part of a policy that shapes the cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CostPolicy {
    pub preset: Preset,
    /// 100 is the preset's own weight.
    pub weights: WeightPercents,
    /// By how many percent of the local cost remote has to be cheaper. None: the preset's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin_percent: Option<f64>,
    /// By how many milliseconds remote has to be cheaper. None: the preset's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin_milliseconds: Option<f64>,
    /// 0 takes the cheapest; above, candidates within about this many percent of it share the load by chance.
    pub temperature_percent: f64,
    /// Added to a pair whose nearest common level has this name; `beyond` for pairs without one.
    pub level_penalty_milliseconds: LevelPenalties,
}

/// Named settings, measured against each other in the placement lab (reference, sections 4 and 11).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preset {
    /// Goodput and tails together (rule RD).
    #[default]
    Balanced,
    /// Latency first (rule RB).
    Latency,
    /// Rolls workers forward with and without the request. Not built yet.
    LookAhead,
}

/// Percent over the preset's weights; a missing one is 100.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct WeightPercents {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wq: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wt: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wm: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lambda: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wo: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wd: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uq: Option<f64>,
}

impl WeightPercents {
    pub(super) fn named(&self) -> [(&'static str, Option<f64>); 8] {
        [
            ("wq", self.wq),
            ("wt", self.wt),
            ("wm", self.wm),
            ("lambda", self.lambda),
            ("wo", self.wo),
            ("wd", self.wd),
            ("v", self.v),
            ("uq", self.uq),
        ]
    }
}

/// The weights in force. The names are those of the formula in `place`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Of a millisecond in the queue.
    pub wq: f64,
    /// Of a millisecond of prefill, exposed transfer, synchronisation, first step and waiting for memory.
    pub wt: f64,
    /// Of a millisecond of machine time taken.
    pub wm: f64,
    /// Of a millisecond that a resident stream waits because of this prefill.
    pub lambda: f64,
    /// Of a millisecond of this request's own decode.
    pub wo: f64,
    /// Of a millisecond by which its decode slows the streams beside it.
    pub wd: f64,
    /// What missing an objective costs, in milliseconds.
    pub v: f64,
    /// How often the queue counts in the check of the objective for the first token.
    pub uq: f64,
    /// Remote has to be cheaper by the larger of the two.
    pub margin_share: f64,
    pub margin_milliseconds: f64,
}

impl CostPolicy {
    /// The weights in force for a policy with or without objectives.
    pub fn resolve(&self, objectives: bool) -> Weights {
        let preset = match self.preset {
            // Never reached with a checked policy: look-ahead is refused when the policy is read.
            Preset::Balanced | Preset::LookAhead => Weights {
                wq: 0.6,
                wt: 0.3,
                wm: 3.0,
                lambda: 1.0,
                wo: 0.3,
                wd: 0.3,
                v: 8000.0,
                uq: 3.0,
                margin_share: 0.10,
                margin_milliseconds: 10.0,
            },
            Preset::Latency => Weights {
                wq: 1.0,
                wt: 1.0,
                wm: 1.0,
                lambda: 0.6,
                wo: 1.0,
                wd: 1.0,
                v: 4000.0,
                uq: 3.0,
                margin_share: 0.10,
                margin_milliseconds: 10.0,
            },
        };
        let preset = if objectives {
            preset
        } else {
            Weights {
                wq: 1.0,
                wt: 1.0,
                lambda: 0.5,
                v: 0.0,
                margin_share: 0.05,
                ..preset
            }
        };
        let scaled = |weight: f64, percent: Option<f64>| weight * percent.unwrap_or(100.0) / 100.0;
        Weights {
            wq: scaled(preset.wq, self.weights.wq),
            wt: scaled(preset.wt, self.weights.wt),
            wm: scaled(preset.wm, self.weights.wm),
            lambda: scaled(preset.lambda, self.weights.lambda),
            wo: scaled(preset.wo, self.weights.wo),
            wd: scaled(preset.wd, self.weights.wd),
            v: scaled(preset.v, self.weights.v),
            uq: scaled(preset.uq, self.weights.uq),
            margin_share: self
                .margin_percent
                .map_or(preset.margin_share, |percent| percent / 100.0),
            margin_milliseconds: self
                .margin_milliseconds
                .unwrap_or(preset.margin_milliseconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_objectives_nothing_is_paid_for_missing_them() {
        let cost = CostPolicy::default();
        let with = cost.resolve(true);
        assert_eq!(
            (with.wq, with.wm, with.v, with.margin_share),
            (0.6, 3.0, 8000.0, 0.10)
        );
        let without = cost.resolve(false);
        assert_eq!(
            (without.wq, without.wt, without.lambda, without.v),
            (1.0, 1.0, 0.5, 0.0)
        );
        assert_eq!(without.margin_share, 0.05);
    }

    #[test]
    fn percentages_scale_the_preset_and_margins_replace_it() {
        let cost: CostPolicy = serde_json::from_str(
            r#"{"preset":"Latency","weights":{"wm":50,"lambda":200},"marginPercent":0}"#,
        )
        .unwrap();
        let weights = cost.resolve(true);
        assert_eq!((weights.wm, weights.lambda, weights.wt), (0.5, 1.2, 1.0));
        assert_eq!(
            (weights.margin_share, weights.margin_milliseconds),
            (0.0, 10.0)
        );
    }
}

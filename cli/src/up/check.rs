//! `--check`: the same prompts in each mode have to give the same tokens, by the plans that the modes ask for.

use baton_placement::policy::{Overrides, Policy};
use baton_placement::record::{DecisionRecord, Kind};
use serde_json::json;

use super::prompts;
use super::traffic::{Answered, Ask, Traffic};
use crate::arguments::Output;
use crate::explain::plan_of;
use crate::failure::{Verdict, wrong_input};
use crate::table::{Align, Table};
use crate::terminal;

const MODES: [&str; 3] = ["Aggregated", "Disaggregated", "Conditional"];
/// Tokens compared of each answer.
const ANSWER: u32 = 24;

/// One prompt in one mode.
#[derive(Debug)]
struct Trial {
    model: String,
    prompt: &'static str,
    mode: &'static str,
    record: DecisionRecord,
    text: String,
    tokens: Vec<String>,
    /// What is wrong with it; empty when nothing is.
    wrong: Vec<String>,
}

/// Whether the policies let requests choose their mode.
///
/// # Errors
/// The first that does not is named.
pub(crate) fn possible(policies: &[Policy]) -> anyhow::Result<()> {
    match policies
        .iter()
        .find(|policy| policy.overrides != Overrides::Allowed)
    {
        None => Ok(()),
        Some(policy) => Err(wrong_input(format!(
            "RoutePolicy {}: --check sends each mode with x-baton-mode, which needs spec.overrides: Allowed",
            policy.name
        ))),
    }
}

/// Sends, compares, prints. Good when all tokens agree and each mode did what it says.
///
/// # Errors
/// A request is refused.
pub(crate) async fn check(
    traffic: &Traffic,
    policies: &[Policy],
    output: Output,
) -> anyhow::Result<Verdict> {
    let long = prompts::long(16);
    let middle = prompts::long(4);
    let asked = [
        ("short", prompts::SHORT),
        ("middle", &middle),
        ("long", &long),
    ];
    let mut trials: Vec<Trial> = Vec::new();
    for policy in policies {
        for (name, prompt) in asked {
            let first = trials.len();
            for mode in MODES {
                // No two share a cache: each mode computes or moves everything.
                let salt = format!("check-{}-{name}-{mode}", policy.name);
                let ask = Ask {
                    model: &policy.model,
                    prompt,
                    mode: Some(mode),
                    salt: &salt,
                    max_tokens: ANSWER,
                };
                let answered = traffic.ask(ask).await?;
                trials.push(judge(policy, name, mode, answered, trials.get(first)));
            }
        }
    }
    let bad = trials
        .iter()
        .filter(|trial| !trial.wrong.is_empty())
        .count();
    match output {
        Output::Json => terminal::json(&json!({
            "good": bad == 0,
            "trials": trials.iter().map(json_of).collect::<Vec<_>>(),
        }))?,
        Output::Table => {
            terminal::lines(table(&trials))?;
            terminal::line("")?;
            for trial in &trials {
                terminal::line(&format!(
                    "{} {}: {}",
                    trial.prompt, trial.mode, trial.record.explanation
                ))?;
            }
            terminal::line("")?;
            terminal::line(&format!(
                "check {}: {} of {} answers are right",
                if bad == 0 { "passed" } else { "failed" },
                trials.len() - bad,
                trials.len()
            ))?;
        }
    }
    Ok(if bad == 0 {
        Verdict::Good
    } else {
        Verdict::Bad
    })
}

/// `first`: the same prompt in the first mode.
fn judge(
    policy: &Policy,
    prompt: &'static str,
    mode: &'static str,
    answered: Answered,
    first: Option<&Trial>,
) -> Trial {
    let Answered {
        text,
        tokens,
        record,
    } = answered;
    let mut wrong = Vec::new();
    if let Some(first) = first
        && (first.text != text || first.tokens != tokens)
    {
        wrong.push(format!("tokens differ from {}", first.mode));
    }
    if text.is_empty() && tokens.is_empty() {
        wrong.push("no answer".to_owned());
    }
    if record.mode != mode {
        wrong.push(format!("placed in mode {}", record.mode));
    }
    let kind = record.chosen().map(|candidate| candidate.kind);
    let wanted = match mode {
        "Aggregated" => Some(Kind::Local),
        "Disaggregated" if !policy.prefill_pools.is_empty() => Some(Kind::Remote),
        _ => kind,
    };
    if kind != wanted {
        wrong.push(format!("went {}", record.reason.word()));
    }
    if let Some(fallback) = &record.fallback {
        wrong.push(format!("fell back: {}", fallback.cause));
    }
    Trial {
        model: policy.model.clone(),
        prompt,
        mode,
        record,
        text,
        tokens,
        wrong,
    }
}

fn table(trials: &[Trial]) -> Vec<String> {
    let mut table = Table::new([
        ("model", Align::Left),
        ("prompt", Align::Left),
        ("tokens", Align::Right),
        ("mode", Align::Left),
        ("plan", Align::Left),
        ("reason", Align::Left),
        ("answer", Align::Right),
        ("result", Align::Left),
    ]);
    for trial in trials {
        table.row([
            trial.model.clone(),
            trial.prompt.to_owned(),
            trial.record.input.tokens.to_string(),
            trial.mode.to_owned(),
            trial.record.chosen().map(plan_of).unwrap_or_default(),
            trial.record.reason.word(),
            trial.tokens.len().to_string(),
            if trial.wrong.is_empty() {
                "same".to_owned()
            } else {
                trial.wrong.join("; ")
            },
        ]);
    }
    table.lines()
}

fn json_of(trial: &Trial) -> serde_json::Value {
    json!({
        "model": trial.model,
        "prompt": trial.prompt,
        "mode": trial.mode,
        "run": trial.record.run,
        "plan": trial.record.chosen().map(plan_of),
        "reason": trial.record.reason.word(),
        "explanation": trial.record.explanation,
        "text": trial.text,
        "wrong": trial.wrong,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::sample;

    fn answered(mode: &str, remote: bool, text: &str) -> Answered {
        let mut record = sample::record();
        mode.clone_into(&mut record.mode);
        record.chosen = Some(usize::from(remote));
        Answered {
            text: text.to_owned(),
            tokens: vec![text.to_owned()],
            record,
        }
    }

    fn wrong(mode: &'static str, answered: Answered, first: &str) -> Vec<String> {
        let policy = Policy::new("p", "m", &["prefill"], &["decode"]);
        let good = self::answered("Aggregated", false, first);
        let first = judge(&policy, "short", "Aggregated", good, None);
        assert_eq!(first.wrong, [] as [&str; 0]);
        judge(&policy, "short", mode, answered, Some(&first)).wrong
    }

    #[test]
    fn the_same_tokens_by_the_plan_that_was_asked_for_are_right() {
        assert_eq!(
            wrong(
                "Disaggregated",
                answered("Disaggregated", true, "red"),
                "red"
            ),
            [] as [&str; 0]
        );
        assert_eq!(
            wrong("Conditional", answered("Conditional", false, "red"), "red"),
            [] as [&str; 0]
        );
    }

    #[test]
    fn another_token_another_plan_and_a_fallback_are_wrong() {
        assert_eq!(
            wrong(
                "Disaggregated",
                answered("Disaggregated", true, "blue"),
                "red"
            ),
            ["tokens differ from Aggregated"]
        );
        assert_eq!(
            wrong(
                "Disaggregated",
                answered("Disaggregated", false, "red"),
                "red"
            ),
            ["went RemoteCheaper"]
        );
        assert_eq!(
            wrong("Conditional", answered("Aggregated", false, "red"), "red"),
            ["placed in mode Aggregated"]
        );
        let mut fallen = answered("Disaggregated", true, "red");
        let fallback = serde_json::json!({"cause": "checksum-mismatch", "at": "t"});
        fallen.record.fallback = serde_json::from_value(fallback).unwrap();
        assert_eq!(
            wrong("Disaggregated", fallen, "red"),
            ["fell back: checksum-mismatch"]
        );
    }

    #[test]
    fn a_policy_without_overrides_cannot_be_checked() {
        let error = possible(&[Policy::new("p", "m", &[], &["d"])])
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("RoutePolicy p: --check sends each mode"),
            "{error}"
        );
    }
}

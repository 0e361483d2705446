//! Decision records after a simulation: each is legal, replays to the bit, and says what the client saw.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use baton_placement::coefficients::CoefficientSet;
use baton_placement::policy::Policy;
use baton_placement::record::{DecisionRecord, RunStatus};
use baton_placement::replay::{differences, replay};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::client::{Ended, Outcome};
use crate::record::Record;

/// What happened, over any number of seeds: whether what is tested did occur.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally(pub BTreeMap<String, u64>);

impl Tally {
    pub fn count(&mut self, what: impl Into<String>) {
        *self.0.entry(what.into()).or_default() += 1;
    }

    pub fn add(&mut self, other: &Self) {
        for (what, count) in &other.0 {
            *self.0.entry(what.clone()).or_default() += count;
        }
    }

    pub fn of(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }
}

/// Reads what a router has written and compares it with what clients saw.
///
/// # Errors
/// The first record that is not as it must be.
pub fn check(state: &Path, outcomes: &[Outcome], router_starts: usize) -> Result<Tally> {
    let mut tally = Tally::default();
    let mut found: BTreeMap<String, DecisionRecord> = BTreeMap::new();
    let mut files: Vec<_> = std::fs::read_dir(state.join("decisions"))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    files.sort();
    for file in files {
        for line in std::fs::read_to_string(&file)?.lines() {
            let value: Value = serde_json::from_str(line).context("a torn line")?;
            let record: DecisionRecord = serde_json::from_value(value.clone())?;
            let run = record.run.to_string();
            Record(value)
                .check_order()
                .with_context(|| format!("run {run}: {line}"))?;
            again(state, &record).with_context(|| format!("run {run}"))?;
            weigh(&record, &mut tally);
            let twice = found.insert(run.clone(), record).is_some();
            ensure!(!twice, "run {run} has two records");
        }
    }
    for outcome in outcomes {
        tally.count(format!("client: {}", word(&outcome.ended)));
        let context = || format!("request {}: {outcome:?}", outcome.request);
        compare(outcome, &found, router_starts > 1).with_context(context)?;
    }
    Ok(tally)
}

fn word(ended: &Ended) -> &'static str {
    match ended {
        Ended::Complete(_) => "complete",
        Ended::Refused { .. } => "refused",
        Ended::Failed { .. } => "failed",
        Ended::Broken { .. } => "broken",
        Ended::Left { .. } => "left",
        Ended::Stuck { .. } => "stuck",
    }
}

/// The recorded decision, made again from what was recorded.
fn again(state: &Path, record: &DecisionRecord) -> Result<()> {
    let read = |folder: &str, digest: &str| -> Result<String> {
        let path = state.join(folder).join(format!("{digest}.json"));
        std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))
    };
    let coefficients: CoefficientSet =
        serde_json::from_str(&read("coefficients", &record.coefficients)?)?;
    let policy: Policy = serde_json::from_str(&read("policies", &record.policy.digest)?)?;
    let decision = replay(record, &coefficients, &policy)?;
    let differences = differences(record, &decision);
    ensure!(differences.is_empty(), "replays as {differences:?}");
    Ok(())
}

fn weigh(record: &DecisionRecord, tally: &mut Tally) {
    let remote = record
        .chosen()
        .is_some_and(|chosen| chosen.prefill.is_some());
    let attempts = record.states.iter().map(|state| state.attempt).max();
    tally.count(match (record.chosen, remote) {
        (None, _) => "plan: none",
        (_, true) => "plan: remote",
        (_, false) => "plan: local",
    });
    tally.count(format!("attempts: {}", attempts.unwrap_or(0)));
    if let Some(fallback) = &record.fallback {
        tally.count(format!("fallback: {}", fallback.cause));
    }
    if record
        .actual
        .as_ref()
        .is_some_and(|actual| actual.bytes > 0)
    {
        tally.count("KV moved");
    }
}

/// A client that saw an end, and the record of its run.
fn compare(
    outcome: &Outcome,
    records: &BTreeMap<String, DecisionRecord>,
    router_died: bool,
) -> Result<()> {
    if matches!(outcome.ended, Ended::Broken { .. }) {
        ensure!(router_died, "a connection broke, and the router never died");
    }
    let Some(run) = &outcome.run else {
        return Ok(());
    };
    let Some(record) = records.get(run) else {
        ensure!(router_died, "run {run} has no record");
        return Ok(());
    };
    let status = record.outcome.as_ref().map(|outcome| outcome.status);
    match &outcome.ended {
        Ended::Complete(answer) => {
            ensure!(status == Some(RunStatus::Completed), "{status:?}");
            let tokens = record.outcome.as_ref().map(|outcome| outcome.output_tokens);
            ensure!(
                tokens.map(u64::from) == Some(answer.output_tokens),
                "{tokens:?} tokens are recorded"
            );
        }
        Ended::Failed { .. } | Ended::Refused { .. } => {
            ensure!(status != Some(RunStatus::Completed), "{status:?}");
        }
        // It may have left after the last token was on its way.
        Ended::Left { .. } | Ended::Broken { .. } | Ended::Stuck { .. } => {}
    }
    Ok(())
}

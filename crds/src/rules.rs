//! What a field may hold given another field of the same object.

mod cluster;
mod engine;

use std::collections::BTreeSet;

use crate::check::fits;
use crate::policy::{Mode, NoPrefillAction, PoolReference, RoutePolicySpec};
use crate::pool::{EngineType, PoolSpec};
use crate::problem::Problem;
use crate::resources::Origin;
use crate::schema::Form;
use crate::source::SourceError;

/// In `levelPenaltyMilliseconds`: pairs that share no level.
const BEYOND: &str = "beyond";

/// `levels`: the names that levels of topology have; `None` in a cluster, whose operator's configuration names them.
pub(crate) fn pool(
    spec: &PoolSpec,
    origin: &Origin,
    title: &str,
    levels: Option<&[&str]>,
) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut wrong = |path: &str, message: String| {
        problems.push(origin.problem(title.to_owned(), path, message));
    };

    let simulated = spec.engine.engine_type == EngineType::Simulated;
    if let Err(error) = spec.model.source.location()
        && !(simulated && error == SourceError::None)
    {
        let path = match error {
            SourceError::None | SourceError::Several(_) => "spec.model.source",
            _ => "spec.model.source.uri",
        };
        wrong(path, error.to_string());
    }
    let block_size = spec.engine.block_size;
    if block_size.count_ones() != 1 {
        wrong(
            "spec.engine.blockSize",
            format!("found {block_size}, must be a power of two from 2 to 1024"),
        );
    }
    if spec.engine.simulated.is_some() && !simulated {
        wrong(
            "spec.engine.simulated",
            "must be left out unless spec.engine.type is Simulated".to_owned(),
        );
    }
    for (path, message) in engine::pool(spec) {
        wrong(path, message);
    }
    if let (Some(bytes), Some(blocks)) = (spec.kv_pool.bytes, spec.kv_pool.blocks) {
        let message = format!(
            "found bytes {bytes} and blocks {blocks}, must be one of the two: leave one out"
        );
        wrong("spec.kvPool", message);
    }
    for (path, message) in cluster::pool(spec) {
        wrong(&path, message);
    }
    let transports = &spec.kv_pool.transports;
    if transports.is_empty() {
        wrong(
            "spec.kvPool.transports",
            "must not be empty: leave it out for [Local, Shm, Tcp]".to_owned(),
        );
    }
    for (index, transport) in transports.iter().enumerate() {
        if transports[..index].contains(transport) {
            wrong(
                &format!("spec.kvPool.transports[{index}]"),
                format!("{transport:?} is listed twice"),
            );
        }
    }
    let declared = spec.topology.domain.keys().map(|level| {
        let path = format!("spec.topology.domain.{level}");
        (path, level.as_str())
    });
    for (path, message) in unknown_levels(declared, levels) {
        wrong(&path, message);
    }
    problems
}

/// `levels`: as with [`pool`].
pub(crate) fn policy(
    spec: &RoutePolicySpec,
    origin: &Origin,
    title: &str,
    levels: Option<&[&str]>,
) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut wrong = |path: &str, message: String| {
        problems.push(origin.problem(title.to_owned(), path, message));
    };

    match (spec.mode, spec.threshold_tokens) {
        (_, None) | (Mode::Threshold, Some(_)) => {}
        (mode, Some(_)) => wrong(
            "spec.thresholdTokens",
            format!("must be left out with mode {mode:?}: it belongs to mode Threshold"),
        ),
    }
    if spec.prefill_pools.is_empty() && matches!(spec.mode, Mode::Disaggregated | Mode::Threshold) {
        wrong(
            "spec.prefillPools",
            format!("must name a PrefillPool with mode {:?}", spec.mode),
        );
    }
    if spec.decode_pools.is_empty() {
        wrong(
            "spec.decodePools",
            "must name at least one DecodePool".to_owned(),
        );
    }
    for (field, references) in [
        ("prefillPools", &spec.prefill_pools),
        ("decodePools", &spec.decode_pools),
    ] {
        let mut seen = BTreeSet::new();
        for (index, reference) in references.iter().enumerate() {
            let path = format!("spec.{field}[{index}]");
            match reference {
                PoolReference {
                    name: Some(name),
                    selector: None,
                } => {
                    if !seen.insert(name) {
                        wrong(&path, format!("{name} is listed twice"));
                    }
                }
                PoolReference {
                    name: None,
                    selector: Some(selector),
                } if selector.match_labels.is_empty() => {
                    wrong(
                        &path,
                        "selector.matchLabels must hold at least one label".to_owned(),
                    );
                }
                PoolReference {
                    name: None,
                    selector: Some(_),
                } => {}
                _ => wrong(&path, "must hold either name or selector".to_owned()),
            }
        }
    }
    let mut names = BTreeSet::from([&spec.model]);
    for (index, alias) in spec.aliases.iter().enumerate() {
        if !names.insert(alias) {
            wrong(
                &format!("spec.aliases[{index}]"),
                format!("{alias} is the model's name or listed twice"),
            );
        }
    }
    if let Some(rule) = &spec.on_no_prefill {
        let (needed, given) = match rule.action {
            NoPrefillAction::Local => (
                "maxConcurrentPerWorker",
                rule.max_concurrent_per_worker.is_some(),
            ),
            NoPrefillAction::Queue => ("queueMilliseconds", rule.queue_milliseconds.is_some()),
            NoPrefillAction::Reject => ("", true),
        };
        if !given {
            wrong(
                &format!("spec.onNoPrefill.{needed}"),
                format!("is required with action {:?}: its budget", rule.action),
            );
        }
    }
    let farthest = spec
        .topology
        .farthest_level
        .iter()
        .map(|level| ("spec.topology.farthestLevel".to_owned(), level.as_str()));
    let penalties = spec.cost.level_penalty_milliseconds.keys();
    let penalties = penalties.filter(|level| *level != BEYOND).map(|level| {
        let path = format!("spec.cost.levelPenaltyMilliseconds.{level}");
        (path, level.as_str())
    });
    for (path, message) in unknown_levels(farthest.chain(penalties), levels) {
        wrong(&path, message);
    }
    if spec.mode == Mode::Threshold && spec.threshold_tokens.is_none() {
        let message = "is required with mode Threshold: an integer from 0 to 16777216".to_owned();
        let problem = origin.problem(title.to_owned(), "spec.thresholdTokens", message);
        // The line that asks for it, as there is none that holds it.
        problems.push(Problem {
            line: origin.line_of("spec.mode"),
            ..problem
        });
    }
    problems
}

/// Paths at which a level is named that is none of `levels`.
fn unknown_levels<'a>(
    named: impl Iterator<Item = (String, &'a str)>,
    levels: Option<&[&str]>,
) -> Vec<(String, String)> {
    let (fits, allowed): (&dyn Fn(&str) -> bool, String) = match levels {
        Some(levels) => (
            &|level| levels.contains(&level),
            format!("must be one of {}", levels.join(", ")),
        ),
        None => (&is_label, "must be a DNS label".to_owned()),
    };
    named
        .filter(|(_, level)| !fits(level))
        .map(|(path, level)| (path, format!("{level} is no level of topology, {allowed}")))
        .collect()
}

fn is_label(name: &str) -> bool {
    name.len() <= 63 && fits(Form::Label, name)
}

//! `baton replay`: recorded requests decided anew.

use std::path::{Path, PathBuf};

use baton_crds::RoutePolicy;
use baton_placement::policy::Policy;
use baton_placement::record::DecisionRecord;
use baton_placement::replay::{ReplayDifference, WhatIf, differences, replay as decide, what_if};
use serde::Serialize;
use serde_json::json;

use crate::arguments::{Output, ReplayArguments};
use crate::failure::{Verdict, wrong_input};
use crate::records::{self, Digests, Records};
use crate::table::{Align, Table};
use crate::{manifests, terminal};

/// Good when every record comes out as recorded; with another policy, always.
///
/// # Errors
/// Records, coefficients or policies cannot be read.
pub(crate) async fn replay(arguments: ReplayArguments) -> anyhow::Result<Verdict> {
    let (records, mut digests) = gather(&arguments).await?;
    match &arguments.policy {
        None => again(&records, &mut digests, arguments.output.output),
        Some(file) => elsewhere(&records, &mut digests, file, arguments.output.output),
    }
}

async fn gather(arguments: &ReplayArguments) -> anyhow::Result<(Vec<DecisionRecord>, Digests)> {
    if !arguments.files.is_empty() {
        let mut all = Vec::new();
        for file in &arguments.files {
            if file.is_dir() {
                all.extend(Records::StateDir(file.clone()).all().await?);
            } else {
                all.extend(records::read(file)?);
            }
        }
        // Beside the files themselves before where we are.
        let near = arguments
            .files
            .iter()
            .map(PathBuf::as_path)
            .chain([arguments.records.state_dir.as_path()]);
        return Ok((all, Digests::new(near)));
    }
    let records = Records::of(&arguments.records)?;
    let all = records.all().await?;
    let mut digests = Digests::new([arguments.records.state_dir.as_path()]);
    if let Records::Router(client) = &records {
        digests.fetch(client, &all).await?;
    }
    Ok((all, digests))
}

/// A record that came out otherwise.
#[derive(Debug, Serialize)]
struct Differing<'a> {
    run: &'a str,
    differences: Vec<ReplayDifference>,
}

fn again(
    records: &[DecisionRecord],
    digests: &mut Digests,
    output: Output,
) -> anyhow::Result<Verdict> {
    let mut differing = Vec::new();
    for record in records {
        let policy = digests.policy(&record.policy.digest)?.clone();
        let mut differences = differing_fields(record, digests, &policy)?;
        for (index, later) in record.later_records().enumerate() {
            for mut difference in differing_fields(&later, digests, &policy)? {
                difference.field = format!("laterDecisions[{index}].{}", difference.field);
                differences.push(difference);
            }
        }
        if !differences.is_empty() {
            differing.push(Differing {
                run: &record.run.0,
                differences,
            });
        }
    }
    let same = records.len() - differing.len();
    match output {
        Output::Json => terminal::json(
            &json!({"records": records.len(), "same": same, "differing": differing}),
        )?,
        Output::Table => {
            let mut table = Table::new([
                ("run", Align::Left),
                ("field", Align::Left),
                ("recorded", Align::Left),
                ("replayed", Align::Left),
            ]);
            for one in &differing {
                for difference in &one.differences {
                    let cells = [
                        one.run,
                        &difference.field,
                        &difference.recorded,
                        &difference.replayed,
                    ];
                    table.row(cells.map(ToOwned::to_owned));
                }
            }
            if !table.is_empty() {
                terminal::lines(table.lines())?;
            }
            terminal::line(&format!(
                "{same} of {} decisions came out as recorded",
                records.len()
            ))?;
        }
    }
    Ok(if differing.is_empty() {
        Verdict::Good
    } else {
        Verdict::Bad
    })
}

/// Makes one decision again.
fn differing_fields(
    record: &DecisionRecord,
    digests: &mut Digests,
    policy: &Policy,
) -> anyhow::Result<Vec<ReplayDifference>> {
    let coefficients = digests.coefficients(&record.coefficients)?;
    let decision =
        decide(record, coefficients, policy).map_err(|error| wrong_input(error.to_string()))?;
    Ok(differences(record, &decision))
}

fn elsewhere(
    records: &[DecisionRecord],
    digests: &mut Digests,
    file: &Path,
    output: Output,
) -> anyhow::Result<Verdict> {
    let resources = manifests::alone(file)?;
    if resources.policies.is_empty() {
        return Err(wrong_input(format!(
            "{} holds no RoutePolicy",
            file.display()
        )));
    }
    let mut changed: Vec<WhatIf> = Vec::new();
    let mut decided = 0;
    for record in records {
        let of_model = |policy: &&RoutePolicy| {
            policy.spec.model == record.model || policy.spec.aliases.contains(&record.model)
        };
        let Some(policy) = resources.policies.iter().find(of_model) else {
            continue;
        };
        let policy: Policy = manifests::policy(policy, &resources)?;
        let coefficients = digests.coefficients(&record.coefficients)?;
        decided += 1;
        changed.extend(
            what_if(record, coefficients, &policy)
                .map_err(|error| wrong_input(error.to_string()))?,
        );
    }
    if output == Output::Json {
        terminal::json(
            &json!({"records": records.len(), "decided": decided, "elsewhere": changed}),
        )?;
        return Ok(Verdict::Good);
    }
    let mut table = Table::new([
        ("run", Align::Left),
        ("went", Align::Left),
        ("would go", Align::Left),
        ("because", Align::Left),
        ("cost there", Align::Right),
        ("cost here", Align::Right),
    ]);
    let cost = |cost: Option<f64>| cost.map_or_else(|| "-".to_owned(), |cost| format!("{cost:.1}"));
    for one in &changed {
        table.row([
            one.run.to_string(),
            one.before.plan.clone(),
            one.after.plan.clone(),
            one.after.reason.word(),
            cost(one.after.cost),
            cost(one.before.cost),
        ]);
    }
    if !table.is_empty() {
        terminal::lines(table.lines())?;
    }
    terminal::line(&format!(
        "{} of {decided} requests would have gone elsewhere (costs in milliseconds, by the weights of {})",
        changed.len(),
        file.display()
    ))?;
    if decided < records.len() {
        terminal::line(&format!(
            "{} records are of models that {} has no policy for",
            records.len() - decided,
            file.display()
        ))?;
    }
    Ok(Verdict::Good)
}

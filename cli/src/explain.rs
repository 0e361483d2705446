//! `baton explain`: one decision as a person reads it.

mod render;
#[cfg(test)]
pub(crate) mod sample;

use crate::arguments::{ExplainArguments, Output};
use crate::failure::{Verdict, wrong_input};
use crate::records::Records;
use crate::terminal;

pub(crate) use render::{plan_of, sentence};

/// # Errors
/// There is no such record, or nothing to read it from.
pub(crate) async fn explain(arguments: ExplainArguments) -> anyhow::Result<Verdict> {
    let records = Records::of(&arguments.records)?;
    let record = records.find(&arguments.run).await?.ok_or_else(|| {
        let place = match &records {
            Records::StateDir(folder) => format!("in {}", folder.display()),
            Records::Router(client) => format!("at {}", client.base()),
        };
        wrong_input(format!(
            "no record of run {} {place}: take the run id from x-baton-run, or name another place with --state-dir or --admin",
            arguments.run
        ))
    })?;
    match arguments.output.output {
        Output::Json => terminal::json(&record)?,
        Output::Table => terminal::lines(render::explanation(&record))?,
    }
    Ok(Verdict::Good)
}

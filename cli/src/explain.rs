//! `baton explain`: one decision as a person reads it.

mod render;
#[cfg(test)]
pub(crate) mod sample;

use baton_placement::record::DecisionRecord;

use crate::arguments::{ExplainArguments, Output};
use crate::cluster;
use crate::failure::{Verdict, wrong_input};
use crate::records::Records;
use crate::terminal;
use crate::up::interrupt::Interrupt;

pub(crate) use render::{plan_of, sentence};

/// # Errors
/// There is no such record, or nothing to read it from.
pub(crate) async fn explain(arguments: ExplainArguments) -> anyhow::Result<Verdict> {
    let record = if arguments.cluster.kubernetes {
        in_cluster(&arguments).await?
    } else {
        on_this_machine(&arguments).await?
    };
    match arguments.output.output {
        Output::Json => terminal::json(&record)?,
        Output::Table => terminal::lines(render::explanation(&record))?,
    }
    Ok(Verdict::Good)
}

async fn on_this_machine(arguments: &ExplainArguments) -> anyhow::Result<DecisionRecord> {
    let records = Records::of(&arguments.records)?;
    records.find(&arguments.run).await?.ok_or_else(|| {
        let place = match &records {
            Records::StateDir(folder) => format!("in {}", folder.display()),
            Records::Router(client) => format!("at {}", client.base()),
        };
        wrong_input(format!(
            "no record of run {} {place}: take the run id from x-baton-run, or name another place with --state-dir, --admin or --kubernetes",
            arguments.run
        ))
    })
}

async fn in_cluster(arguments: &ExplainArguments) -> anyhow::Result<DecisionRecord> {
    // Whoever ends this command ends what it has started, too.
    let interrupt = Interrupt::listen()?;
    let token_file = arguments.records.admin_token_file.as_deref();
    tokio::select! {
        found = cluster::find(&arguments.run, &arguments.cluster, token_file) => found,
        () = interrupt.first() => anyhow::bail!("interrupted"),
    }
}

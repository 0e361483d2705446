//! A client that goes away leaves nothing behind: no running sequence, no lease, no block, whenever it goes.

use std::time::Duration;

use anyhow::{Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::{Ask, Stream};
use baton_e2e::record::Record;
use baton_e2e::{scenario, wait};
use serde_json::Value;

/// Lease of the manifest and a little: nothing may be held for longer.
const LEASE: Duration = Duration::from_secs(6);
const SOON: Duration = Duration::from_secs(20);

fn prompt(tokens: u32, salt: u32) -> Vec<u32> {
    (0..tokens)
        .map(|index| 3 + (index * 7 + salt * 13) % 200)
        .collect()
}

#[test]
fn a_client_that_hangs_up_leaves_nothing_behind() {
    scenario(async {
        let fleet = Fleet::of(&Manifest::slow()).await?;
        while_a_local_prompt_is_computed(&fleet).await?;
        while_a_remote_prompt_is_computed_and_moved(&fleet).await?;
        while_tokens_are_generated(&fleet, "Aggregated", 11).await?;
        while_tokens_are_generated(&fleet, "Disaggregated", 12).await?;
        before_the_answer_is_whole(&fleet).await?;
        eight_at_a_time(&fleet).await?;
        the_fleet_still_serves(&fleet).await?;
        fleet.end().await
    });
}

async fn begin(fleet: &Fleet, mode: &'static str, tokens: u32, salt: u32) -> Result<Stream> {
    Ask::ids("tiny", &prompt(tokens, salt), 400)
        .with("ignore_eos", true)
        .mode(mode)
        .stream(&fleet.api)
        .await
}

/// Waits until some worker of a role says so.
async fn seen(fleet: &Fleet, what: &str, role: &str, holds: impl Fn(&Value) -> bool) -> Result<()> {
    wait::until(what, SOON, async || {
        let workers = fleet
            .workers(Some(role))
            .await
            .map_err(|error| error.to_string())?;
        if workers.iter().any(&holds) {
            Ok(())
        } else {
            Err(format!("{workers:?}"))
        }
    })
    .await
}

fn positive(value: &Value) -> bool {
    value.as_u64().is_some_and(|count| count > 0)
}

async fn nothing_is_left(fleet: &Fleet, run: &str, when: &str) -> Result<()> {
    fleet
        .idle(LEASE)
        .await
        .map_err(|error| error.context(format!("after a client went {when}")))?;
    let record = Record::of(&fleet.admin, run).await?;
    record.check_order()?;
    ensure!(
        record.0["outcome"]["status"] == "Cancelled",
        "{when}: outcome {}",
        record.0["outcome"]
    );
    Ok(())
}

async fn while_a_local_prompt_is_computed(fleet: &Fleet) -> Result<()> {
    let stream = begin(fleet, "Aggregated", 2000, 1).await?;
    let run = stream.run.clone();
    seen(fleet, "a local prompt is computed", "decode", |worker| {
        positive(&worker["queuedTokens"])
    })
    .await?;
    drop(stream);
    nothing_is_left(fleet, &run, "during a local prefill").await
}

async fn while_a_remote_prompt_is_computed_and_moved(fleet: &Fleet) -> Result<()> {
    let stream = begin(fleet, "Disaggregated", 2000, 2).await?;
    let run = stream.run.clone();
    // The lease opens when prefill starts, and blocks are read from then on.
    seen(fleet, "a lease is open", "prefill", |worker| {
        positive(&worker["blocks"]["leased"])
    })
    .await?;
    drop(stream);
    nothing_is_left(fleet, &run, "during a transfer").await
}

async fn while_tokens_are_generated(fleet: &Fleet, mode: &'static str, salt: u32) -> Result<()> {
    let mut stream = begin(fleet, mode, 64, salt).await?;
    let run = stream.run.clone();
    for _ in 0..3 {
        ensure!(
            stream.text().await?.is_some(),
            "ended before the third token"
        );
    }
    drop(stream);
    nothing_is_left(fleet, &run, "during decode").await
}

/// Without streaming nothing has been sent yet, and still nobody computes for a client that is gone.
async fn before_the_answer_is_whole(fleet: &Fleet) -> Result<()> {
    let ask = Ask::ids("tiny", &prompt(64, 3), 1000)
        .with("ignore_eos", true)
        .mode("Aggregated");
    {
        let answer = ask.raw(&fleet.api);
        tokio::pin!(answer);
        let running = seen(fleet, "the sequence runs", "decode", |worker| {
            positive(&worker["runningSequences"])
        });
        tokio::select! {
            answer = &mut answer => anyhow::bail!("answered too early: {:?}", answer?.text()),
            running = running => running?,
        }
    }
    fleet.idle(LEASE).await
}

async fn eight_at_a_time(fleet: &Fleet) -> Result<()> {
    let mut streams = Vec::new();
    for salt in 20..28 {
        let mode = if salt % 2 == 0 {
            "Aggregated"
        } else {
            "Disaggregated"
        };
        streams.push(begin(fleet, mode, 300, salt).await?);
    }
    seen(fleet, "a lease is open", "prefill", |worker| {
        positive(&worker["blocks"]["leased"])
    })
    .await?;
    drop(streams);
    fleet.idle(LEASE).await
}

async fn the_fleet_still_serves(fleet: &Fleet) -> Result<()> {
    for mode in ["Aggregated", "Disaggregated"] {
        let answer = Ask::ids("tiny", &prompt(40, 99), 4)
            .with("ignore_eos", true)
            .mode(mode)
            .send(&fleet.api)
            .await?;
        ensure!(answer.output.output_tokens == 4, "{mode}: {answer:?}");
    }
    fleet.idle(LEASE).await
}

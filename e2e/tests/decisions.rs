//! Every request is placed by what it costs, and the record says how: on idle workers, on busy ones, with a prefix cached.
//!
//! What workers measure of themselves on a shared machine differs by tens of percent, though they are alike: each choice here is between
//! costs of which one is twice the other, or within a margin of a third.
//!
//! The records of the scenario are then explained, replayed and tampered with through the command.

#[path = "decisions/commands.rs"]
mod commands;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::openai::{Ask, Completion, Stream};
use baton_e2e::prompts::story;
use baton_e2e::record::{OBSERVABLE, REMOTE_STATES, Record};
use baton_e2e::{scenario, told, wait};
use serde_json::Value;

const MODEL: &str = "smollm2-135m-instruct";
const SOON: Duration = Duration::from_secs(60);

/// Remote has to be cheaper by a third of the local cost.
const MARGIN: &str = "  cost: {marginPercent: 33}\n";

/// Streams on each decode worker that make it busy. A long prompt's machine time counts thrice, and once for each of them.
const BUSY: u64 = 6;

#[test]
fn requests_go_where_they_cost_least_and_records_say_why() {
    scenario(async {
        let fleet = Fleet::quickstart_with(MARGIN).await?;
        let short = a_short_request_stays_local(&fleet).await?;
        let idle = a_long_request_on_idle_workers_stays_local(&fleet).await?;
        let remote = a_long_request_beside_decode_everywhere_goes_remote(&fleet).await?;
        let hit = the_same_again_goes_where_its_prefix_is(&fleet, &remote).await?;
        Box::pin(beside_decode_a_prefix_keeps_it_local(&fleet)).await?;
        the_remote_record_is_whole(&remote)?;
        for record in [&short, &idle, &remote, &hit] {
            the_record_is_as_documented(record)?;
        }
        the_metrics_agree(&fleet).await?;
        records_are_found(&fleet).await?;
        fleet.idle(SOON).await?;

        let runs = [&short, &idle, &remote, &hit].map(|record| record.text("run").to_owned());
        commands::explain_prints_what_a_person_reads(&fleet, &runs[2]).await?;
        commands::replay_reproduces_every_record(&fleet)?;
        commands::a_tampered_record_is_found(&fleet)?;
        commands::another_policy_names_what_would_move(&fleet, &runs[2])?;
        fleet.end().await
    });
}

async fn record(fleet: &Fleet, answer: &Completion) -> Result<Record> {
    let record = Record::of(&fleet.admin, &answer.run).await?;
    record.check_order()?;
    told(record.text("explanation"));
    Ok(record)
}

async fn a_short_request_stays_local(fleet: &Fleet) -> Result<Record> {
    fleet.idle(SOON).await?;
    let answer = Ask::new(MODEL, "List three colours.", 8)
        .send(&fleet.api)
        .await?;
    let record = record(fleet, &answer).await?;
    ensure!(
        record.kind()? == "Local",
        "short, but {}",
        record.text("explanation")
    );
    Ok(record)
}

async fn a_long_request_on_idle_workers_stays_local(fleet: &Fleet) -> Result<Record> {
    fleet.idle(SOON).await?;
    let answer = Ask::new(MODEL, &story(1, 28), 8).send(&fleet.api).await?;
    let record = record(fleet, &answer).await?;
    ensure!(
        record.kind()? == "Local",
        "long on idle workers, but {}",
        record.text("explanation")
    );
    Ok(record)
}

/// Streams until every decode worker is busy. Some find more beside them than others, and sixteen fill a worker.
async fn everyone_generates(fleet: &Fleet) -> Result<Vec<Stream>> {
    let mut streams = Vec::new();
    for index in 0..24 {
        let prompt = format!("Story number {index}: once upon a time");
        let mut stream = Ask::new(MODEL, &prompt, 1500)
            .with("ignore_eos", true)
            .mode("Aggregated")
            .stream(&fleet.api)
            .await?;
        stream.text().await?.context("no first token")?;
        streams.push(stream);
        if all_decode(fleet).await.is_ok() {
            return Ok(streams);
        }
    }
    wait::until("every decode worker generates", SOON, async || {
        all_decode(fleet).await
    })
    .await?;
    Ok(streams)
}

async fn all_decode(fleet: &Fleet) -> Result<(), String> {
    let workers = fleet
        .workers(Some("decode"))
        .await
        .map_err(|error| error.to_string())?;
    let is_busy = |worker: &Value| {
        worker["runningSequences"].as_u64() >= Some(BUSY)
            && worker["queuedTokens"].as_u64() == Some(0)
    };
    if workers.len() == 2 && workers.iter().all(is_busy) {
        Ok(())
    } else {
        Err(format!("{workers:?}"))
    }
}

/// Twenty-eight full blocks and two tokens more: once they are cached, next to nothing is left to compute.
fn long_prompt(first: u32) -> Vec<u32> {
    (0..450).map(|index| first + index * 37 % 20_000).collect()
}

const HANDED_OVER: u32 = 1000;
const KEPT: u32 = 2000;

async fn a_long_request_beside_decode_everywhere_goes_remote(fleet: &Fleet) -> Result<Record> {
    fleet.idle(SOON).await?;
    let streams = everyone_generates(fleet).await?;
    let answer = Ask::ids(MODEL, &long_prompt(HANDED_OVER), 8)
        .send(&fleet.api)
        .await?;
    all_decode(fleet)
        .await
        .map_err(|seen| anyhow::anyhow!("the workers did not generate all the time: {seen}"))?;
    drop(streams);
    let record = record(fleet, &answer).await?;
    ensure!(
        record.kind()? == "Remote",
        "long, every decode worker generating, but {}: {}",
        record.text("explanation"),
        record.0["candidates"]
    );
    Ok(record)
}

/// It went remote, and its KV stayed where it was decoded: of the decode workers the same prompt now goes there. (The prefill worker has
/// it too and would be about as good.)
async fn the_same_again_goes_where_its_prefix_is(fleet: &Fleet, first: &Record) -> Result<Record> {
    fleet.idle(SOON).await?;
    let answer = Ask::ids(MODEL, &long_prompt(HANDED_OVER), 8)
        .mode("Aggregated")
        .send(&fleet.api)
        .await?;
    let record = record(fleet, &answer).await?;
    let chosen = record.chosen()?;
    ensure!(
        record.kind()? == "Local" && chosen["decode"] == first.chosen()?["decode"],
        "its prefix is on {}, but {}: {}",
        first.chosen()?["decode"],
        record.text("explanation"),
        record.0["candidates"]
    );
    let prompt_tokens = answer.output.prompt_tokens;
    let expected = chosen["cachedTokens"]["decode"].as_u64().unwrap_or(0);
    ensure!(
        expected > prompt_tokens / 2 && answer.cached_tokens > prompt_tokens / 2,
        "of {prompt_tokens} tokens {expected} were expected in the cache, {} were found",
        answer.cached_tokens
    );
    // The other decode worker has not seen it: there the same prompt is estimated to cost more.
    let candidates = record.0["candidates"].as_array().context("no candidates")?;
    let elsewhere = candidates
        .iter()
        .filter(|candidate| candidate["kind"] == "Local" && candidate["decode"] != chosen["decode"])
        .filter_map(|candidate| candidate["terms"]["prefill"].as_f64())
        .fold(f64::INFINITY, f64::min);
    let here = chosen["terms"]["prefill"]
        .as_f64()
        .context("no prefill term")?;
    ensure!(
        here < elsewhere,
        "prefill {here} ms here, {elsewhere} ms elsewhere"
    );
    Ok(record)
}

/// As long as what went remote beside decode, and yet it stays: a decode worker, and no prefill worker, has all of it but two tokens.
async fn beside_decode_a_prefix_keeps_it_local(fleet: &Fleet) -> Result<()> {
    fleet.idle(SOON).await?;
    let prompt = long_prompt(KEPT);
    let first = Ask::ids(MODEL, &prompt, 8)
        .mode("Aggregated")
        .send(&fleet.api)
        .await?;
    let first = record(fleet, &first).await?;
    let streams = everyone_generates(fleet).await?;
    let answer = Ask::ids(MODEL, &prompt, 8).send(&fleet.api).await?;
    drop(streams);
    let record = record(fleet, &answer).await?;
    ensure!(
        record.kind()? == "Local"
            && record.chosen()?["decode"] == first.chosen()?["decode"]
            && answer.cached_tokens > answer.output.prompt_tokens / 2,
        "{} tokens were cached on {}, but {}: {}",
        answer.cached_tokens,
        first.chosen()?["decode"],
        record.text("explanation"),
        record.0["candidates"]
    );
    Ok(())
}

fn the_remote_record_is_whole(record: &Record) -> Result<()> {
    let states = record.states()?;
    for state in REMOTE_STATES {
        ensure!(states.contains(&state), "{state} is not in {states:?}");
    }
    ensure!(states.len() == REMOTE_STATES.len(), "{states:?}");
    let chosen = record.chosen()?;
    for term in OBSERVABLE {
        for (what, terms) in [
            ("estimate", &chosen["terms"]),
            ("actual", &record.0["actual"]["terms"]),
        ] {
            ensure!(
                terms[term].is_number(),
                "{what} of {term} is {}",
                terms[term]
            );
        }
    }
    ensure!(record.bytes() > 0, "no bytes in {}", record.0["actual"]);
    ensure!(
        record.0["actual"]["transport"]
            .as_str()
            .is_some_and(|kind| !kind.is_empty()),
        "no transport in {}",
        record.0["actual"]
    );
    for entry in record.0["states"].as_array().context("no states")? {
        // Acceptance is the router's own; everything after it happens on some worker.
        let fields: &[&str] = if entry["state"] == "accepted" {
            &["at", "attempt", "inferred"]
        } else {
            &["at", "attempt", "inferred", "worker", "incarnation"]
        };
        for field in fields {
            ensure!(entry.get(*field).is_some(), "{field} is missing in {entry}");
        }
    }
    Ok(())
}

/// Every field of the contract is there, and what cannot be observed is null.
fn the_record_is_as_documented(record: &Record) -> Result<()> {
    ensure!(
        record.text("schema") == "baton.decision.v1",
        "schema {}",
        record.0["schema"]
    );
    for field in [
        "run",
        "requestId",
        "time",
        "now",
        "randomSeed",
        "coefficients",
        "policy",
        "fleetVersion",
        "indexAgeMilliseconds",
        "model",
        "kvIdentity",
        "mode",
        "input",
        "candidates",
        "filtered",
        "chosen",
        "reason",
        "explanation",
        "states",
        "actual",
        "assurance",
        "outcome",
    ] {
        ensure!(
            record.0.get(field).is_some(),
            "{field} is missing in {}",
            record.0
        );
    }
    let terms = record.0["actual"]["terms"]
        .as_object()
        .context("no actual terms")?;
    for (term, value) in terms {
        ensure!(
            value.is_null() || OBSERVABLE.contains(&term.as_str()),
            "{term} cannot be observed, yet it says {value}"
        );
    }
    for candidate in record.0["candidates"].as_array().context("no candidates")? {
        for term in [
            "queue",
            "prefill",
            "transfer",
            "synchronization",
            "admission",
            "machine",
            "interference",
            "decode",
            "residents",
            "objective",
            "penalty",
        ] {
            ensure!(
                candidate["terms"][term].is_number(),
                "{term} is missing in {candidate}"
            );
        }
        ensure!(
            candidate["mean"].as_f64() <= candidate["upper"].as_f64(),
            "upper is below mean in {candidate}"
        );
    }
    let text = record.0.to_string();
    ensure!(
        !text.contains("ferry") && !text.contains("colours"),
        "the prompt is in {text}"
    );
    Ok(())
}

async fn the_metrics_agree(fleet: &Fleet) -> Result<()> {
    let metrics = fleet.metrics().await?;
    for plan in ["local", "remote"] {
        ensure!(
            metrics.count("baton_decisions_total", &[("plan", plan)]) >= 1.0,
            "no decision counted for {plan}"
        );
    }
    for name in [
        "baton_requests_total",
        "baton_time_to_first_token_seconds_count",
        "baton_time_per_output_token_seconds_count",
        "baton_request_duration_seconds_count",
        "baton_decision_duration_seconds_count",
        "baton_estimate_error_ratio_count",
        "baton_transfer_bytes_total",
        "baton_transfer_duration_seconds_count",
        "baton_index_blocks",
        "baton_inflight_requests",
    ] {
        ensure!(metrics.has(name), "{name} is missing");
    }
    ensure!(
        metrics.count("baton_transfer_bytes_total", &[]) > 0.0,
        "no bytes counted"
    );
    Ok(())
}

/// Records can be asked for by plan and by reason.
async fn records_are_found(fleet: &Fleet) -> Result<()> {
    let remote = fleet
        .admin
        .get_json("/v1/decisions?last=100&plan=Remote&reason=RemoteCheaper")
        .await?;
    let remote = remote.as_array().context("no list")?;
    ensure!(!remote.is_empty(), "the remote run is not found");
    for record in remote {
        let record = Record(record.clone());
        ensure!(
            record.kind()? == "Remote" && record.text("reason") == "RemoteCheaper",
            "{}",
            record.0
        );
    }
    Ok(())
}

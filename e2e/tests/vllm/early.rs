//! What becomes of a prompt whose blocks go over while it is computed, when its client leaves or the server that computes it dies.
//!
//! Over the fleet's own router: through a gate a router hears nothing from the daemon, and sends one leg after the other.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::record::Record;
use baton_e2e::vllm::Server;
use baton_e2e::{idle, told, wait};
use baton_protocol::lifecycle::State;
use serde_json::Value;

use super::aborts::{ended, has_stopped};
use super::baton::nothing_is_held;
use super::deaths::{BACK, DAEMON, DECODE, ENGINE, is_right, kill};
use super::equal::{Question, ask, prompt};
use super::gated::{OPEN_AGAIN, REMOTE, has_pair, is_cancelled, open};

/// Some 14,000 tokens, which are 55 steps of 256: a look at what there is takes about one.
const WORDS: usize = 2500;
/// A prompt that is computed before it was looked at is no failure yet.
const TRIES: usize = 3;
/// Steps that are seen to end after the blocks have their reader. The first may have ended before, and been told of after.
const STEPS: usize = 2;
/// Leases that nobody gave back.
const EXPIRED: &str = "baton_leases_expired_total";
const FAILED: &str = "baton_engine_failed_transfers_total";
const SOON: Duration = Duration::from_secs(60);
/// Longer than a lease.
const SETTLED: Duration = Duration::from_secs(90);

/// # Errors
/// What does not hold.
pub(crate) async fn left_by_its_client(fleet: &Fleet) -> Result<()> {
    let (prefill, decode) = (Server::of(fleet, "prefill")?, Server::of(fleet, "decode")?);
    for number in 700..700 + TRIES {
        let question = Question::completion(prompt(number, WORDS));
        let before = (ended(&prefill).await?, ended(&decode).await?);
        let expired = counted(fleet, DAEMON, EXPIRED).await?;
        let failed = counted(fleet, DECODE, FAILED).await?;
        let Some(record) = hung_up(fleet, &question, &format!("left-early-{number}")).await? else {
            nothing_is_held(fleet).await?;
            continue;
        };
        // The server may have been done before it heard that nobody waits, and the router not have heard of that.
        if ended(&prefill).await? > before.0 {
            told(&format!(
                "prompt {number} was computed before its server heard that its client had left"
            ));
            nothing_is_held(fleet).await?;
            continue;
        }
        let passed = ["prefill_started", "kv_transfer_started"];
        let not_passed = ["kv_transfer_completed", "decode_started"];
        is_cancelled(&record, &passed, &not_passed)?;
        has_stopped(&decode, before.1).await?;
        nothing_is_held(fleet).await?;
        // Given back, not left until it ends.
        let more = counted(fleet, DAEMON, EXPIRED).await? - expired;
        ensure!(more <= 0.0, "{more} leases were left to their end");
        // What had come of it counts for nothing, at either end.
        let again = Box::pin(ask(&fleet.api, &question, REMOTE)).await?;
        is_right(fleet, &question, &again).await?;
        let record = Record::of(&fleet.admin, again.run()?).await?;
        record.check_order()?;
        ensure!(record.kind()? == "Remote", "{}", record.0);
        ensure!(record.0["fallback"].is_null(), "{}", record.0);
        // Blocks that were waited for when the client left are vLLM's to give.
        decode.has_given_all_back(SOON).await?;
        let failed = counted(fleet, DECODE, FAILED).await? - failed;
        told(&format!(
            "a client left after blocks of its prompt had come, and nothing went on for it; {failed} transfers are counted as failed"
        ));
        return Ok(());
    }
    bail!(
        "each of {TRIES} prompts of {WORDS} words was computed before it was left, or went on when it was"
    )
}

/// Asks, and hangs up once blocks have come; what was recorded of it. `None`: the prompt was computed before.
async fn hung_up(fleet: &Fleet, question: &Question, request: &str) -> Result<Option<Record>> {
    let answered = async {
        let mut events = open(&fleet.api, question, request).await?;
        while events.next().await?.is_some() {}
        anyhow::Ok(false)
    };
    let come = async { blocks_have_come(fleet).await.map(|()| true) };
    let caught = tokio::select! {
        answered = answered => answered,
        come = come => come,
    }?;
    let record = Record::of_request(&fleet.admin, request).await?;
    let computed = record.first_attempt()?.contains(&State::PrefillCompleted);
    if caught && !computed {
        return Ok(Some(record));
    }
    told(&format!(
        "{request}: the prompt was computed before its client left: {}",
        record.0["states"]
    ));
    Ok(None)
}

/// The server that was killed in time is not waited for again: it comes last.
///
/// # Errors
/// What does not hold.
pub(crate) async fn while_its_server_dies(fleet: &Fleet) -> Result<()> {
    let daemon = fleet.named(DAEMON)?;
    for number in 710..710 + TRIES {
        wait::until("a pair is in use", OPEN_AGAIN, async || {
            has_pair(&fleet.view().await)
        })
        .await?;
        let life = prefilling(fleet).await?;
        let question = Question::completion(prompt(number, WORDS));
        let mut asked = Box::pin(ask(&fleet.api, &question, REMOTE));
        let answered = tokio::select! {
            answered = &mut asked => Some(answered?),
            come = blocks_have_come(fleet) => come.map(|()| None)?,
        };
        if let Some(answered) = answered {
            let record = Record::of(&fleet.admin, answered.run()?).await?;
            told(&format!(
                "prompt {number} was answered before its server was killed: {}",
                record.text("explanation")
            ));
            nothing_is_held(fleet).await?;
            continue;
        }
        let (through, killed) = tokio::join!(asked, kill(fleet, ENGINE));
        killed?;
        let through = through?;
        let record = Record::of(&fleet.admin, through.run()?).await?;
        let first = record.first_attempt()?;
        ensure!(
            first.contains(&State::KvTransferStarted),
            "{}",
            record.0["states"]
        );
        is_right(fleet, &question, &through).await?;
        if first.contains(&State::PrefillCompleted) {
            told(&format!(
                "prompt {number} was computed before its server was killed: {}",
                record.0["states"]
            ));
            is_back(fleet, &life).await?;
            nothing_is_held(fleet).await?;
            continue;
        }
        is_computed_elsewhere(&record)?;
        fleet.lost(&record, &daemon)?;
        let notes = fleet.notes();
        let restarted = format!("{ENGINE} was ended by signal 9, it is started again");
        ensure!(notes.contains(&restarted), "{notes}");
        others_hold_nothing(fleet).await?;
        told(
            "the server that prefilled was killed after blocks of its prompt had come, and the answer was right",
        );
        return Ok(());
    }
    bail!(
        "each of {TRIES} prompts of {WORDS} words was answered before blocks were seen to go over, or computed before its server was killed"
    )
}

/// The worker whose server prefills, as the fleet's router knows it.
async fn prefilling(fleet: &Fleet) -> Result<Value> {
    let mut workers = fleet.workers(None).await?.into_iter();
    let found = workers.find(|worker| worker["id"] == DAEMON);
    found.with_context(|| format!("no worker {DAEMON}"))
}

/// Waits until it has another life than `before`.
async fn is_back(fleet: &Fleet, before: &Value) -> Result<()> {
    wait::until("the server is back", BACK, async || {
        let worker = prefilling(fleet).await;
        let worker = worker.map_err(|error| format!("{error:#}"))?;
        let back = worker["state"] == "Ready" && worker["incarnation"] != before["incarnation"];
        back.then_some(()).ok_or_else(|| worker.to_string())
    })
    .await
}

/// The decode leg was dropped with the first, and the request asked whole: once more, and no more than that.
fn is_computed_elsewhere(record: &Record) -> Result<()> {
    record.check_order()?;
    ensure!(record.kind()? == "Remote", "{}", record.0);
    let cause = &record.0["fallback"]["cause"];
    ensure!(cause == "prefill-lost", "{cause}: {}", record.0);
    ensure!(record.attempts()? == 2, "{}", record.0["states"]);
    let outcome = &record.0["outcome"];
    ensure!(outcome["status"] == "Completed", "{outcome}");
    Ok(())
}

/// A prompt is computed, its blocks have a reader, and the server has ended steps since, whose blocks that one reads as they come. The
/// daemon that reads counts them only when the last has come (`baton_handoff_early_blocks_total`).
async fn blocks_have_come(fleet: &Fleet) -> Result<()> {
    let prefill = Server::of(fleet, "prefill")?;
    let mut used = Vec::new();
    wait::until(
        "blocks are read while their prompt is computed",
        SOON,
        async || {
            let words = |error: anyhow::Error| format!("{error:#}");
            let daemon = fleet.worker_metrics(DAEMON).await.map_err(words)?;
            if daemon.count("baton_leases", &[("state", "claimed")]) < 1.0 {
                used.clear();
                return Err("nobody reads".to_owned());
            }
            // It grows with each step of a prompt.
            let server = prefill.metrics().await.map_err(words)?;
            let now = server.count("vllm:kv_cache_usage_perc", &[]);
            if used.last().is_none_or(|last| *last < now) {
                used.push(now);
            }
            if used.len() > STEPS {
                Ok(())
            } else {
                Err(format!("of its memory it has used {used:?} since"))
            }
        },
    )
    .await
}

/// What a daemon has counted.
async fn counted(fleet: &Fleet, daemon: &str, counter: &str) -> Result<f64> {
    let metrics = fleet.worker_metrics(daemon).await?;
    Ok(metrics.count(counter, &[]))
}

/// While the server that prefills is away. The daemon beside it has let go of all that was the server's.
async fn others_hold_nothing(fleet: &Fleet) -> Result<()> {
    wait::until("nothing is held", SETTLED, async || {
        let held = async {
            idle::router(&fleet.metrics().await?)?;
            idle::worker(&fleet.worker_metrics(DECODE).await?)?;
            let daemon = fleet.worker_metrics(DAEMON).await?;
            daemon.zero("baton_kv_blocks", &[("state", "leased")])?;
            daemon.zero("baton_kv_blocks", &[("state", "quarantined")])?;
            daemon.zero("baton_kv_leaked_blocks", &[])?;
            daemon.zero("baton_leases", &[])
        };
        held.await.map_err(|error| format!("{error:#}"))
    })
    .await?;
    let decode = Server::of(fleet, "decode")?;
    decode.rests().await?;
    decode.has_given_all_back(SOON).await
}

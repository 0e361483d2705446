//! Baton's connector: every block is checked, and what cannot be proven is computed anew.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::{Fleet, path};
use baton_e2e::record::Record;
use baton_e2e::vllm::{Changed, Server, Vllm};
use baton_e2e::{told, wait};

use super::equal::{self, Question, ask, prompt, same};
use super::events::Side;
use super::gated::{FAILED_TRANSFERS, Gated, counted, transfers_failed};
use super::{aborts, deaths, early, events, odd};

const EXAMPLE: &str = "vllm-cpu-baton-connector.yaml";
/// A daemon flips a byte of the third block that it sends: a hand-off has more.
const FAULT: &str = "flip-byte:3";
/// A step computes eight blocks at most: a prompt of 600 words takes several, and its blocks are on their way before the last.
const ARGS: &str = "--max-num-batched-tokens, \"256\"";
/// So that an answer of minutes fits.
const TEXTS: [(&str, &str); 4] = [
    ("maxModelLength: 4096", "maxModelLength: 18432"),
    ("\"400\"", "\"640\""),
    ("blocks: 512", "blocks: 640"),
    // Several are waited for until they end.
    ("leaseSeconds: 30", "leaseSeconds: 15"),
];
/// A daemon on a busy machine may be held up for seconds. A prompt whose lease does not come in time is not handed over, which no test here
/// is about.
const OPEN_WAIT: (&str, &str) = ("BATON_OPEN_WAIT_SECONDS", "30");
/// A prompt of some steps, then a lease.
const EXPIRED: Duration = Duration::from_secs(120);
/// A daemon that starts anew is found and used within seconds.
const FOUND: Duration = Duration::from_secs(60);
/// Longer than a lease, and than vLLM's own patience with a hand-off.
const SETTLED: Duration = Duration::from_secs(90);

/// # Errors
/// What does not hold.
pub(crate) async fn connector(vllm: &Vllm) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let fault = folder.path().join("fault");
    // None, until one is written and a daemon starts anew: what sends wrong blocks on purpose has no memory to share.
    std::fs::write(&fault, "")?;
    let variable = format!("@{}", path(&fault)?);
    let changed = Changed {
        arguments: ARGS,
        texts: &TEXTS,
        variables: &[("BATON_FAULT", &variable), OPEN_WAIT],
    };
    let fleet = vllm.pair(EXAMPLE, changed).await?;
    equal::handed_over_or_not(&fleet, "Verified", &[10, 60, 200, 600]).await?;
    memory_is_shared(&fleet).await?;
    blocks_move_while_the_prompt_is_computed(&fleet).await?;
    equal::a_repeated_prompt_is_credited(&fleet, 50).await?;
    an_expired_lease_is_not_read(&fleet).await?;
    told("a lease expired before it was read, and the prompt was computed anew");
    odd::requests_answer_as_they_do_directly(vllm, &fleet, &[None, Some("Disaggregated")]).await?;
    for (side, number) in [(Side::Decode, 52), (Side::Prefill, 55)] {
        events::a_reset_is_followed(&fleet, side, number).await?;
    }
    events::an_eviction_storm_is_followed(&fleet, Side::Decode, 200).await?;
    nothing_is_held(&fleet).await?;
    early::left_by_its_client(&fleet).await?;
    let gated = Gated::over(&fleet).await?;
    aborts::in_each_phase(&fleet, &gated).await?;
    aborts::while_kv_is_fetched(&fleet, &gated, "prefill-0").await?;
    nothing_is_held(&fleet).await?;
    deaths::of_either_that_hands_over(vllm, &fleet, &gated).await?;
    nothing_is_held(&fleet).await?;
    drop(gated);
    std::fs::write(&fault, FAULT)?;
    let daemon = fleet.kill(fleet.named("prefill-0")?).await?;
    fleet.back(&daemon).await?;
    a_flipped_byte_is_computed_anew(&fleet).await?;
    told("a flipped byte was found, and the prompt computed anew");
    nothing_is_held(&fleet).await?;
    // The last: the server is not waited for again.
    early::while_its_server_dies(&fleet).await?;
    fleet.end().await
}

/// The first prompt that the daemon hands over has it; until the plug-in has found the daemon, none is handed over.
async fn a_flipped_byte_is_computed_anew(fleet: &Fleet) -> Result<()> {
    let decode = Server::of(fleet, "decode")?;
    let mut numbers = 600..640;
    let found = || -> Result<usize> {
        let log = std::fs::read_to_string(fleet.state().join("logs/decode-0.log"))?;
        Ok(log.matches("checksum-mismatch").count())
    };
    let until_now = found()?;
    let (tokens, before, record) = wait::until("a block has another byte", FOUND, async || {
        let words = |error: anyhow::Error| format!("{error:#}");
        let number = numbers.next().ok_or("no question is left")?;
        let question = Question::completion(prompt(number, 120));
        let transferred = decode.transferred_tokens().await.map_err(words)?;
        let failed = counted(&fleet.admin, FAILED_TRANSFERS).await;
        let before = (transferred, failed.map_err(words)?);
        let asked = ask(&fleet.api, &question, Some("Disaggregated"));
        let through = Box::pin(asked).await.map_err(words)?;
        let direct = question.clone().salted("direct");
        let direct = Box::pin(ask(&decode.client, &direct, None)).await;
        // Not one wrong answer on the way: that ends the test.
        if let Err(wrong) = direct.and_then(|direct| same(&question, &direct, &through)) {
            return Ok(Err(wrong));
        }
        let run = through.run().map_err(words)?;
        let record = Record::of(&fleet.admin, run).await.map_err(words)?;
        let tokens = through.body["usage"]["prompt_tokens"].as_f64();
        if found().map_err(words)? > until_now {
            Ok(Ok((tokens.unwrap_or(0.0), before, record)))
        } else {
            Err(record.text("explanation").to_owned())
        }
    })
    .await??;
    ensure!(tokens > 96.0, "{tokens} tokens are fewer than three blocks");
    ensure!(record.kind()? == "Remote", "{}", record.0);
    ensure!(record.0["fallback"].is_null(), "{}", record.0);
    transfers_failed(&fleet.admin, &record, before.1).await?;
    // Counted as transferred only if it was used.
    let transferred = decode.transferred_tokens().await? - before.0;
    told(&format!(
        "the flipped block's {tokens} tokens: vLLM counts {transferred} as transferred"
    ));
    Ok(())
}

/// The first transport that the example names is the one in use.
async fn memory_is_shared(fleet: &Fleet) -> Result<()> {
    for worker in fleet.workers(None).await? {
        let notices = worker["notices"].to_string();
        ensure!(!notices.contains("Shm"), "{notices}");
    }
    for name in ["prefill-0", "decode-0"] {
        let log = std::fs::read_to_string(fleet.state().join(format!("logs/{name}.log")))?;
        ensure!(!log.contains("Shm is not offered"), "{log}");
    }
    Ok(())
}

/// A prompt of many steps: the second leg is sent before the first is answered, and blocks are there before the last is computed. How many
/// is a matter of how soon their readers get a processor.
async fn blocks_move_while_the_prompt_is_computed(fleet: &Fleet) -> Result<()> {
    let decode = Server::of(fleet, "decode")?;
    let early = async || -> Result<f64> {
        let metrics = fleet.worker_metrics("decode-0").await?;
        Ok(metrics.count("baton_handoff_early_blocks_total", &[]))
    };
    let before = early().await?;
    let question = Question::completion(prompt(97, 1500));
    let through = ask(&fleet.api, &question, Some("Disaggregated")).await?;
    let direct = ask(&decode.client, &question.clone().salted("direct"), None).await?;
    same(&question, &direct, &through)?;
    let record = Record::of(&fleet.admin, through.run()?).await?;
    record.check_order()?;
    ensure!(
        record.kind()? == "Remote" && record.0["fallback"].is_null(),
        "{}",
        record.0
    );
    let at = |wanted: &str| {
        let states = record.0["states"].as_array();
        let mut found = states.into_iter().flatten();
        let state = found.find(|state| state["state"] == wanted);
        let at = state.and_then(|state| state["at"].as_str());
        at.with_context(|| format!("{wanted}: {}", record.0["states"]))
    };
    // Of one form and one place: text order is time order.
    let (sent, computed) = (at("kv_transfer_started")?, at("prefill_completed")?);
    ensure!(sent < computed, "sent {sent}, computed {computed}");
    let tokens = through.body["usage"]["prompt_tokens"].as_f64();
    let blocks = tokens.context("no usage")? / 32.0;
    let came = early().await? - before;
    ensure!(
        came > 0.0,
        "none of {blocks:.1} blocks came before the last"
    );
    let share = 100.0 * came / blocks;
    told(&format!(
        "{came} of {blocks:.1} blocks ({share:.0} %) came while the prompt was computed: second leg {sent}, first answered {computed}"
    ));
    Ok(())
}

/// The decode side's daemon is frozen until the prefill side's has ended the lease, which runs whole from the end of its prompt on, however
/// long that takes: when it claims, the lease is gone.
async fn an_expired_lease_is_not_read(fleet: &Fleet) -> Result<()> {
    let decode = Server::of(fleet, "decode")?;
    let before = decode.transferred_tokens().await?;
    let expired = async || -> Result<f64> {
        let metrics = fleet.worker_metrics("prefill-0").await?;
        Ok(metrics.count("baton_leases_expired_total", &[]))
    };
    let until_now = expired().await?;
    let question = Question::completion(prompt(91, 120));
    let frozen = fleet.freeze(fleet.named("decode-0")?);
    let thaw = async {
        let gone = wait::until("the lease has expired", EXPIRED, async || {
            let now = expired().await.map_err(|error| format!("{error:#}"))?;
            (now > until_now)
                .then_some(())
                .ok_or_else(|| format!("{now} have"))
        });
        let gone = gone.await;
        drop(frozen);
        gone
    };
    let (through, gone) = tokio::join!(ask(&fleet.api, &question, Some("Disaggregated")), thaw);
    gone?;
    let direct = ask(&decode.client, &question.clone().salted("direct"), None).await?;
    same(&question, &direct, &through?)?;
    let after = decode.transferred_tokens().await?;
    ensure!(
        after - before < 1.0,
        "{} tokens of a lease that was gone",
        after - before
    );
    let log = std::fs::read_to_string(fleet.state().join("logs/decode-0.log"))?;
    ensure!(
        log.contains("lease-gone"),
        "the daemon does not tell of it: {log}"
    );
    Ok(())
}

/// # Errors
/// Something is.
pub(crate) async fn nothing_is_held(fleet: &Fleet) -> Result<()> {
    wait::until("no daemon holds a block", SETTLED, async || {
        match fleet.idle(Duration::from_secs(1)).await {
            Ok(()) => Ok(()),
            Err(error) => Err(format!("{error:#}")),
        }
    })
    .await
}

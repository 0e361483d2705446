//! Servers die and come back: as others, which are not paired, and as they were, under the parameters of a hand-off that was for the one
//! before; or only the daemon beside one dies.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::{Fleet, Started};
use baton_e2e::gate::Held;
use baton_e2e::process::signal_process;
use baton_e2e::record::Record;
use baton_e2e::told;
use baton_e2e::vllm::{ONE_PROCESS, Server, Vllm};
use baton_e2e::wait;
use rustix::process::Signal;
use serde_json::Value;

use super::equal::{Answered, Question, ask, prompt, same};
use super::gated::{FAILED_TRANSFERS, Gated, counted, transfers_failed};

/// A server starts in a minute, and in ten beside other work.
pub(crate) const BACK: Duration = Duration::from_secs(900);
/// A prompt that is computed again, beside a server that starts.
const ANSWERED: Duration = Duration::from_secs(180);
const SOON: Duration = Duration::from_secs(60);
pub(crate) const ENGINE: &str = "prefill-0-engine";
pub(crate) const DAEMON: &str = "prefill-0";
const DECODE_ENGINE: &str = "decode-0-engine";
pub(crate) const DECODE: &str = "decode-0";
/// As `baton up` gives it, but for the policy: what cannot be fetched fails, as without a word of Baton's it would by vLLM's default.
const FAILS: &str = r#"--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_consumer","kv_load_failure_policy":"fail","kv_connector_extra_config":{"kv_lease_duration":15}}"#;

/// # Errors
/// What does not hold.
pub(crate) async fn of_the_servers(vllm: &Vllm, fleet: &Fleet, gated: &Gated) -> Result<()> {
    // What it is started with the next time.
    let quick = ONE_PROCESS.join(" ");
    vllm.later_flags(
        "prefill",
        &format!("{quick} --block-size 64 --dtype bfloat16"),
    )?;
    let first = killed_between_the_legs(fleet, gated, ENGINE, 500).await?;
    nobody_prefills(fleet, gated, 510).await?;
    let second = back(gated, &first).await?;
    another_is_not_paired(fleet, gated, 520, &["lockSize", "vDtype"]).await?;

    vllm.later_flags("prefill", &quick)?;
    vllm.later_without_development("prefill")?;
    vllm.later_flags("decode", &format!("{quick} {FAILS}"))?;
    let decode = worker(gated, DECODE).await?;
    // At once, so that they start beside each other.
    kill(fleet, ENGINE).await?;
    kill(fleet, DECODE_ENGINE).await?;
    let third = back(gated, &second).await?;
    back(gated, &decode).await?;
    facts_are_declared_where_the_server_says_none(fleet).await?;
    its_successor_is_met(fleet, gated, 525).await?;
    comes_back_empty(fleet, gated, &third).await?;
    its_prompts_are_credited(fleet, gated).await?;
    told(
        "the server that prefilled was killed and came back, under other flags unpaired, as before in use, and with nothing for a reader of the one before",
    );
    Ok(())
}

/// Under `kv_load_failure_policy: fail`, of a server that has read from the one that dies, and reads from its successor then.
///
/// # Errors
/// What does not hold.
pub(crate) async fn fails_between_the_legs(fleet: &Fleet, gated: &Gated) -> Result<()> {
    let (before, record) = between_the_legs(fleet, gated, ENGINE, 595, ANSWERED, at_once).await?;
    is_recomputed_after_an_error(&record)?;
    back(gated, &before).await?;
    gated.hands_over(fleet, 600..650).await?;
    told("a hand-off that failed with an error was computed anew, and the next server handed over");
    Ok(())
}

/// A decode server that has never met the one that prefilled is sent to it when another one, all alike, listens in its place.
async fn its_successor_is_met(fleet: &Fleet, gated: &Gated, number: usize) -> Result<()> {
    // NIXL's own words: it has asked the successor, and seen that it is not the one.
    let met = || -> Result<usize> {
        let file = fleet.state().join(format!("logs/{DECODE_ENGINE}.log"));
        let log = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        Ok(log.matches("engine ID mismatch").count())
    };
    let before = met()?;
    let until_back = async |before: &Value| back(gated, before).await.map(|_| ());
    let (_, record) = between_the_legs(fleet, gated, ENGINE, number, BACK, until_back).await?;
    is_recomputed_after_an_error(&record)?;
    ensure!(met()? > before, "the successor was not met");
    Ok(())
}

/// The decode server says that it failed, and computes the prompt when it is asked again.
fn is_recomputed_after_an_error(record: &Record) -> Result<()> {
    ensure!(record.kind()? == "Remote", "{}", record.0);
    let cause = &record.0["fallback"]["cause"];
    ensure!(cause == "engine-failed", "{cause}: {}", record.0);
    ensure!(record.0["outcome"]["status"] == "Completed", "{}", record.0);
    Ok(())
}

/// `/server_info` is there for development only: without it the card has what the pool declares, and the two are a pair all the same.
async fn facts_are_declared_where_the_server_says_none(fleet: &Fleet) -> Result<()> {
    for (name, source, sequences) in [(DECODE, "Observed", 16), (DAEMON, "Declared", 256)] {
        let card = fleet.worker_card(name).await?;
        let facts = [&card["identity"]["kvDtype"], &card["layout"]["tensor"]];
        let found = facts.map(|fact| fact["source"].as_str());
        ensure!(found == [Some(source); 2], "{name}: {facts:?}");
        ensure!(facts[0]["value"] == "F32", "{name}: {}", facts[0]);
        let capacity = &card["capacity"];
        ensure!(capacity["maxSequences"] == sequences, "{name}: {capacity}");
        let notices = card["notices"].to_string();
        let assumed = notices.contains("capacity.maxSequences: the server does not say");
        ensure!(assumed == (source == "Declared"), "{name}: {notices}");
    }
    Ok(())
}

/// With Baton's connector, whose blocks the daemon keeps: the server dies, comes back with other weights, then as it was; then the
/// daemon alone dies.
///
/// # Errors
/// What does not hold.
pub(crate) async fn of_either_that_hands_over(
    vllm: &Vllm,
    fleet: &Fleet,
    gated: &Gated,
) -> Result<()> {
    vllm.other_weights()?;
    // The plug-in's two halves then meet in one process.
    vllm.later_flags("prefill", &ONE_PROCESS.join(" "))?;
    let first = killed_between_the_legs(fleet, gated, ENGINE, 500).await?;
    let second = back(gated, &first).await?;
    another_is_not_paired(fleet, gated, 520, &["identity.weights"]).await?;
    vllm.own_weights()?;
    kill(fleet, ENGINE).await?;
    comes_back_empty(fleet, gated, &second).await?;
    its_prompts_are_credited(fleet, gated).await?;
    killed_between_the_legs(fleet, gated, DAEMON, 501).await?;
    // The plug-in finds the daemon that was started in its place, and the fleet's own router both.
    let mut numbers = 540..600;
    wait::until("a prompt is handed over", SOON, async || {
        let words = |error: anyhow::Error| format!("{error:#}");
        let number = numbers.next().ok_or("no question is left")?;
        let question = Question::completion(prompt(number, 40));
        let asked = Box::pin(ask(&fleet.api, &question, super::gated::REMOTE));
        let through = asked.await.map_err(words)?;
        if let Err(wrong) = is_right(fleet, &question, &through).await {
            return Ok(Err(wrong));
        }
        let run = through.run().map_err(words)?;
        let record = Record::of(&fleet.admin, run).await.map_err(words)?;
        match record.kind() {
            Ok("Remote") if record.0["fallback"].is_null() => Ok(Ok(())),
            _ => Err(record.text("explanation").to_owned()),
        }
    })
    .await??;
    told(
        "the server that prefilled was killed and came back, and so was the daemon that kept its blocks",
    );
    Ok(())
}

/// Another life of it is there after `before`; nothing that the former had cached is credited, and prompts are handed over.
async fn comes_back_empty(fleet: &Fleet, gated: &Gated, before: &Value) -> Result<()> {
    let now = back(gated, before).await?;
    ensure!(
        now["blocks"]["cached"] == 0,
        "blocks of a server that has ended are credited: {now}"
    );
    gated.hands_over(fleet, 530..580).await.map(|_| ())
}

/// It has answered its leg, and the decode leg waits at the gate. What the router knew of its worker before.
async fn killed_between_the_legs(
    fleet: &Fleet,
    gated: &Gated,
    name: &str,
    number: usize,
) -> Result<Value> {
    let admin = &gated.router.admin;
    let failed = counted(admin, FAILED_TRANSFERS).await?;
    let (before, record) = between_the_legs(fleet, gated, name, number, ANSWERED, at_once).await?;
    // The decode server has noticed, computed the prompt anew, and not said so: its counter does, which the record quotes.
    ensure!(record.kind()? == "Remote", "{}", record.0);
    ensure!(record.0["fallback"].is_null(), "{}", record.0);
    transfers_failed(admin, &record, failed).await?;
    Ok(before)
}

async fn at_once(_: &Value) -> Result<()> {
    Ok(())
}

/// While the decode leg waits at the gate `name` is killed, and then more happens; the answer is there within `patience`. What the router
/// knew of the worker that prefills before, and the record of an answer that is right.
async fn between_the_legs(
    fleet: &Fleet,
    gated: &Gated,
    name: &str,
    number: usize,
    patience: Duration,
    then: impl AsyncFnOnce(&Value) -> Result<()>,
) -> Result<(Value, Record)> {
    let question = Question::completion(prompt(number, 60));
    gated.may_hand_over().await?;
    let before = worker(gated, DAEMON).await?;
    gated.decode.hold(Held::Requests);
    let hold = async {
        gated.decode.has_caught(1).await?;
        kill(fleet, name).await?;
        then(&before).await?;
        gated.decode.hold(Held::Nothing);
        anyhow::Ok(())
    };
    let restarted = format!("{name} was ended by signal 9, it is started again");
    let said = fleet.notes().matches(&restarted).count();
    let api = gated.router.api.patient(patience);
    let asked = Box::pin(ask(&api, &question, super::gated::REMOTE));
    let (through, ()) = tokio::try_join!(asked, hold)?;
    is_right(fleet, &question, &through).await?;
    let record = gated.record(&through).await?;
    record.check_order()?;
    let notes = fleet.notes();
    ensure!(notes.matches(&restarted).count() > said, "{notes}");
    Ok((before, record))
}

/// While it is away.
async fn nobody_prefills(fleet: &Fleet, gated: &Gated, number: usize) -> Result<()> {
    wait::until("the router knows that it is away", SOON, async || {
        let worker = worker(gated, DAEMON)
            .await
            .map_err(|error| error.to_string())?;
        let away = worker["state"] != "Ready";
        away.then_some(()).ok_or_else(|| worker.to_string())
    })
    .await?;
    let question = Question::completion(prompt(number, 40));
    let through = gated.ask(&question).await?;
    is_right(fleet, &question, &through).await?;
    let record = gated.record(&through).await?;
    is_local(&record)
}

/// What came back in its place differs in these fields.
async fn another_is_not_paired(
    fleet: &Fleet,
    gated: &Gated,
    number: usize,
    fields: &[&str],
) -> Result<()> {
    let view = gated.router.view().await?;
    let pairs = view["pairs"].as_array().context("pairs")?;
    let differs = |pair: &&Value| {
        let named = pair["differences"].to_string();
        pair["compatible"] == false && fields.iter().all(|field| named.contains(field))
    };
    ensure!(
        pairs.iter().any(|pair| differs(&pair)),
        "not all of {fields:?} are named: {pairs:?}"
    );
    let question = Question::completion(prompt(number, 40));
    let through = gated.ask(&question).await?;
    is_right(fleet, &question, &through).await?;
    let record = gated.record(&through).await?;
    is_local(&record)?;
    ensure!(
        record.0["filtered"]["Incompatible"].as_u64() > Some(0),
        "{}",
        record.0["filtered"]
    );
    Ok(())
}

/// Its new life's index is filled, and credited as vLLM counts.
async fn its_prompts_are_credited(fleet: &Fleet, gated: &Gated) -> Result<()> {
    let decode = Server::of(fleet, "decode")?;
    let question = Question::completion(prompt(590, 100));
    gated.ask(&question).await?;
    wait::until("the prompt is credited to it", SOON, async || {
        let words = |error: anyhow::Error| format!("{error:#}");
        // Else the decode server has all of it, and asks for nothing.
        decode.forget().await.map_err(words)?;
        let again = gated.ask(&question).await.map_err(words)?;
        let record = gated.record(&again).await.map_err(words)?;
        let credited = record.chosen().map_err(words)?["cachedTokens"]["prefill"].as_u64();
        // Of a prompt that was handed over, vLLM says what the server that prefilled had cached.
        let reported = again.body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        if credited == reported && credited > Some(0) {
            return Ok(());
        }
        Err(format!("credited {credited:?}, reported {reported:?}"))
    })
    .await
}

fn is_local(record: &Record) -> Result<()> {
    record.check_order()?;
    ensure!(
        record.kind()? == "Local" && record.text("reason") == "NoPrefillWorker",
        "{}: {}",
        record.text("reason"),
        record.text("explanation")
    );
    Ok(())
}

/// As the server that decodes answers it alone.
///
/// # Errors
/// It is not.
pub(crate) async fn is_right(fleet: &Fleet, question: &Question, through: &Answered) -> Result<()> {
    let decode = Server::of(fleet, "decode")?;
    let direct = question.clone().salted("direct");
    let direct = Box::pin(ask(&decode.client, &direct, None)).await?;
    same(question, &direct, through)
}

/// With all its processes, which `baton up` ends after their leader.
///
/// # Errors
/// There is none of that name, or it does not end.
pub(crate) async fn kill(fleet: &Fleet, name: &str) -> Result<()> {
    let Started { pid, .. } = fleet.named(name)?;
    signal_process(pid, Signal::KILL);
    wait::until("it has ended", SOON, async || match fleet.named(name) {
        Ok(process) if process.pid == pid => Err(format!("{process:?}")),
        _ => Ok(()),
    })
    .await
}

/// A worker, as the test's router knows it.
async fn worker(gated: &Gated, name: &str) -> Result<Value> {
    let mut view = gated.router.view().await?;
    let workers = view["workers"].as_array_mut().context("no workers")?;
    let found = workers.iter_mut().find(|worker| worker["id"] == name);
    Ok(found.with_context(|| format!("no worker {name}"))?.take())
}

/// Waits for another life of a worker than `before`.
async fn back(gated: &Gated, before: &Value) -> Result<Value> {
    let name = before["id"].as_str().context("a worker without a name")?;
    wait::until("the server is back", BACK, async || {
        let worker = worker(gated, name)
            .await
            .map_err(|error| error.to_string())?;
        if worker["state"] == "Ready" && worker["incarnation"] != before["incarnation"] {
            return Ok(worker);
        }
        Err(worker.to_string())
    })
    .await
}

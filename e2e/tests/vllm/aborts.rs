//! Clients that leave, in each phase of a hand-off: nothing goes on for them, and whoever asks next is answered.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::gate::Held;
use baton_e2e::told;
use baton_e2e::vllm::Server;
use baton_e2e::wait;
use baton_protocol::lifecycle::State;

use super::equal::{Question, ask, prompt, same};
use super::gated::{Gated, is_cancelled};

/// Metrics are written once a step or second.
const SOON: Duration = Duration::from_secs(60);
/// A prompt that is computed before its client leaves is no failure yet.
const TRIES: usize = 3;

/// # Errors
/// What does not hold.
pub(crate) async fn in_each_phase(fleet: &Fleet, gated: &Gated) -> Result<()> {
    let (prefill, decode) = (Server::of(fleet, "prefill")?, Server::of(fleet, "decode")?);
    while_the_prompt_is_computed(gated, &prefill).await?;
    next_is_right(gated, &prefill, &decode, 300).await?;
    between_the_legs(gated, &decode).await?;
    next_is_right(gated, &prefill, &decode, 301).await?;
    before_the_first_token(gated, &decode).await?;
    next_is_right(gated, &prefill, &decode, 302).await?;
    within_the_stream(gated, &decode).await?;
    next_is_right(gated, &prefill, &decode, 303).await?;
    told("clients left in each of four phases, and nothing went on for them");
    Ok(())
}

/// A prompt that takes several steps.
async fn while_the_prompt_is_computed(gated: &Gated, prefill: &Server) -> Result<()> {
    for number in 320..320 + TRIES {
        let before = ended(prefill).await?;
        let long = Question::completion(prompt(number, 2500));
        let request = format!("left-in-prefill-{number}");
        let left = gated.hung_up_before_the_end(&long, &request, has_requests(prefill));
        let left = left.await?;
        // The server may have been done before it heard that nobody waits, and the router not have heard of that.
        let more = ended(prefill).await? - before;
        let Some(record) = left else {
            told(&format!(
                "{request}: it was answered before its client left"
            ));
            continue;
        };
        let states = record.states()?;
        let computed = states.contains(&State::PrefillCompleted);
        if computed || states.contains(&State::Completed) || more > 0.0 {
            told(&format!(
                "{request}: the prompt was computed before its client left: {}",
                record.0["states"]
            ));
            continue;
        }
        return is_cancelled(&record, &["accepted"], &["kv_published", "decode_started"]);
    }
    bail!("each of {TRIES} prompts was computed before it was left, or went on when it was")
}

/// The second leg waits at the gate: the server that decodes has not heard of it.
async fn between_the_legs(gated: &Gated, decode: &Server) -> Result<()> {
    let before = ended(decode).await?;
    gated.decode.hold(Held::Requests);
    let question = Question::completion(prompt(311, 40));
    let record = gated
        .hung_up(&question, "left-between", gated.decode.has_caught(1))
        .await?;
    gated.decode.hold(Held::Nothing);
    is_cancelled(&record, &["kv_published"], &["decode_started"])?;
    has_stopped(decode, before).await
}

/// The answer waits at the gate: the server has begun to generate.
async fn before_the_first_token(gated: &Gated, decode: &Server) -> Result<()> {
    let before = ended(decode).await?;
    gated.decode.hold(Held::Answers);
    let record = gated
        .hung_up(
            &endless(312),
            "left-before-first",
            gated.decode.has_caught(1),
        )
        .await?;
    gated.decode.hold(Held::Nothing);
    is_cancelled(&record, &["kv_published"], &["streaming"])?;
    has_stopped(decode, before).await
}

/// Whoever has the KV does not answer: the server that decodes waits for it.
///
/// # Errors
/// What does not hold.
pub(crate) async fn while_kv_is_fetched(fleet: &Fleet, gated: &Gated, from: &str) -> Result<()> {
    let (prefill, decode) = (Server::of(fleet, "prefill")?, Server::of(fleet, "decode")?);
    let before = ended(&decode).await?;
    gated.decode.hold(Held::Requests);
    let mut frozen = None;
    let question = Question::completion(prompt(314, 40));
    let waits = async {
        gated.decode.has_caught(1).await?;
        frozen = Some(fleet.freeze(fleet.named(from)?));
        gated.decode.hold(Held::Nothing);
        has_requests(&decode).await
    };
    let record = gated.hung_up(&question, "left-while-fetched", waits).await;
    gated.decode.hold(Held::Nothing);
    is_cancelled(&record?, &["kv_published"], &["streaming"])?;
    has_stopped(&decode, before).await?;
    drop(frozen);
    told("a client left while its KV was fetched, and nothing waits for it");
    next_is_right(gated, &prefill, &decode, 304).await
}

async fn within_the_stream(gated: &Gated, decode: &Server) -> Result<()> {
    let before = ended(decode).await?;
    let mut events = gated.open(&endless(313), "left-in-stream").await?;
    for _ in 0..3 {
        ensure!(events.next().await?.is_some(), "the stream has ended");
    }
    drop(events);
    let admin = &gated.router.admin;
    let record = baton_e2e::record::Record::of_request(admin, "left-in-stream").await?;
    is_cancelled(&record, &["decode_started", "streaming"], &["completed"])?;
    has_stopped(decode, before).await
}

/// Minutes of tokens.
fn endless(number: usize) -> Question {
    Question::completion(prompt(number, 40))
        .with("max_tokens", 16_000)
        .with("ignore_eos", true)
        .with("logprobs", serde_json::Value::Null)
}

async fn has_requests(server: &Server) -> Result<()> {
    wait::until("the server computes", SOON, async || {
        match server.requests().await {
            Ok(count) if count > 0.0 => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

/// Requests that the server has answered to their end, once none runs any more; those that were given up are not among them.
///
/// # Errors
/// One runs on, or it does not say.
pub(crate) async fn ended(server: &Server) -> Result<f64> {
    // What was answered is counted a moment later, and no longer runs when it is.
    server.rests().await?;
    let metrics = server.metrics().await?;
    Ok(metrics.count("vllm:request_success_total", &[]))
}

/// Nothing runs any more, and nothing has run to its end since there were so many of those.
///
/// # Errors
/// Something does, or has.
pub(crate) async fn has_stopped(server: &Server, before: f64) -> Result<()> {
    let more = ended(server).await? - before;
    ensure!(more <= 0.0, "{more} went on to the end");
    Ok(())
}

async fn next_is_right(
    gated: &Gated,
    prefill: &Server,
    decode: &Server,
    number: usize,
) -> Result<()> {
    prefill.rests().await?;
    decode.rests().await?;
    let question = Question::completion(prompt(number, 40));
    let through = gated.ask(&question).await?;
    let direct = Box::pin(ask(
        &decode.client,
        &question.clone().salted("direct"),
        None,
    ))
    .await?;
    same(&question, &direct, &through)?;
    let record = gated.record(&through).await?;
    ensure!(record.kind()? == "Remote", "{}", record.0);
    ensure!(record.0["fallback"].is_null(), "{}", record.0);
    Ok(())
}

//! A client that goes away leaves nothing behind: no running sequence, no lease, no block, whenever it goes.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::Ask;
use baton_e2e::record::Record;
use baton_e2e::{scenario, wait};
use baton_protocol::lifecycle::State;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Lease of the manifest and a little: nothing may be held for longer.
const LEASE: Duration = Duration::from_secs(6);
const SOON: Duration = Duration::from_secs(20);

/// How long the router lets a client take nothing, where that is what is tried.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// What a busy machine may add.
const BUSY: Duration = Duration::from_secs(10);
/// A moment that lasts seconds is missed by whoever is held up for longer, and met again.
const TRIES: u32 = 5;

/// Prompt tokens of one step of [`Manifest::slow`], which takes 1.4 seconds.
const STEP: u32 = 2048;
/// Prompt tokens that take more than one step.
const LONG: u32 = 2500;
/// Prompt tokens that take four: between any two of them there is time to look and to hang up.
const LONGEST: u32 = 4 * STEP;

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
        between_the_two_legs(&fleet).await?;
        eight_at_a_time(&fleet).await?;
        the_fleet_still_serves(&fleet).await?;
        fleet.end().await
    });
}

fn ask(request: &str, mode: &'static str, tokens: u32, salt: u32) -> Ask {
    Ask::ids("tiny", &prompt(tokens, salt), 400)
        .with("ignore_eos", true)
        .mode(mode)
        .request(request)
}

/// Asks, hangs up when some worker of a role shows that it is time, and checks that nothing is left.
async fn hang_up(
    fleet: &Fleet,
    asks: &[Ask],
    when: &str,
    role: &str,
    holds: impl Fn(&Value) -> bool,
) -> Result<()> {
    {
        let streams = asks.iter().map(|ask| ask.stream(&fleet.api));
        let answers = futures::future::join_all(streams);
        tokio::pin!(answers);
        // An answer that begins is kept open like a client that reads slowly.
        let waits = async {
            let begun = (&mut answers).await;
            for answer in &begun {
                if let Err(error) = answer {
                    bail!("refused: {error:#}");
                }
            }
            std::future::pending::<Result<()>>().await
        };
        tokio::select! {
            failed = waits => failed?,
            seen = seen(fleet, when, role, holds) => seen?,
        }
    }
    for ask in asks {
        nothing_is_left(fleet, ask, when).await?;
    }
    Ok(())
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

async fn nothing_is_left(fleet: &Fleet, ask: &Ask, when: &str) -> Result<()> {
    nothing_is_left_within(fleet, ask, when, LEASE + BUSY).await
}

async fn nothing_is_left_within(
    fleet: &Fleet,
    ask: &Ask,
    when: &str,
    within: Duration,
) -> Result<()> {
    fleet
        .idle(within)
        .await
        .map_err(|error| error.context(format!("after a client went: {when}")))?;
    let request = ask.request.as_deref().unwrap_or_default();
    let record = Record::of_request(&fleet.admin, request).await?;
    record.check_order()?;
    ensure!(
        record.0["outcome"]["status"] == "Cancelled",
        "{when}: outcome {}",
        record.0["outcome"]
    );
    Ok(())
}

async fn while_a_local_prompt_is_computed(fleet: &Fleet) -> Result<()> {
    let ask = ask("local", "Aggregated", LONG, 1);
    let queued = |worker: &Value| positive(&worker["queuedTokens"]);
    hang_up(
        fleet,
        &[ask],
        "a local prompt is computed",
        "decode",
        queued,
    )
    .await
}

async fn while_a_remote_prompt_is_computed_and_moved(fleet: &Fleet) -> Result<()> {
    // Two steps are done, so that the blocks of the first have been on their way for all of the second; two are left to hang up in.
    let halfway = |worker: &Value| {
        worker["queuedTokens"]
            .as_u64()
            .is_some_and(|left| (1..=u64::from(LONGEST - 2 * STEP)).contains(&left))
    };
    let mut missed = Vec::new();
    for turn in 0..TRIES {
        let request = format!("remote-{turn}");
        let asks = [ask(&request, "Disaggregated", LONGEST, 40 + turn)];
        hang_up(fleet, &asks, "a prompt is moved", "prefill", halfway).await?;
        let record = Record::of_request(&fleet.admin, &request).await?;
        let states = record.states()?;
        if states.contains(&State::KvTransferStarted)
            && !states.contains(&State::KvTransferCompleted)
        {
            return Ok(());
        }
        missed.push(states);
    }
    bail!("never during the transfer: {missed:?}");
}

async fn while_tokens_are_generated(fleet: &Fleet, mode: &'static str, salt: u32) -> Result<()> {
    let ask = ask(&format!("decode-in-{mode}"), mode, 64, salt);
    let mut stream = ask.stream(&fleet.api).await?;
    for _ in 0..3 {
        ensure!(
            stream.text().await?.is_some(),
            "ended before the third token"
        );
    }
    drop(stream);
    nothing_is_left(fleet, &ask, "during decode").await
}

/// Without streaming nothing has been sent yet, and still nobody computes for a client that is gone.
async fn before_the_answer_is_whole(fleet: &Fleet) -> Result<()> {
    let ask = ask("whole", "Aggregated", 64, 3);
    {
        let answer = ask.raw(&fleet.api);
        tokio::pin!(answer);
        let running = seen(fleet, "the sequence runs", "decode", |worker| {
            positive(&worker["runningSequences"])
        });
        tokio::select! {
            answer = &mut answer => bail!("answered too early: {:?}", answer?.text()),
            running = running => running?,
        }
    }
    nothing_is_left(fleet, &ask, "before the answer was whole").await
}

/// The decode worker has reserved its blocks; the prefill worker, busy with another prompt, has not begun.
async fn between_the_two_legs(fleet: &Fleet) -> Result<()> {
    for turn in 0..TRIES {
        if is_between_the_two_legs(fleet, turn).await? {
            return Ok(());
        }
    }
    bail!("each of {TRIES} times the second leg had begun");
}

/// Whether it was in time.
async fn is_between_the_two_legs(fleet: &Fleet, turn: u32) -> Result<bool> {
    // Equally long: the shorter one would be computed first.
    let before = ask(
        &format!("ahead-{turn}"),
        "Disaggregated",
        LONGEST,
        50 + turn,
    );
    let request = format!("between-{turn}");
    let ask = ask(&request, "Disaggregated", LONGEST, 60 + turn);
    let both =
        |worker: &Value| worker["blocks"]["active"].as_u64() > Some(u64::from(LONGEST) / 16 + 10);
    let in_time = {
        let ahead = before.stream(&fleet.api);
        tokio::pin!(ahead);
        let reserved = |worker: &Value| positive(&worker["blocks"]["active"]);
        tokio::select! {
            ended = &mut ahead => bail!("answered too early: {:?}", ended?),
            seen = seen(fleet, "the first has its blocks", "decode", reserved) => seen?,
        }
        let gone = reserved_and_gone(fleet, &ask, both).await?;
        // Nothing of the other run was touched.
        let mut stream = ahead.await?;
        ensure!(stream.text().await?.is_some(), "the run ahead has ended");
        gone
    };
    nothing_is_left(fleet, &before, "ahead of one that went").await?;
    let record = Record::of_request(&fleet.admin, &request).await?;
    Ok(in_time && !record.states()?.contains(&State::PrefillStarted))
}

/// Asks, and goes away as soon as the decode worker shows blocks of it; whether that was before it was answered.
async fn reserved_and_gone(
    fleet: &Fleet,
    ask: &Ask,
    reserved: impl Fn(&Value) -> bool,
) -> Result<bool> {
    let answer = ask.stream(&fleet.api);
    tokio::pin!(answer);
    tokio::select! {
        begun = &mut answer => begun.map(|_| false),
        seen = seen(fleet, "the second has its blocks", "decode", reserved) => seen.map(|()| true),
    }
}

/// The bytes of a request as a client sends them.
fn bytes(ask: &Ask) -> String {
    let mut body = ask.body.clone();
    body["stream"] = true.into();
    let body = body.to_string();
    let mode = ask.mode.unwrap_or("Aggregated");
    let request = ask.request.as_deref().unwrap_or_default();
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\nx-baton-mode: {mode}\r\n\
         x-request-id: {request}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

#[test]
fn a_client_that_stops_reading_is_given_up() {
    scenario(async {
        let timing = "prefillBaseMicroseconds: 1000, prefillPerTokenNanoseconds: 10000, decodeBaseMicroseconds: 1000, seed: 1";
        let manifest = Manifest {
            engine: format!("{{type: Simulated, simulated: {{{timing}}}}}"),
            ..Manifest::slow()
        };
        let timeout = WRITE_TIMEOUT.as_secs().to_string();
        let variables = [("BATON_WRITE_TIMEOUT_SECONDS", timeout.as_str())];
        let fleet = Fleet::of_with(&manifest, &variables).await?;
        let within = WRITE_TIMEOUT + LEASE + BUSY;
        for mode in ["Aggregated", "Disaggregated"] {
            // Several megabytes, if anybody took them.
            let ask = Ask::ids("tiny", &prompt(64, 7), 20_000)
                .with("ignore_eos", true)
                .with("logprobs", 5)
                .mode(mode)
                .request(&format!("unread-{mode}"));
            let socket = tokio::net::TcpSocket::new_v4()?;
            socket.set_recv_buffer_size(4096)?;
            let mut client = socket.connect(fleet.api.address()).await?;
            client.write_all(bytes(&ask).as_bytes()).await?;
            ensure!(client.read(&mut [0; 512]).await? > 0, "no answer begins");
            // It is still connected, and reads no more.
            nothing_is_left_within(&fleet, &ask, "connected and not reading", within).await?;
            let mut rest = Vec::new();
            // However it ends, it was not whole.
            let _ = client.read_to_end(&mut rest).await;
            ensure!(
                !String::from_utf8_lossy(&rest).contains("[DONE]"),
                "it was cut off"
            );
        }
        fleet.end().await
    });
}

fn computes(worker: &Value) -> bool {
    positive(&worker["blocks"]["active"])
}

async fn eight_at_a_time(fleet: &Fleet) -> Result<()> {
    let asks: Vec<Ask> = (20..28)
        .map(|salt| {
            let mode = if salt % 2 == 0 {
                "Aggregated"
            } else {
                "Disaggregated"
            };
            ask(&format!("one-of-eight-{salt}"), mode, LONG, salt)
        })
        .collect();
    hang_up(
        fleet,
        &asks,
        "some of eight are computed",
        "prefill",
        computes,
    )
    .await
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
    fleet.idle(LEASE + BUSY).await
}

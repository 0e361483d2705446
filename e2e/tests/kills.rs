//! A process that dies or freezes under a request: the answer is right all the same, the record says what happened, and nothing
//! is held afterwards.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::{Ask, Output};
use baton_e2e::record::Record;
use baton_e2e::scenario;
use baton_protocol::lifecycle::State;
use serde_json::Value;

/// Leases of the manifest last three seconds; a dead peer's connection is noticed within five.
const SETTLED: Duration = Duration::from_secs(15);

/// The policy's total deadline.
const DEADLINE: Duration = Duration::from_secs(60);

/// Three steps of prefill.
const PROMPT: u32 = 5000;
const OUTPUT: u32 = 40;

/// Two of each, so that what one cannot finish another can.
fn manifest() -> Manifest {
    let timing = "prefillBaseMicroseconds: 1000, prefillPerTokenNanoseconds: 250000, decodeBaseMicroseconds: 10000, seed: 1";
    Manifest {
        engine: format!("{{type: Simulated, simulated: {{{timing}}}}}"),
        kv_pool: "{blocks: 4096, leaseSeconds: 3}".to_owned(),
        prefill_replicas: 2,
        decode_replicas: 2,
        policy: "  timeouts: {prefillSeconds: 20, transferSeconds: 10, tokenSeconds: 10, totalSeconds: 60}\n"
            .to_owned(),
        ..Manifest::slow()
    }
}

/// A request whose prefix nobody has: every one is computed and moved in whole.
fn ask(mode: &'static str, salt: &str) -> Ask {
    let prompt: Vec<u32> = (0..PROMPT)
        .map(|index| 3 + (index * 7 + 13) % 200)
        .collect();
    Ask::ids("tiny", &prompt, OUTPUT)
        .with("ignore_eos", true)
        .with("cache_salt", salt)
        .request(salt)
        .mode(mode)
}

async fn reference(fleet: &Fleet) -> Result<Output> {
    let answer = ask("Aggregated", "reference").send(&fleet.api).await?;
    // Whoever holds blocks from here on holds them for another request.
    fleet.idle(SETTLED).await?;
    Ok(answer.output)
}

fn holds_blocks(worker: &Value) -> bool {
    let held = |name: &str| worker["blocks"][name].as_u64().unwrap_or(0) > 0;
    held("active") || held("leased")
}

/// The states of the first attempt.
fn first_attempt(record: &Record) -> Result<BTreeSet<State>> {
    let states = record.0["states"].as_array().context("no states")?;
    states
        .iter()
        .filter(|entry| entry["attempt"].as_u64().unwrap_or(0) <= 1)
        .map(|entry| Ok(serde_json::from_value(entry["state"].clone())?))
        .collect()
}

/// What a record must say of a run that was disturbed: it went on, and why.
fn was_disturbed(record: &Record) -> bool {
    let second = record.0["states"].as_array().is_some_and(|states| {
        states
            .iter()
            .any(|entry| entry["attempt"].as_u64() > Some(1))
    });
    second || !record.0["fallback"].is_null()
}

#[test]
fn the_prefill_worker_is_killed_at_ten_moments() {
    scenario(async {
        let fleet = Fleet::of(&manifest()).await?;
        let expected = reference(&fleet).await?;
        let started = Instant::now();
        let undisturbed = ask("Disaggregated", "undisturbed").send(&fleet.api).await?;
        ensure!(undisturbed.output == expected, "{:?}", undisturbed.output);
        let record = Record::of(&fleet.admin, &undisturbed.run).await?;
        ensure!(record.kind()? == "Remote", "not remote: {}", record.0);
        let whole = started.elapsed();

        let mut reached = BTreeSet::new();
        let mut disturbed = 0;
        for moment in 0..10_u32 {
            let salt = format!("moment-{moment}");
            let request = ask("Disaggregated", &salt);
            let delay = whole * moment / 10;
            // The moment is what is tested, so it is a length of time and not something seen.
            let kill = async {
                tokio::time::sleep(delay).await;
                let prefill = fleet
                    .worker_that("a prefill worker works", "prefill", holds_blocks)
                    .await;
                // After the hand-off none holds anything: any is as good.
                let prefill = prefill.or_else(|_| fleet.first("prefill"))?;
                fleet.kill(prefill).await
            };
            let (answer, killed) = tokio::join!(request.send(&fleet.api), kill);
            let answer = answer.with_context(|| format!("killed after {delay:?}"))?;
            ensure!(
                answer.output == expected,
                "killed after {delay:?}: {:?} instead of {expected:?}",
                answer.output
            );
            let record = Record::of(&fleet.admin, &answer.run).await?;
            record.check_order()?;
            // A run that was over before the kill shows nothing.
            if was_disturbed(&record) {
                reached.extend(first_attempt(&record)?);
                disturbed += 1;
            }
            fleet.back(&killed?).await?;
            fleet.idle(SETTLED).await?;
        }
        for state in [State::PrefillStarted, State::KvTransferStarted] {
            ensure!(reached.contains(&state), "never killed after {state}");
        }
        ensure!(
            disturbed >= 3,
            "of ten kills {disturbed} met the run: it moves too fast for this test"
        );
        fleet.end().await
    });
}

/// When the decode worker is killed or frozen.
#[derive(Clone, Copy, Debug)]
enum When {
    /// It holds blocks, and nothing has been sent to the client.
    BeforeItsFirstToken,
    /// The client has read some tokens.
    WhileItStreams,
}

#[test]
fn the_decode_worker_is_killed_before_and_after_its_first_token() {
    scenario(async {
        let fleet = Fleet::of(&manifest()).await?;
        let expected = reference(&fleet).await?;
        for mode in ["Aggregated", "Disaggregated"] {
            for when in [When::BeforeItsFirstToken, When::WhileItStreams] {
                let salt = format!("{mode}-{when:?}");
                let killed =
                    under_a_stream(&fleet, mode, &salt, when, &expected, async |process| {
                        fleet.kill(process).await
                    })
                    .await?;
                fleet.back(&killed).await?;
                fleet.idle(SETTLED).await?;
            }
        }
        fleet.end().await
    });
}

#[test]
fn a_frozen_worker_delays_a_request_and_does_not_hold_it() {
    scenario(async {
        let fleet = Fleet::of(&manifest()).await?;
        let expected = reference(&fleet).await?;

        for when in [When::BeforeItsFirstToken, When::WhileItStreams] {
            let salt = format!("decode-frozen-{when:?}");
            let frozen = under_a_stream(
                &fleet,
                "Disaggregated",
                &salt,
                when,
                &expected,
                async |process| Ok(fleet.freeze(process)),
            )
            .await?;
            drop(frozen);
            fleet.idle(SETTLED).await?;
        }

        let request = ask("Disaggregated", "prefill-frozen");
        let freeze = async {
            let prefill = fleet
                .worker_that("a prefill worker works", "prefill", holds_blocks)
                .await?;
            Ok::<_, anyhow::Error>(fleet.freeze(prefill))
        };
        let (answer, frozen) = tokio::join!(request.send(&fleet.api), freeze);
        let answer = answer.context("with a frozen prefill worker")?;
        ensure!(answer.output == expected, "{:?}", answer.output);
        let record = Record::of(&fleet.admin, &answer.run).await?;
        record.check_order()?;
        ensure!(was_disturbed(&record), "undisturbed: {}", record.0);
        // Awake again, it finds that nobody waits for what it holds.
        drop(frozen?);
        fleet.idle(SETTLED).await?;
        fleet.end().await
    });
}

/// Streams a request, strikes its decode worker at a moment, and checks that the whole text is as expected.
async fn under_a_stream<T>(
    fleet: &Fleet,
    mode: &'static str,
    salt: &str,
    when: When,
    expected: &Output,
    strike: impl AsyncFnOnce(baton_e2e::fleet::Started) -> Result<T>,
) -> Result<T> {
    let started = Instant::now();
    let request = ask(mode, salt);
    let mut text = String::new();
    let (mut stream, struck) = match when {
        When::BeforeItsFirstToken => {
            let early = async {
                let decode = fleet
                    .worker_that("a decode worker works", "decode", holds_blocks)
                    .await?;
                strike(decode).await
            };
            let (stream, struck) = tokio::join!(request.stream(&fleet.api), early);
            (stream?, struck?)
        }
        When::WhileItStreams => {
            let mut stream = request.stream(&fleet.api).await?;
            for _ in 0..5 {
                match stream.text().await? {
                    Some(more) => text.push_str(&more),
                    None => bail!("ended before the fifth token"),
                }
            }
            let decode = fleet
                .worker_that("a decode worker streams", "decode", |worker| {
                    worker["runningSequences"].as_u64() > Some(0)
                })
                .await?;
            let struck = strike(decode).await?;
            (stream, struck)
        }
    };
    let run = stream.run.clone();
    while let Some(more) = stream
        .text()
        .await
        .with_context(|| format!("{salt} after {text:?}"))?
    {
        text.push_str(&more);
    }
    ensure!(
        text == expected.text,
        "{salt}: {text:?} instead of {:?}",
        expected.text
    );
    ensure!(
        started.elapsed() < DEADLINE,
        "{salt}: {:?}",
        started.elapsed()
    );
    let record = Record::of(&fleet.admin, &run).await?;
    record.check_order()?;
    ensure!(was_disturbed(&record), "{salt}: undisturbed: {}", record.0);
    Ok(struck)
}

#[test]
fn a_router_that_is_killed_leaves_no_lease_behind() {
    scenario(async {
        let fleet = Fleet::of(&manifest()).await?;
        let expected = reference(&fleet).await?;
        for (moment, role) in [("prefill", "prefill"), ("decode", "decode")] {
            let request = ask("Disaggregated", &format!("router-{moment}"));
            let strike = async {
                fleet
                    .worker_that("a worker works", role, |worker| {
                        // A prompt is under way, its lease open; or tokens are.
                        if role == "prefill" {
                            holds_blocks(worker)
                        } else {
                            worker["runningSequences"].as_u64() > Some(0)
                        }
                    })
                    .await?;
                fleet.kill(fleet.first("router")?).await
            };
            let (answer, killed) = tokio::join!(request.send(&fleet.api), strike);
            ensure!(answer.is_err(), "answered by a dead router: {answer:?}");
            fleet.back(&killed?).await?;
            // The new router is another process at the same address.
            fleet.idle(SETTLED).await?;
            let again = ask("Disaggregated", &format!("again-{moment}"));
            let again = baton_e2e::wait::until("it serves again", SETTLED, async || {
                again
                    .send(&fleet.api)
                    .await
                    .map_err(|error| format!("{error:#}"))
            })
            .await?;
            ensure!(again.output == expected, "{:?}", again.output);
        }
        fleet.idle(SETTLED).await?;
        fleet.end().await
    });
}

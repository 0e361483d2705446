//! A process that dies or freezes under a request: the answer is right all the same, the record says what happened, and nothing
//! is held afterwards.

#[path = "kills/prefill.rs"]
mod prefill;

use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use baton_e2e::disaster::{Frozen, Killed, SETTLED};
use baton_e2e::fleet::{Fleet, Started};
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::{Ask, Completion, Output};
use baton_e2e::record::Record;
use baton_e2e::{scenario, told, wait};
use baton_protocol::lifecycle::State;
use futures::future::{Either, select};
use serde_json::Value;

/// A moment of a run that is under way comes within this.
const SEEN: Duration = Duration::from_secs(20);

/// The policy's total deadline.
const DEADLINE: Duration = Duration::from_secs(60);

/// Prompt tokens of one step of a simulated engine: a seventh of a second.
const STEP: u32 = 2048;
const STEPS: u32 = 11;
const PROMPT: u32 = STEPS * STEP;
/// Three seconds: time to strike while it lasts.
const OUTPUT: u32 = 300;

/// Runs in which a moment is waited for. A busy machine lets it pass in some, a fault in all.
const TRIES: usize = 5;

/// What moves KV between processes of one machine, where nothing else is asked for.
const SHM: &str = "Shm";
const TCP: &str = "Tcp";

/// Two of each, so that what one cannot finish another can. Hand-offs fail all the time here, and their link stays in use.
fn manifest(over: &str) -> Manifest {
    let timing = "prefillBaseMicroseconds: 1000, prefillPerTokenNanoseconds: 65000, prefillPerTokenPairPicoseconds: 0, \
                  decodeBaseMicroseconds: 10000, decodePerContextTokenPicoseconds: 0, seed: 1";
    let transports = if over == TCP {
        ", transports: [Tcp]"
    } else {
        ""
    };
    Manifest {
        engine: format!("{{type: Simulated, simulated: {{{timing}}}}}"),
        kv_pool: format!("{{blocks: 4096, leaseSeconds: 3{transports}}}"),
        prefill_replicas: 2,
        decode_replicas: 2,
        policy: "  timeouts: {prefillSeconds: 20, transferSeconds: 10, tokenSeconds: 10, totalSeconds: 60}\n  \
                 topology: {breaker: {failures: 1000}}\n"
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

/// What a worker answers that nobody disturbs and that computes everything itself.
async fn reference(fleet: &Fleet, ask: impl Fn(&'static str, &str) -> Ask) -> Result<Output> {
    let answer = in_time(fleet, &ask("Aggregated", "reference")).await?;
    // Whoever holds blocks from here on holds them for another request.
    fleet.idle(SETTLED).await?;
    Ok(answer.output)
}

/// The answer, which comes within the policy's total deadline.
async fn in_time(fleet: &Fleet, request: &Ask) -> Result<Completion> {
    let started = Instant::now();
    let answer = request.send(&fleet.api).await?;
    let took = started.elapsed();
    ensure!(took < DEADLINE, "answered after {took:?}");
    Ok(answer)
}

fn holds_blocks(worker: &Value) -> bool {
    let held = |name: &str| worker["blocks"][name].as_u64().unwrap_or(0) > 0;
    held("active") || held("leased")
}

/// That a run's KV went no other way. Of a run that was disturbed the last attempt counts, which may have moved nothing.
fn moved_over(record: &Record, over: &str) -> Result<()> {
    let transport = &record.0["actual"]["transport"];
    ensure!(
        *transport == over || (transport.is_null() && record.bytes() == 0),
        "moved over {transport}, not {over}: {}",
        record.0
    );
    Ok(())
}

/// What comes of a run, and of a strike that waits for its moment while it lasts: nothing where the run was over before.
async fn meanwhile<A, T>(
    run: impl Future<Output = A>,
    strike: impl Future<Output = Result<T>>,
) -> Result<(A, Option<T>)> {
    match select(pin!(run), pin!(strike)).await {
        Either::Left((over, _)) => Ok((over, None)),
        Either::Right((struck, run)) => {
            let struck = struck?;
            Ok((run.await, Some(struck)))
        }
    }
}

/// Tries, each time in a run of another salt, until the moment is met that a try is for.
async fn met<T>(
    salt: &str,
    mut attempt: impl AsyncFnMut(String) -> Result<Option<T>>,
) -> Result<T> {
    for number in 0..TRIES {
        if let Some(met) = attempt(format!("{salt}-{number}")).await? {
            return Ok(met);
        }
        told(&format!("{salt}: the moment was missed"));
    }
    bail!("{salt}: the moment was missed in {TRIES} runs")
}

/// Waits until a prefill worker has computed as many steps of the prompt as are wanted and is at the next one; also how many.
async fn computed(fleet: &Fleet, wanted: impl Fn(u32) -> bool) -> Result<(Started, u32)> {
    let processes = fleet.processes()?.into_iter();
    let workers: Vec<Started> = processes.filter(|one| one.role == "prefill").collect();
    wait::until("a prefill worker has computed enough", SEEN, async || {
        let mut seen = Vec::new();
        for worker in &workers {
            let metrics = fleet.worker_metrics(&worker.name).await;
            let left = metrics
                .and_then(|metrics| {
                    let left = metrics.sum("baton_queued_tokens", &[]);
                    left.context("baton_queued_tokens is absent")
                })
                .map_err(|error| format!("{}: {error:#}", worker.name))?;
            if let Some(steps) = steps_computed(left).filter(|steps| wanted(*steps)) {
                return Ok((worker.clone(), steps));
            }
            seen.push(left);
        }
        Err(format!("{seen:?} tokens are left"))
    })
    .await
}

/// Of a prompt of which so many tokens are left; nothing where none is.
fn steps_computed(left: f64) -> Option<u32> {
    let some = left > 0.0;
    let fits = |steps: &u32| left <= f64::from((STEPS - steps) * STEP);
    (0..STEPS).rev().find(fits).filter(|_| some)
}

/// Half of the steps or more: there are as many left to strike in.
fn half(steps: u32) -> bool {
    steps >= STEPS / 2
}

/// Freezes the worker that reads what a prefill worker computes, while it does: what is published from now on waits for its reader.
async fn frozen_reader(fleet: &Fleet) -> Result<(Started, Frozen)> {
    let (prefill, _) = computed(fleet, half).await?;
    let decode = fleet
        .worker_that("a decode worker reads", "decode", holds_blocks)
        .await?;
    Ok((prefill, fleet.freeze(decode)))
}

/// How often runs have been in a state since the router has started.
async fn runs_in(fleet: &Fleet, state: State) -> Result<f64> {
    let metrics = fleet.metrics().await?;
    Ok(metrics.count("baton_run_states_total", &[("state", state.word())]))
}

/// Waits until that is more than before.
async fn one_more(fleet: &Fleet, state: State, before: f64) -> Result<()> {
    wait::until(&format!("a run is in {state}"), SEEN, async || {
        let now = runs_in(fleet, state).await;
        let now = now.map_err(|error| format!("{error:#}"))?;
        (now > before)
            .then_some(())
            .ok_or_else(|| format!("{now} were, {before} before"))
    })
    .await
}

#[test]
fn the_prefill_worker_is_killed_at_ten_moments() {
    scenario(prefill::ten_moments());
}

#[test]
fn the_prefill_worker_is_killed_at_five_moments_over_tcp() {
    scenario(prefill::five_moments_over_tcp());
}

/// When the decode worker is killed or frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// It holds blocks, and has sent nothing.
    BeforeItsFirstToken,
    /// The client has read some tokens.
    WhileItStreams,
}

#[test]
fn the_decode_worker_is_killed_before_and_after_its_first_token() {
    scenario(async {
        let fleet = Fleet::of(&manifest(SHM)).await?;
        let expected = reference(&fleet, ask).await?;
        for mode in ["Aggregated", "Disaggregated"] {
            for when in [When::BeforeItsFirstToken, When::WhileItStreams] {
                met(&format!("{mode}-{when:?}"), async |salt| {
                    let kill = async |process| fleet.kill(process).await;
                    let (killed, struck) =
                        under_a_stream(&fleet, mode, &salt, when, &expected, kill).await?;
                    fleet.back(&killed).await?;
                    fleet.idle(SETTLED).await?;
                    let Some(record) = struck else {
                        return Ok(None);
                    };
                    // Nor had the prefill worker sent one: a dead worker is missed before the prompt is computed, if it dies early.
                    let streamed = record.first_attempt()?.contains(&State::Streaming);
                    Ok((streamed == (when == When::WhileItStreams)).then_some(()))
                })
                .await?;
            }
        }
        fleet.end().await
    });
}

#[test]
fn a_frozen_worker_delays_a_request_and_does_not_hold_it() {
    scenario(async {
        let fleet = Fleet::of(&manifest(SHM)).await?;
        let expected = reference(&fleet, ask).await?;

        for when in [When::BeforeItsFirstToken, When::WhileItStreams] {
            met(&format!("decode-frozen-{when:?}"), async |salt| {
                let freeze = async |process| Ok(fleet.freeze(process));
                let mode = "Disaggregated";
                let (frozen, struck) =
                    under_a_stream(&fleet, mode, &salt, when, &expected, freeze).await?;
                drop(frozen);
                fleet.idle(SETTLED).await?;
                struck.map(|record| moved_over(&record, SHM)).transpose()
            })
            .await?;
        }
        under_a_frozen_prefill(&fleet, SHM, &expected).await?;
        fleet.end().await
    });
}

#[test]
fn a_prefill_worker_that_freezes_over_tcp_delays_a_request_and_does_not_hold_it() {
    scenario(async {
        let fleet = Fleet::of(&manifest(TCP)).await?;
        let expected = reference(&fleet, ask).await?;
        under_a_frozen_prefill(&fleet, TCP, &expected).await?;
        fleet.end().await
    });
}

/// The prefill worker freezes while its KV is being read.
async fn under_a_frozen_prefill(fleet: &Fleet, over: &str, expected: &Output) -> Result<()> {
    met("prefill-frozen", async |salt| {
        let request = ask("Disaggregated", &salt);
        let freeze = async {
            let (prefill, _) = computed(fleet, half).await?;
            Ok((prefill.clone(), fleet.freeze(prefill)))
        };
        let (answer, frozen) = meanwhile(in_time(fleet, &request), freeze).await?;
        let answer = answer.context("with a frozen prefill worker")?;
        ensure!(answer.output == *expected, "{:?}", answer.output);
        let record = Record::of(&fleet.admin, &answer.run).await?;
        record.check_order()?;
        moved_over(&record, over)?;
        let begun = record.first_attempt()?.contains(&State::KvTransferStarted);
        let missed = frozen.is_none() || record.attempts()? == 1 || !begun;
        if let Some((prefill, frozen)) = frozen {
            if !missed {
                fleet.lost(&record, &prefill)?;
            }
            // Awake again, it finds that nobody waits for what it holds.
            drop(frozen);
        }
        fleet.idle(SETTLED).await?;
        Ok((!missed).then_some(()))
    })
    .await
}

/// Streams a request, strikes its decode worker at a moment, and checks that the whole text is as expected. The record, if the strike did
/// not come too late for that moment.
async fn under_a_stream<T>(
    fleet: &Fleet,
    mode: &'static str,
    salt: &str,
    when: When,
    expected: &Output,
    strike: impl AsyncFnOnce(Started) -> Result<T>,
) -> Result<(T, Option<Record>)> {
    let started = Instant::now();
    let request = ask(mode, salt);
    let mut text = String::new();
    let (mut stream, worker, struck) = match when {
        When::BeforeItsFirstToken => {
            let early = async {
                let decode = fleet
                    .worker_that("a decode worker works", "decode", holds_blocks)
                    .await?;
                Ok::<_, anyhow::Error>((decode.clone(), strike(decode).await?))
            };
            let (stream, struck) = tokio::join!(request.stream(&fleet.api), early);
            let (worker, struck) = struck?;
            (stream?, worker, struck)
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
            let struck = strike(decode.clone()).await?;
            (stream, decode, struck)
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
    let states = record.first_attempt()?;
    let has = |state| states.contains(&state);
    let missed = match when {
        When::BeforeItsFirstToken => has(State::DecodeStarted),
        When::WhileItStreams => record.attempts()? == 1,
    };
    if missed {
        return Ok((struck, None));
    }
    fleet
        .lost(&record, &worker)
        .with_context(|| salt.to_owned())?;
    let streamed = has(State::DecodeStarted) && has(State::Streaming);
    ensure!(
        streamed || when == When::BeforeItsFirstToken,
        "{salt}: struck at {states:?}"
    );
    Ok((struck, Some(record)))
}

/// Kills the router when a run is computed, handed over or decoded.
async fn router_killed_at(fleet: &Fleet, moment: &str) -> Result<Killed> {
    let decoding = runs_in(fleet, State::DecodeStarted).await?;
    let frozen = match moment {
        "computed" => {
            computed(fleet, half).await?;
            None
        }
        "handed-over" => {
            let (_, frozen) = frozen_reader(fleet).await?;
            let waits = |worker: &Value| worker["blocks"]["leased"].as_u64() > Some(0);
            fleet
                .worker_that("a lease waits for its reader", "prefill", waits)
                .await?;
            Some(frozen)
        }
        _ => {
            one_more(fleet, State::DecodeStarted, decoding).await?;
            None
        }
    };
    let killed = fleet.kill(fleet.first("router")?).await?;
    drop(frozen);
    Ok(killed)
}

#[test]
fn a_router_that_is_killed_leaves_no_lease_behind() {
    scenario(async {
        let fleet = Fleet::of(&manifest(SHM)).await?;
        let expected = reference(&fleet, ask).await?;
        for moment in ["computed", "handed-over", "decoded"] {
            let killed = met(&format!("router-{moment}"), async |salt| {
                let request = ask("Disaggregated", &salt);
                let run = request.send(&fleet.api);
                match meanwhile(run, router_killed_at(&fleet, moment)).await? {
                    (Err(_), Some(killed)) => Ok(Some(killed)),
                    // Whole just before.
                    (Ok(_), Some(killed)) => {
                        fleet.back(&killed).await?;
                        fleet.idle(SETTLED).await?;
                        Ok(None)
                    }
                    (answer, None) => {
                        answer.context("before the router was killed")?;
                        fleet.idle(SETTLED).await?;
                        Ok(None)
                    }
                }
            })
            .await?;
            fleet.back(&killed).await?;
            // The new router is another process at the same address.
            fleet.idle(SETTLED).await?;
            let again = ask("Disaggregated", &format!("again-{moment}"));
            let again = wait::until("it serves again", SETTLED, async || {
                let answer = in_time(&fleet, &again).await;
                answer.map_err(|error| format!("{error:#}"))
            })
            .await?;
            ensure!(again.output == expected, "{:?}", again.output);
        }
        fleet.idle(SETTLED).await?;
        fleet.end().await
    });
}

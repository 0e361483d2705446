//! A thousand requests of random length, one in five given up at a random moment, a worker killed every ten seconds; then, with
//! nobody killed, some thousands more. Whether memory stays flat, in both. Real arithmetic over the tiny model, eight clients at a time.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::disaster::SETTLED;
use baton_e2e::fleet::Fleet;
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::{Ask, Output};
use baton_e2e::process::resident_bytes;
use baton_e2e::{scenario, told, wait};
use baton_placement::rng::Rng;
use futures::stream::FuturesUnordered;
use futures::{StreamExt, stream};
use serde_json::Value;
use tokio::time::Instant;

const REQUESTS: usize = 1_000;
const CLIENTS: usize = 8;

/// In the order in which they are killed.
const WORKERS: [&str; 4] = ["prefill-0", "decode-0", "prefill-1", "decode-1"];

/// From one kill to the next, however long the killed one takes to be back.
const KILL_EVERY: Duration = Duration::from_secs(10);

/// Nothing is answered later than this: the policy's total deadline and a little for a busy machine.
const STUCK: Duration = Duration::from_secs(60);

/// Longest pause of a client before its next request, milliseconds. With it the thousand last for 50 seconds at least, which is four
/// kills, and for a minute where a run takes a tenth of a second.
const LONGEST_THOUGHT: usize = 500;

/// Runs whose duration is measured before anybody leaves.
const MEASURED: usize = 100;
/// Runs by which a client that leaves judges how long the next one takes: few, for a machine becomes faster and slower meanwhile.
const RECENT: usize = 32;
/// Timers count milliseconds: whoever leaves asks for so many tokens at least that there are many to leave in.
const LEAVERS_ASK: usize = 96;
/// Nobody asks for so many.
const TOO_MANY: usize = 145;

/// Growth over a thousand requests from which on a process is not called flat: 4 KiB a request, as much as its decision record. See
/// [`growth`].
const FLAT: f64 = 4.0 * 1024.0 * 1024.0;
/// Requests from one look at a process's memory to the next that counts. A slow machine has ended fewer when it is looked at, and an
/// allocator's habits would outweigh what a request leaves.
const STRETCH: usize = 200;

/// Thousands of requests that do not count: heaps, the router's ring of the last 1,024 records and the workers' blocks fill up.
const WARM: usize = 2;
/// Thousands that do.
const ROUNDS: usize = 3;

/// One request and what its client does.
#[derive(Clone, Debug)]
struct Plan {
    ask: Ask,
    /// The client goes away after this part of what a run takes; see [`Pace`].
    leaves: Option<f64>,
    thinks: Duration,
}

/// What became of a request.
#[derive(Debug)]
enum End {
    Answered(Box<Output>),
    Failed(String),
    GivenUp,
}

/// So many requests had ended when a process had so many bytes.
type Sample = (usize, u64);

fn plan(round: usize, index: usize) -> Plan {
    let number = round * REQUESTS + index;
    let mut random = Rng::new(number as u64);
    // Half of them begin like others do.
    let shared = random.below(8);
    let common = if shared < 4 { 200 } else { 0 };
    let own = 1 + random.below(400);
    let token = |seed: usize, place: usize| (seed * 31 + place * 11) % 200 + 3;
    let prompt: Vec<u32> = (0..common)
        .map(|place| token(shared, place))
        .chain((0..own).map(|place| token(100 + number, place)))
        .filter_map(|token| u32::try_from(token).ok())
        .collect();
    let leaves = (random.below(5) == 0).then(|| random.unit());
    let fewest = if leaves.is_some() { LEAVERS_ASK } else { 1 };
    let output = u32::try_from(fewest + random.below(TOO_MANY - fewest)).unwrap_or(1);
    let mode = ["Aggregated", "Disaggregated", "Conditional"][random.below(3)];
    Plan {
        ask: Ask::ids("tiny", &prompt, output)
            .with("ignore_eos", true)
            .mode(mode),
        leaves,
        thinks: Duration::from_millis(random.below(LONGEST_THOUGHT) as u64),
    }
}

fn plans(round: usize) -> Vec<Plan> {
    (0..REQUESTS).map(|index| plan(round, index)).collect()
}

/// How long the last runs took that somebody might have left, and nobody did.
#[derive(Debug, Default)]
struct Pace(RefCell<VecDeque<Duration>>);

impl Pace {
    fn note(&self, lasted: Duration) {
        let mut recent = self.0.borrow_mut();
        if recent.len() == RECENT {
            recent.pop_front();
        }
        recent.push_back(lasted);
    }

    /// Three of four last longer, so that most of those who leave within it do so before their run has ended.
    fn quarter(&self) -> Result<Duration> {
        let mut recent: Vec<Duration> = self.0.borrow().iter().copied().collect();
        recent.sort_unstable();
        let quarter = recent.get(recent.len() / 4).context("nothing measured")?;
        Ok(*quarter)
    }
}

async fn send(fleet: &Fleet, plan: &Plan, pace: &Pace) -> Result<End> {
    let run = pace.quarter()?;
    let began = Instant::now();
    let answer = tokio::time::timeout(STUCK, plan.ask.send(&fleet.api));
    let gone = async {
        match plan.leaves {
            Some(part) => tokio::time::sleep(run.mul_f64(part)).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        answer = answer => match answer {
            Ok(Ok(answer)) => {
                // Of those who would leave, only the fast runs end.
                let like_leavers = answer.output.output_tokens >= LEAVERS_ASK as u64;
                if plan.leaves.is_none() && like_leavers {
                    pace.note(began.elapsed());
                }
                Ok(End::Answered(Box::new(answer.output)))
            }
            Ok(Err(error)) => Ok(End::Failed(format!("{error:#}"))),
            Err(_) => anyhow::bail!("stuck for {STUCK:?}: {plan:?}"),
        },
        () = gone => Ok(End::GivenUp),
    }
}

/// All plans, eight at a time.
async fn storm(
    fleet: &Fleet,
    plans: &[Plan],
    pace: &Pace,
    thinking: bool,
    ended: &Cell<usize>,
) -> Result<Vec<End>> {
    stream::iter(plans)
        .map(async |plan| {
            if thinking {
                tokio::time::sleep(plan.thinks).await;
            }
            let end = send(fleet, plan, pace).await;
            ended.set(ended.get() + 1);
            end
        })
        .buffered(CLIENTS)
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .collect()
}

/// How long runs last that somebody will leave. Whoever is measured stays.
async fn measured(fleet: &Fleet, thinking: bool) -> Result<Pace> {
    let pace = Pace::default();
    let plans = plans(0).into_iter().filter(|plan| plan.leaves.is_some());
    let plans: Vec<Plan> = plans.take(MEASURED).collect();
    let ended: Vec<Result<()>> = stream::iter(&plans)
        .map(async |plan| {
            if thinking {
                tokio::time::sleep(plan.thinks).await;
            }
            let began = Instant::now();
            plan.ask.send(&fleet.api).await?;
            pace.note(began.elapsed());
            Ok(())
        })
        .buffered(CLIENTS)
        .collect()
        .await;
    ended.into_iter().collect::<Result<()>>()?;
    Ok(pace)
}

/// What a worker answers to each plan that computes everything itself.
async fn references(fleet: &Fleet, plans: &[Plan]) -> Result<Vec<Output>> {
    stream::iter(plans)
        .map(async |plan| {
            let reference = plan.ask.clone().mode("Aggregated");
            let reference = reference.with("cache_salt", "reference");
            let answer = reference.send(&fleet.api).await;
            Ok(answer.context("the aggregated answer")?.output)
        })
        .buffered(CLIENTS)
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .collect()
}

/// How many answers there are; each is its reference.
fn compare(plans: &[Plan], ends: &[End], references: &[Output]) -> Result<usize> {
    let mut compared = 0;
    for ((plan, end), reference) in plans.iter().zip(ends).zip(references) {
        if let End::Answered(output) = end {
            ensure!(
                **output == *reference,
                "another answer to {:?}: {output:?} instead of {reference:?}",
                plan.ask
            );
            compared += 1;
        }
    }
    Ok(compared)
}

/// What is seen while workers are killed.
#[derive(Debug, Default)]
struct Killing {
    killed: Vec<&'static str>,
    /// Of the router, just before each kill.
    samples: Vec<Sample>,
}

/// Kills one worker after the other, for ever. That each comes back is watched aside.
async fn kill_workers(fleet: &Fleet, ended: &Cell<usize>, killing: &mut Killing) -> Result<()> {
    let router = fleet.first("router")?.pid;
    let mut clock = tokio::time::interval_at(Instant::now() + KILL_EVERY, KILL_EVERY);
    let mut returns = FuturesUnordered::new();
    loop {
        tokio::select! {
            _ = clock.tick() => {
                killing.samples.push((ended.get(), resident_bytes(router)?));
                let name = WORKERS[killing.killed.len() % WORKERS.len()];
                let killed = fleet.kill(fleet.named(name)?).await?;
                killing.killed.push(name);
                returns.push(async move { fleet.back(&killed).await });
            }
            Some(back) = returns.next() => {
                back?;
            }
        }
    }
}

/// Runs that their clients left, by the state that they had come to.
fn left(fleet: &Fleet) -> Result<BTreeMap<String, usize>> {
    let mut left = BTreeMap::new();
    for entry in std::fs::read_dir(fleet.state().join("decisions"))? {
        for line in std::fs::read_to_string(entry?.path())?.lines() {
            let record: Value = serde_json::from_str(line)?;
            if record["outcome"]["status"] != "Cancelled" {
                continue;
            }
            let states = record["states"].as_array().context("no states")?;
            let states = states.iter().filter_map(|entry| entry["state"].as_str());
            let last = states.rev().find(|state| *state != "cancelled");
            *left.entry(last.unwrap_or("none").to_owned()).or_default() += 1;
        }
    }
    Ok(left)
}

/// Bytes that a process grows by in a thousand requests: the median of what it grew by from sample to sample, of two the lower one.
///
/// Allocators take memory in large pieces, at once, and give some back at any time, so that a process that leaks nothing is some
/// megabytes larger after one stretch and not after the next. A leak makes it larger in each. So what counts is what more than half of
/// the stretches show, however much a single one does.
fn growth(samples: &[Sample]) -> Result<f64> {
    let mut stretches: Vec<Sample> = Vec::new();
    for sample in samples {
        let is_long = |last: &Sample| sample.0 >= last.0 + STRETCH;
        if stretches.last().is_none_or(is_long) {
            stretches.push(*sample);
        }
    }
    let mut growths: Vec<f64> = stretches
        .windows(2)
        .map(|pair| {
            let requests = pair[1].0.saturating_sub(pair[0].0).max(1);
            (pair[1].1 as f64 - pair[0].1 as f64) * 1_000.0 / requests as f64
        })
        .collect();
    growths.sort_by(f64::total_cmp);
    let lower = growths.len().checked_sub(1).context("one sample")? / 2;
    Ok(growths[lower])
}

/// # Errors
/// It is not.
fn is_flat(name: &str, samples: &[Sample]) -> Result<()> {
    let grown = growth(samples)?;
    let shown = samples.iter().map(|(ended, bytes)| {
        let kibibytes = bytes >> 10;
        format!("{kibibytes} KiB after {ended}")
    });
    let shown = shown.collect::<Vec<_>>().join(", ");
    let line = format!("{name}: {:.0} KiB a thousand: {shown}", grown / 1024.0);
    told(&line);
    ensure!(grown < FLAT, "memory is not flat: {line}");
    Ok(())
}

fn manifest() -> Manifest {
    Manifest {
        prefill_replicas: 2,
        decode_replicas: 2,
        policy: "  timeouts: {totalSeconds: 55}\n".to_owned(),
        ..Manifest::tiny()
    }
}

#[test]
fn a_thousand_requests_while_workers_are_killed() {
    scenario(async {
        let fleet = Fleet::of(&manifest()).await?;
        let plans = plans(1);
        // First: they warm the router, whose memory is judged, and fill its ring of records.
        let references = references(&fleet, &plans).await?;
        let pace = measured(&fleet, true).await?;
        let ended = Cell::new(REQUESTS + MEASURED);
        let mut killing = Killing::default();
        let ends = tokio::select! {
            ends = storm(&fleet, &plans, &pace, true, &ended) => ends?,
            killing = kill_workers(&fleet, &ended, &mut killing) => {
                killing?;
                anyhow::bail!("killing ended")
            }
        };
        let kills = killing.killed.len();
        // Each worker once, in their order.
        ensure!(
            kills >= WORKERS.len(),
            "{kills} kills: the storm was too short"
        );
        for name in WORKERS {
            wait::until("every worker is back", SETTLED * 2, async || {
                fleet
                    .named(name)
                    .map(|_| ())
                    .map_err(|error| error.to_string())
            })
            .await?;
        }
        fleet.idle(SETTLED * 2).await?;

        let count = |those: fn(&End) -> bool| ends.iter().filter(|end| those(end)).count();
        let given_up = count(|end| matches!(end, End::GivenUp));
        let leavers = plans.iter().filter(|plan| plan.leaves.is_some()).count();
        let failed: Vec<&String> = ends
            .iter()
            .filter_map(|end| match end {
                End::Failed(why) => Some(why),
                _ => None,
            })
            .collect();
        let waited_for = ends.len() - given_up;
        ensure!(
            failed.len() * 20 < waited_for,
            "{} of {waited_for} failed: {:?}",
            failed.len(),
            failed.iter().take(5).collect::<Vec<_>>()
        );
        let compared = compare(&plans, &ends, &references)?;
        let left = left(&fleet)?;
        told(&format!(
            "{REQUESTS} requests, {given_up} of {leavers} given up within {:?} at the end, last in {left:?}; {kills} kills, \
             {} failed, {compared} equal to the aggregated answer",
            pace.quarter()?,
            failed.len()
        ));
        // Some are answered before their client would have gone.
        ensure!(
            given_up * 4 >= leavers * 3 && compared > REQUESTS / 2,
            "not the storm that this is meant to be"
        );
        ensure!(left.len() >= 3, "all were left in the same states");
        let router = fleet.first("router")?.pid;
        killing.samples.push((ended.get(), resident_bytes(router)?));
        is_flat("router", &killing.samples)?;
        fleet.end().await
    });
}

#[test]
fn memory_is_flat_over_three_thousand_requests() {
    scenario(async {
        let fleet = Fleet::of(&manifest()).await?;
        let pace = measured(&fleet, false).await?;
        let ended = Cell::new(0);
        let mut samples: BTreeMap<String, Vec<Sample>> = BTreeMap::new();
        for round in 1..=WARM + ROUNDS {
            for end in storm(&fleet, &plans(round + 1), &pace, false, &ended).await? {
                ensure!(!matches!(end, End::Failed(_)), "nobody was killed: {end:?}");
            }
            fleet.idle(SETTLED).await?;
            if round >= WARM {
                for process in fleet.processes()? {
                    let sample = (ended.get(), resident_bytes(process.pid)?);
                    samples.entry(process.name).or_default().push(sample);
                }
            }
        }
        for (name, samples) in &samples {
            ensure!(samples.len() == ROUNDS + 1, "{name} is not what it was");
            is_flat(name, samples)?;
        }
        fleet.end().await
    });
}

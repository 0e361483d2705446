//! A thousand requests of random length, one in five given up at a random moment, a worker killed every ten seconds; then, with
//! nobody killed, whether memory stays flat. Real arithmetic over the tiny model, eight clients at a time.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::{Ask, Output};
use baton_e2e::scenario;
use baton_placement::rng::Rng;
use futures::{StreamExt, stream};

const REQUESTS: usize = 1_000;
const CLIENTS: usize = 8;

/// Between two kills.
const KILL_EVERY: Duration = Duration::from_secs(10);

/// Nothing is answered later than this: the policy's total deadline and a little for a busy machine.
const STUCK: Duration = Duration::from_secs(60);

/// Leases last three seconds, a dead connection is noticed within five.
const SETTLED: Duration = Duration::from_secs(15);

/// Longest pause of a client before its next request: the thousand last for several kills.
const LONGEST_THOUGHT: usize = 500;

/// Growth of one process over a thousand requests that is not called flat. Allocators keep what they once had: the first thousand
/// are not counted.
const FLAT: u64 = 24 << 20;

/// One request and what its client does.
#[derive(Clone, Debug)]
struct Plan {
    ask: Ask,
    /// The client goes away after this many milliseconds.
    gone_after: Option<u64>,
    thinks: Duration,
}

/// What became of a request that its client waited for.
#[derive(Debug)]
enum End {
    Answered(Box<Output>),
    Failed(String),
    GivenUp,
}

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
    let output = u32::try_from(1 + random.below(48)).unwrap_or(1);
    let mode = ["Aggregated", "Disaggregated", "Conditional"][random.below(3)];
    Plan {
        ask: Ask::ids("tiny", &prompt, output)
            .with("ignore_eos", true)
            .mode(mode),
        gone_after: (random.below(5) == 0).then(|| random.below(30) as u64),
        thinks: Duration::from_millis(random.below(LONGEST_THOUGHT) as u64),
    }
}

async fn send(fleet: &Fleet, plan: &Plan) -> Result<End> {
    let answer = tokio::time::timeout(STUCK, plan.ask.send(&fleet.api));
    let gone = async {
        match plan.gone_after {
            Some(after) => tokio::time::sleep(Duration::from_millis(after)).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        answer = answer => match answer {
            Ok(Ok(answer)) => Ok(End::Answered(Box::new(answer.output))),
            Ok(Err(error)) => Ok(End::Failed(format!("{error:#}"))),
            Err(_) => anyhow::bail!("stuck for {STUCK:?}: {plan:?}"),
        },
        () = gone => Ok(End::GivenUp),
    }
}

/// All plans, eight at a time.
async fn storm(fleet: &Fleet, plans: &[Plan], thinking: bool) -> Result<Vec<End>> {
    stream::iter(plans)
        .map(async |plan| {
            if thinking {
                tokio::time::sleep(plan.thinks).await;
            }
            send(fleet, plan).await
        })
        .buffered(CLIENTS)
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .collect()
}

/// Kills one worker after the other, for ever.
async fn kill_workers(fleet: &Fleet, kills: &mut u32) -> Result<()> {
    let names = ["prefill-0", "decode-0", "prefill-1", "decode-1"];
    for name in names.iter().cycle() {
        tokio::time::sleep(KILL_EVERY).await;
        let killed = fleet.kill(fleet.named(name)?).await?;
        *kills += 1;
        fleet.back(&killed).await?;
    }
    Ok(())
}

/// Every completed answer is that of a worker that computed everything itself.
async fn compare(fleet: &Fleet, plans: &[Plan], ends: &[End]) -> Result<usize> {
    let completed: Vec<(&Plan, &Output)> = plans
        .iter()
        .zip(ends)
        .filter_map(|(plan, end)| match end {
            End::Answered(output) => Some((plan, &**output)),
            _ => None,
        })
        .collect();
    let references: Vec<Result<Output>> = stream::iter(&completed)
        .map(async |(plan, _)| {
            let reference = plan.ask.clone().mode("Aggregated");
            let reference = reference.with("cache_salt", "reference");
            Ok(reference.send(&fleet.api).await?.output)
        })
        .buffered(CLIENTS)
        .collect()
        .await;
    for ((plan, output), reference) in completed.iter().zip(references) {
        let reference = reference.context("the aggregated answer")?;
        ensure!(
            **output == reference,
            "another answer to {:?}: {output:?} instead of {reference:?}",
            plan.ask
        );
    }
    Ok(completed.len())
}

/// Resident bytes of each process, by name.
fn memory(fleet: &Fleet) -> Result<BTreeMap<String, u64>> {
    fleet
        .processes()?
        .into_iter()
        .map(|process| {
            let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid))?;
            let kilobytes = status
                .lines()
                .find_map(|line| line.strip_prefix("VmRSS:"))
                .and_then(|text| text.trim().strip_suffix(" kB"))
                .context("no VmRSS")?;
            Ok((process.name, kilobytes.trim().parse::<u64>()? * 1024))
        })
        .collect()
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
#[allow(
    clippy::print_stdout,
    reason = "what was seen, for a reader of the log"
)]
fn a_thousand_requests_while_workers_are_killed() {
    scenario(async {
        let fleet = Fleet::of(&manifest()).await?;
        let plans: Vec<Plan> = (0..REQUESTS).map(|index| plan(1, index)).collect();
        let mut kills = 0;
        let ends = tokio::select! {
            ends = storm(&fleet, &plans, true) => ends?,
            killing = kill_workers(&fleet, &mut kills) => {
                killing?;
                anyhow::bail!("killing ended")
            }
        };
        ensure!(kills >= 2, "{kills} kills: the storm was too short");
        for name in ["prefill-0", "decode-0", "prefill-1", "decode-1"] {
            baton_e2e::wait::until("every worker is back", SETTLED * 2, async || {
                fleet
                    .named(name)
                    .map(|_| ())
                    .map_err(|error| error.to_string())
            })
            .await?;
        }
        fleet.idle(SETTLED * 2).await?;

        let given_up = ends
            .iter()
            .filter(|end| matches!(end, End::GivenUp))
            .count();
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
        let compared = compare(&fleet, &plans, &ends).await?;
        // One in five means to; some of them are answered first.
        ensure!(
            given_up >= 20 && compared > REQUESTS / 2,
            "{given_up} given up, {compared} compared: not the storm that this is meant to be"
        );
        println!(
            "{REQUESTS} requests, {given_up} given up, {kills} kills, {} failed, {compared} equal to the aggregated answer",
            failed.len()
        );
        fleet.idle(SETTLED).await?;
        fleet.end().await
    });
}

#[test]
#[allow(
    clippy::print_stdout,
    reason = "what was seen, for a reader of the log"
)]
fn memory_is_flat_over_a_thousand_requests() {
    scenario(async {
        let fleet = Fleet::of(&manifest()).await?;
        let mut before = BTreeMap::new();
        for round in 2..4 {
            before = memory(&fleet)?;
            let plans: Vec<Plan> = (0..REQUESTS).map(|index| plan(round, index)).collect();
            for end in storm(&fleet, &plans, false).await? {
                ensure!(!matches!(end, End::Failed(_)), "nobody was killed: {end:?}");
            }
            fleet.idle(SETTLED).await?;
        }
        let after = memory(&fleet)?;
        for (name, now) in &after {
            let then = before.get(name).with_context(|| format!("{name} is new"))?;
            println!(
                "{name}: {} MiB, {} MiB a thousand requests before",
                now >> 20,
                then >> 20
            );
            ensure!(
                now.saturating_sub(*then) < FLAT,
                "{name} grew from {then} to {now} bytes in a thousand requests"
            );
        }
        fleet.end().await
    });
}

//! `--tour`: three requests that show how the place of a prefill is decided.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use baton_placement::policy::Policy;
use serde_json::Value;
use tokio::task::JoinSet;

use super::prompts;
use super::traffic::{Ask, Generating, Traffic};
use crate::explain::sentence;
use crate::terminal::{line, note};

/// Sentences of the long prompt: some hundreds of tokens.
const LONG: usize = 16;
/// Tokens of each shown answer.
const ANSWER: u32 = 24;
/// Tokens that a decode worker is kept busy with.
const BUSY: u32 = 512;
/// Requests that may generate on each decode worker, on average.
const LAYERS: usize = 4;
/// All decode workers generate within this, or the tour gives up.
const BUSY_WAIT: Duration = Duration::from_secs(120);

/// Shows a short and a long request on idle workers, and the long one again while every decode worker generates, for the
/// first policy.
pub(crate) async fn tour(traffic: &Traffic, policies: &[Policy]) -> anyhow::Result<()> {
    let policy = policies
        .first()
        .context("there is a policy where there is a fleet")?;
    let long = prompts::long(LONG);
    let ask = |prompt, salt| Ask {
        model: policy.model.as_str(),
        prompt,
        mode: None,
        salt,
        max_tokens: ANSWER,
    };

    idle(traffic).await?;
    show(
        traffic,
        "a short prompt, workers idle",
        ask(prompts::SHORT, "tour-1"),
    )
    .await?;
    idle(traffic).await?;
    show(traffic, "a long prompt, workers idle", ask(&long, "tour-2")).await?;

    note("tour: giving every decode worker something to generate");
    let busy = keep_busy(traffic, policy).await?;
    // Another salt: what the second request left in the caches is of no use to this one.
    show(
        traffic,
        "the long prompt again, every decode worker generating",
        ask(&long, "tour-3"),
    )
    .await?;
    drop(busy);
    idle(traffic).await
}

async fn show(traffic: &Traffic, title: &str, ask: Ask<'_>) -> anyhow::Result<()> {
    let answered = traffic.ask(ask).await?;
    let record = &answered.record;
    line(&format!(
        "{title} ({} tokens), run {}",
        record.input.tokens, record.run
    ))?;
    line(&format!("  {}", sentence(record)))?;
    line(&format!(
        "  answer: {}",
        answered
            .text
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    ))
}

/// Requests that generate, until every decode worker has one. Dropping the set cancels them.
async fn keep_busy(
    traffic: &Traffic,
    policy: &Policy,
) -> anyhow::Result<JoinSet<anyhow::Result<()>>> {
    let started = Instant::now();
    let mut generating = JoinSet::new();
    let mut number = 0;
    loop {
        let view = traffic.fleet().await?;
        let all = decode_workers(&view, policy).count();
        let waiting: Vec<String> = decode_workers(&view, policy)
            .filter(|worker| worker["runningSequences"].as_u64() == Some(0))
            .map(|worker| worker["id"].as_str().unwrap_or_default().to_owned())
            .collect();
        if number > 0 && waiting.is_empty() {
            return Ok(generating);
        }
        if started.elapsed() > BUSY_WAIT {
            bail!(
                "decode workers {} did not begin to generate within {} s",
                waiting.join(", "),
                BUSY_WAIT.as_secs()
            );
        }
        while let Some(ended) = generating.try_join_next() {
            ended.context("a task of the tour ended")??;
        }
        // All at once: each goes whole to the worker with the least prefill queued, so a worker with none gets one.
        if generating.len() < all * LAYERS {
            let burst = (number..number + all).map(|number| background(traffic, policy, number));
            for one in futures::future::try_join_all(burst).await? {
                generating.spawn(one.drain());
            }
            number += all;
        }
        // Reports come every 50 ms.
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
}

async fn background(
    traffic: &Traffic,
    policy: &Policy,
    number: usize,
) -> anyhow::Result<Generating> {
    let (prompt, salt) = (prompts::busy(number), format!("tour-busy-{number}"));
    let ask = Ask {
        model: &policy.model,
        prompt: &prompt,
        mode: Some("Aggregated"),
        salt: &salt,
        max_tokens: BUSY,
    };
    traffic.generate(ask).await
}

fn decode_workers<'a>(view: &'a Value, policy: &'a Policy) -> impl Iterator<Item = &'a Value> {
    let in_pool = |worker: &&Value| {
        policy
            .decode_pools
            .iter()
            .any(|pool| worker["pool"] == pool.as_str())
    };
    view["workers"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(move |worker| in_pool(worker) && worker["state"] == "Ready")
}

/// Returns when no worker runs or queues anything.
async fn idle(traffic: &Traffic) -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        let view = traffic.fleet().await?;
        let busy = view["workers"]
            .as_array()
            .into_iter()
            .flatten()
            .any(|worker| {
                worker["runningSequences"].as_u64() != Some(0)
                    || worker["queuedTokens"].as_u64() != Some(0)
            });
        if !busy {
            return Ok(());
        }
        if started.elapsed() > BUSY_WAIT {
            bail!(
                "the workers did not become idle within {} s",
                BUSY_WAIT.as_secs()
            );
        }
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
}
